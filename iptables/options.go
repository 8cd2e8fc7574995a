package iptables

import (
	"nodeproxy/iptables/common"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Options are the parts of the rules that come from the configuration of this backend or from what the node's iptables
// and kernel can do, not from the cluster.
type Options struct {
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31.
	MasqueradeBit int
	// RandomFully randomises source ports of masqueradings, so that connections that race for one do not collide.
	// iptables has it since 1.6.2.
	RandomFully bool
	// CompactAbove is the number of endpoints, over all ServicePorts of a family, above which rules take their compact
	// form: no chain for each endpoint (but with session affinity), comments only in the rule that leads to a
	// ServicePort's chain, no such chain either for one with a cluster IP only and one or two endpoints, and one rule that
	// masquerades hairpin traffic for all. 0 is for never, which kernels without xt_bpf need.
	CompactAbove int
	// KeepCounters has every ServicePort keep a chain in the compact form too. Traffic recognises ServicePorts by their
	// chains; and what leads there loses its counter only when frontends near it in the dispatcher come or go, not whenever an
	// endpoint of theirs does.
	KeepCounters bool
	// TCPLiberal is set where net.netfilter.nf_conntrack_tcp_be_liberal is: then packets that conntrack calls invalid
	// are not dropped.
	TCPLiberal bool
}

// common is the part of the options that modes iptables and ipvs share.
func (o Options) common() common.Options {
	return common.Options{MasqueradeBit: o.MasqueradeBit, RandomFully: o.RandomFully, TCPLiberal: o.TCPLiberal}
}

// DefaultCompactAbove is where kube-proxy, too, begins to leave comments out. At every change that adds a rule, an nft
// kernel walks all rules and matches that can be reached from PREROUTING and OUTPUT. With 10,000 services of two endpoints
// that takes 80 ms if each endpoint has a chain with two rules, and everything a comment; in the compact form, under 40.
const DefaultCompactAbove = 1000

// localnetGuard is the one rule of KUBE-FIREWALL that is ours as well as the kubelet's: with route_localnet set, hosts on
// the node's network could otherwise reach what listens on its loopback address (CVE-2020-8558).
func localnetGuard() string {
	loopback := plan.IPv4.Loopback()
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
