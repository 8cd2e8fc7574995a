package iptables

import (
	"maps"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/proxier/drift"
)

// driftFinder finds out in what the tables that the kernel holds differ from what was written to them last.
type driftFinder struct {
	family plan.Family
	found  *drift.Found
}

// rules compares with the rules of mode iptables. KUBE-FIREWALL is left out: the kubelet has a say in it. So are chains of
// other modes: who starts one in another mode has not changed what was written.
func (c *driftFinder) rules(written *rules, nat, filter kernelTable) {
	held := map[names.Table]kernelTable{names.NAT: nat, names.Filter: filter}
	known := map[names.Table]map[string]bool{names.NAT: {}, names.Filter: {}}
	check := func(t names.Table, want chain) {
		known[t][want.name] = true
		c.chain(t, want, held[t])
	}
	for _, k := range slices.SortedFunc(maps.Keys(written.services), plan.Key.Compare) {
		for _, own := range written.inForce(written.services[k]).chains {
			check(names.NAT, own)
		}
	}
	for _, own := range written.kept.own() {
		check(names.NAT, own)
	}
	written.fixed(func(want tableChain) { check(want.table, want.chain) })
	for _, t := range []names.Table{names.NAT, names.Filter} {
		c.unexpected(t, held[t], func(name string) bool { return names.OfService(name) && !known[t][name] })
	}
	for _, j := range jumps(written.localnet()) {
		if j.to != names.KubeletFirewall {
			c.jump(j.table, j.from, j.text(), held[j.table])
		}
	}
}

// fixed compares one table with fixed rules.
func (c *driftFinder) fixed(written *Fixed, t names.Table, held kernelTable) {
	known := map[string]bool{}
	for _, want := range written.chains(t) {
		known[want.name] = true
		c.chain(t, want, held)
	}
	c.unexpected(t, held, func(name string) bool { return names.IsOurs(t, name) && !known[name] })
	for _, j := range written.jumps(t) {
		c.jump(t, j.From, j.Rule, held)
	}
}

// unexpected finds chains that were not written, but for an empty one that somebody else's rule leads to: that is how such a
// chain is left (sweep), and has to be as long as the rule is there.
func (c *driftFinder) unexpected(t names.Table, held kernelTable, is func(name string) bool) {
	var names, empty []string
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if is(name) {
			names = append(names, name)
			if len(held[name]) == 0 {
				empty = append(empty, name)
			}
		}
	}
	left := usedByOthers(t, held, empty)
	for _, name := range names {
		if left[name] == "" {
			c.found.Add(drift.Chain, drift.Unexpected, "%s of table %s (%s)", name, t, c.family)
		}
	}
}

func (c *driftFinder) jump(t names.Table, from, rule string, held kernelTable) {
	if !held.leads(from, rule) {
		c.found.Add(drift.Rule, drift.Missing, "%q in %s of table %s (%s)", rule, from, t, c.family)
	}
}

// chain compares one chain, rule by rule.
func (c *driftFinder) chain(t names.Table, want chain, held kernelTable) {
	rules, is := held[want.name]
	switch {
	case !is:
		c.found.Add(drift.Chain, drift.Missing, "%s of table %s (%s)", want.name, t, c.family)
		return
	case sameRules(want, chain{want.name, rules}):
		return
	}
	if slices.ContainsFunc(rules, unread) {
		c.found.Add(drift.Chain, drift.Changed, "%s of table %s (%s): it holds rules that only nft can read", want.name, t, c.family)
		return
	}
	left := map[string]int{}
	for _, r := range rules {
		left[r]++
	}
	same := true
	for _, r := range want.rules {
		if left[r]--; left[r] < 0 {
			same = false
			c.found.Add(drift.Rule, drift.Missing, "%q in %s of table %s (%s)", r, want.name, t, c.family)
		}
	}
	for _, r := range rules {
		if left[r] > 0 {
			left[r]--
			same = false
			c.found.Add(drift.Rule, drift.Unexpected, "%q in %s of table %s (%s)", r, want.name, t, c.family)
		}
	}
	if same {
		c.found.Add(drift.Chain, drift.Changed, "%s of table %s (%s): the order of its rules", want.name, t, c.family)
	}
}
