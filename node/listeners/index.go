package listeners

import (
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// place is the destination by which a packet is recognised. Node ports have the zero Addr.
type place struct {
	addr     netip.Addr
	protocol plan.Protocol
	port     uint16
	family   plan.Family
}

// owner is the ServicePort that owns a place, and the frontend there.
type owner struct {
	key      plan.Key
	frontend plan.Frontend
}

// index maps places to the Services that own them, and knows where their endpoints are.
type index struct {
	settings plan.Settings
	node     plan.Node
	services *plan.Ports
	places   map[place]*plan.ServicePort
	count    map[plan.Protocol]int // places of each protocol
}

func newIndex() *index {
	return &index{services: plan.NewPorts(), places: map[place]*plan.ServicePort{}, count: map[plan.Protocol]int{}}
}

// update takes over what a plan says of the ServicePorts in change. It reports whether any frontend, or what applies to all, is
// other than it was.
func (x *index) update(p *plan.Plan, change plan.Change) bool {
	if change.All() {
		*x = *newIndex()
		x.settings, x.node = p.Settings, p.Node
		for _, sp := range p.Services {
			x.enter(sp)
		}
		return true
	}
	differs := false
	// All removals come before all additions, as a place may pass from one ServicePort to another.
	for key := range change.Keys() {
		old, now := x.services.Get(key), p.Services[key]
		if old != nil && (now == nil || !slices.Equal(old.Frontends, now.Frontends)) {
			x.leave(old)
			differs = true
		}
	}
	for key := range change.Keys() {
		if now := p.Services[key]; now != nil {
			differs = x.enter(now) || differs
		}
	}
	return differs
}

func placeOf(key plan.Key, f plan.Frontend) place {
	return place{f.Addr, f.Protocol, f.Port, key.Family}
}

// enter adds a ServicePort, or replaces one with the same frontends. It reports whether there was none.
func (x *index) enter(sp *plan.ServicePort) bool {
	known := x.services.Get(sp.Key) != nil
	x.services.Put(sp)
	for _, f := range sp.Frontends {
		x.places[placeOf(sp.Key, f)] = sp
		if !known {
			x.count[f.Protocol]++
		}
	}
	if known {
		return false
	}
	return len(sp.Frontends) > 0
}

func (x *index) leave(sp *plan.ServicePort) {
	x.services.Delete(sp.Key)
	for _, f := range sp.Frontends {
		delete(x.places, placeOf(sp.Key, f))
		x.count[f.Protocol]--
	}
}

// captured returns the frontends that receive what is sent to a socket, on a node with these addresses.
func (x *index) captured(s socket, host []netip.Addr) []owner {
	var out []owner
	add := func(p place) {
		sp := x.places[p]
		if sp == nil {
			return
		}
		i := slices.IndexFunc(sp.Frontends, func(f plan.Frontend) bool { return placeOf(sp.Key, f) == p })
		if o := (owner{sp.Key, sp.Frontends[i]}); !x.endpointOf(o, s, host) {
			out = append(out, o)
		}
	}
	for _, f := range s.families() {
		if x.answers(s, f, host) {
			add(place{netip.Addr{}, s.Protocol, s.Port, f})
		}
		if !s.Everywhere() {
			add(place{s.Addr, s.Protocol, s.Port, f})
			continue
		}
		for _, addr := range host {
			if plan.FamilyOf(addr) == f {
				add(place{addr, s.Protocol, s.Port, f})
			}
		}
	}
	return out
}

// answers reports whether a socket can be reached at an address of a family where node ports answer too.
func (x *index) answers(s socket, f plan.Family, host []netip.Addr) bool {
	at := func(addr netip.Addr) bool {
		return plan.FamilyOf(addr) == f && x.settings.NodePortsAnswer(x.node, addr)
	}
	if !s.Everywhere() {
		return at(s.Addr)
	}
	return slices.ContainsFunc(host, at)
}

// endpointOf reports whether a socket is that of an endpoint of the ServicePort, of whichever family.
func (x *index) endpointOf(o owner, s socket, host []netip.Addr) bool {
	if o.frontend.Kind == plan.HealthCheckNodePort {
		return false
	}
	is := func(at netip.AddrPort) bool {
		if at.Port() != s.Port {
			return false
		}
		if !s.Everywhere() {
			return at.Addr() == s.Addr
		}
		return slices.Contains(s.families(), plan.FamilyOf(at.Addr())) && slices.Contains(host, at.Addr())
	}
	key := o.key
	for _, key.Family = range plan.Families {
		sp := x.services.Get(key)
		if sp == nil {
			continue
		}
		if slices.ContainsFunc(sp.All(), func(e plan.Endpoint) bool { return is(e.Addr) }) ||
			slices.ContainsFunc(sp.Excluded, func(e plan.Exclusion) bool { return is(e.Addr) }) {
			return true
		}
	}
	return false
}
