package ipvs

import (
	"cmp"
	"net/netip"
	"slices"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// VIPs says how the addresses of Services become local addresses of the node, as IPVS requires.
type VIPs string

// The ways. Addresses adds each to the device kube-ipvs0. Routes makes one local route for each known range of cluster IPs, and
// adds only the others to the device.
const (
	Addresses VIPs = "addresses"
	Routes    VIPs = "routes"
)

// DefaultScheduler is round robin.
const DefaultScheduler = "rr"

// Options are the inputs besides the plan: this backend's configuration and what the node supports.
type Options struct {
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31; kube-proxy's default is 14.
	MasqueradeBit int
	// RandomFully and TCPLiberal are as for mode iptables.
	RandomFully, TCPLiberal bool
	// Scheduler is the scheduler of Services that ask for none; "" for DefaultScheduler.
	Scheduler string
	// Unavailable reports whether the kernel lacks a scheduler; the default one then replaces it. nil for none.
	Unavailable func(name string) bool
	// VIPs is Routes if empty.
	VIPs VIPs
	// WholeAddresses makes external IPs local with all of their ports, for a kernel that can't divert single ports.
	WholeAddresses bool
	// Host holds the addresses of the node's own interfaces, which are never added to the device.
	Host set.Set[netip.Addr]
}

// scheduler returns the scheduler of a ServicePort.
func (o Options) scheduler(sp *plan.ServicePort) plan.Scheduler {
	s := sp.Scheduler
	if s.Name == "" || o.Unavailable != nil && o.Unavailable(s.Name) {
		s = plan.Scheduler{Name: o.Scheduler}
	}
	if s.Name == "" {
		s.Name = DefaultScheduler
	}
	s.Fallback = s.Fallback || fallsBack(s.Name)
	return s
}

// fallsBack reports whether a scheduler gets the flag to select another endpoint in place of a draining one. Without it, sh and mh
// refuse the clients whose hash selects that one for as long as it drains.
func fallsBack(name string) bool { return name == "sh" || name == "mh" }

// whileDraining returns the properties of a virtual server while real servers of it drain. The scheduler dh refuses all clients
// whose hash selects one of these and has no flag against that; so the default one replaces it meanwhile.
func (o Options) whileDraining(v ipvs.Server) ipvs.Server {
	if v.Scheduler != "dh" {
		return v
	}
	v.Scheduler = cmp.Or(o.Scheduler, DefaultScheduler)
	if v.Scheduler == "dh" {
		v.Scheduler = DefaultScheduler
	}
	v.Fallback = fallsBack(v.Scheduler)
	return v
}

// sticky returns the scheduler that replaces session affinity where persistence is impossible. Of those that hash the client's
// address, mh moves the fewest clients when endpoints change.
func (o Options) sticky(sp *plan.ServicePort) plan.Scheduler {
	for _, name := range []string{"mh", "sh"} {
		if sp.Affinity > 0 && (o.Unavailable == nil || !o.Unavailable(name)) {
			return plan.Scheduler{Name: name, Fallback: true}
		}
	}
	return o.scheduler(sp)
}

// routed returns the ranges that get a route. A range of one address gets none: the kernel makes the same local route for the
// address of a Service there, and one of the two would replace the other.
func (o Options) routed(p *plan.Plan, f plan.Family) []netip.Prefix {
	if o.VIPs == Addresses {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(p.Settings.ServiceCIDRs), func(r netip.Prefix) bool {
		return plan.FamilyOf(r.Addr()) != f || r.IsSingleIP()
	})
}
