// Package sourcetest draws objects for tests as an untrusted API server might send them, or a manifest written by somebody else
// might hold them: with any text in any text field.
package sourcetest

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed" // for all tests that draw from here
	"nodeproxy/source"
)

// Words are texts that an API server or a manifest may hold where an address, a range or a name belongs.
var Words = []string{
	"", "web", "a\n-A INPUT -j DROP", "a\nCOMMIT\n*filter", `"; -j ACCEPT`, `a" -j ACCEPT`, "x' y", "a\\", "ü",
	strings.Repeat("a", 300),
	strings.Repeat("a", 63), "10.96.0.1", "fd00::1", "010.096.000.001", "::ffff:10.0.0.1", "10.0.0.0/8", "::/0", "0.0.0.0/0",
	"1.2.3.4/33", "::ffff:10.0.0.0/104", "::ffff:0:0/95", "%eth0", "fe80::1%eth0", "255.255.255.255", "0.0.0.0", "::", "127.0.0.1",
	"ff02::1", "1.1.1.1", "$(id)", "`id`", "-j", "--", "a b", "a\x00b", "a\r\nb", "\u2028", "\u202e", "-m comment", "x; reboot", "true", "1=2,3=x", "-1", "Local", "ClientIP", "None",
}

// Objects draws a few Services with slices and a Node, in which any text may be any word. Most texts are valid, so that the others
// are read too.
func Objects(t *rapid.T, word *rapid.Generator[string]) source.Batch {
	b := source.Batch{Services: map[types.NamespacedName]*v1.Service{},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{}}
	for i := range rapid.IntRange(1, 3).Draw(t, "services") {
		pick := func(label string, good ...string) string {
			return often(good, word).Draw(t, label)
		}
		number := func(label string) int32 {
			usual := rapid.SampledFrom([]int32{80, 8080, 30080})
			return rapid.OneOf(usual, usual, usual, usual, usual, usual, usual, rapid.Int32()).Draw(t, label)
		}
		name := types.NamespacedName{Namespace: pick("namespace", "ns"), Name: pick("name", "a", "b")}
		svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
		svc.Annotations = map[string]string{source.AnnotationResetTCP: pick("reset", "true"),
			source.AnnotationScheduler: pick("scheduler", "lc"), pick("annotation", "a"): pick("value", "b")}
		if rapid.IntRange(0, 7).Draw(t, "labelled") == 3 {
			svc.Labels = map[string]string{"k8s-app": pick("label", "kube-dns"), pick("label key", "x"): pick("label value", "y")}
		}
		s := &svc.Spec
		s.Type = v1.ServiceType(pick("type", "ClusterIP", "NodePort", "LoadBalancer"))
		s.ClusterIP = pick("cluster IP", fmt.Sprintf("10.96.0.%d", i), "fd00::9")
		s.ClusterIPs = []string{s.ClusterIP, pick("second cluster IP", "fd00::8", "10.96.0.77")}
		s.ExternalIPs = []string{pick("external IP", "1.1.1.1", "2001:db8::1")}
		s.LoadBalancerSourceRanges = []string{pick("range", "10.0.0.0/8"), pick("range", "2001:db8::/32")}
		s.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicy(pick("policy", "Cluster", "Local"))
		s.SessionAffinity = v1.ServiceAffinity(pick("affinity", "None", "ClientIP"))
		s.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(number("timeout"))}}
		s.HealthCheckNodePort = number("health check port")
		svc.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: pick("ingress", "2.2.2.2", "2001:db8::2")}}
		port := v1.ServicePort{Name: pick("port name", "http"), Protocol: v1.Protocol(pick("protocol", "TCP", "UDP", "SCTP")),
			Port: number("port"), NodePort: number("node port"), AppProtocol: new(pick("app protocol", "http"))}
		s.Ports = []v1.ServicePort{port}
		b.Services[name] = svc
		slice := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name,
			Labels: map[string]string{discovery.LabelServiceName: name.Name},
			Annotations: map[string]string{source.AnnotationWeights: pick("weights", "10.244.0.1=5"),
				v1.EndpointsLastChangeTriggerTime: pick("trigger", "2026-01-02T03:04:05Z")}}}
		slice.AddressType = discovery.AddressType(pick("address type", "IPv4", "IPv6"))
		slice.Ports = []discovery.EndpointPort{{Name: &port.Name, Protocol: &port.Protocol, Port: new(number("target port"))}}
		endpoints := []string{"10.244.0.1", "10.244.0.2"}
		if slice.AddressType == discovery.AddressTypeIPv6 {
			endpoints = []string{"fd01::1", "fd01::2"}
		}
		for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses: []string{pick("endpoint", endpoints...)}, NodeName: new(pick("node", "node"))})
		}
		b.EndpointSlices[name] = slice
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	node.Spec.PodCIDRs = []string{often([]string{"10.244.1.0/24", "fd01::/64"}, word).Draw(t, "pod CIDR")}
	node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP,
		Address: often([]string{"192.168.0.1", "10.0.0.1"}, word).Draw(t, "node IP")}}
	b.Nodes = map[string]*v1.Node{"node": node}
	return b
}

// often draws a valid value most of the time: a Service has many fields, and most draws should get as far as the rules.
func often(good []string, word *rapid.Generator[string]) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		if rapid.IntRange(0, 15).Draw(t, "hostile") == 7 { // not at an end of the range, where draws gather
			return word.Draw(t, "word")
		}
		return rapid.SampledFrom(good).Draw(t, "good")
	})
}
