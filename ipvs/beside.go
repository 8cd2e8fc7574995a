package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipvs"
)

// mostBeside is how many suspects are looked at and repaired beside syncs, which wait for that.
const mostBeside = 200

// CompareBeside is Compare for one family. What it reads while syncs go on shows where to look: see recheck.
func (e *engine) CompareBeside(ctx context.Context) (found drift.Found, again bool, err error) {
	defer e.recovered(&again, &err)
	r := e.beginReading()
	if r == nil {
		return nil, true, nil
	}
	defer e.endReading(r)
	if r.partial {
		return nil, true, nil
	}
	if found, err = e.syncRules(ctx, nil); err != nil {
		return found, true, err
	}
	mended, err := e.machine.device.Ensure()
	if mended != "" || err != nil {
		return append(found, deviceWas(mended)...), true, err
	}
	for id := range setCount {
		if made, err := e.machine.sets.Ensure(setOf(id, e.family)); made || err != nil {
			return found, true, err
		}
	}
	kernel, closeAll, err := e.beside()
	if err != nil {
		return found, true, err
	}
	defer closeAll()
	now, err := kernel.read(e.family, r.marks, e.exclude, func(v *ipvs.ActualServer) *actualServer { return e.knownAs(v, r) })
	if err != nil || ctx.Err() != nil {
		return found, true, err
	}
	more, again, err := e.settle(r, now)
	return append(found, more...), again, err
}

// recovered is to be deferred. It makes an error of a panic, after which the next sync compares everything.
func (e *engine) recovered(again *bool, err *error) {
	fault := recover()
	if fault == nil {
		return
	}
	// What is in the kernel is not only of this program's making.
	*again, *err = true, fmt.Errorf("comparing with the kernel panicked: %v\n%s", fault, debug.Stack())
	e.mu.Lock()
	defer e.mu.Unlock()
	e.forget()
}

// forget makes the next sync compare everything. The lock must be held.
func (e *engine) forget() { e.desired, e.rest, e.changes, e.tried = nil, nil, changes{}, results{} }

// reading is under way while something is read of the kernel and syncs go on.
type reading struct {
	known   *actual
	marks   marks
	partial bool     // what Services want that the plan does not have is not known
	changed *touched // by syncs since it began
}

// beginReading begins a reading; it returns nil if a sync has to find out what the kernel has.
func (e *engine) beginReading() *reading {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.desired == nil {
		return nil
	}
	r := &reading{known: e.actual, marks: e.desired.marks, partial: e.partial, changed: newTouched()}
	if e.readings == nil {
		e.readings = set.Set[*reading]{}
	}
	e.readings.Insert(r)
	return r
}

func (e *engine) endReading(r *reading) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.readings.Delete(r)
}

// valid reports whether what a reading is compared with is still known: no sync has failed, or compared everything, since it began.
func (e *engine) valid(r *reading) bool { return e.desired != nil && e.actual == r.known }

// settle compares what was read of the kernel with what is known of it, and repairs what differs.
func (e *engine) settle(r *reading, now *actual) (found drift.Found, again bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.suspects(r, now)
	if !e.valid(r) {
		return nil, e.desired == nil, nil
	}
	if len(s.servers)+len(s.members)+len(s.vips) > mostBeside || !maps.Equal(e.actual.routes, now.routes) {
		return nil, true, nil
	}
	if differ, err := e.otherPorts(); differ || err != nil {
		return nil, true, err
	}
	if found, err = e.guardMarks(); err == nil {
		var more drift.Found
		e.refusedAgain(s)
		e.leftAlone(s)
		e.forgetChanged(s, r)
		more, err = e.recheck(s, now)
		found = append(found, more...)
	}
	if err != nil {
		e.forget()
		return found, true, err
	}
	if counts := found.Counts(); counts[drift.VirtualServer]+counts[drift.RealServer] == 0 {
		e.alike++
	}
	return found, false, nil
}

// comparedAtOnce is the number of objects that are compared while syncs wait, which takes about a millisecond.
const comparedAtOnce = 2000

