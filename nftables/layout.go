package nftables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

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
	// TCPLiberal is set if net.netfilter.nf_conntrack_tcp_be_liberal is: then packets that conntrack finds invalid are not dropped.
	TCPLiberal bool
	// Count counts the connections to each frontend.
	Count bool
}

// sets returns the sets of a family by setID, with counters if they are to count.
func (o Options) sets(f plan.Family) []nft.Set {
	out := sets(f)
	out[services].Counted = o.Count
	return out
}

// Affinity remembers clients in several maps, each for a share of all frontends, and mostClients in each: anyone may send to a frontend from many
// addresses, and only frontends of the same share are left without room then. Further clients are not remembered.
const (
	affinityShares = 8
	mostClients    = 1 << 17
)

// shareName returns the name of a map of clients.
func shareName(share int) string { return fmt.Sprintf("%s-%d", names.NFTAffinity, share) }

// collectClients is how often the kernel removes clients that were away for too long. With a million of them, each time takes it a tenth of
// a second, and by itself it would do that each second.
const collectClients = 30 * time.Second

// setID identifies a set or map of the table.
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
	limited
	sourceRanges
	clusterIPs
	sameByte
	affinity // the first of its shares
	setCount = affinity + affinityShares
)

// remembers reports whether a set is a map of clients, whose elements rules add.
func (s setID) remembers() bool { return s >= affinity }

// sets returns all sets of a family, indexed by setID.
func sets(f plan.Family) []nft.Set {
	addr := uint32(nft.TypeIPv4)
	if f == plan.IPv6 {
		addr = nft.TypeIPv6
	}
	var (
		name     = nft.Concat{addr, nft.TypeProtocol, nft.TypeServicePort}
		number   = nft.Concat{nft.TypeClassID}
		endpoint = nft.Concat{addr, nft.TypeServicePort}
		index    = append(slices.Clone(name), nft.TypeClassID) // as the packet has the number in its priority
		client   = append(slices.Clone(name), addr)
	)
	out := []nft.Set{
		services:             {Name: names.NFTServices, Key: name, Data: number},
		servicesWithin:       {Name: names.NFTWithin, Key: name, Data: number},
		kinds:                {Name: names.NFTKinds, Key: number, Data: nft.Concat{nft.TypeVerdict}},
		kindsWithin:          {Name: names.NFTKindsWithin, Key: number, Data: nft.Concat{nft.TypeVerdict}},
		endpoints:            {Name: names.NFTEndpoints, Key: index, Data: endpoint},
		localEndpoints:       {Name: names.NFTLocalEndpoints, Key: index, Data: endpoint},
		choices:              {Name: names.NFTChoices, Key: index, Data: number},
		localChoices:         {Name: names.NFTLocalChoices, Key: index, Data: number},
		stickyEndpoints:      {Name: names.NFTStickyEndpoints, Key: index, Data: endpoint},
		localStickyEndpoints: {Name: names.NFTLocalStickyEndpoints, Key: index, Data: endpoint},
		limited:              {Name: names.NFTLimited, Key: name},
		sourceRanges:         {Name: names.NFTSourceRanges, Key: append(slices.Clone(client), nft.TypeServicePort)}, // the last is the prefix's length
		clusterIPs:           {Name: names.NFTClusterIPs, Key: nft.Concat{addr}},
		sameByte:             {Name: names.NFTSame, Key: nft.Concat{nft.TypeProtocol, nft.TypeProtocol}},
	}
	for share := range affinityShares {
		out = append(out, nft.Set{Name: shareName(share), Key: client, Data: number, Dynamic: true, Size: mostClients, Collect: collectClients})
	}
	return out
}

// layout has everything that the rules of a family depend on.
type layout struct {
	family   plan.Family
	options  Options
	settings plan.Settings
	node     plan.Node
	// partial is plan.Plan.Partial: if set, no connection is rejected for lack of a Service.
	partial bool
}

func layoutOf(p *plan.Plan, f plan.Family, o Options) *layout {
	return &layout{family: f, options: o, settings: p.Settings, node: p.Node, partial: p.Partial}
}

// desired returns the chains and elements that a plan asks for, and the kinds in use, where the kernel has before of each ServicePort.
func (l *layout) desired(p *plan.Plan, before func(*plan.ServicePort) written) (chains []nft.Chain, elements map[id]value, used map[kind]bool) {
	elements, used = map[id]value{}, map[kind]bool{}
	for _, sp := range p.Sorted(l.family) {
		l.fill(place(before(sp), sp), elements, used)
	}
	maps.Copy(elements, fixed(used))
	return append(l.kindChains(used), l.chains()...), elements, used
}

func (l *layout) rule() *builder { return &builder{family: l.family} }

