package plantest

import (
	"net/netip"
	"slices"
	"testing"
	"time"

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

// Measure reports how long a change of one of the Services of a large plan may wait for those of x: the longest sync while x is added, loses an
// endpoint, gets other endpoints, and is removed; "all" is how long all of these take together. sync programs the ServicePorts of p that
// have changed, of which more says whether some are left to further syncs; all others are in force.
func (x Extreme) Measure(b *testing.B, p *plan.Plan, sync func(plan.Keys) error, more func() bool) error {
	services := len(p.Services)
	longest := map[string]time.Duration{}
	var all time.Duration
	n := 0
	change := func(what string) error {
		keys := plan.Keys{x.ServicePort(0, 0).Key: {}}
		for first := true; first || more(); first = false {
			n++
			small := LargeService(n%services, 2*services+2*n, 2)
			p.Set(small)
			keys.Add(small.Key)
			begin := time.Now()
			if err := sync(keys); err != nil {
				return err
			}
			took := time.Since(begin)
			all += took
			longest[what] = max(longest[what], took)
			keys = plan.Keys{}
		}
		return nil
	}
	for b.Loop() {
		for _, next := range []struct {
			what string
			sp   *plan.ServicePort
		}{
			{"added", x.ServicePort(50_000, 0)}, {"fewer", x.ServicePort(50_000, 1)}, {"others", x.ServicePort(70_000, 0)}, {"removed", nil},
		} {
			if p.Delete(x.ServicePort(0, 0).Key); next.sp != nil {
				p.Set(next.sp)
			}
			if err := change(next.what); err != nil {
				return err
			}
		}
	}
	for what, took := range longest {
		b.ReportMetric(float64(took.Microseconds())/1000, what+"-ms")
	}
	b.ReportMetric(float64(all.Milliseconds())/float64(b.N), "all-ms")
	return nil
}
