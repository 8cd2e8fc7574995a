package proxier

import (
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// applyNode applies a new version of this node's object; nil means that it is gone. This program still runs, so the node exists,
// and the last known zone and addresses stay in force.
func (s *State) applyNode(obj *v1.Node) {
	s.leaving = obj == nil || leaving(obj)
	if obj == nil {
		return
	}
	node, podCIDRs, found := readNode(obj)
	if s.nodeIP.IsValid() {
		node.IPs = slices.DeleteFunc(node.IPs, func(a netip.Addr) bool {
			return plan.FamilyOf(a) == plan.FamilyOf(s.nodeIP)
		})
		node.IPs = append(node.IPs, s.nodeIP)
	}
	detect := &s.plan.Settings.DetectLocal
	if detect.Mode == plan.DetectNodeCIDR && !slices.Equal(detect.CIDRs, podCIDRs) {
		detect.CIDRs = podCIDRs
		s.rebuild = true
	}
	s.reportNew("Node "+obj.Name, found)
	if !node.Equal(s.plan.Node) {
		s.plan.Node = node
		s.rebuild = true
	}
}

// leaving reports whether a node is about to be removed.
func leaving(node *v1.Node) bool {
	return node.DeletionTimestamp != nil ||
		slices.ContainsFunc(node.Spec.Taints, func(t v1.Taint) bool { return t.Key == source.TaintToBeDeleted })
}

// NodeEligible reports whether load balancers should send new connections to this node (KEP-3836): false if its Node object is
// gone, is being deleted, or has the taint that the cluster autoscaler sets before it removes a node. It is true until anything is
// known. No rule depends on it.
func (s *State) NodeEligible() bool { return !s.leaving }

// podCIDRsMissing reports whether local traffic should be recognised by the node's pod CIDRs and none are known.
func (s *State) podCIDRsMissing() bool {
	d := s.plan.Settings.DetectLocal
	return d.Mode == plan.DetectNodeCIDR && !slices.ContainsFunc(d.CIDRs, netip.Prefix.IsValid)
}

// readNode reads from a Node what the plan needs. The primary address of each family is the first InternalIP or, without one, the
// first ExternalIP.
func readNode(node *v1.Node) (plan.Node, []netip.Prefix, []source.Finding) {
	f := &findings{object: "Node " + node.Name}
	out := plan.Node{Name: node.Name, Zone: node.Labels[v1.LabelTopologyZone]}
	for _, kind := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
		for i, a := range node.Status.Addresses {
			if a.Type != kind {
				continue
			}
			ip, ok := source.ParseIP(a.Address)
			if !ok {
				f.problem(fmt.Sprintf("status.addresses[%d].address", i), "ignored", "%.80q is not an IP address", a.Address)
				continue
			}
			if !out.IP(plan.FamilyOf(ip)).IsValid() {
				out.IPs = append(out.IPs, ip)
			}
		}
	}
	podCIDRs := node.Spec.PodCIDRs
	if len(podCIDRs) == 0 && node.Spec.PodCIDR != "" {
		podCIDRs = []string{node.Spec.PodCIDR}
	}
	var cidrs []netip.Prefix
	for i, text := range podCIDRs {
		cidr, ok := parseCIDR(text)
		if !ok {
			f.problem(fmt.Sprintf("spec.podCIDRs[%d]", i), "ignored", "%.80q is not a CIDR", text)
			continue
		}
		cidrs = append(cidrs, cidr)
	}
	return out, cidrs, f.list
}