// suspects returns what seems to differ from what is known. What syncs have changed since the reading began, or have left to change, is not
// among it.
func (e *engine) suspects(r *reading, now *actual) *touched {
	s := newTouched()
	pause := e.pausing(r)
	e.suspectServers(s, r.known, now, pause)
	e.suspectMembers(s, r.known, now, pause)
	for _, two := range [][2]set.Set[netip.Addr]{
		{r.known.vips, now.vips}, {r.known.ports.unrouted, now.ports.unrouted}, {r.known.ports.routes, now.ports.routes},
	} {
		maps.Copy(s.vips, two[0].Difference(two[1]))
		maps.Copy(s.vips, two[1].Difference(two[0]))
	}
	e.forgetChanged(s, r)
	return s
}

// pausing returns a function to call in a loop over what is known or was read, which releases the lock now and then. It returns false if
// the reading is no longer valid. An object that a sync adds or removes meanwhile may be passed over, and forgetChanged removes it anyway.
func (e *engine) pausing(r *reading) func() bool {
	n := 0
	return func() bool {
		if n++; n%comparedAtOnce == 0 {
			e.mu.Unlock()
			e.mu.Lock()
		}
		return e.valid(r)
	}
}

// ofVersion is something that was made from what is known, and the version of that.
type ofVersion[T any] struct {
	value   T
	version uint64
	made    bool
}

// get returns it, made again if what is known has changed. make is called with the lock held, and returns anything if pause returns false.
func (o *ofVersion[T]) get(e *engine, r *reading, make func(pause func() bool) T) T {
	e.mu.Lock()
	defer e.mu.Unlock()
	if o.made && o.version == e.version {
		return o.value
	}
	at := e.version
	value := make(e.pausing(r))
	if at == e.version && e.valid(r) { // Otherwise the reading is void.
		*o = ofVersion[T]{value, at, true}
	}
	return value
}

// knownAs returns what is known of a virtual server, if it is like that.
func (e *engine) knownAs(v *ipvs.ActualServer, r *reading) *actualServer {
	e.mu.Lock()
	defer e.mu.Unlock()
	if was := r.known.servers.Get(v.ID); e.valid(r) && was != nil && was.isLike(v) {
		return was
	}
	return nil
}

func (e *engine) suspectServers(s *touched, known, now *actual, pause func() bool) {
	for was := range known.servers.Clone().All() {
		if now.servers.Get(was.ID) != was {
			s.servers.Insert(was.ID)
		}
		if !pause() {
			return
		}
	}
	for is := range now.servers.All() {
		if known.servers.Get(is.ID) == nil {
			s.servers.Insert(is.ID)
		}
		if !pause() {
			return
		}
	}
	for _, v := range now.foreign {
		s.servers.Insert(v.ID)
	}
}

// suspectMembers looks at entries of those sets that were read.
func (e *engine) suspectMembers(s *touched, known, now *actual, pause func() bool) {
	for m, was := range known.members {
		if is, there := now.members[m]; now.sets[m.set] && (!there || is != was) {
			s.members.Insert(m)
		}
		if !pause() {
			return
		}
	}
	for m := range now.members {
		if _, there := known.members[m]; !there {
			s.members.Insert(m)
		}
		if !pause() {
			return
		}
	}
	for m := range s.members {
		s.suspectAddress(m)
	}
}

// forgetChanged removes what syncs have changed since a reading began, or have left to change.
func (e *engine) forgetChanged(s *touched, r *reading) {
	s.forget(r.changed)
	if e.rest != nil {
		s.forget(e.rest)
	}
}

// note adds the addresses and the entries of sets that change; queue adds virtual servers.
func (t *touched) note(a addressChanges, m memberChanges) {
	for _, list := range [][]netip.Addr{a.bind, a.unbind, a.unlist, a.routes, a.unrouted, a.removeRoutes} {
		t.vips.Insert(list...)
	}
	for _, p := range slices.Concat(a.ports, a.removePorts) {
		t.vips.Insert(p.Addr)
	}
	for _, list := range [][]memberKey{m.addBefore, m.addAfter, m.removeBefore, m.removeAfter} {
		t.members.Insert(list...)
	}
}

// suspectAddress replaces an entry of the set that follows the addresses of the device by the address.
func (t *touched) suspectAddress(m memberKey) {
	if m.set == setVIPs {
		t.vips.Insert(m.addr.addr())
		delete(t.members, m)
	}
}

