package deploy

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/e2e/cluster"
)

// player plays kubelets for the pods of namespace kube-system, which the real controller of DaemonSets makes and the real scheduler puts on
// nodes, and measures how long nodes are without. The pods only seem to run.
type player struct {
	cp *cluster.ControlPlane
	// kubelets says that real ones run: there is nothing to play.
	kubelets bool
	// bound is how long a node had no pod, which is a matter of the scheduler; running and ready are how long it had none that ran, or was ready.
	bound, running, ready absence
	// ending says of each pod that is to end since when; it takes endsWithin, in which the scheduler finds that the next one has to wait.
	ending map[types.UID]time.Time
}

const endsWithin = time.Second

// tooLong is what a gap is not by chance. Until a scheduler that overlooks the end of a pod tries again, it takes five minutes. One that
// does not has the next pod on the node within a second, and within some on a busy machine.
const tooLong = time.Minute

// absence is how long nodes are without something that they have had.
type absence struct {
	since   map[string]time.Time // by node; zero for one that has it
	longest time.Duration
}

// see takes note of the nodes that have it now. The time of the others counts once they have it again, and meanwhile if it is awaited.
func (a *absence) see(has map[string]bool, awaited bool) {
	if a.since == nil {
		a.since = map[string]time.Time{}
	}
	now := time.Now()
	for node, since := range a.since {
		switch {
		case since.IsZero() && !has[node]:
			a.since[node] = now
		case !since.IsZero() && (has[node] || awaited):
			a.longest = max(a.longest, now.Sub(since))
		}
	}
	for node := range has {
		a.since[node] = time.Time{}
	}
}

// round looks once at what pods there are, and does what kubelets do all the time.
func (p *player) round(ctx context.Context) error {
	api := p.cp.Admin.CoreV1().Pods("kube-system")
	list, err := api.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	bound, running, ready, awaited := map[string]bool{}, map[string]bool{}, map[string]bool{}, false
	for i := range list.Items {
		pod := &list.Items[i]
		if pod.Spec.NodeName == "" {
			awaited = true
			continue
		}
		bound[pod.Spec.NodeName] = true
		if pod.Status.Phase == v1.PodRunning {
			running[pod.Spec.NodeName] = true
		}
		if isReady(pod) {
			ready[pod.Spec.NodeName] = true
		}
	}
	p.bound.see(bound, awaited)
	p.running.see(running, awaited)
	p.ready.see(ready, awaited)
	for i := range list.Items {
		pod := &list.Items[i]
		switch {
		case p.kubelets:
		case pod.DeletionTimestamp != nil:
			err = p.end(ctx, pod)
		case pod.Spec.NodeName != "" && !isReady(pod):
			err = p.bringUp(ctx, pod)
		}
		if err != nil {
			return fmt.Errorf("pod %s on node %s: %w", pod.Name, pod.Spec.NodeName, err)
		}
	}
	if p.bound.longest > tooLong {
		return fmt.Errorf("a node was without a pod for %v", p.bound.longest)
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
	if _, is := p.ending[pod.UID]; !is {
		p.ending[pod.UID] = time.Now()
	}
	if time.Since(p.ending[pod.UID]) < endsWithin {
		return nil
	}
	delete(p.ending, pod.UID)
	now := int64(0)
	return p.cp.Admin.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
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
			return errors.Join(fmt.Errorf("not done within %v", patience), last)
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

// settle plays until all pods are where they belong, and for a while longer, as the controller of DaemonSets may not have seen the last change.
func (p *player) settle(ctx context.Context) error {
	var since time.Time
	return p.until(ctx, func() error {
		pods, err := p.cp.Admin.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range pods.Items {
			if pod := &pods.Items[i]; pod.DeletionTimestamp != nil || !isReady(pod) {
				since = time.Time{}
				return fmt.Errorf("pod %s on node %q: deleted %v, ready %t", pod.Name, pod.Spec.NodeName, pod.DeletionTimestamp, isReady(pod))
			}
		}
		if since.IsZero() {
			since = time.Now()
		}
		if time.Since(since) < 2*endsWithin {
			return errors.New("all pods are ready, but only just")
		}
		return nil
	})
}
