package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"nodeproxy/e2e/harness"
)

// TestManyServices: with so many Services that chains dispatch by a tree, each frontend of each one leads to its own
// endpoints, also after Services come and go, while another Service's clients notice nothing.
func TestManyServices(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		const services = 150
		pods := []string{"n1a", "n1b", "n2a", "n3a", ""} // every fifth Service has no endpoint
		pod := func(i int) string { return pods[i%len(pods)] }
		write := func(i int) {
			var endpoints []harness.Endpoint
			if pod(i) != "" {
				endpoints = w.Ready(pod(i))
			}
			s := harness.Service(fmt.Sprintf("s-%03d", i), i)
			w.Write(t, s.Name+".yaml", harness.Objects(s, endpoints...)...)
		}
		for i := 1; i <= services; i++ {
			write(i)
		}
		w.Run(t, variant, clusterCIDR)
		check := func(present func(int) bool) {
			t.Helper()
			var checks []func()
			for i := 1; i <= services; i++ {
				for _, family := range families {
					for f, to := range frontends(w, i, family) {
						network := networks[(i/2+f)%2]
						timeout, want := harness.Patient, harness.Answered
						if pod(i) == "" {
							want = harness.Refused
						}
						switch {
						case present(i):
						case f == 1: // nothing else listens at a node port
							want = harness.Refused
						case f == 0:
							want = freeClusterIP(variant)
						default:
							want = harness.TimedOut
						}
						if want == harness.TimedOut {
							timeout = harness.Brief
						}
						if want == harness.Refused {
							network = "udp" // a TCP socket takes a second to notice an ICMPv6 error
						}
						checks = append(checks, func() {
							a := w.Client.Ask(network, to, timeout)
							if a.Outcome != want || want == harness.Answered && a.Server != pod(i) {
								t.Errorf("Service %d, %s %s: %v, want %s by %q", i, network, to, a, want, pod(i))
							}
						})
					}
				}
			}
			for chunk := range slices.Chunk(checks, 200) {
				together(chunk...)
			}
		}
		check(func(int) bool { return true })

		loads := []*harness.Load{
			w.Client.StartLoad("tcp", clusterIP(1, 4), 1, 10*time.Millisecond),
			w.Client.StartLoad("tcp", nodePort(w.Node1().IP6, 3), 1, 10*time.Millisecond),
		}
		gone := []int{7, 8, 9, 10, 101, 142, 147}
		for _, i := range gone {
			w.Remove(t, fmt.Sprintf("s-%03d.yaml", i))
		}
		for _, family := range families {
			eventually(t, "a Service removed", ends(w.Client, clusterIP(147, family), freeClusterIP(variant)))
		}
		check(func(i int) bool { return !slices.Contains(gone, i) })
		for _, i := range gone {
			write(i)
		}
		for _, family := range families {
			eventually(t, "a Service is back", answers(w.Client, clusterIP(147, family), pod(147)))
		}
		check(func(int) bool { return true })
		noFailures(t, loads...)
	})
}

// TestManyEndpoints: with so many endpoints that they are picked by a tree, each is picked, and all about equally often.
func TestManyEndpoints(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		swarm := w.AddSwarm(t, 8080)
		var checks []func()
		// Counts on both sides of what one level of a tree may hold, and odd ones.
		for number, endpoints := range map[int]int{1: 200, 2: 33, 3: 17} {
			s := harness.Service(fmt.Sprintf("s-%d", endpoints), number, func(s *v1.Service) { s.Spec.Ports = s.Spec.Ports[:1] })
			objects := harness.Objects(s, slices.Repeat(w.Ready("n1a"), endpoints)...)
			for _, o := range objects {
				if slice, ok := o.(*discovery.EndpointSlice); ok {
					family := map[discovery.AddressType]int{discovery.AddressTypeIPv4: 4, discovery.AddressTypeIPv6: 6}[slice.AddressType]
					for i := range slice.Endpoints {
						slice.Endpoints[i].Addresses = []string{swarm.Addr(family, i).String()}
					}
				}
			}
			w.Write(t, s.Name+".yaml", objects...)
			checks = append(checks, func() {
				for _, family := range families {
					const each = 30
					seen := spread(t, w.Client, clusterIP(number, family), each*endpoints)
					least, most := due(each*endpoints, 1/float64(endpoints), 2*(200+33+17))
					for i := range endpoints {
						addr := swarm.Addr(family, i).String()
						if n := seen[addr]; n < max(least, 1) || n > most {
							t.Errorf("%d endpoints: %s was picked %d times of %d, from %d to %d are due", endpoints, addr, n, each*endpoints, least, most)
						}
						delete(seen, addr)
					}
					if len(seen) > 0 {
						t.Errorf("answers from %v", seen)
					}
				}
			})
		}
		w.Run(t, variant, clusterCIDR)
		together(checks...)
	})
}
