package ipvs

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"nodeproxy/backend"
	"nodeproxy/internal/set"
	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// Verify compares the virtual servers and set entries of a Service with the kernel. It may run beside Sync, which waits for it for a
// moment at most.
func (b *Backend) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	return backend.Verify(ctx, b.Engines, svc)
}

// Verify implements backend.Verifier. Real servers that drain may go at any time, and are left out.
func (e *engine) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	var before *actual
	err = backend.Known(ctx, &e.mu, func() bool {
		if e.desired != nil {
			before = e.written(svc)
		}
		return before != nil
	})
	if err != nil || before.servers.Len()+len(before.members) == 0 {
		return 0, nil, err
	}
	kernel, closeAll, err := e.beside()
	if err != nil {
		return 0, nil, err
	}
	defer closeAll()
	now := newActual()
	for v := range before.servers.All() {
		if err := ctx.Err(); err != nil {
			return things, nil, err
		}
		things += 1 + len(v.realServers)
		have, err := kernel.servers.Get(v.ID)
		if err != nil {
			return things, nil, err
		}
		if have == nil {
			continue
		}
		is := newActualServer(have, time.Now())
		is.realServers = slices.DeleteFunc(is.realServers, func(d actualRealServer) bool {
			_, known := v.realServer(d.Addr)
			return d.Weight == 0 && !known
		})
		now.servers.Put(is)
		if have.Foreign && is.Server == v.Server {
			found = append(found, drift.Difference{Kind: drift.VirtualServer, State: drift.Changed, Object: v.ID.String()})
		}
	}
	things += len(before.members)
	ids := set.Set[setID]{}
	for m := range before.members {
		ids.Insert(m.set)
	}
	for id := range ids {
		if err = ctx.Err(); err == nil {
			err = now.readSet(kernel.sets, id, e.family)
		}
		if err != nil {
			return things, nil, err
		}
	}
	maps.DeleteFunc(now.members, func(m memberKey, _ marked) bool { _, written := before.members[m]; return !written })
	return things, append(found, differences(e.family, before, now)...), nil
}

// written returns the virtual servers and set entries of a Service that are in the kernel. What a later sync is left to change is not among
// them.
func (e *engine) written(svc plan.Service) *actual {
	h, rest := newActual(), cmp.Or(e.rest, newTouched())
	for sp := range e.desired.services.All() {
		if sp.Key.Service != svc {
			continue
		}
		o := e.desired.build(sp)
		for _, s := range o.servers {
			v := e.actual.servers.Get(s.id)
			if v == nil || rest.servers.Has(s.id) {
				continue
			}
			drains := func(d actualRealServer) bool { return d.draining != nil }
			h.servers.Put(&actualServer{Server: v.Server, realServers: slices.DeleteFunc(slices.Clone(v.realServers), drains)})
		}
		for _, m := range o.members {
			if with, there := e.actual.members[m.key()]; there && !rest.members.Has(m.key()) {
				h.members[m.key()] = with
			}
		}
	}
	return h
}
