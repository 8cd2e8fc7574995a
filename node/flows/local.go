package flows

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"

	"nodeproxy/plan"
)

// addresses are those that the kernel takes for the machine's own, as rules do that match local destinations.
type addresses struct {
	single map[netip.Addr]struct{}
	ranges []netip.Prefix // such as 127.0.0.0/8
}

// triesToRead is how often in a row routes may change while they are read.
const triesToRead = 5

// localAddresses reads the kernel's table of local routes. Those of other routing tables, as transparent proxies have, do
// not make an address local.
func localAddresses(f plan.Family) (*addresses, error) {
	var routes []netlink.Route
	var err error = netlink.ErrDumpInterrupted
	for try := 0; try < triesToRead && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
		routes, err = netlink.RouteListFiltered(int(addressFamily(f)),
			&netlink.Route{Table: syscall.RT_TABLE_LOCAL, Type: syscall.RTN_LOCAL}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the local addresses of %s: %w", f, err)
	}
	a := &addresses{single: map[netip.Addr]struct{}{}}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		addr, _ := netip.AddrFromSlice(r.Dst.IP)
		ones, _ := r.Dst.Mask.Size()
		if addr = addr.Unmap(); ones == addr.BitLen() {
			a.single[addr] = struct{}{}
		} else {
			a.ranges = append(a.ranges, netip.PrefixFrom(addr, ones))
		}
	}
	return a, nil
}

func (a *addresses) contains(addr netip.Addr) bool {
	if _, ok := a.single[addr]; ok {
		return true
	}
	for _, r := range a.ranges {
		if r.Contains(addr) {
			return true
		}
	}
	return false
}

// answers reports whether node ports answer at an address, given the machine's own ones.
func (x *index) answers(own *addresses, addr netip.Addr) bool {
	if own == nil || !own.contains(addr) {
		return false
	}
	f := plan.FamilyOf(addr)
	if addr.IsLoopback() && !x.settings.LocalhostReachable(f) {
		return false
	}
	if x.settings.NodePortAddresses.All(f) {
		return true
	}
	for _, r := range x.settings.NodePortAddresses.Ranges(f, x.node) {
		if r.Contains(addr) {
			return true
		}
	}
	return false
}
