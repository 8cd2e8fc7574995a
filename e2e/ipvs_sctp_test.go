package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// TestIPVSSCTP: SCTP through every frontend, from every kind of client, in both modes: here the kernel has SCTP, too.
func TestIPVSSCTP(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		for _, m := range []harness.Mode{harness.IPTables, harness.IPVS} {
			t.Run(string(m), func(t *testing.T) { testSCTP(t, variant, m) })
		}
	})
}

func testSCTP(t *testing.T, variant harness.Variant, m harness.Mode) {
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	const cluster, local, none = 1, 2, 3
	for number, external := range map[int]string{cluster: "Cluster", local: "Local", none: "Cluster"} {
		s := harness.Service(fmt.Sprintf("s-%d", number), number, harness.Policies("Cluster", external), func(s *v1.Service) {
			s.Spec.Ports = s.Spec.Ports[:1]
			s.Spec.Ports[0].Protocol = v1.ProtocolSCTP
		})
		var endpoints []harness.Endpoint
		if number != none {
			endpoints = w.Ready("n1a", "n2a")
		}
		w.Write(t, s.Name+".yaml", harness.Objects(s, endpoints...)...)
	}
	for _, name := range []string{"n1a", "n2a"} {
		for _, family := range families {
			pod := w.Pod(name)
			require.NoError(t, w.ServeSCTP(pod.Netns, name, netip.AddrPortFrom(pod.IP(family), 8080)))
		}
	}
	w.Run(t, variant, "--mode="+string(m), clusterCIDR)
	node, pod, endpoint, outside := w.Node1().Host, w.Pod("n1c").Host, w.Pod("n1a").Host, w.Client
	both, here := []string{"n1a", "n2a"}, []string{"n1a"}
	for _, family := range families {
		for f, to := range frontends(w, cluster, family) {
			masqueraded := node.IP(family)
			wantSCTP(t, node, to, masqueraded, both)
			wantSCTP(t, outside, to, masqueraded, both)
			if f == 0 { // the cluster IP
				wantSCTP(t, pod, to, pod.IP(family), both)
				wantSCTP(t, endpoint, to, netip.Addr{}, both) // itself by way of the Service, too
			} else {
				wantSCTP(t, pod, to, masqueraded, both)
			}
		}
		for _, to := range frontends(w, local, family)[1:] {
			wantSCTP(t, outside, to, outside.IP(family), here)
			wantSCTP(t, pod, to, pod.IP(family), both)
			wantSCTP(t, node, to, node.IP(family), both)
		}
		for _, client := range []*harness.Host{node, pod, outside} {
			// SCTP clients of Linux wait on after an ICMP error.
			if a := client.AskSCTP(clusterIP(none, family), harness.Brief); a.Outcome == harness.Answered {
				t.Errorf("%s to a Service without endpoints: %v", client.Name, a)
			}
		}
	}
}

// wantSCTP asks until every wanted server has answered, and checks the address that it saw, if one is given.
func wantSCTP(t *testing.T, client *harness.Host, to netip.AddrPort, source netip.Addr, want []string) {
	t.Helper()
	seen := map[string]int{}
	for i := 0; i < mostRequests && len(seen) < len(want) || i < 4; i++ {
		a := client.AskSCTP(to, harness.Patient)
		if a.Outcome != harness.Answered || source.IsValid() && a.Source != source || !slices.Contains(want, a.Server) {
			t.Errorf("SCTP from %s to %s: %v, want one of %v to see %v", client.Name, to, a, want, source)
			return
		}
		seen[a.Server]++
	}
	if len(seen) < len(want) {
		t.Errorf("SCTP from %s to %s: answers from %v, want all of %v", client.Name, to, seen, want)
	}
}
