package blocking

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// side is what is known of one side of a packet: its address, which is not valid if it is some address of the node, and its port. Nothing
// is known of the zero value.
type side struct {
	addr  netip.Addr
	port  uint16
	known bool
}

// packet is a packet as it is in one chain.
type packet struct {
	what     string
	from     string // who sends it to what; empty for everybody
	key      plan.Key
	family   plan.Family
	protocol byte
	src, dst side
	// elsewhere is true for what goes to an endpoint on another node.
	elsewhere bool
	// pods is the range in which the source is, where Pods send it; invalid for others.
	pods netip.Prefix
	mark mark
	// answer says that it comes back, on a connection that has begun.
	answer bool
	// untracked says that the kernel has not looked yet which connection it is of.
	untracked bool
	// here says whether the destination is an address of the node.
	here match
	// first are the destinations that the packet may have had at first, and dnat says whether it has another one by now.
	first []netip.AddrPort
	dnat  match
	// in and out are the interfaces by which it comes and leaves; "" where that is not known.
	in, out string
	// check is true for what asks for the health of a Service, nat where its translation is looked at, and sources where that is about which source it
	// gets.
	check, nat, sources bool
	// remarked is true where a change of the mark has it not be masqueraded.
	remarked bool
	// icmp is true for an error that says a packet was too long.
	icmp bool
	// masqueraded says whether it is to be masqueraded, which this program's own rules let pass.
	masqueraded match
}

// priorityTracking is the priority at which connections begin to be tracked.
const priorityTracking = -200

// priorityDNAT is the priority of the chains in which destinations are translated.
const priorityDNAT = -100

// packets returns the packets of ServicePorts that pass a base chain: those to frontends before their destination is translated, those
// to endpoints behind that, and answers of endpoints before their source is translated back.
func packets(ports []*plan.ServicePort, b nft.BaseChain, n Node) []packet {
	switch {
	case n.Inside:
		return inside(ports, b)
	case b.Family == "bridge":
		return atBridge(ports, b, n)
	case b.Hook == "ingress":
		return comeBy(ports, b.Devices, n)
	}
	var l packetList
	for _, sp := range ports {
		if !takes(b, sp.Key.Family) {
			continue
		}
		l.toEndpoints(sp, b, n, l.toFrontends(sp, b, n))
	}
	return slices.Concat(l.out, l.special, l.answers, tunnelled(b, n), tooLong(b, n))
}

// takes reports whether packets of a family pass a chain.
func takes(b nft.BaseChain, f plan.Family) bool {
	return b.Family != map[plan.Family]string{plan.IPv4: "ip6", plan.IPv6: "ip"}[f]
}

// packetList gathers packets: those of everybody, those of some, and answers.
type packetList struct{ out, special, answers []packet }

// toFrontends adds what passes a chain before its destination is translated. It returns the destinations.
func (l *packetList) toFrontends(sp *plan.ServicePort, b nft.BaseChain, n Node) (first []netip.AddrPort) {
	f := sp.Key.Family
	for _, fe := range sp.Frontends {
		if fe.Kind == plan.HealthCheckNodePort {
			if b.Hook == "prerouting" || b.Hook == "input" {
				p := packet{what: fmt.Sprintf("the %s from outside", fe), key: sp.Key, family: f, dst: side{fe.Addr, fe.Port, true}, protocol: netlink.Protocol(plan.TCP),
					here: yes, first: []netip.AddrPort{netip.AddrPortFrom(fe.Addr, fe.Port)}, dnat: no, in: n.Uplink, check: true}
				l.out = append(l.out, p)
			}
			continue
		}
		first = append(first, netip.AddrPortFrom(fe.Addr, fe.Port))
		if from := beforeDNAT(b, n); from != "" {
			p := packet{what: fmt.Sprintf("the %s from %s", fe, from), key: sp.Key, family: f, dst: side{fe.Addr, fe.Port, true}, protocol: netlink.Protocol(fe.Protocol),
				here: maybe, first: first[len(first)-1:], dnat: no}
			if !fe.Addr.IsValid() || n.Local(fe.Addr) {
				p.here = yes
			}
			if by := n.uplinkTo(sp, fe); by != "" && b.Hook != "output" {
				outside := p
				outside.in, outside.what = by, fmt.Sprintf("the %s from outside (by %s)", fe, by)
				l.out = append(l.out, outside)
			}
			if n.PodsBy != "" && b.Hook != "output" {
				pods := p
				pods.in, pods.pods, pods.what = n.PodsBy, n.Pods[f], fmt.Sprintf("the %s from Pods of this node (by %s)", fe, n.PodsBy)
				l.special = append(l.special, pods)
			}
			l.out = append(l.out, p)
		}
	}
	return first
}