func (l *layout) bit() uint32 { return 1 << l.options.MasqueradeBit }

// Priorities of the base chains. NAT comes before other programs' chains at the usual priorities, -100 and 100: a Service's address
// and port belong to the Service, as in mode iptables, whose rules are the first of their chains.
const (
	priorityDNAT   = -101
	prioritySNAT   = 99
	priorityFilter = 0
)

// chains returns the chains that do not depend on Services, each after those it leads to.
func (l *layout) chains() []nft.Chain {
	base := func(name, kind, hook string, priority int32, rules ...nft.Rule) nft.Chain {
		return nft.Chain{Name: name, Hook: &nft.Hook{Type: kind, Name: hook, Priority: priority}, Rules: rules}
	}
	out := []nft.Chain{
		{Name: names.NFTReject, Rules: []nft.Rule{l.reject()}},
		{Name: names.NFTRejectReset, Rules: []nft.Rule{l.rejectReset()}},
		{Name: names.NFTDrop, Rules: []nft.Rule{l.rule().drop()}},
		{Name: names.NFTCheckRanges, Rules: l.checkRanges()},
		{Name: names.NFTCheckSource, Rules: []nft.Rule{l.checkSource()}},
	}
	for _, w := range ways {
		out = append(out, w.endpointChains(l.family)...)
	}
	out = append(out, []nft.Chain{
		{Name: names.NFTToKindWithin, Rules: []nft.Rule{l.rule().byKind(names.NFTKindsWithin)}},
		{Name: names.NFTSplitPorts, Rules: l.split(true)},
		{Name: names.NFTSplit, Rules: append([]nft.Rule{l.rule().hasBits(nodePortBit).goTo(names.NFTSplitPorts),
			l.rule().jump(names.NFTCheckSource)}, l.split(false)...)},
		{Name: names.NFTToKind, Rules: []nft.Rule{l.rule().hasBits(splitBit).jump(names.NFTSplit), l.rule().byKind(names.NFTKinds)}},
		{Name: names.NFTToKindAgain, Rules: []nft.Rule{l.rule().jump(names.NFTToKind), l.rule().drop()}},
		{Name: names.NFTToNodePorts, Rules: l.toServices(true)},
		{Name: names.NFTToServices, Rules: slices.Concat([]nft.Rule{l.noDestination()}, l.toServices(false), l.atNodePortAddresses())},
		{Name: names.NFTUnknown, Rules: l.unknown()},
	}...)
	unknown := l.rule().tracked("ct state new", expr.CtKeySTATE, ctNew).jump(names.NFTUnknown)
	forward := []nft.Rule{unknown}
	if !l.options.TCPLiberal {
		// A packet that conntrack can't assign to a connection is not translated back; its receiver would answer with a reset,
		// which would end the connection.
		forward = append(forward, l.rule().tracked("ct state invalid", expr.CtKeySTATE, ctInvalid).drop())
	}
	return append(out,
		base(names.NFTForward, "filter", "forward", priorityFilter, forward...),
		base(names.NFTFilterOutput, "filter", "output", priorityFilter, unknown),
		base(names.NFTPostrouting, "nat", "postrouting", prioritySNAT,
			// The mark is cleared, so that a packet that passes here again (in a tunnel) is not masqueraded again.
			l.rule().marked(l.bit()).mark(l.bit(), false).masquerade(),
			l.rule().comment("clients that are their own endpoint").tracked("ct status dnat", expr.CtKeySTATUS, ipsDstNAT).backToItself().masquerade()),
		base(names.NFTPrerouting, "nat", "prerouting", priorityDNAT, l.rule().jump(names.NFTToServices)),
		base(names.NFTOutput, "nat", "output", priorityDNAT, l.rule().jump(names.NFTToServices)),
	)
}

// toServices are the rules that lead packets to what is done with traffic to their frontend. The kernel decides at each lookup anew which
// transactions it sees. So a transaction may remove what a packet's last lookup led to before its next one. No rule matches such a packet,
// and it comes back and begins again, with what is in force now. Where even that leads to nothing, it is dropped, for its client
// to send it again: without a translation, it would go on to an address that is only a Service's, and connection tracking would keep its
// flow like that. Some kernels find no element of a frontend at all for the moment in which it is replaced.
func (l *layout) toServices(nodePort bool) []nft.Rule {
	return []nft.Rule{
		l.rule().kindIn(names.NFTServices, nodePort).jump(names.NFTToKind),
		l.rule().comment("changed meanwhile").kindIn(names.NFTServices, nodePort).goTo(names.NFTToKindAgain),
	}
}

// noDestination passes packets to noAddress over, which a neighbour may send: in services they would find node ports.
func (l *layout) noDestination() nft.Rule {
	a := noAddress(l.family)
	return l.rule().comment("not the node ports of the maps").within(true, netip.PrefixFrom(a, a.BitLen()), false).ret()
}

