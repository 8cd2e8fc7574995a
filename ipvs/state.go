package ipvs

import (
	"net/netip"
	"slices"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// state is the desired state of one family. It is incremental: adding or removing a ServicePort costs work for that ServicePort
// only, and records what it touches.
type state struct {
	family   plan.Family
	options  Options
	marks    marks
	node     plan.Node
	services *plan.Ports
	ids      identities
	hashed   map[plan.Key]markID // the identities, as they were when the ServicePorts were added
	servers  map[ipvs.ServerID]wanted
	members  map[memberKey]shared
	vips     map[netip.Addr]int
	ports    ports
	ranges   []netip.Prefix // that have a route
}

// shared is an entry that several ServicePorts may ask for.
type shared struct {
	marked
	count int32
}

// touched are the objects that a change may concern.
type touched struct {
	servers set.Set[ipvs.ServerID]
	members set.Set[memberKey]
	vips    set.Set[netip.Addr] // and their ports
	// replaced are virtual servers that are removed while their ServicePort remains and gets another one: their connections are
	// left to them, as long as it remains.
	replaced map[ipvs.ServerID]plan.Key
	// onlyAdd keeps ports that are not desired.
	onlyAdd bool
	// large is what ServicePorts touch of which a sync changes a part only; nil if there is none.
	large *touched
	// old, of engine.rest, is what has been left since before the addresses in behind had to wait; they are those that have not changed yet.
	old    *touched
	behind map[netip.Addr]bool
}

// servicePort returns the ServicePort with a key; nil if there is none.
func (s *state) servicePort(k plan.Key) *plan.ServicePort { return s.services.Get(k) }

func newTouched() *touched {
	return &touched{servers: set.Set[ipvs.ServerID]{}, members: set.Set[memberKey]{}, vips: set.Set[netip.Addr]{},
		replaced: map[ipvs.ServerID]plan.Key{}}
}

func newState(p *plan.Plan, f plan.Family, o Options) *state {
	return &state{
		family: f, options: o, marks: newMarks(o.MasqueradeBit), node: p.Node,
		services: plan.NewPorts(), ids: identities{}, hashed: map[plan.Key]markID{},
		servers: map[ipvs.ServerID]wanted{}, members: map[memberKey]shared{}, vips: map[netip.Addr]int{},
		ports: ports{}, ranges: o.routed(p, f),
	}
}

// full returns the state of a whole plan.
func full(p *plan.Plan, f plan.Family, o Options) *state {
	s := newState(p, f, o)
	for _, a := range s.anchors() {
		s.vips[a]++
	}
	list := p.Sorted(f)
	for _, sp := range list {
		if hashed(sp) {
			s.ids.add(sp.Key)
		}
	}
	for _, sp := range list {
		s.enter(sp)
	}
	return s
}

// update applies the changes of the given ServicePorts, and returns what they touch. All are removed before any is added, so that
// an object that passes from one to another is never missing. What those touch that are larger than most, if that is not 0, is apart.
func (s *state) update(p *plan.Plan, changed plan.Keys, most int) *touched {
	t := newTouched()
	keys := changed.Sorted(s.family)
	renamed := set.Set[plan.Key]{}
	for _, k := range keys {
		if old := s.services.Get(k); old != nil && hashed(old) {
			renamed.Insert(s.ids.remove(k)...)
		}
		if sp := p.Services[k]; sp != nil && hashed(sp) {
			renamed.Insert(s.ids.add(k)...)
		}
	}
	for k := range renamed {
		if _, too := changed[k]; !too && s.services.Get(k) != nil {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, plan.Key.Compare)
	touches := make([]*touched, len(keys))
	for i, k := range keys {
		touches[i] = t.picked(k, s, p, most)
		o := s.leave(k)
		touches[i].add(o)
		if p.Services[k] != nil {
			noteReplaced(o, touches[i])
		}
	}
	for i, k := range keys {
		if sp := p.Services[k]; sp != nil {
			touches[i].add(s.enter(sp))
		}
	}
	return t
}

// hashed reports whether a ServicePort's marks are derived from a hash of its name.
func hashed(sp *plan.ServicePort) bool {
	_, port := nodePortOf(sp)
	return !port && needsMarks(sp)
}

// enter adds a ServicePort, and returns its objects.
func (s *state) enter(sp *plan.ServicePort) objects {
	s.services.Put(sp)
	if hashed(sp) {
		s.hashed[sp.Key], _ = s.ids.of(sp.Key)
	}
	o := s.build(sp)
	for _, v := range o.servers {
		s.servers[v.id] = v.wanted
	}
	s.count(o, 1)
	return o
}

// leave removes a ServicePort, and returns its objects; none if it is not there.
func (s *state) leave(k plan.Key) objects {
	sp := s.services.Get(k)
	if sp == nil {
		return objects{}
	}
	o := s.build(sp)
	s.services.Delete(k)
	delete(s.hashed, k)
	for _, v := range o.servers {
		delete(s.servers, v.id)
	}
	s.count(o, -1)
	return o
}

// count counts a ServicePort among those that ask for its objects, or no longer counts it.
func (s *state) count(o objects, by int) {
	for _, m := range o.members {
		key := m.key()
		have := s.members[key]
		if by > 0 {
			have.marked = m.marked()
		}
		if have.count += int32(by); have.count == 0 {
			delete(s.members, key)
		} else {
			s.members[key] = have
		}
	}
	for _, a := range o.vips {
		if s.vips[a] += by; s.vips[a] == 0 {
			delete(s.vips, a)
		}
	}
	for _, p := range o.ports {
		s.ports.count(p, by)
	}
}

// add adds the objects of a ServicePort.
func (t *touched) add(o objects) {
	for _, v := range o.servers {
		t.servers.Insert(v.id)
	}
	for _, m := range o.members {
		t.members.Insert(m.key())
	}
	t.vips.Insert(o.vips...)
	for _, p := range o.ports {
		t.vips.Insert(p.Addr)
	}
}

// noteReplaced records the virtual servers that a ServicePort has by mark, which depend on its policies. Those that it still has
// when it has been added again are not replaced.
func noteReplaced(o objects, t *touched) {
	for _, v := range o.servers {
		if v.id.Mark != 0 && v.drains() {
			t.replaced[v.id] = v.sp.Key
		}
	}
}

// hasNodePort reports whether a ServicePort has the node port of this identity.
func (s *state) hasNodePort(id markID) bool {
	for _, kind := range []markKind{localMark, masqueradedMark} {
		if _, has := s.servers[ipvs.ServerID{Family: s.family, Mark: s.marks.of(id, kind)}]; has {
			return true
		}
	}
	return false
}

// replaces reports whether an undesired virtual server was one of an existing ServicePort that now has another one: by another
// mark, as under another policy or with another masquerade bit, or, if it was kube-proxy's, by an address of the node and a node
// port. hashes are those of all ServicePorts.
func (s *state) replaces(id ipvs.ServerID, hashes map[uint32]bool) bool {
	if id.Mark == 0 {
		return s.options.Host.Has(id.Addr) && id.Protocol == plan.TCP && s.hasNodePort(nodePortID(id.Protocol, id.Port))
	}
	return slices.ContainsFunc(s.marks.identities(id.Mark), func(name markID) bool {
		if hash, is := name.hash(); is {
			return hashes[hash]
		}
		return name.protocol() == plan.TCP && s.hasNodePort(name)
	})
}

// hashes returns the hashes of the names of all TCP ServicePorts.
func (s *state) hashes() map[uint32]bool {
	out := make(map[uint32]bool, s.services.Len())
	for sp := range s.services.All() {
		if sp.Key.Protocol == plan.TCP {
			out[hashOf(sp.Key)] = true
		}
	}
	return out
}

// build makes the objects of a ServicePort that has been added: the same until it is removed, so they are not kept.
func (s *state) build(sp *plan.ServicePort) objects {
	b := &builder{sp: sp, node: &s.node, marks: s.marks, id: s.hashed[sp.Key]}
	if port, ok := nodePortOf(sp); ok {
		b.id = nodePortID(port.Protocol, port.Port)
	}
	return b.objects()
}

// anchors returns addresses that the device always has: with its last IPv4 address, an interface loses all of its routes. The first
// address of a range is never a Service's.
func (s *state) anchors() []netip.Addr {
	var out []netip.Addr
	for _, r := range s.ranges {
		if s.family == plan.IPv4 {
			out = append(out, r.Masked().Addr())
		}
	}
	return out
}

// bound reports whether a VIP must be an address of the device, and local with all of its ports: not if another interface has it,
// nor within a range that has a route, nor if single ports suffice.
func (s *state) bound(a netip.Addr) bool {
	if slices.Contains(s.anchors(), a) {
		return !s.options.Host.Has(a)
	}
	return s.local(a) && !s.byPort(a)
}

// local reports whether packets to an address of a Service, or to some of its ports, reach the node only by what is made for this
// address.
func (s *state) local(a netip.Addr) bool {
	return s.asked(a) && !s.options.Host.Has(a) && !slices.ContainsFunc(s.ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

// asked reports whether a Service has an address, or the device always has it.
func (s *state) asked(a netip.Addr) bool { return s.vips[a] > 0 || s.ports[a] != nil }

// source returns the source of routes, which must be an address of the node.
func (s *state) source() netip.Addr {
	if src := s.node.IP(s.family); s.options.Host.Has(src) {
		return src
	}
	return netip.Addr{}
}

// target returns what the kernel is to have besides virtual servers, with src as the source of routes.
func (s *state) target(src netip.Addr) *actual {
	h := newActual()
	for id := range setCount {
		h.sets[id] = true
	}
	for m, with := range s.members {
		h.members[m] = with.marked
	}
	for a := range set.Keys(s.vips).Union(set.Keys(s.ports)) {
		switch {
		case s.bound(a):
			h.vips.Insert(a)
			h.members[vipMember(a)] = marked{}
		case s.byPort(a):
			h.ports.exists, h.ports.complete = true, true
			h.ports.ports[a] = set.Keys(s.ports[a])
			h.ports.routes.Insert(a)
			if s.family == plan.IPv4 { // The source of an ICMPv6 error is another address of the node.
				h.ports.unrouted.Insert(a)
			}
		}
	}
	for _, r := range s.ranges {
		h.routes[r] = src
	}
	return h
}
