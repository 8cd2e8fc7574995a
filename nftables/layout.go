package nftables

import (
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Options are what rules depend on besides the plan.
type Options struct {
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31. kube-proxy's default is 14.
	MasqueradeBit int
	// TCPLiberal is set where net.netfilter.nf_conntrack_tcp_be_liberal is: then packets that conntrack calls invalid are not dropped.
	TCPLiberal bool
}

// mostClients is how many clients are remembered for affinity. Anyone may send from many addresses; the next one is not remembered.
const mostClients = 1 << 20

// setID is a set or map of the table.
type setID uint8

const (
	services setID = iota
	servicesWithin
	kinds
	kindsWithin
	endpoints
	localEndpoints
	choices
	localChoices
	stickyEndpoints
	localStickyEndpoints
	affinity
	limited
	sourceRanges
	clusterIPs
	sameByte
	setCount
)

// sets are all sets of a family by their setID.
func sets(f plan.Family) []nft.Set {
	addr := uint32(nft.TypeIPv4)
	if f == plan.IPv6 {
		addr = nft.TypeIPv6
	}
	var (
		name     = nft.Concat{addr, nft.TypeProtocol, nft.TypeServicePort}
		number   = nft.Concat{nft.TypeClassID}
		mark     = nft.Concat{nft.TypeMark}
		endpoint = nft.Concat{addr, nft.TypeServicePort}
		index    = append(slices.Clone(name), nft.TypeMark)
		client   = append(slices.Clone(name), addr)
	)
	return []nft.Set{
		services:             {Name: names.NFTServices, Key: name, Data: number},
		servicesWithin:       {Name: names.NFTWithin, Key: name, Data: number},
		kinds:                {Name: names.NFTKinds, Key: number, Data: nft.Concat{nft.TypeVerdict}},
		kindsWithin:          {Name: names.NFTKindsWithin, Key: number, Data: nft.Concat{nft.TypeVerdict}},
		endpoints:            {Name: names.NFTEndpoints, Key: index, Data: endpoint},
		localEndpoints:       {Name: names.NFTLocalEndpoints, Key: index, Data: endpoint},
		choices:              {Name: names.NFTChoices, Key: index, Data: mark},
		localChoices:         {Name: names.NFTLocalChoices, Key: index, Data: mark},
		stickyEndpoints:      {Name: names.NFTStickyEndpoints, Key: index, Data: endpoint},
		localStickyEndpoints: {Name: names.NFTLocalStickyEndpoints, Key: index, Data: endpoint},
		affinity:             {Name: names.NFTAffinity, Key: client, Data: mark, Dynamic: true, Size: mostClients},
		limited:              {Name: names.NFTLimited, Key: name},
		sourceRanges:         {Name: names.NFTSourceRanges, Key: client, Interval: true},
		clusterIPs:           {Name: names.NFTClusterIPs, Key: nft.Concat{addr}},
		sameByte:             {Name: names.NFTSame, Key: nft.Concat{nft.TypeProtocol, nft.TypeProtocol}},
	}
}

// layout is what the rules of a family depend on.
type layout struct {
	family   plan.Family
	options  Options
	settings plan.Settings
	node     plan.Node
	// partial is as plan.Plan.Partial: then nothing is refused for want of a Service.
	partial bool
}

func (l *layout) rule() *builder { return &builder{family: l.family} }

func (l *layout) bit() uint32 { return 1 << l.options.MasqueradeBit }

// Priorities of the base chains. NAT goes before what other programs have at the usual priorities, -100 and 100: a Service's address
// and port is the Service's, as in mode iptables, whose rules come first in their chains.
const (
	priorityDNAT   = -101
	prioritySNAT   = 99
	priorityFilter = 0
)

// chains are those that do not depend on Services, each after all that it leads to.
func (l *layout) chains() []nft.ChainSpec {
	base := func(name, kind, hook string, number uint32, priority int32, rules ...nft.Rule) nft.ChainSpec {
		return nft.ChainSpec{Name: name, Hook: &nft.Hook{Type: kind, Name: hook, Number: number, Priority: priority}, Rules: rules}
	}
	out := []nft.ChainSpec{
		{Name: names.NFTReject, Rules: []nft.Rule{l.refuse()}},
		{Name: names.NFTRejectReset, Rules: []nft.Rule{l.rule().add("reject with tcp reset", &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}).out}},
		{Name: names.NFTDrop, Rules: []nft.Rule{l.rule().drop()}},
		{Name: names.NFTCheckSource, Rules: []nft.Rule{l.checkSource()}},
		{Name: names.NFTToKind, Rules: []nft.Rule{l.rule().byKind(names.NFTKinds)}},
		{Name: names.NFTToKindWithin, Rules: []nft.Rule{l.rule().byKind(names.NFTKindsWithin)}},
		{Name: names.NFTToNodePorts, Rules: []nft.Rule{l.rule().toKind(names.NFTServices, names.NFTToKind, true)}},
		{Name: names.NFTToServices, Rules: append([]nft.Rule{l.rule().toKind(names.NFTServices, names.NFTToKind, false)},
			l.atNodePortAddresses()...)},
		{Name: names.NFTUnknown, Rules: l.unknown()},
	}
	unknown := l.rule().tracked("ct state new", expr.CtKeySTATE, ctNew).jump(names.NFTUnknown)
	forward := []nft.Rule{unknown}
	if !l.options.TCPLiberal {
		// A packet that conntrack can't place is not translated back; its receiver would answer with a reset that kills the
		// connection it belongs to.
		forward = append(forward, l.rule().tracked("ct state invalid", expr.CtKeySTATE, ctInvalid).drop())
	}
	return append(out,
		base(names.NFTForward, "filter", "forward", unix.NF_INET_FORWARD, priorityFilter, forward...),
		base(names.NFTFilterOutput, "filter", "output", unix.NF_INET_LOCAL_OUT, priorityFilter, unknown),
		base(names.NFTPostrouting, "nat", "postrouting", unix.NF_INET_POST_ROUTING, prioritySNAT,
			// The mark goes once it has served, so that a packet that passes here again (in a tunnel) is not masqueraded again.
			l.rule().marked(l.bit()).mark(l.bit(), false).masquerade(),
			l.rule().comment("clients that are their own endpoint").tracked("ct status dnat", expr.CtKeySTATUS, ipsDstNAT).backToItself().masquerade()),
		base(names.NFTPrerouting, "nat", "prerouting", unix.NF_INET_PRE_ROUTING, priorityDNAT, l.rule().jump(names.NFTToServices)),
		base(names.NFTOutput, "nat", "output", unix.NF_INET_LOCAL_OUT, priorityDNAT, l.rule().jump(names.NFTToServices)),
	)
}

