package iptables

import (
	"cmp"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// refusing are the dispatchers of table filter that refuse or drop packets, each with the one of table nat that sends on the same ones. A
// dispatcher comes after those to which its chain leads.
var refusing = []struct{ filter, nat dispatcherID }{
	{filterExternalNodePorts, natNodePorts}, {filterExternal, natServices}, {filterServices, natServices}, {filterFirewall, natServices},
}

// newRefusals adds the filter rules for packets that are to be refused and that the kernel still sends on. They are written before the nat
// rules go, beside the filter rules that the kernel holds, so that at every moment such a packet is either sent on or refused; see update.
func (f *fullSync) newRefusals() error {
	desired := f.rules.tries
	var held [dispatchers][]entry
	var sent [dispatchers]map[key]bool
	missing := false
	for _, at := range refusing {
		held[at.filter] = readEntries(at.filter, f.actual)
		refused := keysOf(held[at.filter])
		desired[at.filter].entries(func(e *trie) {
			if missing || refused[e.prefix] {
				return
			}
			if sent[at.nat] == nil { // Needed rarely.
				sent[at.nat] = keysOf(readEntries(at.nat, f.actual))
			}
			missing = sent[at.nat][e.prefix]
		})
	}
	if !missing {
		return nil
	}
	defer func() { f.rules.tries = desired }()
	var todo []xtables.Change
	for _, at := range refusing {
		for _, e := range held[at.filter] {
			if desired[at.filter].at(e.key) == nil {
				f.rules.tries[at.filter] = f.rules.tries[at.filter].with(e.key, e.from)
			}
		}
		f.rules.dispatcher(at.filter, &f.rules.tries).chains(nil, func(c xtables.Chain) { todo = append(todo, f.differing(c)...) })
	}
	if err := f.dispatchInSteps(todo); !xtables.IsRefused(err) {
		return err
	}
	return nil // dispatch finds out which entry the kernel does not take.
}

func keysOf(list []entry) map[key]bool {
	keys := make(map[key]bool, len(list))
	for _, e := range list {
		keys[e.key] = true
	}
	return keys
}

// dispatch writes what leads to the ServicePorts' own chains, with those of these that change: at once where they are not too
// many, so that no packet meets the one without the other.
func (f *fullSync) dispatch() error {
	todo := f.fixedTodo()
	if done, err := f.dispatchAtOnce(todo); done || err != nil {
		return err
	}
	passing := f.takePassing(todo)
	first, last := f.split(f.rewrites)
	f.rewrites = nil
	refused := len(f.refused)
	if err := f.writeAll(first); err != nil {
		return err
	}
	if len(f.refused) > refused { // What leads to those is not to be, or is to be as it was.
		todo = f.fixedTodo()
	}
	if len(passing) > 0 {
		err := f.dispatchInSteps(todo, changesOf(passing)...)
		if xtables.IsRefused(err) { // By themselves it turns out which are.
			now, later := f.split(passing)
			last = append(last, later...)
			err = f.writeAll(now)
		}
		if err != nil {
			return err
		}
		todo = f.fixedTodo()
	}
	if err := f.dispatchOrRefuse(todo); err != nil {
		return err
	}
	last = slices.DeleteFunc(last, func(o own) bool {
		return slices.ContainsFunc(f.refused, func(r *refusal) bool { return r.sp == o.sp })
	})
	return f.writeAll(last)
}

// takePassing takes out of the rewrites those of ServicePorts that give a frontend up to another one, or take it over: its packets get to
// the chains of the former until the dispatchers are written, and to those of the latter from then on, so these chains change together
// with those of todo. Where that is far too much for one run, it takes none.
func (f *fullSync) takePassing(todo []xtables.Change) []own {
	if len(f.rewrites) == 0 {
		return nil
	}
	passing := map[string]bool{} // by what stands for a ServicePort in the names of its chains
	for _, id := range []dispatcherID{natServices, natNodePorts} {
		for _, held := range readEntries(id, f.actual) {
			sp, wanted := f.rules.tries[id].at(held.key).(*plan.ServicePort)
			if !wanted {
				continue
			}
			if was, is := ownerIn(held.target()), ownerOf(sp); was != "" && was != is {
				passing[was], passing[is] = true, true
			}
		}
	}
	var taken, others []own
	for _, o := range f.rewrites {
		if passing[ownerOf(o.sp)] {
			taken = append(taken, o)
		} else {
			others = append(others, o)
		}
	}
	var load xtables.Load
	load.Add(changesOf(taken)...)
	for _, c := range todo {
		if c.Exists {
			load.Add(c)
		}
	}
	if most := (xtables.Writer{MaxNames: 10 * f.MaxNames}); most.Full(load) {
		return nil
	}
	f.rewrites = others
	return taken
}

// ownerIn returns what stands for a ServicePort in the name of one of its chains that dispatchers lead to; "" if it is none of those.
func ownerIn(chain string) string {
	for _, prefix := range []string{names.PrefixCluster, names.PrefixLocal, names.PrefixExternal, names.PrefixFirewall} {
		if owner, is := strings.CutPrefix(chain, prefix); is {
			return owner
		}
	}
	return ""
}

func ownerOf(sp *plan.ServicePort) string { return serviceChain("", sp.Key) }

func changesOf(list []own) []xtables.Change {
	all := make([][]xtables.Change, len(list))
	for i, o := range list {
		all[i] = o.changes
	}
	return slices.Concat(all...) // There may be tens of thousands: this makes room for them at once.
}

// dispatchOrRefuse writes what leads to the ServicePorts' chains, without those ServicePorts whose entries the kernel refuses.
func (f *fullSync) dispatchOrRefuse(todo []xtables.Change) error {
	err := f.dispatchInSteps(todo)
	if !xtables.IsRefused(err) || !f.Works() {
		return err
	}
	if found, other := f.refuseEntries(); other != nil || !found {
		return cmp.Or(other, err)
	}
	return f.dispatchInSteps(f.fixedTodo())
}

// split returns the rewrites to write before the dispatchers, and those to write after them. When the internal policy changes, the
// dispatchers lead traffic for the cluster IP to the chain of the former policy until they are written; that chain masquerades
// the traffic until then, and loses the rule for it afterwards.
func (f *fullSync) split(rewrites []own) (first, last []own) {
	for _, o := range rewrites {
		now, later := own{sp: o.sp}, own{sp: o.sp}
		for _, c := range o.changes {
			masquerading := f.stillMasquerading(o.sp, c)
			if len(masquerading.Rules) > len(c.Rules) {
				later.changes = append(later.changes, c)
			}
			now.changes = append(now.changes, masquerading)
		}
		first = append(first, now)
		if len(later.changes) > 0 {
			last = append(last, later)
		}
	}
	return first, last
}

// stillMasquerading returns c, preceded by the rules that masquerade traffic for the cluster IP if c is the chain of the policy
// that is not in force any more, and the kernel's version of it has such rules.
func (f *fullSync) stillMasquerading(sp *plan.ServicePort, c xtables.Change) xtables.Change {
	b := f.rules.builder(sp)
	former := plan.Cluster
	if sp.InternalPolicy == plan.Cluster {
		former = plan.Local
	}
	masquerades := func(rule string) bool { return xtables.Target(rule) == names.MarkMasq }
	if c.Chain != b.policyChainName(former) || !slices.ContainsFunc(c.Have, masquerades) {
		return c
	}
	var rules []string
	for _, front := range sp.Frontends {
		if front.Kind != plan.ClusterIP {
			continue
		}
		if r := b.masquerade(front, false); r != "" {
			rules = append(rules, r)
		}
	}
	c.Rules = slices.Concat(rules, c.Rules)
	return c
}

// dispatchAtOnce reports whether it has written all, which it has not where that is too much, or the kernel refuses something.
func (f *fullSync) dispatchAtOnce(todo []xtables.Change) (bool, error) {
	step := append(changesOf(f.rewrites), todo...)
	var load xtables.Load
	for _, c := range step {
		if load.Add(c); f.Full(load) {
			return false, nil
		}
	}
	err := f.write(inOrder(step, names.NAT, names.Filter))
	if xtables.IsRefused(err) {
		return false, nil // In steps it turns out by what.
	}
	return err == nil, err
}

// fixedTodo is what is to change in the chains that are not a ServicePort's own.
func (f *fullSync) fixedTodo() []xtables.Change {
	var todo []xtables.Change
	for c := range f.rules.fixed(nil) {
		f.wanted[tableChainName{c.Table, c.Name}] = true
		todo = append(todo, f.differing(c)...)
	}
	return todo
}

// dispatchInSteps writes the chains that are not a ServicePort's own, those that others lead to first, or, where there are changes to make
// together with them, all at once but those that are new.
func (f *fullSync) dispatchInSteps(todo []xtables.Change, together ...xtables.Change) error {
	// The roots come after the trees below them: until they are written, the trees that were there before are whole. What the
	// common chains lose only then, such as a rule that masquerades for all Services, the former trees relied on.
	slices.SortStableFunc(todo, func(a, b xtables.Change) int { return writeOrder(a) - writeOrder(b) })
	if len(together) == 0 && (f.MaxNames == 0 || !f.nestsTooDeep(todo)) {
		return f.writeInSteps(todo)
	}
	// What is new is reached by nothing yet; all that is to be otherwise changes at once.
	slices.SortStableFunc(todo, func(a, b xtables.Change) int { return boolCompare(a.Exists, b.Exists) })
	first := slices.IndexFunc(todo, func(c xtables.Change) bool { return c.Exists })
	if first < 0 {
		first = len(todo)
	}
	if err := f.writeInSteps(todo[:first]); err != nil {
		return err
	}
	return f.write(inOrder(slices.Concat(together, todo[first:]), names.NAT, names.Filter))
}

// writeInSteps writes chains in order, not too many at a time.
func (f *fullSync) writeInSteps(todo []xtables.Change) error {
	var steps [][]xtables.Change
	var load xtables.Load
	for _, c := range todo {
		if n := len(steps); n == 0 || steps[n-1][0].Table != c.Table {
			steps = append(steps, nil)
		}
		last := len(steps) - 1
		steps[last] = append(steps[last], c)
		if load.Add(c); f.Full(load) {
			if err := f.write(steps...); err != nil {
				return err
			}
			steps = nil
			load = xtables.Load{}
		}
	}
	return f.write(steps...)
}

// fixedName reports whether a chain is there whatever the Services: one that does not belong to a tree.
func fixedName(name string) bool { return !names.OfService(name) || name == names.ExternalNodePorts }

// writeOrder says when dispatchInSteps writes a chain: those of trees first, then the dispatchers' own, then the common chains. Table filter
// comes after table nat, so that a ServicePort that had no endpoints is refused until its nat rules exist.
func writeOrder(c xtables.Change) int {
	order := 0
	if c.Table == names.Filter {
		order = 2
	}
	switch {
	case !fixedName(c.Chain):
		return order
	case isDispatcher(c.Chain):
		return order + 1
	}
	return 4
}

// nestsTooDeep reports whether, while these chains are written one after the other, rules would at times lead deeper than the
// kernel takes: down to one of them by the chains that are there, and on by those that are to be.
func (f *fullSync) nestsTooDeep(todo []xtables.Change) bool {
	rewritten := map[names.Table]map[string]int{} // their depths
	for _, t := range tables {
		rewritten[t] = map[string]int{}
		depths := xtables.Depths(f.actual[t])
		for _, c := range todo {
			if depth, reached := depths[c.Chain]; reached && c.Table == t {
				rewritten[t][c.Chain] = depth
			}
		}
	}
	deep := false
	for _, id := range dispatcherOrder {
		d := f.rules.dispatcher(id, &f.rules.tries)
		d.walk(func(n subtree) {
			depth, is := rewritten[d.place.table][d.name(n.prefix)]
			deep = deep || is && depth+n.levels-1+d.place.tail > xtables.MaxNesting
		})
	}
	return deep
}
