package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/backend"
	"nodeproxy/internal/keyed"
	"nodeproxy/internal/set"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// engine programs one family.
type engine struct {
	family  plan.Family
	options Options // but for Host, which desired has
	machine machine
	exclude []netip.Prefix // whose virtual servers belong to other programs
	grace   time.Duration
	log     *slog.Logger

	mu backend.Mutex // between Sync and the removal of drained real servers
	// desired is what the last plan asks for; nil if the kernel's state is not known.
	desired *state
	actual  *actual
	// draining has all virtual servers with real servers that drain, and others that had such.
	draining set.Set[ipvs.ServerID]
	refused  map[ipvs.ServerID]error // virtual servers that the kernel refuses, as a whole or in part
	// refusedMembers are entries of sets, by key, that the kernel refuses.
	refusedMembers map[memberKey]refusedMember
	reported       []plan.Refusal // the last call of onRefused, if that is not nil
	// onRefused receives the ServicePorts that ask for what is refused.
	onRefused func(plan.Family, []plan.Refusal)
	changes   changes // for flush to make
	tried     results // of those that were made since flush ended last
	backend.Comparison
	// partial says that the last plan of which everything was synced was partial.
	partial  bool
	readings set.Set[*reading] // under way
	// version changes with actual, and numbered and printed are the numbers of its objects and their fingerprint.
	version  uint64
	numbered ofVersion[numbers]
	printed  ofVersion[ipvs.Fingerprint]
	// foreignServers is how many virtual servers of other programs were there when they were counted last, by count.
	foreignServers int
	// rest is what is touched and left to the next sync; nil if that is nothing. lastAddress is the last address of such that was changed.
	rest        *touched
	lastAddress netip.Addr
	mostAtOnce  int // the constant, or less
	// alike is the number of full comparisons that found all virtual servers as they had been written.
	alike    int
	ruleSync backend.Mutex // held while machine.tables is used; locked after mu
	// rules are those that were written last; nil if that is not known. ruleDrift is what machine.tables has found to differ from them.
	rules     *xtables.Desired
	ruleDrift drift.Found
	// swept is set once the sets that kube-proxy alone uses have been removed, as far as that was possible.
	swept bool
}

// actual is the state of our objects in the kernel, or what it is to be.
type actual struct {
	servers *keyed.Set[ipvs.ServerID, actualServer]
	foreign []ipvs.Server // of servers; neither kube-proxy nor we make such ones
	sets    [setCount]bool
	members map[memberKey]marked
	vips    set.Set[netip.Addr]
	routes  map[netip.Prefix]netip.Addr // of ranges, with their sources
	ports   actualPorts
}

func newActual() *actual {
	return &actual{
		servers: keyed.New(func(v *actualServer) ipvs.ServerID { return v.ID }), members: map[memberKey]marked{},
		vips: set.Set[netip.Addr]{}, routes: map[netip.Prefix]netip.Addr{},
		ports: actualPorts{ports: map[netip.Addr]set.Set[plan.Address]{}, routes: set.Set[netip.Addr]{}, unrouted: set.Set[netip.Addr]{}},
	}
}

// actualServer is a virtual server in the kernel.
type actualServer struct {
	ipvs.Server
	realServers []actualRealServer // in order of address
}

// actualRealServer is a real server in the kernel.
type actualRealServer struct {
	ipvs.RealServer
	draining *draining // nil if it does not drain
}

// draining is about a real server that receives no new connections, and is removed when its last one ends.
type draining struct {
	since time.Time // since when no endpoint is listed at the address
}

// newActualServer is a virtual server as it was read. Real servers without weight drain.
func newActualServer(v *ipvs.ActualServer, now time.Time) *actualServer {
	out := &actualServer{Server: v.Server, realServers: make([]actualRealServer, 0, len(v.RealServers))}
	for _, d := range v.RealServers {
		is := actualRealServer{RealServer: d.RealServer}
		if d.Weight == 0 {
			is.draining = &draining{now}
		}
		out.realServers = append(out.realServers, is)
	}
	slices.SortFunc(out.realServers, func(a, b actualRealServer) int { return a.Addr.Compare(b.Addr) })
	return out
}

