package listeners

import (
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// captures reports whether a frontend of a ServicePort receives what is sent to a socket, on a node with these addresses.
func captures(s *plan.Snapshot, sp *plan.ServicePort, f plan.Frontend, to socket, host []netip.Addr) bool {
	family := sp.Key.Family
	if !slices.Contains(to.families(), family) {
		return false
	}
	at := func(addr netip.Addr) bool { return addr == f.Addr }
	if !f.Addr.IsValid() {
		at = func(addr netip.Addr) bool {
			return plan.FamilyOf(addr) == family && s.Settings.NodePortsAnswer(s.Node, addr)
		}
	}
	if to.Everywhere() {
		return slices.ContainsFunc(host, at)
	}
	return at(to.Addr)
}

// endpointOf reports whether a socket is that of an endpoint of a ServicePort, of whichever family.
func endpointOf(s *plan.Snapshot, key plan.Key, to socket, host []netip.Addr) bool {
	is := func(at netip.AddrPort) bool {
		if at.Port() != to.Port {
			return false
		}
		if !to.Everywhere() {
			return at.Addr() == to.Addr
		}
		return slices.Contains(to.families(), plan.FamilyOf(at.Addr())) && slices.Contains(host, at.Addr())
	}
	for _, key.Family = range plan.Families {
		sp := s.ServicePort(key)
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
