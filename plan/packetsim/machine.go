// Package packetsim simulates what a machine does with a packet: its possible outcomes, and the rules that lead to each.
//
// It follows a connection's first packet through the kernel's hooks: chains of rules, address translation, routing, IPVS. Where a rule
// chooses at random, or IPVS has several real servers, each choice is followed, so the result is every possible outcome with its exact
// probability.
//
// The package knows no syntax: a Machine is data. A front end makes Rules of one kind of rules, such as those of iptables, and attaches
// their chains to hooks; package restore is the one for texts of iptables. What a front end does not know has to be an error, as soon as a packet
// meets it at the latest, never a guess.
//
// IPVS behaves as with the sysctl net.ipv4.vs.conntrack set to 1; otherwise nothing that it sends could be masqueraded. Not
// simulated are replies, persistence beyond a client's first connection, and limits of real servers.
package packetsim

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// Machine is what packets of one family meet.
type Machine struct {
	Family plan.Family
	// Tables are all chains by table and name. A rule leads only to chains of its own table.
	Tables map[string]map[string]*Chain
	// Load makes a chain that a rule leads to and Tables lacks; it returns nil if there is no such chain. If Load is nil, Tables has all
	// chains.
	Load    func(table, name string) (*Chain, error)
	Sets    map[string]*Set
	Servers map[ServerKey]*Server
	// Added are addresses and ranges that are local in addition to those of Node.Local.
	Added map[netip.Prefix]bool
	// Diverted are destinations whose packets are delivered although their address is not local.
	Diverted map[plan.Address]bool

	stations map[Hook][]station
}

// Chain is a chain of rules.
type Chain struct {
	Name  string
	Base  bool // It is attached to a hook.
	Drop  bool // The policy of a base chain is to drop packets rather than to accept them.
	Rules []Rule
}

// Rule is one rule of a chain. Its String says where it was found and how it was written.
type Rule interface {
	fmt.Stringer
	// Eval adds to effects what the rule may do with a packet, each with its probability; nothing if the rule does not match. Where the
	// probabilities add up to less than 1, the packet otherwise goes on to the next rule as it is. Eval must not change p, nor keep it. The
	// error says why that is not known.
	Eval(p *Packet, effects []Effect) ([]Effect, error)
}

// Effect is one thing that a rule may do with a packet.
type Effect struct {
	Probability float64
	Packet      Packet // as the rule leaves it
	// End is empty while the packet goes on. Accept ends the walk of the base chain, anything else the packet's whole way.
	End   Action
	Next  Next
	Chain string // for Jump and Goto
	// Elements are those of sets and maps by which the rule does this, as a user sees them.
	Elements []string
}

// Next says where a packet goes on after a rule.
type Next int

// The places where it may go on.
const (
	Continue Next = iota // at the next rule
	Jump                 // in another chain, from whose end it comes back
	Goto                 // in another chain, from whose end it goes to where the end of this one leads
	Return               // at the end of the chain
)

// station is a place at a hook at which something happens to packets: a base chain, or IPVS, which has no chain.
type station struct {
	priority int
	table    string
	nat      bool
	chain    *Chain
}

// New returns a machine without rules.
func New(f plan.Family) *Machine {
	m := &Machine{Family: f, Tables: map[string]map[string]*Chain{}, Sets: map[string]*Set{}, Servers: map[ServerKey]*Server{},
		Added: map[netip.Prefix]bool{}, Diverted: map[plan.Address]bool{}, stations: map[Hook][]station{}}
	// IPVS looks at new connections right before what translates sources at INPUT, and right after what translates destinations at
	// OUTPUT.
	m.station(Input, station{priority: 98, table: "ipvs"})
	m.station(Output, station{priority: -98, table: "ipvs"})
	return m
}

// Attach adds a base chain to a table, at a hook. Chains at a hook are walked in the order of their priorities, which are those of
// netfilter. With nat, the chain decides how addresses of a connection are translated, which is decided once in each direction.
func (m *Machine) Attach(table string, c *Chain, h Hook, priority int, nat bool) {
	if m.Tables[table] == nil {
		m.Tables[table] = map[string]*Chain{}
	}
	c.Base = true
	m.Tables[table][c.Name] = c
	m.station(h, station{priority, table, nat, c})
}

func (m *Machine) station(h Hook, s station) {
	m.stations[h] = append(m.stations[h], s)
	slices.SortStableFunc(m.stations[h], func(a, b station) int { return cmp.Compare(a.priority, b.priority) })
}

// IsAdded reports whether an address is one of Added, or in a range of it. A kernel with its usual settings takes no packet in whose
// source is such an address; Trace takes it.
func (m *Machine) IsAdded(a netip.Addr) bool {
	if m.Added[netip.PrefixFrom(a, a.BitLen())] {
		return true
	}
	for prefix := range m.Added {
		if !prefix.IsSingleIP() && prefix.Contains(a) {
			return true
		}
	}
	return false
}
