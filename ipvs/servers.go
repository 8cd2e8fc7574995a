package ipvs

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipvs"
)

// ensureServer makes a virtual server and adds what it lacks; it removes nothing.
func (e *engine) ensureServer(id ipvs.ServerID) {
	delete(e.refused, id) // Retry everything that was refused.
	want, wanted := e.desired.servers[id]
	have := e.actual.servers[id]
	switch {
	case !wanted || have == nil && len(want.realServers) == 0:
		return
	case have == nil:
		e.queue(ipvs.AddServer, want.Server, ipvs.RealServer{}, func() { delete(e.actual.servers, id) })
		have = &actualServer{Server: want.Server, realServers: map[netip.AddrPort]*actualRealServer{}}
		e.actual.servers[id] = have
	default:
		e.reschedule(want.Server, have)
	}
	for _, d := range want.realServers {
		e.ensureRealServer(have, d)
	}
	e.reschedule(want.Server, have) // A draining one may be in use again.
}

// reschedule sets the properties of a virtual server, which depend on whether real servers of it drain.
func (e *engine) reschedule(want ipvs.Server, v *actualServer) {
	if want.ID != v.ID { // It receives no new connections.
		return
	}
	if v.drains() {
		want = e.options.whileDraining(want)
	}
	if was := v.Server; was != want {
		e.queue(ipvs.UpdateServer, want, ipvs.RealServer{}, func() {
			if v.Server == want { // A later change may have been accepted.
				v.Server = was
			}
		})
		v.Server = want
	}
}

// ensureRealServer adds a real server. A draining one gets its weight back; its connections are not affected.
func (e *engine) ensureRealServer(v *actualServer, want ipvs.RealServer) {
	switch have := v.realServers[want.Addr]; {
	case have == nil:
		e.queue(ipvs.AddRealServer, v.Server, want, func() { delete(v.realServers, want.Addr) })
	case have.weight != want.Weight:
		e.queue(ipvs.UpdateRealServer, v.Server, want, func() { v.realServers[want.Addr] = have })
	}
	v.realServers[want.Addr] = &actualRealServer{weight: want.Weight}
}

// pruneServer removes what a virtual server should not have, and the server itself if nothing is left. One that is replaced by
// another is removed when its connections have ended.
func (e *engine) pruneServer(id ipvs.ServerID, replaced bool) {
	have := e.actual.servers[id]
	if have == nil {
		return
	}
	want, wanted := e.desired.servers[id]
	if !wanted && !replaced {
		e.deleteServer(have)
		return
	}
	want.drains = want.drains || replaced
	for _, addr := range slices.SortedFunc(maps.Keys(have.realServers), netip.AddrPort.Compare) {
		_, used := slices.BinarySearchFunc(want.realServers, addr, func(d ipvs.RealServer, a netip.AddrPort) int {
			return d.Addr.Compare(a)
		})
		if !used {
			e.pruneRealServer(&want, have, addr)
		}
	}
	if len(have.realServers) == 0 {
		e.deleteServer(have)
	}
}

func (e *engine) deleteServer(v *actualServer) {
	e.queue(ipvs.DeleteServer, v.Server, ipvs.RealServer{}, nil)
	delete(e.actual.servers, v.ID)
}

// pruneRealServer removes a real server, or begins to drain it.
func (e *engine) pruneRealServer(want *server, v *actualServer, addr netip.AddrPort) {
	d := v.realServers[addr]
	if !want.drains {
		e.deleteRealServer(v, addr)
		return
	}
	was := *d
	d.draining = true
	e.mayDrain(v)
	e.reschedule(want.Server, v)
	if d.weight > 0 {
		e.queue(ipvs.UpdateRealServer, v.Server, ipvs.RealServer{Addr: addr}, func() { *d = was })
		d.weight = 0
	}
	switch lingers := slices.Contains(want.lingering, addr); {
	case lingers:
		d.since = time.Time{}
	case !was.draining || d.since.IsZero():
		d.since = time.Now()
	}
}

func (e *engine) deleteRealServer(v *actualServer, addr netip.AddrPort) {
	e.queue(ipvs.DeleteRealServer, v.Server, ipvs.RealServer{Addr: addr}, nil)
	delete(v.realServers, addr)
}

// change is a change of a virtual server. undo, which is nil for a deletion, restores actual; it is called if the kernel refuses
// the change.
type change struct {
	ipvs.Op
	undo func()
}

// queue queues a change of a virtual server for flush. actual already includes it: after any error but a refusal the kernel is read
// again.
func (e *engine) queue(kind ipvs.OpKind, v ipvs.Server, d ipvs.RealServer, undo func()) {
	e.version++
	for r := range e.readings {
		r.changed.servers.Insert(v.ID)
	}
	e.changes = append(e.changes, change{ipvs.Op{Kind: kind, Server: v, RealServer: d}, undo})
}

// flush makes the queued changes, in few round trips to the kernel.
func (e *engine) flush() error {
	changes := e.changes
	e.changes = nil
	if len(changes) == 0 {
		return nil
	}
	ops := make([]ipvs.Op, len(changes))
	for i, c := range changes {
		ops[i] = c.Op
		kind := drift.RealServer
		if c.Kind == ipvs.AddServer || c.Kind == ipvs.UpdateServer || c.Kind == ipvs.DeleteServer {
			kind = drift.VirtualServer
		}
		e.Wrote(kind, 1)
	}
	return e.handleResults(changes, e.machine.servers.Apply(ops))
}

// drain removes the real servers that drain and have no connections left, and those whose time has passed. It asks the kernel
// for those virtual servers only that have such. After an error, everything is to be synced anew.
func (e *engine) drain(now time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.desired == nil { // The next sync looks at everything first.
		return nil
	}
	var errs []error
	for id := range e.draining {
		if v := e.actual.servers[id]; v != nil && v.drains() {
			errs = append(errs, e.drainServer(id, v, now))
		} else {
			delete(e.draining, id)
		}
	}
	errs = append(errs, e.flush())
	err := errors.Join(errs...)
	if err != nil {
		e.desired = nil
	}
	return err
}

// mayDrain has drain look at a virtual server if it has real servers that drain.
func (e *engine) mayDrain(v *actualServer) {
	if e.draining == nil {
		e.draining = set.Set[ipvs.ServerID]{}
	}
	if v.drains() {
		e.draining.Insert(v.ID)
	}
}

func (v *actualServer) drains() bool {
	for _, d := range v.realServers {
		if d.draining {
			return true
		}
	}
	return false
}

func (e *engine) drainServer(id ipvs.ServerID, v *actualServer, now time.Time) error {
	seen, err := e.machine.servers.RealServers(id, len(v.realServers))
	if err != nil {
		return err
	}
	if seen == nil { // Another program has removed it. The next comparison reports that, and makes it again if it is desired.
		return nil
	}
	for addr, d := range v.realServers {
		left := seen[addr].Connections
		if d.draining && (left.Active+left.Inactive == 0 || !d.since.IsZero() && now.Sub(d.since) >= e.grace) {
			e.deleteRealServer(v, addr)
		}
	}
	if len(v.realServers) == 0 {
		e.deleteServer(v)
	} else if want, wanted := e.desired.servers[id]; wanted {
		e.reschedule(want.Server, v)
	}
	return nil
}
