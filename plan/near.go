package plan

import (
	"net/netip"
	"slices"
)

// Near returns a plan with those ServicePorts of p on which the way of a packet through any mode's rules depends: those with a frontend
// at its source or destination, or at one of the endpoints that it may be sent to, whatever the port; those with a node port of its
// family with such a port; and those that share an endpoint with them. It walks over the whole plan.
func (p *Plan) Near(pkt Packet) *Plan {
	family := FamilyOf(pkt.Dst)
	addrs := map[netip.Addr]bool{pkt.Src.Unmap().WithZone(""): true, pkt.Dst.Unmap().WithZone(""): true}
	ports := map[uint16]bool{pkt.DstPort: true}
	has := func(sp *ServicePort) bool {
		return slices.ContainsFunc(sp.Frontends, func(f Frontend) bool {
			return f.Addr.IsValid() && addrs[f.Addr] || !f.Addr.IsValid() && ports[f.Port]
		})
	}
	out := New(p.Node, p.Settings)
	out.Partial = p.Partial
	endpoints := map[netip.AddrPort]bool{}
	for k, sp := range p.Services {
		if k.Family == family && has(sp) {
			out.Set(sp)
			for _, ep := range sp.All() {
				endpoints[ep.Addr] = true
			}
		}
	}
	for ep := range endpoints {
		addrs[ep.Addr()], ports[ep.Port()] = true, true
	}
	shared := func(ep Endpoint) bool { return endpoints[ep.Addr] }
	for k, sp := range p.Services {
		if k.Family == family && (has(sp) || slices.ContainsFunc(sp.Endpoints.Cluster, shared) ||
			slices.ContainsFunc(sp.Endpoints.Local, shared)) {
			out.Set(sp)
		}
	}
	return out
}
