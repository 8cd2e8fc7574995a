package proxier

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// TestReserved: no Service gets the API server's own address and port for an external IP or a load balancer IP, neither where
// it is known from the configuration nor as an endpoint of default/kubernetes, and whichever comes first. It gets all else, and
// the frontend itself when the API server has moved.
func TestReserved(t *testing.T) {
	t.Parallel()
	addrPort := netip.MustParseAddrPort
	var found []source.Finding
	s := NewState("me", plan.Settings{}, plan.Families[:], func(f source.Finding) { found = append(found, f) })
	frontends := func(name string) []string {
		t.Helper()
		p, _ := s.Update()
		var out []string
		for _, sp := range p.Sorted(plan.IPv4) {
			for _, f := range sp.Frontends {
				if sp.Key.Service.Name == name && f.Kind != plan.ClusterIP {
					out = append(out, f.String())
				}
			}
		}
		return out
	}
	check := func(when string, want ...string) {
		t.Helper()
		if got := frontends("evil"); !slices.Equal(got, want) {
			t.Errorf("%s: frontends %q, want %q", when, got, want)
		}
	}
	reported := func(when string, want int) {
		t.Helper()
		if len(found) != want {
			t.Errorf("%s: %d findings, want %d: %v", when, len(found), want, found)
		}
		for _, f := range found {
			if f.Severity != source.Problem || f.Event != "APIServerAddress" || !strings.Contains(f.String(), "Service ns/evil") {
				t.Errorf("%s: %+v", when, f)
			}
		}
		found = nil
	}
	port := func(name string, number int32, protocol v1.Protocol) v1.ServicePort {
		return v1.ServicePort{Name: name, Port: number, Protocol: protocol}
	}
	evil := named("evil", "10.96.0.1", externalIPs("192.0.2.1"), ingress("192.0.2.2"),
		ports(port("tcp", 6443, "TCP"), port("udp", 6443, "UDP"), port("web", 80, "TCP")))
	all := []string{"load balancer IP 192.0.2.2:6443/TCP", "external IP 192.0.2.1:6443/TCP", "load balancer IP 192.0.2.2:6443/UDP",
		"external IP 192.0.2.1:6443/UDP", "load balancer IP 192.0.2.2:80/TCP", "external IP 192.0.2.1:80/TCP"}
	s.Reserve([]netip.AddrPort{addrPort("192.0.2.1:6443"), addrPort("[2001:db8::1]:6443"), addrPort("10.96.0.1:6443")})
	s.Apply(ofService(evil))
	check("its external IP is the API server's", slices.Delete(slices.Clone(all), 1, 2)...)
	reported("at first", 1)
	if p, _ := s.Update(); len(p.Services) != 3 || len(p.Sorted(plan.IPv4)[0].Frontends) == 0 ||
		p.Sorted(plan.IPv4)[0].Frontends[0].Kind != plan.ClusterIP {
		t.Error("a cluster IP at which the API server is reached is not proxied")
	}
	s.Reserve([]netip.AddrPort{addrPort("192.0.2.2:6443")})
	check("its load balancer IP is", all[1:]...)
	reported("then", 1)
	s.Reserve(nil)
	check("none is", all...)
	reported("then", 0)

	api := named("kubernetes", "10.96.0.2", ports(port("https", 443, "TCP")))
	api.Namespace = "default"
	slice := endpointSlice(discovery.Endpoint{Addresses: []string{"192.0.2.1"}}, discovery.Endpoint{Addresses: []string{"192.0.2.2"}})
	slice.Namespace, slice.Name, slice.Labels[discovery.LabelServiceName] = "default", "kubernetes", "kubernetes"
	slice.Ports = []discovery.EndpointPort{{Name: new("https"), Port: new(int32(6443))}}
	s.Apply(ofService(api))
	s.Apply(ofSlice(slice))
	check("both are endpoints of default/kubernetes", all[2:]...)
	reported("then", 2)
	if got := frontends("kubernetes"); len(got) != 0 {
		t.Errorf("default/kubernetes has %q", got)
	}
	s.Apply(source.Batch{EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{{Namespace: "default", Name: "kubernetes"}: nil}})
	check("the endpoints have gone", all...)
	reported("then", 0)
}
