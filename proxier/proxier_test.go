package proxier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// recorder is a Backend that notes when it was called, and for what.
type recorder struct {
	start time.Time
	calls []string
	takes time.Duration
	fail  int // how many calls are still to fail
	// untilCancelled makes a call last until its context ends.
	untilCancelled bool
	unfinished     int // how many of the next calls leave something to do
}

func (r *recorder) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	what := "all"
	if !change.All() {
		what = fmt.Sprint(len(change.Keys()))
	}
	r.calls = append(r.calls, fmt.Sprintf("%v: %s of %d", time.Since(r.start), what, len(p.Services)))
	time.Sleep(r.takes) // simulated time
	if r.untilCancelled {
		<-ctx.Done()
		return ctx.Err()
	}
	if r.fail > 0 {
		r.fail--
		return errors.New("the kernel is busy")
	}
	r.unfinished--
	return nil
}

// start runs a Proxier until stop is called.
func start(t *testing.T, cfg Config) (p *Proxier, stop func()) {
	cfg.NodeName = "me"
	if cfg.Families == nil {
		cfg.Families = plan.Families[:]
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p = New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		p.Run(ctx)
		close(ended)
	}()
	return p, func() { cancel(); <-ended }
}

// runWith starts a Proxier over r, lets a test do what it does, and returns the calls.
func runWith(t *testing.T, r *recorder, cfg Config, do func(p *Proxier)) []string {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r.start, cfg.Backend, cfg.Unfinished = time.Now(), r, func() bool { return r.unfinished > 0 }
		p, stop := start(t, cfg)
		do(p)
		synctest.Wait()
		stop()
	})
	return r.calls
}

func run(t *testing.T, r *recorder, minSyncPeriod time.Duration, do func(p *Proxier)) []string {
	t.Helper()
	return runWith(t, r, Config{MinSyncPeriod: minSyncPeriod}, do)
}

// ofService is a batch with a Service.
func ofService(svc *v1.Service) source.Batch {
	return source.Batch{Services: map[types.NamespacedName]*v1.Service{{Namespace: svc.Namespace, Name: svc.Name}: svc}}
}

// noService is a batch by which ns/NAME goes.
func noService(name string) source.Batch {
	return source.Batch{Services: map[types.NamespacedName]*v1.Service{{Namespace: "ns", Name: name}: nil}}
}

// ofSlice is a batch with an EndpointSlice.
func ofSlice(es *discovery.EndpointSlice) source.Batch {
	return source.Batch{EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{{Namespace: es.Namespace, Name: es.Name}: es}}
}

// batch sets a Service to a port.
func batch(name string, port int32, synced bool) source.Batch {
	b := ofService(named(name, fmt.Sprintf("10.96.0.%d", name[0]), ports(v1.ServicePort{Port: port})))
	b.Synced = synced
	return b
}

func expect(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
}

func TestNothingIsWrittenBeforeEverythingIsKnown(t *testing.T) {
	calls := run(t, &recorder{}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, false))
		time.Sleep(time.Minute)
		p.Apply(batch("b", 80, true))
		time.Sleep(time.Minute)
		p.Apply(batch("b", 81, false))
		time.Sleep(time.Minute)
		p.Apply(batch("b", 81, false)) // says nothing new
	})
	expect(t, calls, "1m0s: all of 2", "2m0s: 1 of 2")
}

func TestChangesDuringASyncGoTogether(t *testing.T) {
	calls := run(t, &recorder{takes: time.Second}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(100 * time.Millisecond)
		for i := range int32(5) {
			p.Apply(batch("b", 80+i, false))
			p.Apply(batch("c", 80+i, false))
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(5 * time.Second)
	})
	expect(t, calls, "0s: all of 1", "1s: 2 of 3")
}

// TestChangesGather: of changes that come close behind each other, none waits for a sync of the first one alone; but where they go on coming,
// the first ones do not wait for the last.
func TestChangesGather(t *testing.T) {
	t.Parallel()
	calls := run(t, &recorder{takes: 320 * time.Millisecond}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		for i := range 4 {
			time.Sleep(time.Second)
			for j := range []int{1, 1, 10, 100}[i] {
				p.Apply(services(100*i+j, 1, 80))
				time.Sleep(3 * time.Millisecond)
			}
		}
		time.Sleep(time.Second)
	})
	expect(t, calls, "0s: all of 1", "1s: 1 of 2", "2.003s: 1 of 3", "3.046s: 10 of 13", "4.196s: 54 of 67", "4.516s: 46 of 113")
}