// rejectReset answers with a TCP reset. Only TCP comes here; as input, nft requires the comparison.
func (l *layout) rejectReset() nft.Rule {
	return l.rule().add("meta l4proto tcp", loadProtocol(0), equals([]byte{unix.IPPROTO_TCP})).
		add("reject with tcp reset", &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}).out
}

// reject answers with ICMP's or ICMPv6's "port unreachable".
func (l *layout) reject() nft.Rule {
	if l.family == plan.IPv6 {
		return l.rule().add("reject with icmpv6 type port-unreachable", &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 4}).out
	}
	return l.rule().add("reject with icmp type port-unreachable", &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 3}).out
}

// checkSource leads packets to a load balancer IP that has source ranges to where these are looked up.
func (l *layout) checkSource() nft.Rule {
	b := l.rule()
	text, exprs := b.frontend()
	return b.add(text+" @"+names.NFTLimited, append(exprs, contains(names.NFTLimited))...).goTo(names.NFTCheckRanges)
}

// checkRanges drops packets from outside the source ranges of their frontend. It looks for a range of each length. A set of intervals would take
// one lookup, but the kernel's time for a change of it grows with all ranges of all Services: 10,000 take 4 s to remove.
func (l *layout) checkRanges() []nft.Rule {
	var rules []nft.Rule
	for bits := l.family.Bits(); bits > 0; bits -= rangeStep(l.family) {
		rules = append(rules, l.rule().fromRange(bits).ret())
	}
	return append(rules, l.rule().comment("outside the source ranges").drop())
}

// unknown returns the rules for new connections to cluster IPs that neither this program nor another proxy has translated. While not
// all Services are known, there are none.
func (l *layout) unknown() []nft.Rule {
	if l.partial {
		return nil
	}
	// A cluster IP may be assigned to the node itself, for a program such as a DNS cache.
	b := l.rule()
	b.add(b.ip()+" daddr @"+names.NFTClusterIPs, b.address(true, 0), contains(names.NFTClusterIPs))
	rules := []nft.Rule{
		// A client that has found no rules sends its first packet again, before the flow that is tracked since then has been removed and
		// packets of it are translated. It is to send another one, and not to give up.
		l.rule().comment("begun before there were rules").tracked("ct status confirmed", expr.CtKeySTATUS, ipsConfirmed).ret(),
		b.local(true, true).comment("ports that no Service has").goTo(names.NFTReject),
	}
	for _, r := range l.settings.ServiceCIDRs {
		if plan.FamilyOf(r.Addr()) == l.family {
			rules = append(rules, l.rule().within(true, r, false).local(true, true).comment("cluster IPs that no Service has").drop())
		}
	}
	return rules
}

// atNodePortAddresses returns the rules that lead to node ports, at the addresses of the node where they answer. The kernel decides
// which addresses are the node's, so the rules stay when these change.
func (l *layout) atNodePortAddresses() []nft.Rule {
	loopback := l.family.Loopback()
	s := l.settings
	if s.NodePortAddresses.All(l.family) {
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

// split are the rules that take what pods and the node itself send to frontends under policy Local to the kinds for that. They come
// before the chains of kinds: at each new kind the kernel follows every way that a packet might take, so if each kind's chain led to
// the kinds within, its time would grow with the square of their number.
func (l *layout) split(nodePort bool) []nft.Rule {
	var rules []nft.Rule
	if b := l.rule().fromPods(l.settings.DetectLocal, false); b != nil {
		rules = append(rules, b.kindIn(names.NFTWithin, nodePort).goTo(names.NFTToKindWithin))
	}
	return append(rules, l.rule().local(false, false).mark(l.bit(), true).kindIn(names.NFTWithin, nodePort).goTo(names.NFTToKindWithin))
}

// chain is the chain of a kind.
func (l *layout) chain(k kind) nft.Chain {
	var rules []nft.Rule
	switch k.treatment {
	case internal:
		if l.settings.MasqueradeAll {
			rules = append(rules, l.rule().mark(l.bit(), true).out)
		} else if b := l.rule().fromPods(l.settings.DetectLocal, true); b != nil {
			rules = append(rules, b.mark(l.bit(), true).out)
		}
	case external:
		if !k.nodePort {
			rules = append(rules, l.rule().jump(names.NFTCheckSource))
		}
		rules = append(rules, l.rule().mark(l.bit(), true).out)
	case split:
		if k.count == 0 {
			return nft.Chain{Name: k.chain(), Rules: []nft.Rule{l.rule().drop()}}
		}
	}
	return nft.Chain{Name: k.chain(), Rules: append(rules, k.endpoints(l.family)...)}
}
