package harness

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"

	"nodeproxy/internal/nstest"
)

// addVeth makes an interface in n whose other end is an interface in peer; both are up.
func (n *Netns) addVeth(name string, peer *Netns, peerName string) error {
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: name},
		PeerName:      peerName,
		PeerNamespace: netlink.NsFd(peer.handle),
	}
	if err := n.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth %s of %s: %w", name, n.Name, err)
	}
	if err := n.up(name); err != nil {
		return err
	}
	return peer.up(peerName)
}

func (n *Netns) addBridge(name string) error {
	if err := n.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
		return fmt.Errorf("bridge %s of %s: %w", name, n.Name, err)
	}
	return n.up(name)
}

func (n *Netns) enslave(name, bridge string) error {
	port, err := link(n, name)
	if err != nil {
		return err
	}
	master, err := link(n, bridge)
	if err != nil {
		return err
	}
	if err := n.nl.LinkSetMaster(port, master); err != nil {
		return fmt.Errorf("attach %s of %s to %s: %w", name, n.Name, bridge, err)
	}
	return nil
}

// allowHairpin lets a port of a bridge get back what came in by it, as network plugins do for pods: with
// bridge-nf-call-iptables, what a pod sends to a Service and gets itself never leaves the bridge.
func (n *Netns) allowHairpin(name string) error {
	port, err := link(n, name)
	if err != nil {
		return err
	}
	if err := n.nl.LinkSetHairpin(port, true); err != nil {
		return fmt.Errorf("hairpin mode of %s of %s: %w", name, n.Name, err)
	}
	return nil
}

// up raises an interface, and turns IPv6 on where a node's settings have it off by default.
func (n *Netns) up(name string) error {
	l, err := link(n, name)
	if err != nil {
		return err
	}
	if nstest.Hostile() {
		if err := n.Sysctl("net/ipv6/conf/"+name+"/disable_ipv6", "0"); err != nil {
			return err
		}
	}
	if err := n.nl.LinkSetUp(l); err != nil {
		return fmt.Errorf("interface %s of %s up: %w", name, n.Name, err)
	}
	return nil
}

// addAddrs adds an address of each family.
func (n *Netns) addAddrs(name string, bits4 int, a4 netip.Addr, bits6 int, a6 netip.Addr) error {
	if err := n.addAddr(name, bits4, a4, syscall.RT_SCOPE_UNIVERSE); err != nil {
		return err
	}
	return n.addAddr(name, bits6, a6, syscall.RT_SCOPE_UNIVERSE)
}

func (n *Netns) addAddr(name string, bits int, a netip.Addr, scope int) error {
	l, err := link(n, name)
	if err != nil {
		return err
	}
	addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, bits)), Scope: scope}
	if a.Is6() {
		addr.Flags = syscall.IFA_F_NODAD
	}
	if err := n.nl.AddrAdd(l, addr); err != nil {
		return fmt.Errorf("address %s of %s: %w", a, n.Name, err)
	}
	return nil
}

// addRoute adds a route through an interface, or replaces another one to the same addresses, via a gateway (which need not be on a connected network) and with a
// preferred source address, where these are valid.
func (n *Netns) addRoute(name string, dst netip.Prefix, via, src netip.Addr) error {
	l, err := link(n, name)
	if err != nil {
		return err
	}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(dst)}
	if via.IsValid() {
		r.Gw, r.Flags = via.AsSlice(), int(netlink.FLAG_ONLINK)
	} else if dst.Addr().Is4() {
		r.Scope = netlink.SCOPE_LINK
	}
	if src.IsValid() {
		r.Src = src.AsSlice()
	}
	if err := n.nl.RouteReplace(r); err != nil {
		return fmt.Errorf("route to %s in %s: %w", dst, n.Name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
