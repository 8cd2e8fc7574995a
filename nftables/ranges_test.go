package nftables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// withRanges is a Service with a load balancer IP that n addresses may reach, of which no two are neighbours, and an endpoint.
func withRanges(n, endpoint int) *plan.ServicePort {
	sp := plantest.LargeService(7, endpoint, 1)
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.LoadBalancerIP, Addr: netip.MustParseAddr("203.0.113.1"), Protocol: plan.TCP, Port: 80})
	for i := range n {
		a := netip.AddrFrom4([4]byte{172, 16 + byte(i>>15), byte(i >> 7), byte(i<<1) | 1})
		sp.SourceRanges = append(sp.SourceRanges, netip.PrefixFrom(a, 32))
	}
	return sp
}

// changeOf writes a ServicePort.
func changeOf(t testing.TB, e *engine, p *plan.Plan, sp *plan.ServicePort) {
	t.Helper()
	p.Set(sp)
	synced(t, e, p, plan.Only(plan.Keys{sp.Key: {}}))
}

// TestRangesStay: a change of endpoints costs as much with many source ranges as with few.
func TestRangesStay(t *testing.T) {
	nstest.Enter(t)
	allocs := map[int]float64{}
	for _, n := range []int{10, 3000} {
		_ = Cleanup()
		e, _ := testEngine(t, plan.IPv4)
		p := plantest.Large(0, 0)
		p.Set(withRanges(n, 0))
		synced(t, e, p, plan.Everything())
		some := []*plan.ServicePort{withRanges(n, 1), withRanges(n, 2)}
		i := 0
		allocs[n] = testing.AllocsPerRun(10, func() {
			changeOf(t, e, p, some[i%2])
			i++
		})
		holds(t, e, p)
	}
	if allocs[3000] > allocs[10]+1000 {
		t.Errorf("allocations of a change of endpoints by the number of source ranges: %v", allocs)
	}
}

// TestRangesOfRefused: a ServicePort whose other endpoints the kernel refuses keeps its source ranges.
func TestRangesOfRefused(t *testing.T) {
	nstest.Enter(t)
	e, s, reported := faultyEngine(t, plan.IPv4)
	p := plantest.Large(3, 1)
	before := withRanges(5, 100)
	p.Set(before)
	synced(t, e, p, plan.Everything())
	in := plan.New(p.Node, p.Settings)
	for _, sp := range p.Services {
		in.Set(sp)
	}
	s.refuse(unix.EINVAL, func(_, key string) bool { return strings.HasPrefix(key, nameOf(plan.IPv4, before.Frontends[1])) })
	changeOf(t, e, p, withRanges(5, 101))
	if list := reported(); len(list) != 1 || !list[0].Kept {
		t.Fatalf("reported %v", list)
	}
	holdsBut(t, e, in)
	comparisonFindsNothing(t, e)
	holdsBut(t, e, in)
	s.refuses = nil
	again(e)
	changeOf(t, e, p, withRanges(4, 102))
	holds(t, e, p)
}

// TestRangesRefusedInParts: where the kernel refuses one of many source ranges, those written before it are removed if the Service is new,
// and otherwise kept with all that it had; comparisons find nothing.
func TestRangesRefusedInParts(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	for _, full := range []bool{false, true} {
		_ = Cleanup()
		e, s, reported := faultyEngine(t, plan.IPv4)
		e.most = 1 // a range in each transaction
		p := plantest.Large(3, 1)
		synced(t, e, p, plan.Everything())
		fifth := withRanges(5, 100)
		last := ranged(nameOf(plan.IPv4, fifth.Frontends[1]), fifth.SourceRanges[4])
		no := func(set, key string) syscall.Errno {
			if set == names.NFTSourceRanges && key == last {
				return unix.EINVAL
			}
			return 0
		}
		sync := func(sp *plan.ServicePort, refuses func(set, key string) syscall.Errno) {
			t.Helper()
			s.refuses = refuses
			p.Set(sp)
			changed := plan.Only(plan.Keys{sp.Key: {}})
			if full {
				changed = plan.Everything()
			}
			if err := e.Sync(ctx, p, changed); err != nil || refuses != nil != (len(reported()) == 1) {
				t.Fatalf("full sync %t: %v; reported %v", full, err, reported())
			}
			comparisonFindsNothing(t, e)
		}
		in := plan.New(p.Node, p.Settings)
		for _, sp := range p.Services {
			in.Set(sp)
		}
		more := withRanges(5, 100)
		sync(more, no)
		holdsBut(t, e, in, more)
		again(e)
		sync(withRanges(3, 100), nil)
		holds(t, e, p)
		in.Set(withRanges(4, 100)) // The fourth is written before the fifth is refused.
		sync(more, no)
		holdsBut(t, e, in)
		again(e)
		sync(withRanges(4, 101), nil)
		holds(t, e, p)
	}
}

