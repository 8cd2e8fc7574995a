package ipvs

import (
	"fmt"
	"net/netip"

	"nodeproxy/iptables/common"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// rules returns the iptables rules of one family. They depend on settings and on the node, not on Services, which are in sets.
func rules(p *plan.Plan, f plan.Family, o Options) xtables.Desired {
	r := &ruleMaker{family: f, settings: p.Settings, node: p.Node, marks: newMarks(o.MasqueradeBit), ranges: o.routed(p, f)}
	// IPVS drops what comes from a loopback address and leaves the node.
	r.settings.LocalhostNodePorts = false
	r.out.Stale, r.out.StaleJump = names.IsOurs, names.IsOurs
	r.mangle()
	r.filter()
	r.nat()
	r.out.Chains = append(r.out.Chains, common.Chains(common.Options{
		MasqueradeBit: o.MasqueradeBit, RandomFully: o.RandomFully, TCPLiberal: o.TCPLiberal,
	}, f, common.Form{})...)
	r.jumps()
	return r.out
}

// ruleMaker makes the rules of one family.
type ruleMaker struct {
	family   plan.Family
	settings plan.Settings
	node     plan.Node
	marks    marks
	ranges   []netip.Prefix // in which every address belongs to Services
	out      xtables.Desired
}

func (r *ruleMaker) chain(table names.Table, name string, rules ...string) {
	r.out.Chains = append(r.out.Chains, xtables.Chain{Table: table, Name: name, Rules: rules})
}

const isNew = "-m conntrack --ctstate NEW "

// translated skips packets that IPVS has sent on to an endpoint.
const translated = "-m ipvs --ipvs -j RETURN"

func comment(text string) string { return fmt.Sprintf("-m comment --comment %q ", text) }

// in matches members of a set.
func (r *ruleMaker) in(set setID, by string) string {
	return "-m set --match-set " + setName(set, r.family) + " " + by + " "
}

func (r *ruleMaker) to(set setID) string { return r.in(set, "dst,dst") }

// mapMark sets the mark that a set has for a packet's destination, if it has one.
func (r *ruleMaker) mapMark(set setID) string {
	return "-j SET --map-set " + setName(set, r.family) + " dst,dst --map-mark"
}

// setMark sets bits of the mark.
func setMark(bits uint32) string { return fmt.Sprintf("-j MARK --set-xmark %#x/%#x", bits, bits) }

// clearMark clears bits of the mark.
func clearMark(bits uint32) string { return fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", bits) }

func (r *ruleMaker) reject() string {
	if r.family == plan.IPv6 {
		return "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return "-j REJECT --reject-with icmp-port-unreachable"
}

// notICMP excludes ICMP, so that the address of a Service can be pinged.
func (r *ruleMaker) notICMP() string {
	if r.family == plan.IPv6 {
		return "! -p ipv6-icmp "
	}
	return "! -p icmp "
}

// mangle makes the chains that mark packets for virtual servers, right before IPVS sees them: incoming ones in INPUT, and those
// that the node sends to an address of its own in OUTPUT.
func (r *ruleMaker) mangle() {
	ours := "-m mark --mark " + r.marks.match() + " "
	mark := []string{
		translated,                       // It passes again, and keeps its mark until it leaves.
		ours + clearMark(r.marks.mask()), // Another program's mark, by chance.
		// Only ports of an external IP are local, which addrtype does not see.
		r.to(setExternalIPLocal) + "-g " + names.ShortCircuit,
		"-m addrtype ! --dst-type LOCAL -j RETURN",
		r.to(setClusterIP) + "-j RETURN",
		isNew + r.to(setLoadBalancerFirewall) + "-j " + names.SourceRangesFirewall,
		// A frontend that changes its policy is in both sets meanwhile. Until its own virtual server has all endpoints, marks
		// select others for pods and the node.
		r.to(setLoadBalancerLocal) + "-g " + names.ShortCircuit,
		r.to(setLoadBalancer) + "-j RETURN",
		r.to(setExternalIP) + "-j RETURN",
		r.to(setNoEndpoints) + "-j RETURN",
		r.to(setNoLocalEndpoints) + "-j RETURN",
		r.in(setVIPs, "dst") + "-j RETURN", // Node ports do not answer at addresses of Services.
	}
	for _, cidr := range r.ranges {
		mark = append(mark, "-d "+cidr.String()+" -j RETURN")
	}
	mark = append(mark, common.ToNodePorts(&r.settings, &r.node, r.family, "kubernetes service nodeports", names.NodePort)...)
	r.chain(names.Mangle, names.IPVSMark, mark...)
	r.chain(names.Mangle, names.SourceRangesFirewall,
		r.in(setSourceCIDR, "dst,dst,src")+"-j RETURN",
		r.in(setSourceIP, "dst,dst,src")+"-j RETURN",
		"-j DROP")
	r.chain(names.Mangle, names.ShortCircuit, r.inside(r.mapMark(setLoadBalancerLocal), r.mapMark(setExternalIPLocal))...)
	r.chain(names.Mangle, names.NodePort,
		// A node port that changes its policy is in both for a moment.
		r.to(setNodePortLocal)+"-g "+names.NodePortLocal,
		r.mapMark(setNodePort))
	r.chain(names.Mangle, names.NodePortLocal, append([]string{r.mapMark(setNodePortLocal)}, r.inside()...)...)
	unmark := []string{
		"-m ipvs ! --ipvs -j RETURN",
		// A kernel without nftables has no guard that has done this; see nftrules.MarkGuard.
		ours + clearMark(r.marks.mask()),
		// Only the first packet of a connection asks for masquerading.
		"-m conntrack ! --ctstate NEW " + clearMark(r.marks.masquerade),
		"-m conntrack ! --ctstate NEW -j RETURN",
		// An endpoint would not take an answer from itself for one from the Service. This is not among the rules of table nat,
		// since mode iptables has these too, and writes them first when it takes over: traffic comes by here until it is done.
		comment("traffic of an endpoint to itself") + r.in(setLoopBack, "dst,dst,src") + setMark(r.marks.masquerade),
		r.in(setVIPs, "src") + "-j RETURN",
	}
	for _, cidr := range r.ranges {
		unmark = append(unmark, "-s "+cidr.String()+" -j RETURN")
	}
	// A connection of the node itself that began before there were rules keeps its source: IPVS takes its next SYN, while what the
	// kernel tracks of the first one still says that it needs no masquerading. If that is removed just then, the packet that comes
	// next is a new connection to the kernel, and another source port would have the endpoint reset it. It is the node's own address;
	// an address of a Service can be masqueraded only.
	r.chain(names.Mangle, names.IPVSUnmark, append(unmark, "-p tcp "+comment("open connection of the node itself")+
		fromNode+"-m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN "+clearMark(r.marks.masquerade))...)
}

// inside returns rules that lead pods and the node itself to endpoints of the cluster, each after the rules of both.
func (r *ruleMaker) inside(both ...string) []string {
	var out []string
	cluster := r.marks.value(toCluster)
	add := func(who, mark string) {
		for _, rule := range both {
			out = append(out, who+rule)
		}
		out = append(out, who+mark)
	}
	if pods, ok := common.FromPods(r.settings.DetectLocal, r.family, false); ok {
		if pods == "" { // Every address counts as a pod's, even that of a Service, which the node may take for its source.
			add(r.in(setVIPs, "src"), setMark(cluster|r.marks.masquerade))
			out = append(out, r.in(setVIPs, "src")+"-j RETURN")
		}
		add(pods, setMark(cluster))
		out = append(out, pods+"-j RETURN")
	}
	add(fromNode, setMark(cluster|r.marks.masquerade))
	return out
}

// fromNode matches packets of the node itself.
const fromNode = "-m addrtype --src-type LOCAL "

// filter makes the chains that refuse packets for which there is no virtual server. Those of the node itself pass INPUT too, since
// every address of a Service is one of the node's. Our marks are not visible here: see nftrules.MarkGuard.
func (r *ruleMaker) filter() {
	r.chain(names.Filter, names.NodePort,
		"-p tcp "+comment("kubernetes health check node ports")+r.in(setHealthCheckNodePort, "dst")+"-j ACCEPT")
	list := []string{
		translated, // It is for an endpoint of the node's own, even where others may not get to that address and port.
		r.to(setLoadBalancerLocal) + "-g " + names.IPVSLocal,
		r.to(setExternalIPLocal) + "-g " + names.IPVSLocal,
		isNew + r.to(setNoLocalEndpoints) + "-j DROP",
		isNew + r.to(setNoEndpoints) + r.reject(),
		r.to(setClusterIP) + "-j RETURN",
		r.to(setLoadBalancer) + "-j RETURN",
		r.to(setExternalIP) + "-j RETURN",
		// Programs that listen on all addresses of the node must not be reachable at those of Services.
		r.notICMP() + isNew + r.in(setVIPs, "dst") + r.reject(),
	}
	for _, cidr := range r.ranges {
		list = append(list, "-d "+cidr.String()+" "+r.notICMP()+isNew+r.reject())
	}
	list = append(list, common.ToNodePorts(&r.settings, &r.node, r.family, "kubernetes service nodeports", names.IPVSNodePorts)...)
	r.chain(names.Filter, names.IPVSFilter, list...)
	r.chain(names.Filter, names.IPVSNodePorts,
		r.to(setNodePortLocal)+"-g "+names.IPVSNodePortsLocal,
		isNew+r.to(setNodePortNoEndpoints)+r.reject())
	// A frontend that gets its first endpoints, or loses its last ones, may be in a set of marks and not among those without endpoints here.
	local := func(chain string, none, noLocal setID) {
		r.chain(names.Filter, chain, append([]string{isNew + r.to(none) + r.reject()}, r.outside(isNew+r.to(noLocal)+"-j DROP")...)...)
	}
	local(names.IPVSLocal, setNoEndpoints, setNoLocalEndpoints)
	local(names.IPVSNodePortsLocal, setNodePortNoEndpoints, setNodePortNoLocalEndpoints)
}

// outside returns rules that apply a rule to all packets except those of pods and of the node itself, which are led to endpoints
// elsewhere.
func (r *ruleMaker) outside(rule string) []string {
	var out []string
	if pods, ok := common.FromPods(r.settings.DetectLocal, r.family, false); ok {
		out = append(out, pods+"-j RETURN")
	}
	return append(out, fromNode+"-j RETURN", rule)
}

// nat makes the chains that mark packets for masquerading, except those that table mangle has marked.
func (r *ruleMaker) nat() {
	const masq = "-j " + names.MarkMasq
	var services []string
	if r.settings.MasqueradeAll {
		services = append(services, r.to(setClusterIP)+masq)
	} else {
		if others, ok := common.FromPods(r.settings.DetectLocal, r.family, true); ok {
			services = append(services, others+r.to(setClusterIP)+masq)
		}
		// By default, the node uses the address of a Service as the source when it sends to it.
		services = append(services, r.in(setVIPs, "src")+r.to(setClusterIP)+masq)
		for _, cidr := range r.ranges {
			services = append(services, "-s "+cidr.String()+" "+r.to(setClusterIP)+masq)
		}
	}
	services = append(services,
		r.to(setLoadBalancer)+"-j "+names.LoadBalancer,
		r.to(setExternalIP)+masq)
	r.chain(names.NAT, names.Services, services...)
	r.chain(names.NAT, names.LoadBalancer, masq)
}

func (r *ruleMaker) jumps() {
	const portals = "kubernetes service portals"
	r.out.Jumps = []xtables.Jump{
		{Table: names.Mangle, From: "INPUT", Rule: "-j " + names.IPVSMark},
		{Table: names.Mangle, From: "OUTPUT", Rule: "-j " + names.IPVSMark},
		{Table: names.Mangle, From: "POSTROUTING", Rule: "-j " + names.IPVSUnmark},
		// A health check node port answers at the node's addresses, not at those of Services.
		{Table: names.Filter, From: "INPUT", Rule: comment("kubernetes health check rules") + "-j " + names.NodePort},
		{Table: names.Filter, From: "INPUT", Rule: comment("kubernetes ipvs access filter") + "-j " + names.IPVSFilter},
		{Table: names.Filter, From: "FORWARD", Rule: comment("kubernetes forwarding rules") + "-j " + names.Forward},
		{Table: names.NAT, From: "OUTPUT", Rule: comment(portals) + "-j " + names.Services},
		{Table: names.NAT, From: "PREROUTING", Rule: comment(portals) + "-j " + names.Services},
		{Table: names.NAT, From: "POSTROUTING", Rule: comment("kubernetes postrouting rules") + "-j " + names.Postrouting},
	}
}
