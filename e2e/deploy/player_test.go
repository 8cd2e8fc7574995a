package deploy

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"nodeproxy/e2e/cluster"
)

// player plays scheduler and kubelets for the pods of namespace kube-system, which the real controller of DaemonSets makes. The pods only seem to run.
type player struct{ cp *cluster.ControlPlane }

// round does once what scheduler and kubelets do all the time.
func (p *player) round(ctx context.Context) error {
	api := p.cp.Admin.CoreV1().Pods("kube-system")
	list, err := api.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range list.Items {
		pod := &list.Items[i]
		switch {
		case pod.DeletionTimestamp != nil:
			err = p.end(ctx, pod)
		case pod.Spec.NodeName == "":
			err = p.schedule(ctx, pod, list.Items)
		case !isReady(pod):
			err = p.bringUp(ctx, pod)
		}
		if err != nil {
			return fmt.Errorf("pod %s on node %s: %w", pod.Name, pod.Spec.NodeName, err)
		}
	}
	return nil
}

func isReady(pod *v1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == v1.PodReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}

func (p *player) end(ctx context.Context, pod *v1.Pod) error {
	now := int64(0)
	return p.cp.Admin.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
}

// schedule binds a pod to the node that the controller of DaemonSets made it for, unless it and a pod there must be apart.
func (p *player) schedule(ctx context.Context, pod *v1.Pod, all []v1.Pod) error {
	node := ""
	for _, term := range pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, f := range term.MatchFields {
			node = f.Values[0]
		}
	}
	for i := range all {
		other := &all[i]
		if other.Spec.NodeName == node && (apart(pod, other) || apart(other, pod)) {
			return nil // It stays Pending.
		}
	}
	err := p.cp.Admin.CoreV1().Pods(pod.Namespace).Bind(ctx,
		&v1.Binding{ObjectMeta: metav1.ObjectMeta{Name: pod.Name, UID: pod.UID}, Target: v1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{})
	if err == nil {
		for i := range all { // The next one sees it.
			if all[i].UID == pod.UID {
				all[i].Spec.NodeName = node
			}
		}
	}
	return err
}

// apart reports whether a pod must not be on the node of another one.
func apart(pod, other *v1.Pod) bool {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAntiAffinity == nil {
		return false
	}
	for _, term := range pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution {
		selector, err := metav1.LabelSelectorAsSelector(term.LabelSelector)
		if err == nil && selector.Matches(labels.Set(other.Labels)) {
			return true
		}
	}
	return false
}

// bringUp says that a pod runs and is ready.
func (p *player) bringUp(ctx context.Context, pod *v1.Pod) error {
	pod.Status.Phase = v1.PodRunning
	pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue, LastTransitionTime: metav1.Now()}}
	_, err := p.cp.Admin.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

// while plays until a command has ended, and returns its error.
func (p *player) while(ctx context.Context, command func() error) error {
	done := make(chan error, 1)
	go func() { done <- command() }()
	var last error
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		select {
		case err := <-done:
			if err != nil && last != nil {
				err = fmt.Errorf("%w; the last problem with pods: %w", err, last)
			}
			return err
		default:
		}
		last = p.round(ctx)
		if time.Since(begun) > patience {
			return fmt.Errorf("not done within %v; the last problem with pods: %w", patience, last)
		}
	}
}

// until plays until something holds.
func (p *player) until(ctx context.Context, holds func() error) error {
	return eventually(2*time.Minute, func() error {
		if err := p.round(ctx); err != nil {
			return err
		}
		return holds()
	})
}