// TestGatheringEnds: where syncs have taken long, as for another program that held the lock, changes still do not wait for others longer than
// half a second.
func TestGatheringEnds(t *testing.T) {
	t.Parallel()
	r := &recorder{takes: 30 * time.Second}
	calls := run(t, r, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(time.Minute)
		for i := range 2 {
			p.Apply(batch("b", int32(80+i), false))
			time.Sleep(time.Minute)
		}
		synctest.Wait()
		r.calls, r.start, r.takes = nil, time.Now(), time.Millisecond
		for i := range 60 {
			p.Apply(batch("c", int32(80+i), false))
			time.Sleep(9 * time.Millisecond) // so that none comes just when the first sync begins
		}
		time.Sleep(400 * time.Millisecond)
		p.Apply(batch("d", 80, false))
		time.Sleep(time.Second)
	})
	expect(t, calls, "500ms: 1 of 3", "566.5ms: 1 of 3", "940ms: 1 of 4")
}

// TestChangesInARowRest: a burst of changes is programmed without rest; where they go on, syncs get four fifths of the time.
func TestChangesInARowRest(t *testing.T) {
	t.Parallel()
	const takes = 100 * time.Millisecond
	r := &recorder{takes: takes}
	calls := run(t, r, 0, func(p *Proxier) {
		p.Apply(batch("a", 1, true))
		time.Sleep(time.Second)
		for i := range int32(400) {
			p.Apply(batch("a", 10+i, false))
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Second)
	})
	var gaps []time.Duration
	for i := range calls[1:] {
		gaps = append(gaps, at(t, calls[i+1])-at(t, calls[i]))
	}
	for i, g := range gaps[1:] {
		switch {
		case i < 12 && g > takes+time.Millisecond:
			t.Errorf("sync %d of a burst began %v after the one before", i, g)
		case i > 24 && i < len(gaps)-3 && g < takes*5/4-time.Millisecond:
			t.Errorf("after many, sync %d began %v after the one before", i, g)
		case g > takes*2:
			t.Errorf("sync %d began %v after the one before", i, g)
		}
	}
	if len(gaps) < 25 {
		t.Errorf("there were %d syncs", len(gaps))
	}
}

// TestNoLongPauses: no change waits for a long pause, neither after many syncs that took more than their share of the time, though nothing
// waited then, nor after one that took far longer than others do, as where another program holds a lock.
func TestNoLongPauses(t *testing.T) {
	t.Parallel()
	const usual, often = 60 * time.Millisecond, 10 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		takes := usual
		var ended time.Time // the last sync
		var longest time.Duration
		p, stop := start(t, Config{Backend: backendFunc(func(context.Context, *plan.Plan, plan.Change) error {
			if !ended.IsZero() {
				longest = max(longest, time.Since(ended))
			}
			time.Sleep(takes)
			ended = time.Now()
			return nil
		})})
		changes := func(n int, every time.Duration) {
			for i := range n {
				p.Apply(batch("a", 10+int32(i), i == 0))
				time.Sleep(every)
				synctest.Wait()
			}
			if longest > usual/4+often {
				t.Errorf("the longest pause was %v", longest)
			}
		}
		changes(1200, usual+often/2)
		changes(200, often)
		takes = 2 * time.Second
		changes(10, often)
		takes = usual
		changes(500, often)
		stop()
	})
}

// at is when a call was made.
func at(t *testing.T, call string) time.Duration {
	t.Helper()
	text, _, _ := strings.Cut(call, ":")
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return d
}

// TestUnfinished: where the backend has not finished a change, syncs follow without a pause, and each takes what has arrived meanwhile. After an error,
// nothing is unfinished.
func TestUnfinished(t *testing.T) {
	r := &recorder{takes: 20 * time.Millisecond}
	calls := run(t, r, time.Second, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(5 * time.Second)
		synctest.Wait() // What was written before happened before what follows.
		r.unfinished = 4
		p.Apply(batch("b", 80, false))
		time.Sleep(30 * time.Millisecond)
		p.Apply(batch("c", 80, false))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		r.unfinished, r.fail = 3, 1
		p.Apply(batch("d", 80, false))
		time.Sleep(5 * time.Second)
	})
	expect(t, calls, "0s: all of 1", "5s: 1 of 2", "5.02s: 0 of 2", "5.04s: 1 of 3", "5.06s: 0 of 3",
		"10.030625s: 1 of 4", "10.250625s: all of 4", "10.270625s: 0 of 4", "10.290625s: 0 of 4") // others might have come close behind "d"
}

func TestAfterAFailureNothingIsAssumed(t *testing.T) {
	calls := run(t, &recorder{fail: 3}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(300 * time.Millisecond) // the second try has failed too
		p.Apply(batch("b", 80, false))     // does not wait as long as the third would
		time.Sleep(time.Minute)
		p.Apply(batch("b", 81, false))
	})
	expect(t, calls, "0s: all of 1", "200ms: all of 1", "400ms: all of 2", "1.2s: all of 2", "1m0.3s: 1 of 2")
}

