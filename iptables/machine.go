package iptables

import (
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// Machine returns what a packet meets where the rules are those that Render returns for whole, as far as they are for the
// ServicePorts of near. A trace that leads to another ServicePort's own chains fails. Chains are only rendered when a packet
// gets there, so that the cost is little more than that of a walk over the plan.
func Machine(whole, near *plan.Plan, f plan.Family, o Options) (*packetsim.Machine, error) {
	r := rulesOf(whole, f, o)
	chains := map[tableChainName][]string{}
	add := func(c xtables.Chain) { chains[tableChainName{c.Table, c.Name}] = c.Rules }
	for _, list := range r.builtin() {
		for _, c := range list {
			add(c)
		}
	}
	for _, c := range r.common() {
		add(c)
	}
	for _, sp := range near.Sorted(f) {
		for _, c := range r.builder(sp).chains() {
			add(c)
		}
	}
	inner := map[tableChainName]func() []string{}
	for id := range dispatchers {
		d := r.dispatcher(id, &r.tries)
		add(d.rootChain())
		d.walk(func(n subtree) {
			inner[tableChainName{d.place.table, d.name(n.prefix)}] = func() []string { return d.rules(n) }
		})
	}
	return restore.Lazy(f, []string{string(names.Filter), string(names.NAT)}, func(table, name string) ([]string, bool) {
		at := tableChainName{names.Table(table), name}
		if rules := inner[at]; rules != nil {
			return rules(), true
		}
		rules, exists := chains[at]
		return rules, exists
	})
}

// Machine is like the function Machine, with the options that are in force on this node. It may be called during a Sync.
func (b *Backend) Machine(whole, near *plan.Plan, f plan.Family) (*packetsim.Machine, error) {
	for _, e := range b.Engines {
		if e.family == f {
			return Machine(whole, near, f, *e.known.Load())
		}
	}
	return packetsim.New(f), nil
}
