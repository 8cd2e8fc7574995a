package e2e

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// tierVariable is set to firstTier by "make test", which runs only the tests that inFirstTier lists, in each of their modes: of the two variants of
// iptables only on nft, and of the two ways in which mode ipvs has the addresses of Services only with the default. "make test-all" runs all.
const tierVariable, firstTier = "NODEPROXY_TIER", "1"

var (
	anyMode    = []harness.Mode{harness.IPTables, harness.IPVS, harness.NFTables}
	ownKernel  = []harness.Mode{harness.IPTables, harness.NFTables} // modes that run outside of the test kernel, which is slow
	inIPTables = []harness.Mode{harness.IPTables}
	inModeIPVS = []harness.Mode{harness.IPVS}
)

// inFirstTier are the tests of the first tier: those that find most for the time that they take. What each alone would catch is said
// beside it.
var inFirstTier = []struct {
	name    string
	modes   []harness.Mode
	catches string
}{
	{"TestTiers", inIPTables, "a test in this list that is not there"},
	{"TestPacketMatrix", anyMode, "a wrong verdict for any frontend, policy, state of endpoints and client; trace that disagrees with packets"},
	{"TestRestartUnderLoad", anyMode, "a start that disturbs traffic, after SIGTERM and SIGKILL"},
	{"TestConnectionsSurvive", anyMode, "open connections cut by an edit, a restart or the end of an endpoint"},
	{"TestEndpointRemovedUnderLoad", anyMode, "a request lost while endpoints come and go; new connections to one that has gone"},
	{"TestUDPClientsFollowEndpoints", anyMode, "UDP flows left with an endpoint that has gone"},
	{"TestSourceRanges", anyMode, "load balancer source ranges that let in others, or keep out whom they name"},
	{"TestAffinityKeepsServer", anyMode, "clients with affinity that change their server"},
	{"TestCleanup", anyMode, "what cleanup leaves behind, or takes from others"},
	{"TestSingleStack", anyMode, "a node of one family"},
	{"TestMasquerade", ownKernel, "a client's address lost, or kept where it can't be, by each way to tell pods from others"},
	{"TestTopologyHints", ownKernel, "traffic that leaves its zone or node against the hints"},
	{"TestNodePortAddresses", ownKernel, "node ports that answer on addresses that were not asked for"},
	{"TestStartWritesNothing", ownKernel, "a start that writes rules that are right already"},
	{"TestDrift", ownKernel, "changes by other programs that are not repaired, or not reported"},
	{"TestForeignRulesSurvive", ownKernel, "rules of others that are lost"},
	{"TestInvalidPacketsDropped", ownKernel, "packets that conntrack calls invalid and that reset connections"},
	{"TestFieldChanges", ownKernel, "what an edit of a Service leaves at its old addresses"},
	{"TestBadInputLeavesTheRestAlone", ownKernel, "one bad object that stops the others"},
	{"TestBadConfigurations", ownKernel, "a configuration that can't be used and takes the one in force with it"},
	{"TestNewConfigurations", ownKernel, "a new configuration that loses requests"},
	{"TestTwoProxies", ownKernel, "two proxies that write the same rules"},
	{"TestScaling", ownKernel, "numbers of endpoints that are not spread over"},
	{"TestPorts", ownKernel, "ports and protocols of one Service taken for each other"},
	{"TestOneAddressInTwoSlices", ownKernel, "an endpoint lost, or counted twice, while a controller moves it"},
	{"TestDuplicateExternalIP", ownKernel, "an address that two Services want"},
	{"TestEarlyConnectionsAtStart", ownKernel, "connections that began before there were rules, and hang"},
	{"TestTCPReset", ownKernel, "connections to an endpoint that has gone, and hang"},
	{"TestPolicyChangeKeepsConnections", ownKernel, "connections cut by a change of the policy"},
	{"TestFaultKilled", ownKernel, "what a start makes of rules half written"},
	{"TestFaultNotificationsLost", ownKernel, "changes that were missed when the kernel dropped notifications"},
	{"TestMetrics", ownKernel, "metrics that do not say what happened"},
	{"TestTakeoverFromKubeProxy", inIPTables, "a take-over of kube-proxy's own rules that loses requests"},
	{"TestTakeoverToNFTables", inIPTables, "the same in mode nftables"},
	{"TestModeSwitchNFTables", inIPTables, "a change of the mode that loses requests, or leaves the former one's rules"},
	{"TestNFTablesWithoutPrograms", inIPTables, "a program that mode nftables should do without"},
	{"TestNFTablesServiceCIDRs", inIPTables, "free cluster IPs that are led astray"},
	{"TestSeeds", inIPTables, "objects that are not read as they are meant"},
	{"TestRenderIsWhatRunApplies", inIPTables, "render that prints other rules than run writes"},
	{"TestForwardPolicyDrop", inIPTables, "traffic that a firewall drops because it was not accepted"},
	{"TestHealthCheckNodePort", inIPTables, "health check node ports that say the wrong thing"},
	{"TestLocalhostNotReachableFromOutside", inIPTables, "services on 127.0.0.1 that become reachable from outside"},
	{"TestBrokenManifest", inIPTables, "a file half written that takes its objects away"},
	{"TestServicesRemoved", inIPTables, "chains of Services that are gone"},
	{"TestUDPServiceRecreated", inIPTables, "UDP flows that outlive their Service"},
	{"TestUDPFlowsStay", inIPTables, "UDP flows cut that should go on"},
	{"TestUDPServiceDeletedWhileDown", inIPTables, "UDP flows of what changed while no proxy ran"},
	{"TestStaleChainsRemoved", inIPTables, "chains of an earlier run"},
	{"TestCompact", inIPTables, "the form of rules above 1,000 endpoints"},
	{"TestBackendAuto", inIPTables, "the variant of iptables that nobody uses"},
	{"TestListening", inIPTables, "addresses that are listened on without being asked for"},
	{"TestEndpointWithoutNodeName", inIPTables, "endpoints of no node"},
	{"TestFaultRestoreRefused", inIPTables, "a sync that fails, and is not made good"},
	{"TestIPVSModeSwitch", inModeIPVS, "a change to mode ipvs and back that loses requests, or leaves what is of mode ipvs"},
	{"TestIPVSDevice", inModeIPVS, "addresses of Services that the node answers for elsewhere"},
	{"TestIPVSForeignServersSurvive", inModeIPVS, "virtual servers of others that are lost"},
}

