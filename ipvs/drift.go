package ipvs

import (
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
)

// differences finds out in what that which the kernel holds now differs from what it was left with. Rules are compared by
// package iptables, routes by routeDifferences.
func (e *engine) differences(before *held) {
	for _, id := range slices.SortedFunc(maps.Keys(before.servers), compareServers) {
		was, is := before.servers[id], e.held.servers[id]
		switch {
		case is == nil:
			e.found.Add(drift.VirtualServer, drift.Missing, "%s", id)
			continue
		case is.Server != was.Server:
			e.found.Add(drift.VirtualServer, drift.Changed, "%s", id)
		}
		e.destinationDifferences(id, was, is)
	}
	for _, id := range slices.SortedFunc(maps.Keys(e.held.servers), compareServers) {
		if before.servers[id] == nil {
			e.found.Add(drift.VirtualServer, drift.Unexpected, "%s", id)
		}
	}
	e.memberDifferences(before)
	e.portDifferences(before)
	for _, a := range slices.SortedFunc(maps.Keys(before.vips), netip.Addr.Compare) {
		if _, is := e.held.vips[a]; !is {
			e.found.Add(drift.Address, drift.Missing, "%s of interface %s", a, DeviceName)
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(e.held.vips), netip.Addr.Compare) {
		if _, was := before.vips[a]; !was {
			e.found.Add(drift.Address, drift.Unexpected, "%s of interface %s", a, DeviceName)
		}
	}
}

func (e *engine) destinationDifferences(id ipvs.ServerID, was, is *heldServer) {
	for _, addr := range slices.SortedFunc(maps.Keys(was.destinations), netip.AddrPort.Compare) {
		switch d := is.destinations[addr]; {
		case d == nil:
			e.found.Add(drift.RealServer, drift.Missing, "%s of virtual server %s", addr, id)
		case d.weight != was.destinations[addr].weight:
			e.found.Add(drift.RealServer, drift.Changed, "%s of virtual server %s: weight %d in place of %d",
				addr, id, d.weight, was.destinations[addr].weight)
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(is.destinations), netip.AddrPort.Compare) {
		if was.destinations[addr] == nil {
			e.found.Add(drift.RealServer, drift.Unexpected, "%s of virtual server %s", addr, id)
		}
	}
}

// memberDifferences compares entries of sets. They are not sorted: whoever empties a set leaves thousands.
func (e *engine) memberDifferences(before *held) {
	add := func(s drift.State, m member) {
		set := setOf(m.set, e.family)
		e.found.Add(drift.SetElement, s, "%s of set %s", entryText{m.entry, set}, set.Name)
	}
	for m, was := range before.members {
		is, ok := e.held.members[m]
		switch {
		case !ok:
			add(drift.Missing, m)
		case is.mark != was.mark || is.mask != was.mask:
			add(drift.Changed, m)
		}
	}
	for m := range e.held.members {
		if _, was := before.members[m]; !was {
			add(drift.Unexpected, m)
		}
	}
}

// entryText is an entry that becomes text only where it is printed.
type entryText struct {
	entry ipset.Entry
	set   ipset.Set
}

func (t entryText) String() string { return t.entry.Text(t.set) }

// routeDifferences compares the routes that the kernel holds with those that were made.
func (e *engine) routeDifferences(have map[netip.Prefix]netip.Addr) {
	for _, r := range slices.SortedFunc(maps.Keys(e.routed), netip.Prefix.Compare) {
		switch src, is := have[r]; {
		case !is:
			e.found.Add(drift.Route, drift.Missing, "%s of interface %s", r, DeviceName)
		case src != e.routed[r]:
			e.found.Add(drift.Route, drift.Changed, "%s of interface %s: source %s in place of %s", r, DeviceName, src, e.routed[r])
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(have), netip.Prefix.Compare) {
		if _, was := e.routed[r]; !was {
			e.found.Add(drift.Route, drift.Unexpected, "%s of interface %s", r, DeviceName)
		}
	}
}

// destination returns what was held at an address; nil if nothing was, or if it is not known what was held.
func (h *held) destination(id ipvs.ServerID, addr netip.AddrPort) *heldDestination {
	if h == nil || h.servers[id] == nil {
		return nil
	}
	return h.servers[id].destinations[addr]
}
