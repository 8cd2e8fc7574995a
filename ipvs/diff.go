package ipvs

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/internal/set"
	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Rules returns the rules of iptables of one family, which do not depend on Services.
func Rules(p *plan.Plan, f plan.Family, o Options) xtables.Desired { return rules(p, f, o) }

// Objects are what a family has, or is to have, besides rules of iptables.
type Objects struct {
	servers map[ipvs.ServerID]server
	lines   map[objectLine][]string // with the Services that each is for
	// unguarded says that the kernel can't have the guard of marks.
	unguarded bool
	options   Options
	actual    bool
}

// objectLine is a line of text that stands for a thing in the kernel.
type objectLine struct {
	file   file
	kind   drift.Kind
	object string
	text   string
}

// file is a group of objects.
type file int

const (
	fileServers file = iota
	fileSets
	fileDevice
	fileTables
	fileSysctls
)

var fileNames = [...]string{fileServers: "virtual servers (ipvsadm -Sn)", fileSets: "sets (ipset save)", fileDevice: "addresses and routes (ip)",
	fileTables: "nftables", fileSysctls: "settings (sysctl)"}

func newObjects(o Options) *Objects {
	return &Objects{servers: map[ipvs.ServerID]server{}, lines: map[objectLine][]string{}, options: o}
}

// add adds all but virtual servers. of are the Services that members, addresses and ports are for.
func (x *Objects) add(h *actual, f plan.Family, of map[any][]string) {
	onDevice := func(kind drift.Kind, services []string, format string, args ...any) {
		x.lines[objectLine{fileDevice, kind, names.Device, fmt.Sprintf(format, args...)}] = services
	}
	for id, there := range h.sets {
		if set := setOf(setID(id), f); there {
			x.lines[objectLine{fileSets, drift.SetElement, set.Name, "create " + set.Name + " " + set.Type}] = nil
		}
	}
	for m, with := range h.members {
		set, services := setOf(m.set, f), of[m]
		if m.set == setVIPs {
			services = of[m.addr.addr()]
		}
		x.lines[objectLine{fileSets, drift.SetElement, set.Name, "add " + set.Name + " " + m.entry(with).Text(set)}] = services
	}
	for a := range h.vips.Union(h.ports.unrouted) {
		text := fmt.Sprintf("address %s dev %s", netip.PrefixFrom(a, a.BitLen()), names.Device)
		if h.ports.unrouted.Has(a) {
			text += " without a route"
		}
		onDevice(drift.Address, of[a], "%s", text)
	}
	for r, src := range h.routes {
		text := fmt.Sprintf("route local %s dev %s table local", r, names.Device)
		if src.IsValid() {
			text += " src " + src.String()
		}
		onDevice(drift.Route, nil, "%s", text)
	}
	for a := range h.ports.routes {
		onDevice(drift.Route, of[a], "route local %s dev %s table %d", a, names.Device, names.PortsRouteTable)
	}
	for p := range h.ports.all() {
		text := fmt.Sprintf("%s . %s . %d", p.Addr, p.Protocol.Lower(), p.Port)
		x.lines[objectLine{fileTables, drift.SetElement, names.IPVSPorts, text}] = of[p]
	}
	if h.ports.exists {
		x.table(f, names.IPVSPorts, h.ports.complete)
	}
}

// table adds a table, which another program has changed unless it is intact.
func (x *Objects) table(f plan.Family, name string, intact bool) {
	l := tableLine(f, name)
	if !intact {
		l.text += " # changed by another program"
	}
	x.lines[l] = nil
}

func tableLine(f plan.Family, name string) objectLine {
	return objectLine{fileTables, drift.Table, name, "table " + nft.FamilyName(f) + " " + name}
}

func (x *Objects) device() {
	x.lines[objectLine{fileDevice, drift.Address, names.Device, "link " + names.Device + " type dummy up"}] = nil
}

func (x *Objects) sysctl(s sysctl, value string) {
	x.lines[objectLine{fileSysctls, drift.Sysctl, s.dotted(), s.dotted() + " = " + value}] = nil
}

