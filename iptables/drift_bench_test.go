package iptables

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/xtables"
)

// cpuTime is the processor time of this program and those that it has run.
func cpuTime(b *testing.B) time.Duration {
	var sum time.Duration
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		require.NoError(b, unix.Getrusage(who, &u))
		sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return sum
}

// BenchmarkCompare is a comparison of everything at 10,000 Services with two endpoints each, in which nothing is found, where nothing is
// known of comparisons before, and where one has found the same; and what comparing costs on the average, in parts of a processor: where
// nothing happens (one part in 1,500 of the time), and at most (one in 25).
func BenchmarkCompare(b *testing.B) {
	for _, first := range []bool{true, false} {
		b.Run(fmt.Sprintf("first=%t", first), func(b *testing.B) {
			inVariants(b, func(b *testing.B, v xtables.Variant) { compareAll(b, v, first) })
		})
	}
}

func compareAll(b *testing.B, v xtables.Variant, first bool) {
	l := newLab(b, v, 10000)
	defer l.end()
	l.compare()
	b.ResetTimer()
	before := cpuTime(b)
	for b.Loop() {
		for _, e := range l.backend.Engines {
			if first {
				e.right = nil
			}
		}
		l.compare()
	}
	used := cpuTime(b) - before
	b.ReportMetric(float64(used.Milliseconds())/float64(b.N), "cpu-ms/op")
	b.ReportMetric(100*float64(used)/float64(b.Elapsed())/1500, "%-of-a-core-idle")
	b.ReportMetric(100*float64(used)/float64(b.Elapsed())/25, "%-of-a-core-at-most")
	if why := l.seen.take(); len(why) > 0 {
		b.Errorf("syncs of its own made it suspect that %q", why)
	}
}

// BenchmarkFlush is how long it takes to notice that somebody has emptied table nat with 10,000 Services, and to repair it.
func BenchmarkFlush(b *testing.B) {
	inVariants(b, func(b *testing.B, v xtables.Variant) {
		l := newLab(b, v, 10000)
		defer l.end()
		var noticed, repaired time.Duration
		for b.Loop() {
			b.StopTimer()
			l.do("iptables-{} -w -t nat -F")
			b.StartTimer()
			begin := time.Now()
			if why := l.seen.within(10 * time.Second); len(why) == 0 {
				b.Error("it was not noticed")
			}
			noticed += time.Since(begin)
			begin = time.Now()
			l.compare()
			repaired += time.Since(begin)
		}
		b.ReportMetric(noticed.Seconds()/float64(b.N), "s-noticed")
		b.ReportMetric(repaired.Seconds()/float64(b.N), "s-repaired")
		last := l.reports[len(l.reports)-1]
		b.Logf("the last time, %d things differed: %s", len(last.Found), last.Found.Words(1))
	})
}

// BenchmarkProbe is what the legacy variant does each second.
func BenchmarkProbe(b *testing.B) {
	nstest.Run(b, func() {
		l := newLab(b, xtables.Legacy, 10000)
		defer l.end()
		for b.Loop() {
			l.backend.watch.(*xtables.Watch).Changed()
		}
	})
}