// TestRangesRefusedBehind: where the kernel takes the source ranges that are written before the rest of a Service, and refuses that rest,
// they are removed if the Service is new, and otherwise kept with all that it had; they are in the way of no others, and comparisons find
// nothing.
func TestRangesRefusedBehind(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	for _, full := range []bool{false, true} {
		_ = Cleanup()
		e, s, reported := faultyEngine(t, plan.IPv4)
		e.most = 1 // a range in each transaction
		p := plantest.Large(3, 1)
		synced(t, e, p, plan.Everything())
		sync := func(sp *plan.ServicePort, refused bool) {
			t.Helper()
			s.refuse(unix.EINVAL, func(set, key string) bool {
				return refused && set == names.NFTEndpoints && strings.HasPrefix(key, nameOf(plan.IPv4, sp.Frontends[1]))
			})
			p.Set(sp)
			changed := plan.Only(plan.Keys{sp.Key: {}})
			if full {
				changed = plan.Everything()
			}
			if err := e.Sync(ctx, p, changed); err != nil || refused != (len(reported()) == 1) {
				t.Fatalf("full sync %t: %v; reported %v", full, err, reported())
			}
			comparisonFindsNothing(t, e)
		}
		in := plan.New(p.Node, p.Settings)
		for _, sp := range p.Services {
			in.Set(sp)
		}
		sync(withRanges(5, 100), true)
		holdsBut(t, e, in, withRanges(5, 100))
		wide := withRanges(0, 100) // overlaps all of them
		wide.SourceRanges = []netip.Prefix{netip.MustParsePrefix("172.16.0.0/24")}
		again(e)
		sync(wide, false)
		holds(t, e, p)
		sync(withRanges(3, 100), false)
		in.Set(withRanges(5, 100))
		sync(withRanges(5, 101), true)
		holdsBut(t, e, in)
		again(e)
		sync(wide, false)
		holds(t, e, p)
	}
}