// become gives it other properties. It does not write the ID, by which a comparison that has taken it over finds it without the lock.
func (v *actualServer) become(s ipvs.Server) {
	v.Scheduler, v.Ports, v.Fallback, v.Persistence = s.Scheduler, s.Ports, s.Fallback, s.Persistence
}

// find returns where the real server at an address is, or where it would be.
func (v *actualServer) find(a netip.AddrPort) (i int, is bool) {
	return slices.BinarySearchFunc(v.realServers, a, func(d actualRealServer, a netip.AddrPort) int { return d.Addr.Compare(a) })
}

// realServer returns the real server at an address; false if there is none.
func (v *actualServer) realServer(a netip.AddrPort) (d actualRealServer, is bool) {
	i, is := v.find(a)
	if is {
		d = v.realServers[i]
	}
	return d, is
}

// put adds a real server, in place of the one at its address.
func (v *actualServer) put(d actualRealServer) {
	if i, is := v.find(d.Addr); is {
		v.realServers[i] = d
	} else {
		v.realServers = slices.Insert(v.realServers, i, d)
	}
}

// remove removes the real server at an address.
func (v *actualServer) remove(a netip.AddrPort) {
	if i, is := v.find(a); is {
		v.realServers = slices.Delete(v.realServers, i, i+1)
	}
}

// keepSince continues the draining of real servers that drained before; was may be nil.
func (v *actualServer) keepSince(was *actualServer) {
	if was == nil {
		return
	}
	for i, d := range v.realServers {
		if before, _ := was.realServer(d.Addr); before.draining != nil && d.draining != nil {
			v.realServers[i].draining = before.draining
		}
	}
}

// Family implements backend.Engine.
func (e *engine) Family() plan.Family { return e.family }

// Sync implements backend.Engine.
func (e *engine) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Compared, e.Found = false, nil
	var err error
	if change.All() || e.desired == nil || p.Partial && p.Adds(change.Keys(), e.family, e.desired.servicePort) {
		err = e.syncAll(ctx, p)
	} else {
		t := e.desired.update(p, change.Keys(), e.mostAtOnce)
		e.step(t)
		err = e.apply(t, ruleSteps{})
	}
	if err != nil {
		e.desired, e.rest = nil, nil
		return fmt.Errorf("programming %s: %w", e.family, err)
	}
	e.reportRefused()
	return nil
}

// follow updates what depends on the node's own addresses: an address of a Service is on the device unless another interface has
// it, and a route's source is an address of the node. It reports whether everything must be synced again.
func (e *engine) follow() (again bool) {
	host, err := e.machine.host(e.family)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.desired == nil { // The next sync looks at everything.
		return false
	}
	if err != nil {
		e.log.Warn("the node's addresses could not be listed; everything is compared again", "family", e.family, "error", err)
		e.desired = nil
		return true
	}
	t, routes := e.addressesChanged(host)
	if e.rest != nil { // Their virtual servers may not be there yet.
		for a := range e.rest.vips {
			delete(t.vips, a)
		}
	}
	e.desired.options.Host = host
	if len(t.vips) == 0 && !routes {
		return false
	}
	var steps ruleSteps
	if routes {
		steps.routes = func() error { return e.routes(true) }
	}
	if err := e.apply(t, steps); err != nil {
		e.log.Warn("following the node's addresses failed; everything is compared again", "family", e.family, "error", err)
		e.desired = nil
	}
	return e.desired == nil
}

// addressesChanged returns what a change of the node's addresses to host touches, and whether that includes the source of routes.
func (e *engine) addressesChanged(host set.Set[netip.Addr]) (t *touched, routes bool) {
	t = newTouched()
	was := e.desired.options.Host
	for a := range host.Difference(was).Union(was.Difference(host)) {
		if e.desired.asked(a) {
			t.vips.Insert(a)
		}
		routes = routes || len(e.desired.ranges) > 0 && a == e.desired.node.IP(e.family)
	}
	return t, routes
}

