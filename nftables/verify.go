package nftables

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/backend"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Verify compares what was written of a Service with the kernel, and the chains that lead there. It may run beside Sync and Compare,
// which wait for it for a moment at most.
func (b *Backend) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	return backend.Verify(ctx, b.Engines, svc)
}

// Verify implements backend.Verifier.
func (e *engine) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	var s *snapshot
	err = backend.Known(ctx, &e.mu, func() bool {
		s = &snapshot{layout: e.layout, current: map[plan.Key]written{}, users: map[netip.Addr]int{}, kinds: maps.Clone(e.kinds)}
		for k, w := range e.current {
			if k.Service == svc {
				s.current[k] = w
				count(w.sp, s.users, 1)
			}
		}
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
	content, err := k.Read(e.family, names.NFTables, e.sets, s.layout.chains())
	if err != nil {
		return 0, nil, err
	}
	want := slices.Collect(s.expected(map[kind]bool{}))
	things, found = len(s.chains())+len(e.sets)+len(want), s.structure(content, e.sets)
	if content == nil {
		return things, found, nil
	}
	var unlike []write
	err = e.find(ctx, k, slices.Values(want), func(want element, has value, is bool) error {
		if w, differs := want.unlike(has, is); differs {
			unlike = append(unlike, w)
		}
		return nil
	})
	return things, append(found, e.differences(unlike)...), err
}
