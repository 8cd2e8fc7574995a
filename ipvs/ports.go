package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// An external IP may be the address of another host. So only the ports that Services have are made local: see nftrules.Ports. Other
// packets to the address go where the network sends them.

// ports counts the ServicePorts that ask for each port of an external IP.
type ports map[netip.Addr]map[plan.Address]int

func (p ports) enter(a plan.Address) {
	if p[a.Addr] == nil {
		p[a.Addr] = map[plan.Address]int{}
	}
	p[a.Addr][a]++
}

func (p ports) leave(a plan.Address) {
	at := p[a.Addr]
	if at[a]--; at[a] > 0 {
		return
	}
	if delete(at, a); len(at) == 0 {
		delete(p, a.Addr)
	}
}

// byPort reports whether only those ports of an address are local that Services have.
func (s *state) byPort(a netip.Addr, host sets.Set[netip.Addr], ranges []netip.Prefix) bool {
	return s.ports[a] != nil && s.vips[a] == 0 && !s.options.WholeAddresses && s.local(a, host, ranges)
}

// actualPorts is the actual state for ports of external IPs.
type actualPorts struct {
	ports map[netip.Addr]sets.Set[plan.Address]
	// exists and complete are those of nftrules.Ports.List.
	exists, complete bool
	routes           sets.Set[netip.Addr]
	// unrouted are addresses of the device that are not local.
	unrouted sets.Set[netip.Addr]
}

// portChanges are the additions and removals for ports of external IPs.
type portChanges struct {
	routes       []netip.Addr
	ports        []plan.Address
	unrouted     []netip.Addr // to be sources of ICMP errors only
	removePorts  []plan.Address
	removeRoutes []netip.Addr
}

// portChanges returns the changes that touched addresses need.
func (e *engine) portChanges(t *touched) portChanges {
	var c portChanges
	for _, a := range slices.SortedFunc(maps.Keys(t.vips), netip.Addr.Compare) {
		wanted := e.desired.byPort(a, e.options.Host, e.ranges)
		if _, whole := e.actual.vips[a]; wanted && !(whole && t.onlyAdd) { // An unknown Service may need all of its ports.
			e.wantedPorts(a, &c)
		}
		if t.onlyAdd {
			continue
		}
		for p := range e.actual.ports.ports[a] {
			if !wanted || e.desired.ports[a][p] == 0 {
				c.removePorts = append(c.removePorts, p)
			}
		}
		if _, is := e.actual.ports.routes[a]; is && !wanted {
			c.removeRoutes = append(c.removeRoutes, a)
		}
	}
	slices.SortFunc(c.ports, comparePorts)
	slices.SortFunc(c.removePorts, comparePorts)
	return c
}

// wantedPorts adds what an address still lacks to be local by port.
func (e *engine) wantedPorts(a netip.Addr, c *portChanges) {
	if _, is := e.actual.ports.routes[a]; !is {
		c.routes = append(c.routes, a)
	}
	for p := range e.desired.ports[a] {
		if !e.actual.ports.has(p) {
			c.ports = append(c.ports, p)
		}
	}
	_, whole := e.actual.vips[a]
	_, unrouted := e.actual.ports.unrouted[a]
	if whole || !unrouted && e.family == plan.IPv4 {
		c.unrouted = append(c.unrouted, a)
	}
}

func comparePorts(a, b plan.Address) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

// readPorts reads the actual state of ports. Addresses without a route are removed from actual.vips.
func (e *engine) readPorts() error {
	h := actualPorts{ports: map[netip.Addr]sets.Set[plan.Address]{}, unrouted: sets.Set[netip.Addr]{}}
	unrouted, err := e.machine.device.UnroutedAddresses(e.family)
	if err != nil {
		return err
	}
	for a := range unrouted {
		delete(e.actual.vips, a)
		h.unrouted.Insert(a)
	}
	if h.routes, err = e.machine.device.PortRoutes(e.family); err != nil {
		return err
	}
	if e.machine.ports != nil {
		var list sets.Set[plan.Address]
		if list, h.exists, h.complete, err = e.machine.ports.List(); err != nil {
			return err
		}
		for p := range list {
			h.add(p)
		}
	}
	e.actual.ports = h
	return nil
}

