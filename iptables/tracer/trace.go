package tracer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/proxier/plan"
)

// Node is what rules may ask about the machine that they are on.
type Node struct {
	// Local reports whether an address is one of the machine's own, as the routing table "local" has it. It decides too
	// whether a packet is delivered or forwarded. It must not be nil.
	Local func(netip.Addr) bool
	// OutInterface names the interface by which packets to an address leave. If nil, that is not known, and a rule that
	// asks can't be traced.
	OutInterface func(netip.Addr) string
	// Recent reports whether an address is in a list of match "recent". If nil, all lists are empty.
	Recent func(list string, addr netip.Addr) bool
}

// Action is the end of a packet's way through the rules.
type Action string

// The possible ends.
const (
	Accept Action = "accept"
	Reject Action = "reject"
	Drop   Action = "drop"
)

// Outcome is one of the things that can become of a packet.
type Outcome struct {
	Action Action
	// Dst is where the packet went in the end, and DNAT is true where rules changed that.
	Dst  netip.AddrPort
	DNAT bool
	// Masquerade is true where the source was changed to an address of the machine.
	Masquerade bool
	// Delivered is true where Dst is an address of the machine itself. Such a packet, if it came from elsewhere, never
	// gets to where masquerading is done.
	Delivered bool
	// Probability is how likely this outcome is. Those of all outcomes of a packet add up to 1.
	Probability float64
	// Rules are those that matched on the way, in order; if several ways lead to this outcome, on the first of them.
	Rules []string
}

func (o Outcome) String() string {
	s := string(o.Action)
	if o.DNAT {
		s += " at " + o.Dst.String()
	}
	if o.Masquerade {
		s += " masqueraded"
	}
	return fmt.Sprintf("%s with probability %.6f", s, o.Probability)
}

// hook is a place in the network stack at which the kernel calls chains. Its text is the chains' name.
type hook string

const (
	preRouting  hook = "PREROUTING"
	input       hook = "INPUT"
	forward     hook = "FORWARD"
	output      hook = "OUTPUT"
	postRouting hook = "POSTROUTING"
)

// tablesOf are the tables that have a chain at a hook, in the order in which the kernel calls them.
var tablesOf = map[hook][]string{
	preRouting:  {"raw", "mangle", "nat"},
	input:       {"mangle", "filter", "security", "nat"},
	forward:     {"mangle", "filter", "security"},
	output:      {"raw", "mangle", "nat", "filter", "security"},
	postRouting: {"mangle", "nat"},
}

// packet is a packet on its way, as rules see it.
type packet struct {
	src, dst   netip.Addr
	protocol   string
	port       uint16
	in         string
	mark       uint32
	dnat       bool
	masquerade bool
	hook       hook
	node       *Node
}

// way is a packet with how it came to where it is. It is copied where chance divides it.
type way struct {
	packet
	probability float64
	rules       *step
	end         Action // empty while it goes on
}

// step is a list of matched rules, the last first.
type step struct {
	table string
	chain *chain
	rule  *rule
	prior *step
}

// Trace follows the first packet of a connection. Whether its addresses are local is asked of node, not of the packet.
// The outcomes are in order of destination. The error names the rule that can't be judged.
func (rs *Ruleset) Trace(pkt plan.Packet, node Node) ([]Outcome, error) {
	start := way{probability: 1, packet: packet{
		src: pkt.Src, dst: pkt.Dst, protocol: pkt.Protocol.Lower(), port: pkt.DstPort, in: pkt.InInterface, node: &node,
	}}
	if plan.FamilyOf(pkt.Src) != rs.family || plan.FamilyOf(pkt.Dst) != rs.family {
		return nil, fmt.Errorf("these are rules for %s, and the packet is %s", rs.family, pkt)
	}
	var ways []way
	var err error
	if pkt.Output {
		start.in = ""
		ways, err = rs.sent(start)
	} else {
		ways, err = rs.received(start)
	}
	if err != nil {
		return nil, err
	}
	return outcomes(ways), nil
}

// received follows a packet that came in: it is delivered or forwarded, by the destination that PREROUTING gave it.
func (rs *Ruleset) received(start way) ([]way, error) {
	return rs.pass([]way{start}, preRouting, nil, func(w way) ([]way, error) {
		if w.node.Local(w.dst) {
			return rs.pass([]way{w}, input, nil, nil)
		}
		return rs.pass([]way{w}, forward, nil, func(w way) ([]way, error) {
			return rs.pass([]way{w}, postRouting, nil, nil)
		})
	})
}

// sent follows a packet of the machine's own. If it stays on the machine it comes in again by interface lo; the nat table
// has made up its mind about the connection by then.
func (rs *Ruleset) sent(start way) ([]way, error) {
	return rs.pass([]way{start}, output, nil, func(w way) ([]way, error) {
		return rs.pass([]way{w}, postRouting, nil, func(w way) ([]way, error) {
			if !w.node.Local(w.dst) {
				return []way{w}, nil
			}
			w.in = "lo"
			return rs.pass([]way{w}, preRouting, []string{"nat"}, func(w way) ([]way, error) {
				return rs.pass([]way{w}, input, []string{"nat"}, nil)
			})
		})
	})
}

