package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"nodeproxy/e2e/harness"
	"nodeproxy/iptables"
)

// crowd are Services in such a number that rules take their compact form: they have few ports and no pods behind them, and all
// but the first use of them is that they are there.
func crowd(w *harness.World) []runtime.Object {
	var ports []v1.ServicePort
	const each = 100
	for i := range each {
		ports = append(ports, v1.ServicePort{Name: fmt.Sprintf("p%d", i), Protocol: v1.ProtocolTCP, Port: int32(1000 + i)})
	}
	pods := w.Ready("n1a", "n2a")
	var out []runtime.Object
	for i := range iptables.DefaultCompactAbove/(each*len(pods)) + 1 {
		s := harness.Service(fmt.Sprintf("crowd-%d", i), 100+i, harness.ClusterOnly, func(s *v1.Service) {
			s.Spec.Ports = slices.Clone(ports)
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].TargetPort.IntVal = 8080
			}
		})
		out = append(out, harness.Objects(s, pods...)...)
	}
	return out
}

// withAffinity makes clients stay with an endpoint.
func withAffinity(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }

// TestCompact: with so many endpoints that rules are compact, each kind of Service that has a form of its own there does what it
// does otherwise. Where the range of cluster IPs is not known, or pods are told by their interface, each Service masquerades
// for itself.
func TestCompact(t *testing.T) {
	t.Parallel()
	services := []struct {
		name      string
		change    []func(*v1.Service)
		endpoints []string
		want      []string // who answers; the endpoints unless set
	}{
		{name: "one", change: []func(*v1.Service){harness.ClusterOnly}, endpoints: []string{"n1c"}},
		{name: "two", change: []func(*v1.Service){harness.ClusterOnly}, endpoints: []string{"n1a", "n2a"}},
		{name: "three", change: []func(*v1.Service){harness.ClusterOnly}, endpoints: []string{"n1a", "n2a", "n3a"}},
		{name: "local", change: []func(*v1.Service){harness.ClusterOnly, harness.Policies("Local", "")},
			endpoints: []string{"n1a", "n2a"}, want: []string{"n1a"}},
		{name: "external", endpoints: []string{"n1a", "n2a"}},
		{name: "sticky", change: []func(*v1.Service){harness.ClusterOnly, withAffinity}, endpoints: []string{"n1a", "n2a"}},
		{name: "none", change: []func(*v1.Service){harness.ClusterOnly}},
	}
	for config, flags := range map[string][]string{
		"range": {clusterCIDR}, "unknown-range": {clusterCIDR, "--service-cidr=172.30.0.0/16,fd00:172::/112"}, "interface": nil,
	} {
		for _, variant := range harness.Variants {
			t.Run(config+"/"+string(variant), func(t *testing.T) {
				t.Parallel()
				w := harness.New(t, harness.Options{Bridge: flags == nil})
				w.Write(t, "nodes.yaml", w.NodeObjects()...)
				w.Write(t, "crowd.yaml", crowd(w)...)
				for i, s := range services {
					w.Write(t, s.name+".yaml", harness.Objects(harness.Service(s.name, i+1, s.change...), w.Ready(s.endpoints...)...)...)
				}
				if flags == nil {
					w.Run(t, variant, masqueradeConfigs(w)["bridge"]...)
				} else {
					w.Run(t, variant, flags...)
				}
				wantCompact(t, w, variant, true)
				for i, s := range services {
					want := s.want
					if want == nil {
						want = s.endpoints
					}
					checkCompact(t, w, i+1, s.name, want)
				}
			})
		}
	}
}

// checkCompact asks a Service from everywhere, and looks at the source that its endpoints see.
func checkCompact(t *testing.T, w *harness.World, number int, name string, want []string) {
	t.Helper()
	for _, family := range families {
		to := clusterIP(number, family)
		for _, client := range []*harness.Host{w.Pod("n1c").Host, w.Client, w.Node1().Host} {
			switch name {
			case "none":
				wantOutcome(t, client, to, harness.Refused)
				continue
			case "sticky":
				stickyServer(t, client, "tcp", to)
			default:
				wantServers(t, client, to, want...)
			}
			source := w.Node1().IP(family)
			if client == w.Pod("n1c").Host && name != "one" {
				source = client.IP(family) // In "one", it is its own endpoint.
			}
			wantSource(t, client, to, source)
		}
		if name == "external" {
			wantServers(t, w.Client, nodePort(w.Node1().IP(family), number), want...)
			wantServers(t, w.Client, vip(number, family), want...)
		}
	}
}

// wantCompact checks which form the rules have.
func wantCompact(t *testing.T, w *harness.World, variant harness.Variant, want bool) {
	t.Helper()
	if compact := !strings.Contains(rules(t, w, variant), `e2e/crowd-0:p0 -> `); compact != want {
		t.Errorf("rules are compact: %t, want %t", compact, want)
	}
}

// TestCompactChanges: changes between the forms, of one Service and of all, fail no request.
func TestCompactChanges(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		many, few := crowd(w), crowd(w)[:3]
		w.Write(t, "crowd.yaml", many...)
		set := func(pods ...string) {
			w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1, harness.ClusterOnly), w.Ready(pods...)...)...)
		}
		set("n1a", "n2a")
		w.Write(t, "external.yaml", harness.Objects(harness.Service("external", 2), w.Ready("n1a", "n3a")...)...)
		w.Run(t, variant, clusterCIDR)
		var loads []*harness.Load
		for _, family := range families {
			loads = append(loads,
				w.Client.StartLoad("tcp", clusterIP(1, family), 2, 3*time.Millisecond),
				w.Pod("n1c").StartLoad("tcp", clusterIP(1, family), 2, 3*time.Millisecond),
				w.Client.StartLoad("tcp", nodePort(w.Node1().IP(family), 2), 2, 3*time.Millisecond))
		}
		becomes := func(what string, pods ...string) {
			t.Helper()
			for _, family := range families {
				eventually(t, what, func() error { return serversOf(w.Client, "tcp", clusterIP(1, family), pods...) })
			}
		}
		for range 2 {
			set("n1a", "n2a", "n3a")
			becomes("three endpoints", "n1a", "n2a", "n3a")
			set("n2a", "n3a")
			becomes("two endpoints", "n2a", "n3a")
			set("n3a")
			becomes("one endpoint", "n3a")
			wantCompact(t, w, variant, true)
			w.Write(t, "crowd.yaml", few...)
			set("n1a", "n2a")
			becomes("a new form for all", "n1a", "n2a")
			eventually(t, "few endpoints", ends(w.Client, clusterIP(103, 4), freeClusterIP(variant)))
			wantCompact(t, w, variant, false)
			w.Write(t, "crowd.yaml", many...)
			set("n1a")
			becomes("the compact form again", "n1a")
			for _, family := range families {
				eventually(t, "many endpoints", answers(w.Client, netip.AddrPortFrom(clusterIP(103, family).Addr(), 1000), "n1a", "n2a"))
			}
		}
		noFailures(t, loads...)
	})
}
