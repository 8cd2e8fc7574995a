package packetsim

import (
	"fmt"
	"slices"

	"nodeproxy/plan"
)

// way is a packet and its path so far. It is copied at each random choice.
type way struct {
	Packet
	probability float64
	rules       *step
	end         Action // empty while it goes on
	leaves      bool   // IPVS has taken it off its hook, and sends it again
	// walked says in which directions chains of nat have been walked, at this hook or before; decided, before this hook. The first
	// direction is that of destinations, the second that of sources.
	walked, decided [2]bool
}

// manipulates says which of a packet's addresses can be translated at a hook: its destination (0) or source (1).
var manipulates = map[Hook]int{PreRouting: 0, Output: 0, Input: 1, PostRouting: 1}

// settled reports whether chains of nat at the packet's hook have nothing more to decide.
func (w *way) settled() bool {
	i := manipulates[w.Hook]
	return w.decided[i] || [2]bool{w.DNAT, w.Masquerade}[i]
}

// Step is a rule that matched, or a virtual server or real server that IPVS took.
type Step struct {
	Hook  Hook
	Table string // ipvs for what IPVS took
	Chain string // empty for what IPVS took
	Rule  fmt.Stringer
	// Elements are as in Effect.
	Elements []string
}

// Text is the rule as its front end read it, without the place where it was found.
func (s Step) Text() string {
	if t, ok := s.Rule.(interface{ Text() string }); ok {
		return t.Text()
	}
	return s.Rule.String()
}

func (s Step) String() string { return fmt.Sprintf("%s: %s", s.Table, s.Rule) }

// step is a list of Steps, the last first.
type step struct {
	Step
	prior *step
}

func (s *step) list() []Step {
	n := 0
	for at := s; at != nil; at = at.prior {
		n++
	}
	out := make([]Step, n)
	for ; s != nil; s = s.prior {
		n--
		out[n] = s.Step
	}
	return out
}

// Trace follows the first packet of a connection. Whether its addresses are local is asked of node, not of the packet.
// The outcomes are in order of destination. The error names the rule that can't be judged.
func (m *Machine) Trace(pkt plan.Packet, node Node) ([]Outcome, error) {
	if plan.FamilyOf(pkt.Src) != m.Family || plan.FamilyOf(pkt.Dst) != m.Family {
		return nil, fmt.Errorf("these are rules for %s, and the packet is %s", m.Family, pkt)
	}
	start := way{probability: 1, Packet: Packet{Src: pkt.Src, Dst: pkt.Dst, Original: pkt.Dst, Protocol: pkt.Protocol.Lower(),
		Port: pkt.DstPort, In: pkt.InInterface, Hook: PreRouting, node: &node, machine: m}}
	if pkt.Output {
		start.In, start.Hook = "", Output
	}
	ways, err := (&tracer{Machine: m}).follow(nil, start)
	if err != nil {
		return nil, err
	}
	return outcomes(ways), nil
}

// tracer follows one packet. Its slices are kept from walk to walk for their memory only.
type tracer struct {
	*Machine
	todo    []fork
	effects []Effect
}

