// Package blocking finds rules of other programs that keep packets from a Service. It reads the rules of nftables, those of the nft
// variant of iptables among them, and those of the legacy variant, and judges what they do with packets to a Service, whose destination is known
// and whose source is not, and with the answers of its endpoints, of which it is the other way round.
//
// What a rule asks for besides that makes it uncertain whether it matches. A rule that drops is reported if all that it and those that lead there ask
// for holds and none before may have returned, or if it asks for the Service's address or port, or for the port of an answer, and for something unknown. One that does not ask for anything of the Service,
// such as one that drops invalid packets, is not. A policy that drops is reported unless a rule certainly accepts the packet.
package blocking

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Rule is a rule of another program, or the policy of its chain, that drops or rejects packets for a Service, or keeps them from being tracked.
type Rule struct {
	// Text is the rule, as far as it is understood; Chain is where it is.
	Text  string
	Chain nft.ChainID
	// Policy is true for the policy of the chain.
	Policy bool
	// What is the traffic that it concerns, and Answers whether it is what comes back from there.
	What    string
	Answers bool
	// Certain is true if nothing else decides whether it applies.
	Certain bool
	// Untracked is true for a rule that does not drop packets, but keeps them from being tracked, so that nothing translates them, Unmasqueraded
	// for one that keeps their source from being translated, and Diverted for one that decides first about their destination.
	Untracked, Unmasqueraded, Diverted bool
	// to is What without those who send it, which is from; both are empty where everybody does.
	to, from string
	// Legacy says that it is a rule of the legacy variant of iptables.
	Legacy bool
	// number is that of the rule in its chain, from 1; 0 for the policy. rules is where the chain is: both variants of iptables have some of the same name.
	number int
	rules  ruleset
	// Port is where a rule that diverts packets sends them on this node; 0 if that is not known, or elsewhere.
	Port uint16
}

// Place says where the rule is.
func (r Rule) Place() string {
	if r.Legacy {
		return r.Chain.String() + ", of iptables-legacy"
	}
	return r.Chain.String()
}

// Node is what is known of the node.
type Node struct {
	// Local reports whether an address is the node's.
	Local func(netip.Addr) bool
	// IPVS is true if IPVS translates destinations: behind INPUT, so that packets go on to OUTPUT and never through FORWARD.
	IPVS bool
	// Uplink is the interface by which packets from outside come; "" if that is not known. By returns the interface by which packets leave for an
	// address, "" if that is not known; nil knows of none.
	Uplink string
	By     func(netip.Addr) string
	// Pod is an address of each family that a Pod of this node may have, where Pods are told from other clients by their addresses; what they send to
	// cluster IPs is not masqueraded. PodsBy is an interface by which such a Pod's packets come; "" if none is known.
	Pod    map[plan.Family]netip.Addr
	PodsBy string
	// Tunnels are the interfaces by which endpoints elsewhere are reached in packets of another protocol, from which those of other nodes come.
	Tunnels []Tunnel
	// Variant is the variant of iptables that this program uses, nft or legacy; chains of the same names in the other one are a kube-proxy's, or were
	// left. It is "" if this program uses none, or it does not matter.
	Variant string
	// Mark has the bits of packets' marks that this program uses itself.
	Mark uint32
	// Bridges are the interfaces that are bridges.
	Bridges map[string]bool
	// Inside is true in the network namespace of the endpoints themselves, such as a Pod's, where this program has no rules.
	Inside bool
}

// Tunnel is an interface that sends packets in others: by UDP to a port, or by another protocol, whose port is 0.
type Tunnel struct {
	Name     string
	Protocol byte
	Port     uint16
}

// by is By, also where it is nil.
func (n Node) by(a netip.Addr) string {
	if n.By == nil {
		return ""
	}
	return n.By(a)
}

// mostEndpoints is how many endpoints of each ServicePort are looked at.
const mostEndpoints = 4

// mostFrontends is how many frontends of each ServicePort are looked at for their translation.
const mostFrontends = 32

// ruleset is where rules are read.
type ruleset interface {
	Bases() []nft.BaseChain
	// variant is that of iptables whose rules are among them.
	variant() string
	// judges returns what judges each rule of a chain.
	judges(nft.ChainID) ([]judge, error)
}

// judge says what a rule does with a packet.
type judge func(*packet) rule