// Planned returns the objects of a plan.
func Planned(p *plan.Plan, f plan.Family, cfg Config) (*Objects, error) {
	s, x, of := full(p, f, cfg.Options), newObjects(cfg.Options), map[any][]string{}
	for id := range s.servers {
		x.servers[id] = s.server(id)
	}
	for _, sp := range slices.SortedFunc(s.services.All(), func(a, b *plan.ServicePort) int { return a.Key.Compare(b.Key) }) {
		note, o := func(thing any) { of[thing] = append(of[thing], sp.Key.Service.String()) }, s.build(sp)
		for _, m := range o.members {
			note(m.key())
		}
		for _, a := range o.vips {
			note(a)
		}
		for _, port := range o.ports {
			note(port)
			note(port.Addr)
		}
	}
	x.add(s.target(s.source()), f, of)
	x.device()
	x.table(f, names.IPVSMarks, true)
	if f == plan.IPv4 {
		list, err := sysctlsHere(cfg)
		if err != nil {
			return nil, err
		}
		for _, s := range list {
			x.sysctl(s, s.value)
		}
	}
	return x, nil
}

// Read returns the objects that the kernel has, and the options of cfg with what is found out about the node. It changes nothing, but may load
// kernel modules. With leftovers, a kernel that lacks something has nothing of it; else that is an error.
func Read(cfg Config, f plan.Family, leftovers bool) (x *Objects, o Options, err error) {
	o = cfg.Options
	if cfg.Node != nil {
		d, err := cfg.Node.Device()
		if err == nil {
			x, err = cfg.Node.objects(d, f, &o, cfg)
		}
		return x, o, err
	}
	n := thisNode()
	defer n.close()
	if err = n.openServers(); err == nil {
		o.Unavailable = lacking()
	} else if !leftovers {
		return nil, o, err
	}
	if err = n.openSets(); err != nil && !leftovers {
		return nil, o, err
	}
	d, err := findDevice()
	if err != nil {
		return nil, o, err
	}
	if d != nil {
		defer d.Close()
	}
	if err := n.openTables(f, newMarks(o.MasqueradeBit)); err != nil {
		return nil, o, err
	}
	if x, err = n.objects(d, f, &o, cfg); err != nil {
		return nil, o, err
	}
	guarded, err := nftrules.GuardTables()
	if _, intact := x.lines[tableLine(f, names.IPVSMarks)]; !intact && slices.Contains(guarded, f) {
		x.table(f, names.IPVSMarks, false)
	}
	if leftovers {
		maps.DeleteFunc(x.lines, func(l objectLine, _ []string) bool { return l.file == fileSysctls })
	}
	return x, o, err
}

// findDevice returns the interface with the addresses of Services; nil if there is none.
func findDevice() (Device, error) {
	if d, err := host.FindDevice(names.Device); d != nil || err != nil {
		return d, err
	}
	return nil, nil
}

// objects reads what there is of a family, with d unless that is nil, and notes in o what is found out about the node.
func (n *Node) objects(d Device, f plan.Family, o *Options, cfg Config) (x *Objects, err error) {
	o.WholeAddresses = n.Ports[f] == nil
	if o.Host, err = n.Host(f); err != nil {
		return nil, err
	}
	if x, err = n.machine(f, d).objects(f, *o, cfg.ExcludeCIDRs); err != nil {
		return nil, err
	}
	if d != nil && d.Up() {
		x.device()
	}
	if list, err := sysctlsHere(cfg); err == nil && f == plan.IPv4 {
		for _, s := range list {
			have, _ := s.read(cfg.sysctlDir())
			x.sysctl(s, have)
		}
	}
	return x, nil
}

// lacking finds out which schedulers the kernel lacks, when it is asked.
func lacking() func(scheduler string) bool {
	return (&schedulers{known: map[string]bool{}, has: func(name string) bool {
		v, err := ipvs.OpenServers()
		if err != nil {
			return true
		}
		defer v.Close()
		return v.HasScheduler(name)
	}}).lacks
}

