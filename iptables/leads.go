package iptables

import (
	"cmp"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// dispatch writes what leads to the ServicePorts' own chains, with those of these that change: at once where they are not too
// many, so that no packet meets the one without the other.
func (f *fullSync) dispatch() error {
	todo := f.fixedTodo()
	if done, err := f.dispatchAtOnce(todo); done || err != nil {
		return err
	}
	first, last := f.split(f.rewrites)
	f.rewrites = nil
	refused := len(f.refused)
	if err := f.writeAll(first); err != nil {
		return err
	}
	if len(f.refused) > refused { // What leads to those is not to be, or is to be as it was.
		todo = f.fixedTodo()
	}
	if err := f.dispatchOrRefuse(todo); err != nil {
		return err
	}
	last = slices.DeleteFunc(last, func(o own) bool { return f.asked[o.sp.Key] != nil })
	return f.writeAll(last)
}

// dispatchOrRefuse writes what leads to the ServicePorts' chains, without those ServicePorts whose entries the kernel refuses.
func (f *fullSync) dispatchOrRefuse(todo []tableChain) error {
	err := f.dispatchInSteps(todo)
	if !errRefused(err) || !f.works() {
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
		for _, c := range o.chains {
			masquerading := f.stillMasquerading(o.sp, c)
			if len(masquerading.rules) > len(c.rules) {
				later.chains = append(later.chains, c)
			}
			now.chains = append(now.chains, masquerading)
		}
		first = append(first, now)
		if len(later.chains) > 0 {
			last = append(last, later)
		}
	}
	return first, last
}

// stillMasquerading returns c, preceded by the rules that masquerade traffic for the cluster IP if c is the chain of the policy
// that is not in force any more, and the kernel's version of it has such rules.
func (f *fullSync) stillMasquerading(sp *plan.ServicePort, c chain) chain {
	b := f.rules.builder(sp)
	former := plan.Cluster
	if sp.InternalPolicy == plan.Cluster {
		former = plan.Local
	}
	masquerades := func(rule string) bool { return jumpTarget(rule) == names.MarkMasq }
	if c.name != b.policyChainName(former) || !slices.ContainsFunc(f.nat[c.name], masquerades) {
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
	return chain{c.name, slices.Concat(rules, c.rules)}
}

// dispatchAtOnce reports whether it has written all, which it has not where that is too much, or the kernel refuses something.
func (f *fullSync) dispatchAtOnce(todo []tableChain) (bool, error) {
	var b blocks
	names := map[string]bool{}
	for _, o := range f.rewrites {
		for _, c := range o.chains {
			b.nat.write(c)
			addNames(names, c)
		}
	}
	for _, c := range todo {
		b.write(c)
		addNames(names, c.chain)
	}
	if f.tooMany(names) {
		return false, nil
	}
	err := f.write(b.natFirst()...)
	if errRefused(err) {
		return false, nil // In steps it turns out by what.
	}
	return err == nil, err
}

// fixedTodo are the chains that are not a ServicePort's own and that the kernel does not have as they are to be.
func (f *fullSync) fixedTodo() []tableChain {
	var todo []tableChain
	f.rules.fixed(func(c tableChain) {
		f.want(c.table, c.name)
		if !f.held(c.table).has(c.chain) {
			todo = append(todo, c)
		}
	})
	return todo
}

// dispatchInSteps writes the chains that are not a ServicePort's own, those that others lead to first.
func (f *fullSync) dispatchInSteps(todo []tableChain) error {
	// The roots come after the trees below them: until they are written, the trees that were there before are whole. What the
	// base chains lose only then, such as a rule that masquerades for all Services, the former trees relied on.
	slices.SortStableFunc(todo, func(a, b tableChain) int { return turn(a.name) - turn(b.name) })
	if f.batch == 0 || !f.nestsTooDeep(todo) {
		return f.writeInSteps(todo)
	}
	// What is new is reached by nothing yet; all that is to be otherwise changes at once.
	isHeld := func(c tableChain) bool { _, held := f.held(c.table)[c.name]; return held }
	slices.SortStableFunc(todo, func(a, b tableChain) int { return boolCompare(isHeld(a), isHeld(b)) })
	first := slices.IndexFunc(todo, isHeld)
	if err := f.writeInSteps(todo[:first]); err != nil {
		return err
	}
	var b blocks
	for _, c := range todo[first:] {
		b.write(c)
	}
	return f.write(b.natFirst()...)
}

// writeInSteps writes chains in order, not too many at a time.
func (f *fullSync) writeInSteps(todo []tableChain) error {
	var blocks []block
	names := map[string]bool{}
	for _, c := range todo {
		if n := len(blocks); n == 0 || blocks[n-1].table != c.table {
			blocks = append(blocks, block{table: c.table})
		}
		blocks[len(blocks)-1].write(c.chain)
		if addNames(names, c.chain); f.tooMany(names) {
			if err := f.write(blocks...); err != nil {
				return err
			}
			blocks = nil
			clear(names)
		}
	}
	return f.write(blocks...)
}

// fixedName reports whether a chain is there whatever the Services: one that does not belong to a tree.
func fixedName(name string) bool { return !names.OfService(name) || name == names.ExternalNodePorts }

// turn is when dispatchInSteps writes a chain: those of trees first, then the dispatchers' own, then the base chains.
func turn(name string) int {
	switch {
	case !fixedName(name):
		return 0
	case isDispatcher(name):
		return 1
	}
	return 2
}

// nestsTooDeep reports whether, while these chains are written one after the other, rules would at times lead deeper than the
// kernel takes: down to one of them by the chains that are there, and on by those that are to be.
func (f *fullSync) nestsTooDeep(todo []tableChain) bool {
	rewritten := map[names.Table]map[string]int{names.NAT: {}, names.Filter: {}} // their depths
	held := map[names.Table]map[string]int{names.NAT: depths(f.nat), names.Filter: depths(f.filter)}
	for _, c := range todo {
		if depth, reached := held[c.table][c.name]; reached {
			rewritten[c.table][c.name] = depth
		}
	}
	deep := false
	for _, id := range dispatcherOrder {
		d := f.rules.dispatcher(id, &f.rules.tries)
		d.walk(func(n node) {
			depth, is := rewritten[d.place.table][d.name(n.prefix)]
			deep = deep || is && depth+n.levels-1+d.place.tail > maxNesting
		})
	}
	return deep
}

// depths tells of each chain that packets can get to how deep below a built-in one it lies at most.
func depths(held kernelTable) map[string]int {
	out := map[string]int{}
	var visit func(name string, depth int)
	visit = func(name string, depth int) {
		if was, seen := out[name]; seen && was >= depth {
			return
		}
		out[name] = depth
		for _, r := range held[name] {
			if to := jumpTarget(r); to != "" {
				if _, is := held[to]; is {
					visit(to, depth+1)
				}
			}
		}
	}
	for name := range held {
		if names.Builtin(name) {
			visit(name, 0)
		}
	}
	return out
}