// Find returns the rules that may keep packets from ServicePorts, in order of chain.
func Find(ctx context.Context, ports []*plan.ServicePort, n Node) ([]Rule, error) {
	rules, err := nft.ReadRuleset()
	if err != nil {
		return nil, err
	}
	defer rules.Close()
	s := &search{ctx: ctx, ports: ports, node: n}
	sets := newSets()
	defer sets.close()
	legacy, err := readLegacy(ctx, sets, n.Variant)
	s.unread = err
	all := []ruleset{nftRules{rules, sets}}
	if legacy != nil {
		all = append(all, legacy)
	}
	if err := s.look(all...); err != nil || len(s.found) == 0 {
		return nil, cmp.Or(err, s.unread)
	}
	return s.found, nil
}

// search is one call of Find.
type search struct {
	ctx   context.Context
	ports []*plan.ServicePort
	node  Node
	found []Rule
	// judged is how many rules have been judged.
	judged int
	// unread is why some chain could not be read.
	unread error
	// marks are those with which packets leave the base chains that have been looked at.
	marks map[marked]mark
}

// stages is the order of the hooks that a packet passes.
var stages = map[string]int{"ingress": 0, "prerouting": 1, "output": 1, "input": 2, "forward": 2, "postrouting": 3}

// base is a base chain, and where its rules are read.
type base struct {
	nft.BaseChain
	rules ruleset
}

// look looks at the chains of rulesets. It returns an error only if the context has ended.
func (s *search) look(from ...ruleset) error {
	var bases []base
	for _, rules := range from {
		for _, b := range rules.Bases() {
			if !s.ours(rules, b.ChainID) {
				bases = append(bases, base{b, rules})
			}
		}
	}
	slices.SortStableFunc(bases, func(a, b base) int {
		return cmp.Or(cmp.Compare(stages[a.Hook], stages[b.Hook]), cmp.Compare(a.Priority, b.Priority),
			cmp.Compare(a.Table, b.Table), cmp.Compare(a.Family, b.Family), cmp.Compare(a.Chain, b.Chain))
	})
	s.marks = map[marked]mark{}
	for len(bases) > 0 {
		n := 1 // of the same hook and priority
		for n < len(bases) && bases[n].Hook == bases[0].Hook && bases[n].Priority == bases[0].Priority {
			n++
		}
		if err := s.lookAt(bases[:n]); err != nil {
			return err
		}
		bases = bases[n:]
	}
	return nil
}

// lookAt looks at base chains that the kernel calls in an order which is not known, so that any may get the marks that the others set.
func (s *search) lookAt(chains []base) error {
	for mixed := len(chains) == 1; !mixed; {
		mixed = true
		for _, b := range chains {
			_, passed, err := s.walkBase(b)
			if err != nil {
				return err
			}
			for id, m := range passed {
				before := s.at(id)
				if both := before.join(m.mark).changed(before); both != before { // Whatever asks for it may drop.
					s.marks[id], mixed = both, false
				}
			}
		}
	}
	behind := map[marked]*marks{}
	for _, b := range chains {
		if b.Type == "nat" {
			if err := s.lookNAT(b); err != nil {
				return err
			}
			continue
		}
		found, passed, err := s.walkBase(b)
		if err != nil {
			return err
		}
		s.add(found)
		for id, m := range passed {
			if behind[id] == nil {
				behind[id] = &marks{}
			}
			behind[id].add(m.mark)
		}
	}
	for id, m := range behind {
		s.marks[id] = m.mark
	}
	return nil
}

// walkBase follows the packets of a base chain that is none for translation. It returns what may keep them from going on, and the marks of those
// that do.
func (s *search) walkBase(b base) (found []Rule, passed map[marked]*marks, err error) {
	passed = map[marked]*marks{}
	if b.Type == "nat" {
		return nil, nil, nil
	}
	for _, p := range packets(s.ports, b.BaseChain, s.node) {
		if p.mark = s.begin(&p, b.Hook); b.Family == "bridge" {
			p.mark = p.mark.forget(unmarked.known)
		}
		p.untracked = b.Priority < priorityTracking && (b.Hook == "prerouting" || b.Hook == "output") || b.Hook == "ingress"
		w := &walk{search: s, rules: b.rules, packet: p, found: map[string]bool{}, known: map[state]state{}}
		ended, err := w.chain(b.ChainID, true, false, 0)
		if s.ctx.Err() != nil {
			return nil, nil, s.ctx.Err()
		}
		if err != nil { // The rest of this chain is not known; others may tell.
			s.unread = cmp.Or(s.unread, err)
			ended = true
		}
		switch {
		case ended:
		case b.Drops:
			w.report(Rule{Text: "policy drop", Chain: b.ChainID, Policy: true, Certain: !w.accepted})
		default:
			w.passed.add(w.packet.mark)
		}
		found = append(found, w.out...)
		if b.Family == "bridge" { // Its hooks are called at other times than those of IP.
			continue
		}
		for _, local := range paths(b.Hook) {
			id := marked{p.key, p.answer, local, p.in}
			if passed[id] == nil {
				passed[id] = &marks{}
			}
			if w.passed.any {
				passed[id].add(w.passed.mark)
			}
		}
	}
	maps.DeleteFunc(passed, func(_ marked, m *marks) bool { return !m.any })
	return found, passed, nil
}

