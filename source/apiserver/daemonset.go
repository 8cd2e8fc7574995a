package apiserver

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
)

// KubeProxyPath is the DaemonSet by which kubeadm and others run kube-proxy.
const KubeProxyPath = "/apis/apps/v1/namespaces/kube-system/daemonsets/kube-proxy"

// KubeProxyWants reports whether kube-proxy's DaemonSet wants a pod on a node, and returns the node's labels if so. Taints don't count:
// kube-proxy tolerates all of them wherever it is deployed. It makes at most two requests, which the API server answers from memory.
func (c *Client) KubeProxyWants(ctx context.Context, node string) (nodeLabels map[string]string, wants bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// As JSON, since the types of this API group would be linked for nothing else.
	text, err := c.core.Get().AbsPath(KubeProxyPath).Param("resourceVersion", "0").SetHeader("Accept", runtime.ContentTypeJSON).Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	var ds struct {
		Spec struct{ Template v1.PodTemplateSpec }
	}
	if err := json.Unmarshal(text, &ds); err != nil {
		return nil, false, err
	}
	pod := &ds.Spec.Template.Spec
	if !slices.ContainsFunc(pod.Containers, func(c v1.Container) bool { return c.Name == "kube-proxy" || strings.Contains(c.Image, "kube-proxy") }) {
		return nil, false, nil
	}
	var n v1.Node
	err = c.core.Get().Resource(nodes).Name(node).VersionedParams(&metav1.GetOptions{ResourceVersion: "0"}, parameters).Do(ctx).Into(&n)
	if err != nil || !wanted(pod, &n) {
		return nil, false, err
	}
	return n.Labels, true, nil
}

// wanted reports whether a node has what the pods of a DaemonSet ask of it.
func wanted(pod *v1.PodSpec, n *v1.Node) bool {
	if !labels.SelectorFromSet(pod.NodeSelector).Matches(labels.Set(n.Labels)) {
		return false
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil || pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	return slices.ContainsFunc(pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms, func(t v1.NodeSelectorTerm) bool {
		return len(t.MatchExpressions)+len(t.MatchFields) > 0 && meets(t.MatchExpressions, n.Labels) &&
			meets(t.MatchFields, map[string]string{metav1.ObjectNameField: n.Name})
	})
}

var operators = map[v1.NodeSelectorOperator]selection.Operator{
	v1.NodeSelectorOpIn: selection.In, v1.NodeSelectorOpNotIn: selection.NotIn, v1.NodeSelectorOpExists: selection.Exists,
	v1.NodeSelectorOpDoesNotExist: selection.DoesNotExist, v1.NodeSelectorOpGt: selection.GreaterThan, v1.NodeSelectorOpLt: selection.LessThan,
}

// meets reports whether all requirements hold; those that are not valid do not.
func meets(list []v1.NodeSelectorRequirement, of map[string]string) bool {
	for _, r := range list {
		requirement, err := labels.NewRequirement(r.Key, operators[r.Operator], r.Values)
		if err != nil || !requirement.Matches(labels.Set(of)) {
			return false
		}
	}
	return true
}
