package harness

import (
	"fmt"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
)

// Take makes a pod answer at every address of a range: its node sends the range there, where all of it is local.
func (p *Pod) Take(r netip.Prefix) error {
	lo, err := link(p.Netns, "lo")
	if err != nil {
		return err
	}
	err = p.nl.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: ipNet(r), Type: syscall.RTN_LOCAL, Table: syscall.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	})
	if err != nil {
		return fmt.Errorf("make %s local in %s: %w", r, p.Name, err)
	}
	family := familyOf(r.Addr())
	return p.Node.addRoute(PodInterfacePrefix+p.Name, r, p.IP(family), p.Node.IP(family))
}
