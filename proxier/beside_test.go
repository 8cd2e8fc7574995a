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

// TestUnchanged: a comparison that had nothing to read leaves those that have as rare as they are.
func TestUnchanged(t *testing.T) {
	t.Parallel()
	const takes, every, unread = 5 * time.Second, 30 * time.Second, 5
	synctest.Test(t, func(t *testing.T) {
		var pauses []time.Duration // before each comparison
		ended, unchanged := time.Now(), false
		p, stop := start(t, Config{Backend: &recorder{start: time.Now()}, CompareEvery: every,
			Compare: func(context.Context) bool {
				pauses = append(pauses, time.Since(ended))
				if unchanged = len(pauses)%unread == 0; !unchanged {
					time.Sleep(takes)
				}
				ended = time.Now()
				return false
			},
			Unchanged: func() bool { return unchanged }})
		p.Apply(batch("a", 1, true))
		time.Sleep(10 * compareShare * takes)
		stop()
		if len(pauses) < 2*unread {
			t.Fatalf("%d comparisons", len(pauses))
		}
		for n, pause := range pauses[3:] { // The first ones are as rare as the first sync was long.
			if pause != compareShare*takes {
				t.Errorf("a pause of %v before comparison %d, want %v", pause, n+4, compareShare*takes)
			}
		}
	})
}
