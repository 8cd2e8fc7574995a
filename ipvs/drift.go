package ipvs

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/internal/keyed"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// comparison finds out how the state of a family in the kernel differs from the one that was written.
type comparison struct {
	family plan.Family
	found  drift.Found
}

// compare records the differences between two maps of one kind of object: what is missing, what is unexpected, and, by changed unless
// that is nil, what is in both. A nil order is any.
func compare[K comparable, V any](c *comparison, kind drift.Kind, before, now map[K]V, order func(a, b K) int, name func(K) string,
	changed func(k K, was, is V)) {
	keys := func(in map[K]V) iter.Seq[K] {
		if order == nil {
			return maps.Keys(in)
		}
		return slices.Values(slices.SortedFunc(maps.Keys(in), order))
	}
	for k := range keys(before) {
		if is, ok := now[k]; !ok {
			c.found = append(c.found, drift.Difference{Kind: kind, State: drift.Missing, Object: name(k)})
		} else if changed != nil {
			changed(k, before[k], is)
		}
	}
	for k := range keys(now) {
		if _, was := before[k]; !was {
			c.found = append(c.found, drift.Difference{Kind: kind, State: drift.Unexpected, Object: name(k)})
		}
	}
}

// changed records that an object has another value.
func (c *comparison) changed(kind drift.Kind, object, aspect, was, is string) {
	if was != is {
		c.found = append(c.found, drift.Difference{Kind: kind, State: drift.Changed, Object: object, Aspect: aspect, Want: was, Have: is})
	}
}

func onDevice[K fmt.Stringer](k K) string { return k.String() + " of interface " + names.Device }

// differences returns how the state of a family in the kernel differs from the one that was written. Package xtables compares the rules.
func differences(f plan.Family, before, now *actual) drift.Found {
	c := &comparison{family: f}
	c.servers(before.servers, now.servers)
	// Entries are not sorted: a program that empties a set leaves thousands.
	name := func(m memberKey) string { return m.name(f) }
	compare(c, drift.SetElement, before.members, now.members, nil, name, func(m memberKey, was, is marked) {
		if is != was {
			set := setOf(m.set, f)
			c.changed(drift.SetElement, name(m), "", m.entry(was).Text(set), m.entry(is).Text(set))
		}
	})
	c.ports(&before.ports, &now.ports)
	compare(c, drift.Address, before.vips, now.vips, netip.Addr.Compare, onDevice, nil)
	compare(c, drift.Route, before.routes, now.routes, netip.Prefix.Compare, onDevice, func(r netip.Prefix, was, is netip.Addr) {
		c.changed(drift.Route, onDevice(r), "source", was.String(), is.String())
	})
	return c.found
}

// servers compares those virtual servers that differ: of most, no copy is made.
func (c *comparison) servers(before, now *keyed.Set[ipvs.ServerID, actualServer]) {
	was, is := map[ipvs.ServerID]*actualServer{}, map[ipvs.ServerID]*actualServer{}
	for v := range before.All() {
		if have := now.Get(v.ID); have == nil {
			was[v.ID] = v
		} else if !v.is(have) {
			was[v.ID], is[v.ID] = v, have
		}
	}
	for v := range now.All() {
		if before.Get(v.ID) == nil {
			is[v.ID] = v
		}
	}
	compare(c, drift.VirtualServer, was, is, compareServers, ipvs.ServerID.String, c.server)
}

func (c *comparison) server(id ipvs.ServerID, was, is *actualServer) {
	if is.Server != was.Server {
		c.found = append(c.found, drift.Difference{Kind: drift.VirtualServer, State: drift.Changed, Object: id.String(),
			Want: serverOptions(was.Server), Have: serverOptions(is.Server)})
	}
	name := func(addr netip.AddrPort) string { return fmt.Sprintf("%s of virtual server %s", addr, id) }
	compare(c, drift.RealServer, was.weights(), is.weights(), netip.AddrPort.Compare, name, func(addr netip.AddrPort, was, is uint32) {
		if is != was {
			c.changed(drift.RealServer, name(addr), "weight", fmt.Sprint(was), fmt.Sprint(is))
		}
	})
}

// weights are those of the real servers.
func (v *actualServer) weights() map[netip.AddrPort]uint32 {
	out := make(map[netip.AddrPort]uint32, len(v.realServers))
	for _, d := range v.realServers {
		out[d.Addr] = d.Weight
	}
	return out
}

// ports compares what diverts ports.
func (c *comparison) ports(was, is *actualPorts) {
	table := func(state drift.State, parts string) {
		c.found = append(c.found, drift.Difference{Kind: drift.Chain, State: state,
			Object: fmt.Sprintf("nftables table %s %s routing rule (%s)", names.IPVSPorts, parts, c.family)})
	}
	switch {
	case was.complete && !is.exists:
		table(drift.Missing, "with its")
	case was.complete && !is.complete:
		table(drift.Changed, "or its")
	case !was.exists && is.exists:
		table(drift.Unexpected, "or its")
	}
	compare(c, drift.SetElement, was.all(), is.all(), comparePorts, func(p plan.Address) string {
		return fmt.Sprintf("%s . %s . %d of nftables table %s", p.Addr, p.Protocol.Lower(), p.Port, names.IPVSPorts)
	}, nil)
	compare(c, drift.Route, was.routes, is.routes, netip.Addr.Compare, func(a netip.Addr) string {
		return fmt.Sprintf("%s of interface %s in table %d", a, names.Device, names.PortsRouteTable)
	}, nil)
	compare(c, drift.Address, was.unrouted, is.unrouted, netip.Addr.Compare, func(a netip.Addr) string {
		return fmt.Sprintf("%s of interface %s, without a route", a, names.Device)
	}, nil)
}

func (k memberKey) name(f plan.Family) string {
	return k.entry(marked{}).Text(setOf(k.set, f)) + " of set " + setName(k.set, f)
}