// syncAll reads the actual state and changes what differs from the desired one.
func (e *engine) syncAll(ctx context.Context, p *plan.Plan) error {
	host, err := e.machine.host(e.family)
	if err != nil {
		return fmt.Errorf("listing the addresses of the node: %w", err)
	}
	mended, err := e.machine.device.Ensure()
	if err != nil {
		return err
	}
	options := e.options
	options.Host = host
	rest := e.rest
	e.rest = nil
	before := e.actual
	if e.Compared = e.desired != nil; !e.Compared {
		before = nil
	}
	e.desired, e.partial = full(p, e.family, options), p.Partial
	// On a node that another mode serves, its rules translate destinations before IPVS sees a packet, until everything is in place.
	// On any other node, the rules that masquerade and refuse come first.
	takeOver, err := e.serviceChains(ctx)
	if err != nil {
		return err
	}
	if takeOver && p.Partial {
		return plan.ErrPartial
	}
	if err := e.read(before); err != nil {
		return err
	}
	if e.Compared {
		e.Found = append(deviceWas(mended), differences(e.family, before, e.actual)...)
		if counts := e.Found.Counts(); counts[drift.VirtualServer]+counts[drift.RealServer] == 0 {
			e.alike++
		}
	}
	write := func() error {
		desired := rules(p, e.family, e.options)
		found, err := e.syncRules(ctx, &desired)
		if err == nil {
			var more drift.Found
			more, err = e.guardMarks()
			found = append(found, more...)
		}
		if e.Compared {
			e.Found = append(e.Found, found...)
		}
		return err
	}
	steps := ruleSteps{before: write, routes: func() error { return e.routes(p.Partial) }}
	if takeOver {
		steps.before, steps.after = nil, write
	}
	all := e.everything()
	if p.Partial {
		e.leaveUnknown(all, p)
		if rest != nil { // It is known, as a ServicePort of this process had it.
			all.merge(rest)
		}
	}
	if err := e.apply(all, steps); err != nil || p.Partial || e.swept {
		return err
	}
	e.swept = true
	list, err := e.machine.sets.Names()
	for _, s := range names.KubeProxySets { // Its rules, which used them, have been replaced.
		if name := s.Of(e.family); err == nil && slices.Contains(list, name) {
			err = e.machine.sets.Destroy(name)
		}
	}
	if err != nil {
		e.log.Debug("a set that kube-proxy had is left", "family", e.family, "error", err)
	}
	return nil
}

// deviceWas is the difference that had to be mended; none for "".
func deviceWas(mended string) drift.Found {
	if mended == "" {
		return nil
	}
	return drift.Found{{Kind: drift.Address, State: drift.Changed, Object: "interface " + names.Device + " with all addresses",
		Aspect: "it was " + mended}}
}

// serviceChains is tables.ServiceChains.
func (e *engine) serviceChains(ctx context.Context) (bool, error) {
	e.ruleSync.Lock()
	defer e.ruleSync.Unlock()
	return e.machine.tables.ServiceChains(ctx)
}

// syncRules compares rules with the kernel, writes those that differ, and returns how they differ from those that were written last. With
// nil it restores these, and waits for nothing but another syncRules.
func (e *engine) syncRules(ctx context.Context, desired *xtables.Desired) (drift.Found, error) {
	e.ruleSync.Lock()
	defer e.ruleSync.Unlock()
	if desired == nil {
		desired = e.rules
	}
	if e.rules = nil; desired == nil {
		return nil, errors.New("which rules were written is not known")
	}
	n, err := e.machine.tables.Sync(ctx, *desired)
	e.log.Debug("compared all rules", "family", e.family, "changed", n)
	e.Wrote(drift.Chain, n)
	if err == nil {
		e.rules = desired
	}
	found := e.ruleDrift
	e.ruleDrift = nil
	return found, err
}

// guardMarks writes the guard of marks, once the rules no longer look for our marks where the guard hides them, and returns how it
// differed.
func (e *engine) guardMarks() (drift.Found, error) {
	if e.machine.guard == nil {
		return nil, nil
	}
	was, written, err := e.machine.guard.Ensure()
	if err != nil || !written {
		return nil, err
	}
	state := drift.Missing
	if was {
		state = drift.Changed
	}
	return drift.Found{{Kind: drift.Chain, State: state, Object: fmt.Sprintf("in nftables table %s (%s)", names.IPVSMarks, e.family)}}, nil
}

