package ipvs

import (
	"net/netip"
	"strings"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// Machine returns what a packet meets where everything is as Render returns it for p. Only objects of the ServicePorts that it is for
// matter to a packet, so that p need have no others.
func Machine(p *plan.Plan, f plan.Family, o Options) (*packetsim.Machine, error) {
	s := full(p, f, o)
	h, m := s.target(p.Node.IP(f)), newSimulation(f)
	for id, with := range h.members {
		m.addEntry(id.set, id.entry(with))
	}
	for a := range h.vips {
		m.Added[xtables.Single(a)] = true
	}
	for r := range h.routes {
		m.Added[r] = true
	}
	for id := range s.servers {
		m.addServer(s.server(id))
	}
	for _, a := range h.ports.sorted() {
		m.Diverted[a] = true
	}
	return m.Machine, restore.IPTables(m.Machine, rules(p, f, o).Render())
}

// simulation adds this mode's objects to a machine.
type simulation struct{ *packetsim.Machine }

// newSimulation returns a machine that has all sets, without entries.
func newSimulation(f plan.Family) simulation {
	m := packetsim.New(f)
	for id := range setCount {
		s := &packetsim.Set{Name: setName(id, f), Family: f, Entries: map[packetsim.Element]packetsim.Entry{}}
		method, dimensions, _ := strings.Cut(setKinds[id].kind, ":")
		if s.Dimensions = strings.Split(dimensions, ","); method == "bitmap" {
			s.Family = 0
		}
		m.Sets[s.Name] = s
	}
	return simulation{m}
}

func (m simulation) addEntry(id setID, e ipset.Entry) {
	set := setOf(id, m.Family)
	s := m.Sets[set.Name]
	var at packetsim.Element
	for i, d := range s.Dimensions {
		switch {
		case d == "port":
			at[i] = packetsim.Field{Protocol: e.Protocol.Lower(), Port: e.Port}
		case d == "net":
			at[i].Prefix = e.Net
		case i == 0:
			at[i].Prefix = xtables.Single(e.Addr)
		default:
			at[i].Prefix = xtables.Single(e.Addr2)
		}
	}
	set.Marks = false
	s.Entries[at] = packetsim.Entry{Mark: e.Mark, Mask: e.Mask, Text: e.Text(set)}
}

// addServer adds a virtual server. One without real servers is left out, as in Render.
func (m simulation) addServer(v server) {
	if len(v.realServers) == 0 {
		return
	}
	s := &packetsim.Server{Text: packetsim.Text(addServerText(v)), Scheduler: v.Scheduler}
	for _, d := range v.realServers {
		s.RealServers = append(s.RealServers, packetsim.RealServer{Text: packetsim.Text(addRealServerText(v, d)), Addr: d.Addr, Weight: int(d.Weight)})
	}
	key := packetsim.ServerKey{Mark: v.ID.Mark}
	if key.Mark == 0 {
		key = packetsim.ServerKey{Protocol: v.ID.Protocol.Lower(), Addr: netip.AddrPortFrom(v.ID.Addr, v.ID.Port)}
	}
	m.Servers[key] = s
}

// Machine is like the function Machine, with the options that are in force on this node, where local reports whether an address is that of
// an interface besides the mode's own. It may be called during a Sync.
func (b *Backend) Machine(p *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error) {
	for _, e := range b.Engines {
		if e.family == f {
			return Machine(p, f, e.options.On(p, local))
		}
	}
	return packetsim.New(f), nil
}

// On returns the options for a node of which local reports whether an address of one of p's Services is that of an interface.
func (o Options) On(p *plan.Plan, local func(netip.Addr) bool) Options {
	o.Host = set.Set[netip.Addr]{}
	for _, sp := range p.Services {
		for _, fe := range sp.Frontends {
			if fe.Addr.IsValid() && local(fe.Addr) {
				o.Host.Insert(fe.Addr)
			}
		}
	}
	return o
}
