package e2e

import (
	"flag"
	"slices"
	"strings"
	"testing"

	"nodeproxy/e2e/harness"
)

// mode is the one that the tests run in. Package e2e/ipvs runs them in mode ipvs.
var mode = harness.ModeUnderTest()

// onlyIPTables are the tests of what mode ipvs has nothing of.
var onlyIPTables = []string{
	"TestSCTPFlows",                     // of conntrack entries without packets; see TestIPVSSCTP
	"TestUDPFlowsStay",                  // IPVS forgets UDP clients of an endpoint with the endpoint
	"TestUDPServiceDeletedWhileDown",    // of silence where no Service is; see freeClusterIP
	"TestCompact", "TestCompactChanges", // of forms of rules
	"TestModeIPVSMissing", "TestModeIPVSMissingBesideProxy", // what they say is missing is there
	"TestLocalhostNotReachableFromOutside",                                 // no localhost node ports, and so no route_localnet
	"TestRenderIsWhatRunApplies",                                           // of iptables-restore's input
	"TestSeeds",                                                            // of what objects mean: they find cluster IPs by the comments of rules
	"TestStaleChainsRemoved",                                               // of chains for each Service; see TestIPVSStaleRemoved
	"TestTakeoverFromKubeProxy",                                            // in mode iptables; see TestIPVSModeSwitch
	"TestTakeoverToNFTables", "TestModeNFTables", "TestModeSwitchNFTables", // of another mode
	"TestNFTablesWithoutPrograms", "TestNFTablesServiceCIDRs",
	"TestFaultLock", // of programs that write rules, as are these four: they are the same for all modes
	"TestFaultRestoreHangs",
	"TestFaultRestoreRefusesOne",
	"TestFaultDiskFull",
	"TestFaultKilledWhileWriting",
}

// onlyIPVS begins the names of tests that need a kernel with IPVS.
const onlyIPVS = "TestIPVS"

// selectTests leaves out the tests that are not for the mode, beside those that the flag -skip names, and those that are not for the tier.
func selectTests() error {
	flag.Parse()
	out := notIn(mode)
	if mode == harness.IPTables && kernelHasIPVS() {
		out += "|^TestModeIPVSMissing"
	}
	if err := leaveOut(out); err != nil {
		return err
	}
	return selectTier()
}

// notIn is a pattern of the tests that are not for a mode.
func notIn(m harness.Mode) string {
	switch m {
	case harness.NFTables:
		not := slices.DeleteFunc(append(slices.Clone(onlyIPTables), notNFTables...), func(name string) bool {
			return strings.HasPrefix(name, "TestTCPReset")
		})
		return "^" + onlyIPVS + "|^(" + strings.Join(not, "|") + ")$"
	case harness.IPVS:
		return "^(" + strings.Join(onlyIPTables, "|") + ")$"
	}
	return "^" + onlyIPVS
}

// leaveOut adds a pattern to those of the flag -skip.
func leaveOut(pattern string) error {
	skip := flag.Lookup("test.skip").Value
	if given := skip.String(); given != "" {
		pattern = given + "|" + pattern
	}
	return skip.Set(pattern)
}

// notNFTables are tests of what mode nftables has nothing of.
var notNFTables = []string{
	"TestServicesRemoved",  // of chains for each Service
	"TestEarlyConnections", // somebody takes chains of iptables away
	"TestHealthCheckNodePort",
	"TestBackendAuto",         // of the variants of iptables
	"TestFaultNativeRules",    // of what iptables-save can't read
	"TestFaultRestoreRefused", // of iptables-restore; see TestFaultNoMemory and TestMetricsOfTrouble
	"TestForwardPolicyDrop",   // no rule of this mode's table accepts what another table drops
}

// byMode picks what is expected in the mode under test.
func byMode[T any](iptables, ipvs T) T {
	if mode == harness.IPVS {
		return ipvs
	}
	return iptables
}

// freeClusterIP is how a request to a cluster IP ends that no Service of ours has. In mode iptables the packet goes where
// the network sends it, and here nobody answers. With a route for the range, such an address is the node's own.
func freeClusterIP(variant harness.Variant) harness.Outcome {
	if mode == harness.IPVS && harness.VIPsWith(variant) == harness.VIPRoutes {
		return harness.Refused
	}
	return harness.TimedOut
}

// otherPort is how a request ends to a port that is none of the Service's, at an address of the Service. Mode ipvs makes
// it an address of the node, and refuses there what is no Service's.
func otherPort() harness.Outcome {
	if mode == harness.NFTables {
		return harness.Refused
	}
	return byMode(harness.TimedOut, harness.Refused)
}

// onEachVariant runs a test on both variants of iptables, in parallel with others. In mode ipvs, the variants also have
// the two ways in which addresses of Services become the node's; see harness.VIPsWith.
func onEachVariant(t *testing.T, test func(t *testing.T, variant harness.Variant)) {
	t.Helper()
	variants := harness.Variants
	if mode == harness.NFTables {
		variants = []harness.Variant{harness.NFT} // It runs no iptables.
	}
	onVariants(t, variants, test)
}

// inWorld runs a test on each variant, in a World whose nodes the daemon knows.
func inWorld(t *testing.T, test func(t *testing.T, w *harness.World, variant harness.Variant)) {
	t.Helper()
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		test(t, w, variant)
	})
}

// onVariants runs a test on some variants of iptables, in parallel with others. In mode nftables, only other programs use iptables.
func onVariants(t *testing.T, variants []harness.Variant, test func(t *testing.T, variant harness.Variant)) {
	t.Helper()
	t.Parallel()
	for _, variant := range variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			test(t, variant)
		})
	}
}
