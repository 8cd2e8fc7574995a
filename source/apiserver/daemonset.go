package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// KubeProxyPath is the DaemonSet by which kubeadm and others run kube-proxy.
const KubeProxyPath = "/apis/apps/v1/namespaces/kube-system/daemonsets/kube-proxy"

// ErrNoKubeProxy says that there is no DaemonSet of kube-proxy.
var ErrNoKubeProxy = errors.New("there is no DaemonSet kube-proxy")

// KubeProxyWants reports whether kube-proxy's DaemonSet wants a pod on a node, and returns the node's labels if so. Taints don't count:
// kube-proxy tolerates all of them wherever it is deployed. It makes at most two requests, which the API server answers from memory.
func (c *Client) KubeProxyWants(ctx context.Context, node string) (nodeLabels map[string]string, wants bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// As JSON, since the types of this API group would be linked for nothing else.
	text, err := c.core.Get().AbsPath(KubeProxyPath).Param("resourceVersion", "0").SetHeader("Accept", runtime.ContentTypeJSON).Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return nil, false, ErrNoKubeProxy
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
	pod := &v1.Pod{Spec: ds.Spec.Template.Spec}
	isProxy := func(c v1.Container) bool { return c.Name == "kube-proxy" || strings.Contains(c.Image, "kube-proxy") }
	if !slices.ContainsFunc(pod.Spec.Containers, isProxy) {
		return nil, false, ErrNoKubeProxy
	}
	var n v1.Node
	err = c.core.Get().Resource(nodes).Name(node).VersionedParams(&metav1.GetOptions{ResourceVersion: "0"}, parameters).Do(ctx).Into(&n)
	if err != nil {
		return nil, false, err
	}
	if wants, _ = nodeaffinity.GetRequiredNodeAffinity(pod).Match(&n); !wants { // A requirement that is not valid does not hold.
		return nil, false, nil
	}
	return n.Labels, true, nil
}
