package tracer

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"

	"nodeproxy/proxier/plan"
)

// fairness is by how much, relative to an equal share, an endpoint's probability may differ from it. The kernel counts
// probabilities in units of 2^-31, and rules give them with as little as ten digits.
const fairness = 1e-4

// Compare traces a packet and says how what the rules do with it differs from what the plan says; nil if it does not.
func Compare(e *plan.Evaluator, rs *Ruleset, pkt plan.Packet, node Node) error {
	if pkt.SrcLocal != node.Local(pkt.Src) || pkt.DstLocal != node.Local(pkt.Dst) {
		return fmt.Errorf("the packet (%s) and the node do not agree on which addresses are local", pkt)
	}
	verdict := e.Verdict(pkt)
	outcomes, err := rs.Trace(pkt, node)
	if err != nil {
		return fmt.Errorf("packet %s: %w", pkt, err)
	}
	if err := Agree(verdict, pkt, outcomes); err != nil {
		return fmt.Errorf("packet: %s\nplan: %s\n  %s\nrules:\n%s%w", pkt, verdict,
			strings.Join(verdict.Reasons, "\n  "), describe(outcomes), err)
	}
	return nil
}

// maxDescribed is how many outcomes an error message lists.
const maxDescribed = 5

func describe(outcomes []Outcome) string {
	var b strings.Builder
	for i, o := range outcomes {
		if i == maxDescribed {
			fmt.Fprintf(&b, "  and %d more\n", len(outcomes)-i)
			break
		}
		fmt.Fprintf(&b, "  %s\n", o)
		for _, r := range o.Rules {
			fmt.Fprintf(&b, "    %s\n", r)
		}
	}
	return b.String()
}

// Agree says how a packet's outcomes differ from a verdict; nil if they do not.
func Agree(v plan.Verdict, pkt plan.Packet, outcomes []Outcome) error {
	if v.Action == plan.Forward {
		return agreeForward(v, pkt, outcomes)
	}
	want := map[plan.Action]Action{plan.Pass: Accept, plan.Reject: Reject, plan.Drop: Drop}[v.Action]
	var errs []error
	for _, o := range outcomes {
		switch {
		case o.Action != want:
			errs = append(errs, fmt.Errorf("to %s it must not be", o))
		case o.DNAT:
			errs = append(errs, fmt.Errorf("its destination must not change to %s", o.Dst))
		case o.Masquerade:
			errs = append(errs, errors.New("its source must not change"))
		}
	}
	return errors.Join(errs...)
}

func agreeForward(v plan.Verdict, pkt plan.Packet, outcomes []Outcome) error {
	targets := map[netip.AddrPort]plan.Target{}
	for _, t := range v.Targets {
		targets[t.Addr] = t
	}
	share := 1 / float64(len(v.Targets))
	var errs []error
	for _, o := range outcomes {
		t, wanted := targets[o.Dst]
		delete(targets, o.Dst)
		leaves := pkt.Output || !o.Delivered
		switch {
		case o.Action != Accept || !o.DNAT:
			errs = append(errs, fmt.Errorf("it must be forwarded, and there is: %s", o))
		case !wanted:
			errs = append(errs, fmt.Errorf("%s must not be reached, or twice: %s", o.Dst, o))
		case leaves && o.Masquerade != t.Masquerade:
			errs = append(errs, fmt.Errorf("at %s, masquerading must be %t", o.Dst, t.Masquerade))
		case math.Abs(o.Probability-share) > fairness*share:
			errs = append(errs, fmt.Errorf("%s must have probability %.6f: %s", o.Dst, share, o))
		}
	}
	for addr := range targets {
		errs = append(errs, fmt.Errorf("%s is never reached", addr))
	}
	return errors.Join(errs...)
}