// toEndpoints adds what passes a chain behind that, and answers. first are the destinations that packets may have had.
func (l *packetList) toEndpoints(sp *plan.ServicePort, b nft.BaseChain, n Node, first []netip.AddrPort) {
	f := sp.Key.Family
	for i, ep := range sp.All() {
		here := n.Local(ep.Addr.Addr())
		if i < mostEndpoints && answersPass(b, here, n) {
			p := packet{what: "endpoint " + ep.Addr.String(), key: sp.Key, family: f, src: side{ep.Addr.Addr(), ep.Addr.Port(), true}, answer: true,
				protocol: netlink.Protocol(sp.Key.Protocol), here: maybe, first: first, dnat: yes}
			switch {
			case n.IPVS:
				p.dnat = maybe
			case b.Hook == "prerouting":
				p.in = n.by(ep.Addr.Addr())
			case b.Hook == "forward":
				p.here, p.in = no, n.by(ep.Addr.Addr())
			case b.Hook == "input":
				p.here, p.in = yes, n.by(ep.Addr.Addr())
				p.what += " to this node"
			}
			l.answers = append(l.answers, p)
		}
		if i >= mostEndpoints || !behindDNAT(b, n) || b.Hook == "input" && !here || b.Hook == "forward" && here {
			continue
		}
		p := packet{what: "endpoint " + ep.Addr.String(), key: sp.Key, family: f, dst: side{ep.Addr.Addr(), ep.Addr.Port(), true}, protocol: netlink.Protocol(sp.Key.Protocol),
			here: no, first: first, dnat: yes}
		if here {
			p.here = yes
		}
		if n.IPVS { // It translates in its own way.
			p.dnat = maybe
		} else if b.Hook == "forward" || b.Hook == "postrouting" {
			p.out = n.by(ep.Addr.Addr())
		}
		p.masqueraded, p.elsewhere = maybe, !ep.Local
		l.out = append(l.out, p)
		if b.Hook == "output" && !n.IPVS {
			for _, fe := range sp.Frontends { // A chain knows the interface to where the packet was sent at first.
				if by := n.by(fe.Addr); fe.Kind == plan.ClusterIP && by != "" {
					own := p
					own.out, own.from, own.first = by, "this node", []netip.AddrPort{netip.AddrPortFrom(fe.Addr, fe.Port)}
					l.special = append(l.special, own)
				}
			}
		}
		decides := b.Hook == "forward" || b.Hook == "input" // about packets that begin connections
		if pods := n.Pods[f]; pods.IsValid() && decides && !n.IPVS {
			from := p
			from.pods, from.in, from.from, from.masqueraded = pods, n.PodsBy, "Pods of this node", no
			l.special = append(l.special, from)
		}
		if n.outside(sp) && (ep.Local || sp.ExternalPolicy == plan.Cluster) && (decides || b.Hook == "postrouting" && !here) {
			outside := p
			outside.in, outside.from = n.Uplink, fmt.Sprintf("outside (by %s)", n.Uplink)
			if outside.masqueraded = maybe; sp.ExternalPolicy == plan.Cluster && !n.IPVS {
				outside.masqueraded = yes
				outside.remarked = !here && (b.Hook == "forward" || b.Hook == "postrouting" && b.Priority < prioritySNAT)
			}
			l.special = append(l.special, outside)
		}
	}
}

// outside reports whether packets for a ServicePort come from outside by the uplink.
func (n Node) outside(sp *plan.ServicePort) bool {
	return slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return n.uplinkTo(sp, f) != "" })
}

// uplinkTo is the uplink if packets from outside come by it to a frontend; else "".
func (n Node) uplinkTo(sp *plan.ServicePort, f plan.Frontend) string {
	switch {
	case f.Kind == plan.ClusterIP, f.Kind == plan.HealthCheckNodePort, f.Kind == plan.NodePort && n.NoNodePorts[sp.Key.Family]:
		return ""
	}
	return n.Uplink
}

