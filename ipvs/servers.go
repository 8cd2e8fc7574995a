package ipvs

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// ensureServer makes a virtual server and adds what it lacks; it removes nothing.
func (e *engine) ensureServer(id ipvs.ServerID) {
	delete(e.refused, id) // Retry everything that was refused.
	want := e.desired.servers[id]
	have := e.actual.servers.Get(id)
	switch {
	case want.sp == nil || have == nil && len(want.endpoints()) == 0:
		return
	case have == nil:
		v := e.options.wanted(id, want)
		e.queue(ipvs.AddServer, v, ipvs.RealServer{}, func() { e.actual.servers.Delete(id) })
		have = &actualServer{Server: v, realServers: make([]actualRealServer, 0, len(want.endpoints()))}
		e.actual.servers.Put(have)
	default:
		e.reschedule(want, have)
	}
	for _, ep := range want.endpoints() {
		e.ensureRealServer(have, realServer(ep))
	}
	e.reschedule(want, have) // A draining one may be in use again.
}

// reschedule sets the properties of a virtual server, which depend on whether real servers of it drain.
func (e *engine) reschedule(want wanted, v *actualServer) {
	if want.sp == nil { // It receives no new connections.
		return
	}
	properties := e.options.wanted(v.ID, want)
	if v.drains() {
		properties = e.options.whileDraining(properties)
	}
	if was := v.Server; was != properties {
		e.queue(ipvs.UpdateServer, properties, ipvs.RealServer{}, func() {
			if v.Server == properties { // A later change may have been accepted.
				v.become(was)
			}
		})
		v.become(properties)
	}
}

// ensureRealServer adds a real server. A draining one gets its weight back; its connections are not affected.
func (e *engine) ensureRealServer(v *actualServer, want ipvs.RealServer) {
	switch have, is := v.realServer(want.Addr); {
	case !is:
		e.queue(ipvs.AddRealServer, v.Server, want, func() { v.remove(want.Addr) })
	case have.Weight != want.Weight:
		e.queue(ipvs.UpdateRealServer, v.Server, want, func() { v.put(have) })
	}
	v.put(actualRealServer{RealServer: want})
}

// pruneServer removes what a virtual server should not have, and the server itself if nothing is left. One that is replaced by
// another is removed when its connections have ended.
func (e *engine) pruneServer(id ipvs.ServerID, replaced bool) {
	have := e.actual.servers.Get(id)
	if have == nil {
		return
	}
	want := e.desired.servers[id]
	if want.sp == nil && !replaced {
		e.deleteServer(have)
		return
	}
	used := func(d actualRealServer) bool {
		_, is := slices.BinarySearchFunc(want.endpoints(), d.Addr, func(ep plan.Endpoint, a netip.AddrPort) int { return ep.Addr.Compare(a) })
		return is
	}
	if len(want.endpoints()) > 0 && e.refused[id] == nil && !slices.ContainsFunc(have.realServers, used) {
		return // None could be added. The old ones are better than none, until the next attempt.
	}
	for _, d := range slices.Clone(have.realServers) {
		switch {
		case used(d):
		case want.drains() || replaced:
			e.drainRealServer(want, have, d)
		default:
			e.deleteRealServer(have, d.Addr)
		}
	}
	if len(have.realServers) == 0 {
		e.deleteServer(have)
	}
}

func (e *engine) deleteServer(v *actualServer) {
	e.queue(ipvs.DeleteServer, v.Server, ipvs.RealServer{}, nil)
	e.actual.servers.Delete(v.ID)
}

// drainRealServer begins to drain a real server, or goes on.
func (e *engine) drainRealServer(want wanted, v *actualServer, was actualRealServer) {
	d := actualRealServer{ipvs.RealServer{Addr: was.Addr}, &draining{}}
	if !want.lingers(d.Addr) {
		if d.draining.since = time.Now(); was.draining != nil && !was.draining.since.IsZero() {
			d.draining.since = was.draining.since
		}
	}
	v.put(d)
	e.mayDrain(v)
	e.reschedule(want, v)
	if was.Weight > 0 {
		e.queue(ipvs.UpdateRealServer, v.Server, d.RealServer, func() { v.put(was) })
	}
}

func (e *engine) deleteRealServer(v *actualServer, addr netip.AddrPort) {
	e.queue(ipvs.DeleteRealServer, v.Server, ipvs.RealServer{Addr: addr}, nil)
	v.remove(addr)
}

// changes are changes of virtual servers that are to be made. The undo of each, which is nil for a deletion, restores actual; it is called
// if the kernel refuses the change.
type changes struct {
	ops  []ipvs.Op
	undo []func()
}

// changesAtOnce is how many changes are queued before they are made.
const changesAtOnce = 1000

// queue queues a change of a virtual server for flush. actual already includes it: after any error but a refusal the kernel is read
// again.
func (e *engine) queue(kind ipvs.OpKind, v ipvs.Server, d ipvs.RealServer, undo func()) {
	e.version++
	for r := range e.readings {
		r.changed.servers.Insert(v.ID)
	}
	e.changes.ops = append(e.changes.ops, ipvs.Op{Kind: kind, Server: v, RealServer: d})
	e.changes.undo = append(e.changes.undo, undo)
}

// flushMany makes the queued changes if they are many, so that not all are kept at a time. Those of one virtual server must be queued as a
// whole before, and flush must be called after the last.
func (e *engine) flushMany() error {
	if len(e.changes.ops) < changesAtOnce {
		return nil
	}
	return e.makeChanges()
}

// flush makes the queued changes, in few round trips to the kernel.
func (e *engine) flush() error { return errors.Join(e.makeChanges(), e.judge()) }

func (e *engine) makeChanges() error {
	c := e.changes
	if len(c.ops) == 0 {
		return nil
	}
	for _, o := range c.ops {
		kind := drift.RealServer
		if o.Kind == ipvs.AddServer || o.Kind == ipvs.UpdateServer || o.Kind == ipvs.DeleteServer {
			kind = drift.VirtualServer
		}
		e.Wrote(kind, 1)
	}
	e.changes = changes{} // for what others have removed
	err := e.handleResults(c, e.machine.servers.Apply(c.ops))
	clear(c.undo)
	e.changes = changes{c.ops[:0], c.undo[:0]}
	return err
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
		if v := e.actual.servers.Get(id); v != nil && v.drains() {
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
	return slices.ContainsFunc(v.realServers, func(d actualRealServer) bool { return d.draining != nil })
}

func (e *engine) drainServer(id ipvs.ServerID, v *actualServer, now time.Time) error {
	seen, err := e.machine.servers.RealServers(id, len(v.realServers))
	if err != nil {
		return err
	}
	if seen == nil { // Another program has removed it. The next comparison reports that, and makes it again if it is desired.
		return nil
	}
	for _, d := range slices.Clone(v.realServers) {
		left := seen[d.Addr].Connections
		if d.draining != nil && (left.Active+left.Inactive == 0 || !d.draining.since.IsZero() && now.Sub(d.draining.since) >= e.grace) {
			e.deleteRealServer(v, d.Addr)
		}
	}
	if len(v.realServers) == 0 {
		e.deleteServer(v)
	} else {
		e.reschedule(e.desired.servers[id], v)
	}
	return nil
}
