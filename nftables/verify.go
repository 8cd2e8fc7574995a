package nftables

import (
	"context"
	"maps"
	"slices"

	"nodeproxy/backend"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Verify compares what was written of a Service with the kernel, and the chains that lead there. It may run beside Sync and Compare,
// which wait for it for a moment at most.
func (b *Backend) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	return backend.Verify(ctx, b.Engines, svc)
}

// Verify implements backend.Verifier.
func (e *engine) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	var l *layout
	var all map[kind]bool
	mine, used := map[id]value{}, map[kind]bool{}
	err = backend.Known(ctx, &e.mu, func() bool {
		for k, w := range e.current {
			if k.Service == svc {
				e.layout.fill(w, mine, used)
			}
		}
		l, all = e.layout, maps.Clone(e.kinds)
		return e.current != nil
	})
	if err != nil {
		return 0, nil, err
	}
	k, err := e.reader()
	if err != nil {
		return 0, nil, err
	}
	defer k.Close()
	chains := append(l.chains(), l.kindChains(all)...)
	content, err := k.Read(e.family, names.NFTables, e.sets, chains)
	if err != nil {
		return 0, nil, err
	}
	things = len(chains) + len(e.sets) + len(mine)
	table := drift.Difference{Kind: drift.Table, Object: nft.FamilyName(e.family) + " " + names.NFTables + " of nftables"}
	switch {
	case content == nil:
		table.State = drift.Missing
		return things, append(found, table), nil
	case content.Dormant:
		table.State = drift.Changed
		found = append(found, table)
	}
	found = append(found, structure(l, all, e.sets, content)...)
	for _, i := range slices.SortedFunc(maps.Keys(mine), compareIDs) {
		if err := ctx.Err(); err != nil {
			return things, found, err
		}
		want := mine[i]
		have, same, err := e.look(k, i, &want)
		if err != nil {
			return things, found, err
		}
		if !same {
			found = append(found, e.difference(i, &want, have))
		}
	}
	return things, found, nil
}
