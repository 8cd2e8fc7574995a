package packetsim

import (
	"net/netip"

	"nodeproxy/plan"
)

// Tolerance says where rules may differ from a packet's verdict. The zero Tolerance allows nothing.
type Tolerance struct {
	// RejectPass reports whether a packet to an address may be rejected although the verdict lets it pass: ports there that no
	// Service has are closed. Nil allows it for no address.
	RejectPass func(netip.Addr) bool
	// KeepHairpin reports whether a packet of an endpoint to itself may keep its source although the verdict masquerades it. Nil
	// allows it for no endpoint.
	KeepHairpin func(plan.Protocol, netip.AddrPort) bool
	// DropLoopback allows a packet with a loopback source to be dropped where it would leave the machine for an endpoint elsewhere.
	DropLoopback bool
	// AnyShare allows any probabilities of endpoints: they depend on weights, which verdicts do not know.
	AnyShare bool
}

// IPVSTolerance returns where mode ipvs differs from a plan's verdicts.
//
// The addresses of Services are the machine's own in that mode, so the kernel treats a port of theirs that no Service has as a port
// on which nothing listens. Packets of an endpoint on another machine to itself through this one are not masqueraded: the set of
// endpoints that can send such packets, KUBE-LOOP-BACK, holds only those on this machine and those whose machine is not known. And
// IPVS does not send packets with a loopback source to another machine.
func IPVSTolerance(p *plan.Plan) Tolerance {
	type port struct {
		protocol plan.Protocol
		addr     netip.AddrPort
	}
	vips, here := map[netip.Addr]bool{}, map[port]bool{}
	for _, sp := range p.Services {
		for _, f := range sp.Frontends {
			vips[f.Addr] = true
		}
		for _, ep := range sp.All() {
			if ep.Local || ep.Unplaced {
				here[port{sp.Key.Protocol, ep.Addr}] = true
			}
		}
	}
	return Tolerance{
		RejectPass: func(a netip.Addr) bool {
			for _, r := range p.Settings.ServiceCIDRs {
				if r.Contains(a) {
					return true
				}
			}
			return vips[a]
		},
		KeepHairpin:  func(p plan.Protocol, a netip.AddrPort) bool { return !here[port{p, a}] },
		DropLoopback: true,
	}
}

// allowsRejectPass reports whether a packet that should pass may be rejected.
func (t Tolerance) allowsRejectPass(pkt plan.Packet) bool {
	return !pkt.DstLocal && t.RejectPass != nil && t.RejectPass(pkt.Dst)
}

// allowsKeepHairpin reports whether a packet may reach an endpoint with its own source.
func (t Tolerance) allowsKeepHairpin(pkt plan.Packet, to netip.AddrPort) bool {
	return to.Addr() == pkt.Src && t.KeepHairpin != nil && t.KeepHairpin(pkt.Protocol, to)
}