func (h *actualPorts) add(p plan.Address) {
	if h.ports[p.Addr] == nil {
		h.ports[p.Addr] = sets.Set[plan.Address]{}
	}
	h.ports[p.Addr].Insert(p)
}

func (h *actualPorts) remove(p plan.Address) {
	if delete(h.ports[p.Addr], p); len(h.ports[p.Addr]) == 0 {
		delete(h.ports, p.Addr)
	}
}

// has reports whether a port is diverted.
func (h *actualPorts) has(p plan.Address) bool {
	_, is := h.ports[p.Addr][p]
	return is
}

// all returns all ports.
func (h *actualPorts) all() sets.Set[plan.Address] {
	out := sets.Set[plan.Address]{}
	for _, at := range h.ports {
		maps.Copy(out, at)
	}
	return out
}

// addresses calls note with each address that has something in the kernel.
func (h *actualPorts) addresses(note func(netip.Addr)) {
	for a := range h.ports {
		note(a)
	}
	for a := range h.routes {
		note(a)
	}
	for a := range h.unrouted {
		note(a)
	}
}

// addPorts makes ports local, and then the rest of their addresses another host's.
func (e *engine) addPorts(c portChanges) error {
	h := &e.actual.ports
	if len(c.routes) > 0 {
		if err := e.machine.device.AddPortRoutes(c.routes); err != nil {
			return err
		}
		for _, a := range c.routes {
			h.routes.Insert(a)
		}
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
	for _, a := range c.unrouted {
		delete(e.actual.vips, a)
		h.unrouted.Insert(a)
	}
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
		if err := e.machine.ports.Write(slices.SortedFunc(maps.Keys(h.all()), comparePorts)); err != nil {
			return err
		}
		h.exists, h.complete = true, true
	case len(ports) > 0:
		return e.machine.ports.Add(ports)
	}
	return nil
}

// removePorts removes ports that no Service has any more, and what diverts ports if no port is left.
func (e *engine) removePorts(c portChanges) error {
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
		for _, a := range c.removeRoutes {
			delete(h.routes, a)
		}
	}
	return errors.Join(errs...)
}

// portDifferences compares what the kernel holds for ports with what it was left with.
func (e *engine) portDifferences(before *actual) {
	switch was, is := before.ports, e.actual.ports; {
	case was.complete && !is.exists:
		e.differs(drift.Chain, drift.Missing, "nftables table %s with its routing rule (%s)", names.IPVSPorts, e.family)
	case was.complete && !is.complete:
		e.differs(drift.Chain, drift.Changed, "nftables table %s or its routing rule (%s)", names.IPVSPorts, e.family)
	case !was.exists && is.exists:
		e.differs(drift.Chain, drift.Unexpected, "nftables table %s or its routing rule (%s)", names.IPVSPorts, e.family)
	}
	compare(e, drift.SetElement, before.ports.all(), e.actual.ports.all(), comparePorts, func(p plan.Address) string {
		return fmt.Sprintf("%s . %s . %d of nftables table %s", p.Addr, p.Protocol.Lower(), p.Port, names.IPVSPorts)
	}, nil)
	compare(e, drift.Route, before.ports.routes, e.actual.ports.routes, netip.Addr.Compare, func(a netip.Addr) string {
		return fmt.Sprintf("%s of interface %s in table %d", a, names.Device, names.PortsRouteTable)
	}, nil)
	compare(e, drift.Address, before.ports.unrouted, e.actual.ports.unrouted, netip.Addr.Compare, func(a netip.Addr) string {
		return fmt.Sprintf("%s of interface %s, without a route", a, names.Device)
	}, nil)
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
