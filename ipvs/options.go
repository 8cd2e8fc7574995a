package ipvs

import (
	"cmp"
	"net/netip"
	"slices"

	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// VIPs says how the addresses of Services become addresses of the node, as IPVS needs them to be.
type VIPs string

// The ways. Addresses puts each on the device kube-ipvs0. Routes makes one local route of each range that cluster IPs are
// allotted from, as far as these are known, and puts only the others on the device.
const (
	Addresses VIPs = "addresses"
	Routes    VIPs = "routes"
)

// DefaultScheduler sends connections to endpoints in turn.
const DefaultScheduler = "rr"

// Options are the parts of what is programmed that come from the configuration of this backend or from what the node can
// do, not from the cluster.
type Options struct {
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31; kube-proxy's default is 14.
	MasqueradeBit int
	// RandomFully and TCPLiberal are as for mode iptables.
	RandomFully, TCPLiberal bool
	// Scheduler is for Services that ask for none; empty for DefaultScheduler.
	Scheduler string
	// Unavailable tells of schedulers that the kernel lacks; the default one is used in their place. nil for none.
	Unavailable func(name string) bool
	// VIPs is Routes if empty.
	VIPs VIPs
	// WholeAddresses makes external IPs local with all of their ports, for a kernel that can't divert single ones.
	WholeAddresses bool
	// Host holds the addresses of the node's own interfaces, which are never put on the device.
	Host map[netip.Addr]struct{}
}

// scheduler is the one that a ServicePort gets.
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

// fallsBack reports whether a scheduler is told to choose another endpoint in place of one that drains. Without that, sh and mh
// refuse the clients whose hash leads there for as long as it drains.
func fallsBack(name string) bool { return name == "sh" || name == "mh" }

// whileDraining is what a virtual server is while real servers of it drain. The scheduler dh refuses all clients if it is one of
// these that its hash leads to, and cannot be told otherwise; so the default one does its work meanwhile.
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

// sticky is the scheduler that stands in for session affinity where there can be no persistence. Of those that choose by the
// client's address, mh moves the fewest clients when endpoints come and go.
func (o Options) sticky(sp *plan.ServicePort) plan.Scheduler {
	for _, name := range []string{"mh", "sh"} {
		if sp.Affinity > 0 && (o.Unavailable == nil || !o.Unavailable(name)) {
			return plan.Scheduler{Name: name, Fallback: true}
		}
	}
	return o.scheduler(sp)
}

// routed are the ranges that get a route. A range of one address gets none: the kernel makes the same local route with the address
// of a Service there, and one of the two would take the other's place.
func (o Options) routed(p *plan.Plan, f plan.Family) []netip.Prefix {
	if o.VIPs == Addresses {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(p.Settings.ServiceCIDRs), func(r netip.Prefix) bool {
		return plan.FamilyOf(r.Addr()) != f || r.IsSingleIP()
	})
}
