package nftables

import (
	"context"
	"fmt"
	"testing"

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
				if err := e.sync(context.Background(), p, plan.Everything()); err != nil {
					b.Fatal(err)
				}
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
	nstest.Enter(b)
	for _, size := range sizes {
		_ = Cleanup()
		p := plantest.Large(size.services, size.endpoints)
		e, _ := testEngine(b, plan.IPv4)
		if err := e.sync(context.Background(), p, plan.Everything()); err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("%dx%d", size.services, size.endpoints), func(b *testing.B) {
			for b.Loop() {
				if err := e.sync(context.Background(), p, plan.Everything()); err != nil || len(e.found) > 0 {
					b.Fatal(err, e.found)
				}
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
		if err := e.sync(context.Background(), p, plan.Everything()); err != nil {
			b.Fatal(err)
		}
		n := 0
		change := func(b *testing.B, endpoints int) {
			i := n * 7 % size.services
			sp := plantest.LargeService(i, size.services*size.endpoints+n*endpoints, endpoints)
			n++
			p.Set(sp)
			if err := e.sync(context.Background(), p, plan.Only(plan.Keys{sp.Key: {}})); err != nil {
				b.Fatal(err)
			}
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
