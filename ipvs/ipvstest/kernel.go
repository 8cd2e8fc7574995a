// Package ipvstest has what mode ipvs programs of a kernel, for tests: virtual servers, sets, addresses and routes, and the tables beside them.
package ipvstest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// Kernel holds what the kernel would of one family, and refuses what the kernel refuses.
type Kernel struct {
	Family     plan.Family
	Virtual    map[ipvs.ServerID]*ipvs.ActualServer
	Set        map[string]map[ipset.Entry]ipset.Entry // by name; entries by what they are without marks
	Kinds      map[string]ipset.Set                   // of the sets
	Device     bool                                   // the interface is there, and on
	Addresses  set.Set[netip.Addr]                    // of it
	Local      map[netip.Prefix]netip.Addr            // ranges that have a route, with its source
	Unrouted   set.Set[netip.Addr]                    // of addresses
	PortRoutes set.Set[netip.Addr]
	Ports      set.Set[plan.Address] // nil if there is no table for them
	// BrokenPorts and BrokenGuard say that a table is not what it should be, and Guard that there is one for marks.
	BrokenPorts, BrokenGuard, Guard bool
	HostAddrs                       set.Set[netip.Addr]
	Fixed                           xtables.Desired
	OtherMode                       bool
	Connections                     map[netip.AddrPort]uint32 // of real servers
	// InUse reports whether rules ask a set, which can't be removed then; nil if none is in use.
	InUse func(set string) bool
	// Exact says that a change is an error that expects something else than there is.
	Exact bool
	Calls []string
	Fail  string // calls that begin with this fail
	// Before is called before each change, if it is not nil.
	Before func()
}

// New returns a Kernel of a family that holds nothing.
func New(f plan.Family) *Kernel {
	return &Kernel{
		Family: f, Virtual: map[ipvs.ServerID]*ipvs.ActualServer{}, Set: map[string]map[ipset.Entry]ipset.Entry{}, Kinds: map[string]ipset.Set{},
		Addresses: set.Set[netip.Addr]{}, Local: map[netip.Prefix]netip.Addr{}, HostAddrs: set.Set[netip.Addr]{},
		Unrouted: set.Set[netip.Addr]{}, PortRoutes: set.Set[netip.Addr]{},
		Connections: map[netip.AddrPort]uint32{},
	}
}

// Empty reports whether nothing is there that mode ipvs has programmed, but for virtual servers of others, and sets that rules ask.
func (k *Kernel) Empty(foreign func(ipvs.ServerID) bool) bool {
	for id := range k.Virtual {
		if !foreign(id) {
			return false
		}
	}
	for name := range k.Set {
		if names.IsOurSet(name) && (k.InUse == nil || !k.InUse(name)) {
			return false
		}
	}
	return !k.Device && !k.Guard && k.Ports == nil
}

// ErrRefused is the error of calls that are to fail.
var ErrRefused = errors.New("refused")

// Call notes a call, and returns the error with which it is to fail, if it is.
func (k *Kernel) Call(format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	k.Calls = append(k.Calls, text)
	if k.Before != nil {
		k.Before()
	}
	if k.Fail != "" && strings.HasPrefix(text, k.Fail) {
		return ErrRefused
	}
	return nil
}

// Servers are virtual servers, as those of package ipvs.
type Servers struct{ *Kernel }

// Each is as that of ipvs.Servers.
func (k Servers) Each(f plan.Family, each func(*ipvs.ActualServer)) error {
	if f != k.Family {
		return nil
	}
	list, err := k.List()
	for _, v := range list {
		each(v)
		clear(v.RealServers) // They are valid only during the call.
	}
	return err
}

// List returns all.
func (k Servers) List() (map[ipvs.ServerID]*ipvs.ActualServer, error) {
	out := map[ipvs.ServerID]*ipvs.ActualServer{}
	for id := range k.Virtual {
		out[id], _ = k.Get(id)
	}
	return out, k.Call("list servers")
}

// Get is as that of ipvs.Servers.
func (k Servers) Get(id ipvs.ServerID) (*ipvs.ActualServer, error) {
	v := k.Virtual[id]
	if v == nil {
		return nil, nil
	}
	out := &ipvs.ActualServer{Server: v.Server, Foreign: v.Foreign, RealServers: map[netip.AddrPort]ipvs.ActualRealServer{}}
	for a, d := range v.RealServers {
		d.Active = k.Connections[a]
		out.RealServers[a] = d
	}
	return out, nil
}

