// Package host reads this host's addresses, local routes and ports from the kernel, and changes the addresses and routes of a dummy
// interface. It makes no decisions.
package host

import (
	"errors"
	"fmt"
	"net/netip"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Local are the addresses that the kernel considers the machine's own, as for rules that match local destinations. The zero Local
// has none.
type Local struct {
	single map[netip.Addr]struct{}
	ranges []netip.Prefix // such as 127.0.0.0/8
}

// ReadLocal reads the kernel's table of local routes. Local routes in other routing tables, as transparent proxies use them, do not
// count.
func ReadLocal(f plan.Family) (*Local, error) {
	var routes []links.Route
	err := Retry(func() (err error) {
		routes, err = links.RouteListFiltered(int(netlink.Family(f)),
			&links.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}, links.RT_FILTER_TABLE|links.RT_FILTER_TYPE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the local addresses of %s: %w", f, err)
	}
	l := &Local{single: map[netip.Addr]struct{}{}}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		addr, _ := netip.AddrFromSlice(r.Dst.IP)
		ones, _ := r.Dst.Mask.Size()
		if addr = addr.Unmap(); ones == addr.BitLen() {
			l.single[addr] = struct{}{}
		} else {
			l.ranges = append(l.ranges, netip.PrefixFrom(addr, ones))
		}
	}
	return l, nil
}

// Contains reports whether an address is the machine's own.
func (l *Local) Contains(a netip.Addr) bool {
	if _, ok := l.single[a]; ok {
		return true
	}
	for _, r := range l.ranges {
		if r.Contains(a) {
			return true
		}
	}
	return false
}

// Retry repeats a listing by vishvananda/netlink until nothing changes meanwhile.
func Retry(list func() error) error {
	return netlink.Retry(func() error {
		err := list()
		if errors.Is(err, links.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) {
			return netlink.ErrInterrupted
		}
		return err
	})
}
