package memory

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
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

// TestWorthwhile: half of the room must be used up, or a quarter, and there must be some.
func TestWorthwhile(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		heap
		half, quarter bool
	}{
		{heap{100, 150, 112}, false, false},
		{heap{100, 150, 113}, false, true},
		{heap{100, 150, 125}, false, true},
		{heap{100, 150, 126}, true, true},
		{heap{100, 150, 170}, true, true},
		{heap{100, 120, 112}, true, true},
		{heap{100, 150, 90}, false, false},
		{heap{100, 100, 101}, false, false}, // The limit of memory is below what is in use.
		{heap{100, 105, 104}, false, false},
		{heap{0, 4, 3}, true, true},
	} {
		if half, quarter := test.worthwhile(2), test.worthwhile(4); half != test.half || quarter != test.quarter {
			t.Errorf("%+v: %t and %t", test.heap, half, quarter)
		}
	}
}

// TestMakeRoom: what has been allocated since the last collection is collected, unless it is little.
func TestMakeRoom(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	collections := func() uint64 {
		s := []metrics.Sample{{Name: "/gc/cycles/forced:gc-cycles"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	kept := make([]byte, 64<<20)
	runtime.GC()
	was := collections()
	MakeRoom()
	if now := collections(); now != was {
		t.Errorf("%d collections right after one", now-was)
	}
	_ = append([]byte(nil), kept[:40<<20]...)
	MakeRoom()
	if now := collections(); now != was+1 {
		t.Errorf("%d collections with garbage, want 1", now-was)
	}
	runtime.KeepAlive(kept)
}
