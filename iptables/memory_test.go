package iptables

import (
	"context"
	"log/slog"
	"runtime"
	"testing"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// heap is what is in use of the heap, without garbage.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// heapWatch measures the heap where a sync holds much: when a table has been read, before each run of iptables-restore, and when a
// comparison of everything ends, which is logged.
type heapWatch struct {
	xtables.Kernel
	slog.Handler
	peak int64
}

func (w *heapWatch) look() { w.peak = max(w.peak, heap()) }

func (w *heapWatch) Save(ctx context.Context, t names.Table, known ...xtables.Content) (xtables.Content, error) {
	out, err := w.Kernel.Save(ctx, t, known...)
	w.look()
	runtime.KeepAlive(out)
	return out, err
}

func (w *heapWatch) Restore(input xtables.Input) error {
	w.look()
	return w.Kernel.Restore(input)
}

// Enabled, Handle and WithAttrs are those of a slog.Handler.
func (w *heapWatch) Enabled(context.Context, slog.Level) bool { return true }

func (w *heapWatch) Handle(context.Context, slog.Record) error {
	w.look()
	return nil
}

// BenchmarkMemory is what 10,000 Services take beyond the plan, in MiB of the heap without garbage: most during the first sync, what is
// kept then, and most during a comparison of everything; with two endpoints each, which have no chains, and with three, which have.
func BenchmarkMemory(b *testing.B) {
	for _, shape := range []struct {
		name      string
		endpoints int
	}{{"without chains", 2}, {"with chains", 3}} {
		b.Run(shape.name, func(b *testing.B) {
			inVariants(b, func(b *testing.B, v xtables.Variant) {
				p := plantest.Large(10000, shape.endpoints)
				for b.Loop() {
					e := realEngine(b, v, plan.IPv4)
					program(b, e, plan.New(p.Node, p.Settings), plan.Everything())
					w := &heapWatch{Kernel: e.Kernel, Handler: slog.DiscardHandler}
					e.current, e.Kernel, e.log = nil, w, slog.New(w)
					base := heap()
					mebibytes := func(bytes int64, unit string) { b.ReportMetric(float64(bytes-base)/(1<<20), unit) }
					program(b, e, p, plan.Everything())
					mebibytes(w.peak, "MiB-first")
					mebibytes(heap(), "MiB-kept")
					w.peak = 0
					program(b, e, p, plan.Everything())
					mebibytes(w.peak, "MiB-comparing")
					runtime.KeepAlive(e)
				}
				runtime.KeepAlive(p)
			})
		})
	}
}
