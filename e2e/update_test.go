package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"nodeproxy/e2e/harness"
)

// TestScaling: 0, 3, and 0 endpoints again, in every frontend kind; with the time from the manifest's change to its
// effect.
func TestScaling(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		set := func(pods ...string) { w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pods...)...)...) }
		set()
		w.Run(t, variant, clusterCIDR)
		everywhere := func(check func(client *harness.Host, to netip.AddrPort)) {
			var checks []func()
			for _, family := range families {
				for _, to := range frontends(w, 1, family) {
					checks = append(checks, func() { check(w.Client, to) }, func() { check(w.Pod("n1c").Host, to) })
				}
			}
			together(checks...)
		}
		refused := func(client *harness.Host, to netip.AddrPort) { wantOutcome(t, client, to, harness.Refused) }
		everywhere(refused)
		for range 2 {
			set("n1a", "n2a", "n3a")
			took := eventually(t, "three endpoints", answers(w.Client, clusterIP(1, 4), "n1a", "n2a", "n3a"))
			t.Logf("0 to 3 endpoints took effect after %v", took)
			for _, family := range families {
				// The families are programmed one after the other.
				eventually(t, "three endpoints", answers(w.Client, clusterIP(1, family), "n1a", "n2a", "n3a"))
			}
			everywhere(func(client *harness.Host, to netip.AddrPort) { wantServers(t, client, to, "n1a", "n2a", "n3a") })
			set()
			took = eventually(t, "no endpoints", ends(w.Pod("n1c").Host, clusterIP(1, 4), harness.Refused))
			t.Logf("3 to 0 endpoints took effect after %v", took)
			eventually(t, "no endpoints", ends(w.Pod("n1c").Host, clusterIP(1, 6), harness.Refused))
			everywhere(refused)
		}
	})
}

// TestEditLatency: each saved manifest takes effect at once, whether its file is replaced or written in place.
func TestEditLatency(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		w.Run(t, variant, clusterCIDR)
		var latencies []time.Duration
		for i := range 20 {
			pod := []string{"n2a", "n3a", "n1a"}[i%3]
			if i%2 == 0 {
				w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pod)...)...)
			} else {
				w.WriteInPlace(t, "s.yaml", harness.Objects(s, w.Ready(pod)...)...)
			}
			latencies = append(latencies, eventually(t, "edit", answers(w.Client, clusterIP(1, 4), pod)))
		}
		slices.Sort(latencies)
		median, worst := latencies[len(latencies)/2], latencies[len(latencies)-1]
		t.Logf("edit to effect: median %v, worst %v", median, worst)
	})
}

// TestFieldChanges: an edit of a Service moves it to other addresses, ports and policies, and leaves nothing at the old
// ones.
func TestFieldChanges(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		endpoints := w.Ready("n1a", "n2a")
		write := func(s *v1.Service) { w.Write(t, "s.yaml", harness.Objects(s, endpoints...)...) }
		write(harness.Service("s", 1))
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			wantServers(t, w.Client, nodePort(w.Node1().IP(family), 1), "n1a", "n2a")
		}

		write(harness.Service("s", 2)) // every address and node port is another one
		for _, family := range families {
			eventually(t, "new cluster IP", answers(w.Client, clusterIP(2, family), "n1a", "n2a"))
			eventually(t, "new node port", answers(w.Client, nodePort(w.Node1().IP(family), 2), "n1a", "n2a"))
			wantServers(t, w.Client, vip(2, family), "n1a", "n2a")
			wantServers(t, w.Client, externalIP(2, family), "n1a", "n2a")
			together(
				func() { wantOutcome(t, w.Client, nodePort(w.Node1().IP(family), 1), harness.Refused) },
				// Nothing knows these addresses any more.
				func() { wantOutcome(t, w.Client, clusterIP(1, family), freeClusterIP(variant)) },
				func() { wantOutcome(t, w.Client, vip(1, family), harness.TimedOut) },
				func() { wantOutcome(t, w.Client, externalIP(1, family), harness.TimedOut) },
			)
		}

		write(harness.Service("s", 2, harness.Policies("Local", "Local")))
		for _, family := range families {
			eventually(t, "policy Local", func() error { return serversOf(w.Client, "tcp", vip(2, family), "n1a") })
			wantServers(t, w.Client, clusterIP(2, family), "n1a")
			wantSource(t, w.Client, nodePort(w.Node1().IP(family), 2), w.Client.IP(family))
		}

		write(harness.Service("s", 2, func(s *v1.Service) {
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].Port, s.Spec.Ports[i].TargetPort = 81, intstr.FromInt32(8081)
			}
		}))
		for _, family := range families {
			to := netip.AddrPortFrom(clusterIP(2, family).Addr(), 81)
			eventually(t, "new port", answers(w.Client, to, "n1a", "n2a"))
			if a := w.Client.Ask("udp", to, harness.Patient); a.Port != 8081 {
				t.Errorf("%s: %v, want target port 8081", to, a)
			}
			wantServers(t, w.Client, nodePort(w.Node1().IP(family), 2), "n1a", "n2a")
			wantOutcome(t, w.Client, clusterIP(2, family), otherPort())
		}

		write(harness.Service("s", 2, harness.ClusterOnly))
		for _, family := range families {
			eventually(t, "type ClusterIP", answers(w.Client, clusterIP(2, family), "n1a", "n2a"))
			eventually(t, "node port closed", ends(w.Client, nodePort(w.Node1().IP(family), 2), harness.Refused))
			together(
				func() { wantOutcome(t, w.Client, vip(2, family), harness.TimedOut) },
				func() { wantOutcome(t, w.Client, externalIP(2, family), harness.TimedOut) },
			)
		}
	})
}

