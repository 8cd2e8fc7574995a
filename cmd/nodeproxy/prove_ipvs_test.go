package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"nodeproxy/config"
	"nodeproxy/internal/set"
	"nodeproxy/ipvs"
	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
	kernel "nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// ipvsRules are virtual servers with all that is beside them. A nodeproxy may be in mode iptables, too, and removes these.
type ipvsRules struct {
	*ipvstest.Node
	world    *world
	machines map[plan.Family]*packetsim.Machine // nil where rules have changed
	resized  time.Time                          // when others have last changed how many entries a set has
}

// ipvsSettings are the kernel settings of mode ipvs, as they are before it is in force.
var ipvsSettings = map[string]string{"net/ipv4/vs/conntrack": "0", "net/ipv4/ip_forward": "0", "net/ipv4/vs/expire_nodest_conn": "0",
	"net/ipv4/vs/expire_quiescent_template": "0", "net/ipv4/vs/conn_reuse_mode": "1"}

func newIPVSRules(w *world) nodeRules {
	v := &ipvsRules{Node: ipvstest.NewNode(w.draw), world: w, machines: map[plan.Family]*packetsim.Machine{}}
	for _, f := range plan.Families {
		v.Held[f].HostAddrs.Insert(nodeAddress(f))
	}
	v.Changed = func(f plan.Family, by *xtablestest.Process, input string) {
		if delete(v.machines, f); by != nil {
			w.changed(f, by, input)
		}
	}
	v.Altered = func(f plan.Family, by *ipvstest.Process, what string) {
		if by != nil {
			w.changed(f, by, what)
		}
	}
	v.Failed = w.unsteady // A mark may come before its virtual server, which has failed.
	for name, value := range ipvsSettings {
		v.setting(name, value)
	}
	return v
}

// setting writes a kernel setting.
func (v *ipvsRules) setting(name, value string) {
	path := filepath.Join(v.world.cfg.SysctlDir, name)
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, []byte(value+"\n"), 0o644)
	}
	if err != nil {
		panic(err)
	}
}

func (v *ipvsRules) start() (ruleWriter, func(*config.Config) machine) {
	p := v.Start()
	return p, func(cfg *config.Config) machine {
		n := v.node(p)
		if cfg.Mode == iptablesMode.name {
			return machine{kernel: tablesFor(p.Process), left: map[string]any{ipvsMode.name: n}}
		}
		return machine{kernel: n}
	}
}

// node is what mode ipvs works with in a process.
func (v *ipvsRules) node(p *ipvstest.Process) *ipvs.Node {
	n := &ipvs.Node{
		Servers: ipvstest.ProcessServers{Process: p}, Sets: ipvstest.ProcessSets{Process: p}, Tables: map[plan.Family]*xtables.Tables{},
		Guards: map[plan.Family]ipvs.Guard{}, Ports: map[plan.Family]ipvs.PortTable{},
		Device: func() (ipvs.Device, error) { return ipvstest.ProcessDevice{Process: p}.Open(), nil },
		Host:   p.Host, WatchHost: p.WatchHost, WatchDevice: p.WatchDevice, WatchTables: p.WatchTables,
		WatchRules: func(t *xtables.Tables) (func(context.Context, func(string)), error) {
			return func(ctx context.Context, suspect func(string)) {
				if t.Family == plan.IPv4 { // The other family is watched with it.
					p.Open(suspect)(ctx)
				}
			}, nil
		},
		Reader: func(func(kernel.ServerID) int) (ipvs.Reader, error) {
			return ipvs.Reader{Servers: ipvstest.ProcessServers{Process: p, Once: true}, Sets: ipvstest.ProcessSets{Process: p},
				Device: ipvstest.ProcessDevice{Process: p}, Close: func() {}}, nil
		},
		Counts:      func() (ipvs.Counts, error) { return p.Counts(), nil },
		Fingerprint: p.Fingerprint, Remove: ipvstest.ProcessDevice{Process: p}.Remove, MostAtOnce: 60,
	}
	for _, f := range plan.Families {
		n.Tables[f] = &xtables.Tables{Writer: &xtables.Writer{Kernel: p.Program(f)}, Family: f}
		n.Guards[f], n.Ports[f] = ipvstest.ProcessGuard{Process: p, Family: f}, ipvstest.ProcessPorts{Process: p, Family: f}
	}
	return n
}

