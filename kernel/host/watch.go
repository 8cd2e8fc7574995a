package host

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// DeviceChange is a change of an interface. If it is not one of an Address, Route or PortRule, then the interface itself was made,
// removed or turned off, or notifications were lost.
type DeviceChange struct {
	// Address was added, or removed if Gone is set.
	Address netip.Addr
	// Route is a range that is no longer local by a route to the interface; ByPort if the route was in names.PortsRouteTable.
	Route  netip.Prefix
	ByPort bool
	// PortRule is set if a routing rule that led to names.PortsRouteTable was removed in a Family.
	PortRule bool
	Family   plan.Family
	Gone     bool
}

// String describes the change.
func (c DeviceChange) String() string {
	switch {
	case c.Route.IsValid():
		return fmt.Sprintf("route %s was removed", c.Route)
	case c.PortRule:
		return fmt.Sprintf("the %s routing rule for table %d was removed", c.Family, names.PortsRouteTable)
	case c.Address.IsValid() && c.Gone:
		return fmt.Sprintf("address %s was removed", c.Address)
	case c.Address.IsValid():
		return fmt.Sprintf("address %s was added", c.Address)
	}
	return "it may have been turned off or removed"
}

// deviceWatch reads notifications.
type deviceWatch struct {
	name    string
	index   uint32 // of the interface; 0 while there is none
	changed func(DeviceChange)
}

// WatchDevice opens a socket in the network namespace of the calling thread. It returns a function that calls changed for each
// change of an interface, whoever makes it, until ctx ends. A change is reported again if notifications arrive twice.
func WatchDevice(name string) (func(ctx context.Context, changed func(DeviceChange)), error) {
	subscription, err := netlink.Subscribe(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
	if err != nil {
		return nil, fmt.Errorf("watching interface %s: %w", name, err)
	}
	w := &deviceWatch{name: name}
	if link, err := net.InterfaceByName(name); err == nil {
		w.index = uint32(link.Index)
	}
	return func(ctx context.Context, changed func(DeviceChange)) {
		w.changed = changed
		subscription.Follow(ctx, w.message, func(error) { changed(DeviceChange{}) })
	}, nil
}

func (w *deviceWatch) message(h netlink.Header, body []byte) {
	switch h.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		w.link(h, body)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if index, a := addressOf(body); a.IsValid() && index == w.index && !linkLocal6(a) {
			w.changed(DeviceChange{Address: a, Gone: h.Type == unix.RTM_DELADDR})
		}
	case unix.RTM_DELROUTE:
		w.route(body)
	case unix.RTM_DELRULE:
		w.rule(body)
	}
}

// addressOf reads a notification of an address, and the index of its interface; the address is invalid if it can't.
func addressOf(body []byte) (index uint32, a netip.Addr) {
	if len(body) < unix.SizeofIfAddrmsg {
		return 0, a
	}
	attrs := netlink.ByType(body[unix.SizeofIfAddrmsg:])
	a, ok := netip.AddrFromSlice(attrs[unix.IFA_LOCAL])
	if !ok { // IPv6 has only this one.
		a, _ = netip.AddrFromSlice(attrs[unix.IFA_ADDRESS])
	}
	return binary.NativeEndian.Uint32(body[4:]), a
}

// link follows the interface's index, which changes each time that it is made.
func (w *deviceWatch) link(h netlink.Header, body []byte) {
	if len(body) < unix.SizeofIfInfomsg {
		return
	}
	index, flags := binary.NativeEndian.Uint32(body[4:]), binary.NativeEndian.Uint32(body[8:]) // of struct ifinfomsg
	if netlink.Text(netlink.Attribute(body[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME)) != w.name {
		return
	}
	gone := h.Type == unix.RTM_DELLINK
	if gone || index != w.index || flags&unix.IFF_UP == 0 {
		w.changed(DeviceChange{})
	}
	if w.index = index; gone {
		w.index = 0
	}
}

func (w *deviceWatch) route(data []byte) {
	if len(data) < unix.SizeofRtMsg || data[7] != unix.RTN_LOCAL {
		return
	}
	attrs := netlink.ByType(data[unix.SizeofRtMsg:])
	out, dst := attrs[unix.RTA_OIF], attrs[unix.RTA_DST]
	a, ok := netip.AddrFromSlice(dst)
	if !ok || len(out) < 4 || binary.NativeEndian.Uint32(out) != w.index {
		return
	}
	table := attrs[unix.RTA_TABLE]
	w.changed(DeviceChange{
		Route: netip.PrefixFrom(a, int(data[1])), Gone: true,
		ByPort: len(table) == 4 && binary.NativeEndian.Uint32(table) == names.PortsRouteTable,
	})
}

func (w *deviceWatch) rule(data []byte) {
	const header = 12 // struct fib_rule_hdr
	if len(data) < header {
		return
	}
	table := netlink.ByType(data[header:])[unix.FRA_TABLE]
	if len(table) != 4 || binary.NativeEndian.Uint32(table) != names.PortsRouteTable {
		return
	}
	for _, f := range plan.Families {
		if data[0] == netlink.Family(f) {
			w.changed(DeviceChange{PortRule: true, Family: f, Gone: true})
		}
	}
}
