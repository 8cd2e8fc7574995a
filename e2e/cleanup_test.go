package e2e

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// TestCleanup: after "nodeproxy cleanup" nothing is left of nodeproxy's; what others have stays. A dry run prints as much, and
// changes nothing. What a kube-proxy leaves is in the tests of cmd/nodeproxy.
func TestCleanup(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		const foreign = "192.0.2.77/32"
		output(t, w, variant.Tool("iptables")+" -t nat -A PREROUTING -s "+foreign+" -j ACCEPT")
		require.NoError(t, w.Run(t, variant, clusterCIDR).Stop())
		binary, err := harness.Binary()
		require.NoError(t, err)
		ran := held(t, w, variant)
		dry := output(t, w, binary+" cleanup --dry-run")
		if after := held(t, w, variant); after != ran {
			t.Errorf("a dry run has changed something:\n%s\nwas\n%s", after, ran)
		}
		promised := "chain KUBE-SERVICES of table nat, iptables"
		if mode == harness.NFTables {
			promised = "nftables table ip6 nodeproxy"
		}
		if !strings.Contains(dry, promised) {
			t.Errorf("a dry run printed only\n%s", dry)
		}
		if wet := output(t, w, binary+" cleanup"); wet != dry {
			t.Errorf("removed was\n%s\nand a dry run had promised\n%s", wet, dry)
		}
		left := held(t, w, variant)
		for _, line := range strings.Split(left, "\n") {
			if strings.Contains(line, "KUBE-") && !strings.Contains(line, "KUBE-FIREWALL") || strings.Contains(line, "kube-ipvs0") {
				t.Errorf("%q is left", line)
			}
		}
		if !strings.Contains(left, foreign) {
			t.Error("a rule of somebody else's is gone")
		}
		if mode == harness.IPVS && ipSets(t, w)+virtualServers(t, w)+device(t, w) != "" {
			t.Errorf("left are\n%s", left)
		}
		if again := output(t, w, binary+" cleanup"); again != "" {
			t.Errorf("a second time there was\n%s", again)
		}
	})
}
