package ipvs

import (
	"cmp"
	"context"
	"maps"
	"net/netip"

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
	if err != nil || len(before.servers)+len(before.members) == 0 {
		return 0, nil, err
	}
	kernel, closeAll, err := e.machine.reader()
	if err != nil {
		return 0, nil, err
	}
	defer closeAll()
	now := newActual()
	for id, v := range before.servers {
		if err := ctx.Err(); err != nil {
			return things, nil, err
		}
		things += 1 + len(v.realServers)
		have, err := kernel.servers.Get(id)
		if err != nil {
			return things, nil, err
		}
		if have == nil {
			continue
		}
		is := &actualServer{Server: have.Server, realServers: map[netip.AddrPort]*actualRealServer{}}
		for addr, d := range have.RealServers {
			if d.Weight > 0 || v.realServers[addr] != nil {
				is.realServers[addr] = &actualRealServer{weight: d.Weight}
			}
		}
		now.servers[id] = is
		if have.Foreign && is.Server == v.Server {
			found = append(found, drift.Difference{Kind: drift.VirtualServer, State: drift.Changed, Object: id.String()})
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
	maps.DeleteFunc(now.members, func(m member, _ shared) bool { _, written := before.members[m]; return !written })
	return things, append(found, differences(e.family, before, now)...), nil
}

// written returns the virtual servers and set entries of a Service that are in the kernel. What a later sync is left to change is not among
// them.
func (e *engine) written(svc plan.Service) *actual {
	h, rest := newActual(), cmp.Or(e.rest, newTouched())
	for k, o := range e.desired.objects {
		if k.Service != svc {
			continue
		}
		for _, s := range o.servers {
			v := e.actual.servers[s.ID]
			if v == nil || rest.servers.Has(s.ID) {
				continue
			}
			h.servers[s.ID] = &actualServer{Server: v.Server, realServers: map[netip.AddrPort]*actualRealServer{}}
			for addr, d := range v.realServers {
				if !d.draining {
					h.servers[s.ID].realServers[addr] = &actualRealServer{weight: d.weight}
				}
			}
		}
		for _, m := range o.members {
			if with, there := e.actual.members[m.key()]; there && !rest.members.Has(m.key()) {
				h.members[m.key()] = with
			}
		}
	}
	return h
}
