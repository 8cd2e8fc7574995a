package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// testGrace is the grace period of engines in tests.
const testGrace = 5 * time.Minute

// fakeKernel holds what the kernel would, and refuses what the kernel refuses.
type fakeKernel struct {
	family      plan.Family
	virtual     map[ipvs.ServerID]*ipvs.ActualServer
	set         map[string]map[ipset.Entry]ipset.Entry // by name; entries by what they are without marks
	addresses   set.Set[netip.Addr]
	local       map[netip.Prefix]netip.Addr
	unrouted    set.Set[netip.Addr] // of addresses
	portRoutes  set.Set[netip.Addr]
	ports       set.Set[plan.Address] // nil if there is no table for them
	brokenPorts bool                  // the table is not what it should be
	hostAddrs   set.Set[netip.Addr]
	fixed       xtables.Desired
	otherMode   bool
	connections map[netip.AddrPort]uint32
	calls       []string
	fail        string // calls that begin with this fail
	before      func() // is called before each change
}

func newFakeKernel(f plan.Family) *fakeKernel {
	return &fakeKernel{
		family: f, virtual: map[ipvs.ServerID]*ipvs.ActualServer{}, set: map[string]map[ipset.Entry]ipset.Entry{},
		addresses: set.Set[netip.Addr]{},
		local:     map[netip.Prefix]netip.Addr{}, hostAddrs: set.Set[netip.Addr]{},
		unrouted: set.Set[netip.Addr]{}, portRoutes: set.Set[netip.Addr]{},
		connections: map[netip.AddrPort]uint32{},
	}
}

var errRefused = errors.New("refused")

func (k *fakeKernel) call(format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	k.calls = append(k.calls, text)
	if k.before != nil {
		k.before()
	}
	if k.fail != "" && strings.HasPrefix(text, k.fail) {
		return errRefused
	}
	return nil
}

type fakeServers struct{ *fakeKernel }

func (k fakeServers) Each(_ plan.Family, each func(*ipvs.ActualServer)) error {
	list, err := k.list()
	for _, v := range list {
		each(v)
	}
	return err
}

func (k fakeServers) list() (map[ipvs.ServerID]*ipvs.ActualServer, error) {
	out := map[ipvs.ServerID]*ipvs.ActualServer{}
	for id := range k.virtual {
		out[id], _ = k.Get(id)
	}
	return out, k.call("list servers")
}

func (k fakeServers) Get(id ipvs.ServerID) (*ipvs.ActualServer, error) {
	v := k.virtual[id]
	if v == nil {
		return nil, nil
	}
	out := &ipvs.ActualServer{Server: v.Server, Foreign: v.Foreign, RealServers: map[netip.AddrPort]ipvs.ActualRealServer{}}
	for a, d := range v.RealServers {
		d.Active = k.connections[a]
		out.RealServers[a] = d
	}
	return out, nil
}

func (k fakeServers) RealServers(id ipvs.ServerID, _ int) (map[netip.AddrPort]ipvs.ActualRealServer, error) {
	v, err := k.Get(id)
	if v == nil {
		return nil, err
	}
	return v.RealServers, err
}

func (k fakeServers) Apply(ops []ipvs.Op) []error {
	var errs []error
	for _, op := range ops {
		errs = append(errs, k.do(op))
	}
	return errs
}

func (k fakeServers) do(op ipvs.Op) error {
	id, d := op.Server.ID, op.RealServer
	v := k.virtual[id]
	exists := false
	if v != nil {
		_, exists = v.RealServers[d.Addr]
	}
	switch op.Kind {
	case ipvs.AddServer, ipvs.UpdateServer, ipvs.DeleteServer:
		what := map[ipvs.OpKind]string{ipvs.AddServer: "add", ipvs.UpdateServer: "update", ipvs.DeleteServer: "delete"}[op.Kind]
		if err := k.call("%s server %s", what, id); err != nil {
			return err
		}
		if v != nil == (op.Kind == ipvs.AddServer) {
			return fmt.Errorf("%s server %s: it exists: %t", what, id, v != nil)
		}
	default:
		what := map[ipvs.OpKind]string{ipvs.AddRealServer: "add", ipvs.UpdateRealServer: "update",
			ipvs.DeleteRealServer: "delete"}[op.Kind]
		if err := k.call("%s real server %s %s %d", what, id, d.Addr, d.Weight); err != nil {
			return err
		}
		if v == nil || exists == (op.Kind == ipvs.AddRealServer) {
			return fmt.Errorf("%s real server %s of %s: it exists: %t", what, d.Addr, id, exists)
		}
	}
	switch op.Kind {
	case ipvs.AddServer:
		k.virtual[id] = &ipvs.ActualServer{Server: op.Server, RealServers: map[netip.AddrPort]ipvs.ActualRealServer{}}
	case ipvs.UpdateServer:
		v.Server = op.Server
	case ipvs.DeleteServer:
		delete(k.virtual, id)
	case ipvs.DeleteRealServer:
		delete(v.RealServers, d.Addr)
	default:
		v.RealServers[d.Addr] = ipvs.ActualRealServer{RealServer: d}
	}
	return nil
}