// TestPorts: several ports of a Service go to their own targets, and the same number on TCP and UDP to different ones.
func TestPorts(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{Ports: []uint16{8080, 8081, 9090}})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		type port struct {
			protocol               v1.Protocol
			port, target, nodePort int32
		}
		ports := []port{
			{v1.ProtocolTCP, 53, 8080, 30053}, {v1.ProtocolUDP, 53, 8081, 30053},
			{v1.ProtocolTCP, 443, 9090, 30443}, {v1.ProtocolTCP, 9153, 8080, 30153},
		}
		s := harness.Service("s", 1, func(s *v1.Service) {
			s.Spec.Ports = nil
			for i, p := range ports {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{
					Name: fmt.Sprintf("p%d", i), Protocol: p.protocol, Port: p.port,
					TargetPort: intstr.FromInt32(p.target), NodePort: p.nodePort})
			}
		})
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a", "n2a")...)...)
		w.Run(t, variant, clusterCIDR)
		a := harness.AddressesOf(1)
		for _, family := range families {
			for _, p := range ports {
				network := strings.ToLower(string(p.protocol))
				for _, to := range []netip.AddrPort{
					netip.AddrPortFrom(a.ClusterIP(family), uint16(p.port)),
					netip.AddrPortFrom(a.VIP(family), uint16(p.port)),
					netip.AddrPortFrom(a.ExternalIP(family), uint16(p.port)),
					netip.AddrPortFrom(w.Node1().IP(family), uint16(p.nodePort)),
				} {
					assert.NoError(t, serversOf(w.Client, network, to, "n1a", "n2a"))
					if got := w.Client.Ask(network, to, harness.Patient); got.Port != uint16(p.target) {
						t.Errorf("%s %s: %v, want target port %d", network, to, got, p.target)
					}
				}
			}
			// The same numbers on the other protocol are not the Service's.
			https := netip.AddrPortFrom(w.Node1().IP(family), 30443)
			if got := w.Client.Ask("udp", https, harness.Patient); got.Outcome != harness.Refused {
				t.Errorf("UDP to a TCP node port over IPv%d: %v", family, got)
			}
		}
	})
}

// TestOneAddressInTwoSlices: an address counts once, however many slices have it, and stays while one of them has it.
func TestOneAddressInTwoSlices(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", s)
		w.Write(t, "one.yaml", harness.SlicesNamed(s, "one", w.Ready("n1a", "n2a")...)...)
		w.Write(t, "two.yaml", harness.SlicesNamed(s, "two", append(w.Ready("n2a", "n3a"), w.Terminating("n1a")...)...)...)
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a", "n3a")
			// With n2a counted twice, it would get half of the requests.
			const requests = 900
			if _, most := due(requests, 1./3, len(families)); most >= requests/2 {
				t.Fatalf("up to %d of %d requests show nothing", most, requests)
			} else if got := spread(t, w.Client, clusterIP(1, family), requests); got["n2a"] > most {
				t.Errorf("%v: an address in two slices gets more than its share, which is %d at most", got, most)
			}
		}
		w.Remove(t, "one.yaml")
		for _, family := range families {
			// n1a is now known only as terminating, and there are ready endpoints.
			eventually(t, "slice removed", func() error {
				return serversOf(w.Client, "tcp", clusterIP(1, family), "n2a", "n3a")
			})
		}
	})
}

