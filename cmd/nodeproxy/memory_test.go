package main

import (
	"context"
	"log/slog"
	"net/netip"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// TestSaveMemory: garbage is collected more often once all objects have been read, and again once they are programmed, unless GOGC says how often.
func TestSaveMemory(t *testing.T) {
	const before = 99
	for _, gogc := range []string{"", "99"} {
		t.Run("GOGC="+gogc, func(t *testing.T) {
			t.Setenv("GOGC", gogc)
			was := debug.SetGCPercent(before)
			defer debug.SetGCPercent(was)
			d := &daemon{log: slog.New(slog.DiscardHandler), monitor: &monitor{complete: make(chan struct{})},
				read: proxier.NewObjects("n", netip.Addr{}, plan.Settings{}, plan.Families[:])}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				d.saveMemory(t.Context())
			}()
			want := []int{startGrowth, restGrowth}
			if gogc != "" {
				want = []int{before, before}
			}
			require.Equal(t, before, growth())
			d.read.Apply(source.Batch{Synced: true})
			require.Eventually(t, func() bool { return growth() == want[0] }, time.Minute, time.Millisecond)
			close(d.monitor.complete)
			<-ended
			require.Equal(t, want[1], growth())
		})
	}
}

// TestProfileMemory: where memory is allocated is noted only while that is served, and as often as a user has said.
func TestProfileMemory(t *testing.T) {
	was := runtime.MemProfileRate
	defer func() { runtime.MemProfileRate = was }()
	runtime.MemProfileRate = 12345
	for _, tc := range []struct {
		served bool
		rate   int
	}{{true, 12345}, {false, 0}, {false, 0}, {true, 512 << 10}, {true, 512 << 10}} {
		profileMemory(tc.served)
		require.Equal(t, tc.rate, runtime.MemProfileRate)
	}
}

// TestSaveMemoryEnds: where the daemon ends before all objects have been read, garbage is collected as before.
func TestSaveMemoryEnds(t *testing.T) {
	const before = 99
	t.Setenv("GOGC", "")
	was := debug.SetGCPercent(before)
	defer debug.SetGCPercent(was)
	d := &daemon{log: slog.New(slog.DiscardHandler), monitor: &monitor{complete: make(chan struct{})},
		read: proxier.NewObjects("n", netip.Addr{}, plan.Settings{}, plan.Families[:])}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d.saveMemory(ctx)
	require.Equal(t, before, growth())
}

// growth is by how many percent the heap grows until garbage is collected.
func growth() int {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	return int(sample[0].Value.Uint64())
}
