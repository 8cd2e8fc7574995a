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

// frontendsOf returns the frontends of a ServicePort, as flows see them; none if it is nil.
func frontendsOf(sp *plan.ServicePort) (out []frontend) {
	if sp == nil {
		return nil
	}
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

func contains(sorted []netip.AddrPort, a netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(sorted, a, netip.AddrPort.Compare)
	return found
}

// passesAfterEnd is the number of full passes that look for flows to a frontend after it is removed, or of an endpoint after it
// left.
const passesAfterEnd = 2

// index records which frontends exist and existed, and so which flows are stale.
type index struct {
	settings plan.Settings
	node     plan.Node
	ranges   []netip.Prefix // where cluster IPs are
	resetTCP func(*plan.ServicePort) bool
	ports    *plan.Ports
	live     map[frontend]*plan.ServicePort
	// allowed are the endpoints whose flows stay, in order, of each ServicePort whose translated flows are judged at all.
	allowed map[plan.Key][]netip.AddrPort
	// early is set while the next full pass is to look for TCP connections that began before their frontend led to endpoints.
	early bool
	// gone are frontends that were removed, each with the number of full passes that will still look for it.
	gone map[frontend]int
	// strays is set where stray answers are looked for. left are the UDP endpoints that lost flows, whose stray answers may still
	// be under way, with numbers like those of gone.
	strays bool
	left   map[netip.AddrPort]int
}

func newIndex(cfg *Config) *index {
	return &index{
		ranges: cfg.ServiceCIDRs, resetTCP: cfg.ResetTCP, ports: plan.NewPorts(), live: map[frontend]*plan.ServicePort{},
		allowed: map[plan.Key][]netip.AddrPort{}, gone: map[frontend]int{}, strays: cfg.StrayAnswers, left: map[netip.AddrPort]int{},
	}
}

// expect makes room for n ServicePorts. Nothing is written to the kernel before all of a large first plan are recorded, so that it matters how
// long that takes.
func (x *index) expect(n int) {
	if len(x.live) == 0 {
		x.live = make(map[frontend]*plan.ServicePort, n)
	}
}

// judge returns the endpoints whose flows stay, in order; false if flows to a ServicePort are not judged by their endpoint. Those of TCP
// stay with any endpoint that is listed, and others with those that are in use, or would answer if they were.
func (x *index) judge(sp *plan.ServicePort) (allowed []netip.AddrPort, judged bool) {
	tcp := sp != nil && sp.Key.Protocol == plan.TCP
	if sp == nil || tcp && (x.resetTCP == nil || !x.resetTCP(sp)) {
		return nil, false
	}
	for _, ep := range sp.All() {
		allowed = append(allowed, ep.Addr)
	}
	var stopped []netip.AddrPort
	for _, e := range sp.Excluded {
		if !tcp && (e.Reason == plan.NotReady || e.Reason == plan.TerminatingStopped) {
			stopped = append(stopped, e.Addr)
		} else {
			allowed = append(allowed, e.Addr)
		}
	}
	// One policy may leave out an endpoint for its place, and another because it does not serve.
	slices.SortFunc(stopped, netip.AddrPort.Compare)
	allowed = slices.DeleteFunc(allowed, func(a netip.AddrPort) bool { return contains(stopped, a) })
	slices.SortFunc(allowed, netip.AddrPort.Compare)
	return slices.Clip(slices.Compact(allowed)), true
}

// set replaces the ServicePort with this key; nil removes it. It returns the frontends whose flows may be stale now, and whether the
// change concerns flows at all. That of a TCP port's endpoints does not, as a rule.
func (x *index) set(key plan.Key, sp *plan.ServicePort) (todo work, concerned bool) {
	old := x.ports.Get(key)
	was, wasJudged := x.allowed[key]
	now, judged := x.judge(sp)
	if judged {
		x.allowed[key] = now
	} else if wasJudged {
		delete(x.allowed, key)
	}
	if sp != nil {
		x.ports.Put(sp)
	} else {
		x.ports.Delete(key)
	}
	todo.returned = x.moved(key, was, now)
	same := old != nil && sp != nil && slices.Equal(old.Frontends, sp.Frontends)
	led := map[frontend]bool{} // to endpoints, before
	if !same {
		for _, f := range frontendsOf(old) {
			led[f] = old.Any
			if x.live[f] != old {
				continue // by now it is another ServicePort's
			}
			delete(x.live, f)
			if f.protocol != protoTCP {
				x.gone[f] = passesAfterEnd
				todo.frontends = with(todo.frontends, f)
			}
		}
	}
	// No flow is stranded if endpoints are only added.
	strands := judged && (!same || len(was) == 0 || slices.ContainsFunc(was, func(a netip.AddrPort) bool { return !contains(now, a) }))
	for _, f := range frontendsOf(sp) {
		x.live[f] = sp
		delete(x.gone, f)
		if strands {
			todo.frontends = with(todo.frontends, f)
		}
		if f.protocol == protoTCP && sp.Any && !led[f] && !(same && old.Any) {
			todo.opened = with(todo.opened, f)
			x.early = true
		}
	}
	return todo, judged || wasJudged || len(todo.opened) > 0
}

func with[T comparable](set map[T]struct{}, value T) map[T]struct{} {
	if set == nil {
		set = map[T]struct{}{}
	}
	set[value] = struct{}{}
	return set
}

// moved records which UDP endpoints lose flows by a change of a ServicePort, and returns those that are back.
func (x *index) moved(key plan.Key, was, now []netip.AddrPort) (back map[netip.AddrPort]struct{}) {
	if !x.strays || key.Protocol != plan.UDP {
		return nil
	}
	for _, a := range now {
		if _, left := x.left[a]; left && !contains(was, a) {
			back = with(back, a)
		}
	}
	for _, a := range was {
		if !contains(now, a) {
			x.left[a] = passesAfterEnd
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
	if _, left := x.left[f.Src]; left && f.Protocol == protoUDP && f.OneWay() {
		return true
	}
	at := frontend{f.Dst.Addr(), f.Protocol, f.Dst.Port()}
	port := frontend{anyAddr(f.Family), f.Protocol, f.Dst.Port()}
	sp := x.live[at]
	_, was := x.gone[at]
	if sp == nil {
		if sp = x.live[port]; sp != nil && !x.answers(own, at.addr) {
			sp = nil
		}
	}
	switch {
	case sp != nil && f.Protocol == protoTCP && !f.Translated():
		// It never was a connection to the Service. If it waits for its first answer, it began before the frontend led to endpoints,
		// and removing it loses nothing: the client's next SYN begins a new one.
		return sp.Any && f.SynSent && !f.Replied
	case sp != nil:
		allowed, judged := x.allowed[sp.Key]
		return judged && !contains(allowed, f.From)
	case !f.Translated() || f.Protocol == protoTCP:
		return false
	}
	if !was {
		_, was = x.gone[port]
		was = was && x.answers(own, at.addr)
	}
	return was || unknown && slices.ContainsFunc(x.ranges, func(r netip.Prefix) bool { return r.Contains(at.addr) })
}

// watched reports whether flows of a family and protocol matter at all.
func (x *index) watched(f plan.Family, protocol uint8) bool {
	for key := range x.allowed {
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
