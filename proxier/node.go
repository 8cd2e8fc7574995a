package proxier

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// applyNodes applies new versions of Nodes. Of others than this node's, it only matters that they exist, and whether they are ready.
func (s *State) applyNodes(nodes map[string]*v1.Node) {
	for name, obj := range nodes {
		switch {
		case name == s.plan.Node.Name:
			s.applyNode(obj)
		case obj == nil:
			delete(s.otherNodes, name)
		default:
			s.otherNodes[name] = notReady(obj)
		}
	}
}

// applyNode applies a new version of this node's object; nil means that it is gone. This program still runs, so the node exists,
// and the last known zone and addresses stay in force.
func (s *State) applyNode(obj *v1.Node) {
	s.leaving = obj == nil || leaving(obj)
	s.nodeGone = obj == nil || obj.DeletionTimestamp != nil // Both come in one if it changed before.
	if obj == nil {
		return
	}
	s.nodeKnown = true
	_, s.excluded = obj.Labels[v1.LabelNodeExcludeBalancers]
	node, podCIDRs, found := readNode(obj)
	node.IPs = s.withNodeIP(node.IPs)
	s.podCIDRs = len(podCIDRs) > 0
	detect := &s.plan.Settings.DetectLocal
	if detect.Mode == plan.DetectNodeCIDR && !slices.Equal(detect.CIDRs, podCIDRs) {
		detect.CIDRs = podCIDRs
		s.rebuild = true
	}
	s.nodeFindings = found
	if !node.Equal(s.plan.Node) {
		s.plan.Node = node
		s.rebuild = true
	}
}

// setNodeIP sets an address that overrides the Node's of its family, and takes its place where there is no Node.
func (s *State) setNodeIP(ip netip.Addr) {
	s.nodeIP = ip
	s.plan.Node.IPs = s.withNodeIP(nil)
}

func (s *State) withNodeIP(ips []netip.Addr) []netip.Addr {
	if !s.nodeIP.IsValid() {
		return ips
	}
	ips = slices.DeleteFunc(ips, func(a netip.Addr) bool { return plan.FamilyOf(a) == plan.FamilyOf(s.nodeIP) })
	return append(ips, s.nodeIP)
}

// unread reports whether there may be an object of this node that has not been read.
func (s *State) unread() bool {
	return !s.nodeKnown && !s.nodeMissing && (s.nodeUnread || s.plan.Partial)
}

// haveNodeRead is what to do where that is so; "" where it is not.
func (s *State) haveNodeRead() string {
	switch {
	case !s.unread():
		return ""
	case s.nodeUnread:
		return "see whether the API server answers, and nodeproxy may get, list and watch nodes"
	}
	return "correct the manifests that can't be read"
}

// limitNodePorts limits node ports to the addresses that the configuration asks for. While the primary ones among them have not been read, those
// that have answered continue to, even if at more addresses.
func (s *State) limitNodePorts() {
	at, localhost := s.given.NodePortAddresses, s.given.LocalhostNodePorts
	if at.Primary && s.unread() {
		for _, f := range s.families {
			if !s.plan.Node.IP(f).IsValid() {
				at.CIDRs = append(slices.Clip(at.CIDRs), f.All())
			}
		}
		localhost = s.given.LocalhostReachable(plan.IPv4)
	}
	now := &s.plan.Settings
	s.rebuild = s.rebuild || !slices.Equal(at.CIDRs, now.NodePortAddresses.CIDRs)
	now.NodePortAddresses, now.LocalhostNodePorts = at, localhost
}

// notReady says why a node is not ready; "" if it is, or that is not known.
func notReady(node *v1.Node) string {
	for _, c := range node.Status.Conditions {
		if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
			return cmp.Or(c.Message, c.Reason, "its condition Ready is "+string(c.Status))
		}
	}
	return ""
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