func (v *ipvsRules) suffer(r *rand.Rand) string {
	long := time.Duration(r.Int64N(int64(8 * time.Second)))
	if what := xtablestest.Trouble(r.IntN(int(xtablestest.Troubles))); r.IntN(2) == 0 {
		v.Suffer(what, long)
		return fmt.Sprint("tables: ", what, " for ", long)
	}
	what := ipvstest.Trouble(r.IntN(int(ipvstest.Troubles)))
	v.Trouble(what, long)
	return fmt.Sprint(what, " for ", long)
}

func (v *ipvsRules) calm() {
	v.Suffer(0, 0)
	v.Trouble(0, 0)
}

func (v *ipvsRules) leftover(f plan.Family) bool {
	return v.world.cfg.Mode != "ipvs" && !v.Held[f].Empty(isForeign)
}

func (v *ipvsRules) packets(f plan.Family) (*packetsim.Machine, error) {
	m := v.machines[f]
	if m == nil {
		tables := v.Kernels[f].Tables
		var err error
		if m, err = restore.Lazy(f, []string{"mangle", "nat", "filter"}, func(table, name string) ([]string, bool) {
			list, exists := tables[names.Table(table)][name]
			return list, exists
		}); err != nil {
			return nil, err
		}
		v.machines[f] = m
	}
	v.Held[f].Fill(m)
	return m, nil
}

// still returns what there is of a family, to read while all is locked.
func (v *ipvsRules) still(f plan.Family) *ipvs.Node {
	k := v.Held[f]
	return &ipvs.Node{
		Servers: stillServers{Servers: ipvstest.Servers{Kernel: k}}, Sets: ipvstest.Sets{Kernel: k},
		Device: func() (ipvs.Device, error) { return ipvstest.Device{Kernel: k}, nil },
		Guards: map[plan.Family]ipvs.Guard{f: ipvstest.Guard{Kernel: k}}, Ports: map[plan.Family]ipvs.PortTable{f: ipvstest.Ports{Kernel: k}},
		Host: func(plan.Family) (set.Set[netip.Addr], error) { return k.HostAddrs, nil },
	}
}

type stillServers struct {
	ipvstest.Servers
	ipvstest.Ready
}

func (v *ipvsRules) differs(f plan.Family, p *plan.Plan, settled bool) string {
	if v.world.cfg.Mode == "iptables" {
		why := tablesDiffer(f, rulesOfIPTables(v.world.cfg, p, f, true, nil), v.Kernels[f].Tables, names.Tables...)
		if why == "" && settled && v.leftover(f) {
			why = "something of mode ipvs is left"
		}
		return why
	}
	if why := tablesDiffer(f, rulesOfIPVS(v.world.cfg, p, f, true, nil), v.Kernels[f].Tables, names.Tables...); why != "" {
		return why
	}
	for id, server := range v.Held[f].Virtual {
		if server.Foreign {
			return id.String() + " sends by another method"
		}
	}
	cfg := ipvs.Config{Options: renderedIPVS(v.world.cfg), SysctlDir: v.world.cfg.SysctlDir, Node: v.still(f)}
	have, options, err := ipvs.Read(cfg, f, false)
	if err != nil {
		return err.Error()
	}
	cfg.Options = options
	want, err := ipvs.Planned(p, f, cfg)
	if err != nil {
		return err.Error()
	}
	for _, h := range ipvs.Diff(f, have, want) {
		if h.Kind == drift.VirtualServer && len(h.Have) == 1 && len(h.Want) == 0 && !settled {
			continue // Its real servers have drained. It receives nothing, and goes with the last of them.
		}
		return fmt.Sprintf("%s %s has %q, want %q", h.File, h.Object, h.Have, h.Want)
	}
	return ""
}

