package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"nodeproxy/backend"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// engine programs one family.
type engine struct {
	family  plan.Family
	options Options
	known   Options // those that do not change: all but Host
	machine machine
	exclude []netip.Prefix // whose virtual servers belong to other programs
	grace   time.Duration
	log     *slog.Logger

	mu sync.Mutex // between Sync and the removal of drained real servers
	// desired is what the last plan asks for; nil if the kernel's state is not known.
	desired *state
	ranges  []netip.Prefix
	actual  *actual
	routed  map[netip.Prefix]netip.Addr // the routes of ranges that were made, with their sources
	refused map[ipvs.ServerID]error     // virtual servers that the kernel refuses, as a whole or in part
	// refusedMembers are entries of sets, by key, that the kernel refuses.
	refusedMembers map[member]refusedMember
	reported       []plan.Refusal // the last call of onRefused, if that is not nil
	// onRefused receives the ServicePorts that ask for what is refused.
	onRefused func(plan.Family, []plan.Refusal)
	changes   []change // of virtual servers, for flush to make
	backend.Comparison
	// rest is what is touched and left to the next sync; nil if that is nothing. lastAddress is the last address of such that was changed.
	rest        *touched
	lastAddress netip.Addr
	mostAtOnce  int // the constant, or less
	// alike is the number of full comparisons that found all virtual servers as they had been written.
	alike int
	// swept is set once the sets that kube-proxy alone uses have been removed, as far as that was possible.
	swept bool
}

// actual is the known state of our objects in the kernel.
type actual struct {
	servers map[ipvs.ServerID]*actualServer
	members map[member]shared // by key; count is not used
	vips    sets.Set[netip.Addr]
	ports   actualPorts
}

// actualServer is a virtual server in the kernel.
type actualServer struct {
	ipvs.Server
	realServers map[netip.AddrPort]*actualRealServer
}

// actualRealServer is a real server in the kernel. One that drains receives no new connections, and is removed when its last one
// ends.
type actualRealServer struct {
	weight   uint32
	draining bool
	since    time.Time // since when no endpoint is listed at the address
}

// Family implements backend.Engine.
func (e *engine) Family() plan.Family { return e.family }

// Sync implements backend.Engine.
func (e *engine) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Compared, e.Found = false, nil
	var err error
	if change.All() || e.desired == nil || p.Partial && p.Adds(change.Keys(), e.family, e.desired.services) {
		err = e.syncAll(ctx, p)
	} else {
		t := e.desired.update(p, change.Keys(), e.mostAtOnce)
		e.step(t)
		err = e.apply(t, nil)
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
	e.options.Host = host
	if len(t.vips) == 0 && !routes {
		return false
	}
	none := func() error { return nil }
	steps := &ruleSteps{none, none, none}
	if routes {
		e.Compared = false
		steps.routes = func() error { return e.routes(true) }
	}
	if err := e.apply(t, steps); err != nil {
		e.log.Warn("following the node's addresses failed; everything is compared again", "family", e.family, "error", err)
		e.desired = nil
	}
	return e.desired == nil
}