// add adds what has not been said.
func (s *search) add(list []Rule) {
	for _, r := range list {
		same := func(o Rule) bool {
			return (o.Text == r.Text || o.number == r.number && o.rules == r.rules) && o.Chain == r.Chain
		}
		said := func(o Rule) bool {
			enough := o.Certain && !r.Certain || (o.Certain || !r.Certain) && (r.Answers || !o.Answers)
			return same(o) && enough
		}
		if i := slices.IndexFunc(s.found, said); i >= 0 {
			if o := &s.found[i]; o.Certain && r.Certain && o.to != "" && o.to == r.to && !strings.Contains(o.from, r.from) {
				o.from += " and from " + r.from
				o.What = o.to + " from " + o.from
			}
			continue
		}
		if i := slices.IndexFunc(s.found, func(o Rule) bool { return same(o) && !o.Certain && r.Certain && o.Answers == r.Answers }); i >= 0 {
			s.found[i] = r
			continue
		}
		s.found = append(s.found, r)
	}
}

// lookNAT looks for rules that decide about the translation of packets before this program's do: in the same chain of iptables, whatever accepts, and in
// chains that are called before, or may be, what translates. Of chains with the priority of this program's, that which came first is. Each chain of nftables that is called later decides anew if nothing has been translated.
func (s *search) lookNAT(b base) error {
	judges, err := b.rules.judges(b.ChainID)
	if err != nil {
		s.unread = cmp.Or(s.unread, err)
		return nil
	}
	source := b.Hook == "postrouting"
	for _, p := range natPackets(s.ports, b.BaseChain, s.node) {
		beside := slices.ContainsFunc(judges, func(j judge) bool {
			return slices.ContainsFunc(j(&p).ends, func(e end) bool {
				return e.verdict == "jump" && s.ours(b.rules, nft.ChainID{Family: b.Family, Table: b.Table, Chain: e.to})
			})
		})
		if !beside && !s.node.Inside && (source || b.Priority > priorityDNAT || b.Priority == priorityDNAT && s.node.Variant == "") {
			continue
		}
		p.mark = s.begin(&p, b.Hook)
		w := &walk{search: s, rules: b.rules, packet: p, found: map[string]bool{}, known: map[state]state{}, beside: beside, even: !beside && !s.node.Inside && b.Priority == priorityDNAT}
		if _, err := w.chain(b.ChainID, true, false, 0); err != nil {
			if s.ctx.Err() != nil {
				return s.ctx.Err()
			}
			s.unread = cmp.Or(s.unread, err)
		}
		s.add(w.out)
	}
	return nil
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
		if b.Family == "ip" && f == plan.IPv6 || b.Family == "ip6" && f == plan.IPv4 {
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
				if p.in = n.Uplink; fe.Kind == plan.ClusterIP || b.Hook == "output" {
					p.in = ""
				}
				if b.Hook == "output" {
					p.what = fmt.Sprintf("the %s from this node", fe)
				}
				out = append(out, p)
				if b.Hook == "prerouting" && n.PodsBy != "" {
					p.what, p.in, p.src = fmt.Sprintf("the %s from Pods of this node (by %s)", fe, n.PodsBy), n.PodsBy, side{addr: n.Pod[f]}
					out = append(out, p)
					p.src = side{}
				}
			}
		}
	}
	return out
}

// kubeProxyTable is the table of kube-proxy in mode nftables.
const kubeProxyTable = "kube-proxy"

