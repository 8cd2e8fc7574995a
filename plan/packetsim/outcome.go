package packetsim

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Action is the end of a packet's path.
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
	// Steps are the rules that matched on the way, in order, and the virtual server and the real server that IPVS took; if several
	// ways lead to this outcome, on the first of them.
	Steps []Step
	State any // the Packet's at the end of that way
}

// Rules describes the steps.
func (o Outcome) Rules() []string {
	out := make([]string, len(o.Steps))
	for i, s := range o.Steps {
		out[i] = s.String()
	}
	return out
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
		e := end{cmp.Or(w.end, Accept), netip.AddrPortFrom(w.Dst, w.Port),
			w.DNAT || w.Virtual.IsValid(), w.Masquerade, w.Local(w.Dst)}
		i, seen := index[e]
		if !seen {
			i = len(out)
			index[e] = i
			out = append(out, Outcome{Action: e.action, Dst: e.dst, DNAT: e.dnat, Masquerade: e.masquerade,
				Delivered: e.delivered, Steps: w.rules.list(), State: w.State})
		}
		out[i].Probability += w.probability
	}
	slices.SortStableFunc(out, func(a, b Outcome) int {
		return cmp.Or(a.Dst.Compare(b.Dst), cmp.Compare(a.Action, b.Action))
	})
	return out
}
