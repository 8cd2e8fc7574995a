package main

import (
	"errors"
	"os/exec"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"nodeproxy/internal/nstest"
	"nodeproxy/source/apiserver/apiservertest"
)

// serveUnready serves a Service with a Pod that is not ready, and one whose selector is misspelt.
func serveUnready(s *apiservertest.Server) {
	service := func(name, ip, app string) v1.Service {
		return v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, ResourceVersion: "1"},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": app},
				Ports: []v1.ServicePort{{Protocol: v1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8080)}},
			},
		}
	}
	s.Serve("services", &v1.ServiceList{Items: []v1.Service{service("web", "10.96.0.10", "web"), service("typo", "10.96.0.11", "wbe")}})
	s.Serve("endpointslices", &discovery.EndpointSliceList{Items: []discovery.EndpointSlice{{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", ResourceVersion: "1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
		Endpoints: []discovery.Endpoint{{
			Addresses: []string{"10.244.1.5"}, NodeName: new("node1"), Conditions: discovery.EndpointConditions{Ready: new(false)},
			TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web-1"},
		}},
	}}})
	s.Serve("nodes", &v1.NodeList{Items: []v1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node1", ResourceVersion: "1"}}}})
	s.Serve("servicecidrs", &networking.ServiceCIDRList{})
	pods := v1.PodList{Items: []v1.Pod{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{"app": "web"}},
		Spec:       v1.PodSpec{NodeName: "node1", Containers: []v1.Container{{Name: "c", Ports: []v1.ContainerPort{{ContainerPort: 8080}}}}},
		Status:     v1.PodStatus{Phase: v1.PodRunning, PodIP: "10.244.1.5", Conditions: []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionFalse}}},
	}}}
	for _, path := range []string{"/api/v1/namespaces/default/pods", "/api/v1/pods"} {
		s.ServeObject(path, &pods)
	}
}

// TestExplainCluster: explain knows selectors, target ports and Pods of a cluster; the daemon, which may not read Pods, still knows which Services have
// a selector.
func TestExplainCluster(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	nstest.Exec(t, "ip", "link", "set", "lo", "up")
	cluster := apiservertest.New(t)
	serveUnready(cluster)
	kubeconfig := apiservertest.Kubeconfig(t, cluster.URL)
	whole := func(name string) string {
		t.Helper()
		out, err := exec.Command("nodeproxy", "explain", name, "--kubeconfig="+kubeconfig, "--node-name=node1").Output()
		if exit, is := errors.AsType[*exec.ExitError](err); !is || exit.ExitCode() != 1 {
			t.Errorf("explain %s: %v", name, err)
		}
		return string(out)
	}
	has(t, whole("web"), "to port 8080 of the Pods", "No endpoint is ready, so connections are refused: web-1.",
		"find out why the readiness probes fail: kubectl -n default describe pod web-1\n")
	has(t, whole("typo"), "its selector app=wbe matches no Pod. Pod web-1 nearly matches: app=web in place of app=wbe.")

	a := newAsked(t)
	startProcess(t, nil, "--kubeconfig="+kubeconfig, "--node-name=node1", "--mode=nftables", "--socket="+a.socket)
	a.awaitProgrammed()
	text, _ := a.ask("explain", "web")
	has(t, text, "selector app=web", "to port 8080 of the Pods",
		"find out why the readiness probes fail: kubectl -n default describe pod -l app=web\n")
	text, _ = a.ask("explain", "typo")
	has(t, text, "so connections are refused: it has no EndpointSlice.")
}
