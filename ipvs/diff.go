package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"

	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
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
	unknown map[objectLine]bool     // of those that are wanted, what the kernel can't have
	options Options
	actual  bool
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
	return &Objects{servers: map[ipvs.ServerID]server{}, lines: map[objectLine][]string{}, unknown: map[objectLine]bool{}, options: o}
}

func (x *Objects) add(at file, kind drift.Kind, object, text string, services ...string) {
	x.lines[objectLine{at, kind, object, text}] = services
}

// These add what there is of each kind.

func (x *Objects) set(set ipset.Set) {
	x.add(fileSets, drift.SetElement, set.Name, "create "+set.Name+" "+set.Type)
}

func (x *Objects) entry(set ipset.Set, e ipset.Entry, services ...string) {
	x.add(fileSets, drift.SetElement, set.Name, "add "+set.Name+" "+e.Text(set), services...)
}

func (x *Objects) device() {
	x.add(fileDevice, drift.Address, names.Device, "link "+names.Device+" type dummy up")
}

func (x *Objects) address(a netip.Addr, unrouted bool, services ...string) {
	text := fmt.Sprintf("address %s dev %s", netip.PrefixFrom(a, a.BitLen()), names.Device)
	if unrouted {
		text += " without a route"
	}
	x.add(fileDevice, drift.Address, names.Device, text, services...)
}

func (x *Objects) route(r netip.Prefix, src netip.Addr) {
	text := fmt.Sprintf("route local %s dev %s table local", r, names.Device)
	if src.IsValid() {
		text += " src " + src.String()
	}
	x.add(fileDevice, drift.Route, names.Device, text)
}

func (x *Objects) portRoute(a netip.Addr, services ...string) {
	x.add(fileDevice, drift.Route, names.Device, fmt.Sprintf("route local %s dev %s table %d", a, names.Device, names.PortsRouteTable), services...)
}

func (x *Objects) port(p plan.Address, services ...string) {
	x.add(fileTables, drift.SetElement, names.IPVSPorts, fmt.Sprintf("%s . %s . %d", p.Addr, p.Protocol.Lower(), p.Port), services...)
}

func tableLine(f plan.Family, name string) objectLine {
	return objectLine{fileTables, drift.Table, name, "table " + nft.FamilyName(f) + " " + name}
}

func (x *Objects) sysctl(s sysctl, value string) {
	x.add(fileSysctls, drift.Sysctl, s.dotted(), s.dotted()+" = "+value)
}

// Planned returns the objects of a plan.
func Planned(p *plan.Plan, f plan.Family, cfg Config) (*Objects, error) {
	o := cfg.Options
	s, ranges, x := full(p, f, o), o.routed(p, f), newObjects(o)
	maps.Copy(x.servers, s.servers)
	ofMember, ofAddress, ofPort := map[member][]string{}, map[netip.Addr][]string{}, map[plan.Address][]string{}
	for _, k := range slices.SortedFunc(maps.Keys(s.objects), plan.Key.Compare) {
		of, svc := s.objects[k], k.Service.String()
		for _, m := range of.members {
			ofMember[m.key()] = append(ofMember[m.key()], svc)
		}
		for _, a := range of.vips {
			ofAddress[a] = append(ofAddress[a], svc)
		}
		for _, port := range of.ports {
			ofPort[port], ofAddress[port.Addr] = append(ofPort[port], svc), append(ofAddress[port.Addr], svc)
		}
	}
	for id := range setCount {
		x.set(setOf(id, f))
	}
	for m, with := range s.members {
		x.entry(setOf(m.set, f), m.marked(*with), ofMember[m]...)
	}
	x.device()
	for a := range s.addresses() {
		if s.bound(a, o.Host, ranges) {
			x.address(a, false, ofAddress[a]...)
			x.entry(setOf(setVIPs, f), ipset.Entry{Addr: a}, ofAddress[a]...)
		}
	}
	src := p.Node.IP(f)
	if _, own := o.Host[src]; !own {
		src = netip.Addr{}
	}
	for _, r := range ranges {
		x.route(r, src)
	}
	diverted := s.diverted(ranges)
	for _, port := range diverted {
		x.port(port, ofPort[port]...)
		x.portRoute(port.Addr, ofAddress[port.Addr]...)
		if f == plan.IPv4 { // The source of an ICMPv6 error is another address of the node.
			x.address(port.Addr, true, ofAddress[port.Addr]...)
		}
	}
	if len(diverted) > 0 {
		x.lines[tableLine(f, names.IPVSPorts)] = nil
	}
	x.lines[tableLine(f, names.IPVSMarks)] = nil
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
	var m machine
	if v, err := ipvs.OpenServers(); err == nil {
		defer v.Close()
		m.servers = v
		o.Unavailable = lacking()
	} else if !leftovers {
		return nil, o, err
	}
	if s, err := ipset.OpenSets(); err == nil {
		defer s.Close()
		m.sets = s
	} else if !leftovers {
		return nil, o, err
	}
	d, err := host.FindDevice(names.Device)
	if err != nil {
		return nil, o, err
	}
	if d != nil {
		defer d.Close()
		m.device = d
	}
	switch p, err := nftrules.OpenPorts(f); {
	case err == nil:
		defer p.Close()
		m.ports = p
	case errors.Is(err, nftrules.ErrNoPorts):
		o.WholeAddresses = true
	default:
		return nil, o, err
	}
	switch g, err := nftrules.OpenGuards(f, newMarks(o.MasqueradeBit).guard()); {
	case err == nil:
		defer g.Close()
		m.guard = g
	case !errors.Is(err, nft.ErrAbsent):
		return nil, o, err
	}
	if o.Host, err = hostAddresses(f); err != nil {
		return nil, o, err
	}
	if x, err = m.read(f, o, cfg.ExcludeCIDRs); err != nil {
		return nil, o, err
	}
	if d != nil && d.Up() {
		x.device()
	}
	guarded, err := nftrules.GuardTables()
	if _, intact := x.lines[tableLine(f, names.IPVSMarks)]; !intact && slices.Contains(guarded, f) {
		x.changed(tableLine(f, names.IPVSMarks))
	}
	if list, err := sysctlsHere(cfg); err == nil && f == plan.IPv4 && !leftovers {
		for _, s := range list {
			have, _ := s.read(cfg.sysctlDir())
			x.sysctl(s, have)
		}
	}
	return x, o, err
}

