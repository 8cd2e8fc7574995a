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

// frontend is where clients send. Node ports have the unspecified address of their family.
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

// frontendsOf are the frontends of a ServicePort, as flows see them.
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

// serving are the endpoints that are in use, or would answer if they were.
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
	// What one policy leaves out for where it is, another may leave out for not serving.
	slices.SortFunc(no, netip.AddrPort.Compare)
	yes = slices.DeleteFunc(yes, func(a netip.AddrPort) bool { return contains(no, a) })
	return sortedSet(yes)
}

// listed are all endpoints there are, in whatever condition.
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

// mayStrand reports whether going from old to t can leave flows behind that are stale. It can't if only endpoints are
// added to others.
func (t *target) mayStrand(old *target) bool {
	if !slices.Equal(t.frontends, old.frontends) || len(old.allowed) == 0 {
		return true
	}
	return slices.ContainsFunc(old.allowed, func(a netip.AddrPort) bool { return !contains(t.allowed, a) })
}

// passesAfterEnd is how many full passes look for flows to a frontend after its end, or of an endpoint after it left.
const passesAfterEnd = 2

// index knows which frontends there are and were, and by that which flows are stale.
type index struct {
	settings plan.Settings
	node     plan.Node
	ranges   []netip.Prefix // where cluster IPs are
	targets  map[plan.Key]*target
	live     map[frontend]plan.Key
	early    early
	// gone are frontends that have ceased to be, each with the number of full passes that are still to look for it.
	gone map[frontend]int
	// strays is set where stray answers are looked for. left are the UDP endpoints that flows are taken from, so that stray
	// answers of theirs may be under way; with numbers like those of gone.
	strays bool
	left   map[netip.AddrPort]int
}

func newIndex(ranges []netip.Prefix, strays bool) *index {
	return &index{ranges: ranges, targets: map[plan.Key]*target{}, live: map[frontend]plan.Key{}, early: newEarly(), gone: map[frontend]int{},
		strays: strays, left: map[netip.AddrPort]int{}}
}

// set puts a ServicePort in the place of what had its key; nil takes it out. It returns where flows may be stale now.
func (x *index) set(key plan.Key, sp *plan.ServicePort) work {
	old := x.targets[key]
	var now *target
	if sp != nil {
		now = newTarget(sp)
	}
	todo := work{frontends: map[frontend]struct{}{}, returned: x.moved(key, old, now)}
	if old == nil && now == nil {
		return todo
	}
	if old != nil && now != nil && !now.mayStrand(old) {
		x.targets[key] = now
		return todo
	}
	if old != nil {
		for _, f := range old.frontends {
			if x.live[f] != key {
				continue // another ServicePort has it by now
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

// moved notes which endpoints a change of a ServicePort takes flows from, and returns those that are back.
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

// stale reports whether a flow is to be removed, given the machine's own addresses. unknown lets translated flows to the
// cluster IP ranges be stale though no frontend is known to have been there.
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

// stranded reports whether a flow to a frontend of this ServicePort goes elsewhere than it should. A TCP connection that
// was not translated never was one to the Service.
func (x *index) stranded(f *conntrack.Flow, key plan.Key) bool {
	if f.Protocol == protoTCP && !f.Translated() {
		return false
	}
	return !contains(x.targets[key].allowed, f.From)
}

// watched reports whether there is anything to look for among the flows of a family and protocol.
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

// swept notes that a full pass has succeeded for everything that was noted at its start.
func swept[T comparable](noted, before map[T]int) {
	for what, left := range before {
		switch now, ok := noted[what]; {
		case !ok || now != left: // it has been there again meanwhile
		case left == 1:
			delete(noted, what)
		default:
			noted[what] = left - 1
		}
	}
}
