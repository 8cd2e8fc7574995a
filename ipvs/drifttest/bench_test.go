package drifttest

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"nodeproxy/ipvs"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
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

// BenchmarkCompare is a comparison of everything with two endpoints for each Service; and what it costs, in parts of a processor, to watch
// while nothing happens.
func BenchmarkCompare(b *testing.B) {
	for _, of := range []struct {
		services int
		vips     ipvs.VIPs
	}{{5000, ipvs.Routes}, {5000, ipvs.Addresses}, {20_000, ipvs.Routes}} {
		b.Run(fmt.Sprint(of.services, " ", of.vips), func(b *testing.B) {
			inLab(b, xtables.NFT, of.services, ipvs.Options{VIPs: of.vips}, func(l *lab) {
				before := cpuTime(b)
				for b.Loop() {
					l.compare()
				}
				b.ReportMetric(float64((cpuTime(b)-before).Milliseconds())/float64(b.N), "cpu-ms/op")
				time.Sleep(5 * time.Second) // The namespace of the run before may still be there, see prober of package ipvs.
				l.sync()
				drain(l.seen)
				time.Sleep(20 * time.Second) // until it knows what its looks take
				const watched = 30 * time.Second
				before = cpuTime(b)
				time.Sleep(watched) // how long it is measured
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

// BenchmarkPods is what it costs, in parts of a processor, that a pod's interface comes each second, at 3,000 Services with two
// endpoints each, and how many comparisons of everything that causes.
func BenchmarkPods(b *testing.B) {
	inLab(b, xtables.NFT, 3000, ipvs.Options{}, func(l *lab) {
		ctx, cancel := context.WithCancel(context.Background())
		changed := make(chan struct{}, 1)
		var running sync.WaitGroup
		running.Go(func() {
			runtime.LockOSThread()
			if err := netns.Set(l.ns); err != nil {
				b.Error(err)
				return
			}
			if err := l.backend.Run(ctx, func() {
				select {
				case changed <- struct{}{}:
				default:
				}
			}); err != nil {
				b.Error(err)
			}
		})
		defer running.Wait()
		defer cancel()
		time.Sleep(time.Second) // What the start led to is over.
		const pods = 15
		drain(l.reports)
		before, busy := cpuTime(b), time.Duration(0)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for i := 0; i < pods; {
			select {
			case <-tick.C:
				name := fmt.Sprint("pod", b.N, "x", i)
				for _, args := range [][]string{{"link", "add", name, "type", "dummy"}, {"link", "set", name, "up"}} {
					if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
						b.Errorf("ip %v: %v: %s", args, err, out)
					}
				}
				i++
			case <-changed:
				begin := time.Now()
				l.sync()
				busy += time.Since(begin)
			}
		}
		b.ReportMetric(100*(cpuTime(b)-before).Seconds()/pods, "%-of-a-core")
		b.ReportMetric(float64(len(l.reports)), "comparisons")
		b.ReportMetric(100*busy.Seconds()/pods, "%-of-the-time-syncing")
	})
}

// BenchmarkExtremes is how long changes of extreme Services keep others' changes waiting: see plantest.Extreme.
func BenchmarkExtremes(b *testing.B) {
	for _, x := range plantest.Extremes {
		b.Run(x.Name, func(b *testing.B) {
			inLab(b, xtables.NFT, 1000, ipvs.Options{}, func(l *lab) {
				err := x.Measure(b, l.plan, func(keys plan.Keys) error { return l.backend.Sync(b.Context(), l.plan, plan.Only(keys)) },
					l.backend.Unfinished)
				assert.NoError(b, err)
			})
		})
	}
}
