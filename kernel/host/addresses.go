package host

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Address is an address of an interface.
type Address struct {
	Addr netip.Addr // without a zone
	// Network is the range of the addresses that are in the network of the interface.
	Network netip.Prefix
	// Index is the number of the interface.
	Index int
	// Usable is false while the kernel checks whether another host has the address, and if one has: no socket can be bound to it
	// then.
	Usable bool
}

// Filter says which addresses to omit.
type Filter struct {
	// Except are the names of interfaces, which need not exist.
	Except []string
	// LinkLocal includes link-local addresses of IPv6: no Service can have one, and every interface of a pod has one.
	LinkLocal bool
}

// Addresses returns the addresses of these families in the network namespace of the calling thread.
func (f Filter) Addresses(families ...plan.Family) ([]Address, error) {
	fail := func(err error) ([]Address, error) {
		return nil, fmt.Errorf("listing the addresses of this node: %w", err)
	}
	var not []int
	for _, name := range f.Except {
		link, err := links.LinkByName(name)
		switch {
		case err == nil:
			not = append(not, link.Attrs().Index)
		case !errors.As(err, new(links.LinkNotFoundError)):
			return fail(fmt.Errorf("interface %s: %w", name, err))
		}
	}
	var out []Address
	for _, family := range families {
		list, err := addresses(new(links.Handle), nil, family)
		if err != nil {
			return fail(err)
		}
		for _, a := range list {
			if !slices.Contains(not, a.Index) && (f.LinkLocal || !linkLocal6(a.Addr)) {
				out = append(out, a)
			}
		}
	}
	return out, nil
}

// addresses lists the addresses of an interface, or of all if it is nil.
func addresses(h *links.Handle, link links.Link, f plan.Family) ([]Address, error) {
	list, err := List(func() ([]links.Addr, error) { return h.AddrList(link, int(netlink.Family(f))) })
	if err != nil {
		return nil, fmt.Errorf("listing %s addresses: %w", f, err)
	}
	var out []Address
	for _, a := range list {
		if p := prefixOf(a.IPNet); p.IsValid() {
			out = append(out, Address{p.Addr(), p.Masked(), a.LinkIndex, usable(a.Flags)})
		}
	}
	return out, nil
}

// usable reads the flags of an address. A notification comes when the check for a duplicate is over.
func usable(flags int) bool {
	tentative := flags&unix.IFA_F_TENTATIVE != 0 && flags&unix.IFA_F_OPTIMISTIC == 0
	return !tentative && flags&unix.IFA_F_DADFAILED == 0
}

func linkLocal6(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }

// Watch calls changed when it begins, and after any change of the addresses that Addresses returns. It waits for quiet before a
// call, since several addresses often change together. It returns nil when the context is done, and an error if it cannot begin.
// Calls do not overlap, and there are none after it returns.
func (f Filter) Watch(ctx context.Context, quiet time.Duration, changed func()) error {
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
	w := addressWatch{filter: f, handle: handle, known: map[uint32]bool{}, news: make(chan struct{}, 1)}
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
	filter Filter
	handle *links.Handle
	known  map[uint32]bool // whether the addresses of an interface are left out
	news   chan struct{}
}

func (w *addressWatch) message(_ netlink.Header, body []byte) {
	if index, a := addressOf(body); !w.excepted(index) && (w.filter.LinkLocal || !linkLocal6(a)) {
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
	if len(w.filter.Except) == 0 {
		return false
	}
	excepted, ok := w.known[index]
	if !ok {
		link, err := w.handle.LinkByIndex(int(index))
		if err != nil {
			return false // It is gone already.
		}
		excepted = slices.Contains(w.filter.Except, link.Attrs().Name)
		w.known[index] = excepted
	}
	return excepted
}
