package iptables

import (
	"fmt"
	"net/netip"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Options are the parts of the rules that come from the configuration of this backend or from what the node's iptables
// and kernel can do, not from the cluster.
type Options struct {
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31. kube-proxy's default is 14.
	MasqueradeBit int
	// RandomFully randomises source ports of masqueradings, so that connections that race for one do not collide.
	// iptables has it since 1.6.2.
	RandomFully bool
	// CompactAbove is the number of endpoints, over all ServicePorts of a family, above which rules take their compact
	// form: no chain for each endpoint (but with session affinity), comments only in the rule that leads to a
	// ServicePort's chain, no such chain either for one with a cluster IP only and one or two endpoints, and one rule that
	// masquerades hairpin traffic for all. 0 is for never, which kernels without xt_bpf need.
	CompactAbove int
	// KeepCounters has every ServicePort keep a chain in the compact form too. Traffic tells ServicePorts apart by their
	// chains; and what leads there loses its counter only when frontends near it in the dispatcher come or go, not whenever an
	// endpoint of theirs does.
	KeepCounters bool
	// TCPLiberal is set where net.netfilter.nf_conntrack_tcp_be_liberal is: then packets that conntrack calls invalid
	// are not dropped.
	TCPLiberal bool
}

// DefaultCompactAbove is where kube-proxy, too, begins to leave comments out. At every change that adds a rule, an nft
// kernel walks all rules and matches that can be reached from PREROUTING and OUTPUT. With 10,000 services of two endpoints
// that takes 80 ms if each endpoint has a chain with two rules, and everything a comment; in the compact form, under 40.
const DefaultCompactAbove = 1000

// DefaultMasqueradeBit is the bit that kube-proxy uses, and that other components have learned to keep off.
const DefaultMasqueradeBit = 14

// mark is the masquerade bit as iptables-save prints it, as value and mask.
func (o Options) mark() string {
	bit := fmt.Sprintf("%#x", uint32(1)<<o.MasqueradeBit)
	return bit + "/" + bit
}

// form is what the base chains are like.
type form struct {
	compact bool
	// ranges are those of cluster IPs to which all traffic is masqueraded, or all that is not from pods.
	ranges []netip.Prefix
	pods   netip.Prefix
}

// masqueraded are the ranges of cluster IPs to which anything is masqueraded: none where all traffic is from pods.
func (x form) masqueraded() []netip.Prefix {
	if x.pods.IsValid() && x.pods.Bits() == 0 {
		return nil
	}
	return x.ranges
}

// toClusterIPs begins a rule for connections to a range of cluster IPs that are to be masqueraded.
func (x form) toClusterIPs(cidr netip.Prefix) *xtables.Rule {
	r := xtables.NewRule()
	if x.pods.IsValid() {
		r.NotSrc(x.pods)
	}
	return r.ConnectedTo(cidr)
}

// baseChains are the chains that depend on no ServicePort and no frontend.
func baseChains(o Options, f plan.Family, x form) []xtables.Chain {
	mask := fmt.Sprintf("%#x", uint32(1)<<o.MasqueradeBit)
	masquerade := "MASQUERADE"
	if o.RandomFully {
		masquerade += " --random-fully"
	}
	// Nearly every packet belongs to an established connection, so that is asked first.
	forward := []string{
		xtables.NewRule().Comment("kubernetes forwarding conntrack rule").
			Word("-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED").Jump("ACCEPT"),
	}
	if !o.TCPLiberal {
		// A packet that conntrack can't place is not translated back; its receiver would answer with a reset that
		// kills the connection it belongs to.
		forward = append(forward, xtables.NewRule().Word("-m", "conntrack", "--ctstate", "INVALID").Jump("DROP"))
	}
	// Marked packets are on their way to an endpoint; they pass even where the policy of FORWARD is DROP.
	forward = append(forward,
		xtables.NewRule().Comment("kubernetes forwarding rules").Word("-m", "mark", "--mark", o.mark()).Jump("ACCEPT"))
	postrouting := []string{
		xtables.NewRule().Word("-m", "mark", "!", "--mark", o.mark()).Jump("RETURN"),
		// The mark goes once it has served, so that a packet that passes here again (in a tunnel) is not masqueraded again.
		xtables.NewRule().Jump("MARK --set-xmark " + mask + "/0x0"),
		xtables.NewRule().Comment("kubernetes service traffic requiring SNAT").Jump(masquerade),
	}
	var first []string
	if x.compact {
		first = append(first, hairpin(f).Jump(masquerade))
		forward = append(forward, hairpin(f).Jump("ACCEPT"))
	}
	for _, cidr := range x.masqueraded() {
		first = append(first, x.toClusterIPs(cidr).Jump(masquerade))
		forward = append(forward, x.toClusterIPs(cidr).Jump("ACCEPT"))
	}
	postrouting = append(first, postrouting...)
	return []xtables.Chain{
		{Table: names.Filter, Name: names.Forward, Rules: forward},
		{Table: names.NAT, Name: names.MarkMasq, Rules: []string{
			xtables.NewRule().Jump("MARK --set-xmark " + o.mark()),
		}},
		{Table: names.NAT, Name: names.Postrouting, Rules: postrouting},
	}
}

// hairpin begins a rule for connections that DNAT has sent back to where they come from. No match of iptables compares
// source and destination, so a few instructions of classic BPF do, for all endpoints of all services at once.
func hairpin(f plan.Family) *xtables.Rule {
	const (
		v4 = "7,32 0 0 12,2 0 0 0,32 0 0 16,97 1 0 0,29 0 1 0,6 0 0 65535,6 0 0 0"
		v6 = "22,32 0 0 8,2 0 0 0,32 0 0 24,97 1 0 0,29 0 16 0,32 0 0 12,2 0 0 0,32 0 0 28,97 1 0 0,29 0 11 0," +
			"32 0 0 16,2 0 0 0,32 0 0 32,97 1 0 0,29 0 6 0,32 0 0 20,2 0 0 0,32 0 0 36,97 1 0 0,29 0 1 0," +
			"6 0 0 65535,6 0 0 0"
	)
	program := v4
	if f == plan.IPv6 {
		program = v6
	}
	return xtables.NewRule().Word("-m", "conntrack", xtables.CTStateDNAT).Comment("hairpin").
		Word("-m", "bpf", "--bytecode", `"`+program+`"`)
}

// localnetGuard is the one rule of KUBE-FIREWALL that is ours as well as the kubelet's: with route_localnet set, hosts on
// the node's network could otherwise reach what listens on its loopback address (CVE-2020-8558).
func localnetGuard() string {
	loopback := loopbackOf(plan.IPv4)
	return xtables.NewRule().NotSrc(loopback).Dst(loopback).Comment("block incoming localnet connections").
		Word("-m", "conntrack", "!", "--ctstate", "RELATED,ESTABLISHED,DNAT").Jump("DROP")
}

// jumps lists the rules in built-in chains. Each goes in front of what is there, so the last one for a chain comes first
// in it: what drops before what refuses, and that before what accepts.
func jumps(localnet bool) []xtables.Jump {
	comment := func(text string) *xtables.Rule { return xtables.NewRule().Comment(text) }
	// Only packets that begin a connection can be for an address that nothing has translated.
	begins := func(text string) *xtables.Rule {
		return xtables.NewRule().Word("-m", "conntrack", "--ctstate", "NEW").Comment(text)
	}
	const (
		portals  = "kubernetes service portals"
		visible  = "kubernetes externally-visible service portals"
		firewall = "kubernetes load balancer firewall"
	)
	list := []xtables.Jump{
		{Table: names.Filter, From: "INPUT", Rule: comment("kubernetes health check service ports").Jump(names.NodePorts)},
		{Table: names.Filter, From: "INPUT", Rule: begins(visible).Jump(names.ExternalServices)},
		{Table: names.Filter, From: "FORWARD", Rule: begins(visible).Jump(names.ExternalServices)},
		{Table: names.Filter, From: "FORWARD", Rule: begins(portals).Jump(names.Services)},
		{Table: names.Filter, From: "OUTPUT", Rule: begins(portals).Jump(names.Services)},
		{Table: names.Filter, From: "INPUT", Rule: begins(firewall).Jump(names.ProxyFirewall)},
		{Table: names.Filter, From: "OUTPUT", Rule: begins(firewall).Jump(names.ProxyFirewall)},
		{Table: names.Filter, From: "FORWARD", Rule: begins(firewall).Jump(names.ProxyFirewall)},
		// First of all, since it is done with every established connection. What is marked for masquerading has been
		// translated too, so there is nothing to refuse in it.
		{Table: names.Filter, From: "FORWARD", Rule: comment("kubernetes forwarding rules").Jump(names.Forward)},
		{Table: names.NAT, From: "OUTPUT", Rule: comment(portals).Jump(names.Services)},
		{Table: names.NAT, From: "PREROUTING", Rule: comment(portals).Jump(names.Services)},
		{Table: names.NAT, From: "POSTROUTING", Rule: comment("kubernetes postrouting rules").Jump(names.Postrouting)},
	}
	if localnet {
		list = append(list, guardJumps()...)
	}
	return list
}

// guardJumps lead to the guard of node ports on localhost (localnetGuard).
func guardJumps() []xtables.Jump {
	return []xtables.Jump{
		{Table: names.Filter, From: "INPUT", Rule: xtables.NewRule().Jump(names.KubeletFirewall)},
		{Table: names.Filter, From: "OUTPUT", Rule: xtables.NewRule().Jump(names.KubeletFirewall)},
	}
}

// toNodePorts makes the rules that send traffic for those of the node's addresses where node ports answer to a chain. It
// is the kernel that says which addresses are the node's, so rules need no change when they do.
func toNodePorts(s *plan.Settings, node *plan.Node, f plan.Family, comment, target string) []string {
	loopback := loopbackOf(f)
	localhost := s.LocalhostReachable(f)
	end := func(r *xtables.Rule) string { return r.Comment(comment).DstLocal().Jump(target) }
	if s.NodePortAddresses.All(f) {
		if localhost {
			return []string{end(xtables.NewRule())}
		}
		return []string{end(xtables.NewRule().NotDst(loopback))}
	}
	var rules []string
	ranges := s.NodePortAddresses.Ranges(f, *node)
	if !localhost && slices.ContainsFunc(ranges, loopback.Overlaps) {
		rules = append(rules, xtables.NewRule().Dst(loopback).Comment(comment).Jump("RETURN"))
	}
	for _, r := range ranges {
		rules = append(rules, end(xtables.NewRule().Dst(r)))
	}
	return rules
}
