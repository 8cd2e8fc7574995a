package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// An external IP may be the address of another host. So only the ports that Services have are made local: see nftrules.Ports. Other
// packets to the address go where the network sends them.

// ports counts the ServicePorts that ask for each port of an external IP.
type ports map[netip.Addr]map[plan.Address]int

func (p ports) count(a plan.Address, by int) {
	if p[a.Addr] == nil {
		p[a.Addr] = map[plan.Address]int{}
	}
	at := p[a.Addr]
	if at[a] += by; at[a] == 0 {
		delete(at, a)
	}
	if len(at) == 0 {
		delete(p, a.Addr)
	}
}

// byPort reports whether only those ports of an address are local that Services have.
func (s *state) byPort(a netip.Addr) bool {
	return s.ports[a] != nil && s.vips[a] == 0 && !s.options.WholeAddresses && s.local(a)
}

// actualPorts is the actual state for ports of external IPs.
type actualPorts struct {
	ports map[netip.Addr]set.Set[plan.Address]
	// exists and complete are those of nftrules.Ports.List.
	exists, complete bool
	routes           set.Set[netip.Addr]
	// unrouted are addresses of the device that are not local.
	unrouted set.Set[netip.Addr]
}

// addressChanges are the additions and removals for addresses of Services.
type addressChanges struct {
	bind   []netip.Addr // to add to the device, with all of their ports
	unbind []netip.Addr // to remove from it
	unlist []netip.Addr // to remove from the set of the former
	// For ports of external IPs.
	routes       []netip.Addr
	ports        []plan.Address
	unrouted     []netip.Addr // to be sources of ICMP errors only
	removePorts  []plan.Address
	removeRoutes []netip.Addr
}

// addresses returns the changes that touched addresses need.
func (e *engine) addresses(t *touched) addressChanges {
	var c addressChanges
	for _, a := range slices.SortedFunc(maps.Keys(t.vips), netip.Addr.Compare) {
		is, unrouted := e.actual.vips.Has(a), e.actual.ports.unrouted.Has(a)
		_, listed := e.actual.members[vipMember(a)]
		wanted, byPort := e.desired.bound(a), e.desired.byPort(a)
		switch {
		case wanted && !(is && listed):
			c.bind = append(c.bind, a)
		case !wanted && !byPort && (is || unrouted || listed):
			c.unbind = append(c.unbind, a)
		}
		if !wanted && listed && !(byPort && t.onlyAdd) {
			c.unlist = append(c.unlist, a)
		}
		if byPort && !(t.onlyAdd && is) { // An unknown Service may need all of its ports.
			e.wantedPorts(a, &c)
		}
		if t.onlyAdd {
			continue
		}
		for p := range e.actual.ports.ports[a] {
			if !byPort || e.desired.ports[a][p] == 0 {
				c.removePorts = append(c.removePorts, p)
			}
		}
		if e.actual.ports.routes.Has(a) && !byPort {
			c.removeRoutes = append(c.removeRoutes, a)
		}
	}
	slices.SortFunc(c.ports, comparePorts)
	slices.SortFunc(c.removePorts, comparePorts)
	return c
}

// wantedPorts adds what an address still lacks to be local by port.
func (e *engine) wantedPorts(a netip.Addr, c *addressChanges) {
	if !e.actual.ports.routes.Has(a) {
		c.routes = append(c.routes, a)
	}
	for p := range e.desired.ports[a] {
		if !e.actual.ports.ports[a].Has(p) {
			c.ports = append(c.ports, p)
		}
	}
	if e.actual.vips.Has(a) || e.family == plan.IPv4 && !e.actual.ports.unrouted.Has(a) {
		c.unrouted = append(c.unrouted, a)
	}
}

func comparePorts(a, b plan.Address) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

func (h *actualPorts) add(p plan.Address) {
	if h.ports[p.Addr] == nil {
		h.ports[p.Addr] = set.Set[plan.Address]{}
	}
	h.ports[p.Addr].Insert(p)
}

func (h *actualPorts) remove(p plan.Address) {
	if delete(h.ports[p.Addr], p); len(h.ports[p.Addr]) == 0 {
		delete(h.ports, p.Addr)
	}
}

// all returns all ports.
func (h *actualPorts) all() set.Set[plan.Address] {
	out := set.Set[plan.Address]{}
	for _, at := range h.ports {
		maps.Copy(out, at)
	}
	return out
}

// sorted returns all ports in order.
func (h *actualPorts) sorted() []plan.Address {
	return slices.SortedFunc(maps.Keys(h.all()), comparePorts)
}

// addPorts makes ports local, and then the rest of their addresses another host's.
func (e *engine) addPorts(c addressChanges) error {
	h := &e.actual.ports
	if len(c.routes) > 0 {
		if err := e.machine.device.AddPortRoutes(c.routes); err != nil {
			return err
		}
		h.routes.Insert(c.routes...)
	}
	if err := e.divert(c.ports); err != nil || len(c.unrouted) == 0 {
		return err
	}
	if e.family == plan.IPv6 { // The source of an ICMPv6 error is another address of the node.
		return e.unbind(c.unrouted)
	}
	if err := e.machine.device.AddUnrouted(c.unrouted); err != nil {
		return err
	}
	e.actual.vips.Delete(c.unrouted...)
	h.unrouted.Insert(c.unrouted...)
	return nil
}

// divert adds ports to those that are diverted. If anything that diverts them is missing or changed, it writes all of it.
func (e *engine) divert(ports []plan.Address) error {
	h := &e.actual.ports
	for _, p := range ports {
		h.add(p)
	}
	switch {
	case !h.complete && len(h.ports) > 0:
		if err := e.machine.ports.Write(h.sorted()); err != nil {
			return err
		}
		h.exists, h.complete = true, true
	case len(ports) > 0:
		return e.machine.ports.Add(ports)
	}
	return nil
}

// removePorts removes ports that no Service has any more, and what diverts ports if no port is left.
func (e *engine) removePorts(c addressChanges) error {
	h := &e.actual.ports
	var errs []error
	for _, p := range c.removePorts {
		h.remove(p)
	}
	switch {
	case len(h.ports) == 0 && h.exists:
		errs = append(errs, e.machine.ports.Clear())
		h.exists, h.complete = false, false
	case len(c.removePorts) > 0:
		errs = append(errs, e.machine.ports.Remove(c.removePorts))
	}
	if len(c.removeRoutes) > 0 {
		errs = append(errs, e.machine.device.RemovePortRoutes(c.removeRoutes))
		h.routes.Delete(c.removeRoutes...)
	}
	return errors.Join(errs...)
}

// otherPorts reports whether what diverts ports is not what was written.
func (e *engine) otherPorts() (bool, error) {
	h := &e.actual.ports
	if e.machine.ports == nil {
		return false, nil
	}
	list, exists, complete, err := e.machine.ports.List()
	return exists != h.exists || complete != h.complete || !maps.Equal(list, h.all()), err
}

// portsDiffer says what has changed of what diverts ports; "" for nothing.
func (e *engine) portsDiffer() string {
	h := &e.actual.ports
	if !h.complete {
		return ""
	}
	list, _, complete, err := e.machine.ports.List()
	switch {
	case err != nil:
		return err.Error()
	case !complete:
		return fmt.Sprintf("nftables table %s (%s) or its routing rule was changed", names.IPVSPorts, e.family)
	case len(list) != len(h.all()):
		return fmt.Sprintf("nftables table %s (%s) has %d ports in place of %d", names.IPVSPorts, e.family, len(list), len(h.all()))
	}
	return ""
}