// objects reads what there is, where m has the means.
func (m machine) objects(f plan.Family, o Options, exclude []netip.Prefix) (*Objects, error) {
	h, err := m.read(f, newMarks(o.MasqueradeBit), exclude, nil)
	if err != nil {
		return nil, err
	}
	x := newObjects(o)
	x.actual, x.unguarded = true, m.guard == nil
	for v := range h.servers.All() {
		s := server{Server: v.Server}
		for _, d := range v.realServers {
			s.realServers = append(s.realServers, d.RealServer)
		}
		x.servers[v.ID] = s
	}
	x.add(h, f, nil)
	if m.guard != nil {
		intact, err := m.guard.Intact()
		if err != nil {
			return nil, err
		}
		if intact {
			x.table(f, names.IPVSMarks, true)
		}
	}
	return x, nil
}

// Diff returns what turns some objects into others; nil stands for none. Real servers that drain are left out: they go with their connections.
func Diff(f plan.Family, have, want *Objects) []drift.Hunk {
	have, want = cmp.Or(have, newObjects(Options{})), cmp.Or(want, newObjects(Options{}))
	prefix := strings.ToLower(f.String()) + " "
	var out []drift.Hunk
	for _, id := range slices.SortedFunc(maps.Keys(set.Keys(have.servers).Union(set.Keys(want.servers))), compareServers) {
		if h := diffServer(have, want, id); !slices.Equal(h.Have, h.Want) {
			h.File = prefix + fileNames[fileServers]
			out = append(out, h)
		}
	}
	// Lines of one object and one Service make a hunk.
	type group struct {
		file             file
		object, services string
		kind             drift.Kind
	}
	groups := map[group]*drift.Hunk{}
	hunk := func(l objectLine, services []string) *drift.Hunk {
		services = slices.Compact(slices.Clone(services))
		g := group{l.file, l.object, strings.Join(services, " "), l.kind}
		if groups[g] == nil {
			groups[g] = &drift.Hunk{Kind: l.kind, File: prefix + fileNames[l.file], Object: l.object, Services: services}
		}
		return groups[g]
	}
	for l, services := range have.lines {
		if _, wanted := want.lines[l]; !wanted {
			h := hunk(l, services)
			h.Have = append(h.Have, l.text)
		}
	}
	for l, services := range want.lines {
		if _, is := have.lines[l]; !is && !(have.unguarded && l == tableLine(f, names.IPVSMarks)) {
			h := hunk(l, services)
			h.Want = append(h.Want, l.text)
		}
	}
	for _, g := range slices.SortedFunc(maps.Keys(groups), func(a, b group) int {
		return cmp.Or(cmp.Compare(a.file, b.file), cmp.Compare(a.object, b.object), cmp.Compare(a.services, b.services), cmp.Compare(a.kind, b.kind))
	}) {
		slices.Sort(groups[g].Have)
		slices.Sort(groups[g].Want)
		out = append(out, *groups[g])
	}
	return out
}

// diffServer compares a virtual server.
func diffServer(have, want *Objects, id ipvs.ServerID) drift.Hunk {
	h := drift.Hunk{Kind: drift.VirtualServer, Object: serverArgs(id)}
	is, exists := have.servers[id]
	w := want.servers[id]
	if key := cmp.Or(w.key, is.key); key.Service != (plan.Service{}) {
		h.Services = []string{key.Service.String()}
	}
	drains := false
	if have.actual {
		used := set.Set[netip.AddrPort]{}
		for _, d := range w.realServers {
			used.Insert(d.Addr)
		}
		left := slices.DeleteFunc(slices.Clone(is.realServers), func(d ipvs.RealServer) bool { return d.Weight == 0 && !used.Has(d.Addr) })
		drains = len(left) < len(is.realServers)
		is.realServers = left
	}
	if drains && want.options.whileDraining(w.Server) == is.Server {
		w.Server = is.Server
	}
	if len(is.realServers) > 0 || exists && have.actual && !drains {
		h.Have = serverLines(is)
	}
	if len(w.realServers) > 0 {
		h.Want = serverLines(w)
	}
	return h
}
