package base

import (
	"slices"

	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// FromPods is the match of traffic from pods in a rule, or of all other traffic, with a space behind it; it is empty where all
// traffic is from pods. It is false where the two can't be told apart, or nothing matches.
func FromPods(d plan.DetectLocal, f plan.Family, not bool) (string, bool) {
	if !d.Implemented(f) {
		return "", false
	}
	r := xtables.NewRule()
	switch {
	case d.ByCIDR() && d.CIDR(f).Bits() == 0:
		return "", !not
	case d.ByCIDR() && not:
		r.NotSrc(d.CIDR(f))
	case d.ByCIDR():
		r.Src(d.CIDR(f))
	case not:
		r.Word("!").Word(PodInterface(d)...)
	default:
		r.Word(PodInterface(d)...)
	}
	return r.Text() + " ", true
}

// PodInterface matches the interfaces of pods, in the modes that recognise pods by them.
func PodInterface(d plan.DetectLocal) []string {
	if d.Mode == plan.DetectBridgeInterface {
		return []string{"-i", d.Interface}
	}
	return []string{"-i", d.Interface + "+"}
}

// ToNodePorts are the rules that send traffic for those of the node's addresses where node ports answer to a chain. The
// kernel knows which addresses are the node's, so the rules need no change when these do.
func ToNodePorts(s *plan.Settings, node *plan.Node, f plan.Family, comment, target string) []string {
	loopback := f.Loopback()
	localhost := s.LocalhostReachable(f)
	end := func(r *xtables.Rule) string { return r.Comment(comment).DstLocal().Jump(target) }
	if s.NodePortAddresses.All(f) {
		if localhost {
			return []string{end(xtables.NewRule())}
		}
		return []string{end(xtables.NewRule().NotDst(loopback))}
	}
	var rules []string
	ranges := s.NodePortAddresses.Ranges(f, *node)
	if !localhost && slices.ContainsFunc(ranges, loopback.Overlaps) {
		rules = append(rules, xtables.NewRule().Dst(loopback).Comment(comment).Jump("RETURN"))
	}
	for _, r := range ranges {
		rules = append(rules, end(xtables.NewRule().Dst(r)))
	}
	return rules
}
