package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// TestTakeoverFromKubeProxy: a start over kube-proxy's own rules, for the same Services, loses no request, and leaves
// the chains of Services and endpoints as they are: on the nft variant, every one of their rules keeps its handle.
//
// The rules in testdata are those that kube-proxy 1.36.3 wrote for manyServices in this harness, without its nfacct
// counters.
func TestTakeoverFromKubeProxy(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		writeKubeProxysRules(t, w, variant)
		var loads []*harness.Load
		for _, family := range families {
			loads = append(loads,
				w.Client.StartLoad("tcp", clusterIP(1, family), 2, 3*time.Millisecond),
				w.Client.StartLoad("udp", vip(4, family), 2, 3*time.Millisecond),
				w.Pod("n1c").StartLoad("tcp", nodePort(w.Node1().IP(family), 2), 2, 3*time.Millisecond),
				w.Client.StartLoad("tcp", nodePort(w.Node1().IP(family), 3), 2, 3*time.Millisecond))
		}
		more(t, aWhile, loads...)
		before := ruleHandles(t, w, variant)
		stuck := stickyServer(t, w.Client, "tcp", clusterIP(2, 4))
		w.Run(t, variant, clusterCIDR)
		more(t, aWhile, loads...)
		noFailures(t, loads...)
		if now := stickyServer(t, w.Client, "tcp", clusterIP(2, 4)); now != stuck {
			t.Errorf("a client with affinity to %s moved to %s", stuck, now)
		}
		if got, want := serviceChainRules(ruleHandles(t, w, variant)), serviceChainRules(before); got != want {
			t.Errorf("chains written again that were right:\n%s", firstDifference(want, got))
		}
		for _, family := range families {
			wantServers(t, w.Client, clusterIP(5, family), "n1a", "n2a", "n3a")
			wantServers(t, w.Client, nodePort(w.Node1().IP(family), 3), "n1a")
			wantOutcome(t, w.Node1().Host, vip(4, family), harness.TimedOut)
		}
	})
}

// writeKubeProxysRules puts node1 in the state in which kube-proxy leaves it.
func writeKubeProxysRules(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	for _, f := range []struct{ family, tool string }{{"ipv4", "iptables"}, {"ipv6", "ip6tables"}} {
		text, err := os.ReadFile(filepath.Join("testdata", "kube-proxy-1.36.3."+f.family+".rules"))
		require.NoError(t, err)
		if _, err := w.Node1().OutputWithInput(string(text), variant.Tool(f.tool)+"-restore", "-w"); err != nil {
			t.Fatal(err)
		}
	}
}

// serviceChainRules picks the chains of endpoints and of the picks between them out of what nft lists, with their rules
// in it.
func serviceChainRules(listing string) string {
	var out strings.Builder
	inside := false
	for _, line := range strings.Split(listing, "\n") {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "chain "); ok {
			inside = false
			for _, prefix := range []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-"} {
				inside = inside || strings.HasPrefix(name, prefix)
			}
			inside = inside && !strings.HasPrefix(name, "KUBE-EXT-NODEPORTS")
			inside = inside && !strings.ContainsAny(name, ".:") // a chain of a dispatcher, named after a part of its addresses or ports
		}
		if inside {
			out.WriteString(line + "\n")
		}
		inside = inside && strings.TrimSpace(line) != "}"
	}
	return out.String()
}