// ruleSteps are the steps of a full sync in the middle of apply, if not nil: rules before or after the virtual servers, routes for ranges.
type ruleSteps struct {
	before, after, routes func() error
}

// read reads the actual state. It makes missing sets, and removes virtual servers of ours that only another program makes so. Real servers
// that drained before, if that is known, continue to drain.
func (e *engine) read(before *actual) (err error) {
	for id := range setCount {
		if _, err := e.machine.sets.Ensure(setOf(id, e.family)); err != nil {
			return err
		}
	}
	if e.actual, err = e.machine.read(e.family, e.desired.marks, e.exclude, nil); err != nil {
		return err
	}
	for _, v := range e.actual.foreign {
		e.queue(ipvs.DeleteServer, v, ipvs.RealServer{}, nil)
		e.actual.servers.Delete(v.ID)
	}
	for v := range e.actual.servers.All() {
		if before != nil {
			v.keepSince(before.servers.Get(v.ID))
		}
		e.mayDrain(v)
	}
	return e.flush()
}

// foreign reports whether a virtual server is not one of these marks, or its address is excluded.
func (m marks) foreign(id ipvs.ServerID, exclude []netip.Prefix) bool {
	if id.Mark != 0 {
		return !m.ours(id.Mark)
	}
	return slices.ContainsFunc(exclude, func(r netip.Prefix) bool { return r.Contains(id.Addr) })
}

// everything touches all desired and all actual objects.
func (e *engine) everything() *touched {
	t := newTouched()
	for id := range e.desired.servers {
		t.servers.Insert(id)
	}
	for v := range e.actual.servers.All() {
		t.servers.Insert(v.ID)
	}
	e.findReplaced(t)
	for m := range e.desired.members {
		t.members.Insert(m)
	}
	for m := range e.actual.members {
		if m.set != setVIPs { // They follow the addresses.
			t.members.Insert(m)
		} else {
			t.vips.Insert(m.addr.addr())
		}
	}
	for _, some := range []set.Set[netip.Addr]{set.Keys(e.desired.vips), set.Keys(e.desired.ports), e.actual.vips,
		set.Keys(e.actual.ports.ports), e.actual.ports.routes, e.actual.ports.unrouted} {
		maps.Copy(t.vips, some)
	}
	return t
}

// findReplaced notes which virtual servers that are not desired others have replaced.
func (e *engine) findReplaced(t *touched) {
	hashes := map[uint32]bool(nil)
	for id := range t.servers {
		_, wanted := e.desired.servers[id]
		if wanted || e.actual.servers.Get(id) == nil {
			continue
		}
		if hashes == nil { // Needed rarely.
			hashes = e.desired.hashes()
		}
		if e.desired.replaces(id, hashes) {
			t.replaced[id] = plan.Key{} // Its ServicePort can't vanish before it is applied.
		}
	}
}

// leaveUnknown removes, from what is touched, actual objects of frontends that a plan.Partial does not have.
func (e *engine) leaveUnknown(t *touched, p *plan.Plan) {
	known := p.Addresses(e.family)
	for id := range t.servers {
		if _, desired := e.desired.servers[id]; !desired && !known[plan.Address{Addr: id.Addr, Protocol: id.Protocol, Port: id.Port}] {
			delete(t.servers, id)
		}
	}
	for m := range t.members {
		// KUBE-LOOP-BACK has endpoints, which may be those of an unknown Service even if all frontends are known.
		entry := m.entry(marked{})
		ofKnown := m.set != setLoopBack && known[plan.Address{Addr: entry.Addr, Protocol: entry.Protocol, Port: entry.Port}]
		if _, desired := e.desired.members[m]; !desired && !ofKnown {
			delete(t.members, m)
		}
	}
	for a := range t.vips {
		if !e.desired.asked(a) {
			delete(t.vips, a)
		}
	}
	t.onlyAdd = true
}