// TestDuplicateExternalIP: of two Services that ask for the same external IP and port, one has it, whichever came first;
// the other keeps everything else, and gets the address once it is free.
func TestDuplicateExternalIP(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		first := harness.Service("a-first", 1)
		second := harness.Service("b-second", 2)
		second.Spec.ExternalIPs = first.Spec.ExternalIPs
		// A LoadBalancer IP, which a controller wrote, goes before an external IP, which anybody could write.
		second.Spec.ExternalIPs = append(second.Spec.ExternalIPs, first.Status.LoadBalancer.Ingress[0].IP)
		w.Write(t, "second.yaml", harness.Objects(second, w.Ready("n2a")...)...)
		w.Write(t, "z-first.yaml", harness.Objects(first, w.Ready("n1a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		if err := d.WaitFor(harness.Limit, "level=WARN", "b-second", first.Spec.ExternalIPs[0]); err != nil {
			t.Errorf("the Service that doesn't get the address is not named: %v", err)
		}
		for _, family := range families {
			wantServers(t, w.Client, externalIP(1, family), "n1a")
			wantServers(t, w.Client, vip(1, family), "n1a")
			wantServers(t, w.Client, vip(2, family), "n2a")
			wantServers(t, w.Client, clusterIP(2, family), "n2a")
			wantServers(t, w.Client, nodePort(w.Node1().IP(family), 2), "n2a")
		}
		w.Remove(t, "z-first.yaml")
		for _, family := range families {
			eventually(t, "the address is free", answers(w.Client, externalIP(1, family), "n2a"))
		}
		eventually(t, "the LoadBalancer IP is free", answers(w.Client, vip(1, 4), "n2a"))
		w.Write(t, "z-first.yaml", harness.Objects(first, w.Ready("n1a")...)...)
		for _, family := range families {
			eventually(t, "the address is taken back", answers(w.Client, externalIP(1, family), "n1a"))
			wantServers(t, w.Client, vip(2, family), "n2a")
		}
	})
}

// TestBrokenManifest: a file of which anything can't be read is reported with file and line, and all its objects stay as they were
// read last, while everything else goes on changing.
func TestBrokenManifest(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		broken, good := harness.Service("broken", 1), harness.Service("good", 2)
		w.Write(t, "broken.yaml", harness.Objects(broken, w.Ready("n1a")...)...)
		w.Write(t, "good.yaml", harness.Objects(good, w.Ready("n1b")...)...)
		d := w.Run(t, variant, clusterCIDR)
		edit := harness.YAML(t, harness.Objects(broken, w.Ready("n3a")...)...)
		goodPod := "n1b"
		for _, c := range []struct{ name, text string }{
			{"one document", strings.Replace(edit, "addressType: IPv4", "addressType: [IPv4", 1)},
			{"wrong field", strings.Replace(edit, "addressType: IPv4", "addressType: IPv5", 1)},
			{"whole file", "}{ " + strings.ReplaceAll(edit, "\n---", "\n")},
		} {
			w.Write(t, "broken.yaml", harness.Objects(broken, w.Ready("n1a")...)...)
			for _, family := range families {
				eventually(t, c.name+": before", func() error { return serversOf(w.Client, "tcp", clusterIP(1, family), "n1a") })
			}
			logged := len(d.Log())
			w.WriteText(t, "broken.yaml", c.text)
			require.NoError(t, d.WaitForAfter(logged, harness.Limit, "level=WARN", "broken.yaml:"), "%s", c.name)
			goodPod = map[string]string{"n1b": "n2a", "n2a": "n1b"}[goodPod]
			w.Write(t, "good.yaml", harness.Objects(good, w.Ready(goodPod)...)...)
			for _, family := range families {
				eventually(t, c.name+": another file's edit", answers(w.Client, clusterIP(2, family), goodPod))
				wantServers(t, w.Client, clusterIP(1, family), "n1a")
				wantServers(t, w.Client, nodePort(w.Node1().IP(family), 1), "n1a")
			}
		}
		w.WriteText(t, "broken.yaml", edit)
		for _, family := range families {
			eventually(t, "mended file", answers(w.Client, clusterIP(1, family), "n3a"))
		}
	})
}

