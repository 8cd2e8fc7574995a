package xtables

import (
	"maps"
	"slices"

	"nodeproxy/kernel/names"
)

// Desired is what a caller wants tables to hold.
type Desired struct {
	// Chains are written in this order.
	Chains []Chain
	// Jumps lead from built-in chains to them. Each goes in front of what is there, so the last one comes first.
	Jumps []Jump
	// Stale reports whether a chain goes unless it is among Chains. Nil keeps all.
	Stale func(t names.Table, chain string) bool
	// StaleJump reports whether rules of built-in chains that lead to a chain go unless they are among Jumps. Nil keeps all.
	StaleJump func(t names.Table, to string) bool
}

// Diff returns the changes that bring a table to what is desired, in the order of Op. Of what is to go, a chain to which a rule
// of another program leads can't be removed: it is emptied, so that it does nothing, and goes once that rule has gone.
func Diff(t names.Table, desired Desired, actual Content) []Change {
	var out []Change
	for _, c := range desired.Chains {
		if c.Table != t {
			continue
		}
		have, exists := actual[c.Name]
		if !exists || !slices.Equal(have, c.Rules) {
			out = append(out, Change{Op: Write, Table: t, Chain: c.Name, Rules: c.Rules, Exists: exists, Have: have})
		}
	}
	out = append(out, staleJumps(t, desired, actual)...)
	for _, j := range desired.Jumps {
		if j.Table == t && !actual.leads(j.From, j.Rule) {
			out = append(out, Change{Op: Insert, Table: t, Chain: j.From, Rules: []string{j.Rule}})
		}
	}
	if desired.Stale == nil {
		return out
	}
	kept := map[string]bool{}
	for _, c := range desired.Chains {
		if c.Table == t {
			kept[c.Name] = true
		}
	}
	var stale []string
	for _, name := range slices.Sorted(maps.Keys(actual)) {
		if !kept[name] && desired.Stale(t, name) {
			stale = append(stale, name)
		}
	}
	return append(out, prune(t, desired, actual, stale)...)
}

// staleJumps are the rules of built-in chains that lead to stale chains, or that are there more than once.
func staleJumps(t names.Table, desired Desired, actual Content) []Change {
	if desired.StaleJump == nil {
		return nil
	}
	var out []Change
	for _, name := range slices.Sorted(maps.Keys(actual)) {
		if !names.Builtin(name) {
			continue
		}
		seen := map[string]bool{}
		for _, r := range actual[name] {
			wanted := slices.Contains(desired.Jumps, Jump{t, name, r}) && !seen[r]
			if !wanted && desired.StaleJump(t, Target(r)) {
				out = append(out, Change{Op: Delete, Table: t, Chain: name, Rules: []string{r}})
			}
			seen[r] = true
		}
	}
	return out
}

// prune removes stale chains, and empties those that stay.
func prune(t names.Table, desired Desired, actual Content, stale []string) []Change {
	if len(stale) == 0 {
		return nil
	}
	inUse := map[string]string{} // by a rule in this chain
	for _, name := range slices.Sorted(maps.Keys(actual)) {
		if names.IsOurs(t, name) {
			continue
		}
		for _, r := range actual[name] {
			to := Target(r)
			goes := names.Builtin(name) && desired.StaleJump != nil && desired.StaleJump(t, to)
			if _, is := slices.BinarySearch(stale, to); is && !goes {
				inUse[to] = name
			}
		}
	}
	var empty, leave, remove []Change
	for _, name := range stale {
		c := Change{Op: Remove, Table: t, Chain: name, Exists: true, Have: actual[name], By: inUse[name]}
		switch {
		case c.By == "":
			remove = append(remove, c)
		case len(c.Have) > 0:
			c.Op = Empty
			empty = append(empty, c)
		default:
			c.Op = Leave
			leave = append(leave, c)
		}
	}
	return slices.Concat(empty, leave, remove)
}

// leads reports whether a built-in chain has a rule that leads to another chain. A rule there that leads to the same chain and can't
// be read counts: to add one at each comparison would be worse.
func (t Content) leads(from, rule string) bool {
	return slices.ContainsFunc(t[from], func(r string) bool {
		return r == rule || Unread(r) && Target(r) == Target(rule)
	})
}
