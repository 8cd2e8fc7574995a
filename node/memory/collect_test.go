package memory

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestCollectBetween: garbage is collected after the last of what follows at once, and not before or without that.
func TestCollectBetween(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		worked := make(chan struct{}, 1)
		var due atomic.Bool
		var looked, collected atomic.Int32
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			collectBetween(ctx, worked, func() bool { looked.Add(1); return due.Load() }, func() { collected.Add(1) })
		}()
		after := func(d time.Duration, wantLooked, wantCollected int32) {
			t.Helper()
			time.Sleep(d) // by the clock of the bubble
			synctest.Wait()
			if l, c := looked.Load(), collected.Load(); l != wantLooked || c != wantCollected {
				t.Fatalf("looked %d times, want %d; collected %d times, want %d", l, wantLooked, c, wantCollected)
			}
		}
		after(time.Hour, 0, 0)
		worked <- struct{}{}
		after(pause, 1, 0)
		due.Store(true)
		after(time.Hour, 1, 0)
		for range 5 {
			worked <- struct{}{}
			after(pause/2, 2, 0)
		}
		after(pause, 2, 1)
		worked <- struct{}{}
		after(pause/2, 3, 1)
		cancel()
		<-ended
		after(time.Hour, 3, 1)
	})
}

// TestWorthwhile: half of the room must be used up, and there must be some.
func TestWorthwhile(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		live, goal, now uint64
		want            bool
	}{
		{100, 150, 125, false},
		{100, 150, 126, true},
		{100, 150, 170, true},
		{100, 120, 112, true},
		{100, 100, 101, false}, // The limit of memory is below what is in use.
		{100, 105, 104, false},
		{0, 4, 3, true},
	} {
		if got := worthwhile(test.live, test.goal, test.now); got != test.want {
			t.Errorf("%d of %d, %d live: %t", test.now, test.goal, test.live, got)
		}
	}
}
