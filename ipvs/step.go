package ipvs

import (
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// mostAtOnce is about how many real servers of large ServicePorts one sync looks at, which takes some ten milliseconds; an address, with its set
// entries and virtual servers, stands for addressSize of them.
const (
	mostAtOnce  = 2000
	addressSize = 20
)

// sizeOf is about how many real servers a ServicePort has, and addresses as above.
func sizeOf(sp *plan.ServicePort) int {
	if sp == nil {
		return 0
	}
	return len(sp.Frontends) * (addressSize + len(sp.All()))
}

// merge adds what others touch.
func (t *touched) merge(other *touched) {
	maps.Copy(t.servers, other.servers)
	maps.Copy(t.members, other.members)
	maps.Copy(t.vips, other.vips)
	maps.Copy(t.replaced, other.replaced)
}

// forget removes what others touch.
func (t *touched) forget(other *touched) {
	for id := range other.servers {
		delete(t.servers, id)
		delete(t.replaced, id)
	}
	for m := range other.members {
		delete(t.members, m)
	}
	for a := range other.vips {
		delete(t.vips, a)
	}
}

// empty reports whether nothing is touched.
func (t *touched) empty() bool { return len(t.servers)+len(t.members)+len(t.vips) == 0 }

// divide returns the sizes of the addresses that are left to change, those of them and others that change now as t touches them, and those that
// have to wait.
func (e *engine) divide(rest, t *touched) (size map[netip.Addr]int, now, waits map[netip.Addr]bool) {
	size = map[netip.Addr]int{}
	for a := range rest.vips {
		size[a] = addressSize
	}
	for id := range rest.servers {
		if id.Mark != 0 {
			continue
		}
		size[id.Addr] = max(size[id.Addr], addressSize) + len(e.desired.servers[id].endpoints())
		if have := e.actual.servers.Get(id); have != nil {
			size[id.Addr] += len(have.realServers)
		}
	}
	list := slices.SortedFunc(maps.Keys(size), netip.Addr.Compare)
	if n := slices.IndexFunc(list, e.lastAddress.Less); n > 0 { // They take turns.
		list = append(list[n:], list[:n]...)
	}
	left := e.mostAtOnce
	waits = map[netip.Addr]bool{}
	now = map[netip.Addr]bool{} // Others have these now, or have them too.
	for id := range t.servers {
		now[id.Addr] = id.Mark == 0
	}
	for a := range t.vips {
		now[a] = true
	}
	for _, a := range list {
		if now[a] {
			continue
		}
		if left <= 0 {
			waits[a] = true
			continue
		}
		left -= size[a]
		e.lastAddress = a
	}
	return size, now, waits
}

// step adds a part of what large ServicePorts have changed to what others touch, and leaves the rest to the next sync. It divides by addresses,
// each of which changes as a whole, and at once if others change something there. What is not of one address, such as a node port, comes with the
// first part if it is desired. If it is not, or is a mark without endpoints, it goes when all addresses have changed that still had to after it
// was left, as they may lead to it.
func (e *engine) step(t *touched) {
	rest := e.rest
	if rest == nil {
		rest = newTouched()
		rest.old = newTouched()
	}
	if t.large != nil {
		rest.merge(t.large)
		rest.old.forget(t.large)
	}
	rest.forget(t)
	if e.rest = nil; rest.empty() {
		return
	}
	size, now, waits := e.divide(rest, t)
	maps.DeleteFunc(rest.behind, func(a netip.Addr, _ bool) bool { return !waits[a] })
	ends := len(rest.behind) == 0
	// goes reports whether something is of this part.
	goes := func(a netip.Addr, desired, old bool) bool {
		if now[a] {
			return true
		}
		if _, whole := size[a]; whole {
			return !waits[a]
		}
		return desired || len(waits) == 0 || ends && old
	}
	for id := range rest.servers {
		a := id.Addr
		if id.Mark != 0 {
			a = netip.Addr{}
		}
		leads := len(e.desired.servers[id].endpoints()) > 0 // Else addresses that lead to it must refuse first.
		_, old := rest.old.servers[id]
		if !goes(a, leads, old) {
			continue
		}
		t.servers.Insert(id)
		if k, is := rest.replaced[id]; is && e.desired.servicePort(k) != nil {
			t.replaced[id] = k
		}
	}
	for m := range rest.members {
		a := m.addr.addr()
		if m.set == setLoopBack { // It has endpoints.
			a = netip.Addr{}
		}
		_, desired := e.desired.members[m]
		_, old := rest.old.members[m]
		if goes(a, desired, old) {
			t.members.Insert(m)
		}
	}
	for a := range rest.vips {
		if goes(a, false, false) {
			t.vips.Insert(a)
		}
	}
	if rest.forget(t); rest.empty() {
		return
	}
	if e.rest = rest; ends {
		rest.old, rest.behind = newTouched(), waits
		rest.old.merge(rest)
	}
}

// Unfinished reports whether the last Sync has changed some addresses of a ServicePort only, as it has many. The next one goes on, whatever its
// change is. It must not be called during a Sync.
func (b *Backend) Unfinished() bool {
	return slices.ContainsFunc(b.Engines, (*engine).unfinished)
}

func (e *engine) unfinished() bool {
	e.mu.Lock() // A comparison that fails forgets what is left.
	defer e.mu.Unlock()
	return e.rest != nil
}

// picked returns where update notes what ServicePort k touches.
func (t *touched) picked(k plan.Key, s *state, p *plan.Plan, most int) *touched {
	if most == 0 || max(sizeOf(s.services.Get(k)), sizeOf(p.Services[k])) <= most {
		return t
	}
	if t.large == nil {
		t.large = newTouched()
	}
	return t.large
}
