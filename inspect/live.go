package inspect

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"nodeproxy/plan"
)

// Live is a prediction beside real packets of the same flow.
type Live struct {
	// Trace is the prediction for the packet that was asked for.
	Trace *Trace `json:"trace"`
	// Duration is how long packets were followed, in seconds.
	Duration float64 `json:"seconds"`
	// Passed is how many packets of the flow have passed, those of older connections included.
	Passed uint64       `json:"passedPackets"`
	Seen   []SeenPacket `json:"seen"`
	// Notes say what could not be followed.
	Notes []string `json:"notes,omitempty"`
}

// SeenPacket is the first packet of a real connection.
type SeenPacket struct {
	Time        time.Time `json:"time"`
	Source      string    `json:"source"`
	Destination string    `json:"destination"`
	// In and Out are the interfaces by which it came and went.
	In    string     `json:"in,omitempty"`
	Out   string     `json:"out,omitempty"`
	Steps []SeenStep `json:"steps"`
	// Action is forward, reject, drop, or pass for a packet that was left alone; it is lost if no rule that can be followed has dropped the
	// packet, and it got nowhere.
	Action string `json:"action"`
	// Endpoint is where it was sent to; empty if its destination stayed.
	Endpoint    string `json:"endpoint,omitempty"`
	Masqueraded bool   `json:"masqueraded"`
	// Answered says that connection tracking has seen an answer, and nothing here is known to have kept that from the client.
	Answered bool `json:"answered"`
	// Answer is the way of an answer; nil if none was followed.
	Answer *SeenAnswer `json:"answer,omitempty"`
	// Untold says that the kernel told nothing of it behind Bridge, so that it may have met rules which are only predicted.
	Untold bool `json:"untold,omitempty"`
	// Bridge is the bridge by which it came, behind whose rules (br_netfilter) the kernel does not tell of all packets; empty for none.
	Bridge string `json:"bridge,omitempty"`
	// Unfollowed names a program whose rules the kernel does not tell of, though there are some; empty for none.
	Unfollowed string `json:"unfollowed,omitempty"`
	// Prediction is for a packet from this source; Differences say where it was wrong.
	Prediction  *PacketTrace `json:"prediction"`
	Differences []string     `json:"differences,omitempty"`
}

// SeenAnswer is the way of an answer on this node, from where connection tracking has seen it.
type SeenAnswer struct {
	// Action is pass, reject, drop or lost.
	Action string     `json:"action"`
	Steps  []SeenStep `json:"steps"`
	// Refuses says that it refuses the connection (RST), From who has sent it, and In the interface by which it came; empty for this node's own.
	Refuses bool   `json:"refuses,omitempty"`
	From    string `json:"from,omitempty"`
	In      string `json:"in,omitempty"`
}

// SeenStep is a rule that has matched a real packet, or the policy of a chain.
type SeenStep struct {
	TraceStep
	// Verdict is accept, drop, continue, return, jump CHAIN or goto CHAIN.
	Verdict string `json:"verdict"`
	// Predicted says that the prediction has the rule too.
	Predicted bool `json:"predicted"`
}

// Lost is the Action of a packet that no rule has dropped and that got nowhere.
const Lost = "lost"

// repeats reports whether an earlier packet is of the same connection.
func (s *SeenPacket) repeats(earlier SeenPacket) bool {
	return s.Source == earlier.Source && s.Destination == earlier.Destination
}

// Problem reports whether no packet passed, or one went another way than was predicted, or does not get through, or got no answer by TCP, or was refused.
func (l *Live) Problem() bool {
	return len(l.Seen) == 0 || slices.ContainsFunc(l.Seen, func(s SeenPacket) bool {
		unanswered := !s.Answered && s.Prediction != nil && s.Prediction.Protocol == plan.TCP && s.Action == plan.Forward.String()
		return len(s.Differences) > 0 || unanswered || s.refused() || s.Action == plan.Reject.String() || s.Action == plan.Drop.String() || s.Action == Lost
	})
}

