package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// If only some ports of an address are local, table local has no route to the address. But the kernel sends no ICMP error of IPv4
// from an address that no interface has (icmp_send in Linux), so refused connections would time out, and clients would not learn
// the path MTU. So the interface has the address, without the route that comes with it.

// PortRoutes returns the addresses that are local in names.PortsRouteTable.
func (d *Device) PortRoutes(f plan.Family) (set.Set[netip.Addr], error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list, err := d.routes(f, names.PortsRouteTable)
	out := set.Set[netip.Addr]{}
	for _, r := range list {
		out.Insert(prefixOf(r.Dst).Addr())
	}
	return out, err
}

// AddPortRoutes makes addresses local in names.PortsRouteTable.
func (d *Device) AddPortRoutes(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.change(addrs, fmt.Sprintf("adding local route %%s (table %d) to interface %%s", names.PortsRouteTable),
		request{unix.RTM_NEWROUTE, unix.NLM_F_CREATE | unix.NLM_F_REPLACE, d.portRoute, unix.EEXIST})
	return err
}

// RemovePortRoutes undoes AddPortRoutes.
func (d *Device) RemovePortRoutes(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.change(addrs, fmt.Sprintf("removing local route %%s (table %d) of interface %%s", names.PortsRouteTable),
		request{kind: unix.RTM_DELROUTE, body: d.portRoute, done: unix.ESRCH})
	return err
}

// AddUnrouted adds IPv4 addresses that are not local: the node may send ICMP errors from them, and accepts no packet for them
// unless a Ports diverts it. An address that exists already loses its route. An address that is new is never local, not even for a
// moment.
func (d *Device) AddUnrouted(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	// While the kernel's own route is added and removed, lookups find this one, which comes first, and continue with the next table.
	throw := func(a netip.Addr) netlink.Buffer { return localRoute(a, 0, unix.RTN_THROW, names.ThrowProtocol) }
	_, err := d.change(addrs, "adding address %s to interface %s without a route to it",
		request{unix.RTM_NEWROUTE, unix.NLM_F_CREATE, throw, unix.EEXIST},
		d.newAddress(),
		request{kind: unix.RTM_DELROUTE, body: d.ownRoute, done: unix.ESRCH},
		request{kind: unix.RTM_DELROUTE, body: throw, done: unix.ESRCH})
	return err
}

// RouteAddresses makes addresses local that AddUnrouted has added.
func (d *Device) RouteAddresses(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.change(addrs, "making address %s of interface %s local", request{unix.RTM_NEWROUTE, unix.NLM_F_CREATE | unix.NLM_F_APPEND,
		func(a netip.Addr) netlink.Buffer { return d.ownRoute(a).Addr(unix.RTA_PREFSRC, a) }, unix.EEXIST})
	return err
}

// UnroutedAddresses returns the addresses of the interface that are not local.
func (d *Device) UnroutedAddresses(f plan.Family) (set.Set[netip.Addr], error) {
	if f == plan.IPv6 {
		return set.Set[netip.Addr]{}, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	have, err := d.addresses(f)
	if err != nil {
		return nil, err
	}
	list, err := d.routes(f, unix.RT_TABLE_LOCAL)
	for _, r := range list {
		if p := prefixOf(r.Dst); p.IsSingleIP() {
			have.Delete(p.Addr())
		}
	}
	return have, err
}

// ownRoute is the route by which the kernel makes an address of the interface local.
func (d *Device) ownRoute(a netip.Addr) netlink.Buffer {
	return localRoute(a, d.link.Attrs().Index, unix.RTN_LOCAL, unix.RTPROT_KERNEL)
}

// portRoute is a route of names.PortsRouteTable.
func (d *Device) portRoute(a netip.Addr) netlink.Buffer {
	b := localRoute(a, d.link.Attrs().Index, unix.RTN_LOCAL, unix.RTPROT_STATIC)
	return b.Uint32(unix.RTA_TABLE, names.PortsRouteTable) // This comes before the table in the header.
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
	filter := &links.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_THROW, Protocol: names.ThrowProtocol}
	list, err := routes(new(links.Handle), unix.AF_INET, filter, links.RT_FILTER_TABLE|links.RT_FILTER_TYPE|links.RT_FILTER_PROTOCOL)
	errs := []error{err}
	for _, r := range list {
		r := &links.Route{Dst: &net.IPNet{IP: r.Dst.IP, Mask: r.Dst.Mask}, Table: r.Table, Type: r.Type, Protocol: r.Protocol, Scope: r.Scope}
		if err := links.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("removing routes of type throw from table local: %w", err)
	}
	return nil
}
