package e2e

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// The numbers of the Services of TestObjectsReadAsMeant.
const (
	proxyMode = iota + 1
	otherProxy
	headless
	nilConditions
	sloppy
	fqdn
	hostname
)

// TestObjectsReadAsMeant: the corners of the API that decide whether an object, or a part of it, is for this proxy.
func TestObjectsReadAsMeant(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		eachSlice := func(objects []runtime.Object, change func(*discovery.EndpointSlice)) []runtime.Object {
			for _, o := range objects {
				if slice, ok := o.(*discovery.EndpointSlice); ok {
					change(slice)
				}
			}
			return objects
		}
		endpoints := w.Ready("n1a", "n2a")
		w.Write(t, "proxy-mode.yaml", harness.Objects(harness.Service("proxy-mode", proxyMode, func(s *v1.Service) {
			for i := range s.Status.LoadBalancer.Ingress {
				s.Status.LoadBalancer.Ingress[i].IPMode = ptr.To(v1.LoadBalancerIPModeProxy)
			}
		}), endpoints...)...)
		w.Write(t, "other-proxy.yaml", harness.Objects(
			harness.Service("other-proxy", otherProxy, func(s *v1.Service) {
				s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "other"}
			}), endpoints...)...)
		// The label counts on slices, to which their controller copies it from the Service.
		w.Write(t, "headless.yaml", eachSlice(harness.Objects(harness.Service("headless", headless), endpoints...),
			func(s *discovery.EndpointSlice) { s.Labels[v1.IsHeadlessService] = "" })...)
		bare := harness.Service("nil-conditions", nilConditions)
		w.Write(t, "nil-conditions.yaml", eachSlice(harness.Objects(bare, endpoints...),
			func(s *discovery.EndpointSlice) {
				for i := range s.Endpoints {
					s.Endpoints[i].Conditions = discovery.EndpointConditions{}
				}
			})...)
		w.Write(t, "sloppy.yaml", eachSlice(harness.Objects(harness.Service("sloppy", sloppy, func(s *v1.Service) {
			s.Spec.ClusterIP = "010.096.000.015"
			s.Spec.ClusterIPs[0] = s.Spec.ClusterIP
			s.Spec.ExternalIPs[0] = "192.000.002.005"
			s.Spec.LoadBalancerSourceRanges = []string{" 203.000.113.000/24 ", "2001:db8:c::/64"}
		}), endpoints...), func(s *discovery.EndpointSlice) {
			for i, ep := range s.Endpoints {
				s.Endpoints[i].Addresses[0] = strings.Replace(ep.Addresses[0], "10.244.", "010.244.00", 1)
			}
		})...)
		w.Write(t, "fqdn.yaml", append(harness.Objects(harness.Service("fqdn", fqdn), endpoints...), &discovery.EndpointSlice{
			TypeMeta: endpointSliceType, ObjectMeta: sliceOf("fqdn", "fqdn-names"), AddressType: discovery.AddressTypeFQDN,
			Ports:     []discovery.EndpointPort{{Name: ptr.To("a"), Port: ptr.To(int32(8080)), Protocol: ptr.To(v1.ProtocolTCP)}},
			Endpoints: []discovery.Endpoint{{Addresses: []string{"web.example.com"}}},
		})...)
		w.Write(t, "hostname.yaml", harness.Objects(harness.Service("hostname", hostname, func(s *v1.Service) {
			names := []v1.LoadBalancerIngress{{Hostname: "lb.example.com"}}
			s.Status.LoadBalancer.Ingress = append(names, s.Status.LoadBalancer.Ingress...)
		}), endpoints...)...)
		w.Run(t, variant, clusterCIDR)
		checkObjects(t, w, variant)
	})
}

func checkObjects(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	var checks []func()
	for _, family := range families {
		node := w.Node1().IP(family)
		served := func(number int) {
			checks = append(checks, func() {
				wantServers(t, w.Client, clusterIP(number, family), "n1a", "n2a")
				wantServers(t, w.Client, externalIP(number, family), "n1a", "n2a")
				wantServers(t, w.Client, nodePort(node, number), "n1a", "n2a")
			})
		}
		for _, number := range []int{proxyMode, nilConditions, sloppy, fqdn, hostname} {
			served(number)
		}
		checks = append(checks,
			// A load balancer that is a proxy itself has to be reached: the packet leaves the node as it is.
			func() { wantOutcome(t, w.Client, vip(proxyMode, family), harness.TimedOut) },
			func() { wantServers(t, w.Client, vip(hostname, family), "n1a", "n2a") },
			func() { wantServers(t, w.Client, vip(sloppy, family), "n1a", "n2a") },
			func() { wantOutcome(t, w.Pod("n1c").Host, vip(sloppy, family), harness.TimedOut) },
		)
		checks = append(checks,
			func() { wantOutcome(t, w.Client, clusterIP(otherProxy, family), freeClusterIP(variant)) },
			func() { wantOutcome(t, w.Client, vip(otherProxy, family), harness.TimedOut) },
			func() { wantOutcome(t, w.Client, nodePort(node, otherProxy), harness.Refused) },
			func() { wantOutcome(t, w.Client, clusterIP(headless, family), harness.Refused) },
			func() { wantOutcome(t, w.Client, nodePort(node, headless), harness.Refused) })
	}
	together(checks...)
}