// selectTier leaves only the tests of the first tier, if that is asked for; or, with -run, those that it matches, in the first tier's variants.
func selectTier() error {
	if os.Getenv(tierVariable) != firstTier {
		return nil
	}
	if err := leaveOut("/^" + string(harness.Legacy) + "$|//^" + string(harness.Legacy) + "$|^TestPacketMatrix$//^" + string(harness.VIPAddresses) + "$"); err != nil {
		return err
	}
	var names []string
	for _, test := range inFirstTier {
		if slices.Contains(test.modes, mode) {
			names = append(names, test.name)
		}
	}
	pattern := "^(" + strings.Join(names, "|") + ")$"
	if list := flag.Lookup("test.list").Value; list.String() == "." { // Package e2e/ipvs divides them.
		return list.Set(pattern)
	}
	if run := flag.Lookup("test.run").Value; run.String() == "" {
		return run.Set(pattern)
	}
	return nil
}

// testDeclaration finds a test in a file.
var testDeclaration = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)

// TestTiers: every test of the first tier is there, and says what it would catch.
func TestTiers(t *testing.T) {
	t.Parallel()
	there := map[string]bool{}
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range testDeclaration.FindAllSubmatch(text, -1) {
			there[string(m[1])] = true
		}
	}
	for _, test := range inFirstTier {
		if !there[test.name] || test.catches == "" || len(test.modes) == 0 {
			t.Errorf("%+v: there is no such test, it is listed twice, or it has no mode or reason", test)
		}
		for _, m := range test.modes {
			if regexp.MustCompile(notIn(m)).MatchString(test.name) {
				t.Errorf("%s is not for mode %s", test.name, m)
			}
		}
		delete(there, test.name)
	}
}