// refusedAgain adds what the kernel has refused, which is tried again.
func (e *engine) refusedAgain(t *touched) {
	for id := range e.refused {
		t.servers.Insert(id)
	}
	for m := range e.refusedMembers {
		t.members.Insert(m)
		t.suspectAddress(m)
	}
}

// leftAlone adds virtual servers that were left to their connections when others replaced them, and whose ServicePort is gone.
func (e *engine) leftAlone(t *touched) {
	hashes := map[uint32]bool(nil)
	for v := range e.actual.servers.All() {
		id := v.ID
		if _, wanted := e.desired.servers[id]; wanted {
			continue
		}
		if hashes == nil { // Needed rarely.
			hashes = e.desired.hashes()
		}
		if !e.desired.replaces(id, hashes) {
			t.servers.Insert(id)
		}
	}
}

// is reports whether another virtual server and its real servers are like this one, except for what drains.
func (v *actualServer) is(o *actualServer) bool {
	return v.Server == o.Server && slices.EqualFunc(v.realServers, o.realServers, func(a, b actualRealServer) bool {
		return a.RealServer == b.RealServer
	})
}

// beside returns servers, sets and the device to read beside syncs.
func (e *engine) beside() (machine, func(), error) {
	r, err := e.machine.reader(e.knownRealServers)
	return machine{servers: r.Servers, sets: r.Sets, device: r.Device}, r.Close, err
}

// knownRealServers returns how many real servers a virtual server has as far as is known.
func (e *engine) knownRealServers(id ipvs.ServerID) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.actual == nil {
		return 0
	}
	if v := e.actual.servers.Get(id); v != nil {
		return len(v.realServers)
	}
	return 0
}

// isLike is is of a virtual server that was read.
func (v *actualServer) isLike(o *ipvs.ActualServer) bool {
	return v.Server == o.Server && len(v.realServers) == len(o.RealServers) &&
		!slices.ContainsFunc(v.realServers, func(d actualRealServer) bool { return o.RealServers[d.Addr].RealServer != d.RealServer })
}

// recheck reads which suspects the kernel has, and makes them as desired. It returns how they differ from what was written. now is what was
// read of set entries and addresses, which no sync has changed since then. The lock must be held; after an error, nothing is known.
func (e *engine) recheck(t *touched, now *actual) (drift.Found, error) {
	was, is := newActual(), newActual()
	for id := range t.servers {
		have, err := e.machine.servers.Get(id)
		if err != nil {
			return nil, err
		}
		known := e.actual.servers.Get(id)
		if known != nil {
			was.servers.Put(known)
			e.actual.servers.Delete(id)
		}
		if have != nil && have.Foreign {
			e.queue(ipvs.DeleteServer, have.Server, ipvs.RealServer{}, nil)
		} else if have != nil {
			seen := newActualServer(have, time.Now())
			seen.keepSince(known)
			is.servers.Put(seen)
			e.actual.servers.Put(seen)
		}
	}
	for m := range t.members {
		adopt(m, e.actual.members, was.members, is.members, now.members)
	}
	for a := range t.vips {
		adopt(vipMember(a), e.actual.members, was.members, is.members, now.members)
		adopt(a, e.actual.vips, was.vips, is.vips, now.vips)
		adopt(a, e.actual.ports.unrouted, was.ports.unrouted, is.ports.unrouted, now.ports.unrouted)
		adopt(a, e.actual.ports.routes, was.ports.routes, is.ports.routes, now.ports.routes)
	}
	e.version++
	for r := range e.readings { // To other readings, what this one adopts has changed.
		r.changed.merge(t)
	}
	found := differences(e.family, was, is)
	e.findReplaced(t)
	if err := e.apply(t, ruleSteps{}); err != nil {
		return found, err
	}
	e.reportRefused()
	return found, nil
}

// adopt replaces what is known of one object by what was seen of it, and puts each into a map of its own.
func adopt[K comparable, V any, M ~map[K]V](k K, known, was, is, seen M) {
	if v, there := known[k]; there {
		was[k] = v
		delete(known, k)
	}
	if v, there := seen[k]; there {
		is[k], known[k] = v, v
	}
}