// addressesChanged returns what a change of the node's addresses to host touches, and whether that includes the source of routes.
func (e *engine) addressesChanged(host sets.Set[netip.Addr]) (t *touched, routes bool) {
	t = newTouched()
	note := func(a netip.Addr) {
		if e.desired.vips[a] > 0 || e.desired.ports[a] != nil {
			t.vips.Insert(a)
		}
		routes = routes || len(e.ranges) > 0 && a == e.desired.node.IP(e.family)
	}
	for a := range host {
		if _, was := e.options.Host[a]; !was {
			note(a)
		}
	}
	for a := range e.options.Host {
		if _, is := host[a]; !is {
			note(a)
		}
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
	e.options.Host = host
	rest := e.rest
	e.rest = nil
	before := e.actual
	if e.Compared = e.desired != nil; !e.Compared {
		before = nil
	}
	e.desired, e.ranges = full(p, e.family, e.options), e.options.routed(p, e.family)
	// On a node that another mode serves, its rules translate destinations before IPVS sees a packet, until everything is in place.
	// On any other node, the rules that masquerade and refuse come first.
	takeOver, err := e.machine.tables.ServiceChains(ctx)
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
		if mended != "" {
			e.Found = append(e.Found, drift.Difference{Kind: drift.Address, State: drift.Changed,
				Object: "interface " + names.Device + " with all addresses", Aspect: "it was " + mended})
		}
		e.differences(before)
		if counts := e.Found.Counts(); counts[drift.VirtualServer]+counts[drift.RealServer] == 0 {
			e.alike++
		}
	}
	write := func() error {
		n, err := e.machine.tables.Sync(ctx, rules(p, e.family, e.options))
		e.log.Debug("compared all rules", "family", e.family, "changed", n)
		e.Wrote(drift.Chain, n)
		if err != nil {
			return err
		}
		return e.guardMarks()
	}
	steps := &ruleSteps{before: write, after: func() error { return nil }}
	if takeOver {
		steps = &ruleSteps{before: steps.after, after: write}
	}
	steps.routes = func() error { return e.routes(p.Partial) }
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

// guardMarks writes the guard of marks, once the rules no longer look for our marks where the guard hides them.
func (e *engine) guardMarks() error {
	if e.machine.guard == nil {
		return nil
	}
	was, written, err := e.machine.guard.Ensure()
	if err != nil || !written || !e.Compared {
		return err
	}
	state := drift.Missing
	if was {
		state = drift.Changed
	}
	e.differs(drift.Chain, state, "in nftables table %s (%s)", names.IPVSMarks, e.family)
	return nil
}

// ruleSteps are the steps of a full sync in the middle of apply: rules before or after the virtual servers, routes for ranges.
type ruleSteps struct {
	before, after, routes func() error
}

// read reads the actual state. It makes missing sets. Real servers that drained before, if that is known, continue to drain.
func (e *engine) read(before *actual) error {
	e.actual = &actual{servers: map[ipvs.ServerID]*actualServer{}, members: map[member]shared{}}
	for id := range setCount {
		set := setOf(id, e.family)
		if _, err := e.machine.sets.Ensure(set); err != nil {
			return err
		}
		entries, err := e.machine.sets.Entries(set)
		if err != nil {
			return err
		}
		for entry := range entries {
			m := member{id, entry}
			e.actual.members[m.key()] = shared{mark: entry.Mark, mask: entry.Mask}
		}
	}
	list, err := e.machine.servers.List(e.family)
	if err != nil {
		return err
	}
	now := time.Now() // Once: if reading the clock is a system call, doing so for each takes as long as everything else.
	for id, v := range list {
		if e.foreign(id) {
			continue
		}
		if v.Foreign { // Neither kube-proxy nor we make such a server, but its address is ours: replace it.
			e.queue(ipvs.DeleteServer, v.Server, ipvs.RealServer{}, nil)
			continue
		}
		h := &actualServer{Server: v.Server, realServers: map[netip.AddrPort]*actualRealServer{}}
		for addr, d := range v.RealServers {
			h.realServers[addr] = &actualRealServer{weight: d.Weight, draining: d.Weight == 0, since: now}
			if was := before.realServer(id, addr); was != nil && was.draining && d.Weight == 0 {
				h.realServers[addr].since = was.since
			}
		}
		e.actual.servers[id] = h
	}
	if err := e.flush(); err != nil {
		return err
	}
	if e.actual.vips, err = e.machine.device.Addresses(e.family); err != nil {
		return err
	}
	return e.readPorts()
}

// foreign reports whether a virtual server is not ours, whatever the plan.
func (e *engine) foreign(id ipvs.ServerID) bool { return e.desired.marks.foreign(id, e.exclude) }

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
	hashes := map[uint32]bool(nil)
	for id := range e.actual.servers {
		t.servers.Insert(id)
		if _, wanted := e.desired.servers[id]; wanted {
			continue
		}
		if hashes == nil { // Needed rarely.
			hashes = e.desired.hashes()
		}
		if e.desired.replaces(id, hashes) {
			t.replaced[id] = plan.Key{} // Its ServicePort can't vanish before it is applied.
		}
	}
	for m := range e.desired.members {
		t.members.Insert(m)
	}
	for m := range e.actual.members {
		if m.set != setVIPs { // They follow the addresses.
			t.members.Insert(m)
		}
	}
	for a := range e.desired.vips {
		t.vips.Insert(a)
	}
	for a := range e.actual.vips {
		t.vips.Insert(a)
	}
	for a := range e.desired.ports {
		t.vips.Insert(a)
	}
	e.actual.ports.addresses(func(a netip.Addr) { t.vips.Insert(a) })
	for m := range e.actual.members {
		if m.set == setVIPs {
			t.vips.Insert(m.entry.Addr)
		}
	}
	return t
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
		ofKnown := m.set != setLoopBack && known[plan.Address{Addr: m.entry.Addr, Protocol: m.entry.Protocol, Port: m.entry.Port}]
		if e.desired.members[m] == nil && !ofKnown {
			delete(t.members, m)
		}
	}
	for a := range t.vips {
		if e.desired.vips[a] == 0 && e.desired.ports[a] == nil {
			delete(t.vips, a)
		}
	}
	t.onlyAdd = true
}

