package ipvs

import (
	"net/netip"

	"nodeproxy/internal/set"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// Machine returns what a packet meets where everything is as Render returns it for p. Only objects of the ServicePorts that it is for
// matter to a packet, so that p need have no others.
func Machine(p *plan.Plan, f plan.Family, o Options) (*packetsim.Machine, error) {
	return restore.ParseSections(f, Render(p, f, o))
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
