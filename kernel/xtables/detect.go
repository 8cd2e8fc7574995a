package xtables

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Detect says which variant to use where the configuration leaves it open: the one that holds the kubelet's hint chains,
// or else more rules, as the iptables-wrappers of Kubernetes decide; nft on a node without rules.
func Detect() Variant {
	if nftHinted() {
		return NFT
	}
	legacyText := ""
	for _, f := range plan.Families {
		// Legacy programs must not be asked for a single table: they would create it.
		legacyText += saved(BaseName(f) + "-legacy-save")
	}
	if hintChain.MatchString(legacyText) {
		return Legacy
	}
	if n := strings.Count(legacyText, "\n-"); n > 0 && n > nftRuleCount() {
		return Legacy
	}
	if _, err := lookPath("iptables-nft-restore"); err != nil {
		if v, err := askVersion("iptables", versionTime); err == nil && v.variant == Legacy {
			return Legacy
		}
	}
	return NFT
}

// saved returns the output of a save program; nothing where it is missing or fails, as it does where the kernel lacks what
// it needs.
func saved(name string) string {
	path, err := lookPath(name)
	if err != nil {
		return ""
	}
	out, _ := output(path, saveTime) // A variant that can't be asked holds no rules of anybody.
	return string(out)
}

var hintChain = regexp.MustCompile(`(?m)^:(` + names.KubeletHint + `|` + names.KubeletCanary + `) `)

// nftHinted reports whether table mangle of the nft variant has such a chain. The kernel is asked, not iptables-save, which prints
// nothing of a table with rules that are native to nft.
func nftHinted() bool {
	for _, f := range plan.Families {
		chains, _ := nftChains(f, names.Mangle) // A kernel without nf_tables has none.
		if slices.Contains(chains, names.KubeletHint) || slices.Contains(chains, names.KubeletCanary) {
			return true
		}
	}
	return false
}

// nftRuleCount is how many rules the tables of the nft variant hold.
func nftRuleCount() int {
	n := 0
	for _, f := range plan.Families {
		for _, t := range []names.Table{names.Filter, names.NAT, names.Mangle, "raw", "security"} {
			rules, _ := NFTRules(f, t, "") // A kernel without nf_tables has none.
			n += len(rules)
		}
	}
	return n
}

// presentTables are those that the kernel has. A legacy program that is asked for another one makes it, and an nft program fails
// where the kernel has no nf_tables.
func presentTables(v Variant, f plan.Family) ([]names.Table, error) {
	var present []string
	var err error
	if v == NFT {
		if present, err = nft.Tables(f); errors.Is(err, nft.ErrAbsent) {
			err = nil
		} else if err != nil {
			err = fmt.Errorf("listing the tables of nf_tables for %s: %w", f, err)
		}
	} else {
		present = LegacyTables(f)
	}
	return slices.DeleteFunc(slices.Clone(names.Tables), func(t names.Table) bool { return !slices.Contains(present, string(t)) }), err
}

// LegacyTables returns the names of the tables that the legacy variant has, in the network namespace of the calling thread.
func LegacyTables(f plan.Family) []string {
	name := "/proc/thread-self/net/ip_tables_names"
	if f == plan.IPv6 {
		name = "/proc/thread-self/net/ip6_tables_names"
	}
	raw, _ := os.ReadFile(name) // Where it can't be read, there are none.
	return strings.Fields(string(raw))
}
