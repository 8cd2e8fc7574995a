package iptables

import (
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// BaseChains are the chains that every mode has: KUBE-FORWARD, KUBE-MARK-MASQ and KUBE-POSTROUTING.
func BaseChains(o Options, f plan.Family) []xtables.Chain { return baseChains(o, f, form{}) }

// FromPods is the match of traffic from pods in a rule, or of all other traffic, with a space behind it; it is empty where all
// traffic is from pods. It is false where the two can't be told apart, or nothing matches.
func FromPods(d plan.DetectLocal, f plan.Family, not bool) (string, bool) {
	if !d.Implemented(f) {
		return "", false
	}
	b := builder{settings: &plan.Settings{DetectLocal: d}}
	r := xtables.NewRule()
	switch {
	case byCIDR(d) && d.CIDR(f).Bits() == 0:
		return "", !not
	case byCIDR(d) && not:
		r.NotSrc(d.CIDR(f))
	case byCIDR(d):
		r.Src(d.CIDR(f))
	case not:
		r.Word("!").Word(b.podInterface()...)
	default:
		r.Word(b.podInterface()...)
	}
	return r.Text() + " ", true
}

// ToNodePorts are rules that send traffic for those of the node's addresses where node ports answer to a chain. It is the
// kernel that says which addresses are the node's, so rules need no change when they do.
func ToNodePorts(s *plan.Settings, node *plan.Node, f plan.Family, comment, target string) []string {
	return toNodePorts(s, node, f, comment, target)
}
