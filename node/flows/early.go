package flows

import (
	"slices"

	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// early records the TCP frontends that lead to endpoints, to find connections that began before they did: the kernel continues such
// a connection as it began, untranslated.
type early struct {
	ports  *plan.Ports
	owners map[frontend]*plan.ServicePort
	// due is set while the next full pass is to look for such connections.
	due bool
}

func newEarly() early {
	return early{ports: plan.NewPorts(), owners: map[frontend]*plan.ServicePort{}}
}

// expect makes room for n ServicePorts. Nothing is written to the kernel before all of a large first plan are recorded, so that it matters how
// long that takes.
func (e *early) expect(n int) {
	if len(e.owners) == 0 {
		e.owners = make(map[frontend]*plan.ServicePort, n)
	}
}

// set replaces the ServicePort with this key; nil removes it. It returns the frontends that lead to endpoints now and did not
// before.
func (e *early) set(key plan.Key, sp *plan.ServicePort) map[frontend]struct{} {
	if key.Protocol != plan.TCP {
		return nil
	}
	old := e.ports.Get(key)
	if sp != nil && !sp.Any {
		sp = nil
	}
	if old == nil && sp == nil {
		return nil
	}
	if sp == nil {
		e.ports.Delete(key)
	} else {
		e.ports.Put(sp)
	}
	if old != nil && sp != nil && slices.Equal(old.Frontends, sp.Frontends) {
		for _, at := range tcpFrontends(sp) {
			e.owners[at] = sp
		}
		return nil
	}
	return e.replace(old, sp)
}

func (e *early) replace(old, sp *plan.ServicePort) map[frontend]struct{} {
	before := map[frontend]struct{}{}
	for _, at := range tcpFrontends(old) {
		before[at] = struct{}{}
		if e.owners[at] == old { // and not another ServicePort's by now
			delete(e.owners, at)
		}
	}
	var opened map[frontend]struct{}
	for _, at := range tcpFrontends(sp) {
		e.owners[at] = sp
		if _, had := before[at]; !had {
			if opened == nil {
				opened = map[frontend]struct{}{}
			}
			opened[at] = struct{}{}
			e.due = true
		}
	}
	return opened
}

// tcpFrontends returns the frontends of a ServicePort, as flows see them; none if it is nil.
func tcpFrontends(sp *plan.ServicePort) []frontend {
	if sp == nil {
		return nil
	}
	return frontendsOf(sp)
}

// tooEarly reports whether a flow is a TCP connection that waits for its first answer and was not translated although its
// destination is a frontend with endpoints. Removing it loses nothing: the client's next SYN begins a new one.
func (x *index) tooEarly(f *conntrack.Flow, own *host.Local) bool {
	if f.Protocol != protoTCP || !f.SynSent || f.Replied || f.Zoned || f.Translated() {
		return false
	}
	at := frontend{f.Dst.Addr(), protoTCP, f.Dst.Port()}
	if _, ok := x.early.owners[at]; ok {
		return true
	}
	_, ok := x.early.owners[frontend{anyAddr(f.Family), protoTCP, at.port}]
	return ok && x.answers(own, at.addr)
}
