package plan

import (
	"net/netip"
	"slices"
	"strings"
)

// DetectLocalMode says how traffic from this node's own pods is distinguished from other traffic (KEP-2450).
type DetectLocalMode string

// The ways to detect local traffic, named as in KubeProxyConfiguration.
const (
	DetectNone                DetectLocalMode = ""
	DetectClusterCIDR         DetectLocalMode = "ClusterCIDR"
	DetectNodeCIDR            DetectLocalMode = "NodeCIDR"
	DetectBridgeInterface     DetectLocalMode = "BridgeInterface"
	DetectInterfaceNamePrefix DetectLocalMode = "InterfaceNamePrefix"
)

// DetectLocal recognises traffic from pods. If its mode needs CIDRs but it has none for a family, traffic of that family can't be
// distinguished, and no rule that depends on it is made (as in kube-proxy).
type DetectLocal struct {
	Mode DetectLocalMode
	// CIDRs are the pod address ranges in the modes ClusterCIDR and NodeCIDR; one per family is used.
	CIDRs []netip.Prefix
	// Interface is the bridge's name, or the prefix of pod interfaces' names, in the other two modes.
	Interface string
}

// CIDR returns the pod range of a family, or the zero Prefix.
func (d DetectLocal) CIDR(f Family) netip.Prefix {
	for _, c := range d.CIDRs {
		if FamilyOf(c.Addr()) == f {
			return c
		}
	}
	return netip.Prefix{}
}

// ByCIDR reports whether traffic of pods is recognised by its source address, rather than by the interface it comes from.
func (d DetectLocal) ByCIDR() bool { return d.Mode == DetectClusterCIDR || d.Mode == DetectNodeCIDR }

// Implemented reports whether pod traffic of this family can be distinguished from other traffic.
func (d DetectLocal) Implemented(f Family) bool {
	switch d.Mode {
	case DetectClusterCIDR, DetectNodeCIDR:
		return d.CIDR(f).IsValid()
	case DetectBridgeInterface, DetectInterfaceNamePrefix:
		return d.Interface != ""
	}
	return false
}

// Matches reports whether a packet with this source address and incoming interface comes from a pod of this node (or,
// in mode ClusterCIDR, of this cluster). The interface of a packet that the node itself sends is empty.
func (d DetectLocal) Matches(src netip.Addr, iface string) bool {
	switch d.Mode {
	case DetectClusterCIDR, DetectNodeCIDR:
		c := d.CIDR(FamilyOf(src))
		return c.IsValid() && c.Contains(src)
	case DetectBridgeInterface:
		return d.Interface != "" && iface == d.Interface
	case DetectInterfaceNamePrefix:
		return d.Interface != "" && strings.HasPrefix(iface, d.Interface)
	}
	return false
}

// NodePortAddresses says at which of the node's addresses node ports answer (--nodeport-addresses).
type NodePortAddresses struct {
	// Primary limits node ports to the node's primary addresses, Node.IPs, and to those within CIDRs.
	Primary bool
	// CIDRs limits them to local addresses within these ranges. In a family without CIDRs, and with Primary unset, node ports
	// answer at every local address: ranges of one family do not affect the other.
	CIDRs []netip.Prefix
}

// All reports whether node ports of this family answer at every local address: no limit is set for the family, or one of its CIDRs
// holds every address.
func (n NodePortAddresses) All(f Family) bool {
	limited := n.Primary
	for _, c := range n.CIDRs {
		if FamilyOf(c.Addr()) != f {
			continue
		}
		if c.Bits() == 0 {
			return true
		}
		limited = true
	}
	return !limited
}

// Ranges returns the address ranges of one family to which node ports are limited, in order. It is empty if All is true, and also
// if Primary is set alone and the node has no address of this family: then node ports answer at no address.
func (n NodePortAddresses) Ranges(f Family, node Node) []netip.Prefix {
	if n.All(f) {
		return nil
	}
	var out []netip.Prefix
	if n.Primary {
		if ip := node.IP(f); ip.IsValid() {
			out = append(out, netip.PrefixFrom(ip, f.Bits()))
		}
	}
	for _, c := range n.CIDRs {
		if FamilyOf(c.Addr()) == f {
			out = append(out, c.Masked())
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}

// Settings are the parts of the configuration that decide what happens to a packet.
type Settings struct {
	DetectLocal DetectLocal
	// MasqueradeAll masquerades all traffic to cluster IPs.
	MasqueradeAll bool
	// NodePortAddresses limits where node ports answer.
	NodePortAddresses NodePortAddresses
	// LocalhostNodePorts lets node ports answer at 127.0.0.0/8, if NodePortAddresses allows it too. IPv6 has no counterpart: ::1
	// can't be routed.
	LocalhostNodePorts bool
	// ResetTCP is the default of ServicePort.ResetTCP for Services without the annotation.
	ResetTCP bool
	// IgnoreExternalIPs makes spec.externalIPs of every Service count as empty (KEP-5707).
	IgnoreExternalIPs bool
	// ServiceCIDRs are the known ranges from which the cluster allocates cluster IPs, in order. Every address in a known range
	// belongs to Services.
	ServiceCIDRs []netip.Prefix
}

// NodePortsAnswer reports whether node ports answer at an address, provided that it is one of the node's.
func (s Settings) NodePortsAnswer(node Node, a netip.Addr) bool {
	f := FamilyOf(a)
	if a.IsLoopback() && !s.LocalhostReachable(f) {
		return false
	}
	return s.NodePortAddresses.All(f) ||
		slices.ContainsFunc(s.NodePortAddresses.Ranges(f, node), func(r netip.Prefix) bool { return r.Contains(a) })
}

// LocalhostReachable reports whether node ports of this family answer at the loopback addresses.
func (s Settings) LocalhostReachable(f Family) bool {
	if f != IPv4 || !s.LocalhostNodePorts {
		return false
	}
	return s.NodePortAddresses.All(f) || slices.ContainsFunc(s.NodePortAddresses.CIDRs, IPv4.Loopback().Overlaps)
}
