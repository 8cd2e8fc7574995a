package xtables

import (
	"fmt"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// Drift returns in what a table differs from what had been written to it: changes are those that Diff returns for what had been
// written and what the table holds. Unwanted rules in built-in chains are no drift, nor is a chain that had to stay.
func Drift(f plan.Family, changes []Change) drift.Found {
	var found drift.Found
	for _, c := range changes {
		chain := fmt.Sprintf("%s of table %s (%s)", c.Chain, c.Table, f)
		switch {
		case c.Op == Insert:
			found = append(found, drift.Difference{Kind: drift.Rule, State: drift.Missing, Object: chain, Want: c.Rules[0]})
		case c.Op == Remove || c.Op == Empty:
			found = append(found, drift.Difference{Kind: drift.Chain, State: drift.Unexpected, Object: chain})
		case c.Op == Write && !c.Exists:
			found = append(found, drift.Difference{Kind: drift.Chain, State: drift.Missing, Object: chain})
		case c.Op == Write:
			found = appendRuleDrift(found, chain, c)
		}
	}
	return found
}

// appendRuleDrift compares one chain, rule by rule.
func appendRuleDrift(found drift.Found, chain string, c Change) drift.Found {
	if slices.ContainsFunc(c.Have, Unread) {
		return append(found, drift.Difference{Kind: drift.Chain, State: drift.Changed, Object: chain, Aspect: "it holds rules that only nft can read"})
	}
	before := len(found)
	left := map[string]int{}
	for _, r := range c.Have {
		left[r]++
	}
	for _, r := range c.Rules {
		if left[r]--; left[r] < 0 {
			found = append(found, drift.Difference{Kind: drift.Rule, State: drift.Missing, Object: chain, Want: r})
		}
	}
	for _, r := range c.Have {
		if left[r] > 0 {
			left[r]--
			found = append(found, drift.Difference{Kind: drift.Rule, State: drift.Unexpected, Object: chain, Have: r})
		}
	}
	if len(found) == before {
		found = append(found, drift.Difference{Kind: drift.Chain, State: drift.Changed, Object: chain, Aspect: "the order of its rules"})
	}
	return found
}