// Compare sets the prediction of a packet, which of its steps were predicted, and the differences.
func (s *SeenPacket) Compare(p *PacketTrace) {
	s.Prediction, s.Differences = p, nil
	outcome := p.outcomeFor(s)
	s.matchSteps(slices.Concat(p.Steps, outcome.Steps))
	if n := len(s.Steps); s.Action == plan.Drop.String() && n > 0 && Rejects(s.Steps[n-1].Rule) { // Only now its text may be known.
		s.Action = plan.Reject.String()
	}
	differ := func(format string, args ...any) { s.Differences = append(s.Differences, fmt.Sprintf(format, args...)) }
	switch {
	case s.Action == Lost && (s.Answered || s.Bridge != ""): // It has got there, or the kernel tells no more of it.
		s.Action, s.Untold = p.Action, s.Bridge != ""
		return
	case s.Action == Lost && s.Unfollowed != "" && (p.Action == plan.Reject.String() || p.Action == plan.Drop.String()):
		return // by a rule that does not show
	case s.Action == Lost:
		differ("predicted to be %s, it got no further than %s: %s. Is there a route to %s, and back to the client (rp_filter)?",
			actionWords[p.Action], furthest(s.Steps), s.lostBy(), cmp.Or(s.Endpoint, s.Destination))
		return
	case s.Action != p.Action && !slices.ContainsFunc(p.Outcomes, func(o TraceOutcome) bool { return o.Action == s.Action }):
		differ("predicted to be %s, it was %s%s", actionWords[p.Action], actionWords[s.Action], by(s.Action, s.Steps))
		return
	case s.Endpoint != outcome.Endpoint:
		differ("%s is not among the endpoints that were predicted", cmp.Or(s.Endpoint, "its own destination"))
	case s.Masqueraded && !outcome.Masqueraded:
		differ("it was masqueraded, and should keep its source%s", s.masqueradedBy())
	case !s.Masqueraded && outcome.Masqueraded && p.FromNode && s.Unfollowed != "": // The node may have sent it from that address anyway.
	case !s.Masqueraded && outcome.Masqueraded:
		differ("it kept its source, and should be masqueraded")
	}
	switch a := s.Answer; {
	case a == nil || a.Action == plan.Pass.String():
	case a.Action == Lost:
		s.Answered = false
		differ("the answer came to this node, and got no further than %s: %s. Is there a route to the client?", furthest(a.Steps), s.lostBy())
	default:
		s.Answered = false
		differ("the answer came to this node, and was %s%s", actionWords[a.Action], by(a.Action, a.Steps))
	}
}

// lostBy says what has become of what got nowhere.
func (s *SeenPacket) lostBy() string {
	if s.Unfollowed != "" {
		return "a rule of " + s.Unfollowed + " may have dropped it, or none has"
	}
	return "no rule has dropped it"
}

// outcomeFor returns the outcome that fits a packet best.
func (p *PacketTrace) outcomeFor(s *SeenPacket) TraceOutcome {
	fits := func(o TraceOutcome) (points int) {
		if o.Endpoint == s.Endpoint {
			points += 2
		}
		if o.Masqueraded == s.Masqueraded {
			points++
		}
		return points
	}
	return slices.MaxFunc(p.Outcomes, func(a, b TraceOutcome) int { return fits(a) - fits(b) })
}

// matchSteps finds the steps that were predicted, each behind the one before. Where a rule reads differently, as nftables itself prints
// it, the chain and the verdict tell, and the text is that of the prediction.
func (s *SeenPacket) matchSteps(predicted []TraceStep) {
	at := 0
	for i := range s.Steps {
		step := &s.Steps[i]
		j := slices.IndexFunc(predicted[at:], func(p TraceStep) bool {
			return strings.EqualFold(p.Hook, step.Hook) && p.Table == step.Table && p.Chain == step.Chain && (p.Rule == step.Rule || step.leadsAs(p))
		})
		if j < 0 {
			continue
		}
		p := predicted[at+j]
		step.Predicted, step.Rule, step.Elements = true, p.Rule, p.Elements
		at += j + 1
	}
}

// leadsAs reports whether a rule of a table of nodeproxy's own leads where another does.
func (s *SeenStep) leadsAs(p TraceStep) bool {
	if !strings.HasPrefix(s.Table, "nodeproxy") || s.Rule == policy {
		return false
	}
	_, chain, jumps := strings.Cut(s.Verdict, " ")
	return !jumps || slices.ContainsFunc(append([]string{p.Rule}, p.Elements...), func(text string) bool {
		return slices.Contains(strings.Fields(text), chain)
	})
}

// policy is the rule of a step that is a chain's policy.
const policy = "policy"

