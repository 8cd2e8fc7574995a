package iptables

import (
	"cmp"
	"errors"
	"slices"
)

// dispatch writes what leads to the ServicePorts' own chains, with those of these that change: at once where they are not too
// many, so that no packet meets the one without the other.
func (f *fullSync) dispatch() error {
	if done, err := f.dispatchAtOnce(); done || err != nil {
		return err
	}
	rewrites := f.rewrites
	f.rewrites = nil
	if err := f.writeAll(rewrites); err != nil {
		return err
	}
	err := f.dispatchInSteps()
	var refused *RestoreError
	if !errors.As(err, &refused) || errLocked(err) || !f.works() {
		return err
	}
	if found, other := f.refuseEntries(); other != nil || !found {
		return cmp.Or(other, err)
	}
	return f.dispatchInSteps()
}

// dispatchAtOnce reports whether it has written all, which it has not where that is too much, or the kernel refuses something.
func (f *fullSync) dispatchAtOnce() (bool, error) {
	nat, filter := block{table: tableNAT}, block{table: tableFilter}
	names := map[string]bool{}
	for _, o := range f.rewrites {
		for _, c := range o.chains {
			nat.write(c)
			addNames(names, c)
		}
	}
	for _, c := range f.fixedTodo() {
		if c.table == tableNAT {
			nat.write(c.chain)
		} else {
			filter.write(c.chain)
		}
		addNames(names, c.chain)
	}
	if f.tooMany(names) {
		return false, nil
	}
	var blocks []block
	for _, b := range []block{nat, filter} {
		if !b.empty() {
			blocks = append(blocks, b)
		}
	}
	err := f.write(blocks)
	var refused *RestoreError
	if errors.As(err, &refused) && !errLocked(err) {
		return false, nil // In steps it turns out by what.
	}
	f.written += len(nat.writes) + len(filter.writes)
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
func (f *fullSync) dispatchInSteps() error {
	todo := f.fixedTodo()
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
