// Package blocking finds rules of other programs that keep packets from a Service. It reads the rules of nftables, those of the nft
// variant of iptables among them, and those of the legacy variant, and judges what they do with packets to a Service, whose destination is known,
// and of whose source at most the range is, and with the answers of its endpoints, of which it is the other way round.
//
// What a rule asks for besides that makes it uncertain whether it matches. A rule that drops is reported if all that it and those that lead there ask
// for holds and none before may have returned, or if it asks for the Service's address or port, or for the port of an answer, and for something unknown. One that does not ask for anything of the Service,
// such as one that drops invalid packets, is not. A policy that drops is reported unless a rule certainly accepts the packet.
package blocking

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/inspect/reality"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// finding is a rule of another program, or the policy of its chain, that concerns packets for a Service.
type finding struct {
	reality.Blocking
	chain nft.ChainID
	// to is What without those who send it, which is from; both are empty where everybody does.
	to, from string
	// number is that of the rule in its chain, from 1; 0 for the policy. rules is where the chain is: both variants of iptables have some of the same name.
	number int
	rules  ruleset
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
	// Pods are the ranges in which this node's Pods have their addresses, if it has any and they are told from other clients by these; what they send to
	// cluster IPs is not masqueraded. PodsBy is the interface by which the packets of all of them come; "" if there are several, or it is not known.
	Pods   map[plan.Family]netip.Prefix
	PodsBy string
	// NoNodePorts are the families in which node ports do not answer at the addresses of Uplink.
	NoNodePorts map[plan.Family]bool
	// Tunnels are the interfaces by which endpoints elsewhere are reached in packets of another protocol, from which those of other nodes come.
	Tunnels []reality.Tunnel
	// Variant is the variant of iptables that this program uses, nft or legacy; chains of the same names in the other one are a kube-proxy's, or were
	// left. It is "" if this program uses none, or it does not matter.
	Variant string
	// Mark has the bits of packets' marks that this program uses itself.
	Mark uint32
	// Near reports whether an address is in a network of this node; nil knows of none.
	Near func(netip.Addr) bool
	// Bridges are the interfaces that are bridges.
	Bridges map[string]bool
	// Inside is true in the network namespace of the endpoints themselves, such as a Pod's, where this program has no rules.
	Inside bool
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
func Find(ctx context.Context, ports []*plan.ServicePort, n Node) ([]reality.Blocking, error) {
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
	all := []ruleset{readNFT(rules, sets)}
	if legacy != nil {
		all = append(all, legacy)
	}
	if err := s.look(all...); err != nil {
		return nil, err
	}
	var out []reality.Blocking
	for _, f := range s.found {
		if !f.ICMP || !s.clamped {
			out = append(out, f.Blocking)
		}
	}
	if len(out) == 0 {
		return nil, s.unread
	}
	return out, nil
}

// search is one call of Find.
type search struct {
	ctx   context.Context
	ports []*plan.ServicePort
	node  Node
	found []finding
	// judged is how many rules have been judged.
	judged int
	// unread is why some chain could not be read.
	unread error
	// clamped says that some rule limits how long packets of TCP are, so that no errors are needed.
	clamped bool
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
func (s *search) walkBase(b base) (found []finding, passed map[marked]*marks, err error) {
	passed = map[marked]*marks{}
	if b.Type == "nat" {
		return nil, nil, nil
	}
	admitted := map[string]map[string]bool{} // who is known to send it, and is admitted
	for _, p := range packets(s.ports, b.BaseChain, s.node) {
		p.untracked = b.Priority < priorityTracking && (b.Hook == "prerouting" || b.Hook == "output") || b.Hook == "ingress"
		w := s.walk(b, p)
		if b.Family == "bridge" {
			w.packet.mark = w.packet.mark.forget(unmarked.known)
		}
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
			w.report(b.ChainID, 0, reality.Blocking{Rule: "policy drop", Policy: true, Certain: !w.accepted})
		default:
			w.passed.add(w.packet.mark)
		}
		found = append(found, w.out...)
		if p.elsewhere && p.from != "" && ended && len(w.out) == 0 {
			if admitted[p.what] == nil {
				admitted[p.what] = map[string]bool{}
			}
			admitted[p.what][p.from] = true
		}
		s.clamped = s.clamped || w.clamps && p.family == plan.IPv4 && (b.Hook == "forward" || b.Hook == "postrouting")
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
	all := 1 // Pods of this node, and hosts outside: to endpoints elsewhere, nobody else sends.
	if slices.ContainsFunc(s.ports, (*plan.ServicePort).HasExternal) {
		all = 2
	}
	found = slices.DeleteFunc(found, func(r finding) bool {
		return r.Policy && !r.Certain && r.from == "" && !r.Answers && len(admitted[r.What]) == all
	})
	return found, passed, nil
}

// add adds what has not been said.
func (s *search) add(list []finding) {
	for _, r := range list {
		same := func(o finding) bool {
			return (o.Rule == r.Rule || o.number == r.number && o.rules == r.rules) && o.chain == r.chain && o.ICMP == r.ICMP
		}
		said := func(o finding) bool {
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
		if i := slices.IndexFunc(s.found, func(o finding) bool { return same(o) && !o.Certain && r.Certain && o.Answers == r.Answers }); i >= 0 {
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
	for _, p := range slices.Concat(fromPods(s.ports, b.BaseChain, s.node), natPackets(s.ports, b.BaseChain, s.node)) {
		beside := !p.sources && slices.ContainsFunc(judges, func(j judge) bool {
			return slices.ContainsFunc(j(&p).ends, func(e end) bool {
				return e.verdict == "jump" && s.ours(b.rules, nft.ChainID{Family: b.Family, Table: b.Table, Chain: e.to})
			})
		})
		alone := !beside && !p.sources && !s.node.Inside
		if alone && (b.Hook == "postrouting" || b.Priority > priorityDNAT || b.Priority == priorityDNAT && s.node.Variant == "") {
			continue
		}
		w := s.walk(b, p)
		w.beside, w.even = beside, alone && b.Priority == priorityDNAT
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