// apply makes what is touched as desired. A packet that had an endpoint before and has one after must have one all the while, so:
// set entries and rules that masquerade or refuse are added before packets are sent on, and removed after that ends; a mark selects
// a virtual server only while that has its real servers; an address of a Service is added last and removed last. A port of an
// external IP is removed before its virtual server, or else it would lead to a program on the node. One failure does not prevent
// the other changes.
func (e *engine) apply(t *touched, steps *ruleSteps) error {
	if steps == nil {
		none := func() error { return nil }
		steps = &ruleSteps{none, none, none}
	}
	bind, unbind, unlist := e.addresses(t)
	ports := e.portChanges(t)
	m := e.members(t, bind, unlist)
	ids := slices.SortedFunc(maps.Keys(t.servers), e.order)
	var errs []error
	do := func(err error) { errs = append(errs, err) }
	do(e.addBefore(m.addBefore))
	do(steps.before())
	for _, id := range ids {
		e.ensureServer(id)
	}
	do(e.flush())
	do(steps.routes())
	if len(bind) > 0 {
		do(e.bind(bind))
	}
	do(e.addPorts(ports))
	do(e.addAfter(m.addAfter))
	do(steps.after())
	do(e.removePorts(ports))
	do(e.removeBefore(m.removeBefore))
	for _, id := range ids {
		_, replaced := t.replaced[id]
		e.pruneServer(id, replaced)
	}
	do(e.flush())
	do(e.removeAfter(m.removeAfter))
	if len(unbind) > 0 {
		do(e.unbind(unbind))
	}
	return errors.Join(errs...)
}

// order sorts critical virtual servers first.
func (e *engine) order(a, b ipvs.ServerID) int {
	critical := func(id ipvs.ServerID) int {
		if v, ok := e.desired.servers[id]; ok && v.critical {
			return 0
		}
		return 1
	}
	if d := critical(a) - critical(b); d != 0 {
		return d
	}
	return compareServers(a, b)
}

// addresses returns the addresses to add to the device with all of their ports, those to remove from it, and those to remove from
// the set of the former.
func (e *engine) addresses(t *touched) (bind, unbind, unlist []netip.Addr) {
	for _, a := range slices.SortedFunc(maps.Keys(t.vips), netip.Addr.Compare) {
		_, is := e.actual.vips[a]
		_, unrouted := e.actual.ports.unrouted[a]
		_, listed := e.actual.members[vipMember(a)]
		byPort := e.desired.byPort(a, e.options.Host, e.ranges)
		wanted := e.desired.bound(a, e.options.Host, e.ranges)
		switch {
		case wanted && !(is && listed):
			bind = append(bind, a)
		case !wanted && !byPort && (is || unrouted || listed):
			unbind = append(unbind, a)
		}
		if !wanted && listed && !(byPort && t.onlyAdd) {
			unlist = append(unlist, a)
		}
	}
	return bind, unbind, unlist
}

func vipMember(a netip.Addr) member { return member{setVIPs, ipset.Entry{Addr: a}} }

func (e *engine) bind(list []netip.Addr) error {
	if err := e.machine.device.AddAddresses(list); err != nil {
		return err
	}
	unrouted := slices.DeleteFunc(slices.Clone(list), func(a netip.Addr) bool { _, is := e.actual.ports.unrouted[a]; return !is })
	if len(unrouted) > 0 {
		if err := e.machine.device.RouteAddresses(unrouted); err != nil {
			return err
		}
	}
	e.Wrote(drift.Address, len(list))
	for _, a := range list {
		delete(e.actual.ports.unrouted, a)
		e.actual.vips.Insert(a)
	}
	return nil
}

func (e *engine) unbind(list []netip.Addr) error {
	if err := e.machine.device.RemoveAddresses(list); err != nil {
		return err
	}
	e.Wrote(drift.Address, len(list))
	for _, a := range list {
		delete(e.actual.ports.unrouted, a)
		delete(e.actual.vips, a)
	}
	return nil
}

// routes makes the routes of ranges as desired. New ones are added before old ones are removed.
func (e *engine) routes(onlyAdd bool) error {
	have, err := e.machine.device.Routes(e.family)
	if err != nil {
		return err
	}
	if e.Compared {
		e.routeDifferences(have)
	}
	src := e.desired.node.IP(e.family)
	if _, own := e.options.Host[src]; !own {
		src = netip.Addr{} // A route's source must be an address of the node.
	}
	var errs []error
	e.routed = map[netip.Prefix]netip.Addr{}
	for _, r := range e.ranges {
		e.routed[r] = src
		if with, is := have[r]; !is || with != src {
			errs = append(errs, e.machine.device.AddRoute(r, src))
		}
	}
	for r := range have {
		if !slices.Contains(e.ranges, r) && !onlyAdd {
			errs = append(errs, e.machine.device.RemoveRoute(r))
		}
	}
	return errors.Join(errs...)
}