// RealServers is as that of ipvs.Servers.
func (k Servers) RealServers(id ipvs.ServerID, _ int) (map[netip.AddrPort]ipvs.ActualRealServer, error) {
	return realServers(k.Get(id))
}

// realServers are those of a virtual server; none if there is none.
func realServers(v *ipvs.ActualServer, err error) (map[netip.AddrPort]ipvs.ActualRealServer, error) {
	if v == nil {
		return nil, err
	}
	return v.RealServers, err
}

// Apply is as that of ipvs.Servers.
func (k Servers) Apply(ops []ipvs.Op) []error {
	var errs []error
	for i, op := range ops {
		err := k.Do(op)
		deleted := func(later ipvs.Op) bool { return later.Kind == ipvs.DeleteServer && later.Server.ID == op.Server.ID }
		if op.Kind == ipvs.DeleteRealServer && errors.Is(err, unix.ESRCH) && slices.ContainsFunc(ops[i+1:], deleted) {
			err = nil
		}
		errs = append(errs, err)
	}
	return errs
}

var doing = [...]string{ipvs.AddServer: "add server", ipvs.UpdateServer: "update server", ipvs.DeleteServer: "delete server",
	ipvs.AddRealServer: "add real server", ipvs.UpdateRealServer: "update real server", ipvs.DeleteRealServer: "delete real server"}

// Do carries out one change. Unless the Kernel is Exact, adding what exists changes it, changing a real server that is gone adds it, and removing
// a virtual server or a real server that is gone is no error, as with ipvs.Servers.
func (k Servers) Do(op ipvs.Op) error {
	id, d := op.Server.ID, op.RealServer
	v := k.Virtual[id]
	exists, text := v != nil, id.String()
	if op.Kind > ipvs.DeleteServer {
		text += fmt.Sprintf(" %s %d", d.Addr, d.Weight)
		exists = false
		if v != nil {
			_, exists = v.RealServers[d.Addr]
		}
	}
	if err := k.Call("%s %s", doing[op.Kind], text); err != nil {
		return err
	}
	adds := op.Kind == ipvs.AddServer || op.Kind == ipvs.AddRealServer
	switch {
	case v == nil && op.Kind != ipvs.AddServer && op.Kind != ipvs.DeleteServer:
		return fmt.Errorf("%s: there is no such virtual server: %w", op, unix.ESRCH)
	case k.Exact && exists == adds:
		return fmt.Errorf("%s %s: it exists: %t", doing[op.Kind], text, exists)
	}
	switch op.Kind {
	case ipvs.AddServer, ipvs.UpdateServer:
		if v == nil {
			k.Virtual[id] = &ipvs.ActualServer{Server: op.Server, RealServers: map[netip.AddrPort]ipvs.ActualRealServer{}}
		} else {
			v.Server = op.Server
		}
	case ipvs.DeleteServer:
		delete(k.Virtual, id)
	case ipvs.DeleteRealServer:
		delete(v.RealServers, d.Addr)
	default:
		v.RealServers[d.Addr] = ipvs.ActualRealServer{RealServer: d}
	}
	return nil
}

// Sets are sets, as those of package ipset.
type Sets struct{ *Kernel }

// Names is as that of ipset.Sets.
func (k Sets) Names() ([]string, error) { return slices.Sorted(maps.Keys(k.Set)), nil }

// Ensure is as that of ipset.Sets.
func (k Sets) Ensure(s ipset.Set) (bool, error) {
	if k.Set[s.Name] != nil && k.Kinds[s.Name] == s {
		return false, nil
	}
	if len(s.Name) > 31 {
		return false, fmt.Errorf("making ipset %s: %w", s.Name, unix.ENAMETOOLONG)
	}
	k.Set[s.Name], k.Kinds[s.Name] = map[ipset.Entry]ipset.Entry{}, s
	return true, nil
}

func bare(e ipset.Entry) ipset.Entry {
	e.Mark, e.Mask = 0, 0
	return e
}

// Sizes is as that of ipset.Sets.
func (k Sets) Sizes(names []string) (map[string]int, error) {
	sizes := map[string]int{}
	for _, name := range names {
		if entries, there := k.Set[name]; there {
			sizes[name] = len(entries)
		}
	}
	return sizes, nil
}

// Entries is as that of ipset.Sets.
func (k Sets) Entries(s ipset.Set, begin func(), each func(ipset.Entry)) error {
	begin()
	if k.Set[s.Name] == nil {
		return fmt.Errorf("reading ipset %s: %w", s.Name, unix.ENOENT)
	}
	for _, e := range k.Set[s.Name] {
		each(e)
	}
	return nil
}

