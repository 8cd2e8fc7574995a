package blocking

import (
	"fmt"
	"net/netip"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// inside returns the packets that pass a chain in the network namespace of endpoints: those to them, and their answers.
func inside(ports []*plan.ServicePort, b nft.BaseChain) (out []packet) {
	for _, sp := range ports {
		f := sp.Key.Family
		if b.Family == "bridge" || b.Family == "ip" && f == plan.IPv6 || b.Family == "ip6" && f == plan.IPv4 {
			continue
		}
		for _, ep := range sp.All()[:min(len(sp.All()), mostEndpoints)] {
			at := side{ep.Addr.Addr(), ep.Addr.Port(), true}
			p := packet{what: "endpoint " + ep.Addr.String(), key: sp.Key, family: f, protocol: netlink.Protocol(sp.Key.Protocol),
				first: []netip.AddrPort{ep.Addr}, nat: b.Type == "nat"}
			switch b.Hook {
			case "ingress", "prerouting", "input":
				p.dst, p.here = at, yes
			case "output", "postrouting":
				p.src, p.answer, p.here = at, true, no
			default: // Nothing is forwarded there.
				continue
			}
			out = append(out, p)
		}
	}
	return out
}

// atBridge returns the packets that pass a chain of bridges between this node and the endpoints behind its bridges. By which port they come or leave is not
// known.
func atBridge(ports []*plan.ServicePort, b nft.BaseChain, n Node) (out []packet) {
	toNode := b.Hook == "prerouting" || b.Hook == "input"
	for _, sp := range ports {
		f := sp.Key.Family
		p := packet{key: sp.Key, family: f, protocol: netlink.Protocol(sp.Key.Protocol)}
		for _, fe := range sp.Frontends {
			p.first = append(p.first, netip.AddrPortFrom(fe.Addr, fe.Port))
			if fe.Kind == plan.ClusterIP && toNode && n.Bridges[n.PodsBy] {
				asks := p
				asks.what = fmt.Sprintf("the %s from Pods of this node (by %s)", fe, n.PodsBy)
				asks.dst, asks.src, asks.here, asks.first = side{fe.Addr, fe.Port, true}, side{addr: n.Pod[f]}, maybe, p.first[len(p.first)-1:]
				out = append(out, asks)
			}
		}
		for _, ep := range sp.All()[:min(len(sp.All()), mostEndpoints)] {
			by := n.by(ep.Addr.Addr())
			if !n.Bridges[by] {
				continue
			}
			at := side{ep.Addr.Addr(), ep.Addr.Port(), true}
			p.what, p.dnat = fmt.Sprintf("endpoint %s (by %s)", ep.Addr, by), yes
			switch b.Hook {
			case "output", "postrouting":
				to := p
				to.dst, to.here = at, no
				out = append(out, to)
			case "prerouting", "input":
				from := p
				from.src, from.answer, from.here = at, true, maybe
				out = append(out, from)
			}
		}
	}
	return out
}
