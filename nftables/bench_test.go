package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

var sizes = []struct{ services, endpoints int }{{10000, 2}, {45000, 1}, {5000, 50}}

// BenchmarkFirst is the first programming of everything.
func BenchmarkFirst(b *testing.B) {
	for _, size := range sizes {
		p := plantest.Large(size.services, size.endpoints)
		b.Run(fmt.Sprintf("%dx%d", size.services, size.endpoints), func(b *testing.B) {
			nstest.Enter(b) // here: each of them has a thread of its own
			for b.Loop() {
				b.StopTimer()
				_ = Cleanup()
				e, _ := testEngine(b, plan.IPv4)
				b.StartTimer()
				synced(b, e, p, plan.Everything())
				b.StopTimer()
				_ = e.kernel.Close()
				e.kernel = nil
				b.StartTimer()
			}
		})
	}
}

// BenchmarkCompare is a comparison of everything with the kernel, which finds everything as it was written.
func BenchmarkCompare(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("%dx%d", size.services, size.endpoints), func(b *testing.B) {
			nstest.Enter(b)
			p := plantest.Large(size.services, size.endpoints)
			e, _ := testEngine(b, plan.IPv4)
			synced(b, e, p, plan.Everything())
			for b.Loop() {
				syncFindsNothing(b, e, p)
			}
		})
	}
}

// BenchmarkOneChange replaces all endpoints of one Service, and with "count" gives it one endpoint more or fewer.
func BenchmarkOneChange(b *testing.B) {
	nstest.Enter(b)
	for _, size := range sizes {
		_ = Cleanup()
		p := plantest.Large(size.services, size.endpoints)
		e, _ := testEngine(b, plan.IPv4)
		synced(b, e, p, plan.Everything())
		n := 0
		change := func(b *testing.B, endpoints int) {
			i := n * 7 % size.services
			sp := plantest.LargeService(i, size.services*size.endpoints+n*endpoints, endpoints)
			n++
			changeOf(b, e, p, sp)
		}
		for _, more := range []int{0, 1} {
			change(&testing.B{}, size.endpoints+more) // The kind of the other number has its chain.
		}
		b.Run(fmt.Sprintf("%dx%d/endpoints", size.services, size.endpoints), func(b *testing.B) {
			for b.Loop() {
				change(b, size.endpoints)
			}
		})
		b.Run(fmt.Sprintf("%dx%d/count", size.services, size.endpoints), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				change(b, size.endpoints+i%2)
			}
		})
	}
}

// BenchmarkManyKinds is the first programming of Services under policy Local of which each has a kind of its own: by its affinity
// timeout, or by its number of endpoints. Then it is one more such Service.
func BenchmarkManyKinds(b *testing.B) {
	for name, of := range map[string]func(i int) *plan.ServicePort{"timeouts": ownTimeout, "counts": ownCount} {
		for _, n := range []int{500, 1000, 3000} {
			if name == "counts" {
				n /= 5 // It takes n*n/2 endpoints.
			}
			p := plantest.Large(0, 0)
			for i := range n {
				p.Set(of(i))
			}
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				nstest.Enter(b)
				var first, more time.Duration
				for b.Loop() {
					_ = Cleanup()
					e, _ := testEngine(b, plan.IPv4)
					begin := time.Now()
					synced(b, e, p, plan.Everything())
					first += time.Since(begin)
					sp := of(n)
					p.Set(sp)
					begin = time.Now()
					synced(b, e, p, plan.Only(plan.Keys{sp.Key: {}}))
					more += time.Since(begin)
					p.Delete(sp.Key)
					_ = e.kernel.Close()
					e.kernel = nil
				}
				b.ReportMetric(first.Seconds()/float64(b.N), "first-s")
				b.ReportMetric(more.Seconds()*1000/float64(b.N), "one-more-ms")
			})
		}
	}
}

// ownTimeout is a Service with a load balancer IP under policy Local and an affinity of i seconds.
func ownTimeout(i int) *plan.ServicePort {
	sp := plantest.LargeService(i, 2*i, 1)
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.LoadBalancerIP, Addr: netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}),
		Protocol: plan.TCP, Port: 80})
	sp.ExternalPolicy, sp.Affinity = plan.Local, time.Duration(i+1)*time.Second
	sp.Endpoints.Local = sp.Endpoints.Cluster
	return sp
}

// ownCount is one with i endpoints.
func ownCount(i int) *plan.ServicePort {
	sp := ownTimeout(i)
	sp.Endpoints, sp.Affinity = plantest.LargeService(i, 0, i+1).Endpoints, 0
	sp.Endpoints.Local = sp.Endpoints.Cluster
	return sp
}

// BenchmarkRestart is the first programming of Services, what a program that starts again takes to find all of it there, a sync after a change
// of the node, a comparison beside syncs, and one more, before which nothing has changed.
func BenchmarkRestart(b *testing.B) {
	ctx := context.Background()
	for _, size := range []struct{ services, endpoints, frontends int }{{10000, 2, 1}, {45000, 1, 1}, {5000, 50, 1}, {5000, 50, 3}} {
		p := plantest.Large(size.services, size.endpoints)
		for i, sp := range p.Sorted(plan.IPv4) {
			more := *sp
			for n := range size.frontends - 1 {
				a := netip.AddrFrom4([4]byte{203, byte(n), byte(i >> 8), byte(i)})
				more.Frontends = append(more.Frontends[:len(more.Frontends):len(more.Frontends)],
					plan.Frontend{Kind: plan.ExternalIP, Addr: a, Protocol: sp.Key.Protocol, Port: 80})
			}
			p.Set(&more)
		}
		b.Run(fmt.Sprintf("%dx%dx%d", size.services, size.endpoints, size.frontends), func(b *testing.B) {
			nstest.Enter(b)
			took := map[string]time.Duration{}
			timed := func(what string, f func() error) {
				begin := time.Now()
				if err := f(); err != nil {
					b.Fatal(what, err)
				}
				took[what] += time.Since(begin)
			}
			for b.Loop() {
				_ = Cleanup()
				e, _ := testEngine(b, plan.IPv4)
				timed("cold", func() error { return e.Sync(ctx, p, plan.Everything()) })
				again, _ := testEngine(b, plan.IPv4)
				timed("restart", func() error { return again.Sync(ctx, p, plan.Everything()) })
				timed("settings", func() error { return again.Sync(ctx, p, plan.EveryService()) })
				timed("compare", func() error {
					found, more, err := again.CompareBeside(ctx)
					if len(found) > 0 || more {
						b.Fatal(found, more)
					}
					return err
				})
				timed("unchanged", func() error {
					if !again.unchanged() {
						b.Fatal("something has changed")
					}
					return nil
				})
			}
			for what, all := range took {
				b.ReportMetric(float64(all.Milliseconds())/float64(b.N), what+"-ms")
			}
		})
	}
}

// BenchmarkExtremes is how long changes of extreme Services keep others' changes waiting: see plantest.Extreme.
func BenchmarkExtremes(b *testing.B) {
	ctx := context.Background()
	for _, x := range plantest.Extremes {
		b.Run(x.Name, func(b *testing.B) {
			nstest.Enter(b)
			p := plantest.Large(1000, 2)
			e, _ := testEngine(b, plan.IPv4)
			synced(b, e, p, plan.Everything())
			err := x.Measure(b, p, func(keys plan.Keys) error { return e.Sync(ctx, p, plan.Only(keys)) }, func() bool { return len(e.unfinished) > 0 })
			require.NoError(b, err)
		})
	}
}
