package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// HostAddresses returns the addresses of all interfaces except one, which need not exist, without link-local ones of IPv6. No
// Service can have such an address, and every interface of a pod has one.
func HostAddresses(f plan.Family, except string) (map[netip.Addr]struct{}, error) {
	handle, err := links.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("addresses of this node: netlink socket: %w", err)
	}
	defer handle.Close()
	out := -1
	link, err := handle.LinkByName(except)
	switch {
	case err == nil:
		out = link.Attrs().Index
	case !errors.As(err, new(links.LinkNotFoundError)):
		return nil, fmt.Errorf("addresses of this node: interface %s: %w", except, err)
	}
	return addresses(handle, nil, f, func(a netip.Addr, index int) bool { return index != out && !linkLocal6(a) })
}

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

// quiet is how long WatchAddresses waits for more changes before it tells of the first: whoever adds one address adds more.
const quiet = 100 * time.Millisecond

// WatchAddresses calls changed when it begins, and after addresses such as HostAddresses returns came or went, or may have. It
// returns nil when the context is done, and an error if it cannot begin. Calls do not overlap, and none comes after that.
func WatchAddresses(ctx context.Context, except string, changed func()) error {
	fail := func(err error) error { return fmt.Errorf("watching the addresses of this node: %w", err) }
	handle, err := links.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fail(err)
	}
	subscription, err := netlink.Subscribe(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		handle.Close()
		return fail(err)
	}
	w := addressWatch{handle: handle, except: except, known: map[uint32]bool{}, news: make(chan struct{}, 1)}
	w.note()
	go func() {
		defer handle.Close()
		// What was lost may be any change.
		subscription.Follow(ctx, w.message, func(error) { w.note() })
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.news:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(quiet):
		}
		select {
		case <-w.news:
		default:
		}
		changed()
	}
}

type addressWatch struct {
	handle *links.Handle
	except string
	known  map[uint32]bool // whether an interface is the one not to tell of
	news   chan struct{}
}

func (w *addressWatch) message(_ netlink.Header, body []byte) {
	if len(body) < unix.SizeofIfAddrmsg || w.excepted(binary.NativeEndian.Uint32(body[4:])) {
		return
	}
	a, ok := netip.AddrFromSlice(netlink.Attribute(body[unix.SizeofIfAddrmsg:], unix.IFA_ADDRESS))
	if !ok || !linkLocal6(a) {
		w.note()
	}
}

func (w *addressWatch) note() {
	select {
	case w.news <- struct{}{}:
	default:
	}
}

func (w *addressWatch) excepted(index uint32) bool {
	excepted, ok := w.known[index]
	if !ok {
		link, err := w.handle.LinkByIndex(int(index))
		if err != nil {
			return false // It is gone already.
		}
		excepted = link.Attrs().Name == w.except
		w.known[index] = excepted
	}
	return excepted
}
