package harness

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
)

// Take makes a pod answer at every address of an IPv4 range: its node sends the range there, where all of it is local.
func (p *Pod) Take(r netip.Prefix) error {
	dst := &net.IPNet{IP: r.Addr().AsSlice(), Mask: net.CIDRMask(r.Bits(), 32)}
	toPod, err := p.Node.Netlink().LinkByName(PodInterfacePrefix + p.Name)
	if err != nil {
		return fmt.Errorf("interface of %s to %s: %w", p.Node.Name, p.Name, err)
	}
	lo, err := p.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback of %s: %w", p.Name, err)
	}
	err = p.Node.Netlink().RouteReplace(&netlink.Route{
		LinkIndex: toPod.Attrs().Index, Dst: dst, Gw: p.IP4.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
	})
	if err != nil {
		return fmt.Errorf("route to %s in %s: %w", r, p.Node.Name, err)
	}
	err = p.Netlink().RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: dst, Type: syscall.RTN_LOCAL, Table: syscall.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	})
	if err != nil {
		return fmt.Errorf("make %s local in %s: %w", r, p.Name, err)
	}
	return nil
}