func (k Sets) change(what string, s ipset.Set, list []ipset.Entry, do func(in map[ipset.Entry]ipset.Entry, e ipset.Entry)) error {
	if err := k.Call("%s %s", what, s.Name); err != nil {
		return err
	}
	in := k.Set[s.Name]
	if in == nil {
		return fmt.Errorf("ipset %s, %d entries: %w", s.Name, len(list), unix.ENOENT)
	}
	for _, e := range list {
		do(in, e)
	}
	return nil
}

// Add is as that of ipset.Sets.
func (k Sets) Add(s ipset.Set, list []ipset.Entry) error {
	return k.change(fmt.Sprintf("add %d to", len(list)), s, list, func(in map[ipset.Entry]ipset.Entry, e ipset.Entry) { in[bare(e)] = e })
}

// Remove is as that of ipset.Sets.
func (k Sets) Remove(s ipset.Set, list []ipset.Entry) error {
	return k.change(fmt.Sprintf("remove %d from", len(list)), s, list, func(in map[ipset.Entry]ipset.Entry, e ipset.Entry) { delete(in, bare(e)) })
}

// Destroy is as that of ipset.Sets.
func (k Sets) Destroy(name string) error {
	if k.InUse != nil && k.InUse(name) {
		return fmt.Errorf("ipset %s cannot be removed, since rules still use it: %w", name, unix.EBUSY)
	}
	delete(k.Set, name)
	delete(k.Kinds, name)
	return k.Call("destroy %s", name)
}

// Device is the interface with the addresses of Services, as that of package host.
type Device struct{ *Kernel }

// Ensure is as that of host.Device.
func (k Device) Ensure() (string, error) {
	if k.Kernel.Device || k.Exact {
		return "", nil
	}
	k.Kernel.Device = true
	return "removed", nil
}

// Up is as that of host.Device.
func (k Device) Up() bool { return k.Kernel.Device }

// EnableIPv6 is as that of host.Device, where IPv6 is on.
func (k Device) EnableIPv6(string) error { return nil }

// Close is as that of host.Device.
func (k Device) Close() error { return nil }

// there returns the error of changes to an interface that is gone.
func (k Device) there() error {
	if k.Kernel.Device || k.Exact {
		return nil
	}
	return unix.ENODEV
}

// Addresses is as that of host.Device.
func (k Device) Addresses(plan.Family) (set.Set[netip.Addr], error) {
	return maps.Clone(k.Kernel.Addresses), k.there()
}

// each changes addresses one after the other.
func (k Device) each(what string, list []netip.Addr, do func(netip.Addr)) error {
	if err := k.there(); err != nil {
		return err
	}
	for _, a := range list {
		do(a)
	}
	return k.Call("%s %v", what, list)
}

// AddAddresses is as that of host.Device. An address that is there keeps its route, or is without one.
func (k Device) AddAddresses(list []netip.Addr) error {
	return k.each("add addresses", list, func(a netip.Addr) { k.Kernel.Addresses.Insert(a) })
}

// RemoveAddresses is as that of host.Device.
func (k Device) RemoveAddresses(list []netip.Addr) error {
	return k.each("remove addresses", list, func(a netip.Addr) {
		k.Kernel.Addresses.Delete(a)
		k.Unrouted.Delete(a)
	})
}

// UnroutedAddresses is as that of host.Device.
func (k Device) UnroutedAddresses(plan.Family) (set.Set[netip.Addr], error) {
	return k.Unrouted.Difference(k.Unrouted.Difference(k.Kernel.Addresses)), k.there()
}

// AddUnrouted is as that of host.Device.
func (k Device) AddUnrouted(list []netip.Addr) error {
	for _, a := range list {
		if k.Exact && !k.Kernel.PortRoutes.Has(a) {
			return fmt.Errorf("%s is to lose its route, and none of its ports is local", a)
		}
	}
	return k.each("add unrouted", list, func(a netip.Addr) {
		k.Kernel.Addresses.Insert(a)
		k.Unrouted.Insert(a)
	})
}

// RouteAddresses is as that of host.Device.
func (k Device) RouteAddresses(list []netip.Addr) error {
	return k.each("route addresses", list, func(a netip.Addr) { k.Unrouted.Delete(a) })
}

