package iptables

import (
	"fmt"
	"net/netip"
	"slices"

	"nodeproxy/kernel/names"
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

// tableChain is a chain and the table that it is in.
type tableChain struct {
	table names.Table
	chain
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
func (x form) toClusterIPs(cidr netip.Prefix) *rule {
	r := newRule()
	if x.pods.IsValid() {
		r.notSrc(x.pods)
	}
	return r.connectedTo(cidr)
}

// ctDNAT is in all rules of the base chains that do for all services what could be done for each.
const ctDNAT = "--ctstate DNAT"

// baseChains are the chains that depend on no ServicePort and no frontend.
func baseChains(o Options, f plan.Family, x form) []tableChain {
	mask := fmt.Sprintf("%#x", uint32(1)<<o.MasqueradeBit)
	masquerade := "MASQUERADE"
	if o.RandomFully {
		masquerade += " --random-fully"
	}
	// Nearly every packet belongs to an established connection, so that is asked first.
	forward := []string{
		newRule().comment("kubernetes forwarding conntrack rule").
			word("-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED").jump("ACCEPT"),
	}
	if !o.TCPLiberal {
		// A packet that conntrack can't place is not translated back; its receiver would answer with a reset that
		// kills the connection it belongs to.
		forward = append(forward, newRule().word("-m", "conntrack", "--ctstate", "INVALID").jump("DROP"))
	}
	// Marked packets are on their way to an endpoint; they pass even where the policy of FORWARD is DROP.
	forward = append(forward,
		newRule().comment("kubernetes forwarding rules").word("-m", "mark", "--mark", o.mark()).jump("ACCEPT"))
	postrouting := []string{
		newRule().word("-m", "mark", "!", "--mark", o.mark()).jump("RETURN"),
		// The mark goes once it has served, so that a packet that passes here again (in a tunnel) is not masqueraded again.
		newRule().jump("MARK --set-xmark " + mask + "/0x0"),
		newRule().comment("kubernetes service traffic requiring SNAT").jump(masquerade),
	}
	var first []string
	if x.compact {
		first = append(first, hairpin(f).jump(masquerade))
		forward = append(forward, hairpin(f).jump("ACCEPT"))
	}
	for _, cidr := range x.masqueraded() {
		first = append(first, x.toClusterIPs(cidr).jump(masquerade))
		forward = append(forward, x.toClusterIPs(cidr).jump("ACCEPT"))
	}
	postrouting = append(first, postrouting...)
	return []tableChain{
		{names.Filter, chain{names.Forward, forward}},
		{names.NAT, chain{names.MarkMasq, []string{
			newRule().jump("MARK --set-xmark " + o.mark()),
		}}},
		{names.NAT, chain{names.Postrouting, postrouting}},
	}
}

// hairpin begins a rule for connections that DNAT has sent back to where they come from. No match of iptables compares
// source and destination, so a few instructions of classic BPF do, for all endpoints of all services at once.
func hairpin(f plan.Family) *rule {
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
	return newRule().word("-m", "conntrack", ctDNAT).comment("hairpin").
		word("-m", "bpf", "--bytecode", `"`+program+`"`)
}

// localnetGuard is the one rule of KUBE-FIREWALL that is ours as well as the kubelet's: with route_localnet set, hosts on
// the node's network could otherwise reach what listens on its loopback address (CVE-2020-8558).
func localnetGuard() string {
	loopback := loopbackOf(plan.IPv4)
	return newRule().notSrc(loopback).dst(loopback).comment("block incoming localnet connections").
		word("-m", "conntrack", "!", "--ctstate", "RELATED,ESTABLISHED,DNAT").jump("DROP")
}

// jump is a rule in a built-in chain that leads to one of ours.
type jump struct {
	table   names.Table
	from    string
	to      string
	comment string
	newOnly bool // only for packets that begin a connection
}

// text is the rule's match and target as iptables-save prints them.
func (j jump) text() string {
	r := newRule()
	if j.newOnly {
		r.word("-m", "conntrack", "--ctstate", "NEW")
	}
	if j.comment != "" {
		r.comment(j.comment)
	}
	return r.jump(j.to)
}

// jumps lists the rules in built-in chains. Each goes in front of what is there, so the last one for a chain comes first
// in it: what drops before what refuses, and that before what accepts.
func jumps(localnet bool) []jump {
	const (
		portals  = "kubernetes service portals"
		visible  = "kubernetes externally-visible service portals"
		firewall = "kubernetes load balancer firewall"
	)
	list := []jump{
		{names.Filter, "INPUT", names.NodePorts, "kubernetes health check service ports", false},
		{names.Filter, "INPUT", names.ExternalServices, visible, true},
		{names.Filter, "FORWARD", names.ExternalServices, visible, true},
		{names.Filter, "FORWARD", names.Services, portals, true},
		{names.Filter, "OUTPUT", names.Services, portals, true},
		{names.Filter, "INPUT", names.ProxyFirewall, firewall, true},
		{names.Filter, "OUTPUT", names.ProxyFirewall, firewall, true},
		{names.Filter, "FORWARD", names.ProxyFirewall, firewall, true},
		// First of all, since it is done with every established connection. What is marked for masquerading has been
		// translated too, so there is nothing to refuse in it.
		{names.Filter, "FORWARD", names.Forward, "kubernetes forwarding rules", false},
		{names.NAT, "OUTPUT", names.Services, portals, false},
		{names.NAT, "PREROUTING", names.Services, portals, false},
		{names.NAT, "POSTROUTING", names.Postrouting, "kubernetes postrouting rules", false},
	}
	if localnet {
		list = append(list,
			jump{names.Filter, "INPUT", names.KubeletFirewall, "", false},
			jump{names.Filter, "OUTPUT", names.KubeletFirewall, "", false})
	}
	return list
}

// toNodePorts makes the rules that send traffic for those of the node's addresses where node ports answer to a chain. It
// is the kernel that says which addresses are the node's, so rules need no change when they do.
func toNodePorts(s *plan.Settings, node *plan.Node, f plan.Family, comment, target string) []string {
	loopback := loopbackOf(f)
	localhost := s.LocalhostReachable(f)
	end := func(r *rule) string { return r.comment(comment).dstLocal().jump(target) }
	if s.NodePortAddresses.All(f) {
		if localhost {
			return []string{end(newRule())}
		}
		return []string{end(newRule().notDst(loopback))}
	}
	var rules []string
	ranges := s.NodePortAddresses.Ranges(f, *node)
	if !localhost && slices.ContainsFunc(ranges, loopback.Overlaps) {
		rules = append(rules, newRule().dst(loopback).comment(comment).jump("RETURN"))
	}
	for _, r := range ranges {
		rules = append(rules, end(newRule().dst(r)))
	}
	return rules
}