// ours reports whether a chain is one of this program, or of a kube-proxy that it replaces.
func (s *search) ours(rules ruleset, c nft.ChainID) bool {
	if s.node.Inside {
		return false
	}
	if c.Table == names.NFTables || c.Table == kubeProxyTable {
		return true
	}
	return names.IsOurs(names.Table(c.Table), c.Chain) && (s.node.Variant == "" || s.node.Variant == rules.variant())
}

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
	mark     mark
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
	// check is true for what asks for the health of a Service, and nat where it is the translation that is looked at.
	check, nat bool
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
	var out, special, answers []packet
	for _, sp := range ports {
		f := sp.Key.Family
		if b.Family == "ip" && f == plan.IPv6 || b.Family == "ip6" && f == plan.IPv4 {
			continue
		}
		var first []netip.AddrPort
		for _, fe := range sp.Frontends {
			if fe.Kind == plan.HealthCheckNodePort {
				if b.Hook == "prerouting" || b.Hook == "input" {
					p := packet{what: fmt.Sprintf("the %s from outside", fe), key: sp.Key, family: f, dst: side{fe.Addr, fe.Port, true}, protocol: netlink.Protocol(plan.TCP),
						here: yes, first: []netip.AddrPort{netip.AddrPortFrom(fe.Addr, fe.Port)}, dnat: no, in: n.Uplink, check: true}
					out = append(out, p)
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
				if n.Uplink != "" && fe.Kind != plan.ClusterIP && b.Hook != "output" {
					outside := p
					outside.in, outside.what = n.Uplink, fmt.Sprintf("the %s from outside (by %s)", fe, n.Uplink)
					out = append(out, outside)
				}
				if n.PodsBy != "" && b.Hook != "output" {
					pods := p
					pods.in, pods.src, pods.what = n.PodsBy, side{addr: n.Pod[f]}, fmt.Sprintf("the %s from Pods of this node (by %s)", fe, n.PodsBy)
					special = append(special, pods)
				}
				out = append(out, p)
			}
		}
		for i, ep := range sp.All() {
			here := n.Local(ep.Addr.Addr())
			if i < mostEndpoints && answersPass(b, here, n) {
				p := packet{what: "endpoint " + ep.Addr.String(), key: sp.Key, family: f, src: side{ep.Addr.Addr(), ep.Addr.Port(), true}, answer: true,
					protocol: netlink.Protocol(sp.Key.Protocol), here: maybe, first: first, dnat: yes}
				switch {
				case n.IPVS:
					p.dnat = maybe
				case b.Hook == "forward":
					p.here, p.in = no, n.by(ep.Addr.Addr())
				case b.Hook == "input":
					p.here = yes
					p.what += " to this node"
				}
				answers = append(answers, p)
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
			p.masqueraded = maybe
			out = append(out, p)
			if pod := n.Pod[f]; pod.IsValid() && pod != ep.Addr.Addr() && b.Hook == "forward" && !n.IPVS {
				from := p
				from.src, from.in, from.from, from.masqueraded = side{addr: pod}, n.PodsBy, "Pods of this node", no
				special = append(special, from)
			}
			if n.Uplink != "" && sp.HasExternal() && b.Hook == "forward" {
				outside := p
				outside.in, outside.from = n.Uplink, fmt.Sprintf("outside (by %s)", n.Uplink)
				if outside.masqueraded = maybe; sp.ExternalPolicy == plan.Cluster && !n.IPVS {
					outside.masqueraded = yes
				}
				special = append(special, outside)
			}
		}
	}
	return slices.Concat(out, special, answers, tunnelled(b, n))
}

// comeBy returns the packets of ServicePorts that come by interfaces: from outside to frontends, from Pods to cluster IPs, and answers of endpoints.
func comeBy(ports []*plan.ServicePort, devices []string, n Node) (out []packet) {
	var answers []packet
	for _, sp := range ports {
		f := sp.Key.Family
		var first []netip.AddrPort
		for _, fe := range sp.Frontends {
			by, who := n.Uplink, "outside"
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
	if slices.Contains(devices, n.Uplink) {
		answers = append(answers, tunnelled(nft.BaseChain{Hook: "prerouting"}, n)...)
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
		out = append(out, packet{what: what, family: plan.IPv4, protocol: t.Protocol, dst: side{port: t.Port, known: t.Port != 0}, here: yes, dnat: no, in: n.Uplink})
	}
	return out
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
