package kernel

import (
	"errors"
	"fmt"
	"net/netip"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

func linkLocal6(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }

// addresses returns those addresses of an interface, or of all if it is nil, that are wanted.
func addresses(
	h *links.Handle, link links.Link, f plan.Family, want func(a netip.Addr, index int) bool,
) (map[netip.Addr]struct{}, error) {
	var list []links.Addr
	err := retry(func() (err error) {
		list, err = h.AddrList(link, int(netlink.Family(f)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing %s addresses: %w", f, err)
	}
	found := map[netip.Addr]struct{}{}
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && want(addr.Unmap(), a.LinkIndex) {
			found[addr.Unmap()] = struct{}{}
		}
	}
	return found, nil
}

// retry repeats what vishvananda/netlink lists until nothing changes meanwhile.
func retry(list func() error) error {
	return netlink.Retry(func() error {
		err := list()
		if errors.Is(err, links.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) {
			return netlink.ErrInterrupted
		}
		return err
	})
}
