package plantest

import (
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// Extreme is a ServicePort of a large plan that is as large as an API server takes in some way.
type Extreme struct {
	Name                         string
	Addresses, Endpoints, Ranges int // Addresses are external IPs, or with Ranges load balancer IPs
	Scheduler                    string
}

// Extremes are those for which it is measured how long others wait.
var Extremes = []Extreme{
	{Name: "10000-endpoints", Endpoints: 10_000},
	{Name: "1000-IPs-250-endpoints", Addresses: 1000, Endpoints: 250},
	{Name: "20000-IPs-2-endpoints", Addresses: 20_000, Endpoints: 2},
	{Name: "1000-IPs-mh", Addresses: 1000, Endpoints: 2, Scheduler: "mh"},
	{Name: "4000-IPs-mh", Addresses: 4000, Endpoints: 2, Scheduler: "mh"},
	{Name: "mh-4000-endpoints", Endpoints: 4000, Scheduler: "mh"},
	{Name: "10000-ranges", Addresses: 1, Endpoints: 2, Ranges: 10_000},
}

// ServicePort returns it with other endpoints for each first, as in LargeService, and fewer by less.
func (x Extreme) ServicePort(first, less int) *plan.ServicePort {
	sp := *LargeService(100_000, first, x.Endpoints-less)
	kind := plan.ExternalIP
	if x.Ranges > 0 {
		kind = plan.LoadBalancerIP
	}
	for n := range x.Addresses {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: kind, Addr: nth(netip.MustParsePrefix("203.0.0.0/16"), n), Protocol: plan.TCP, Port: 80})
	}
	slices.SortFunc(sp.Frontends, plan.Frontend.Compare)
	for n := range x.Ranges { // No two are neighbours.
		sp.SourceRanges = append(sp.SourceRanges, netip.PrefixFrom(nth(netip.MustParsePrefix("172.16.0.0/12"), 2*n), 32))
	}
	sp.Scheduler.Name = x.Scheduler
	return &sp
}
