package cluster

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"nodeproxy/e2e/harness"
)

// inFirstTier are the scenarios of "make test" and of phase cluster-ipvs; takeOverInFirstTier is the take-over beside them, in mode iptables.
var inFirstTier = []string{"rolling-update-under-load", "policies", "delete-and-recreate-same-ip", "daemon-killed-and-restarted-under-load",
	"lost-event"}

const takeOverInFirstTier = "take-over-from-iptables-by-iptables"

// selectTier leaves only the tests of the first tier, on the nft variant, if NODEPROXY_TIER asks for it and -run names none.
func selectTier() error {
	flag.Parse()
	run := flag.Lookup("test.run").Value
	if os.Getenv("NODEPROXY_TIER") != "1" || run.String() != "" {
		return nil
	}
	pattern := fmt.Sprintf("^TestTier$|^TestScenarios$/^%s$/^(%s)$", harness.NFT, strings.Join(inFirstTier, "|"))
	if harness.ModeUnderTest() == harness.IPTables {
		pattern += fmt.Sprintf("|^TestRights$|^TestTakeOver$/^%s$/^%s$", harness.NFT, takeOverInFirstTier)
	}
	return run.Set(pattern)
}

// TestTier: what the first tier names is there.
func TestTier(t *testing.T) {
	t.Parallel()
	for _, name := range inFirstTier {
		if !slices.ContainsFunc(scenarios, func(s scenarioTest) bool { return s.name == name }) {
			t.Errorf("there is no scenario %s", name)
		}
	}
	if name := takeOvers[0].name(); name != takeOverInFirstTier {
		t.Errorf("the first take-over is %s", name)
	}
}
