package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/iptables/common"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// tables are those that this mode writes to.
var tables = []names.Table{names.Filter, names.NAT}

// syncAll reads what the kernel holds, and writes what differs from the plan: first what nothing leads to yet, then what
// leads to it, and removes at last what nothing wants any more.
func (e *engine) syncAll(ctx context.Context, p *plan.Plan) error {
	e.full++
	e.right = nil
	f := &fullSync{engine: e, ctx: ctx, actual: map[names.Table]xtables.Content{}, rules: rulesOf(p, e.family, e.options),
		wanted: map[tableChainName]bool{}}
	var err error
	var known map[names.Table]xtables.Content
	for _, t := range tables {
		if f.actual[t], err = e.Kernel.Save(ctx, t, known[t]); err != nil {
			return err
		}
		if _, held := f.actual[t][names.Services]; held && known == nil { // The other table has many rules, most of them as they are to be.
			known = xtables.Desired{Chains: slices.Collect(f.rules.fixed(nil))}.Content()
		}
	}
	if e.current != nil {
		e.Compared, e.Found = true, e.drift(f.actual)
	}
	if err := f.findKept(p); err != nil {
		return err
	}
	if err := f.run(p); err != nil {
		for _, r := range f.refused {
			err = errors.Join(err, errors.New(r.String()))
		}
		return err
	}
	e.log.Debug("compared all rules", "family", e.family, "chains-written", f.written, "chains-removed", f.removed)
	e.counts.total = f.total()
	e.counts.report(e.family)
	e.current = f.rules
	e.updateRefused(f.refused)
	return nil
}

// fullSync is the work of one syncAll.
type fullSync struct {
	*engine
	ctx         context.Context
	actual      map[names.Table]xtables.Content // what the kernel holds
	rules       *rules
	wanted      map[tableChainName]bool
	rewrites    []own      // ServicePorts with chains that the kernel has otherwise
	refused     []*refusal // ServicePorts that the kernel does not take
	unconfirmed bool       // one of those may have been refused since somebody else has changed the tables
	written     int
	removed     int
}