// TestRangeSteps: the parts of a range have lengths that rules look for, do not overlap, and are together the range.
func TestRangeSteps(t *testing.T) {
	for _, f := range plan.Families {
		for bits := 1; bits <= f.Bits(); bits++ {
			for _, fill := range []byte{0, 0xff, 0xa5} {
				raw := bytes.Repeat([]byte{fill}, f.Bits()/8)
				a, _ := netip.AddrFromSlice(raw)
				r := netip.PrefixFrom(a, bits).Masked()
				var parts []netip.Prefix
				for p := range stepsOf(r) {
					if p != p.Masked() || p.Bits()%rangeStep(f) != 0 {
						t.Errorf("a part of %s is %s", r, p)
					}
					parts = append(parts, p)
				}
				slices.SortFunc(parts, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
				if n := 1 << (parts[0].Bits() - bits); len(parts) != n || n > 8 || len(slices.Compact(slices.Clone(parts))) != n {
					t.Errorf("the parts of %s are %s", r, parts)
				}
				if whole := plan.Canonical(parts); !slices.Equal(whole, []netip.Prefix{r}) {
					t.Errorf("the parts of %s are together %s", r, whole)
				}
			}
		}
	}
}

// TestRangesInParts: source ranges that take several transactions never keep out a client that they admit both before and after, nor let
// in one that they admit neither before nor after, also where another Service gets the frontend. Nor does a packet that meets a transaction between
// two lookups find less, unless another Service gets it.
func TestRangesInParts(t *testing.T) {
	nstest.Enter(t)
	space := netip.MustParsePrefix("198.51.100.0/27")
	var clients []netip.Addr
	for a := space.Addr(); space.Contains(a); a = a.Next() {
		clients = append(clients, a)
	}
	reader, err := nft.Dial()
	require.NoError(t, err)
	defer reader.Close()
	rapid.Check(t, func(rt *rapid.T) {
		_ = Cleanup()
		e, _ := testEngine(t, plan.IPv4)
		e.most = rapid.SampledFrom([]int{1, 3, 1000}).Draw(rt, "most in a transaction")
		draw := func(label string) *plan.ServicePort {
			sp := withRanges(0, 1)
			sp.Key.Service.Name = rapid.SampledFrom([]string{"a", "b"}).Draw(rt, label+": owner")
			sp.SourceRanges = plan.Canonical(rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) netip.Prefix {
				return netip.PrefixFrom(clients[rapid.IntRange(0, len(clients)-1).Draw(rt, "address")], rapid.IntRange(27, 32).Draw(rt, "bits")).Masked()
			}), 0, 12).Draw(rt, label+": ranges"))
			return sp
		}
		admits := func(sp *plan.ServicePort, a netip.Addr) bool {
			return len(sp.SourceRanges) == 0 || plan.Within(sp.SourceRanges, a)
		}
		before, after := draw("before"), draw("after")
		p := plantest.Large(2, 1)
		p.Set(before)
		synced(rt, e, p, plan.Everything())
		frontend := nameOf(plan.IPv4, before.Frontends[1])
		// lets reports whether a client gets in whose packet makes its first n lookups in one state, and all others in the next one.
		lets := func(a netip.Addr, first, then map[id]value, n int) bool {
			lookup := func(i id) bool {
				in := first
				if n--; n < 0 {
					in = then
				}
				_, is := in[i]
				return is
			}
			in := !lookup(id{set: limited, key: frontend})
			for bits := 32; bits > 0 && !in; bits-- {
				in = lookup(id{set: sourceRanges, key: ranged(frontend, netip.PrefixFrom(a, bits).Masked())})
			}
			return in
		}
		begun, err := listing(e, reader)
		if err != nil {
			rt.Fatalf("%v", err)
		}
		was := begun.have
		var wrong error
		look := func() { // by a socket of its own, which a transaction's goroutine can use as well
			s, err := listing(e, reader)
			if err != nil {
				wrong = errors.Join(wrong, err)
				return
			}
			owner := s.have[id{set: services, key: frontend}].comment
			var of []*plan.ServicePort
			for _, sp := range []*plan.ServicePort{before, after} {
				if sp.Key.PortName() == owner {
					of = append(of, sp)
				}
			}
			if len(of) == 0 {
				wrong = errors.Join(wrong, fmt.Errorf("the frontend is %q's", owner))
				return
			}
			for _, a := range clients {
				for n := range 33 {
					if owner == was[id{set: services, key: frontend}].comment && lets(a, was, was, 0) && lets(a, s.have, s.have, 0) && !lets(a, was, s.have, n) {
						wrong = errors.Join(wrong, fmt.Errorf("%s meets a transaction after %d lookups, and is kept out", a, n))
					}
				}
				in := lets(a, s.have, s.have, 0)
				if first, last := admits(of[0], a), admits(of[len(of)-1], a); first == last && in != first {
					wrong = errors.Join(wrong, fmt.Errorf("%s is let in to %s: %t; its ranges are %s, then %s",
						a, owner, in, of[0].SourceRanges, of[len(of)-1].SourceRanges))
				}
			}
			was = s.have
		}
		p.Delete(before.Key)
		p.Set(after)
		e.kernel = &watched{e.kernel, look}
		synced(rt, e, p, plan.Only(plan.Keys{before.Key: {}, after.Key: {}}))
		if wrong != nil {
			rt.Fatalf("%v", wrong)
		}
		holds(rt, e, p)
		_ = e.kernel.Close()
		e.kernel = nil
	})
}

// allTime is the processor time of all threads.
func allTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// slowest is a kernel that notes how much processor time the longest transaction took.
type slowest struct {
	kernel
	b       *testing.B
	longest time.Duration
}

func (s *slowest) Commit(b *nft.Batch) error {
	begin := allTime(s.b)
	defer func() { s.longest = max(s.longest, allTime(s.b)-begin) }()
	return s.kernel.Commit(b)
}

// BenchmarkRanges is the processor time for a Service with many source ranges, and of the longest transaction of each step: the first
// programming, another endpoint, a range less and more, and the removal.
func BenchmarkRanges(b *testing.B) {
	for _, n := range []int{5000, 10_000, 20_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			nstest.Enter(b)
			names := []string{"first", "flap", "range", "removal"}
			took, longest := make([]time.Duration, len(names)), make([]time.Duration, len(names))
			for b.Loop() {
				_ = Cleanup()
				e, k := testEngine(b, plan.IPv4)
				p := plantest.Large(3, 1)
				synced(b, e, p, plan.Everything())
				slow := &slowest{kernel: k.kernel, b: b}
				k.kernel = slow
				step := func(i int, list ...*plan.ServicePort) {
					slow.longest = 0
					begin := allTime(b)
					for _, sp := range list {
						changeOf(b, e, p, sp)
					}
					took[i] += allTime(b) - begin
					longest[i] = max(longest[i], slow.longest)
				}
				step(0, withRanges(n, 0))
				step(1, withRanges(n, 1))
				step(2, withRanges(n-1, 1), withRanges(n, 1))
				none := withRanges(0, 1)
				none.Frontends = none.Frontends[:1]
				step(3, none)
				_ = e.kernel.Close()
				e.kernel = nil
			}
			for i, name := range names {
				b.ReportMetric(took[i].Seconds()*1000/float64(b.N), name+"-ms")
				b.ReportMetric(longest[i].Seconds()*1000, name+"-longest-ms")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
