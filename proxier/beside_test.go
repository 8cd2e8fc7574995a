package proxier

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/plan"
)

// TestCompareBeside: no change waits for a comparison that runs beside syncs; one at a time runs, and a sync of everything follows only where
// it asks for that. What is suspected meanwhile is looked at afterwards.
func TestCompareBeside(t *testing.T) {
	t.Parallel()
	const takes, every = 5 * time.Second, 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		r := &recorder{start: time.Now(), takes: time.Millisecond}
		var running, begun, ended atomic.Int32
		var again atomic.Bool
		p, stop := start(t, Config{Backend: r, CompareEvery: every, Compare: func(ctx context.Context) bool {
			if begun.Add(1); running.Add(1) > 1 {
				t.Error("two comparisons at once")
			}
			defer running.Add(-1)
			select {
			case <-time.After(takes):
			case <-ctx.Done():
				time.Sleep(time.Second)
			}
			ended.Add(1)
			return again.Load()
		}})
		expect := func(what string, wantBegun, wantEnded int32, calls int, last string) {
			t.Helper()
			synctest.Wait()
			if begun.Load() != wantBegun || ended.Load() != wantEnded || len(r.calls) != calls || !strings.Contains(r.calls[calls-1], last) {
				t.Fatalf("%s: %d comparisons began, %d ended, syncs %q", what, begun.Load(), ended.Load(), r.calls)
			}
		}
		p.Apply(batch("a", 1, true))
		time.Sleep(time.Second)
		expect("at the start", 0, 0, 1, "all of")
		time.Sleep(every)
		expect("when it is due", 1, 0, 1, "all of")
		p.Apply(batch("b", 2, true))
		time.Sleep(10 * time.Millisecond)
		expect("a change during the comparison", 1, 0, 2, ": 1 of 2")
		p.Suspect("a test says so")
		time.Sleep(takes)
		expect("the end, where nothing differs", 2, 1, 2, ": 1 of 2")
		again.Store(true)
		time.Sleep(takes + time.Second)
		expect("what was suspected meanwhile", 2, 2, 3, "all of 2")
		again.Store(false)
		p.Suspect("a test says so")
		time.Sleep(2 * debounce)
		expect("the next one", 3, 2, 3, "all of 2")
		stop()
		if running.Load() != 0 {
			t.Error("a comparison goes on after the end")
		}
	})
}

// TestUnchanged: where nothing has changed, a comparison that is due is spared, but not one after a suspicion. How long the next one will take
// is known from those that were made.
func TestUnchanged(t *testing.T) {
	t.Parallel()
	const takes, period = time.Second, compareShare * time.Second
	synctest.Test(t, func(t *testing.T) {
		var unchanged atomic.Bool
		var compared, asked atomic.Int32
		p, stop := start(t, Config{Backend: &recorder{start: time.Now(), takes: takes}, CompareEvery: time.Second,
			Unchanged: func() bool {
				asked.Add(1)
				return unchanged.Load()
			},
			Compare: func(context.Context) bool {
				compared.Add(1)
				time.Sleep(takes)
				return false
			}})
		expect := func(what string, wantAsked, wantCompared int32) {
			t.Helper()
			synctest.Wait()
			if asked.Load() != wantAsked || compared.Load() != wantCompared {
				t.Fatalf("%s: asked %d times, compared %d times", what, asked.Load(), compared.Load())
			}
		}
		p.Apply(batch("a", 1, true))
		time.Sleep(period + takes + takes/2)
		expect("something has changed", 1, 1)
		unchanged.Store(true)
		p.Suspect("a test says so")
		time.Sleep(3 * takes)
		expect("a suspicion", 1, 2)
		time.Sleep(period)
		expect("nothing has changed", 2, 2)
		unchanged.Store(false)
		time.Sleep(period - 2*takes)
		expect("before the next one is due", 2, 2)
		time.Sleep(takes)
		expect("when it is due", 3, 3)
		stop()
	})
}

// TestCompareBesidePortions: what a comparison has found while a large change is programmed waits for the portion that is being written, and
// for no other.
func TestCompareBesidePortions(t *testing.T) {
	t.Parallel()
	for range 8 { // A choice among what is ready would be made at random.
		synctest.Test(t, func(t *testing.T) {
			var ended atomic.Bool
			var after []bool // of each sync that began after the comparison, whether it was one of everything
			p, stop := start(t, Config{Families: plan.Families[:1], MostAtOnce: 20,
				Compare: func(context.Context) bool {
					time.Sleep(500 * time.Millisecond)
					return !ended.Swap(true)
				},
				Backend: backendFunc(func(_ context.Context, _ *plan.Plan, change plan.Change) error {
					if ended.Load() {
						after = append(after, change.All())
					}
					time.Sleep(time.Second)
					return nil
				})})
			all := services(900, 1, 80)
			all.Synced = true
			p.Apply(all)
			time.Sleep(10 * time.Second)
			p.Apply(services(0, 100, 80))
			p.Suspect("a test says so")
			time.Sleep(20 * time.Second)
			stop()
			if !slices.Equal(after, []bool{true}) {
				t.Errorf("syncs after the comparison, of everything: %v", after)
			}
		})
	}
}
