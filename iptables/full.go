package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/proxier/drift"
	"nodeproxy/proxier/plan"
)

// maxNames is how many different chain names one run of iptables-nft-restore should see. Its cost grows with their square
// (it keeps them in a list that it searches linearly), and below this size with the number of runs. The legacy variant
// copies the whole table for every run, so there everything is written in one.
const maxNames = 300

// syncAll reads what the kernel holds, and writes what differs from the plan: first what nothing leads to yet, then what
// leads to it, and removes at last what nothing wants any more.
func (e *engine) syncAll(ctx context.Context, p *plan.Plan) error {
	f := &fullSync{engine: e, ctx: ctx, rules: newRules(p, e.family, e.options), wanted: map[table]map[string]bool{},
		total: map[table]int{}}
	var err error
	if f.nat, err = e.tool.save(ctx, tableNAT); err != nil {
		return err
	}
	if f.filter, err = e.tool.save(ctx, tableFilter); err != nil {
		return err
	}
	if e.current != nil {
		e.found = &drift.Found{}
		(&driftFinder{e.family, e.found}).rules(e.current, f.nat, f.filter)
	}
	if err := f.run(p); err != nil {
		return err
	}
	e.log.Debug("compared all rules", "family", e.family, "chains-written", f.written, "chains-removed", f.removed)
	if f.rules.localnet() {
		f.total[tableFilter]++ // the guard
	}
	e.counts.total = f.total
	e.counts.tell(e.family)
	if len(f.refused) > 0 {
		return errors.Join(f.refused...)
	}
	e.current = f.rules
	return nil
}