// apply makes what is touched as desired. A packet that had an endpoint before and has one after must have one all the while, so:
// set entries and rules that masquerade or refuse are added before packets are sent on, and removed after that ends; a mark selects
// a virtual server only while that has its real servers; an address of a Service is added last and removed last. A port of an
// external IP is removed before its virtual server, or else it would lead to a program on the node. Where another mode's rules are in force,
// none asks the sets: what is left in these from an earlier time is removed before the rules come that do. One failure does not prevent the
// other changes.
func (e *engine) apply(t *touched, steps ruleSteps) error {
	e.version++
	a := e.addresses(t)
	m := e.members(t, a.bind, a.unlist)
	for r := range e.readings { // What is touched and stays as it is may differ by others' doing.
		r.changed.note(a, m)
	}
	ids := slices.SortedFunc(maps.Keys(t.servers), e.order)
	var errs []error
	do := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	step := func(step func() error) {
		if step != nil {
			do(step())
		}
	}
	do(e.addMembers(m.addBefore, true)) // those that admit before those that limit
	step(steps.before)
	for _, id := range ids {
		e.ensureServer(id)
		do(e.flushMany())
	}
	do(e.flush())
	step(steps.routes)
	do(e.bind(a.bind))
	do(e.addPorts(a))
	do(e.addMembers(m.addAfter, false)) // marks before those that drop packets without a mark
	if steps.after != nil {
		do(e.removeMembers(m.removeBefore, true))
		do(e.removeMembers(m.removeAfter, false))
		m.removeBefore, m.removeAfter = nil, nil
		step(steps.after)
	}
	do(e.removePorts(a))
	do(e.removeMembers(m.removeBefore, true)) // those that drop packets without a mark before the marks
	for _, id := range ids {
		_, replaced := t.replaced[id]
		e.pruneServer(id, replaced)
		do(e.flushMany())
	}
	do(e.flush())
	do(e.removeMembers(m.removeAfter, false)) // those that limit before those that admit
	do(e.unbind(a.unbind))
	return errors.Join(errs...)
}

// order sorts critical virtual servers first.
func (e *engine) order(a, b ipvs.ServerID) int {
	critical := func(id ipvs.ServerID) int {
		if sp := e.desired.servers[id].sp; sp != nil && sp.Critical {
			return 0
		}
		return 1
	}
	return cmp.Or(critical(a)-critical(b), compareServers(a, b))
}

func vipMember(a netip.Addr) memberKey { return memberKey{set: setVIPs, addr: packed(a)} }

func (e *engine) bind(list []netip.Addr) error {
	if len(list) == 0 {
		return nil
	}
	if err := e.machine.device.AddAddresses(list); err != nil {
		return err
	}
	unrouted := slices.DeleteFunc(slices.Clone(list), func(a netip.Addr) bool { return !e.actual.ports.unrouted.Has(a) })
	if len(unrouted) > 0 {
		if err := e.machine.device.RouteAddresses(unrouted); err != nil {
			return err
		}
	}
	e.Wrote(drift.Address, len(list))
	e.actual.ports.unrouted.Delete(list...)
	e.actual.vips.Insert(list...)
	return nil
}

func (e *engine) unbind(list []netip.Addr) error {
	if len(list) == 0 {
		return nil
	}
	if err := e.machine.device.RemoveAddresses(list); err != nil {
		return err
	}
	e.Wrote(drift.Address, len(list))
	e.actual.ports.unrouted.Delete(list...)
	e.actual.vips.Delete(list...)
	return nil
}

// routes makes the routes of ranges as desired. New ones are added before old ones are removed.
func (e *engine) routes(onlyAdd bool) error {
	src, have := e.desired.source(), e.actual.routes
	var errs []error
	for _, r := range e.desired.ranges {
		if with, is := have[r]; !is || with != src {
			errs = append(errs, e.machine.device.AddRoute(r, src))
			have[r] = src
		}
	}
	for r := range have {
		if !slices.Contains(e.desired.ranges, r) && !onlyAdd {
			errs = append(errs, e.machine.device.RemoveRoute(r))
			delete(have, r)
		}
	}
	return errors.Join(errs...)
}
