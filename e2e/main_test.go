// Package e2e tests the nodeproxy binary with real packets on the real kernel.
package e2e

import (
	"os"
	"testing"

	"nodeproxy/e2e/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// onEachVariant runs a test on both variants of iptables, in parallel with others.
func onEachVariant(t *testing.T, test func(t *testing.T, variant harness.Variant)) {
	t.Helper()
	t.Parallel()
	for _, variant := range harness.Variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			test(t, variant)
		})
	}
}

var (
	families = []int{4, 6}
	networks = []string{"tcp", "udp"}
)

// clusterCIDR is the flag that lets the daemon tell pods from others.
var clusterCIDR = "--cluster-cidr=" + harness.ClusterCIDR4.String() + "," + harness.ClusterCIDR6.String()
