package xtables

import (
	"fmt"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// Drift adds to found in what a table differs from what had been written to it: changes are those of Diff from there to what
// the table holds. Rules in built-in chains that nobody wants are no drift, nor is a chain that had to stay.
func Drift(found *drift.Found, f plan.Family, changes []Change) {
	for _, c := range changes {
		in := fmt.Sprintf("%s of table %s (%s)", c.Chain, c.Table, f)
		switch {
		case c.Op == Insert:
			found.Add(drift.Rule, drift.Missing, "%q in %s", c.Rules[0], in)
		case c.Op == Remove || c.Op == Empty:
			found.Add(drift.Chain, drift.Unexpected, "%s", in)
		case c.Op == Write && !c.Exists:
			found.Add(drift.Chain, drift.Missing, "%s", in)
		case c.Op == Write:
			rules(found, in, c)
		}
	}
}

// rules compares one chain, rule by rule.
func rules(found *drift.Found, in string, c Change) {
	if slices.ContainsFunc(c.Have, Unread) {
		found.Add(drift.Chain, drift.Changed, "%s: it holds rules that only nft can read", in)
		return
	}
	left := map[string]int{}
	for _, r := range c.Have {
		left[r]++
	}
	same := true
	for _, r := range c.Rules {
		if left[r]--; left[r] < 0 {
			same = false
			found.Add(drift.Rule, drift.Missing, "%q in %s", r, in)
		}
	}
	for _, r := range c.Have {
		if left[r] > 0 {
			left[r]--
			same = false
			found.Add(drift.Rule, drift.Unexpected, "%q in %s", r, in)
		}
	}
	if same {
		found.Add(drift.Chain, drift.Changed, "%s: the order of its rules", in)
	}
}