// isForeign reports whether a virtual server is another program's.
func isForeign(id kernel.ServerID) bool { return id.Mark == foreignMark }

// foreignMark is one that no virtual server of ours has.
const foreignMark = 7

func (v *ipvsRules) others(f plan.Family) string {
	k := v.Held[f]
	var out strings.Builder
	out.WriteString(othersInTables(v.Kernels[f].Tables))
	for id, s := range k.Virtual {
		if isForeign(id) {
			fmt.Fprintln(&out, id, s.Server, slices.SortedFunc(maps.Keys(s.RealServers), netip.AddrPort.Compare))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(k.Set)) {
		if !names.IsOurSet(name) {
			fmt.Fprintln(&out, name, len(k.Set[name]))
		}
	}
	return out.String()
}

// toIPVS are what others do to virtual servers, and to what is beside them.
var toIPVS = []happening{
	{"others-delete-server", 3, onServer(func(k *ipvstest.Kernel, v *kernel.ActualServer, _ *rand.Rand) { delete(k.Virtual, v.ID) })},
	{"others-clear-servers", 1, onKernel(func(k *ipvstest.Kernel, _ *rand.Rand) (string, []host.DeviceChange) {
		maps.DeleteFunc(k.Virtual, func(id kernel.ServerID, _ *kernel.ActualServer) bool { return !isForeign(id) })
		return "", nil
	})},
	{"others-delete-real", 2, onRealServer(func(v *kernel.ActualServer, d kernel.ActualRealServer, _ *rand.Rand) { delete(v.RealServers, d.Addr) })},
	{"others-change-weight", 2, onRealServer(func(v *kernel.ActualServer, d kernel.ActualRealServer, r *rand.Rand) {
		d.Weight = uint32(r.IntN(3))
		v.RealServers[d.Addr] = d
	})},
	{"others-add-real", 1, onServer(func(k *ipvstest.Kernel, v *kernel.ActualServer, r *rand.Rand) {
		a := netip.AddrPortFrom(address(k.Family, "10.244.9.%d", "fd44::9:%x", 1+r.IntN(9)), 8080)
		v.RealServers[a] = kernel.ActualRealServer{RealServer: kernel.RealServer{Addr: a, Weight: 1}}
	})},
	{"others-change-server", 1, onServer(func(_ *ipvstest.Kernel, v *kernel.ActualServer, _ *rand.Rand) { v.Scheduler = "lc" })},
	{"others-change-method", 1, func(w *world, r *rand.Rand) string { // which nothing but a comparison sees
		w.troubled = w.troubled || w.cfg.Mode == "ipvs"
		return onServer(func(_ *ipvstest.Kernel, v *kernel.ActualServer, _ *rand.Rand) { v.Foreign = true })(w, r)
	}},
	{"others-add-server", 1, onKernel(func(k *ipvstest.Kernel, r *rand.Rand) (string, []host.DeviceChange) {
		id := kernel.ServerID{Family: k.Family, Protocol: plan.TCP, Addr: clusterIP(r.IntN(services), k.Family), Port: uint16(80 + r.IntN(4))}
		if r.IntN(3) == 0 {
			id = kernel.ServerID{Family: k.Family, Mark: foreignMark}
		}
		a := netip.AddrPortFrom(address(k.Family, "10.244.9.%d", "fd44::9:%x", 1+r.IntN(9)), 8080)
		k.Virtual[id] = &kernel.ActualServer{Server: kernel.Server{ID: id, Scheduler: "wrr"}, RealServers: map[netip.AddrPort]kernel.ActualRealServer{
			a: {RealServer: kernel.RealServer{Addr: a, Weight: 1}}}}
		return id.String(), nil
	})},
	{"others-flush-set", 2, resizing(func(k *ipvstest.Kernel, name string, _ *rand.Rand) { clear(k.Set[name]) })},
	{"others-delete-entry", 2, resizing(func(k *ipvstest.Kernel, name string, r *rand.Rand) { delete(k.Set[name], entryOf(k, name, r)) })},
	{"others-change-entry", 1, func(w *world, r *rand.Rand) string { // the same
		w.troubled = w.troubled || w.cfg.Mode == "ipvs"
		return onSet(func(k *ipvstest.Kernel, name string, r *rand.Rand) {
			e := entryOf(k, name, r)
			with := k.Set[name][e]
			with.Mark ^= 1
			k.Set[name][e] = with
		})(w, r)
	}},
	{"others-add-entry", 1, resizing(func(k *ipvstest.Kernel, name string, r *rand.Rand) {
		e := entryOf(k, name, r)
		with := k.Set[name][e]
		e.Port = uint16(80 + r.IntN(4))
		with.Port = e.Port
		if e.Protocol != "" {
			k.Set[name][e] = with
		}
	})},
	{"others-destroy-set", 1, onSet(func(k *ipvstest.Kernel, name string, _ *rand.Rand) {
		_ = ipvstest.Sets{Kernel: k}.Destroy(name) // Rules may use it.
	})},
	{"others-change-address", 3, onKernel(changeAddress)},
	{"others-delete-device", 1, func(w *world, _ *rand.Rand) string {
		for _, f := range plan.Families {
			w.alter(f, func(k *ipvstest.Kernel) []host.DeviceChange { return ipvstest.Device{Kernel: k}.Lose() })
		}
		return ""
	}},
	{"others-change-nft", 2, onKernel(func(k *ipvstest.Kernel, r *rand.Rand) (string, []host.DeviceChange) {
		switch what := r.IntN(4); {
		case what == 0:
			k.Guard = false
		case what == 1:
			k.BrokenGuard = true
		case what == 2:
			k.Ports = nil
		default:
			k.BrokenPorts = k.Ports != nil
			return "rule for ports", []host.DeviceChange{{PortRule: true, Family: k.Family, Gone: true}}
		}
		return fmt.Sprintf("guard %t %t ports %t", k.Guard, k.BrokenGuard, k.Ports != nil), nil
	})},
	{"others-change-setting", 1, func(w *world, r *rand.Rand) string {
		list := slices.Sorted(maps.Keys(ipvsSettings))
		name := list[r.IntN(len(list))]
		v := w.rules.(*ipvsRules)
		v.Lock()
		defer v.Unlock()
		v.setting(name, ipvsSettings[name])
		w.disturb(plan.IPv4)
		return name
	}},
	{"switch-mode", 2, (*world).switchMode},
}

// changeAddress takes something away from the interface with the addresses of Services, or adds an address.
func changeAddress(k *ipvstest.Kernel, r *rand.Rand) (string, []host.DeviceChange) {
	of := []set.Set[netip.Addr]{k.Addresses, k.PortRoutes, k.Unrouted}[r.IntN(3)]
	list := slices.SortedFunc(maps.Keys(of), netip.Addr.Compare)
	if len(list) == 0 || !k.Device {
		return "has none", nil
	}
	a := list[r.IntN(len(list))]
	switch {
	case r.IntN(4) == 0:
		a = clusterIP(r.IntN(2*services), k.Family)
		k.Addresses.Insert(a)
		return "adds " + a.String(), []host.DeviceChange{{Address: a}}
	case r.IntN(4) == 0:
		for p := range k.Local {
			delete(k.Local, p)
			return "removes " + p.String(), []host.DeviceChange{{Route: p, Gone: true}}
		}
	case k.PortRoutes.Has(a) && r.IntN(2) == 0:
		k.PortRoutes.Delete(a)
		return "removes the route of ports of " + a.String(), []host.DeviceChange{{Route: xtables.Single(a), ByPort: true, Gone: true}}
	}
	k.Addresses.Delete(a)
	k.Unrouted.Delete(a)
	return "removes " + a.String(), []host.DeviceChange{{Address: a, Gone: true}}
}

// alter changes what the kernel holds of a family, as others do while nodeproxy is in mode ipvs.
func (w *world) alter(f plan.Family, do func(*ipvstest.Kernel) []host.DeviceChange) {
	if w.cfg.Mode != "ipvs" {
		return
	}
	v := w.rules.(*ipvsRules)
	v.Alter(f, func(k *ipvstest.Kernel) []host.DeviceChange {
		was := [4]bool{k.Guard, k.BrokenGuard, k.Ports != nil, k.BrokenPorts}
		changes := do(k)
		w.foreign[f] = v.others(f)
		w.disturb(f)
		if was != [4]bool{k.Guard, k.BrokenGuard, k.Ports != nil, k.BrokenPorts} {
			v.ChangedTable(f)
		}
		return changes
	})
}

// onKernel returns what others do to what the kernel holds of a family.
func onKernel(do func(*ipvstest.Kernel, *rand.Rand) (string, []host.DeviceChange)) func(*world, *rand.Rand) string {
	return func(w *world, r *rand.Rand) (words string) {
		f := plan.Families[r.IntN(2)]
		w.alter(f, func(k *ipvstest.Kernel) (changes []host.DeviceChange) {
			words, changes = do(k, r)
			return changes
		})
		return f.String() + " " + words
	}
}

// onServer returns what others do to a virtual server of ours.
func onServer(do func(*ipvstest.Kernel, *kernel.ActualServer, *rand.Rand)) func(*world, *rand.Rand) string {
	return onKernel(func(k *ipvstest.Kernel, r *rand.Rand) (string, []host.DeviceChange) {
		byName := map[string]*kernel.ActualServer{}
		for id, v := range k.Virtual {
			if !isForeign(id) {
				byName[id.String()] = v
			}
		}
		list := slices.Sorted(maps.Keys(byName))
		if len(list) == 0 {
			return "has none", nil
		}
		name := list[r.IntN(len(list))]
		do(k, byName[name], r)
		return name, nil
	})
}

// onRealServer returns what others do to a real server of ours.
func onRealServer(do func(*kernel.ActualServer, kernel.ActualRealServer, *rand.Rand)) func(*world, *rand.Rand) string {
	return onServer(func(_ *ipvstest.Kernel, v *kernel.ActualServer, r *rand.Rand) {
		if list := slices.SortedFunc(maps.Keys(v.RealServers), netip.AddrPort.Compare); len(list) > 0 {
			do(v, v.RealServers[list[r.IntN(len(list))]], r)
		}
	})
}

// onSet returns what others do to a set of ours that has entries.
func onSet(do func(k *ipvstest.Kernel, name string, r *rand.Rand)) func(*world, *rand.Rand) string {
	return onKernel(func(k *ipvstest.Kernel, r *rand.Rand) (string, []host.DeviceChange) {
		list := slices.DeleteFunc(slices.Sorted(maps.Keys(k.Set)), func(name string) bool { return len(k.Set[name]) == 0 })
		if len(list) == 0 {
			return "has none", nil
		}
		name := list[r.IntN(len(list))]
		do(k, name, r)
		return name, nil
	})
}

// resizing is onSet for what changes how many entries a set has. Where that happens twice within a second, there may be as many as before, and then
// nothing but a comparison sees it.
func resizing(do func(k *ipvstest.Kernel, name string, r *rand.Rand)) func(*world, *rand.Rand) string {
	return func(w *world, r *rand.Rand) string {
		v := w.rules.(*ipvsRules)
		w.troubled = w.troubled || w.cfg.Mode == "ipvs" && time.Since(v.resized) < time.Second
		v.resized = time.Now()
		return onSet(do)(w, r)
	}
}

// entryOf draws an entry of a set, without its mark.
func entryOf(k *ipvstest.Kernel, name string, r *rand.Rand) ipset.Entry {
	list := slices.SortedFunc(maps.Keys(k.Set[name]), func(a, b ipset.Entry) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	return list[r.IntN(len(list))]
}
