package packetsim

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
)

// fairness is the relative deviation from an equal share that an endpoint's probability may have. The kernel counts probabilities
// in units of 2^-31, and rules give them with as few as ten digits.
const fairness = 1e-4

// Compare traces a packet and returns an error that describes how its outcomes differ from the plan's verdict; nil if they do not.
func Compare(e *plan.Evaluator, m *Machine, pkt plan.Packet, node Node) error {
	return Tolerance{}.Compare(e, m, pkt, node)
}

// Compare is like the function Compare, but allows the differences that t lists.
func (t Tolerance) Compare(e *plan.Evaluator, m *Machine, pkt plan.Packet, node Node) error {
	if pkt.SrcLocal != node.Local(pkt.Src) || pkt.DstLocal != node.Local(pkt.Dst) {
		return fmt.Errorf("the packet (%s) and the node do not agree on which addresses are local", pkt)
	}
	verdict := e.Verdict(pkt)
	outcomes, err := m.Trace(pkt, node)
	if err != nil {
		return fmt.Errorf("packet %s: %w", pkt, err)
	}
	err = t.Agree(verdict, pkt, outcomes)
	for _, o := range outcomes {
		if a := o.Dst.Addr(); verdict.Action == plan.Forward && m.IsAdded(a) && !node.Local(a) && o.DNAT {
			err = errors.Join(err, fmt.Errorf("%s is an address that was added to this machine, so it is not reached", a))
		}
	}
	if err != nil {
		return fmt.Errorf("packet: %s\nplan: %s\n  %s\nrules:\n%s%w", pkt, verdict,
			strings.Join(verdict.Reasons(), "\n  "), describe(outcomes), err)
	}
	return nil
}

// maxDescribed is the number of outcomes that an error message lists.
const maxDescribed = 5

func describe(outcomes []Outcome) string {
	var b strings.Builder
	for i, o := range outcomes {
		if i == maxDescribed {
			fmt.Fprintf(&b, "  and %d more\n", len(outcomes)-i)
			break
		}
		fmt.Fprintf(&b, "  %s\n", o)
		for _, r := range o.Rules() {
			fmt.Fprintf(&b, "    %s\n", r)
		}
	}
	return b.String()
}

// Agree returns an error that describes how a packet's outcomes differ from a verdict; nil if they do not.
func Agree(v plan.Verdict, pkt plan.Packet, outcomes []Outcome) error {
	return Tolerance{}.Agree(v, pkt, outcomes)
}

// Agree is like the function Agree, but allows the differences that t lists.
func (t Tolerance) Agree(v plan.Verdict, pkt plan.Packet, outcomes []Outcome) error {
	if v.Action == plan.Forward {
		return t.agreeForward(v, pkt, outcomes)
	}
	want := map[plan.Action]Action{plan.Pass: Accept, plan.Reject: Reject, plan.Drop: Drop}[v.Action]
	var errs []error
	for _, o := range outcomes {
		switch {
		case v.Action == plan.Pass && o.Action == Reject && !o.DNAT && t.allowsRejectPass(pkt):
		case o.Action != want:
			errs = append(errs, fmt.Errorf("to %s it must not be", o))
		case o.DNAT:
			errs = append(errs, fmt.Errorf("its destination must not change to %s", o.Dst))
		case o.Masquerade:
			errs = append(errs, errors.New("its source must not change"))
		case v.Action == plan.Pass && o.Delivered && !pkt.DstLocal:
			errs = append(errs, errors.New("it must not get to the node's own programs"))
		}
	}
	return errors.Join(errs...)
}

func (t Tolerance) agreeForward(v plan.Verdict, pkt plan.Packet, outcomes []Outcome) error {
	targets := map[netip.AddrPort]plan.Target{}
	for _, target := range v.Targets {
		targets[target.Addr] = target
	}
	share := 1 / float64(len(v.Targets))
	isOff := func(o Outcome, share float64) bool {
		return !t.AnyShare && math.Abs(o.Probability-share) > fairness*share
	}
	var errs []error
	var dropped *Outcome
	for _, o := range outcomes {
		if t.DropLoopback && o.Action == Drop && !o.DNAT && pkt.Src.IsLoopback() {
			dropped = &o
			continue
		}
		target, wanted := targets[o.Dst]
		delete(targets, o.Dst)
		leaves := pkt.Output || !o.Delivered
		switch {
		case o.Action != Accept || !o.DNAT:
			errs = append(errs, fmt.Errorf("it must be forwarded, and there is: %s", o))
		case !wanted:
			errs = append(errs, fmt.Errorf("%s must not be reached, or twice: %s", o.Dst, o))
		case leaves && o.Masquerade != target.Masquerade && (o.Masquerade || !t.allowsKeepHairpin(pkt, o.Dst)):
			errs = append(errs, fmt.Errorf("at %s, masquerading must be %t", o.Dst, target.Masquerade))
		case isOff(o, share):
			errs = append(errs, fmt.Errorf("%s must have probability %.6f: %s", o.Dst, share, o))
		}
	}
	if missing := share * float64(len(targets)); dropped != nil {
		if missing == 0 || isOff(*dropped, missing) {
			errs = append(errs, fmt.Errorf("%.6f is the share of those that are never reached: %s", missing, *dropped))
		}
		return errors.Join(errs...)
	}
	for addr := range targets {
		errs = append(errs, fmt.Errorf("%s is never reached", addr))
	}
	return errors.Join(errs...)
}

// AgreeBetween returns what is wrong with a packet's outcomes during a change if the packet reaches an endpoint before and after
// it: it must reach one of endpoints, those that its ServicePort has before or after, all the while; and it must be masqueraded if
// the verdicts that know that endpoint say so, or if none does, both verdicts. It returns nil if nothing is wrong.
func AgreeBetween(before, after plan.Verdict, endpoints []plan.Endpoint, pkt plan.Packet, outcomes []Outcome) error {
	targets := slices.Concat(before.Targets, after.Targets)
	for _, o := range outcomes {
		kept := func(t plan.Target) bool { return !t.Masquerade }
		of := slices.DeleteFunc(slices.Clone(targets), func(t plan.Target) bool { return t.Addr != o.Dst })
		if len(of) == 0 {
			of = slices.DeleteFunc(slices.Clone(targets), func(t plan.Target) bool { return t.Addr.Addr() == pkt.Src })
		}
		known := slices.ContainsFunc(endpoints, func(ep plan.Endpoint) bool { return ep.Addr == o.Dst })
		leaves := pkt.Output || !o.Delivered
		switch {
		case !known || !o.DNAT || o.Action != Accept:
			return fmt.Errorf("it gets to %s", o)
		case leaves && !o.Masquerade && len(of) > 0 && !slices.ContainsFunc(of, kept) && o.Dst.Addr() != pkt.Src:
			return fmt.Errorf("it gets to %s and is not masqueraded", o)
		}
	}
	return nil
}