// pass takes ways through the tables of a hook, and what then still goes on to next.
func (rs *Ruleset) pass(ways []way, h hook, except []string, next func(way) ([]way, error)) ([]way, error) {
	for _, table := range tablesOf[h] {
		if slices.Contains(except, table) {
			continue
		}
		var after []way
		for _, w := range ways {
			if w.end != "" {
				after = append(after, w)
				continue
			}
			w.hook = h
			out, err := rs.walk(w, rs.tables[table][string(h)])
			if err != nil {
				return nil, fmt.Errorf("table %s at %s: %w", table, h, err)
			}
			after = append(after, out...)
		}
		ways = after
	}
	if next == nil {
		return ways, nil
	}
	var after []way
	for _, w := range ways {
		if w.end != "" {
			after = append(after, w)
			continue
		}
		out, err := next(w)
		if err != nil {
			return nil, err
		}
		after = append(after, out...)
	}
	return after, nil
}

// place is a position in a chain, and where to go on after its end.
type place struct {
	chain  *chain
	next   int
	caller *place
}

// walk takes a packet through a built-in chain. Every way that it may take comes out, ended or not.
func (rs *Ruleset) walk(start way, base *chain) ([]way, error) {
	type fork struct {
		way
		at place
	}
	var out []way
	todo := []fork{{start, place{chain: base}}}
	for len(todo) > 0 {
		f := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for walking := true; walking; {
			if f.at.next == len(f.at.chain.rules) {
				walking = f.way.back(&f.at, base)
				continue
			}
			r := f.at.chain.rules[f.at.next]
			f.at.next++
			chance, err := r.match(&f.packet)
			if err != nil {
				return nil, fmt.Errorf("chain %s, %s: %w", f.at.chain.name, r, err)
			}
			if chance == 0 {
				continue
			}
			if chance < 1 {
				other := f
				other.probability *= 1 - chance
				todo = append(todo, other)
				f.probability *= chance
			}
			f.rules = &step{base.table, f.at.chain, r, f.rules}
			if walking, err = rs.apply(r.target, &f.way, &f.at, base); err != nil {
				return nil, fmt.Errorf("chain %s, %s: %w", f.at.chain.name, r, err)
			}
		}
		out = append(out, f.way)
	}
	return out, nil
}

// match returns the probability that all of a rule's conditions hold. One that can't be judged does not matter where
// another does not hold.
func (r *rule) match(p *packet) (float64, error) {
	chance := 1.0
	var unknown error
	for _, m := range r.matches {
		c, err := m.match(p)
		if err != nil {
			unknown = cmp.Or(unknown, err)
			continue
		}
		if c == 0 {
			return 0, nil
		}
		chance *= c
	}
	return chance, unknown
}

// back leaves a chain: to behind the jump that led there, or, from a built-in chain, by its policy. A chain that was gone
// to, rather than jumped to, leaves by where the chain that went there would have left. It reports whether the walk of the
// table goes on.
func (w *way) back(at *place, base *chain) bool {
	if at.caller != nil {
		*at = *at.caller
		return true
	}
	if base.policy == "DROP" {
		w.end = Drop
	}
	return false
}

// apply does what a target says, and reports whether the walk of the table goes on.
func (rs *Ruleset) apply(t target, w *way, at *place, base *chain) (bool, error) {
	switch t := t.(type) {
	case jump:
		caller := at.caller
		if !t.goesTo {
			here := *at
			caller = &here
		}
		*at = place{chain: rs.tables[base.table][t.chain], caller: caller}
		return true, nil
	case leave:
		return w.back(at, base), nil
	case accept:
		return false, nil
	case drop:
		w.end = Drop
		return false, nil
	case reject:
		if w.hook == preRouting || w.hook == postRouting {
			return false, fmt.Errorf("REJECT is not possible at %s", w.hook)
		}
		w.end = Reject
		return false, nil
	case dnat:
		if w.hook != preRouting && w.hook != output {
			return false, fmt.Errorf("DNAT is not possible at %s", w.hook)
		}
		w.dnat, w.dst, w.port = true, t.addr, cmp.Or(t.port, w.port)
		return false, nil
	case masquerade:
		if w.hook != postRouting {
			return false, fmt.Errorf("MASQUERADE is not possible at %s", w.hook)
		}
		w.masquerade = true
		return false, nil
	case setMark:
		w.mark = w.mark&^t.clear ^ t.flip
	case unknownTarget:
		return false, t.error()
	}
	return true, nil
}

// outcomes adds up the ways that end alike.
func outcomes(ways []way) []Outcome {
	type end struct {
		action                      Action
		dst                         netip.AddrPort
		dnat, masquerade, delivered bool
	}
	index := map[end]int{}
	var out []Outcome
	for _, w := range ways {
		e := end{cmp.Or(w.end, Accept), netip.AddrPortFrom(w.dst, w.port), w.dnat, w.masquerade, w.node.Local(w.dst)}
		i, seen := index[e]
		if !seen {
			i = len(out)
			index[e] = i
			out = append(out, Outcome{Action: e.action, Dst: e.dst, DNAT: e.dnat, Masquerade: e.masquerade,
				Delivered: e.delivered, Rules: w.rules.list()})
		}
		out[i].Probability += w.probability
	}
	slices.SortStableFunc(out, func(a, b Outcome) int {
		return cmp.Or(a.Dst.Compare(b.Dst), strings.Compare(string(a.Action), string(b.Action)))
	})
	return out
}

func (s *step) list() []string {
	var out []string
	for ; s != nil; s = s.prior {
		out = append(out, fmt.Sprintf("%s: %s", s.table, s.rule))
	}
	slices.Reverse(out)
	return out
}