// TestChangesWhileSyncsFail: what stands in the way of one Service, for however long, does not hold up others; nor do changes
// without end make for tries without end.
func TestChangesWhileSyncsFail(t *testing.T) {
	const takes, changes = 100 * time.Millisecond, 100
	calls := run(t, &recorder{fail: 1000, takes: takes}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(10 * time.Minute)
		for i := range int32(changes) {
			p.Apply(batch("b", 80+i, false))
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(time.Second)
	})
	first, end := 10*time.Minute, 10*time.Minute+changes*50*time.Millisecond
	n, last := 0, time.Duration(0)
	for _, c := range calls {
		if when := at(t, c); when >= first {
			if n++; n == 1 && when > first+retryShare*takes {
				t.Errorf("the first change was tried %v after it had come", when-first)
			}
			last = when
		}
	}
	if most := int((end-first)/(retryShare*takes)) + 2; n > most || last < end-takes {
		t.Errorf("%d tries within %v, the last one %v before the end of the changes", n, end-first, end-last)
	}
}

func TestMinSyncPeriod(t *testing.T) {
	calls := run(t, &recorder{}, time.Second, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		for i := range int32(15) {
			time.Sleep(100 * time.Millisecond)
			p.Apply(batch("a", 81+i, false))
		}
		time.Sleep(time.Minute)
	})
	expect(t, calls, "0s: all of 1", "1s: 1 of 1", "2s: 1 of 1")
}

// TestFailuresBackOff: the wait doubles, up to half a minute where a try takes long, and begins anew after a success.
func TestFailuresBackOff(t *testing.T) {
	for takes, most := range map[time.Duration]time.Duration{
		0: 2 * time.Second, 200 * time.Millisecond: 5 * time.Second, 2 * time.Second: 30 * time.Second,
	} {
		calls := run(t, &recorder{fail: 11, takes: takes}, 0, func(p *Proxier) {
			p.Apply(batch("a", 80, true))
			time.Sleep(10 * time.Minute)
		})
		want := 200 * time.Millisecond
		for i := 1; i < len(calls); i++ {
			if got := at(t, calls[i]) - at(t, calls[i-1]) - takes; got != want {
				t.Errorf("tries that take %s: wait %d is %s, want %s", takes, i, got, want)
			}
			want = min(2*want, most)
		}
		if len(calls) != 12 {
			t.Errorf("tries that take %s: %d calls, want 11 that fail and one that does not", takes, len(calls))
		}
	}

	again := run(t, &recorder{fail: 2}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(time.Minute)
		synctest.Wait()
		p.cfg.Backend.(*recorder).fail = 1
		p.Apply(batch("a", 81, false))
		time.Sleep(time.Minute)
	})
	expect(t, again, "0s: all of 1", "200ms: all of 1", "600ms: all of 1", "1m0s: 1 of 1", "1m0.2s: all of 1")
}

// TestCancel: Run ends at once in whatever it waits for, and calls nothing any more.
func TestCancel(t *testing.T) {
	for name, tc := range map[string]struct {
		backend *recorder
		do      func(p *Proxier)
		calls   int
	}{
		"before anything is known": {&recorder{}, func(*Proxier) {}, 0},
		"before all is known":      {&recorder{}, func(p *Proxier) { p.Apply(batch("a", 80, false)) }, 0},
		"at rest":                  {&recorder{}, func(p *Proxier) { p.Apply(batch("a", 80, true)) }, 1},
		"while it waits to retry":  {&recorder{fail: 1}, func(p *Proxier) { p.Apply(batch("a", 80, true)) }, 1},
		"between two syncs": {&recorder{}, func(p *Proxier) {
			p.Apply(batch("a", 80, true))
			synctest.Wait()
			p.Apply(batch("a", 81, false))
		}, 1},
		"during a sync": {&recorder{untilCancelled: true}, func(p *Proxier) {
			p.Apply(batch("a", 80, true))
			synctest.Wait()
			p.Apply(batch("a", 81, false))
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var took time.Duration
			synctest.Test(t, func(t *testing.T) {
				p, stop := start(t, Config{Backend: tc.backend, MinSyncPeriod: time.Minute})
				tc.do(p)
				synctest.Wait()
				begin := time.Now()
				stop()
				took = time.Since(begin)
				p.Apply(batch("a", 82, false)) // must not block either
			})
			if took != 0 || len(tc.backend.calls) != tc.calls {
				t.Errorf("it took %s and called %q", took, tc.backend.calls)
			}
		})
	}
}

// TestPodCIDRsMissing: in mode NodeCIDR, rules are made anew when the Node gets pod CIDRs.
func TestPodCIDRsMissing(t *testing.T) {
	nodeCIDR := plan.Settings{DetectLocal: plan.DetectLocal{Mode: plan.DetectNodeCIDR}}
	calls := runWith(t, &recorder{}, Config{Settings: nodeCIDR}, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(time.Second)
		node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "me"}, Spec: v1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24"}}}
		p.Apply(source.Batch{Nodes: map[string]*v1.Node{"me": node}})
		time.Sleep(time.Second)
		p.Apply(source.Batch{Nodes: map[string]*v1.Node{"me": node.DeepCopy()}})
		time.Sleep(time.Second)
	})
	expect(t, calls, "0s: all of 1", "1s: all of 1")
}