// fullSync is the work of one syncAll.
type fullSync struct {
	*engine
	ctx         context.Context
	nat, filter kernelTable // what the kernel held before
	rules       *rules
	wanted      map[table]map[string]bool
	refused     []error       // ServicePorts whose chains the kernel does not take
	total       map[table]int // rules in our chains
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
		var refused *RestoreError
		if !f.rules.compact || !errors.As(err, &refused) || errLocked(err) {
			return err
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

// base writes the chains that all others need.
func (f *fullSync) base() error {
	nat, filter := block{table: tableNAT}, block{table: tableFilter}
	for _, c := range baseChains(f.options, f.family, f.rules.form()) {
		b := &nat
		if c.table == tableFilter {
			b = &filter
		}
		if held := f.held(c.table); !held.has(c.chain) {
			b.write(c.chain)
		}
	}
	var blocks []block
	for _, b := range []block{filter, nat} {
		if !b.empty() {
			blocks = append(blocks, b)
		}
	}
	if err := f.write(blocks); err != nil {
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

// foundation, on a node without rules, makes the critical ServicePorts work before all others are written, together with
// the masquerading and filter rules that they need. Where rules are in force already, it does nothing: they serve until
// the new ones are complete.
func (f *fullSync) foundation(p *plan.Plan, services []*plan.ServicePort) error {
	if len(f.nat[chainServices]) > 0 {
		return nil
	}
	first := newRules(p, f.family, f.engine.options)
	nat, filter := block{table: tableNAT}, block{table: tableFilter}
	for _, sp := range services {
		if !sp.Critical {
			break
		}
		for _, c := range first.enter(sp) {
			if !f.nat.has(c) {
				nat.write(c)
			}
		}
	}
	first.fixed(func(c tableChain) {
		switch {
		case f.held(c.table).has(c.chain) || len(f.held(c.table)[c.name]) > 0:
			// What is there may serve more than the critical ones; it is not to serve less meanwhile.
		case c.table == tableNAT:
			nat.write(c.chain)
		default:
			filter.write(c.chain)
		}
	})
	if nat.empty() && filter.empty() {
		return nil
	}
	if err := f.restore(text([]block{filter, nat})); err != nil {
		// One refused ServicePort must not take the rest down: they are tried one by one next.
		f.log.Debug("the critical Services were not programmed ahead of the others", "error", err)
		return nil
	}
	for _, c := range nat.writes {
		f.nat[c.name] = c.rules
	}
	for _, c := range filter.writes {
		f.filter[c.name] = c.rules
	}
	return f.jumps()
}

// own is a ServicePort with those of its chains that differ from the kernel's.
type own struct {
	sp     *plan.ServicePort
	chains []chain
}

// services writes the ServicePorts' own chains, many at a time.
func (f *fullSync) services(services []*plan.ServicePort) error {
	var batch []own
	names := map[string]bool{}
	flush := func() error {
		err := f.writeServices(batch)
		batch = nil
		clear(names)
		return err
	}
	for _, sp := range services {
		o := own{sp: sp}
		for _, c := range f.rules.enter(sp) {
			f.want(tableNAT, c.name)
			f.total[tableNAT] += len(c.rules)
			if !f.nat.has(c) {
				o.chains = append(o.chains, c)
				addNames(names, c)
			}
		}
		if len(o.chains) == 0 {
			continue
		}
		if batch = append(batch, o); f.tooMany(names) {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}

// writeServices writes a batch. Where the kernel refuses it, halves are tried until the ServicePorts at fault are found;
// those are left out of the rules, and the others work.
func (f *fullSync) writeServices(batch []own) error {
	if len(batch) == 0 {
		return nil
	}
	if err := f.ctx.Err(); err != nil {
		return err
	}
	b := block{table: tableNAT}
	for _, o := range batch {
		b.writes = append(b.writes, o.chains...)
	}
	err := f.restore(text([]block{b}))
	var refused *RestoreError
	switch {
	case err == nil:
		f.written += len(b.writes)
		return nil
	case !errors.As(err, &refused) || errLocked(err):
		return err
	case len(batch) > 1:
		half := len(batch) / 2
		if err := f.writeServices(batch[:half]); err != nil {
			return err
		}
		return f.writeServices(batch[half:])
	}
	sp := batch[0].sp
	f.rules.leave(sp)
	for _, c := range batch[0].chains {
		f.total[tableNAT] -= len(c.rules) - len(f.nat[c.name])
		if _, exists := f.nat[c.name]; !exists {
			delete(f.wanted[tableNAT], c.name)
		}
	}
	f.refused = append(f.refused, fmt.Errorf("the kernel refuses the rules of Service %s, port %q, so it is not proxied: %w",
		sp.Key.Service, sp.Key.Port, err))
	return nil
}

// dispatch writes all chains that are not a ServicePort's own, those that others lead to first.
func (f *fullSync) dispatch() error {
	var todo []tableChain
	f.rules.fixed(func(c tableChain) {
		f.want(c.table, c.name)
		f.total[c.table] += len(c.rules)
		if !f.held(c.table).has(c.chain) {
			todo = append(todo, c)
		}
	})
	// The roots come last of all: until they are written, the trees that were there before are whole.
	slices.SortStableFunc(todo, func(a, b tableChain) int { return boolCompare(fixedName(a.name), fixedName(b.name)) })
	var blocks []block
	names := map[string]bool{}
	for _, c := range todo {
		if n := len(blocks); n == 0 || blocks[n-1].table != c.table {
			blocks = append(blocks, block{table: c.table})
		}
		blocks[len(blocks)-1].write(c.chain)
		f.written++
		if addNames(names, c.chain); f.tooMany(names) {
			if err := f.write(blocks); err != nil {
				return err
			}
			blocks = nil
			clear(names)
		}
	}
	return f.write(blocks)
}

// fixedName reports whether a chain is there whatever the Services: one that does not belong to a tree.
func fixedName(name string) bool { return !mayBeStale(name) || name == chainExternalNodePorts }

func (f *fullSync) write(blocks []block) error {
	if len(blocks) == 0 {
		return nil
	}
	if err := f.ctx.Err(); err != nil {
		return err
	}
	return f.restore(text(blocks))
}

func (f *fullSync) held(t table) kernelTable {
	if t == tableNAT {
		return f.nat
	}
	return f.filter
}

func (f *fullSync) want(t table, name string) {
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
	for _, j := range jumps(f.rules.localnet()) {
		held := f.held(j.table)
		if slices.Contains(held[j.from], j.text()) {
			continue
		}
		if err := f.tool.ensureJump(j); err != nil {
			return err
		}
		held[j.from] = append(held[j.from], j.text())
		f.written++
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

// guard puts the guard of localhost node ports into KUBE-FIREWALL. The kubelet keeps the same rule there, and may keep
// others, which stay.
func (f *fullSync) guard() error {
	if slices.Contains(f.filter[chainFirewall], localnetGuard()) {
		return nil
	}
	var out strings.Builder
	out.WriteString("*filter\n")
	if _, exists := f.filter[chainFirewall]; !exists {
		out.WriteString(":" + chainFirewall + " - [0:0]\n")
	}
	chain{chainFirewall, []string{localnetGuard()}}.appendTo(&out, "")
	out.WriteString("COMMIT\n")
	f.filter[chainFirewall] = append(f.filter[chainFirewall], localnetGuard())
	return f.restore(out.String())
}
