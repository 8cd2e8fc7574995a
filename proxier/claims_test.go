package proxier

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// named makes the Service ns/NAME like makeService.
func named(name, clusterIP string, changes ...func(*v1.Service)) *v1.Service {
	svc := makeService(changes...)
	svc.Name, svc.Spec.ClusterIP = name, clusterIP
	return svc
}

// ownership lists who owns what is claimed more than once, "FRONTEND: OWNER, not OTHER OTHER", in order.
func ownership(p *plan.Plan) []string {
	owners := map[claim]string{}
	others := map[claim][]string{}
	for _, family := range plan.Families {
		for _, sp := range p.Sorted(family) {
			for _, f := range sp.Frontends {
				owners[claimOf(f, family)] = f.String() + ": " + sp.Key.PortName()
			}
			for _, sh := range sp.Shadowed {
				c := claimOf(sh.Frontend, family)
				others[c] = append(others[c], sp.Key.PortName())
			}
		}
	}
	var out []string
	for c := range others {
		out = append(out, owners[c]+", not "+strings.Join(others[c], " "))
	}
	slices.Sort(out)
	return out
}

// TestOwners: who has a frontend that several ask for, whichever comes first.
func TestOwners(t *testing.T) {
	t.Parallel()
	port := func(name string, port, nodePort int32, protocol v1.Protocol) v1.ServicePort {
		return v1.ServicePort{Name: name, Port: port, NodePort: nodePort, Protocol: protocol}
	}
	for _, tc := range []struct {
		name     string
		services []*v1.Service
		want     []string
	}{
		{"of two external IPs, that of the lower name", []*v1.Service{
			named("b", "10.96.0.2", externalIPs("192.0.2.1")), named("a", "10.96.0.1", externalIPs("192.0.2.1")),
			named("c", "10.96.0.3", externalIPs("192.0.2.1")),
		}, []string{"external IP 192.0.2.1:80/TCP: ns/a, not ns/b ns/c"}},
		{"a cluster IP before an external IP", []*v1.Service{
			named("a", "10.96.0.1", externalIPs("10.96.0.9")), named("z", "10.96.0.9"),
		}, []string{"cluster IP 10.96.0.9:80/TCP: ns/z, not ns/a"}},
		{"a cluster IP before a load balancer IP", []*v1.Service{
			named("a", "10.96.0.1", ingress("10.96.0.9")), named("z", "10.96.0.9"),
		}, []string{"cluster IP 10.96.0.9:80/TCP: ns/z, not ns/a"}},
		{"a load balancer IP before an external IP", []*v1.Service{
			named("a", "10.96.0.1", externalIPs("192.0.2.1")), named("z", "10.96.0.9", ingress("192.0.2.1")),
		}, []string{"load balancer IP 192.0.2.1:80/TCP: ns/z, not ns/a"}},
		{"two Services of one cluster IP", []*v1.Service{named("b", "10.96.0.1"), named("a", "10.96.0.1")},
			[]string{"cluster IP 10.96.0.1:80/TCP: ns/a, not ns/b"}},
		{"two ports of one Service", []*v1.Service{named("a", "10.96.0.1", ports(
			port("y", 80, 0, "TCP"), port("x", 80, 0, "TCP")))},
			[]string{"cluster IP 10.96.0.1:80/TCP: ns/a:x, not ns/a:y"}},
		{"one node port", []*v1.Service{
			named("b", "10.96.0.2", ports(port("", 80, 30000, "TCP"))), named("a", "10.96.0.1", ports(port("", 80, 30000, "TCP"))),
		}, []string{"node port 30000/TCP: ns/a, not ns/b"}},
		{"a node port before a health check node port", []*v1.Service{
			named("a", "10.96.0.1", ofType("LoadBalancer"), externalLocal, func(s *v1.Service) { s.Spec.HealthCheckNodePort = 30000 }),
			named("z", "10.96.0.2", ofType("NodePort"), ports(port("", 80, 30000, "TCP"))),
		}, []string{"node port 30000/TCP: ns/z, not ns/a"}},
		{"other protocol, port or address", []*v1.Service{
			named("a", "10.96.0.1", externalIPs("192.0.2.1"), ports(port("", 80, 30000, "TCP"))),
			named("b", "10.96.0.2", externalIPs("192.0.2.1"), ports(port("", 80, 30000, "UDP"))),
			named("c", "10.96.0.3", externalIPs("192.0.2.1"), ports(port("", 81, 30001, "TCP"))),
			named("d", "10.96.0.4", externalIPs("192.0.2.2")),
		}, nil},
		{"a node port is taken in each family by itself", []*v1.Service{
			named("b", "10.96.0.2", ports(port("", 80, 30000, "TCP"))),
			named("a", "fd00::1", ports(port("", 80, 30000, "TCP"))),
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			forward, backward := newTestState(nil), newTestState(nil)
			for i := range tc.services {
				for s, svc := range map[*State]*v1.Service{forward: tc.services[i], backward: tc.services[len(tc.services)-1-i]} {
					s.Apply(ofService(svc))
					s.Update()
				}
			}
			for order, s := range map[string]*State{"forward": forward, "backward": backward} {
				if got := ownership(s.Plan()); !slices.Equal(got, tc.want) {
					t.Errorf("%s: got %q, want %q", order, got, tc.want)
				}
			}
		})
	}
}

// TestTakeover: when the owner goes, the next one takes over, those behind it learn who it is, and nobody else is touched.
func TestTakeover(t *testing.T) {
	t.Parallel()
	s := newTestState(nil)
	set := func(b source.Batch) string {
		s.Apply(b)
		_, change := s.Update()
		var names []string
		for _, k := range slices.SortedFunc(maps.Keys(change.Keys()), plan.Key.Compare) {
			names = append(names, k.Service.Name)
		}
		return fmt.Sprint(names)
	}
	claiming := func(name, clusterIP string) source.Batch {
		return ofService(named(name, clusterIP, externalIPs("192.0.2.1")))
	}
	set(ofService(named("bystander", "10.96.0.99")))
	for _, step := range []struct {
		what    string
		set     source.Batch
		changed string
		owned   []string
	}{
		{"first", claiming("b", "10.96.0.2"), "[b]", nil},
		{"a worse claim", claiming("c", "10.96.0.3"), "[c]", []string{"ns/b, not ns/c"}},
		{"a better claim", claiming("a", "10.96.0.1"), "[a b c]", []string{"ns/a, not ns/b ns/c"}},
		{"the one in the middle goes", noService("b"), "[b]", []string{"ns/a, not ns/c"}},
		{"and comes back", claiming("b", "10.96.0.2"), "[b]", []string{"ns/a, not ns/b ns/c"}},
		{"the same again", claiming("a", "10.96.0.1"), "[]", []string{"ns/a, not ns/b ns/c"}},
		{"the owner wants it no more", ofService(named("a", "10.96.0.1")), "[a b c]", []string{"ns/b, not ns/c"}},
		{"the owner goes", noService("b"), "[b c]", nil},
		{"the last one goes", noService("c"), "[c]", nil},
	} {
		changed := set(step.set)
		var owned []string
		for _, o := range step.owned {
			owned = append(owned, "external IP 192.0.2.1:80/TCP: "+o)
		}
		if got := ownership(s.Plan()); changed != step.changed || !slices.Equal(got, owned) {
			t.Errorf("%s: changed %s, %q; want %s, %q", step.what, changed, got, step.changed, owned)
		}
	}
}
