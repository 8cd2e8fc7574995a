package ipvs

import (
	"context"
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
	var servers []server
	members := map[setID][]member{}
	err = backend.Known(ctx, &e.mu, func() bool {
		if e.desired == nil {
			return false
		}
		servers = e.written(svc, members)
		return true
	})
	if err != nil || len(servers) == 0 && len(members) == 0 {
		return 0, nil, err
	}
	kernel, err := e.machine.reader()
	if err != nil {
		return 0, nil, err
	}
	defer kernel.close()
	differs := func(k drift.Kind, s drift.State, format string, args ...any) {
		found = append(found, drift.Difference{Kind: k, State: s, Object: fmt.Sprintf(format, args...)})
	}
	for _, s := range servers {
		if err := ctx.Err(); err != nil {
			return things, found, err
		}
		things += 1 + len(s.realServers)
		have, err := kernel.servers.Get(s.ID)
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
		if err := ctx.Err(); err != nil {
			return things, found, err
		}
		set := setOf(id, e.family)
		things += len(list)
		have, err := kernel.sets.Entries(set)
		if err != nil {
			return things, found, err
		}
		for _, m := range list {
			if _, there := have[m.entry]; !there {
				differs(drift.SetElement, drift.Missing, "%s of set %s", m.entry.Text(set), set.Name)
			}
		}
	}
	return things, found, nil
}

// written returns the virtual servers of a Service that are in the kernel, and adds to members its entries of sets.
// What a later sync is left to change is not among them.
func (e *engine) written(svc plan.Service, members map[setID][]member) (servers []server) {
	rest := e.rest
	if rest == nil {
		rest = newTouched()
	}
	for k, o := range e.desired.objects {
		if k.Service != svc {
			continue
		}
		for _, s := range o.servers {
			if _, waits := rest.servers[s.ID]; waits {
				continue
			}
			if _, there := e.actual.servers[s.ID]; there {
				servers = append(servers, s)
			}
		}
		for _, m := range o.members {
			if _, waits := rest.members[m.key()]; waits {
				continue
			}
			if have, there := e.actual.members[m.key()]; there {
				m.entry.Mark, m.entry.Mask = have.mark, have.mask
				members[m.set] = append(members[m.set], m)
			}
		}
	}
	return servers
}
