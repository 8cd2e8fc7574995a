package iptables

import (
	"iter"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// drift finds out in what the tables differ from what was written to them last. KUBE-FIREWALL is left out: the kubelet has a say in
// it. So are chains of other modes: whoever starts one in another mode has not changed what was written.
func (e *engine) drift(actual map[names.Table]xtables.Content) drift.Found {
	var found drift.Found
	written := e.current.desired()
	for _, t := range tables {
		found = append(found, xtables.Drift(e.family, e.WithoutStuck(xtables.Diff(t, written, actual[t])))...)
	}
	return found
}

// desired is what the tables are to hold.
func (r *rules) desired() xtables.Desired {
	d := xtables.Desired{
		Jumps: jumps(false), // without those to KUBE-FIREWALL
		Stale: func(_ names.Table, name string) bool { return names.OfService(name) },
	}
	d.Chains = slices.Collect(r.chains(nil))
	return d
}

// chains are all chains of ours, those of a ServicePort after each other. Chains that are in bare may come without their rules.
func (r *rules) chains(bare digests) iter.Seq[xtables.Chain] {
	return func(yield func(xtables.Chain) bool) {
		inOrder := func(a, b *plan.ServicePort) int { return a.Key.Compare(b.Key) }
		for _, sp := range slices.SortedFunc(r.services.All(), inOrder) {
			inForce, is := r.spared[sp.Key]
			if !is { // Its entries, which take the longer time to make, are not needed.
				inForce.chains = r.builder(sp).chains()
			}
			for _, c := range inForce.chains {
				if !yield(c) {
					return
				}
			}
		}
		for _, c := range r.kept.own() {
			if !yield(c) {
				return
			}
		}
		r.fixed(bare)(yield)
	}
}
