// Package host reads this host's addresses, local routes and ports from the kernel, and changes the addresses and routes of a dummy
// interface. It makes no decisions.
package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Local are the addresses that the kernel considers the machine's own, as for rules that match local destinations. The zero Local
// has none.
type Local struct {
	single set.Set[netip.Addr]
	ranges []netip.Prefix // such as 127.0.0.0/8
}

// ReadLocal reads the kernel's table of local routes. Local routes in other routing tables, as transparent proxies use them, do not
// count.
func ReadLocal(f plan.Family) (*Local, error) {
	list, err := routes(new(links.Handle), netlink.Family(f), &links.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL},
		links.RT_FILTER_TABLE|links.RT_FILTER_TYPE)
	if err != nil {
		return nil, fmt.Errorf("reading the local addresses of %s: %w", f, err)
	}
	l := LocalOf()
	for _, r := range list {
		if p := prefixOf(r.Dst); p.IsSingleIP() {
			l.single.Insert(p.Addr())
		} else if p.IsValid() {
			l.ranges = append(l.ranges, p)
		}
	}
	return l, nil
}

// LocalOf returns a Local of these addresses.
func LocalOf(list ...netip.Addr) *Local { return &Local{single: set.Of(list...)} }

// Contains reports whether an address is the machine's own.
func (l *Local) Contains(a netip.Addr) bool {
	return l.single.Has(a) || slices.ContainsFunc(l.ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

// routes lists the routes that a filter selects.
func routes(h *links.Handle, family uint8, filter *links.Route, by uint64) ([]links.Route, error) {
	return List(func() ([]links.Route, error) { return h.RouteListFiltered(int(family), filter, by) })
}

// List repeats a listing by vishvananda/netlink until nothing changes meanwhile.
func List[T any](list func() ([]T, error)) (out []T, err error) {
	err = netlink.Retry(func() error {
		out, err = list()
		if errors.Is(err, links.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) {
			return netlink.ErrInterrupted
		}
		return err
	})
	return out, err
}

// addrOf is an address as vishvananda/netlink has it; invalid if there is none.
func addrOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// prefixOf is a range as vishvananda/netlink has it; invalid if there is none.
func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	ones, size := n.Mask.Size()
	if size == 0 {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(addrOf(n.IP), ones)
}
