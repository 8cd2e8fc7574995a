package ipvs

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
)

// differs records a difference that the name of the object describes completely.
func (e *engine) differs(k drift.Kind, s drift.State, format string, args ...any) {
	e.Found = append(e.Found, drift.Difference{Kind: k, State: s, Object: fmt.Sprintf(format, args...)})
}

// compare records the differences between two maps of one kind of object: what is missing, what is unexpected, and, by changed unless
// that is nil, what is in both. A nil order is any.
func compare[K comparable, V any](e *engine, kind drift.Kind, before, now map[K]V, order func(a, b K) int, name func(K) string,
	changed func(k K, was, is V)) {
	keys := func(in map[K]V) iter.Seq[K] {
		if order == nil {
			return maps.Keys(in)
		}
		return slices.Values(slices.SortedFunc(maps.Keys(in), order))
	}
	for k := range keys(before) {
		if is, ok := now[k]; !ok {
			e.differs(kind, drift.Missing, "%s", name(k))
		} else if changed != nil {
			changed(k, before[k], is)
		}
	}
	for k := range keys(now) {
		if _, was := before[k]; !was {
			e.differs(kind, drift.Unexpected, "%s", name(k))
		}
	}
}

func onDevice[K fmt.Stringer](k K) string { return k.String() + " of interface " + names.Device }

// differences finds out how the actual state differs from the one that was written. Package xtables compares the rules, and
// routeDifferences the routes.
func (e *engine) differences(before *actual) {
	compare(e, drift.VirtualServer, before.servers, e.actual.servers, compareServers, ipvs.ServerID.String,
		func(id ipvs.ServerID, was, is *actualServer) {
			if is.Server != was.Server {
				e.Found = append(e.Found, drift.Difference{Kind: drift.VirtualServer, State: drift.Changed, Object: id.String(),
					Want: serverOptions(was.Server), Have: serverOptions(is.Server)})
			}
			e.realServerDifferences(id, was, is)
		})
	// Entries are not sorted: a program that empties a set leaves thousands.
	compare(e, drift.SetElement, before.members, e.actual.members, nil, e.memberName, func(m member, was, is shared) {
		if is.mark != was.mark || is.mask != was.mask {
			set := setOf(m.set, e.family)
			e.Found = append(e.Found, drift.Difference{Kind: drift.SetElement, State: drift.Changed, Object: e.memberName(m),
				Want: m.marked(was).Text(set), Have: m.marked(is).Text(set)})
		}
	})
	e.portDifferences(before)
	compare(e, drift.Address, before.vips, e.actual.vips, netip.Addr.Compare, onDevice, nil)
}

func (e *engine) realServerDifferences(id ipvs.ServerID, was, is *actualServer) {
	name := func(addr netip.AddrPort) string { return fmt.Sprintf("%s of virtual server %s", addr, id) }
	compare(e, drift.RealServer, was.realServers, is.realServers, netip.AddrPort.Compare, name,
		func(addr netip.AddrPort, was, is *actualRealServer) {
			if is.weight != was.weight {
				e.Found = append(e.Found, drift.Difference{Kind: drift.RealServer, State: drift.Changed, Object: name(addr),
					Aspect: "weight", Want: fmt.Sprint(was.weight), Have: fmt.Sprint(is.weight)})
			}
		})
}

func (e *engine) memberName(m member) string {
	set := setOf(m.set, e.family)
	return m.entry.Text(set) + " of set " + set.Name
}

// marked returns the entry with its mark.
func (m member) marked(s shared) ipset.Entry {
	m.entry.Mark, m.entry.Mask = s.mark, s.mask
	return m.entry
}

// routeDifferences compares the actual routes with those that were made.
func (e *engine) routeDifferences(have map[netip.Prefix]netip.Addr) {
	compare(e, drift.Route, e.routed, have, netip.Prefix.Compare, onDevice, func(r netip.Prefix, was, is netip.Addr) {
		if is != was {
			e.Found = append(e.Found, drift.Difference{Kind: drift.Route, State: drift.Changed, Object: onDevice(r),
				Aspect: "source", Want: was.String(), Have: is.String()})
		}
	})
}

// realServer returns the real server at an address; nil if there was none, or if the former state is not known.
func (h *actual) realServer(id ipvs.ServerID, addr netip.AddrPort) *actualRealServer {
	if h == nil || h.servers[id] == nil {
		return nil
	}
	return h.servers[id].realServers[addr]
}
