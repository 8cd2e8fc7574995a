package e2e

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

func sticky(timeout time.Duration) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
			ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(timeout.Seconds()))}}
	}
}

// stickyServer asks a few times and returns the one server that answers.
func stickyServer(t *testing.T, client *harness.Host, network string, to netip.AddrPort) string {
	t.Helper()
	first := client.Ask(network, to, harness.Patient)
	for range 12 {
		a := client.Ask(network, to, harness.Patient)
		if a.Outcome != harness.Answered || a.Server != first.Server {
			t.Fatalf("%s from %s to %s: %v after %v, want the same server", network, client.Name, to, a, first)
		}
	}
	return first.Server
}

// TestAffinityKeepsServer: a client stays with its endpoint, whichever frontend it comes through, while the daemon
// programs other changes, gains endpoints of the same Service, and restarts; and goes on with another one when its own
// is gone. In mode ipvs each frontend, as a virtual server of its own, keeps its clients for itself.
func TestAffinityKeepsServer(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{Pods: []int{3, 2, 2}})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		s := harness.Service("sticky", 1, sticky(time.Hour))
		endpoints := w.Ready("n1a", "n1b", "n2a", "n2b", "n3a")
		w.Write(t, "sticky.yaml", harness.Objects(s, endpoints...)...)
		d := w.Run(t, variant, clusterCIDR)

		kept := map[string]string{}
		check := func(when string) {
			t.Helper()
			for _, family := range families {
				for _, network := range networks {
					for _, client := range []*harness.Host{w.Client, w.Pod("n1c").Host} {
						for f, to := range frontends(w, 1, family) {
							key := fmt.Sprintf("%s %s IPv%d", client.Name, network, family)
							if mode != harness.IPTables && f > 0 {
								key += " at " + to.String()
							}
							server := stickyServer(t, client, network, to)
							if before, ok := kept[key]; ok && before != server {
								t.Errorf("%s, %s: moved from %s to %s (at %s)", when, key, before, server, to)
							}
							kept[key] = server
						}
					}
				}
			}
		}
		check("at first")

		other := harness.Service("other", 2)
		w.Write(t, "other.yaml", harness.Objects(other, w.Ready("n2a")...)...)
		eventually(t, "another Service", answers(w.Client, clusterIP(2, 4), "n2a"))
		check("after another Service came")

		endpoints = append(endpoints, w.Ready("n3b")...)
		logged := len(d.Log())
		w.Write(t, "sticky.yaml", harness.Objects(s, endpoints...)...)
		require.NoError(t, d.WaitForAfter(logged, harness.Limit, harness.InSync))
		check("after an endpoint came")

		require.NoError(t, d.Stop())
		w.Run(t, variant, clusterCIDR)
		check("after a restart")

		gone := kept["client tcp IPv4"]
		var left []string
		for _, ep := range endpoints {
			if ep.Name != gone {
				left = append(left, ep.Name)
			}
		}
		w.Write(t, "sticky.yaml", harness.Objects(s, w.Ready(left...)...)...)
		eventually(t, "move to another endpoint", answers(w.Client, clusterIP(1, 4), left...))
		if server := stickyServer(t, w.Client, "tcp", clusterIP(1, 4)); server == gone {
			t.Errorf("%s still answers after its endpoint went away", gone)
		}
	})
}

// TestAffinityExpires: a client that stays away for timeoutSeconds gets any endpoint; one that comes back in time keeps
// its own, for as long as it does so.
func TestAffinityExpires(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{Pods: []int{3, 2, 2}})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		// Ten Services with five endpoints each all choose the same endpoint twice running once in 10^7 times.
		const services = 10
		timeout := byMode(4*time.Second, 8*time.Second) // the kernel with IPVS is a slow one
		for i := 1; i <= services; i++ {
			s := harness.Service(fmt.Sprintf("sticky-%d", i), i, sticky(timeout), harness.ClusterOnly)
			w.Write(t, s.Name+".yaml", harness.Objects(s, w.Ready("n1a", "n1b", "n2a", "n2b", "n3a")...)...)
		}
		// In mode ipvs, a client counts as there for as long as IPVS remembers a connection of its, which is two minutes for TCP.
		network := byMode("tcp", "udp")
		w.Run(t, variant, clusterCIDR, "--ipvs-udp-timeout=1s")
		asked := map[int]time.Time{} // when each was last asked
		away := map[int]bool{}       // whether the client, on a busy machine, stayed away from one for longer than it wanted to
		ask := func() map[int]string {
			t.Helper()
			out := map[int]string{}
			for i := 1; i <= services; i++ {
				for _, family := range families {
					begin := time.Now()
					a := w.Client.Ask(network, clusterIP(i, family), harness.Patient)
					if a.Outcome != harness.Answered {
						t.Fatalf("Service %d, IPv%d: %v", i, family, a)
					}
					k := 10*i + family
					away[k] = away[k] || !asked[k].IsZero() && time.Since(asked[k]) >= timeout
					out[k], asked[k] = a.Server, begin
				}
			}
			return out
		}
		moved := func(before, now map[int]string) (out int) {
			for k := range before {
				if before[k] != now[k] {
					out++
				}
			}
			return out
		}
		first := ask()
		for range 4 {
			time.Sleep(timeout / 2) // It is time that an affinity ends with.
			now := ask()
			maps.DeleteFunc(first, func(k int, _ string) bool { return away[k] })
			if n := moved(first, now); n > 0 {
				t.Errorf("%d of %d affinities were lost by a client that never stayed away for %v", n, len(first), timeout)
			}
		}
		if len(first) < services {
			t.Errorf("only %d Services were asked often enough", len(first))
		}
		time.Sleep(timeout + timeout/2) // It is time that an affinity ends with.
		if n := moved(first, ask()); n == 0 {
			t.Errorf("all %d affinities lasted longer than %v", len(first), timeout)
		}
	})
}