// PortRoutes is as that of host.Device.
func (k Device) PortRoutes(plan.Family) (set.Set[netip.Addr], error) {
	return maps.Clone(k.Kernel.PortRoutes), k.there()
}

// AddPortRoutes is as that of host.Device.
func (k Device) AddPortRoutes(list []netip.Addr) error {
	return k.each("add port routes", list, func(a netip.Addr) { k.Kernel.PortRoutes.Insert(a) })
}

// RemovePortRoutes is as that of host.Device.
func (k Device) RemovePortRoutes(list []netip.Addr) error {
	return k.each("remove port routes", list, func(a netip.Addr) { k.Kernel.PortRoutes.Delete(a) })
}

// Routes is as that of host.Device.
func (k Device) Routes(plan.Family) (map[netip.Prefix]netip.Addr, error) {
	return maps.Clone(k.Local), k.there()
}

// AddRoute is as that of host.Device.
func (k Device) AddRoute(p netip.Prefix, src netip.Addr) error {
	if err := k.there(); err != nil {
		return err
	}
	k.Local[p] = src
	return k.Call("add route %s", p)
}

// RemoveRoute is as that of host.Device.
func (k Device) RemoveRoute(p netip.Prefix) error {
	delete(k.Local, p)
	return k.Call("remove route %s", p)
}

// Lose removes the interface, as another program may do it, with all that it has. It returns what that changes.
func (k Device) Lose() []host.DeviceChange {
	k.Kernel.Device = false
	clear(k.Kernel.Addresses)
	clear(k.Local)
	clear(k.Unrouted)
	clear(k.Kernel.PortRoutes)
	return []host.DeviceChange{{}}
}

// Ports is the table that diverts ports, with its routing rule, as that of package nftrules.
type Ports struct{ *Kernel }

// List is as that of nftrules.Ports.
func (k Ports) List() (ports set.Set[plan.Address], exists, complete bool, err error) {
	return maps.Clone(k.Kernel.Ports), k.Kernel.Ports != nil, k.Kernel.Ports != nil && !k.BrokenPorts, nil
}

// Write is as that of nftrules.Ports.
func (k Ports) Write(list []plan.Address) error {
	if err := k.routed(list); err != nil {
		return err
	}
	k.Kernel.Ports, k.BrokenPorts = set.Set[plan.Address]{}, false
	k.Kernel.Ports.Insert(list...)
	return k.Call("write ports %v", list)
}

// Add is as that of nftrules.Ports.
func (k Ports) Add(list []plan.Address) error {
	if k.Kernel.Ports == nil {
		return fmt.Errorf("there is no table for ports: %w", unix.ENOENT)
	}
	if err := k.routed(list); err != nil {
		return err
	}
	k.Kernel.Ports.Insert(list...)
	return k.Call("add ports %v", list)
}

// routed returns an error if a port is to be local whose address has no route.
func (k Ports) routed(list []plan.Address) error {
	for _, p := range list {
		if k.Exact && !k.PortRoutes.Has(p.Addr) {
			return fmt.Errorf("%v is to be local, and has no route", p)
		}
	}
	return nil
}

// Remove is as that of nftrules.Ports.
func (k Ports) Remove(list []plan.Address) error {
	for _, p := range list {
		if !k.Kernel.Ports.Has(p) {
			return fmt.Errorf("%v is to be removed, and is not there: %w", p, unix.ENOENT)
		}
	}
	k.Kernel.Ports.Delete(list...)
	return k.Call("remove ports %v", list)
}

// Clear is as that of nftrules.Ports.
func (k Ports) Clear() error {
	k.Kernel.Ports = nil
	return k.Call("clear ports")
}

// Guard is the table that guards marks, as that of package nftrules.
type Guard struct{ *Kernel }

// Intact is as that of nftrules.Guards.
func (k Guard) Intact() (bool, error) { return k.Kernel.Guard && !k.BrokenGuard, nil }

// Ensure is as that of nftrules.Guards.
func (k Guard) Ensure() (was, written bool, err error) {
	if was = k.Kernel.Guard; was && !k.BrokenGuard {
		return true, false, nil
	}
	k.Kernel.Guard, k.BrokenGuard = true, false
	return was, true, k.Call("write guard")
}

// Tables are rules, as those of package xtables.
type Tables struct{ *Kernel }

// Sync is as that of xtables.Tables.
func (k Tables) Sync(_ context.Context, x xtables.Desired) (int, error) {
	k.Fixed = x
	return 1, k.Call("rules")
}