// follow takes a way through its hook, and the resulting ways through the following hooks, until every way has ended. It adds these to out.
func (t *tracer) follow(out []way, start way) ([]way, error) {
	ways, err := t.pass(start)
	if err != nil {
		return nil, err
	}
	for _, w := range ways {
		if !w.next() {
			out = append(out, w)
		} else if out, err = t.follow(out, w); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// next prepares a packet for the hook after the one that it has passed. It reports false if there is none. An incoming packet is
// delivered or forwarded by its destination after PREROUTING. A packet of the machine to itself comes in again by interface lo.
func (w *way) next() bool {
	switch {
	case w.end != "":
		return false
	case w.leaves:
		w.leaves, w.In, w.Hook = false, "", Output
	case w.Hook == PreRouting && w.delivered():
		w.Hook = Input
	case w.Hook == PreRouting:
		w.Hook = Forward
	case w.Hook == Forward || w.Hook == Output:
		w.Hook = PostRouting
	case w.Hook == PostRouting && w.delivered():
		w.In, w.Hook = "lo", PreRouting
	default:
		return false
	}
	return true
}

// pass takes a way through the base chains at its hook, and through IPVS where that has its place.
func (t *tracer) pass(start way) ([]way, error) {
	start.decided = start.walked
	ways, after := []way{start}, []way(nil)
	for _, s := range t.stations[start.Hook] {
		after = after[:0]
		for _, w := range ways {
			switch {
			case w.end != "" || w.leaves || s.nat && w.settled():
				after = append(after, w)
				continue
			case s.chain == nil:
				after = t.schedule(after, w)
				continue
			case s.nat:
				w.walked[manipulates[w.Hook]] = true
			}
			var err error
			if after, err = t.walk(after, w, s); err != nil {
				return nil, fmt.Errorf("table %s at %s: %w", s.table, start.Hook, err)
			}
		}
		ways, after = after, ways
	}
	return ways, nil
}

// place is a position in a chain, and where to go on after its end. It has no chain once the walk is over.
type place struct {
	chain  *Chain
	next   int
	caller *place
}

// fork is a way in the middle of a base chain.
type fork struct {
	way
	place
}

// certain is the least probability of what is certain: what it lacks to 1 comes from rounding.
const certain = 1 - 1e-12

// walk takes a packet through a base chain. It adds every way that the packet may take to out, ended or not.
func (t *tracer) walk(out []way, start way, s station) ([]way, error) {
	t.todo = append(t.todo[:0], fork{start, place{chain: s.chain}})
	for len(t.todo) > 0 {
		last := len(t.todo) - 1
		r, err := t.match(&t.todo[last], s.chain)
		if err != nil {
			return nil, err
		}
		f := t.todo[last]
		t.todo = t.todo[:last]
		if r == nil {
			out = append(out, f.way)
			continue
		}
		matched := 0.0
		for i := range t.effects {
			matched += t.effects[i].Probability
		}
		if matched < certain {
			t.todo = append(t.todo, f)
			t.todo[last].probability *= 1 - matched
		}
		for _, e := range slices.Backward(t.effects) {
			to := f
			to.Packet, to.rules = e.Packet, &step{Step{f.Hook, s.table, f.chain.Name, r, e.Elements}, f.rules}
			to.probability *= e.Probability
			if err := to.apply(e, t.Machine, s); err != nil {
				return nil, fmt.Errorf("chain %s, %s: %w", f.chain.Name, r, err)
			}
			t.todo = append(t.todo, to)
		}
	}
	return out, nil
}

// match goes on to the next rule that does something with the packet, and to behind it, and keeps what it does; nil if the walk ends before.
func (t *tracer) match(f *fork, base *Chain) (Rule, error) {
	for f.chain != nil {
		if f.place.next == len(f.chain.Rules) {
			f.back(base)
			continue
		}
		r := f.chain.Rules[f.place.next]
		f.place.next++
		var err error
		if t.effects, err = r.Eval(&f.Packet, t.effects[:0]); err != nil {
			return nil, fmt.Errorf("chain %s, %s: %w", f.chain.Name, r, err)
		}
		if len(t.effects) > 0 {
			return r, nil
		}
	}
	return nil, nil
}

// back leaves a chain: to behind the jump that led there, or, from a base chain, by its policy. A chain that was gone
// to, rather than jumped to, leaves by where the chain that went there would have left.
func (f *fork) back(base *Chain) {
	switch {
	case f.caller != nil:
		f.place = *f.caller
		return
	case base.Drop:
		f.end = Drop
	}
	f.place = place{}
}

// apply goes where an effect leads.
func (f *fork) apply(e Effect, m *Machine, s station) error {
	switch {
	case e.End != "":
		if e.End != Accept {
			f.end = e.End
		}
		f.place = place{}
	case e.Next == Return:
		f.back(s.chain)
	case e.Next == Jump || e.Next == Goto:
		c, err := m.chain(s.table, e.Chain)
		if err != nil {
			return err
		}
		to := place{chain: c, caller: f.caller}
		if e.Next == Jump {
			here := f.place
			to.caller = &here
		}
		f.place = to
	}
	return nil
}

// chain returns a chain, which it loads if it has to.
func (m *Machine) chain(table, name string) (*Chain, error) {
	c := m.Tables[table][name]
	if c == nil && m.Load != nil {
		var err error
		if c, err = m.Load(table, name); err != nil {
			return nil, err
		}
		if c != nil {
			m.Tables[table][name] = c
		}
	}
	if c == nil {
		return nil, fmt.Errorf("there is no chain %s", name)
	}
	return c, nil
}