// comeBy returns the packets of ServicePorts that come by interfaces: from outside to frontends, from Pods to cluster IPs, and answers of endpoints.
func comeBy(ports []*plan.ServicePort, devices []string, n Node) (out []packet) {
	var answers []packet
	for _, sp := range ports {
		f := sp.Key.Family
		var first []netip.AddrPort
		for _, fe := range sp.Frontends {
			by, who := n.uplinkTo(sp, fe), "outside"
			if fe.Kind == plan.ClusterIP {
				by, who = n.PodsBy, "Pods of this node"
			}
			first = append(first, netip.AddrPortFrom(fe.Addr, fe.Port))
			if by == "" || !slices.Contains(devices, by) {
				continue
			}
			p := packet{what: fmt.Sprintf("the %s from %s (by %s)", fe, who, by), key: sp.Key, family: f, dst: side{fe.Addr, fe.Port, true},
				protocol: netlink.Protocol(fe.Protocol), here: maybe, first: first[len(first)-1:], dnat: no, in: by}
			if !fe.Addr.IsValid() || n.Local(fe.Addr) {
				p.here = yes
			}
			out = append(out, p)
		}
		for _, ep := range sp.All()[:min(len(sp.All()), mostEndpoints)] {
			if by := n.by(ep.Addr.Addr()); by != "" && slices.Contains(devices, by) {
				answers = append(answers, packet{what: fmt.Sprintf("endpoint %s (by %s)", ep.Addr, by), key: sp.Key, family: f,
					src: side{ep.Addr.Addr(), ep.Addr.Port(), true}, answer: true, protocol: netlink.Protocol(sp.Key.Protocol), here: maybe, first: first, dnat: yes, in: by})
			}
		}
	}
	for _, p := range tunnelled(nft.BaseChain{Hook: "prerouting"}, n) {
		if slices.Contains(devices, p.in) {
			answers = append(answers, p)
		}
	}
	return append(out, answers...)
}

// tunnelled returns the packets that come from the tunnels of other nodes and pass a chain. They are of IPv4, as tunnels between nodes mostly are.
func tunnelled(b nft.BaseChain, n Node) (out []packet) {
	if b.Hook != "input" && b.Hook != "prerouting" || b.Family == "ip6" {
		return nil
	}
	for _, t := range n.Tunnels {
		what := fmt.Sprintf("the tunnel %s (IP protocol %d), by which other nodes answer", t.Name, t.Protocol)
		if t.Port != 0 {
			what = fmt.Sprintf("the tunnel %s (port %d/UDP), by which other nodes answer", t.Name, t.Port)
		}
		out = append(out, packet{what: what, family: plan.IPv4, protocol: t.Protocol, src: side{addr: t.Peer}, dst: side{port: t.Port, known: t.Port != 0}, here: yes, dnat: no, in: t.By})
	}
	return out
}

// tooLong returns the packet by which this node tells its Pods of IPv4 that a packet was too long for the next link (RFC 1191), in a chain that it passes.
func tooLong(b nft.BaseChain, n Node) []packet {
	if b.Hook != "output" || b.Family == "ip6" {
		return nil
	}
	return []packet{{what: "ICMP errors of this node", family: plan.IPv4, protocol: unix.IPPROTO_ICMP, answer: true, here: no, dnat: no, icmp: true, out: n.PodsBy}}
}

// beforeDNAT returns where packets to frontends come from that pass a chain; "" if none does.
func beforeDNAT(b nft.BaseChain, n Node) string {
	switch {
	case b.Hook == "prerouting" && (n.IPVS || b.Priority < priorityDNAT), b.Hook == "input" && n.IPVS:
		return "pods and other hosts"
	case b.Hook == "output" && (n.IPVS || b.Priority < priorityDNAT):
		return "this node"
	}
	return ""
}

// behindDNAT reports whether packets to endpoints pass a chain.
func behindDNAT(b nft.BaseChain, n Node) bool {
	switch b.Hook {
	case "prerouting":
		return !n.IPVS && b.Priority >= priorityDNAT
	case "forward":
		return !n.IPVS
	case "output":
		return n.IPVS || b.Priority >= priorityDNAT
	}
	return true
}

// prioritySNAT is the priority of the chains in which sources are translated, back as well.
const prioritySNAT = 100

// answersPass reports whether answers of an endpoint pass a chain as the endpoint sends them. An endpoint that is here answers from the node
// itself, and its answers to the node have been translated back when they come in. IPVS translates answers back in its own way, at several places.
func answersPass(b nft.BaseChain, here bool, n Node) bool {
	switch b.Hook {
	case "prerouting":
		return !here
	case "forward":
		return !here && !n.IPVS
	case "input":
		return !here && !n.IPVS && b.Priority < prioritySNAT
	case "output":
		return here
	case "postrouting":
		return !n.IPVS && b.Priority < prioritySNAT
	}
	return false
}