type fakeSets struct{ *fakeKernel }

func (k fakeSets) Names() ([]string, error) { return slices.Sorted(maps.Keys(k.set)), nil }

func (k fakeSets) Ensure(s ipset.Set) (bool, error) {
	if k.set[s.Name] != nil {
		return false, nil
	}
	k.set[s.Name] = map[ipset.Entry]ipset.Entry{}
	return true, nil
}

func bare(e ipset.Entry) ipset.Entry { return member{entry: e}.key().entry(marked{}) }

func (k fakeSets) Sizes(names []string) (map[string]int, error) {
	sizes := map[string]int{}
	for _, name := range names {
		if entries, there := k.set[name]; there {
			sizes[name] = len(entries)
		}
	}
	return sizes, nil
}

func (k fakeSets) Entries(s ipset.Set, begin func(), each func(ipset.Entry)) error {
	begin()
	for _, e := range k.set[s.Name] {
		each(e)
	}
	return nil
}

func (k fakeSets) Add(s ipset.Set, list []ipset.Entry) error {
	if err := k.call("add %d to %s", len(list), s.Name); err != nil {
		return err
	}
	for _, e := range list {
		k.set[s.Name][bare(e)] = e
	}
	return nil
}

func (k fakeSets) Remove(s ipset.Set, list []ipset.Entry) error {
	if err := k.call("remove %d from %s", len(list), s.Name); err != nil {
		return err
	}
	for _, e := range list {
		delete(k.set[s.Name], bare(e))
	}
	return nil
}

func (k fakeSets) Destroy(name string) error {
	delete(k.set, name)
	return k.call("destroy %s", name)
}

type fakeDevice struct{ *fakeKernel }

func (fakeDevice) Ensure() (string, error) { return "", nil }

func (k fakeDevice) Addresses(plan.Family) (set.Set[netip.Addr], error) {
	return maps.Clone(k.addresses), nil
}

func (k fakeDevice) AddAddresses(list []netip.Addr) error {
	k.addresses.Insert(list...)
	return k.call("add addresses %v", list)
}

func (k fakeDevice) RemoveAddresses(list []netip.Addr) error {
	k.addresses.Delete(list...)
	k.unrouted.Delete(list...)
	return k.call("remove addresses %v", list)
}

func (k fakeDevice) UnroutedAddresses(plan.Family) (set.Set[netip.Addr], error) {
	return k.unrouted.Difference(k.unrouted.Difference(k.addresses)), nil
}

func (k fakeDevice) AddUnrouted(list []netip.Addr) error {
	for _, a := range list {
		if !k.portRoutes.Has(a) {
			return fmt.Errorf("%s is to lose its route, and none of its ports is local", a)
		}
	}
	k.addresses.Insert(list...)
	k.unrouted.Insert(list...)
	return k.call("add unrouted %v", list)
}

func (k fakeDevice) RouteAddresses(list []netip.Addr) error {
	k.unrouted.Delete(list...)
	return k.call("route addresses %v", list)
}

func (k fakeDevice) PortRoutes(plan.Family) (set.Set[netip.Addr], error) {
	return maps.Clone(k.portRoutes), nil
}

func (k fakeDevice) AddPortRoutes(list []netip.Addr) error {
	k.portRoutes.Insert(list...)
	return k.call("add port routes %v", list)
}

func (k fakeDevice) RemovePortRoutes(list []netip.Addr) error {
	k.portRoutes.Delete(list...)
	return k.call("remove port routes %v", list)
}

// fakePorts is the table that diverts ports.
type fakePorts struct{ *fakeKernel }

func (k fakePorts) List() (set.Set[plan.Address], bool, bool, error) {
	return maps.Clone(k.ports), k.ports != nil, k.ports != nil && !k.brokenPorts, nil
}

func (k fakePorts) Write(list []plan.Address) error {
	k.ports, k.brokenPorts = set.Set[plan.Address]{}, false
	return k.divert(list, "write ports %v")
}

func (k fakePorts) Add(list []plan.Address) error {
	if k.ports == nil {
		return errors.New("there is no table for ports")
	}
	return k.divert(list, "add ports %v")
}

