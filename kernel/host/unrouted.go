package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// If only some ports of an address are local, table local has no route to the address. But the kernel sends no ICMP error of IPv4
// from an address that no interface has (icmp_send in Linux), so refused connections would time out, and clients would not learn
// the path MTU. So the interface has the address, without the route that comes with it.

// PortRoutes returns the addresses that are local in names.PortsRouteTable.
func (d *Device) PortRoutes(f plan.Family) (map[netip.Addr]struct{}, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list, err := d.routes(f, names.PortsRouteTable)
	out := map[netip.Addr]struct{}{}
	for _, r := range list {
		if r.Dst != nil {
			dst, _ := netip.AddrFromSlice(r.Dst.IP)
			out[dst.Unmap()] = struct{}{}
		}
	}
	return out, err
}

// routes lists the local routes of this interface in a table.
func (d *Device) routes(f plan.Family, table int) (list []links.Route, err error) {
	filter := &links.Route{LinkIndex: d.link.Attrs().Index, Table: table, Type: unix.RTN_LOCAL}
	err = Retry(func() (err error) {
		list, err = d.handle.RouteListFiltered(int(netlink.Family(f)), filter,
			links.RT_FILTER_OIF|links.RT_FILTER_TABLE|links.RT_FILTER_TYPE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listing the %s routes of interface %s: %w", f, d.name, err)
	}
	return list, nil
}

// AddPortRoutes makes addresses local in names.PortsRouteTable.
func (d *Device) AddPortRoutes(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, a := range addrs {
		if err := d.handle.RouteReplace(d.portRoute(a)); err != nil {
			errs = append(errs, fmt.Errorf("adding local route %s (table %d) to interface %s: %w", a, names.PortsRouteTable, d.name, err))
		}
	}
	return errors.Join(errs...)
}

// RemovePortRoutes undoes AddPortRoutes.
func (d *Device) RemovePortRoutes(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, a := range addrs {
		if err := d.handle.RouteDel(d.portRoute(a)); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("removing local route %s (table %d) of interface %s: %w", a, names.PortsRouteTable, d.name, err))
		}
	}
	return errors.Join(errs...)
}

func (d *Device) portRoute(a netip.Addr) *links.Route {
	r := d.route(netip.PrefixFrom(a, a.BitLen()))
	r.Table = names.PortsRouteTable
	return r
}

// AddUnrouted adds IPv4 addresses that are not local: the node may send ICMP errors from them, and accepts no packet for them
// unless a Ports diverts it. An address that exists already loses its route. An address that is new is never local, not even for a
// moment.
func (d *Device) AddUnrouted(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	index := d.link.Attrs().Index
	var failed []error
	var messages []netlink.Message
	for _, a := range addrs {
		// While the kernel's own route is added and removed, lookups find this one, which comes first, and continue with the next
		// table.
		throw := localRoute(a, 0, unix.RTN_THROW, names.ThrowProtocol)
		messages = append(messages,
			netlink.Message{Type: unix.RTM_NEWROUTE, Flags: unix.NLM_F_CREATE, Body: throw},
			netlink.Message{Type: unix.RTM_NEWADDR, Flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL, Body: addressBody(a, index)},
			netlink.Message{Type: unix.RTM_DELROUTE, Body: localRoute(a, index, unix.RTN_LOCAL, unix.RTPROT_KERNEL)},
			netlink.Message{Type: unix.RTM_DELROUTE, Body: throw})
	}
	for i, err := range d.conn.Do(messages...) {
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ESRCH) {
			failed = append(failed, fmt.Errorf("adding address %s to interface %s without a route to it, step %d: %w",
				addrs[i/4], d.name, i%4+1, err))
		}
	}
	return errors.Join(failed...)
}

// RouteAddresses makes addresses local that AddUnrouted has added.
func (d *Device) RouteAddresses(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var messages []netlink.Message
	for _, a := range addrs {
		body := localRoute(a, d.link.Attrs().Index, unix.RTN_LOCAL, unix.RTPROT_KERNEL).Addr(unix.RTA_PREFSRC, a)
		messages = append(messages, netlink.Message{Type: unix.RTM_NEWROUTE, Flags: unix.NLM_F_CREATE | unix.NLM_F_APPEND, Body: body})
	}
	var failed []error
	for i, err := range d.conn.Do(messages...) {
		if err != nil && !errors.Is(err, unix.EEXIST) {
			failed = append(failed, fmt.Errorf("making address %s of interface %s local: %w", addrs[i], d.name, err))
		}
	}
	return errors.Join(failed...)
}

// UnroutedAddresses returns the addresses of the interface that are not local.
func (d *Device) UnroutedAddresses(f plan.Family) (map[netip.Addr]struct{}, error) {
	if f == plan.IPv6 {
		return nil, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	have, err := d.addresses(f)
	if err != nil {
		return nil, err
	}
	list, err := d.routes(f, unix.RT_TABLE_LOCAL)
	for _, r := range list {
		if ones, bits := r.Dst.Mask.Size(); ones == bits {
			a, _ := netip.AddrFromSlice(r.Dst.IP)
			delete(have, a.Unmap())
		}
	}
	return have, err
}

// localRoute is a route of table local to one address as in linux/rtlinks.h, of an interface unless that is 0.
func localRoute(a netip.Addr, index int, kind, protocol uint8) netlink.Buffer {
	b := netlink.Buffer{netlink.Family(plan.FamilyOf(a)), uint8(a.BitLen()), 0, 0, unix.RT_TABLE_LOCAL, protocol, unix.RT_SCOPE_HOST, kind,
		0, 0, 0, 0}
	b = b.Addr(unix.RTA_DST, a)
	if index != 0 {
		b = b.Uint32(unix.RTA_OIF, uint32(index))
	}
	return b
}

// RemoveThrown removes the routes that an interrupted AddUnrouted has left.
func RemoveThrown() error {
	h, err := links.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("removing routes: netlink socket: %w", err)
	}
	defer h.Close()
	filter := &links.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_THROW, Protocol: names.ThrowProtocol}
	var list []links.Route
	err = Retry(func() (err error) {
		list, err = h.RouteListFiltered(unix.AF_INET, filter, links.RT_FILTER_TABLE|links.RT_FILTER_TYPE|links.RT_FILTER_PROTOCOL)
		return err
	})
	errs := []error{err}
	for _, r := range list {
		r := &links.Route{Dst: &net.IPNet{IP: r.Dst.IP, Mask: r.Dst.Mask}, Table: r.Table, Type: r.Type, Protocol: r.Protocol, Scope: r.Scope}
		if err := h.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("removing routes of type throw from table local: %w", err)
	}
	return nil
}
