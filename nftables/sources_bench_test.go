package nftables

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// BenchmarkSources is the processor time for the first packet of a connection to a load balancer IP, sending it included: without source ranges, from
// the only one, from one of a thousand, and from outside all of them.
func BenchmarkSources(b *testing.B) {
	nstest.Enter(b)
	world := startPods(b, 1)
	nstest.Exec(b, "ip", "route", "add", "203.0.113.1", "dev", "lo", "src", "127.0.0.1")
	whole, other := netip.MustParsePrefix("127.0.0.0/8"), withRanges(1000, 1).SourceRanges
	ways := []struct {
		name   string
		ranges []netip.Prefix
	}{{"free", nil}, {"in-the-only", []netip.Prefix{whole}}, {"in-one-of-1000", plan.Canonical(append([]netip.Prefix{whole}, other...))},
		{"in-none-of-1000", other}}
	all := make([][]float64, len(ways))
	for b.Loop() {
		for i, way := range ways {
			_ = Cleanup()
			e, _ := testEngine(b, plan.IPv4)
			p := plantest.Large(3, 1)
			p.Delete(plantest.LargeService(0, 0, 1).Key)
			sp := world.service(0)
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.LoadBalancerIP, Addr: netip.MustParseAddr("203.0.113.1"), Protocol: plan.UDP, Port: 80})
			sp.SourceRanges = way.ranges
			p.Set(sp)
			synced(b, e, p, plan.Everything())
			const each = 1000
			nstest.Exec(b, "conntrack", "-F") // A tracked flow needs no Service.
			begin, denied := cpuTime(b), 0
			for range each {
				c, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(203, 0, 113, 1), Port: 80})
				require.NoError(b, err)
				if _, err := c.Write([]byte("x")); err != nil {
					denied++
				}
				_ = c.Close()
			}
			if most := denied > each/2; most != (way.name == "in-none-of-1000") {
				b.Fatalf("%s: %d of %d denied", way.name, denied, each)
			}
			all[i] = append(all[i], float64(cpuTime(b)-begin)/each)
			_ = e.kernel.Close()
			e.kernel = nil
		}
	}
	for i, way := range ways {
		slices.Sort(all[i])
		b.ReportMetric(all[i][len(all[i])/2], way.name+"-ns")
	}
	b.ReportMetric(0, "ns/op")
}
