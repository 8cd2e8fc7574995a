package cluster

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/config"
	"nodeproxy/e2e/harness"
)

// renderOfCluster: render prints, with the rights of nodeproxy's own account, the same bytes for the cluster as for its objects in a
// file, in each mode.
func renderOfCluster(s *scenario) {
	svc := s.service(func(svc *v1.Service) {
		svc.Spec.Type = v1.ServiceTypeNodePort
		svc.Spec.IPFamilyPolicy = ptr.To(v1.IPFamilyPolicyRequireDualStack)
	})
	s.pod("n1a", "n2a", "n3a")
	s.eventually("endpoints", servers(s.Client, at(svc, 4), "n1a", "n2a", "n3a"))
	path, err := harness.Binary()
	s.must(err)
	file := filepath.Join(s.TempDir(), "objects.json")
	for _, mode := range config.Modes() {
		render := []string{"render", "--mode=" + mode, "--node-name=node1", clusterCIDR}
		s.eventually("render of the cluster in mode "+mode, func() error { // Controllers may change objects between the two.
			s.must(os.WriteFile(file, s.objects(), 0o644))
			want, err := s.Node1().Output(path, append(render, "--manifests="+file,
				"--service-cidr="+harness.ServiceCIDR4.String()+","+harness.ServiceCIDR6.String())...)
			s.must(err)
			got, err := s.Node1().Output(path, append(render, "--kubeconfig="+s.kubeconfig)...)
			s.must(err)
			if got != want || !strings.Contains(got, svc.Spec.ClusterIP) {
				return fmt.Errorf("it has %d bytes, and that of the objects %d; does it have %s? %t",
					len(got), len(want), svc.Spec.ClusterIP, strings.Contains(got, svc.Spec.ClusterIP))
			}
			return nil
		})
	}
}

// objects returns what the API server has of the kinds that nodeproxy reads, as kubectl prints it.
func (s *scenario) objects() []byte {
	s.Helper()
	var items []any
	services, err := s.cp.Admin.CoreV1().Services("").List(s.Context(), metav1.ListOptions{})
	s.must(err)
	for _, o := range services.Items {
		o.SetGroupVersionKind(v1.SchemeGroupVersion.WithKind("Service"))
		items = append(items, o)
	}
	endpoints, err := s.cp.Admin.DiscoveryV1().EndpointSlices("").List(s.Context(), metav1.ListOptions{})
	s.must(err)
	for _, o := range endpoints.Items {
		o.SetGroupVersionKind(discovery.SchemeGroupVersion.WithKind("EndpointSlice"))
		items = append(items, o)
	}
	nodes, err := s.cp.Admin.CoreV1().Nodes().List(s.Context(), metav1.ListOptions{})
	s.must(err)
	for _, o := range nodes.Items {
		o.SetGroupVersionKind(v1.SchemeGroupVersion.WithKind("Node"))
		items = append(items, o)
	}
	cidrs, err := s.cp.Admin.NetworkingV1().ServiceCIDRs().List(s.Context(), metav1.ListOptions{})
	s.must(err)
	for _, o := range cidrs.Items {
		o.SetGroupVersionKind(networking.SchemeGroupVersion.WithKind("ServiceCIDR"))
		items = append(items, o)
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	s.must(err)
	return text
}
