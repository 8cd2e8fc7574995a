package iptables

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// BenchmarkRender10k makes the text of 10,000 services with two endpoints each.
func BenchmarkRender10k(b *testing.B) {
	p := plantest.Large(10000, 2)
	b.ReportAllocs()
	for b.Loop() {
		Render(p, plan.IPv4, testOptions)
	}
}

// BenchmarkUpdateOneOf10k computes, without writing it, what one service's new endpoints change among 10,000.
func BenchmarkUpdateOneOf10k(b *testing.B) {
	p := plantest.Large(10000, 2)
	r := rulesOf(p, plan.IPv4, testOptions)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		sp := plantest.LargeService(5000, 1000*i%60000, 2)
		p.Set(sp)
		r.update(p, plan.Keys{sp.Key: {}})
	}
}

// BenchmarkSync programs the kernel in a namespace of its own with all of 10,000 services, from none.
func BenchmarkSync(b *testing.B) {
	inVariants(b, func(b *testing.B, v xtables.Variant) {
		p := plantest.Large(10000, 2)
		for b.Loop() {
			e := realEngine(b, v, plan.IPv4)
			program(b, e, plan.New(p.Node, p.Settings), plan.Everything())
			program(b, e, p, plan.Everything())
		}
	})
}

// BenchmarkChanges is one change of 10,000 Services with two endpoints each: other endpoints of one of them, and of 100 at once. Their
// addresses lie all over the range, as those do that an API server allots.
func BenchmarkChanges(b *testing.B) {
	for _, many := range []int{1, 100} {
		b.Run(fmt.Sprintf("%d at once", many), func(b *testing.B) {
			inVariants(b, func(b *testing.B, v xtables.Variant) {
				const services, endpoints, range4, scatter, stride = 10000, 2, 60000, 40507, 7919
				p, changes := plantest.Large(0, endpoints), 0
				change := func(i int) plan.Key {
					changes++
					sp := plantest.LargeService(i, endpoints*changes, endpoints)
					n := i * scatter % range4
					sp.Frontends[0].Addr = netip.AddrFrom4([4]byte{10, 96, 1 + byte(n>>8), byte(n)})
					p.Set(sp)
					return sp.Key
				}
				for i := range services {
					change(i)
				}
				e := realEngine(b, v, plan.IPv4)
				program(b, e, p, plan.Everything())
				e.TakeWritten()
				before := cpuTime(b)
				for b.Loop() {
					changed := plan.Keys{}
					for range many {
						changed.Add(change(changes * stride % services))
					}
					program(b, e, p, plan.Only(changed))
				}
				b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/1000/float64(b.N), "cpu-ms/op")
				b.ReportMetric(float64(e.TakeWritten()[drift.Rule])/float64(b.N), "rules/op")
			})
		})
	}
}

// BenchmarkManyAtOnce brings 4,000 Services with session affinity and three endpoints each to a node that has 500 others: all in
// one change, and in portions as the proxier makes them of it (proxier/portion), where longest is how long another change
// has to wait at most.
func BenchmarkManyAtOnce(b *testing.B) {
	const services, endpoints = 4000, 3
	for _, portion := range []int{services, xtables.MaxNames / (endpoints + 1)} {
		b.Run(fmt.Sprintf("%d at once", portion), func(b *testing.B) {
			nstest.Run(b, func() {
				for b.Loop() {
					manyAtOnce(b, services, endpoints, portion)
				}
			})
		})
	}
}

func manyAtOnce(b *testing.B, services, endpoints, portion int) {
	b.StopTimer()
	e := realEngine(b, xtables.NFT, plan.IPv4)
	e.options.CompactAbove = DefaultCompactAbove
	e.Kernel.(*xtables.Program).RestoreTime = time.Hour // On a busy machine, the run for all takes longer than it may.
	p := plantest.Large(500, endpoints)
	program(b, e, p, plan.Everything())
	b.StartTimer()
	longest := time.Duration(0)
	for first := 0; first < services; first += portion {
		changed := plan.Keys{}
		for i := first; i < min(first+portion, services); i++ {
			sp := plantest.LargeService(500+i, 3*(500+i), endpoints)
			sp.Affinity = time.Hour
			p.Set(sp)
			changed.Add(sp.Key)
		}
		begin := time.Now()
		program(b, e, p, plan.Only(changed))
		longest = max(longest, time.Since(begin))
	}
	b.ReportMetric(longest.Seconds(), "s-longest")
}

// BenchmarkExtremes is how long changes of extreme Services keep others' changes waiting: see plantest.Extreme.
func BenchmarkExtremes(b *testing.B) {
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		for _, x := range plantest.Extremes {
			if x.Scheduler != "" { // This mode has none.
				continue
			}
			b.Run(string(v)+"/"+x.Name, func(b *testing.B) {
				nstest.Run(b, func() {
					p := plantest.Large(1000, 2)
					e := realEngine(b, v, plan.IPv4)
					e.options.CompactAbove = DefaultCompactAbove
					program(b, e, p, plan.Everything())
					err := x.Measure(b, p, func(keys plan.Keys) error { return e.Sync(b.Context(), p, plan.Only(keys)) }, func() bool { return false })
					assert.NoError(b, err)
				})
			})
		}
	}
}
