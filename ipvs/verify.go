package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"nodeproxy/backend"
	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// Verify compares the virtual servers and set entries of a Service with the kernel. It may run beside Sync, which waits for it for a
// moment at most.
func (b *Backend) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	return backend.Verify(ctx, b.Engines, svc)
}

// Verify implements backend.Verifier.
func (e *engine) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	if err := backend.Lock(ctx, &e.mu); err != nil {
		return 0, nil, err
	}
	if e.desired == nil {
		e.mu.Unlock()
		return 0, nil, errors.New("what the kernel holds is not known until the next sync has succeeded")
	}
	var servers []server
	members := map[setID][]member{}
	for k, o := range e.desired.objects {
		if k.Service != svc {
			continue
		}
		for _, s := range o.servers {
			if _, there := e.actual.servers[s.ID]; there {
				servers = append(servers, s)
			}
		}
		for _, m := range o.members {
			if have, there := e.actual.members[m.key()]; there {
				m.entry.Mark, m.entry.Mask = have.mark, have.mask
				members[m.set] = append(members[m.set], m)
			}
		}
	}
	e.mu.Unlock()
	differs := func(k drift.Kind, s drift.State, format string, args ...any) {
		found = append(found, drift.Difference{Kind: k, State: s, Object: fmt.Sprintf(format, args...)})
	}
	for _, s := range servers {
		things += 1 + len(s.realServers)
		have, err := e.machine.servers.Get(s.ID)
		if err != nil {
			return things, found, err
		}
		if have == nil {
			differs(drift.VirtualServer, drift.Missing, "%s", s.ID)
			continue
		}
		if have.Foreign || have.Server != s.Server {
			differs(drift.VirtualServer, drift.Changed, "%s", s.ID)
		}
		known := map[netip.AddrPort]bool{}
		for _, r := range s.realServers {
			known[r.Addr] = true
			is, there := have.RealServers[r.Addr]
			switch {
			case !there:
				differs(drift.RealServer, drift.Missing, "%s of virtual server %s", r.Addr, s.ID)
			case is.Weight != r.Weight:
				differs(drift.RealServer, drift.Changed, "%s of virtual server %s", r.Addr, s.ID)
			}
		}
		for a, is := range have.RealServers {
			if !known[a] && is.Weight > 0 {
				differs(drift.RealServer, drift.Unexpected, "%s of virtual server %s", a, s.ID)
			}
		}
	}
	for id, list := range members {
		set := setOf(id, e.family)
		things += len(list)
		have, err := e.machine.sets.Entries(set)
		if err != nil {
			return things, found, err
		}
		for _, m := range list {
			if _, there := have[m.entry]; !there {
				differs(drift.SetElement, drift.Missing, "%s of set %s", m.entry.Text(set), set.Name)
			}
		}
	}
	return things, found, ctx.Err()
}
