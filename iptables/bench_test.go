package iptables

import (
	"context"
	"testing"

	"nodeproxy/internal/nstest"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
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
	r := newRules(p, plan.IPv4, testOptions)
	for _, sp := range p.Sorted(plan.IPv4) {
		r.enter(sp)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		sp := plantest.LargeService(5000, 1000*i%60000, 2)
		p.Set(sp)
		text(r.update(p, plan.Keys{sp.Key: {}}))
	}
}

// BenchmarkSync programs the kernel in a namespace of its own: all of 10,000 services, and one service's new endpoints.
func BenchmarkSync(b *testing.B) {
	for _, v := range []Variant{NFT, Legacy} {
		b.Run(string(v), func(b *testing.B) {
			nstest.Run(b, func() {
				p := plantest.Large(10000, 2)
				b.Run("all", func(b *testing.B) {
					for b.Loop() {
						e := realEngine(b, v, plan.IPv4)
						if err := e.sync(context.Background(), plan.New(p.Node, p.Settings), nil); err != nil {
							b.Fatal(err)
						}
						if err := e.sync(context.Background(), p, nil); err != nil {
							b.Fatal(err)
						}
					}
				})
			})
		})
	}
}
