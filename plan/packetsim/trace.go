package packetsim

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
)

// Node answers what rules may ask about the machine.
type Node struct {
	// Local reports whether an address is one of the machine's own, as in its routing table "local" without the additions of
	// Ruleset.RestoreAddresses. It also decides whether a packet is delivered or forwarded. It must not be nil.
	Local func(netip.Addr) bool
	// OutInterface names the interface by which packets to an address leave. If it is nil, a rule that asks can't be traced.
	OutInterface func(netip.Addr) string
	// Recent reports whether an address is in a list of match "recent". If nil, all lists are empty.
	Recent func(list string, addr netip.Addr) bool
}

// Action is the end of a packet's path through the rules.
type Action string

// The possible ends.
const (
	Accept Action = "accept"
	Reject Action = "reject"
	Drop   Action = "drop"
)

// Outcome is one possible outcome for a packet.
type Outcome struct {
	Action Action
	// Dst is the final destination; DNAT is true if rules or IPVS changed it.
	Dst  netip.AddrPort
	DNAT bool
	// Masquerade is true if the source was changed to an address of the machine.
	Masquerade bool
	// Delivered is true if Dst is an address of the machine itself. Such a packet, if it came from elsewhere, does not reach the
	// hook that masquerades.
	Delivered bool
	// Probability is the probability of this outcome. Those of all outcomes of a packet add up to 1.
	Probability float64
	// Rules are those that matched on the way, in order, and the lines of the virtual server and destination that IPVS
	// took; if several ways lead to this outcome, on the first of them.
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

// natTable is walked once in each direction of address translation: what it decided holds for the connection.
// ipvsStation is no table, but has a place among them.
const (
	natTable    = "nat"
	ipvsStation = "ipvs"
)

// tablesOf are the tables that have a chain at a hook, in the order in which the kernel calls them. IPVS takes new
// connections right before what table nat does with sources, and right after what it does with destinations.
var tablesOf = map[hook][]string{
	preRouting:  {"raw", "mangle", natTable},
	input:       {"mangle", "filter", "security", ipvsStation, natTable},
	forward:     {"mangle", "filter", "security"},
	output:      {"raw", "mangle", natTable, ipvsStation, "filter", "security"},
	postRouting: {"mangle", natTable},
}

// manipulates says which of a packet's addresses table nat may translate at a hook: its destination (0) or source (1).
var manipulates = map[hook]int{preRouting: 0, output: 0, input: 1, postRouting: 1}

// packet is a packet on its way, as rules see it.
type packet struct {
	src, dst   netip.Addr
	original   netip.Addr // where it was sent
	protocol   string
	port       uint16
	in         string
	mark       uint32
	dnat       bool // by a rule; what IPVS does is not in the connection's state
	masquerade bool
	hook       hook
	node       *Node
	ruleset    *Ruleset
	// virtual is where the packet was sent when IPVS took it; zero if IPVS did not.
	virtual netip.AddrPort
}

// way is a packet and its path so far. It is copied at each random choice.
type way struct {
	packet
	probability float64
	rules       *step
	end         Action  // empty while it goes on
	leaves      bool    // IPVS has taken it off its hook, and sends it again
	decided     [2]bool // whether table nat has decided about the destination, and about the source
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
		src: pkt.Src, dst: pkt.Dst, original: pkt.Dst, protocol: pkt.Protocol.Lower(), port: pkt.DstPort, in: pkt.InInterface,
		node: &node, ruleset: rs,
	}}
	if plan.FamilyOf(pkt.Src) != rs.family || plan.FamilyOf(pkt.Dst) != rs.family {
		return nil, fmt.Errorf("these are rules for %s, and the packet is %s", rs.family, pkt)
	}
	first := preRouting
	if pkt.Output {
		start.in, first = "", output
	}
	ways, err := rs.follow(start, first)
	if err != nil {
		return nil, err
	}
	return outcomes(ways), nil
}

// follow takes a way through a hook, and the resulting ways through the following hooks, until every way has ended.
func (rs *Ruleset) follow(start way, h hook) ([]way, error) {
	ways, err := rs.pass(start, h)
	if err != nil {
		return nil, err
	}
	var out []way
	for _, w := range ways {
		next := w.next()
		if next == "" {
			out = append(out, w)
			continue
		}
		more, err := rs.follow(w, next)
		if err != nil {
			return nil, err
		}
		out = append(out, more...)
	}
	return out, nil
}

// next prepares a packet for the hook after the one that it has passed, and returns that hook; "" at the end. An incoming packet is
// delivered or forwarded by its destination after PREROUTING. A packet of the machine to itself comes in again by interface lo.
func (w *way) next() hook {
	switch {
	case w.end != "":
		return ""
	case w.leaves:
		w.leaves, w.in = false, ""
		return output
	case w.hook == preRouting && w.delivered():
		return input
	case w.hook == preRouting:
		return forward
	case w.hook == forward || w.hook == output:
		return postRouting
	case w.hook == postRouting && w.delivered():
		w.in = "lo"
		return preRouting
	}
	return ""
}

// pass takes a way through the tables of a hook, and through IPVS where that has its place.
func (rs *Ruleset) pass(start way, h hook) ([]way, error) {
	start.hook = h
	ways := []way{start}
	for _, table := range tablesOf[h] {
		var after []way
		for _, w := range ways {
			switch {
			case w.end != "" || w.leaves || table == natTable && w.decided[manipulates[h]]:
				after = append(after, w)
				continue
			case table == ipvsStation:
				after = append(after, rs.schedule(w)...)
				continue
			case table == natTable:
				w.decided[manipulates[h]] = true
			}
			out, err := rs.walk(w, rs.tables[table][string(h)])
			if err != nil {
				return nil, fmt.Errorf("table %s at %s: %w", table, h, err)
			}
			after = append(after, out...)
		}
		ways = after
	}
	return ways, nil
}

// outcomes merges the ways that end alike.
func outcomes(ways []way) []Outcome {
	type end struct {
		action                      Action
		dst                         netip.AddrPort
		dnat, masquerade, delivered bool
	}
	index := map[end]int{}
	var out []Outcome
	for _, w := range ways {
		e := end{cmp.Or(w.end, Accept), netip.AddrPortFrom(w.dst, w.port),
			w.dnat || w.virtual.IsValid(), w.masquerade, w.local(w.dst)}
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
