package health

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// hostAddresses knows this host's addresses, as the kernel has them.
type hostAddresses interface {
	// list returns the addresses that sockets can be bound to now. Those of a link only have a zone.
	list() ([]netip.Addr, error)
	// watch calls changed once it notices changes, and after each, until ctx ends.
	watch(ctx context.Context, changed func())
}

// kernelAddresses are the addresses in the network namespace of the process.
type kernelAddresses struct {
	// not names links whose addresses do not count.
	not       []string
	subscribe func(chan<- netlink.AddrUpdate, <-chan struct{}) error
}

// dumpTries is how often a list is asked for that the kernel breaks off because it changes meanwhile.
const dumpTries = 5

func (k kernelAddresses) list() ([]netip.Addr, error) {
	var not []int
	for _, name := range k.not {
		if link, err := netlink.LinkByName(name); err == nil {
			not = append(not, link.Attrs().Index)
		}
	}
	var addrs []netlink.Addr
	var err error
	for range dumpTries {
		if addrs, err = netlink.AddrList(nil, netlink.FAMILY_ALL); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listing this host's addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range addrs {
		if ip, ok := usable(a); ok && !slices.Contains(not, a.LinkIndex) {
			out = append(out, ip)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// usable reads an address. One that the kernel still checks for a double, or has found one of, can't be bound; a notification
// comes when that is over.
func usable(a netlink.Addr) (netip.Addr, bool) {
	ip, ok := netip.AddrFromSlice(a.IP)
	ip = ip.Unmap()
	tentative := a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0
	if !ok || tentative || a.Flags&unix.IFA_F_DADFAILED != 0 {
		return netip.Addr{}, false
	}
	if ip.Is6() && ip.IsLinkLocalUnicast() {
		ip = ip.WithZone(strconv.Itoa(a.LinkIndex))
	}
	return ip, true
}

// resubscribeAfter is the wait before notifications are asked for again after they broke off, as they do when more came than
// the socket could hold.
const resubscribeAfter = time.Second

func (k kernelAddresses) watch(ctx context.Context, changed func()) {
	for {
		updates, done := make(chan netlink.AddrUpdate), make(chan struct{})
		err := k.subscribe(updates, done)
		if err == nil {
			// What happened before the subscription is told of by none of its notifications.
			changed()
			pass(ctx, updates, changed)
		}
		close(done)
		if err == nil {
			go drain(updates)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(resubscribeAfter):
		}
	}
}

// drain takes what is left of a subscription, so that it does not wait for a taker and notices that it is over.
func drain(updates <-chan netlink.AddrUpdate) {
	for range updates {
		continue
	}
}

// pass calls changed for each update until there are no more or ctx ends.
func pass(ctx context.Context, updates <-chan netlink.AddrUpdate, changed func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case _, open := <-updates:
			if !open {
				return
			}
			changed()
		}
	}
}

// listenAt is where one socket listens: an address, or all of a family or of both.
type listenAt struct {
	network string // tcp for both families, tcp4 or tcp6
	addr    netip.Addr
}

// wildcard is every address of both families, at one socket; of IPv4 only where the kernel has no IPv6.
var wildcard = listenAt{network: "tcp", addr: netip.IPv4Unspecified()}

func (l listenAt) String() string {
	if l == wildcard {
		return "every address"
	}
	return l.addr.String()
}

// everywhere reports whether no address of the host has to be known to tell where to listen.
func everywhere(at plan.NodePortAddresses) bool { return at.All(plan.IPv4) && at.All(plan.IPv6) }

// sockets says where to listen so as to be reached where node ports answer, in order; host are the host's addresses.
func sockets(at plan.NodePortAddresses, node plan.Node, host []netip.Addr) []listenAt {
	if everywhere(at) {
		return []listenAt{wildcard}
	}
	var out []listenAt
	for _, f := range plan.Families {
		network, all := "tcp4", netip.IPv4Unspecified()
		if f == plan.IPv6 {
			network, all = "tcp6", netip.IPv6Unspecified()
		}
		if at.All(f) {
			out = append(out, listenAt{network, all})
			continue
		}
		ranges := at.Ranges(f, node)
		for _, addr := range host {
			if slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(addr.WithZone("")) }) {
				out = append(out, listenAt{network, addr})
			}
		}
	}
	return out
}
