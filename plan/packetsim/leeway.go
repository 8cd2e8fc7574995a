package packetsim

import (
	"net/netip"

	"nodeproxy/plan"
)

// Leeway is where rules may do with a packet what its verdict does not say. The zero Leeway allows nothing.
type Leeway struct {
	// RejectPass reports whether a packet to an address may be rejected where the verdict is to let it pass: there, ports
	// that no Service has are closed. Nil is for no address.
	RejectPass func(netip.Addr) bool
	// KeepHairpin reports whether what an endpoint sends to itself may keep its source where the verdict is to masquerade
	// it. Nil is for no endpoint.
	KeepHairpin func(plan.Protocol, netip.AddrPort) bool
	// DropLoopback allows that a packet with a loopback address as its source is dropped where it would leave the machine
	// for an endpoint elsewhere.
	DropLoopback bool
	// AnyShare allows any probability of endpoints: their weights count, and verdicts do not know those.
	AnyShare bool
}

// IPVSLeeway is where mode ipvs differs from a plan's verdicts.
//
// The addresses of Services are the machine's own there, so that what the kernel does with a port nobody listens on is
// what it does with a port of theirs that no Service has. What an endpoint on another machine sends to itself by way of
// this one is not masqueraded: the set of endpoints that can do so, KUBE-LOOP-BACK, holds only those of this machine, and
// those whose machine is not known. And IPVS sends nothing with a loopback source to another machine.
func IPVSLeeway(p *plan.Plan) Leeway {
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
	return Leeway{
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

// allowsRejectPass reports whether a packet that is to pass may be rejected.
func (l Leeway) allowsRejectPass(pkt plan.Packet) bool {
	return !pkt.DstLocal && l.RejectPass != nil && l.RejectPass(pkt.Dst)
}

// allowsKeepHairpin reports whether a packet may get to an endpoint with its own source.
func (l Leeway) allowsKeepHairpin(pkt plan.Packet, to netip.AddrPort) bool {
	return to.Addr() == pkt.Src && l.KeepHairpin != nil && l.KeepHairpin(pkt.Protocol, to)
}
