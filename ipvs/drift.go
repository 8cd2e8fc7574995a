package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
)

// differs notes a thing that is not as it was left, and of which its name says everything.
func (e *engine) differs(k drift.Kind, s drift.State, format string, args ...any) {
	e.found = append(e.found, drift.Difference{Kind: k, State: s, Object: fmt.Sprintf(format, args...)})
}

// differences finds out in what that which the kernel holds now differs from what it was left with. Rules are compared by
// package iptables, routes by routeDifferences.
func (e *engine) differences(before *actual) {
	for _, id := range slices.SortedFunc(maps.Keys(before.servers), compareServers) {
		was, is := before.servers[id], e.actual.servers[id]
		switch {
		case is == nil:
			e.differs(drift.VirtualServer, drift.Missing, "%s", id)
			continue
		case is.Server != was.Server:
			e.found = append(e.found, drift.Difference{Kind: drift.VirtualServer, State: drift.Changed, Object: id.String(),
				Want: serverOptions(was.Server), Have: serverOptions(is.Server)})
		}
		e.realServerDifferences(id, was, is)
	}
	for _, id := range slices.SortedFunc(maps.Keys(e.actual.servers), compareServers) {
		if before.servers[id] == nil {
			e.differs(drift.VirtualServer, drift.Unexpected, "%s", id)
		}
	}
	e.memberDifferences(before)
	e.portDifferences(before)
	for _, a := range slices.SortedFunc(maps.Keys(before.vips), netip.Addr.Compare) {
		if _, is := e.actual.vips[a]; !is {
			e.differs(drift.Address, drift.Missing, "%s of interface %s", a, names.Device)
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(e.actual.vips), netip.Addr.Compare) {
		if _, was := before.vips[a]; !was {
			e.differs(drift.Address, drift.Unexpected, "%s of interface %s", a, names.Device)
		}
	}
}

func (e *engine) realServerDifferences(id ipvs.ServerID, was, is *actualServer) {
	for _, addr := range slices.SortedFunc(maps.Keys(was.realServers), netip.AddrPort.Compare) {
		switch d := is.realServers[addr]; {
		case d == nil:
			e.differs(drift.RealServer, drift.Missing, "%s of virtual server %s", addr, id)
		case d.weight != was.realServers[addr].weight:
			e.found = append(e.found, drift.Difference{Kind: drift.RealServer, State: drift.Changed,
				Object: fmt.Sprintf("%s of virtual server %s", addr, id),
				Aspect: "weight", Want: fmt.Sprint(was.realServers[addr].weight), Have: fmt.Sprint(d.weight)})
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(is.realServers), netip.AddrPort.Compare) {
		if was.realServers[addr] == nil {
			e.differs(drift.RealServer, drift.Unexpected, "%s of virtual server %s", addr, id)
		}
	}
}

// memberDifferences compares entries of sets. They are not sorted: a program that empties a set leaves thousands.
func (e *engine) memberDifferences(before *actual) {
	for m, was := range before.members {
		is, ok := e.actual.members[m]
		switch {
		case !ok:
			e.found = append(e.found, e.memberDifference(m, drift.Missing))
		case is.mark != was.mark || is.mask != was.mask:
			d, set := e.memberDifference(m, drift.Changed), setOf(m.set, e.family)
			d.Want, d.Have = m.marked(was).Text(set), m.marked(is).Text(set)
			e.found = append(e.found, d)
		}
	}
	for m := range e.actual.members {
		if _, was := before.members[m]; !was {
			e.found = append(e.found, e.memberDifference(m, drift.Unexpected))
		}
	}
}

func (e *engine) memberDifference(m member, s drift.State) drift.Difference {
	set := setOf(m.set, e.family)
	return drift.Difference{Kind: drift.SetElement, State: s, Object: m.entry.Text(set) + " of set " + set.Name}
}

// marked returns the entry with its mark.
func (m member) marked(s shared) ipset.Entry {
	m.entry.Mark, m.entry.Mask = s.mark, s.mask
	return m.entry
}

// routeDifferences compares the routes that the kernel holds with those that were made.
func (e *engine) routeDifferences(have map[netip.Prefix]netip.Addr) {
	for _, r := range slices.SortedFunc(maps.Keys(e.routed), netip.Prefix.Compare) {
		switch src, is := have[r]; {
		case !is:
			e.differs(drift.Route, drift.Missing, "%s of interface %s", r, names.Device)
		case src != e.routed[r]:
			e.found = append(e.found, drift.Difference{Kind: drift.Route, State: drift.Changed,
				Object: fmt.Sprintf("%s of interface %s", r, names.Device),
				Aspect: "source", Want: e.routed[r].String(), Have: src.String()})
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(have), netip.Prefix.Compare) {
		if _, was := e.routed[r]; !was {
			e.differs(drift.Route, drift.Unexpected, "%s of interface %s", r, names.Device)
		}
	}
}

// realServer returns the real server at an address; nil if there was none, or if the former state is not known.
func (h *actual) realServer(id ipvs.ServerID, addr netip.AddrPort) *actualRealServer {
	if h == nil || h.servers[id] == nil {
		return nil
	}
	return h.servers[id].realServers[addr]
}
