package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// nftTablesOn is what a node has in the tables of mode nftables, without what changes by itself.
func nftTablesOn(t *testing.T, n *harness.Node) string {
	t.Helper()
	var out strings.Builder
	for _, family := range []string{"ip", "ip6"} {
		text, err := n.Output("nft", "-s", "-t", "list", "table", family, "nodeproxy")
		if err == nil {
			out.WriteString(text)
		}
		for _, set := range []string{"services", "endpoints", "kinds", "cluster-ips", "source-ranges"} {
			if text, err := n.Output("nft", "-s", "list", "set", family, "nodeproxy", set); err == nil {
				out.WriteString(sortedWords(text))
			}
			if text, err := n.Output("nft", "-s", "list", "map", family, "nodeproxy", set); err == nil {
				out.WriteString(sortedWords(text))
			}
		}
	}
	return traffic.ReplaceAllString(out.String(), "")
}

// traffic is what an element has counted.
var traffic = regexp.MustCompile(` counter packets \d+ bytes \d+`)

// sortedWords has the elements of a set, which the kernel lists in any order, one a line in order.
func sortedWords(text string) string {
	lines := strings.Split(strings.NewReplacer("elements = {", "", "}", "", ",", "").Replace(text), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(slices.Sorted(slices.Values(lines)), "\n")
}

// inNFTables are the tests of packets that are run in mode nftables too.
var inNFTables = []string{
	"TestPacketMatrix", "TestAffinityKeepsServer", "TestAffinityExpires", "TestMasquerade", "TestSourceRanges", "TestSourceRangesWithLocalVIP",
	"TestTopologyHints", "TestNodePortAddresses", "TestPolicyChangeKeepsConnections", "TestRestartUnderLoad", "TestConnectionsSurvive",
	"TestEndpointRemovedUnderLoad", "TestUDPClientsFollowEndpoints", "TestUDPServiceRecreated", "TestTCPReset",
	"TestCleanup", "TestDrift", "TestStartWritesNothing", "TestDuplicateExternalIP", "TestSingleStack", "TestInvalidPacketsDropped",
	"TestNeighbours", "TestNodeLocalDNS", "TestMeshes", "TestMatrixBesideMarks",
	"TestFaultKilled", "TestFaultNoMemory", "TestFaultNotificationsLost", "TestFaultInterruptedDumps", "TestFaultStorm", "TestFaultClock",
	"TestDriftNoStorm", "TestSoak",
	"TestMetrics", "TestMetricsOfTrouble", "TestMetricsMove", "TestMetricsAreTheKernels", "TestBadConfigurations", "TestNewConfigurations",
	"TestReloadLeaksNothing", "TestListening", "TestMasqueradeBit", "TestTwoProxies", "TestWaitEnds", "TestExternalIPOfAnotherHost",
	"TestExternalIPsNotAllowed", "TestEarlyConnectionsAtStart", "TestPodsAsEndpoints", "TestFieldChanges", "TestPorts", "TestOneAddressInTwoSlices",
	"TestBadInputLeavesTheRestAlone", "TestForeignRulesSurvive", "TestTraceLive",
}

// notHere leaves out what takes too long to run again each time: neighbours that do nothing to the tables of this mode that others do not
// do as well, and the legacy variant of iptables, which only neighbours use here. NODEPROXY_E2E_MODE=nftables runs everything.
const notHere = "^TestNeighbours$/^(kubelet.*|flannel|Cilium|Docker|Docker_with_nftables|ufw|nftables.conf|iptables-persistent)$" +
	"|^TestNeighbours$/.*/^legacy$|^(TestNodeLocalDNS|TestMatrixBesideMarks)$/^legacy$|^TestMeshes$/.*/^legacy$"

// TestModeNFTables runs tests again, in mode nftables.
func TestModeNFTables(t *testing.T) {
	if mode != harness.IPTables {
		t.Skip("it is run in mode iptables, for mode nftables")
	}
	t.Parallel()
	self, err := os.Executable() // not /proc/self/exe: a test that goes on elsewhere runs this name again, by another program
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.run=^("+strings.Join(inNFTables, "|")+")$", "-test.skip="+notHere, "-test.v", "-test.timeout=40m")
	cmd.Env = append(os.Environ(), harness.ModeVariable+"="+string(harness.NFTables))
	out, err := cmd.CombinedOutput()
	if passed := regexp.MustCompile(`(?m)^--- PASS: `).FindAllString(string(out), -1); err != nil || len(passed) != len(inNFTables) {
		t.Errorf("%d of %d tests passed: %v\n%s", len(passed), len(inNFTables), err, out)
	}
}

// TestModeSwitchNFTables: from iptables to nftables and back by restarts with another --mode. No request fails, connections go on,
// and nothing of the former mode is left.
func TestModeSwitchNFTables(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		s := &switching{World: w, variant: variant, open: map[string]*harness.Conversation{}}
		s.start(t, harness.IPTables)
		s.load()
		s.converse(t, "mode iptables")
		for i, m := range []harness.Mode{harness.NFTables, harness.IPTables, harness.NFTables} {
			more(t, aWhile, s.loads...)
			s.start(t, m)
			eventually(t, "the former mode is gone", func() error {
				var left string
				if m == harness.IPTables {
					left = nftTablesOn(t, w.Node1())
				} else {
					left = kubeChains.FindString(rules(t, w, variant))
				}
				if left != "" {
					return fmt.Errorf("there is %s", left)
				}
				return nil
			})
			s.goOn(t, "in mode "+string(m))
			s.converse(t, "mode "+string(m)+strings.Repeat(" again", i/2))
		}
		s.requested(t, 100)
		noFailures(t, s.loads...)
	})
}

