// Package e2e tests the nodeproxy binary with real packets on the real kernel.
package e2e

import (
	"fmt"
	"os"
	"testing"

	"nodeproxy/e2e/harness"
)

func TestMain(m *testing.M) {
	if err := selectTests(); err != nil {
		fmt.Fprintln(os.Stderr, "selecting tests:", err)
		os.Exit(2)
	}
	code := harness.Main(m)
	printFaults()
	os.Exit(code)
}

var (
	families = []int{4, 6}
	networks = []string{"tcp", "udp"}
)

// clusterCIDR is the flag that lets the daemon tell pods from others.
var clusterCIDR = "--cluster-cidr=" + harness.ClusterCIDR4.String() + "," + harness.ClusterCIDR6.String()
