package ipvs

import (
	"context"
	"runtime"
	"testing"

	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// heap is what is in use of the heap, without garbage, and what has been allocated since the program began.
func heap() (inUse, allocated int64) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), int64(m.TotalAlloc)
}

// heapWatch accepts all changes, keeps none of them, and measures the heap before each.
type heapWatch struct {
	servers
	ipsets
	peak int64
}

func (w *heapWatch) look() {
	inUse, _ := heap()
	w.peak = max(w.peak, inUse)
}

func (w *heapWatch) Apply([]ipvs.Op) []error {
	w.look()
	return nil
}

func (w *heapWatch) Add(ipset.Set, []ipset.Entry) error {
	w.look()
	return nil
}

// BenchmarkMemory is what 10,000 Services of two endpoints take beyond the plan, in MiB of the heap: most during the first sync and what is
// kept then, both without garbage, and how much the first sync allocates.
func BenchmarkMemory(b *testing.B) {
	p := plantest.Large(10000, 2)
	for b.Loop() {
		e, k := fakeEngine(plan.IPv4, Options{})
		w := &heapWatch{servers: ipvstest.Servers{Kernel: k}, ipsets: ipvstest.Sets{Kernel: k}}
		e.machine.servers, e.machine.sets = w, w
		base, before := heap()
		if err := e.Sync(context.Background(), p, plan.Everything()); err != nil {
			b.Fatal(err)
		}
		kept, after := heap()
		const mebibyte = 1 << 20
		b.ReportMetric(float64(w.peak-base)/mebibyte, "MiB-first")
		b.ReportMetric(float64(kept-base)/mebibyte, "MiB-kept")
		b.ReportMetric(float64(after-before)/mebibyte, "MiB-allocated")
		runtime.KeepAlive(e)
	}
}