// by says which rule has ended a packet's way, if one has.
func by(action string, steps []SeenStep) string {
	if len(steps) == 0 || action != plan.Drop.String() && action != plan.Reject.String() {
		return ""
	}
	last := steps[len(steps)-1]
	if last.Rule == policy {
		return fmt.Sprintf(" by the policy of chain %s of table %s", last.Chain, last.Table)
	}
	return fmt.Sprintf(" by chain %s of table %s: %s", last.Chain, last.Table, last.Rule)
}

func (s *SeenPacket) masqueradedBy() string {
	for _, step := range slices.Backward(s.Steps) {
		if Masquerades(step.Rule) {
			return fmt.Sprintf(": chain %s of table %s has the rule %s", step.Chain, step.Table, step.Rule)
		}
	}
	return ""
}

// Masquerades reports whether a rule, as iptables or nft print it, changes the source of packets.
func Masquerades(rule string) bool {
	return strings.Contains(rule, "-j MASQUERADE") || strings.Contains(rule, "-j SNAT") || strings.Contains(" "+rule, " masquerade") ||
		strings.Contains(" "+rule, " snat ")
}

// Rejects reports whether a rule, as iptables or nft print it, tells the sender that it drops a packet.
func Rejects(rule string) bool {
	return strings.Contains(rule, "-j REJECT") || strings.Contains(" "+rule, " reject")
}

// furthest is the last hook that a packet is known to have got to.
func furthest(steps []SeenStep) string {
	if len(steps) == 0 {
		return "its first hook"
	}
	return "hook " + steps[len(steps)-1].Hook
}

var actionWords = map[string]string{"forward": "forwarded", "pass": "left alone", "reject": "rejected", "drop": "dropped", Lost: "lost"}

// WriteLive writes a prediction beside real packets for people.
func WriteLive(w io.Writer, l *Live) error {
	for _, p := range l.Trace.Packets {
		fmt.Fprintf(w, "%s from %s (%s) to %s on node %s (mode %s)\n", p.Protocol, p.Source, Printable(p.From), p.Destination, l.Trace.Node, l.Trace.Mode)
	}
	if len(l.Seen) == 0 {
		fmt.Fprintf(w, "  no first packet of such a connection passed in %gs\n", l.Duration)
	}
	for i := range l.Seen {
		s := &l.Seen[i]
		fmt.Fprintf(w, "\nConnection %d: %s to %s%s\n", i+1, s.Source, s.Destination, with(", by ", Printable(s.In)))
		if earlier := slices.IndexFunc(l.Seen[:i], s.repeats); earlier >= 0 {
			fmt.Fprintf(w, "  Connection %d again, of which this is one more packet before an answer.\n", earlier+1)
		}
		if err := s.write(w); err != nil {
			return err
		}
		same := slices.IndexFunc(l.Seen[:i], func(o SeenPacket) bool {
			return slices.EqualFunc(o.Steps, s.Steps, SeenStep.equal) && o.Prediction.Action == s.Prediction.Action
		})
		if same >= 0 {
			fmt.Fprintf(w, "\n  It met the rules that connection %d met.\n", same+1)
		} else if err := s.writeSteps(w); err != nil {
			return err
		}
	}
	fmt.Fprintln(w)
	for _, n := range l.Notes {
		fmt.Fprintln(w, Printable(n))
	}
	count := func(is func(SeenPacket) bool) int { return len(only(l.Seen, is)) }
	wrong := count(func(s SeenPacket) bool { return len(s.Differences) > 0 })
	switch {
	case len(l.Seen) == 0 && l.Passed > 0:
		fmt.Fprintf(w, "%d packets of older connections passed: these keep the endpoint with which they began. Have the client connect anew.\n", l.Passed)
	case len(l.Seen) == 0:
		fmt.Fprint(w, "Have the client connect while this runs; --for=30s waits longer. If it does, its packets do not come to this node, or not to this address,\n"+
			"or a device drops them (tc, XDP, chains of netdev): try it on the client's own node, with FROM=outside, or with the address that\n"+
			"the client uses.\n")
	case wrong > 0:
		fmt.Fprintf(w, "%d of %d connections differ from the prediction.\n", wrong, len(l.Seen))
	default:
		refused := count(SeenPacket.refused)
		unanswered := count(func(s SeenPacket) bool { return s.Action == plan.Forward.String() && !s.Answered })
		fmt.Fprintf(w, "%s went as predicted%s%s.\n", either(len(l.Seen) > 1, fmt.Sprintf("All %d connections", len(l.Seen)), "The connection"),
			when(refused > 0, fmt.Sprintf(", but %d had a reset (RST) for an answer: see whether anything listens at the endpoint", refused)),
			when(unanswered > 0, fmt.Sprintf(", but %d had no answer: see whether the endpoint answers, and whether its answer comes back by way of this node (nodeproxy explain)", unanswered)))
	}
	return nil
}

