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

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/proxier/drift"
)

// maxNames is how many different chain names one run of iptables-nft-restore should see. Its cost grows with their square
// (it keeps them in a list that it searches linearly), and below this size with the number of runs. The legacy variant
// copies the whole table for every run, so there everything is written in one.
const maxNames = 300

// syncAll reads what the kernel holds, and writes what differs from the plan: first what nothing leads to yet, then what
// leads to it, and removes at last what nothing wants any more.
func (e *engine) syncAll(ctx context.Context, p *plan.Plan) error {
	f := &fullSync{engine: e, ctx: ctx, rules: newRules(p, e.family, e.options), wanted: map[names.Table]map[string]bool{},
		asked: map[plan.Key]*plan.ServicePort{}, tried: map[plan.Key]bool{}, byEntries: map[plan.Key]bool{}}
	var err error
	if f.nat, err = e.tool.save(ctx, names.NAT); err != nil {
		return err
	}
	if f.filter, err = e.tool.save(ctx, names.Filter); err != nil {
		return err
	}
	if e.current != nil {
		e.found = &drift.Found{}
		(&driftFinder{e.family, e.found}).rules(e.current, f.nat, f.filter)
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
	e.counts.tell(e.family)
	e.current = f.rules
	e.settle(f.refused, f)
	return nil
}

// fullSync is the work of one syncAll.
type fullSync struct {
	*engine
	ctx         context.Context
	nat, filter kernelTable // what the kernel held before
	rules       *rules
	wanted      map[names.Table]map[string]bool
	rewrites    []own                          // ServicePorts with chains that the kernel has otherwise
	refused     []plan.Refusal                 // ServicePorts that the kernel does not take
	asked       map[plan.Key]*plan.ServicePort // what was asked of those
	tried       map[plan.Key]bool              // which of those were tried
	confirmed   int                            // how many of those were refused while nobody else changed the tables
	byEntries   map[plan.Key]bool              // of which it is the entries that are refused
	proved      bool                           // that something else is taken
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
	if err := f.base(); err != nil {
		if !f.rules.compact || !errRefused(err) {
			return err
		}
		if other := f.undisturbed(); other != nil {
			return errors.Join(other, err)
		}
		f.log.Warn("the kernel refuses the rule for hairpin traffic of many services, which needs the module xt_bpf; "+
			"each endpoint gets a chain of its own instead", "family", f.family, "error", err)
		f.engine.options.CompactAbove = 0
		f.rules = newRules(p, f.family, f.engine.options)
		if err := f.base(); err != nil {
			return err
		}
	}
	if err := f.foundation(p, services); err != nil {
		return err
	}
	if err := f.services(services); err != nil {
		return err
	}
	if err := f.dispatch(); err != nil {
		return err
	}
	if err := f.jumps(); err != nil {
		return err
	}
	if err := f.leaveOtherModes(); err != nil {
		return err
	}
	return f.sweep()
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

// base writes the chains that all others need. What one rule does for all services in the form that the kernel holds goes only
// at the end (dispatch), when each does it for itself.
func (f *fullSync) base() error {
	var b blocks
	for _, c := range baseChains(f.options, f.family, f.rules.form()) {
		c.rules = slices.Concat(f.forAll(c, names.NAT), c.rules, f.forAll(c, names.Filter))
		if !f.held(c.table).has(c.chain) {
			b.write(c)
		}
	}
	return f.write(b.filterFirst()...)
}

// forAll are the rules for all services in a base chain that the kernel holds and that are not to be: in table nat they stand
// first, in table filter last.
func (f *fullSync) forAll(c tableChain, in names.Table) []string {
	if c.table != in {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(f.held(in)[c.name]), func(r string) bool {
		return !strings.Contains(r, ctDNAT) || slices.Contains(c.rules, r)
	})
}

// foundation, on a node without rules, makes the critical ServicePorts work before all others are written, together with
// the masquerading and filter rules that they need. Where rules are in force already, it does nothing: they serve until
// the new ones are complete.
func (f *fullSync) foundation(p *plan.Plan, services []*plan.ServicePort) error {
	if len(f.nat[names.Services]) > 0 {
		return nil
	}
	before := map[names.Table]kernelTable{names.NAT: maps.Clone(f.nat), names.Filter: maps.Clone(f.filter)}
	lay := func(services []*plan.ServicePort) error {
		first := newRules(p, f.family, f.engine.options)
		var b blocks
		for _, sp := range services {
			for _, c := range first.enter(sp) {
				if !f.nat.has(c) {
					b.nat.write(c)
				}
			}
		}
		first.fixed(func(c tableChain) {
			// What is there may serve more than the critical ones; it is not to serve less meanwhile.
			if !f.held(c.table).has(c.chain) && len(before[c.table][c.name]) == 0 {
				b.write(c)
			}
		})
		return f.write(b.filterFirst()...)
	}
	// Packets get to the dispatchers before there are any entries: some things the kernel refuses only then, and the
	// ServicePort at fault is to be found.
	if err := lay(nil); err != nil {
		return err
	}
	if err := f.jumps(); err != nil {
		return err
	}
	if err := lay(services[:critical(services)]); err != nil {
		// One refused ServicePort must not take the rest down: they are tried one by one next.
		f.log.Debug("the critical Services were not programmed ahead of the others", "error", err)
	}
	return nil
}

// critical is how many ServicePorts at the front of a list are.
func critical(services []*plan.ServicePort) int {
	if i := slices.IndexFunc(services, func(sp *plan.ServicePort) bool { return !sp.Critical }); i >= 0 {
		return i
	}
	return len(services)
}

// own is a ServicePort with those of its chains that differ from the kernel's.
type own struct {
	sp     *plan.ServicePort
	chains []chain
}

// services writes the ServicePorts' own chains that the kernel lacks, and notes those that it has otherwise.
func (f *fullSync) services(services []*plan.ServicePort) error {
	var fresh []own
	for _, sp := range services {
		missing, other := own{sp: sp}, own{sp: sp}
		for _, c := range f.rules.enter(sp) {
			f.want(names.NAT, c.name)
			if rules, exists := f.nat[c.name]; !exists {
				missing.chains = append(missing.chains, c)
			} else if !slices.Equal(rules, c.rules) {
				other.chains = append(other.chains, c)
			}
		}
		if r := f.stillRefused(sp); r != nil {
			if r.entries {
				f.refuseEntry(sp, r.Err)
				continue
			}
			if len(missing.chains)+len(other.chains) > 0 {
				f.refuse(sp, r.Err)
				continue
			}
		}
		if len(missing.chains) > 0 {
			fresh = append(fresh, missing)
		}
		if len(other.chains) > 0 {
			f.rewrites = append(f.rewrites, other)
		}
	}
	if err := f.writeAll(fresh); err != nil {
		return err
	}
	return f.enterKept()
}

// writeAll writes ServicePorts' own chains, many at a time, and finds out which the kernel refuses.
func (f *fullSync) writeAll(list []own) error {
	names := map[string]bool{}
	first := 0
	for i, o := range list {
		for _, c := range o.chains {
			addNames(names, c)
		}
		if f.tooMany(names) || i == len(list)-1 {
			if err := f.writeServices(list[first : i+1]); err != nil {
				return err
			}
			first = i + 1
			clear(names)
		}
	}
	return f.confirm()
}

// writeServices writes a batch. Where the kernel refuses it, halves are tried until the ServicePorts at fault are found;
// those keep the rules that they have, or are left out if they have none, and the others work.
func (f *fullSync) writeServices(batch []own) error {
	if len(batch) == 0 {
		return nil
	}
	if err := f.ctx.Err(); err != nil {
		return err
	}
	b := block{table: names.NAT}
	for _, o := range batch {
		b.writes = append(b.writes, o.chains...)
	}
	err := f.write(b)
	switch {
	case err == nil:
		return nil
	case !errRefused(err) || !f.works():
		return err
	case len(batch) > 1:
		half := len(batch) / 2
		if err := f.writeServices(batch[:half]); err != nil {
			return err
		}
		return f.writeServices(batch[half:])
	}
	f.tried[batch[0].sp.Key] = true
	f.refuse(batch[0].sp, err)
	return nil
}

// write writes blocks that are not empty, all or none.
func (f *fullSync) write(blocks ...block) error {
	blocks = slices.DeleteFunc(blocks, func(b block) bool { return b.empty() })
	if len(blocks) == 0 {
		return nil
	}
	if err := f.ctx.Err(); err != nil {
		return err
	}
	if err := f.restore(text(blocks)); err != nil {
		return err
	}
	for _, b := range blocks {
		f.written += len(b.writes)
		for _, c := range b.writes {
			f.held(b.table)[c.name] = c.rules
		}
	}
	return nil
}

// total is how many rules there are in chains of ours.
func (f *fullSync) total() map[names.Table]int {
	out := map[names.Table]int{}
	for t, names := range f.wanted {
		for name := range names {
			out[t] += len(f.held(t)[name])
		}
	}
	if f.rules.localnet() {
		out[names.Filter]++ // the guard
	}
	return out
}

func (f *fullSync) held(t names.Table) kernelTable {
	if t == names.NAT {
		return f.nat
	}
	return f.filter
}

func (f *fullSync) want(t names.Table, name string) {
	if f.wanted[t] == nil {
		f.wanted[t] = map[string]bool{}
	}
	f.wanted[t][name] = true
}

// tooMany reports whether a batch is large enough.
func (f *fullSync) tooMany(names map[string]bool) bool {
	return f.batch > 0 && len(names) >= f.batch
}

// addNames adds the chains that iptables-restore has to look up for c.
func addNames(names map[string]bool, c chain) {
	names[c.name] = true
	for _, r := range c.rules {
		if i := strings.LastIndexByte(r, ' '); i >= 0 {
			names[r[i+1:]] = true
		}
	}
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
	if !f.rules.localnet() {
		return nil
	}
	if err := allowRouteLocalnet(f.sysctlDir); err != nil && !f.toldLocalnet {
		f.engine.toldLocalnet = true // Everything else works, and at every sync it is tried again.
		f.log.Warn("node ports do not answer on localhost", "error", err)
	}
	return nil
}

// ensure puts rules in front of built-in chains that lack them.
func (f *fullSync) ensure(list []jump) error {
	for _, j := range list {
		held := f.held(j.table)
		if held.leads(j.from, j.text()) {
			continue
		}
		if err := f.restore(fmt.Sprintf("*%s\n-I %s 1 %s\nCOMMIT\n", j.table, j.from, j.text())); err != nil {
			return fmt.Errorf("leading chain %s of table %s to %s: %w", j.from, j.table, j.to, err)
		}
		held[j.from] = append(held[j.from], j.text())
		f.written++
	}
	return nil
}

// guard puts the guard of localhost node ports into KUBE-FIREWALL. The kubelet keeps the same rule there, and may keep
// others, which stay.
func (f *fullSync) guard() error {
	if slices.Contains(f.filter[names.KubeletFirewall], localnetGuard()) {
		return nil
	}
	var out strings.Builder
	out.WriteString("*filter\n")
	if _, exists := f.filter[names.KubeletFirewall]; !exists {
		out.WriteString(":" + names.KubeletFirewall + " - [0:0]\n")
	}
	chain{names.KubeletFirewall, []string{localnetGuard()}}.appendTo(&out, "")
	out.WriteString("COMMIT\n")
	f.filter[names.KubeletFirewall] = append(f.filter[names.KubeletFirewall], localnetGuard())
	return f.restore(out.String())
}