// refuse answers with the code of ICMP or ICMPv6 for a port that nobody listens on.
func (l *layout) refuse() nft.Rule {
	if l.family == plan.IPv6 {
		return l.rule().add("reject with icmpv6 type port-unreachable", &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 4}).out
	}
	return l.rule().add("reject with icmp type port-unreachable", &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 3}).out
}

// checkSource drops what source ranges do not let through. Without a map of verdicts, one rule does for all.
func (l *layout) checkSource() nft.Rule {
	b := l.rule()
	text, exprs := b.frontend()
	b.add(text+" @"+names.NFTLimited, append(exprs, contains(names.NFTLimited, 0))...)
	text, exprs = b.frontend()
	exprs = append(exprs, b.address(false, nameRegisters(l.family)), containsNot(names.NFTSourceRanges, 0))
	return b.add(text+" . "+b.ip()+" saddr != @"+names.NFTSourceRanges, exprs...).drop()
}

// unknown are the rules for new connections to cluster IPs that nobody has translated: neither this program nor another proxy. While not
// all Services are known, there are none.
func (l *layout) unknown() []nft.Rule {
	if l.partial {
		return nil
	}
	// What is local may be a program of the node's own at a cluster IP, such as a DNS cache.
	b := l.rule()
	b.add(b.ip()+" daddr @"+names.NFTClusterIPs, b.address(true, 0), contains(names.NFTClusterIPs, 0))
	rules := []nft.Rule{b.local(true, true).comment("ports that no Service has").goTo(names.NFTReject)}
	for _, r := range l.settings.ServiceCIDRs {
		if plan.FamilyOf(r.Addr()) == l.family {
			rules = append(rules, l.rule().within(true, r, false).local(true, true).comment("cluster IPs that no Service has").drop())
		}
	}
	return rules
}

// atNodePortAddresses lead to node ports, at those of the node's addresses where they answer. It is the kernel that says which
// addresses are the node's, so the rules stay when these change.
func (l *layout) atNodePortAddresses() []nft.Rule {
	loopback := l.family.Loopback()
	s := l.settings
	// While not even the Node is known, node ports that have answered go on to do so, if at more addresses.
	unknown := l.partial && s.NodePortAddresses.Primary && !l.node.IP(l.family).IsValid()
	if unknown || s.NodePortAddresses.All(l.family) {
		return []nft.Rule{l.rule().within(true, loopback, true).local(true, false).goTo(names.NFTToNodePorts)}
	}
	var rules []nft.Rule
	for _, r := range s.NodePortAddresses.Ranges(l.family, l.node) {
		b := l.rule()
		if r.Overlaps(loopback) {
			b.within(true, loopback, true)
		}
		rules = append(rules, b.within(true, r, false).local(true, false).goTo(names.NFTToNodePorts))
	}
	return rules
}

// chain is the chain of a kind.
func (l *layout) chain(k kind) nft.ChainSpec {
	var rules []nft.Rule
	if !k.nodePort && (k.treatment == external || k.treatment == split) {
		rules = append(rules, l.rule().jump(names.NFTCheckSource))
	}
	switch k.treatment {
	case internal:
		if l.settings.MasqueradeAll {
			rules = append(rules, l.rule().mark(l.bit(), true).out)
		} else if b := l.rule().fromPods(l.settings.DetectLocal, true); b != nil {
			rules = append(rules, b.mark(l.bit(), true).out)
		}
	case external:
		rules = append(rules, l.rule().mark(l.bit(), true).out)
	case split:
		if b := l.rule().fromPods(l.settings.DetectLocal, false); b != nil {
			rules = append(rules, b.toKind(names.NFTWithin, names.NFTToKindWithin, k.nodePort))
		}
		rules = append(rules, l.rule().local(false, false).mark(l.bit(), true).toKind(names.NFTWithin, names.NFTToKindWithin, k.nodePort))
		if k.count == 0 {
			return nft.ChainSpec{Name: k.chain(), Rules: append(rules, l.rule().drop())}
		}
	}
	return nft.ChainSpec{Name: k.chain(), Rules: append(rules, k.endpoints(l.family)...)}
}