func (f *fullSync) run(p *plan.Plan) error {
	// What nothing works without comes first. The rest is in order of address, as in the dispatch tree: an nft kernel walks
	// the tree at every later change, and finds what was allocated together close together in memory.
	services := p.Sorted(f.family)
	slices.SortStableFunc(services, func(a, b *plan.ServicePort) int {
		return cmp.Or(boolCompare(b.Critical, a.Critical), firstAddr(a).Compare(firstAddr(b)))
	})
	if err := f.commonChains(); err != nil {
		if !f.rules.compact || !xtables.IsRefused(err) {
			return err
		}
		if other := f.undisturbed(); other != nil {
			return errors.Join(other, err)
		}
		f.log.Warn("the kernel refuses the rule for hairpin traffic of many services, which needs the module xt_bpf; "+
			"each endpoint gets a chain of its own instead", "family", f.family, "error", err)
		options := f.engine.options
		options.CompactAbove = 0
		f.engine.setOptions(options)
		f.rules = rulesOf(p, f.family, f.engine.options)
		if err := f.commonChains(); err != nil {
			return err
		}
	}
	for _, step := range []func() error{
		func() error { return f.foundation(p, services) },
		func() error { return f.services(services) },
		f.newRefusals, f.dispatch, f.jumps, f.leaveOtherModes,
		func() error { return f.prune(names.NAT) },
		func() error { return f.prune(names.Filter) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func firstAddr(sp *plan.ServicePort) netip.Addr {
	if len(sp.Frontends) == 0 {
		return netip.Addr{}
	}
	return sp.Frontends[0].Addr
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// commonChains writes the chains that all others need. What one rule does for all services in the form that the kernel holds goes only
// at the end (dispatch), when each does it for itself.
func (f *fullSync) commonChains() error {
	chains := common.Chains(f.options.common(), f.family, f.rules.form())
	for i, c := range chains {
		chains[i].Rules = slices.Concat(f.forAll(c, names.NAT), c.Rules, f.forAll(c, names.Filter))
	}
	return f.write(inOrder(f.differing(chains...), names.Filter, names.NAT))
}

// forAll are the rules for all services in a common chain that the kernel holds and that are not to be: in table nat they stand
// first, in table filter last.
func (f *fullSync) forAll(c xtables.Chain, in names.Table) []string {
	if c.Table != in {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(f.actual[in][c.Name]), func(r string) bool {
		return !strings.Contains(r, xtables.CTStateDNAT) || slices.Contains(c.Rules, r)
	})
}

// foundation, on a node without rules, makes the critical ServicePorts work before all others are written, together with
// the masquerading and filter rules that they need. Where rules are in force already, it does nothing: they serve until
// the new ones are complete.
func (f *fullSync) foundation(p *plan.Plan, services []*plan.ServicePort) error {
	if len(f.actual[names.NAT][names.Services]) > 0 {
		return nil
	}
	before := map[names.Table]xtables.Content{}
	for t, content := range f.actual {
		before[t] = maps.Clone(content)
	}
	lay := func(services []*plan.ServicePort) error {
		first := newRules(p, f.family, f.engine.options)
		var chains []xtables.Chain
		for _, sp := range services {
			first.enter(sp)
			chains = append(chains, first.builder(sp).chains()...)
		}
		for c := range first.fixed(nil) {
			// What is there may serve more than the critical ones; it is not to serve less meanwhile.
			if len(before[c.Table][c.Name]) == 0 {
				chains = append(chains, c)
			}
		}
		return f.write(inOrder(f.differing(chains...), names.Filter, names.NAT))
	}
	// Packets get to the dispatchers before there are any entries: some things the kernel refuses only then, and the
	// ServicePort at fault is to be found.
	if err := lay(nil); err != nil {
		return err
	}
	if err := f.jumps(); err != nil {
		return err
	}
	critical := slices.DeleteFunc(slices.Clone(services), func(sp *plan.ServicePort) bool { return !sp.Critical })
	if err := lay(critical); err != nil {
		// One refused ServicePort must not take the rest down: they are tried one by one next.
		f.log.Debug("the critical Services were not programmed ahead of the others", "error", err)
	}
	return nil
}

// own is a ServicePort with what is to change in its chains.
type own struct {
	sp      *plan.ServicePort
	changes []xtables.Change
}

// services writes the ServicePorts' own chains that the kernel lacks, and notes those that it has otherwise.
func (f *fullSync) services(services []*plan.ServicePort) error {
	var fresh []own
	for _, sp := range services {
		missing, other := own{sp: sp}, own{sp: sp}
		chains := f.rules.builder(sp).chains()
		for _, c := range chains {
			f.wanted[tableChainName{c.Table, c.Name}] = true
		}
		for _, c := range f.differing(chains...) {
			if c.Exists {
				other.changes = append(other.changes, c)
			} else {
				missing.changes = append(missing.changes, c)
			}
		}
		if r := f.stillRefused(sp); r != nil && (r.entries || len(missing.changes)+len(other.changes) > 0) {
			f.doWithout(r)
			continue
		}
		if len(missing.changes) > 0 {
			fresh = append(fresh, missing)
		}
		if len(other.changes) > 0 {
			f.rewrites = append(f.rewrites, other)
		}
	}
	if err := f.writeAll(fresh); err != nil {
		return err
	}
	return f.enterKept()
}

// writeAll writes ServicePorts' own chains, many at a time. Where the kernel refuses some, the ServicePorts at fault are found; those
// keep the rules that they have, or are left out if they have none, and the others work.
func (f *fullSync) writeAll(list []own) error {
	search := xtables.Search[own]{Works: f.Works, Try: func(batch []own) error {
		return f.write(changesOf(batch))
	}, Refused: func(o own, err error) { f.refuse(o.sp, false, err) }}
	var load xtables.Load
	first := 0
	for i, o := range list {
		load.Add(o.changes...)
		if f.Full(load) || i == len(list)-1 {
			if err := search.Run(list[first : i+1]); err != nil {
				return err
			}
			first = i + 1
			load = xtables.Load{}
		}
	}
	return f.confirm()
}

// differing returns what makes the kernel's chains these.
func (f *fullSync) differing(chains ...xtables.Chain) []xtables.Change {
	var out []xtables.Change
	for _, t := range tables {
		out = append(out, xtables.Diff(t, xtables.Desired{Chains: chains}, f.actual[t])...)
	}
	return out
}

// write makes steps in one run.
func (f *fullSync) write(steps ...[]xtables.Change) error {
	if err := f.Write(f.ctx, f.actual, steps...); err != nil {
		return err
	}
	for _, step := range steps {
		for _, c := range step {
			if c.Op == xtables.Write {
				f.written++
			}
		}
	}
	return nil
}

// inOrder sorts changes by table, without changing their order otherwise.
func inOrder(changes []xtables.Change, order ...names.Table) []xtables.Change {
	slices.SortStableFunc(changes, func(a, b xtables.Change) int {
		return slices.Index(order, a.Table) - slices.Index(order, b.Table)
	})
	return changes
}

// total is how many rules there are in chains of ours.
func (f *fullSync) total() map[names.Table]int {
	out := map[names.Table]int{}
	for c := range f.wanted {
		out[c.table] += len(f.actual[c.table][c.name])
	}
	if f.rules.localnet() {
		out[names.Filter]++ // the guard
	}
	return out
}

// jumps puts the rules into built-in chains that are missing there, and opens node ports on localhost once their guard
// stands.
func (f *fullSync) jumps() error {
	if f.rules.localnet() {
		if err := f.guard(); err != nil {
			return err
		}
	}
	if err := f.ensure(jumps(f.rules.localnet())); err != nil {
		return err
	}
	if f.rules.localnet() {
		f.openLocalnet()
	}
	return nil
}

// openLocalnet opens node ports on localhost. Where it can't, everything else works, and every comparison of everything tries it again.
func (e *engine) openLocalnet() {
	if err := allowRouteLocalnet(e.sysctlDir); err != nil && !e.reportedLocalnet {
		e.reportedLocalnet = true
		e.log.Warn("node ports do not answer on localhost", "error", err)
	}
}

// ensure puts rules in front of built-in chains that lack them.
func (f *fullSync) ensure(list []xtables.Jump) error {
	for _, t := range tables {
		for _, c := range xtables.Diff(t, xtables.Desired{Jumps: list}, f.actual[t]) {
			if err := f.write([]xtables.Change{c}); err != nil {
				return fmt.Errorf("leading chain %s of table %s to %s: %w", c.Chain, t, xtables.Target(c.Rules[0]), err)
			}
			f.written++
		}
	}
	return nil
}

// guard puts the guard of localhost node ports into KUBE-FIREWALL. The kubelet keeps the same rule there, and may keep
// others, which stay.
func (f *fullSync) guard() error {
	rules, exists := f.actual[names.Filter][names.KubeletFirewall]
	if slices.Contains(rules, localnetGuard()) {
		return nil
	}
	return f.write([]xtables.Change{{Op: xtables.Append, Table: names.Filter, Chain: names.KubeletFirewall,
		Rules: []string{localnetGuard()}, Exists: exists}})
}
