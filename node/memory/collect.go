package memory

import (
	"context"
	"runtime"
	"runtime/metrics"
	"time"
)

// pause is how long nothing must have been done before garbage is collected: longer than between two parts of the same work, and much
// shorter than between changes that come steadily.
const pause = 10 * time.Millisecond

// CollectBetween collects garbage soon after each value in worked, when nothing more follows at once, if more has been allocated than a
// half of what may be until it is collected anyway. It returns when ctx ends.
//
// A collection begins with an allocation, unless it is asked for. So it would always begin while something is done that somebody waits
// for, and take both of two processors from that: from this program as from those that it waits for.
func CollectBetween(ctx context.Context, worked <-chan struct{}) {
	collectBetween(ctx, worked, func() bool { return readHeap().worthwhile(2) }, runtime.GC)
}

// MakeRoom collects garbage, if more than a quarter has been allocated of what may be until it is collected anyway. It is to be called before
// something that allocates that much itself: a collection in the middle of that would find in use what is garbage right afterwards, and set the
// next goal higher by a part of that.
func MakeRoom() {
	if readHeap().worthwhile(4) {
		runtime.GC()
	}
}

// heap has numbers of bytes: live were in use after the last collection, now are with the garbage since then, and at goal it is collected.
type heap struct{ live, goal, now uint64 }

func readHeap() heap {
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/goal:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return heap{s[0].Value.Uint64(), s[1].Value.Uint64(), s[2].Value.Uint64()}
}

// leastGrowth is by which part the heap must be allowed to grow for a collection to be worthwhile before that.
const leastGrowth = 8

// worthwhile reports whether the garbage is more than 1/parts of the room. Where a limit of memory leaves next to no room, each
// change would lead to a collection; there are enough then that begin by themselves, and these never take more than half of the processor
// time.
func (h heap) worthwhile(parts uint64) bool {
	return h.goal > h.live+h.live/leastGrowth && h.now > h.live && parts*(h.now-h.live) > h.goal-h.live
}

func collectBetween(ctx context.Context, worked <-chan struct{}, due func() bool, collect func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-worked:
		}
		if !due() { // A timer for each change would cost more than the look.
			continue
		}
		for quiet := false; !quiet; {
			select {
			case <-ctx.Done():
				return
			case <-worked:
			case <-time.After(pause):
				quiet = true
			}
		}
		collect()
	}
}