// fromPods returns the packets of this node's Pods to endpoints that are not its own, as they leave it.
func fromPods(ports []*plan.ServicePort, b nft.BaseChain, n Node) (out []packet) {
	for _, sp := range ports {
		f := sp.Key.Family
		pods := n.Pods[f]
		if b.Hook != "postrouting" || !pods.IsValid() || !takes(b, f) {
			continue
		}
		for _, ep := range sp.All()[:min(len(sp.All()), mostEndpoints)] {
			if a := ep.Addr.Addr(); !n.Local(a) {
				out = append(out, packet{what: "endpoint " + ep.Addr.String(), from: "Pods of this node", key: sp.Key, family: f, protocol: netlink.Protocol(sp.Key.Protocol),
					pods: pods, dst: side{a, ep.Addr.Port(), true}, here: no, dnat: yes, out: n.by(a), nat: true, sources: true, masqueraded: no})
			}
		}
	}
	return out
}

// natPackets returns the packets of ServicePorts whose translation is decided in a base chain: those to frontends, whose destination is, and those from
// outside to endpoints on other nodes, whose source is.
func natPackets(ports []*plan.ServicePort, b nft.BaseChain, n Node) (out []packet) {
	if n.Inside {
		if b.Hook == "prerouting" {
			out = inside(ports, b)
		}
		return out
	}
	for _, sp := range ports {
		f := sp.Key.Family
		if !takes(b, f) {
			continue
		}
		p := packet{key: sp.Key, family: f, protocol: netlink.Protocol(sp.Key.Protocol), nat: true, in: n.Uplink}
		switch {
		case b.Hook == "postrouting" && sp.HasExternal() && sp.ExternalPolicy == plan.Cluster:
			for _, ep := range sp.All()[:min(len(sp.All()), mostEndpoints)] {
				if !ep.Local && !n.Local(ep.Addr.Addr()) {
					p.what, p.dst = "endpoint "+ep.Addr.String()+" from outside", side{ep.Addr.Addr(), ep.Addr.Port(), true}
					p.here, p.dnat, p.out = no, yes, n.by(ep.Addr.Addr())
					out = append(out, p)
				}
			}
		case (b.Hook == "prerouting" || b.Hook == "output") && !n.IPVS:
			for _, fe := range sp.Frontends[:min(len(sp.Frontends), mostFrontends)] {
				if fe.Kind == plan.HealthCheckNodePort {
					continue
				}
				p.what, p.dst = fmt.Sprintf("the %s from pods and other hosts", fe), side{fe.Addr, fe.Port, true}
				p.here, p.dnat, p.first = maybe, no, []netip.AddrPort{netip.AddrPortFrom(fe.Addr, fe.Port)}
				if !fe.Addr.IsValid() || n.Local(fe.Addr) {
					p.here = yes
				}
				if p.in = n.uplinkTo(sp, fe); b.Hook == "output" {
					p.in = ""
				}
				if b.Hook == "output" {
					p.what = fmt.Sprintf("the %s from this node", fe)
				}
				out = append(out, p)
				if b.Hook == "prerouting" && n.PodsBy != "" {
					p.what, p.in, p.pods = fmt.Sprintf("the %s from Pods of this node (by %s)", fe, n.PodsBy), n.PodsBy, n.Pods[f]
					out = append(out, p)
					p.pods = netip.Prefix{}
				}
			}
		}
	}
	return out
}

// podInterface is the name of the interface in a Pod, which container runtimes give to network plugins (CNI_IFNAME).
const podInterface = "eth0"

// inside returns the packets that pass a chain in the network namespace of endpoints: those to them, and their answers.
func inside(ports []*plan.ServicePort, b nft.BaseChain) (out []packet) {
	for _, sp := range ports {
		f := sp.Key.Family
		if b.Family == "bridge" || !takes(b, f) {
			continue
		}
		for _, ep := range sp.All()[:min(len(sp.All()), mostEndpoints)] {
			at := side{ep.Addr.Addr(), ep.Addr.Port(), true}
			p := packet{what: "endpoint " + ep.Addr.String(), key: sp.Key, family: f, protocol: netlink.Protocol(sp.Key.Protocol),
				first: []netip.AddrPort{ep.Addr}, nat: b.Type == "nat"}
			switch b.Hook {
			case "ingress", "prerouting", "input":
				p.dst, p.here, p.in = at, yes, podInterface
			case "output", "postrouting":
				p.src, p.answer, p.here, p.out = at, true, no, podInterface
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
				asks.dst, asks.pods, asks.here, asks.first = side{fe.Addr, fe.Port, true}, n.Pods[f], maybe, p.first[len(p.first)-1:]
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