// TestEndpointRemovedUnderLoad: endpoints come and go, one at a time, without a request being lost; once the sync is over that takes one
// out, it gets no new TCP connections. (A UDP socket may by chance have the source port of an earlier
// one whose flow the kernel still tracks, and then it is that flow that goes on.)
func TestEndpointRemovedUnderLoad(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		set := func(pods ...string) { w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pods...)...)...) }
		set("n1a", "n2a", "n3a")
		d := w.Run(t, variant, clusterCIDR)
		apply := func(pods ...string) {
			t.Helper()
			line := len(d.Log())
			set(pods...)
			require.NoError(t, d.Applied(line))
		}
		var tcp, udp []*harness.Load
		for _, family := range families {
			tcp = append(tcp,
				w.Client.StartLoad("tcp", clusterIP(1, family), 2, 3*time.Millisecond),
				w.Pod("n1c").StartLoad("tcp", nodePort(w.Node1().IP(family), 1), 2, 3*time.Millisecond))
			udp = append(udp, w.Client.StartLoad("udp", vip(1, family), 2, 3*time.Millisecond))
		}
		all := []string{"n1a", "n2a", "n3a"}
		for range 2 {
			for i, gone := range all {
				left := slices.Delete(slices.Clone(all), i, i+1)
				more(t, aWhile, slices.Concat(tcp, udp)...)
				edited := time.Now()
				apply(left...)
				applied := time.Now()
				more(t, aWhile, tcp...)
				var last time.Time
				for _, l := range tcp {
					if from := l.LastFrom(gone); from.After(last) {
						last = from
					}
				}
				t.Logf("last new connection to %s %v after the edit", gone, last.Sub(edited))
				if last.After(applied) {
					t.Errorf("%s still got new connections %v after it was taken out", gone, last.Sub(applied))
				}
				apply(all...)
			}
		}
		noFailures(t, append(tcp, udp...)...)
	})
}

// TestServicesRemoved: when all Services are gone, the rules are those of a node that never had any.
func TestServicesRemoved(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Run(t, variant, clusterCIDR)
		empty := held(t, w, variant)
		var files []string
		write := func(file string, objects ...runtime.Object) {
			w.Write(t, file, objects...)
			files = append(files, file)
		}
		for i, s := range []*v1.Service{
			harness.Service("plain", 1), harness.Service("sticky", 2, sticky(time.Hour)),
			harness.Service("local", 3, harness.Policies("Local", "Local")),
			harness.Service("ranges", 4, sourceRanges("203.0.113.0/24", "2001:db8:c::/64")),
			harness.Service("none", 5), harness.Service("internal", 6, harness.ClusterOnly),
		} {
			var endpoints []harness.Endpoint
			if s.Name != "none" {
				endpoints = w.Ready("n1a", "n2a", "n3a")
			}
			if s.Name == "local" {
				s.Spec.HealthCheckNodePort = 32100
			}
			write(fmt.Sprintf("%d.yaml", i), harness.Objects(s, endpoints...)...)
		}
		for _, family := range families {
			eventually(t, "Services", answers(w.Client, clusterIP(6, family), "n1a", "n2a", "n3a"))
			eventually(t, "Services", answers(w.Client, clusterIP(1, family), "n1a", "n2a", "n3a"))
		}
		now := held(t, w, variant)
		for _, part := range byMode([]string{"KUBE-SVC-", "KUBE-FW-"}, []string{"-A -f ", "add KUBE-LOAD-BALANCER-SOURCE-CIDR "}) {
			if !strings.Contains(now, part) {
				t.Fatalf("no %q where some are expected:\n%s", part, now)
			}
		}
		for _, file := range files {
			w.Remove(t, file)
		}
		eventually(t, "all as without Services", func() error {
			if now := held(t, w, variant); now != empty {
				return fmt.Errorf("%s", firstDifference(empty, now))
			}
			return nil
		})
	})
}
