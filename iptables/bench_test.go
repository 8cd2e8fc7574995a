package iptables

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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

// scattered is an engine that has programmed 10,000 Services with two endpoints each, whose addresses lie all over the range, as those do
// that an API server allots.
type scattered struct {
	*engine
	b       *testing.B
	plan    *plan.Plan
	changes int
}

const scatteredServices, scatteredEndpoints = 10000, 2

func newScattered(b *testing.B, v xtables.Variant) *scattered {
	s := &scattered{b: b, plan: plantest.Large(0, scatteredEndpoints)}
	for i := range scatteredServices {
		s.set(i)
	}
	s.engine = realEngine(b, v, plan.IPv4)
	program(b, s.engine, s.plan, plan.Everything())
	return s
}

// set gives a Service other endpoints.
func (s *scattered) set(i int) plan.Key {
	const scatter, range4 = 40507, 60000
	s.changes++
	sp := plantest.LargeService(i, scatteredEndpoints*s.changes, scatteredEndpoints)
	n := i * scatter % range4
	sp.Frontends[0].Addr = netip.AddrFrom4([4]byte{10, 96, 1 + byte(n>>8), byte(n)})
	s.plan.Set(sp)
	return sp.Key
}

// change brings other endpoints of many Services to the kernel, and returns how long that took.
func (s *scattered) change(many int) time.Duration {
	const stride = 7919
	changed := plan.Keys{}
	for range many {
		changed.Add(s.set(s.changes * stride % scatteredServices))
	}
	begin := time.Now()
	program(s.b, s.engine, s.plan, plan.Only(changed))
	return time.Since(begin)
}

// BenchmarkChanges is one change of 10,000 Services: other endpoints of one of them, and of 100 at once.
func BenchmarkChanges(b *testing.B) {
	for _, many := range []int{1, 100} {
		b.Run(fmt.Sprintf("%d at once", many), func(b *testing.B) {
			inVariants(b, func(b *testing.B, v xtables.Variant) {
				s := newScattered(b, v)
				s.TakeWritten()
				before := cpuTime(b)
				for b.Loop() {
					s.change(many)
				}
				b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/1000/float64(b.N), "cpu-ms/op")
				b.ReportMetric(float64(s.TakeWritten()[drift.Rule])/float64(b.N), "rules/op")
			})
		})
	}
}

// BenchmarkChangeBesideOthers is where the time goes of a change that begins when another program begins to rewrite its own rules in tables
// mangle, nat and filter: medians of that program by itself, in all of these and in table nat alone, whose rules the kernel checks for it, and
// of the same over tables without rules of ours; of the change by itself; and of the change beside that program.
func BenchmarkChangeBesideOthers(b *testing.B) {
	inVariants(b, func(b *testing.B, v xtables.Variant) {
		took := map[string][]float64{}
		note := func(what string, d time.Duration) { took[what] = append(took[what], d.Seconds()*1000) }
		other := func(tables ...string) (wait func() time.Duration) {
			cmd := exec.Command("iptables-"+string(v)+"-restore", "--noflush", "--wait")
			cmd.Stdin = strings.NewReader(othersRules(tables...))
			begin := time.Now()
			require.NoError(b, cmd.Start())
			return func() time.Duration {
				require.NoError(b, cmd.Wait())
				return time.Since(begin)
			}
		}
		for range 10 {
			note("ms-other-without-ours", other("mangle", "nat", "filter")())
		}
		s := newScattered(b, v)
		for b.Loop() {
			note("ms-other", other("mangle", "nat", "filter")())
			note("ms-other-nat", other("nat")())
			note("ms-change", s.change(1))
			wait := other("mangle", "nat", "filter")
			note("ms-change-beside", s.change(1))
			wait()
		}
		for what, all := range took {
			slices.Sort(all)
			b.ReportMetric(all[len(all)/2], what)
		}
	})
}

// othersRules is input for iptables-restore that rewrites a chain of another program.
func othersRules(tables ...string) string {
	var out strings.Builder
	for _, t := range tables {
		fmt.Fprintf(&out, "*%s\n:PODS - [0:0]\n", t)
		for i := range 30 {
			fmt.Fprintf(&out, "-A PODS -s 10.200.0.%d/32 -j RETURN\n", i)
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
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