// ServiceChains is as that of xtables.Tables.
func (k Tables) ServiceChains(context.Context) (bool, error) { return k.OtherMode, nil }

// Fill has packets meet, in a machine, what the kernel holds besides rules. It keeps the sets that the machine has.
func (k *Kernel) Fill(m *packetsim.Machine) {
	for name, kind := range k.Kinds {
		s := m.Sets[name]
		if s == nil {
			s = &packetsim.Set{Name: name, Family: k.Family}
			m.Sets[name] = s
		}
		method, dimensions, _ := strings.Cut(kind.Type, ":")
		if s.Dimensions = strings.Split(dimensions, ","); method == "bitmap" {
			s.Family = 0
		}
		s.Entries = make(map[packetsim.Element]packetsim.Entry, len(k.Set[name]))
		for _, e := range k.Set[name] {
			s.Entries[elementOf(s, e)] = packetsim.Entry{Mark: e.Mark, Mask: e.Mask, Text: e.Text(ipset.Set{Type: kind.Type})}
		}
	}
	clear(m.Servers)
	for id, v := range k.Virtual {
		s := &packetsim.Server{Text: packetsim.Text(id.String()), Scheduler: v.Scheduler}
		for _, a := range slices.SortedFunc(maps.Keys(v.RealServers), netip.AddrPort.Compare) {
			s.RealServers = append(s.RealServers, packetsim.RealServer{Text: packetsim.Text(a.String()), Addr: a, Weight: int(v.RealServers[a].Weight)})
		}
		key := packetsim.ServerKey{Mark: id.Mark}
		if id.Mark == 0 {
			key = packetsim.ServerKey{Protocol: id.Protocol.Lower(), Addr: netip.AddrPortFrom(id.Addr, id.Port)}
		}
		m.Servers[key] = s
	}
	clear(m.Added)
	for r := range k.Local {
		m.Added[r] = true
	}
	for a := range k.Addresses {
		if !k.Unrouted.Has(a) {
			m.Added[xtables.Single(a)] = true
		}
	}
	clear(m.Diverted)
	for a := range k.Ports {
		m.Diverted[a] = k.PortRoutes.Has(a.Addr) && !k.BrokenPorts
	}
}

// elementOf returns what identifies an entry of a set.
func elementOf(s *packetsim.Set, e ipset.Entry) (at packetsim.Element) {
	addrs := []netip.Addr{e.Addr, e.Addr2}
	for i, d := range s.Dimensions {
		switch {
		case d == "port" && s.Family == 0:
			at[i].Port = e.Port
		case d == "port":
			at[i] = packetsim.Field{Protocol: e.Protocol.Lower(), Port: e.Port}
		case d == "net":
			at[i].Prefix = e.Net
		default:
			at[i].Prefix = xtables.Single(addrs[0])
			addrs = addrs[1:]
		}
	}
	return at
}

// Text is all that the kernel holds, in a stable order.
func (k *Kernel) Text() string {
	var out strings.Builder
	for _, id := range slices.SortedFunc(maps.Keys(k.Virtual), compareServers) {
		v := k.Virtual[id]
		fmt.Fprintf(&out, "%s %+v\n", id, v.Server)
		for _, a := range slices.SortedFunc(maps.Keys(v.RealServers), netip.AddrPort.Compare) {
			fmt.Fprintf(&out, "  %s %d\n", a, v.RealServers[a].Weight)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(k.Set)) {
		var lines []string
		for _, e := range k.Set[name] {
			lines = append(lines, fmt.Sprintf("  %+v\n", e))
		}
		slices.Sort(lines)
		fmt.Fprintf(&out, "%s\n%s", name, strings.Join(lines, ""))
	}
	for _, some := range []set.Set[netip.Addr]{k.Addresses, k.Unrouted, k.PortRoutes} {
		fmt.Fprintln(&out, slices.SortedFunc(maps.Keys(some), netip.Addr.Compare))
	}
	fmt.Fprintln(&out, slices.SortedFunc(maps.Keys(k.Ports), comparePorts), k.Ports != nil)
	for _, p := range slices.SortedFunc(maps.Keys(k.Local), netip.Prefix.Compare) {
		fmt.Fprintln(&out, p, k.Local[p])
	}
	if k.Fixed.Chains != nil {
		out.WriteString(k.Fixed.Render())
	}
	return out.String()
}

func compareServers(a, b ipvs.ServerID) int {
	return cmp.Or(cmp.Compare(a.Mark, b.Mark), a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
}

func comparePorts(a, b plan.Address) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}
