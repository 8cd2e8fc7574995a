package drifttest

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/iptables"
	"nodeproxy/ipvs"
)

// cpuTime is the processor time of this program and those that it has run.
func cpuTime(b *testing.B) time.Duration {
	var sum time.Duration
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if err := unix.Getrusage(who, &u); err != nil {
			b.Fatal(err)
		}
		sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return sum
}

// BenchmarkCompare is a comparison of everything at 5,000 Services with two endpoints each; and what it costs, in parts of a
// processor, to watch while nothing happens.
func BenchmarkCompare(b *testing.B) {
	for _, vips := range []ipvs.VIPs{ipvs.Routes, ipvs.Addresses} {
		b.Run(string(vips), func(b *testing.B) {
			inLab(b, iptables.NFT, 5000, ipvs.Options{VIPs: vips}, func(l *lab) {
				before := cpuTime(b)
				for b.Loop() {
					l.sync()
				}
				b.ReportMetric(float64((cpuTime(b)-before).Milliseconds())/float64(b.N), "cpu-ms/op")
				time.Sleep(5 * time.Second) // The namespace of the run before may still be there, see prober of package ipvs.
				l.sync()
				drain(l.seen)
				const watched = 20 * time.Second
				before = cpuTime(b)
				time.Sleep(watched)
				b.ReportMetric(100*float64(cpuTime(b)-before)/float64(watched), "%-of-a-core-watching")
				select {
				case why := <-l.seen:
					b.Errorf("nothing happened, and it suspects that %q", why)
				default:
				}
			})
		})
	}
}