// refused reports whether the answer refuses the connection, and gets to the client.
func (s SeenPacket) refused() bool { return s.Answered && s.Answer != nil && s.Answer.Refuses }

func (s SeenStep) equal(o SeenStep) bool {
	return s.TraceStep.equal(o.TraceStep) && s.Verdict == o.Verdict
}

// write writes prediction and fact side by side.
func (s *SeenPacket) write(w io.Writer) error {
	p := s.Prediction
	outcome := p.outcomeFor(s)
	source := func(masqueraded bool) string { return either(masqueraded, "masqueraded", "kept") }
	rows := [][]string{{"  result", actionWords[p.Action], actionWords[s.Action]}}
	pod := when(outcome.Endpoint == s.Endpoint && outcome.Pod != "", "("+outcome.Pod+")")
	if p.Action == plan.Forward.String() || s.Endpoint != "" {
		rows = append(rows, []string{"  endpoint", p.endpoints(), cmp.Or(joined(" ", s.Endpoint, pod), "-")},
			[]string{"  source", source(outcome.Masqueraded), source(s.Masqueraded)})
	}
	rows = append(rows, []string{"  answered", "-", s.answered()})
	if err := aligned(w, "\tPREDICTED\tSEEN", rows); err != nil {
		return err
	}
	for _, d := range s.Differences {
		fmt.Fprintln(w, "  DIFFERS: "+Printable(d))
	}
	if s.Untold {
		fmt.Fprintf(w, "  Behind bridge %s (br_netfilter), the kernel tells nothing of it: it may have met rules that are only predicted below.\n", Printable(s.Bridge))
	}
	return nil
}

func (s *SeenPacket) answered() string {
	switch {
	case s.Answer != nil && s.Answer.Action != plan.Pass.String():
		return "the answer was " + actionWords[s.Answer.Action] + " on this node"
	case s.Answered && s.Answer == nil:
		return "yes, but the answer was not seen to pass this node's last hook"
	case s.refused():
		return fmt.Sprintf("refused: a reset (RST) came from %s%s", s.Answer.From, with(" by ", Printable(s.Answer.In)))
	case s.Answered:
		return "yes"
	}
	return "no"
}

// endpoints are those that were predicted, in short.
func (p *PacketTrace) endpoints() string {
	led := only(p.Outcomes, func(o TraceOutcome) bool { return o.Endpoint != "" })
	list := words(led, func(o TraceOutcome) string { return o.Endpoint + " " + percent(o.Probability) })
	const most = 3
	if n := len(list); n > most {
		list = append(list[:most:most], fmt.Sprintf("%d more", n-most))
	}
	return cmp.Or(strings.Join(list, ", "), "-")
}

// writeSteps writes the rules that were predicted and those that matched, in one list. Policies that accept say nothing.
func (s *SeenPacket) writeSteps(w io.Writer) error {
	p := s.Prediction
	predicted := slices.Concat(p.Steps, p.outcomeFor(s).Steps)
	var rows [][]string
	row := func(mark string, step TraceStep, note string) {
		rows = append(rows, []string{"  " + mark, strings.ToUpper(step.Hook), step.Table, cmp.Or(step.Chain, "-"), step.Rule + note})
		for _, e := range step.Elements {
			rows = append(rows, []string{"  ", "", "", "", "  " + e})
		}
	}
	for _, step := range s.Steps {
		if !step.Predicted {
			switch {
			case step.Rule == policy && step.Verdict == "accept":
			case step.Verdict == "drop":
				row("seen", step.TraceStep, "   <-- DROPPED HERE")
			default:
				row("seen", step.TraceStep, "")
			}
			continue
		}
		for len(predicted) > 0 {
			next := predicted[0]
			predicted = predicted[1:]
			if strings.EqualFold(next.Hook, step.Hook) && next.Table == step.Table && next.Chain == step.Chain && next.Rule == step.Rule {
				break
			}
			row("predicted", next, "")
		}
		row("both", step.TraceStep, "")
	}
	for _, next := range predicted {
		row("predicted", next, "")
	}
	if len(rows) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	return aligned(w, "  RULE IS\tHOOK\tTABLE\tCHAIN\tRULE", rows)
}
