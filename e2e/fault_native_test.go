package e2e

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// nativeRules are rules that only nft can read, in tables of iptables, by their place. None concerns traffic of the tests.
var nativeRules = map[string]string{
	"nat POSTROUTING":   "oifname \"other0\" masquerade",
	"nat PREROUTING":    "iifname \"other0\" ct state new counter",
	"filter INPUT":      "iifname \"other0\" log",
	"filter FORWARD":    "iifname \"other0\" ct state established accept",
	"mangle PREROUTING": "iifname \"other0\" ct mark set 1",
	"mangle INPUT":      "iifname \"other0\" ct mark set 1",
}

// addNative puts native rules into chains that others have made, in front of and behind what is there, and returns what removes them.
func addNative(f *faultScene) (remove func()) {
	f.Helper()
	var script strings.Builder
	for place, rule := range nativeRules {
		for _, family := range []string{"ip", "ip6"} {
			for _, add := range []string{"add", "insert"} {
				fmt.Fprintf(&script, "%s rule %s %s %s\n", add, family, place, rule)
			}
		}
	}
	out, err := f.Node1().OutputWithInput(script.String(), "nft", "--echo", "--handle", "--file", "-")
	require.NoError(f, err)
	added := regexp.MustCompile(`(?:add|insert) rule (\S+ \S+ \S+) .*# (handle \d+)`).FindAllStringSubmatch(out, -1)
	if len(added) != 4*len(nativeRules) {
		f.Fatalf("nft says %q", out)
	}
	script.Reset()
	for _, rule := range added {
		fmt.Fprintf(&script, "delete rule %s %s\n", rule[1], rule[2])
	}
	return func() {
		f.Helper()
		if _, err := f.Node1().OutputWithInput(script.String(), "nft", "--file", "-"); err != nil {
			f.Error(err)
		}
	}
}

// TestFaultNativeRules: other programs have rules in tables of iptables that iptables-save can't read, and prints nothing of the
// table for. They come while the daemon runs, and are there when it starts.
func TestFaultNativeRules(t *testing.T) {
	t.Parallel()
	f := newFaultScene(t, harness.NFT, "native rules", "masquerade, ct state, log in nat, filter and mangle; a restart beside them")
	for place := range nativeRules {
		table, chain, _ := strings.Cut(place, " ")
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, node := range f.Nodes[:2] { // The other one is for the comparison at the end.
				if _, err := node.Output(f.variant.Tool(family), "-t", table, "-A", chain, "-p", "7", "-j", "ACCEPT"); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	f.start()
	const drift = "another program had changed"
	removal := addNative(f)
	for i, pods := range []string{"n2a", "n1a"} {
		line, found := len(f.daemon.Log()), count(f.daemon.Log(), drift)
		f.breakRules()
		f.log(line, drift, "KUBE-MARK-MASQ")
		f.change(pods)
		f.inForce(pods)
		if n := count(f.daemon.Log(), drift); n > found+2 { // each family may be told of by itself
			t.Errorf("round %d: %d things are found changed", i, n-found)
		}
	}
	f.oneJump()
	f.told()
	require.NoError(t, f.daemon.Stop())
	f.daemon = f.World.Run(t, f.variant, f.flags...)
	f.change("n2a")
	f.inForce("n2a")
	f.oneJump()
	f.told()
	removal()
	begin := time.Now()
	f.breakRules() // Everything is compared.
	f.change("n1a")
	f.inForce("n1a")
	f.repairs = append(f.repairs, time.Since(begin))
	f.finish()
	for _, bad := range []string{"sync failed", "in PREROUTING of", "in POSTROUTING of", "in OUTPUT of"} {
		if n := count(f.daemon.Log(), bad); n > 0 {
			t.Errorf("the log has %q %d times", bad, n)
		}
	}
}

// oneJump holds that what leads to our chains is there once.
func (f *faultScene) oneJump() {
	f.Helper()
	for _, family := range []string{"ip", "ip6"} {
		for chain, target := range map[string]string{"PREROUTING": "KUBE-SERVICES", "OUTPUT": "KUBE-SERVICES", "POSTROUTING": "KUBE-POSTROUTING"} {
			out, err := f.Node1().Output("nft", "list", "chain", family, "nat", chain)
			require.NoError(f, err)
			if n := strings.Count(out, "jump "+target); n != 1 {
				f.Errorf("%d rules lead to %s:\n%s", n, target, out)
			}
		}
	}
}

// told holds that the rules were told of, not at each comparison, and that the node is ready.
func (f *faultScene) told() {
	f.Helper()
	for _, family := range []string{"IPv4", "IPv6"} {
		tables := byMode([]string{"nat", "filter"}, []string{"nat", "filter", "mangle"})
		for _, table := range tables {
			n := 0
			for _, line := range f.daemon.Log() {
				if strings.Contains(line, fmt.Sprintf("table %s (%s)", table, family)) && strings.Contains(line, "rules that only nft can read") {
					n++
				}
			}
			if n < 1 || n > 2 { // twice, if a comparison falls in between the rules
				f.Errorf("table %s of %s is told of %d times", table, family, n)
			}
		}
	}
	if code, body, err := f.Node1().Get(harness.HealthAddr, "/readyz"); err != nil || code != http.StatusOK {
		f.Errorf("/readyz: %d, %s, %v", code, body, err)
	}
}
