package nftables

import (
	"maps"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// intruders are what other programs have put into the table, beside elements and rules. Only this program writes there.
type intruders struct {
	bases   []string // chains that the kernel calls
	chains  []string // all others
	sets    []string
	objects []nft.Object
}

// intrudersIn returns what is in a table and not among these sets or the known chains. Chains of kinds are there for a while after the last use.
func intrudersIn(is *nft.Content, sets []nft.Set, known map[string]bool) (in intruders) {
	for _, name := range slices.Sorted(maps.Keys(is.Chains)) {
		switch {
		case known[name]:
		case is.Chains[name].Base:
			in.bases = append(in.bases, name)
		default:
			in.chains = append(in.chains, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(is.Sets)) {
		if !slices.ContainsFunc(sets, func(s nft.Set) bool { return s.Name == name }) {
			in.sets = append(in.sets, name)
		}
	}
	in.objects = is.Objects
	return in
}

// differences names them.
func (in intruders) differences(f plan.Family) (found drift.Found) {
	add := func(k drift.Kind, name string) {
		found = append(found, drift.Difference{Kind: k, State: drift.Unexpected, Object: name + ofTable(f)})
	}
	for _, name := range slices.Concat(in.bases, in.chains) {
		add(drift.Chain, name)
	}
	for _, name := range in.sets {
		add(drift.SetElement, "all of set "+name)
	}
	for _, o := range in.objects {
		add(drift.Object, o.String())
	}
	return found
}

// disarm adds to a transaction what leaves of them nothing but chains without rules, which something may lead to.
func (in intruders) disarm(b *nft.Batch) {
	for _, name := range slices.Concat(in.bases, in.chains) {
		b.FlushChain(name)
	}
	for _, name := range in.bases {
		b.DeleteChain(name)
	}
	for _, name := range in.sets {
		b.DeleteSet(name)
	}
	for _, o := range in.objects {
		b.DeleteObject(o)
	}
}

// remove adds to a transaction what removes the chains that disarm leaves.
func (in intruders) remove(b *nft.Batch) {
	for _, name := range in.chains {
		b.DeleteChain(name)
	}
}

// empty reports whether there are none.
func (in intruders) empty() bool {
	return len(in.bases)+len(in.chains)+len(in.sets)+len(in.objects) == 0
}

// names are those of the chains that may be in the kernel.
func (s *snapshot) names() map[string]bool { return namesOf(s.chains(), s.leftover) }

// namesOf returns the names of chains, and those in more.
func namesOf(chains []nft.Chain, more map[string]bool) map[string]bool {
	out := make(map[string]bool, len(chains)+len(more))
	maps.Copy(out, more)
	for _, c := range chains {
		out[c.Name] = true
	}
	return out
}
