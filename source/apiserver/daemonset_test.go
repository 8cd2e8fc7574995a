package apiserver

import (
	"encoding/json"
	"errors"
	"net/http"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/source/apiserver/apiservertest"
)

// TestKubeProxyWants: it goes by what the pods of the DaemonSet ask of the Node, and says if that can't be read.
func TestKubeProxyWants(t *testing.T) {
	t.Parallel()
	server := apiservertest.New(t)
	client := clientOf(t, server.URL)
	node := &v1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
	node.Name, node.Labels = "n1", map[string]string{"kubernetes.io/os": "linux", "service-proxy": "nodeproxy", "cores": "8"}
	if _, wants, err := client.KubeProxyWants(t.Context(), "n1"); wants || !errors.Is(err, ErrNoKubeProxy) {
		t.Errorf("without the DaemonSet: %v, %v", wants, err)
	}
	const container = `"containers": [{"name": "kube-proxy", "image": "registry.k8s.io/kube-proxy:v1.36.0"}]`
	terms := func(list string) string {
		return container + `, "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [` + list + `]}}}`
	}
	serve := func(pod string) {
		server.ServeObject(KubeProxyPath, json.RawMessage(`{"kind": "DaemonSet", "apiVersion": "apps/v1", "spec": {"template": {"spec": {`+pod+`}}}}`))
	}
	serve(`"containers": [{"name": "p", "image": "r/other:v1"}]`)
	if _, wants, err := client.KubeProxyWants(t.Context(), "n1"); wants || !errors.Is(err, ErrNoKubeProxy) {
		t.Errorf("with a DaemonSet of another program: %v, %v", wants, err)
	}
	for pod, want := range map[string]bool{
		container: true,
		container + `, "nodeSelector": {"kubernetes.io/os": "linux"}`:   true,
		container + `, "nodeSelector": {"kubernetes.io/os": "windows"}`: false,
		container + `, "affinity": {"podAntiAffinity": {}}`:             true,
		`"containers": [{"name": "p", "image": "r/kube-proxy:v1"}]`:     true,
		// What "install -o kube-proxy-off" adds, without and with --migrate.
		terms(`{"matchExpressions": [{"key": "service-proxy", "operator": "In", "values": ["kube-proxy"]}]}`):                                                  false,
		terms(`{"matchExpressions": [{"key": "service-proxy", "operator": "NotIn", "values": ["nodeproxy"]}]}`):                                                false,
		terms(`{"matchExpressions": [{"key": "service-proxy", "operator": "Exists"}, {"key": "gpu", "operator": "DoesNotExist"}]}`):                            true,
		terms(`{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}`): true,
		terms(`{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}`):                                                            false,
		terms(`{"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["4"]}]}`):                                                                   true,
		terms(`{"matchExpressions": [{"key": "cores", "operator": "Lt", "values": ["4"]}]}`):                                                                   false,
		terms(`{"matchExpressions": [{"key": "cores", "operator": "Near", "values": ["4"]}]}`):                                                                 false,
		terms(`{}`): false,
	} {
		serve(pod)
		server.ServeObject("/api/v1/nodes/n1", node)
		labels, wants, err := client.KubeProxyWants(t.Context(), "n1")
		if wants != want || err != nil || wants != (labels["cores"] == "8") {
			t.Errorf("%s: %v, %v, %v; want %v", pod, wants, labels, err, want)
		}
	}
	server.ServeObject(KubeProxyPath, http.StatusForbidden)
	if _, wants, err := client.KubeProxyWants(t.Context(), "n1"); wants || !apierrors.IsForbidden(err) {
		t.Errorf("without the right: %v, %v", wants, err)
	}
}
