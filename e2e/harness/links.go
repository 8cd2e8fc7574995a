package harness

import (
	"errors"
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
	return errors.Join(n.up(name), peer.up(peerName))
}

func (n *Netns) addBridge(name string) error {
	if err := n.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
		return fmt.Errorf("bridge %s of %s: %w", name, n.Name, err)
	}
	return n.up(name)
}

// with does something to an interface.
func (n *Netns) with(name, what string, do func(netlink.Link) error) error {
	l, err := link(n, name)
	if err != nil {
		return err
	}
	if err := do(l); err != nil {
		return fmt.Errorf("%s: %s of %s: %w", what, name, n.Name, err)
	}
	return nil
}

func (n *Netns) enslave(name, bridge string) error {
	master, err := link(n, bridge)
	if err != nil {
		return err
	}
	return n.with(name, "attach to "+bridge, func(port netlink.Link) error { return n.nl.LinkSetMaster(port, master) })
}

// allowHairpin lets a port of a bridge get back what came in by it, as network plugins do for pods: with
// bridge-nf-call-iptables, what a pod sends to a Service and gets itself never leaves the bridge.
func (n *Netns) allowHairpin(name string) error {
	return n.with(name, "hairpin mode", func(port netlink.Link) error { return n.nl.LinkSetHairpin(port, true) })
}

// up raises an interface, and turns IPv6 on where a node's settings have it off by default.
func (n *Netns) up(name string) error {
	if nstest.Hostile() {
		if err := n.Sysctl("net/ipv6/conf/"+name+"/disable_ipv6", "0"); err != nil {
			return err
		}
	}
	return n.with(name, "up", n.nl.LinkSetUp)
}

// addAddrs adds an address of each family.
func (n *Netns) addAddrs(name string, bits4 int, a4 netip.Addr, bits6 int, a6 netip.Addr) error {
	return errors.Join(n.addAddr(name, bits4, a4, syscall.RT_SCOPE_UNIVERSE), n.addAddr(name, bits6, a6, syscall.RT_SCOPE_UNIVERSE))
}

func (n *Netns) addAddr(name string, bits int, a netip.Addr, scope int) error {
	addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, bits)), Scope: scope}
	if a.Is6() {
		addr.Flags = syscall.IFA_F_NODAD
	}
	return n.with(name, "address "+a.String(), func(l netlink.Link) error { return n.nl.AddrAdd(l, addr) })
}

// addRoute adds a route through an interface, or replaces another one to the same addresses, via a gateway (which need not be on a
// connected network) and with a preferred source address, where these are valid.
func (n *Netns) addRoute(name string, dst netip.Prefix, via, src netip.Addr) error {
	r := &netlink.Route{Dst: ipNet(dst), Src: src.AsSlice()}
	if via.IsValid() {
		r.Gw, r.Flags = via.AsSlice(), int(netlink.FLAG_ONLINK)
	} else if dst.Addr().Is4() {
		r.Scope = netlink.SCOPE_LINK
	}
	return n.with(name, "route to "+dst.String(), func(l netlink.Link) error {
		r.LinkIndex = l.Attrs().Index
		return n.nl.RouteReplace(r)
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Take makes a pod answer at every address of a range: its node sends the range there, where all of it is local.
func (p *Pod) Take(r netip.Prefix) error {
	err := p.with("lo", r.String()+" local", func(lo netlink.Link) error {
		return p.nl.RouteAdd(&netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: ipNet(r), Type: syscall.RTN_LOCAL, Table: syscall.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
		})
	})
	if err != nil {
		return err
	}
	family := familyOf(r.Addr())
	return p.Node.addRoute(PodInterfacePrefix+p.Name, r, p.IP(family), p.Node.IP(family))
}