// empty waits until nothing is left of something.
func empty(t *testing.T, what string, left func() string) {
	t.Helper()
	eventually(t, what, func() error {
		if is := left(); is != "" {
			return fmt.Errorf("there is %s", is)
		}
		return nil
	})
}

// requested waits until each load has made n requests.
func (s *switching) requested(t *testing.T, n int) {
	t.Helper()
	for _, l := range s.loads {
		eventually(t, "requests", func() error { return requestsMade(l, n) })
	}
}

// TestIPVSModeSwitchNFTables: from ipvs to nftables and back. No request fails, and connections of mode ipvs go on through the virtual
// servers that stay for them.
func TestIPVSModeSwitchNFTables(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		s := &switching{World: w, variant: variant, open: map[string]*harness.Conversation{}}
		s.start(t, harness.IPVS)
		s.load()
		s.converse(t, "mode ipvs")
		s.requested(t, 20)
		s.start(t, harness.NFTables)
		empty(t, "the rules of mode ipvs are gone", func() string { return ipvsChains.FindString(rules(t, w, variant)) })
		s.goOn(t, "in mode nftables")
		s.converse(t, "mode nftables")
		s.requested(t, 60)
		s.start(t, harness.IPVS)
		empty(t, "the tables of mode nftables are gone", func() string { return nftTablesOn(t, w.Node1()) })
		s.goOn(t, "in mode ipvs again")
		s.requested(t, 120)
		noFailures(t, s.loads...)
	})
}

// ipvsChains finds a chain of mode ipvs.
var ipvsChains = regexp.MustCompile(`(?m)^:KUBE-(IPVS|NODE-PORT|SERVICES|POSTROUTING|FORWARD|LOAD-BALANCER)\S*`)

// TestTakeoverToNFTables: a start in mode nftables over the rules of a kube-proxy in mode iptables. No request fails, connections go on, and
// nothing of kube-proxy's is left.
func TestTakeoverToNFTables(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		writeKubeProxysRules(t, w, variant)
		s := &switching{World: w, variant: variant, open: map[string]*harness.Conversation{}}
		s.load()
		s.converse(t, "kube-proxy")
		s.requested(t, 20)
		s.start(t, harness.NFTables)
		empty(t, "kube-proxy's rules are gone", func() string { return kubeChains.FindString(rules(t, w, variant)) })
		s.goOn(t, "in mode nftables")
		s.converse(t, "mode nftables")
		s.requested(t, 80)
		noFailures(t, s.loads...)
	})
}

// kubeChains finds a chain of mode iptables. KUBE-FIREWALL is the kubelet's too, and stays.
var kubeChains = regexp.MustCompile(`(?m)^:KUBE-(SERVICES|SVC|SEP|POSTROUTING|FORWARD|NODEPORTS)\S*`)
