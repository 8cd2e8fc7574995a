// Package common has the rules of iptables that modes iptables and ipvs have in common. It decides nothing that a mode does not ask for.
package common

import (
	"fmt"
	"net/netip"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Options come from the configuration and from what the node's iptables and kernel can do, not from the cluster.
type Options struct {
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31.
	MasqueradeBit int
	// RandomFully randomises source ports of masqueradings, so that connections that race for one do not collide.
	// iptables has it since 1.6.2.
	RandomFully bool
	// TCPLiberal is set where net.netfilter.nf_conntrack_tcp_be_liberal is: then packets that conntrack calls invalid
	// are not dropped.
	TCPLiberal bool
}

func (o Options) bit() string { return fmt.Sprintf("%#x", uint32(1)<<o.MasqueradeBit) }

// mark is the masquerade bit as iptables-save prints it, as value and mask.
func (o Options) mark() string { return o.bit() + "/" + o.bit() }

// Form is what the base chains do for all Services at once. Its zero value is for a mode in which other rules do that.
type Form struct {
	// Hairpin masquerades connections that DNAT has sent back to where they come from. It needs xt_bpf in the kernel.
	Hairpin bool
	// ClusterIPs are ranges of cluster IPs. All traffic to them is masqueraded, except for that from Pods if it is valid.
	ClusterIPs []netip.Prefix
	Pods       netip.Prefix
}

// masqueraded are the ranges of cluster IPs to which anything is masqueraded: none where all traffic is from pods.
func (x Form) masqueraded() []netip.Prefix {
	if x.Pods.IsValid() && x.Pods.Bits() == 0 {
		return nil
	}
	return x.ClusterIPs
}

// toClusterIPs begins a rule for connections to a range of cluster IPs that are to be masqueraded.
func (x Form) toClusterIPs(cidr netip.Prefix) *xtables.Rule {
	r := xtables.NewRule()
	if x.Pods.IsValid() {
		r.NotSrc(x.Pods)
	}
	return r.ConnectedTo(cidr)
}

// Chains are KUBE-FORWARD, KUBE-MARK-MASQ and KUBE-POSTROUTING, which depend on no ServicePort and no frontend.
func Chains(o Options, f plan.Family, x Form) []xtables.Chain {
	masquerade := "MASQUERADE"
	if o.RandomFully {
		masquerade += " --random-fully"
	}
	// Nearly every packet belongs to an established connection, so that is asked first.
	forward := []string{
		xtables.NewRule().Comment("kubernetes forwarding conntrack rule").
			Word("-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED").Jump("ACCEPT"),
	}
	if !o.TCPLiberal {
		// A packet that conntrack can't place is not translated back; its receiver would answer with a reset that
		// kills the connection it belongs to.
		forward = append(forward, xtables.NewRule().Word("-m", "conntrack", "--ctstate", "INVALID").Jump("DROP"))
	}
	// Marked packets are on their way to an endpoint; they pass even where the policy of FORWARD is DROP.
	forward = append(forward,
		xtables.NewRule().Comment("kubernetes forwarding rules").Word("-m", "mark", "--mark", o.mark()).Jump("ACCEPT"))
	postrouting := []string{
		xtables.NewRule().Word("-m", "mark", "!", "--mark", o.mark()).Jump("RETURN"),
		// The mark goes once it has served, so that a packet that passes here again (in a tunnel) is not masqueraded again.
		xtables.NewRule().Jump("MARK --set-xmark " + o.bit() + "/0x0"),
		xtables.NewRule().Comment("kubernetes service traffic requiring SNAT").Jump(masquerade),
	}
	var first []string
	if x.Hairpin {
		first = append(first, hairpin(f).Jump(masquerade))
		forward = append(forward, hairpin(f).Jump("ACCEPT"))
	}
	for _, cidr := range x.masqueraded() {
		first = append(first, x.toClusterIPs(cidr).Jump(masquerade))
		forward = append(forward, x.toClusterIPs(cidr).Jump("ACCEPT"))
	}
	postrouting = append(first, postrouting...)
	return []xtables.Chain{
		{Table: names.Filter, Name: names.Forward, Rules: forward},
		{Table: names.NAT, Name: names.MarkMasq, Rules: []string{
			xtables.NewRule().Jump("MARK --set-xmark " + o.mark()),
		}},
		{Table: names.NAT, Name: names.Postrouting, Rules: postrouting},
	}
}

// hairpin begins a rule for connections that DNAT has sent back to where they come from. No match of iptables compares
// source and destination, so a few instructions of classic BPF do, for all endpoints of all services at once.
func hairpin(f plan.Family) *xtables.Rule {
	const (
		v4 = "7,32 0 0 12,2 0 0 0,32 0 0 16,97 1 0 0,29 0 1 0,6 0 0 65535,6 0 0 0"
		v6 = "22,32 0 0 8,2 0 0 0,32 0 0 24,97 1 0 0,29 0 16 0,32 0 0 12,2 0 0 0,32 0 0 28,97 1 0 0,29 0 11 0," +
			"32 0 0 16,2 0 0 0,32 0 0 32,97 1 0 0,29 0 6 0,32 0 0 20,2 0 0 0,32 0 0 36,97 1 0 0,29 0 1 0," +
			"6 0 0 65535,6 0 0 0"
	)
	program := v4
	if f == plan.IPv6 {
		program = v6
	}
	return xtables.NewRule().Word("-m", "conntrack", xtables.CTStateDNAT).Comment("hairpin").
		Word("-m", "bpf", "--bytecode", `"`+program+`"`)
}

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
