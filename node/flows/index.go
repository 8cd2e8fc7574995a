package flows

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// frontend is a destination of clients. Node ports have the unspecified address of their family.
type frontend struct {
	addr     netip.Addr
	protocol uint8
	port     uint16
}

// The protocol numbers of IP headers.
const (
	protoTCP  = unix.IPPROTO_TCP
	protoUDP  = unix.IPPROTO_UDP
	protoSCTP = unix.IPPROTO_SCTP
)

func anyAddr(f plan.Family) netip.Addr {
	if f == plan.IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// target is a ServicePort as flows see it.
type target struct {
	frontends []frontend
	// allowed are the endpoints whose flows stay, in order.
	allowed []netip.AddrPort
}

func newTarget(sp *plan.ServicePort) *target {
	t := &target{frontends: frontendsOf(sp)}
	if sp.Key.Protocol == plan.TCP {
		t.allowed = listed(sp)
	} else {
		t.allowed = serving(sp)
	}
	return t
}

// frontendsOf returns the frontends of a ServicePort, as flows see them.
func frontendsOf(sp *plan.ServicePort) []frontend {
	var out []frontend
	for _, f := range sp.Frontends {
		switch {
		case f.Kind == plan.HealthCheckNodePort: // the node itself answers there
		case f.Kind == plan.NodePort:
			out = append(out, frontend{anyAddr(sp.Key.Family), netlink.Protocol(f.Protocol), f.Port})
		default:
			out = append(out, frontend{f.Addr, netlink.Protocol(f.Protocol), f.Port})
		}
	}
	return out
}

// serving returns the endpoints that are in use, or would answer if they were.
func serving(sp *plan.ServicePort) []netip.AddrPort {
	var yes, no []netip.AddrPort
	for _, ep := range sp.All() {
		yes = append(yes, ep.Addr)
	}
	for _, x := range sp.Excluded {
		switch x.Reason {
		case plan.NotReady, plan.TerminatingStopped:
			no = append(no, x.Addr)
		default:
			yes = append(yes, x.Addr)
		}
	}
	// One policy may leave out an endpoint for its place, and another because it does not serve.
	slices.SortFunc(no, netip.AddrPort.Compare)
	yes = slices.DeleteFunc(yes, func(a netip.AddrPort) bool { return contains(no, a) })
	return sortedSet(yes)
}

// listed returns all endpoints, whatever their condition.
func listed(sp *plan.ServicePort) []netip.AddrPort {
	var out []netip.AddrPort
	for _, ep := range sp.All() {
		out = append(out, ep.Addr)
	}
	for _, x := range sp.Excluded {
		out = append(out, x.Addr)
	}
	return sortedSet(out)
}

func sortedSet(list []netip.AddrPort) []netip.AddrPort {
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Clip(slices.Compact(list))
}

func contains(sorted []netip.AddrPort, a netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(sorted, a, netip.AddrPort.Compare)
	return found
}

// mayStrand reports whether a change from old to t can make flows stale. It can't if endpoints are only added.
func (t *target) mayStrand(old *target) bool {
	if !slices.Equal(t.frontends, old.frontends) || len(old.allowed) == 0 {
		return true
	}
	return slices.ContainsFunc(old.allowed, func(a netip.AddrPort) bool { return !contains(t.allowed, a) })
}

// passesAfterEnd is the number of full passes that look for flows to a frontend after it is removed, or of an endpoint after it
// left.
const passesAfterEnd = 2

// index records which frontends exist and existed, and so which flows are stale.
type index struct {
	settings plan.Settings
	node     plan.Node
	ranges   []netip.Prefix // where cluster IPs are
	targets  map[plan.Key]*target
	live     map[frontend]plan.Key
	early    early
	// gone are frontends that were removed, each with the number of full passes that will still look for it.
	gone map[frontend]int
	// strays is set where stray answers are looked for. left are the UDP endpoints that lost flows, whose stray answers may still
	// be under way, with numbers like those of gone.
	strays bool
	left   map[netip.AddrPort]int
}

func newIndex(ranges []netip.Prefix, strays bool) *index {
	return &index{ranges: ranges, targets: map[plan.Key]*target{}, live: map[frontend]plan.Key{}, early: newEarly(), gone: map[frontend]int{},
		strays: strays, left: map[netip.AddrPort]int{}}
}

// set replaces the ServicePort with this key; nil removes it. It returns the frontends whose flows may be stale now.
func (x *index) set(key plan.Key, sp *plan.ServicePort) work {
	old := x.targets[key]
	if old == nil && sp == nil { // as for most TCP ports
		return work{}
	}
	var now *target
	if sp != nil {
		now = newTarget(sp)
	}
	todo := work{frontends: map[frontend]struct{}{}, returned: x.moved(key, old, now)}
	if old != nil && now != nil && !now.mayStrand(old) {
		x.targets[key] = now
		return todo
	}
	if old != nil {
		for _, f := range old.frontends {
			if x.live[f] != key {
				continue // by now it is another ServicePort's
			}
			delete(x.live, f)
			if f.protocol != protoTCP {
				x.gone[f] = passesAfterEnd
				todo.frontends[f] = struct{}{}
			}
		}
	}
	if now == nil {
		delete(x.targets, key)
		return todo
	}
	x.targets[key] = now
	for _, f := range now.frontends {
		x.live[f] = key
		delete(x.gone, f)
		todo.frontends[f] = struct{}{}
	}
	return todo
}

// moved records which endpoints lose flows by a change of a ServicePort, and returns those that are back.
func (x *index) moved(key plan.Key, old, now *target) map[netip.AddrPort]struct{} {
	back := map[netip.AddrPort]struct{}{}
	if !x.strays || key.Protocol != plan.UDP {
		return back
	}
	if now != nil {
		for _, a := range now.allowed {
			if _, was := x.left[a]; was && !(old != nil && contains(old.allowed, a)) {
				back[a] = struct{}{}
			}
		}
	}
	if old != nil {
		for _, a := range old.allowed {
			if now == nil || !contains(now.allowed, a) {
				x.left[a] = passesAfterEnd
			}
		}
	}
	return back
}

// stale reports whether a flow must be removed, given the machine's own addresses. If unknown is set, translated flows to the
// cluster IP ranges are stale even if no frontend is known to have existed there.
func (x *index) stale(f *conntrack.Flow, own *host.Local, unknown bool) bool {
	if f.Zoned {
		return false
	}
	if x.tooEarly(f, own) {
		return true
	}
	if _, left := x.left[f.Src]; left && f.Protocol == protoUDP && f.OneWay() {
		return true
	}
	at := frontend{f.Dst.Addr(), f.Protocol, f.Dst.Port()}
	port := frontend{anyAddr(f.Family), f.Protocol, f.Dst.Port()}
	if key, ok := x.live[at]; ok {
		return x.stranded(f, key)
	}
	_, was := x.gone[at]
	if key, ok := x.live[port]; ok && x.answers(own, at.addr) {
		return x.stranded(f, key)
	}
	if !f.Translated() || f.Protocol == protoTCP {
		return false
	}
	if !was {
		_, was = x.gone[port]
		was = was && x.answers(own, at.addr)
	}
	return was || unknown && slices.ContainsFunc(x.ranges, func(r netip.Prefix) bool { return r.Contains(at.addr) })
}

// stranded reports whether a flow to a frontend of this ServicePort goes to a wrong destination. A TCP connection that was not
// translated never was one to the Service.
func (x *index) stranded(f *conntrack.Flow, key plan.Key) bool {
	if f.Protocol == protoTCP && !f.Translated() {
		return false
	}
	return !contains(x.targets[key].allowed, f.From)
}

// watched reports whether flows of a family and protocol matter at all.
func (x *index) watched(f plan.Family, protocol uint8) bool {
	for key := range x.targets {
		if key.Family == f && netlink.Protocol(key.Protocol) == protocol {
			return true
		}
	}
	for at := range x.gone {
		if at.protocol == protocol && plan.FamilyOf(at.addr) == f {
			return true
		}
	}
	for a := range x.left {
		if protocol == protoUDP && plan.FamilyOf(a.Addr()) == f {
			return true
		}
	}
	return false
}

// answers reports whether node ports answer at an address, given the machine's own ones.
func (x *index) answers(own *host.Local, addr netip.Addr) bool {
	return own != nil && own.Contains(addr) && x.settings.NodePortsAnswer(x.node, addr)
}

// swept records that a full pass has succeeded for everything that was recorded at its start.
func swept[T comparable](noted, before map[T]int) {
	for what, left := range before {
		switch now, ok := noted[what]; {
		case !ok || now != left: // it has returned and left again meanwhile
		case left == 1:
			delete(noted, what)
		default:
			noted[what] = left - 1
		}
	}
}
