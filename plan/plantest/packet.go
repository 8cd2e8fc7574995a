package plantest

import (
	"net/netip"
	"slices"

	"pgregory.net/rapid"

	"nodeproxy/plan"
)

// Packets generates packets of one family that are likely to meet a frontend of the plan, or to miss one by little.
// Packets come in for loopback addresses too, as hosts nearby can make them, but none comes in from one.
func (c *Cluster) Packets(f plan.Family) *rapid.Generator[plan.Packet] {
	sps := c.Plan.Sorted(f)
	return rapid.Custom(func(t *rapid.T) plan.Packet {
		var sp *plan.ServicePort
		if len(sps) > 0 {
			sp = rapid.SampledFrom(sps).Draw(t, "service port")
		}
		pkt := c.drawDestination(t, f, sp)
		c.drawSource(t, f, sp, &pkt)
		pkt.DstLocal = c.Local(pkt.Dst)
		pkt.SrcLocal = c.Local(pkt.Src)
		return pkt
	})
}

// localOf are the node's addresses of a family, with loopback addresses.
func (c *Cluster) localOf(f plan.Family) []netip.Addr {
	out := []netip.Addr{addr("127.0.0.1"), addr("127.0.0.53")}
	if f == plan.IPv6 {
		out = []netip.Addr{addr("::1")}
	}
	for _, a := range c.LocalAddrs {
		if plan.FamilyOf(a) == f {
			out = append(out, a)
		}
	}
	slices.Reverse(out) // the simplest is no loopback address
	return out
}

// drawDestination draws where a packet goes: to a frontend of sp, if there is one, or near it.
func (c *Cluster) drawDestination(t *rapid.T, f plan.Family, sp *plan.ServicePort) plan.Packet {
	w := worlds[f]
	anywhere := slices.Concat(c.localOf(f), w.nodes, w.pods, w.farPods, w.outside, w.balancer, w.external)
	ports := slices.Concat(servicePorts, nodePorts, targetPorts)
	pkt := plan.Packet{
		Dst:      rapid.SampledFrom(anywhere).Draw(t, "destination"),
		DstPort:  rapid.SampledFrom(ports).Draw(t, "port"),
		Protocol: rapid.SampledFrom(protocols).Draw(t, "protocol"),
	}
	if sp == nil || len(sp.Frontends) == 0 || chance(t, 10, "goes anywhere") {
		return pkt
	}
	fe := rapid.SampledFrom(sp.Frontends).Draw(t, "frontend")
	pkt.Protocol, pkt.DstPort = fe.Protocol, fe.Port
	if pkt.Dst = fe.Addr; !fe.Addr.IsValid() {
		pkt.Dst = rapid.SampledFrom(c.localOf(f)).Draw(t, "local address")
	}
	switch rapid.IntRange(0, 16).Draw(t, "misses by") {
	case 12:
		pkt.DstPort++
	case 13:
		pkt.Protocol = rapid.SampledFrom(protocols).Draw(t, "other protocol")
	case 14:
		pkt.Dst = pkt.Dst.Next()
	case 15:
		pkt.DstPort = rapid.SampledFrom(ports).Draw(t, "other port")
	case 16: // A neighbour may send that, though no router passes it on.
		pkt.Dst = netip.IPv4Unspecified()
		if f == plan.IPv6 {
			pkt.Dst = netip.IPv6Unspecified()
		}
	}
	return pkt
}

// drawSource draws who sends a packet, whose destination is set.
func (c *Cluster) drawSource(t *rapid.T, f plan.Family, sp *plan.ServicePort, pkt *plan.Packet) {
	w := worlds[f]
	from := rapid.SampledFrom([]string{"pod", "far pod", "node", "outside", "this node", "endpoint",
		"balancer"}).Draw(t, "from")
	pkt.InInterface = "eth0"
	switch from {
	case "pod":
		pkt.Src = rapid.SampledFrom(w.pods).Draw(t, "pod")
		pkt.InInterface = rapid.SampledFrom([]string{bridgeName, vethPrefix + "12ab", "cni",
			bridgeName + "x"}).Draw(t, "pod interface")
	case "far pod":
		pkt.Src = rapid.SampledFrom(w.farPods).Draw(t, "far pod")
	case "node":
		pkt.Src = rapid.SampledFrom(w.nodes).Draw(t, "node")
	case "outside":
		pkt.Src = rapid.SampledFrom(w.outside).Draw(t, "client")
	case "balancer":
		pkt.Src = rapid.SampledFrom(w.balancer).Draw(t, "balancer")
	case "this node":
		pkt.Src = rapid.SampledFrom(c.localOf(f)).Draw(t, "own address")
	case "endpoint":
		pkt.Src = w.pods[0]
		if sp != nil && len(sp.All()) > 0 {
			pkt.Src = rapid.SampledFrom(sp.All()).Draw(t, "endpoint").Addr.Addr()
		}
	}
	// What a node sends, it sends from an address of its own; to an address of its own it sends nothing by another way.
	// At times a packet with such a source comes in from outside, which some load balancers make happen.
	if c.Local(pkt.Src) && (pkt.Src.IsLoopback() || pkt.Dst.IsLoopback() || !chance(t, 6, "comes in all the same")) {
		pkt.Output, pkt.InInterface = true, ""
	}
	if pkt.Output && pkt.Src.IsLoopback() && !c.Local(pkt.Dst) {
		pkt.Src = w.node // The kernel picks a source that can be answered.
	}
}