// reportNode reports what is wrong with this node's object, and which settings have no effect for what it lacks. Manifests without any Node
// are as they should be where nothing needs one.
func (s *State) reportNode() {
	f := &source.Findings{Object: "Node " + s.plan.Node.Name, List: slices.Clone(s.nodeFindings)}
	open := s.nodePorts > 0 && s.nodePortsEverywhere()
	nodePorts, pods := s.nodePorts > 0 && s.nodePortsNowhere(), s.synced && s.podCIDRsMissing() // Until then, the source may wait for them.
	switch {
	case s.nodeKnown:
		if s.nodeGone {
			f.Problem("", "its last addresses, pod CIDRs and zone stay in force until the next start, and are not known from then on; "+
				"create the Node, or give its name with --hostname-override", "the Node is deleted")
		}
		if nodePorts {
			f.Problem("status.addresses", "node ports answer at no address, as nodePortAddresses limits them to the primary ones; "+
				"see that the kubelet or the cloud controller manager sets an InternalIP, or set nodePortAddresses otherwise",
				"there is no InternalIP or ExternalIP")
		}
		if pods {
			f.Problem("spec.podCIDRs", podsNotTold+"; have the controller manager allot pod CIDRs (--allocate-node-cidrs), or set detectLocalMode "+
				"otherwise", "there are none, and detectLocalMode is NodeCIDR")
		}
	case s.unread() && (s.nodeUnread || open):
		effect := "zone hints are ignored until then"
		if open {
			effect += "; node ports answer at all addresses of the node, and not only at those that nodePortAddresses allows"
		}
		if pods {
			effect += "; detectLocalMode is NodeCIDR, and " + podsNotTold
		}
		f.Problem("", effect+"; "+s.haveNodeRead(), "this Node has not been read")
	case s.nodeMissing, s.synced && (nodePorts || pods || len(s.otherNodes) > 0):
		effect := "zone hints are ignored"
		if nodePorts {
			effect += "; node ports answer at no address, as nodePortAddresses limits them to the Node's primary ones"
		}
		if pods {
			effect += "; detectLocalMode is NodeCIDR, and " + podsNotTold
		}
		f.Problem("", effect+"; if the Node has another name, endpoints on it count as being elsewhere, and traffic with policy Local is dropped; "+
			"create the Node, or give its name with --hostname-override", "no Node of this name is known")
	}
	s.reportNew(f.Object, f.List)
}

// podsNotTold is what follows from detectLocalMode NodeCIDR without pod CIDRs.
const podsNotTold = "pods of this node are not told from other clients: what comes to cluster IPs from outside is masqueraded only " +
	"with masqueradeAll, and externalTrafficPolicy Local applies to pods, too"

// nodePortsNowhere reports whether node ports answer at no address for lack of a primary one. A node that has one family only is as it
// should be.
func (s *State) nodePortsNowhere() bool {
	n := s.plan.Settings.NodePortAddresses
	return !slices.ContainsFunc(s.families, func(f plan.Family) bool { return n.All(f) || len(n.Ranges(f, s.plan.Node)) > 0 })
}

// nodePortsEverywhere reports whether node ports of a family answer at all addresses until the primary one has been read.
func (s *State) nodePortsEverywhere() bool {
	given, now := s.given.NodePortAddresses, s.plan.Settings.NodePortAddresses
	return slices.ContainsFunc(s.families, func(f plan.Family) bool { return !given.All(f) && now.All(f) })
}

// podCIDRsMissing reports whether local traffic should be recognised by the node's pod CIDRs and none are known.
func (s *State) podCIDRsMissing() bool {
	d := s.plan.Settings.DetectLocal
	return d.Mode == plan.DetectNodeCIDR && !slices.ContainsFunc(d.CIDRs, netip.Prefix.IsValid)
}

// readNode reads from a Node what the plan needs. The primary address of each family is the first InternalIP or, without one, the
// first ExternalIP.
func readNode(node *v1.Node) (plan.Node, []netip.Prefix, []source.Finding) {
	f := &source.Findings{Object: "Node " + node.Name}
	out := plan.Node{Name: node.Name, Zone: node.Labels[v1.LabelTopologyZone]}
	for _, kind := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
		for i, a := range node.Status.Addresses {
			if a.Type != kind {
				continue
			}
			ip, ok := source.ParseIP(a.Address)
			if !ok {
				f.Problem(fmt.Sprintf("status.addresses[%d].address", i), "ignored", "%.80q is not an IP address", a.Address)
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
			f.Problem(fmt.Sprintf("spec.podCIDRs[%d]", i), "ignored", "%.80q is not a CIDR", text)
			continue
		}
		cidrs = append(cidrs, cidr)
	}
	return out, cidrs, f.List
}
