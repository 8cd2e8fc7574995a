package iptables

import (
	"context"
	"slices"
	"strings"

	"nodeproxy/backend"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Verify compares the chains of a Service, and those that lead to them, with the kernel. It may run beside Sync, which waits for it for
// a moment at most. It runs a program for each table and family.
func (b *Backend) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	return backend.Verify(ctx, b.Engines, svc)
}

// Verify implements backend.Verifier.
func (e *engine) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	var desired xtables.Desired
	err = backend.Known(ctx, &e.syncing, func() bool {
		if e.current == nil {
			return false
		}
		desired = e.current.about(svc)
		return true
	})
	if err != nil {
		return 0, nil, err
	}
	of, known := map[names.Table][]string{}, map[names.Table]xtables.Content{}
	for _, t := range tables {
		known[t] = xtables.Content{}
	}
	for _, c := range desired.Chains {
		of[c.Table] = append(of[c.Table], c.Name)
		known[c.Table][c.Name] = c.Rules
		things += max(1, len(c.Rules))
	}
	for _, j := range desired.Jumps {
		of[j.Table] = append(of[j.Table], j.From)
		things++
	}
	for _, table := range tables {
		slices.Sort(of[table])
		r, err := e.Kernel.Read(ctx, table)
		if err != nil {
			return things, found, err
		}
		actual, err := r.Chains(ctx, slices.Compact(of[table]), known[table])
		if err != nil {
			return things, found, err
		}
		found = append(found, xtables.Drift(e.family, xtables.Diff(table, desired, actual))...)
	}
	return things, found, nil
}

// about returns the chains of a Service, those by which packets come to them, and the jumps from built-in chains.
func (r *rules) about(svc plan.Service) xtables.Desired {
	out := xtables.Desired{Jumps: jumps(false)}
	known := map[tableChainName]bool{}
	add := func(c xtables.Chain) {
		if at := (tableChainName{c.Table, c.Name}); !known[at] {
			known[at] = true
			out.Chains = append(out.Chains, c)
		}
	}
	add(r.dispatcher(natServices, &r.tries).rootChain()) // It leads to the node ports.
	for sp := range r.services.All() {
		if sp.Key.Service != svc {
			continue
		}
		frag := r.inForce(sp)
		for _, c := range frag.chains {
			add(c)
		}
		for _, e := range frag.entries {
			d := r.dispatcher(e.dispatcher, &r.tries)
			d.way(e.key, add)
			add(d.rootChain())
		}
	}
	return out
}

// way calls emit for the chains below a dispatcher's own that a packet for an entry passes.
func (d *dispatch) way(k key, emit func(xtables.Chain)) {
	for level := d.top(); len(level) > 0; {
		i := slices.IndexFunc(level, func(n subtree) bool { return strings.HasPrefix(string(k), string(n.prefix)) })
		if i < 0 {
			return
		}
		emit(d.chain(level[i]))
		level = level[i].below()
	}
}
