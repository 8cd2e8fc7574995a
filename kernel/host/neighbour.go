package host

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	links "github.com/vishvananda/netlink"
)

// answersWithin is how long a neighbour may take to answer.
const answersWithin = 300 * time.Millisecond

// Silent returns the addresses of an interface's network that the kernel has asked for in vain: no neighbour answers there (ARP, RFC 826, or
// neighbour discovery, RFC 4861). Where a question is open, it waits for a moment.
func Silent(ctx context.Context, link int) (map[netip.Addr]bool, error) {
	failed, open, err := unresolved(link)
	if err != nil || len(open) == 0 {
		return failed, err
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(answersWithin):
	}
	failed, still, err := unresolved(link)
	for a := range still {
		if open[a] && err == nil {
			failed[a] = true
		}
	}
	return failed, err
}

// unresolved returns the addresses for which nobody has answered, and those for which the kernel still waits.
func unresolved(link int) (failed, open map[netip.Addr]bool, err error) {
	var list []links.Neigh
	err = Retry(func() (err error) {
		list, err = links.NeighList(link, links.FAMILY_ALL)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("listing the neighbours of interface %d: %w", link, err)
	}
	failed, open = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, n := range list {
		a, ok := netip.AddrFromSlice(n.IP)
		switch {
		case ok && n.State&links.NUD_FAILED != 0:
			failed[a.Unmap()] = true
		case ok && n.State&links.NUD_INCOMPLETE != 0:
			open[a.Unmap()] = true
		}
	}
	return failed, open, nil
}