func (k fakePorts) divert(list []plan.Address, text string) error {
	for _, p := range list {
		if !k.portRoutes.Has(p.Addr) {
			return fmt.Errorf("%v is to be local, and has no route", p)
		}
		k.ports.Insert(p)
	}
	return k.call(text, list)
}

func (k fakePorts) Remove(list []plan.Address) error {
	for _, p := range list {
		if !k.ports.Has(p) {
			return fmt.Errorf("%v is to be removed, and is not there", p)
		}
		delete(k.ports, p)
	}
	return k.call("remove ports %v", list)
}

func (k fakePorts) Clear() error {
	k.ports = nil
	return k.call("clear ports")
}

func (k fakeDevice) Routes(plan.Family) (map[netip.Prefix]netip.Addr, error) {
	return maps.Clone(k.local), nil
}

func (k fakeDevice) AddRoute(p netip.Prefix, src netip.Addr) error {
	k.local[p] = src
	return k.call("add route %s", p)
}

func (k fakeDevice) RemoveRoute(p netip.Prefix) error {
	delete(k.local, p)
	return k.call("remove route %s", p)
}

type fakeTables struct{ *fakeKernel }

func (k fakeTables) Sync(_ context.Context, x xtables.Desired) (int, error) {
	k.fixed = x
	return 1, k.call("rules")
}

func (k fakeTables) ServiceChains(context.Context) (bool, error) { return k.otherMode, nil }

// fakeEngine is an engine over a kernel without anything.
func fakeEngine(f plan.Family, o Options) (*engine, *fakeKernel) {
	k := newFakeKernel(f)
	return engineOver(k, o), k
}

func engineOver(k *fakeKernel, o Options) *engine {
	return &engine{family: k.family, options: o, grace: testGrace, log: slog.New(slog.DiscardHandler), machine: machine{
		servers: fakeServers{k}, sets: fakeSets{k}, device: fakeDevice{k}, ports: fakePorts{k}, tables: fakeTables{k},
		host: func(plan.Family) (set.Set[netip.Addr], error) { return maps.Clone(k.hostAddrs), nil },
		reader: func() (machine, func(), error) {
			return machine{servers: fakeServers{k}, sets: fakeSets{k}, device: fakeDevice{k}}, func() {}, nil
		},
	}}
}

// simulation is what packets meet where the kernel holds what it does.
func (k *fakeKernel) simulation() (*packetsim.Machine, error) {
	m := newSimulation(k.family)
	for id := range setCount {
		for _, e := range k.set[setName(id, k.family)] {
			m.addEntry(id, e)
		}
	}
	for _, v := range k.virtual {
		s := server{Server: v.Server}
		for _, d := range v.RealServers {
			s.realServers = append(s.realServers, d.RealServer)
		}
		m.addServer(s)
	}
	for r := range k.local {
		m.Added[r] = true
	}
	for a := range k.addresses {
		if !k.unrouted.Has(a) {
			m.Added[xtables.Single(a)] = true
		}
	}
	for a := range k.ports {
		m.Diverted[a] = k.portRoutes.Has(a.Addr)
	}
	return m.Machine, restore.IPTables(m.Machine, k.fixed.Render())
}

// text is all that the kernel holds, in a stable order.
func (k *fakeKernel) text() string {
	var out strings.Builder
	for _, id := range slices.SortedFunc(maps.Keys(k.virtual), compareServers) {
		v := k.virtual[id]
		fmt.Fprintf(&out, "%s %+v\n", id, v.Server)
		for _, a := range slices.SortedFunc(maps.Keys(v.RealServers), netip.AddrPort.Compare) {
			fmt.Fprintf(&out, "  %s %d\n", a, v.RealServers[a].Weight)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(k.set)) {
		var lines []string
		for _, e := range k.set[name] {
			lines = append(lines, fmt.Sprintf("  %+v\n", e))
		}
		slices.Sort(lines)
		fmt.Fprintf(&out, "%s\n%s", name, strings.Join(lines, ""))
	}
	fmt.Fprintln(&out, slices.SortedFunc(maps.Keys(k.addresses), netip.Addr.Compare))
	fmt.Fprintln(&out, slices.SortedFunc(maps.Keys(k.unrouted), netip.Addr.Compare))
	fmt.Fprintln(&out, slices.SortedFunc(maps.Keys(k.portRoutes), netip.Addr.Compare))
	fmt.Fprintln(&out, slices.SortedFunc(maps.Keys(k.ports), comparePorts), k.ports != nil)
	for _, p := range slices.SortedFunc(maps.Keys(k.local), netip.Prefix.Compare) {
		fmt.Fprintln(&out, p, k.local[p])
	}
	if k.fixed.Chains != nil {
		out.WriteString(k.fixed.Render())
	}
	return out.String()
}