// lacking finds out which schedulers the kernel lacks, when it is asked.
func lacking() func(scheduler string) bool {
	known := map[string]bool{}
	return func(name string) bool {
		lacks, asked := known[name]
		if !asked {
			if v, err := ipvs.OpenServers(); err == nil {
				defer v.Close()
				lacks = !v.HasScheduler(name)
			}
			known[name] = lacks
		}
		return lacks
	}
}

// changed adds a table that another program has changed.
func (x *Objects) changed(l objectLine) {
	l.text += " # changed by another program"
	x.lines[l] = nil
}

// read reads what there is, where m has the means.
func (m machine) read(f plan.Family, o Options, exclude []netip.Prefix) (*Objects, error) {
	x := newObjects(o)
	x.actual = true
	marks := newMarks(o.MasqueradeBit)
	if m.servers != nil {
		list, err := m.servers.List(f)
		if err != nil {
			return nil, err
		}
		for id, v := range list {
			if marks.foreign(id, exclude) {
				continue
			}
			s := server{Server: v.Server}
			for _, a := range slices.SortedFunc(maps.Keys(v.RealServers), netip.AddrPort.Compare) {
				s.realServers = append(s.realServers, v.RealServers[a].RealServer)
			}
			x.servers[id] = s
		}
	}
	if m.sets != nil {
		there, err := m.sets.Names()
		if err != nil {
			return nil, err
		}
		for id := range setCount {
			set := setOf(id, f)
			if !slices.Contains(there, set.Name) {
				continue
			}
			entries, err := m.sets.Entries(set)
			if err != nil {
				return nil, err
			}
			x.set(set)
			for entry := range entries {
				x.entry(set, entry)
			}
		}
	}
	if m.guard == nil {
		x.unknown[tableLine(f, names.IPVSMarks)] = true
	} else if intact, err := m.guard.Intact(); err != nil {
		return nil, err
	} else if intact {
		x.lines[tableLine(f, names.IPVSMarks)] = nil
	}
	if m.ports != nil {
		list, exists, complete, err := m.ports.List()
		if err != nil {
			return nil, err
		}
		for p := range list {
			x.port(p)
		}
		switch l := tableLine(f, names.IPVSPorts); {
		case complete:
			x.lines[l] = nil
		case exists:
			x.changed(l)
		}
	}
	if m.device == nil {
		return x, nil
	}
	return x, x.readDevice(m, f)
}

func (x *Objects) readDevice(m machine, f plan.Family) error {
	bound, err := m.device.Addresses(f)
	if err != nil {
		return err
	}
	unrouted, err := m.device.UnroutedAddresses(f)
	if err != nil {
		return err
	}
	for a := range bound {
		_, without := unrouted[a]
		x.address(a, without)
	}
	routes, err := m.device.Routes(f)
	if err != nil {
		return err
	}
	for r, src := range routes {
		x.route(r, src)
	}
	byPort, err := m.device.PortRoutes(f)
	for a := range byPort {
		x.portRoute(a)
	}
	return err
}

// Diff returns what turns some objects into others; nil stands for none. Real servers that drain are left out: they go with their connections.
func Diff(f plan.Family, have, want *Objects) []drift.Hunk {
	have, want = cmp.Or(have, newObjects(Options{})), cmp.Or(want, newObjects(Options{}))
	prefix := strings.ToLower(f.String()) + " "
	var out []drift.Hunk
	all := sets.Set[ipvs.ServerID]{}
	for id := range have.servers {
		all.Insert(id)
	}
	for id := range want.servers {
		all.Insert(id)
	}
	for _, id := range slices.SortedFunc(maps.Keys(all), compareServers) {
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
		if _, is := have.lines[l]; !is && !have.unknown[l] {
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
		used := map[netip.AddrPort]bool{}
		for _, d := range w.realServers {
			used[d.Addr] = true
		}
		left := slices.DeleteFunc(slices.Clone(is.realServers), func(d ipvs.RealServer) bool { return d.Weight == 0 && !used[d.Addr] })
		drains = len(left) < len(is.realServers)
		is.realServers = left
	}
	if drains && want.options.whileDraining(w.Server) == is.Server {
		w.Server = is.Server
	}
	var lines strings.Builder
	if renderServer(&lines, is); lines.Len() > 0 {
		h.Have = strings.Split(strings.TrimSuffix(lines.String(), "\n"), "\n")
	} else if exists && have.actual && !drains {
		h.Have = []string{fmt.Sprintf("-A %s %s", serverArgs(id), serverOptions(is.Server))}
	}
	lines.Reset()
	if renderServer(&lines, w); lines.Len() > 0 {
		h.Want = strings.Split(strings.TrimSuffix(lines.String(), "\n"), "\n")
	}
	return h
}
