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
	collectBetween(ctx, worked, func() bool {
		const live, goal, now = 0, 1, 2
		samples := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/goal:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}}
		metrics.Read(samples)
		return worthwhile(samples[live].Value.Uint64(), samples[goal].Value.Uint64(), samples[now].Value.Uint64())
	}, runtime.GC)
}

// leastGrowth is by which part the heap must be allowed to grow for a collection to be worthwhile before that.
const leastGrowth = 8

// worthwhile reports whether a heap of now bytes is to be collected, of which live were in use after the last collection, and which is
// collected anyway when it has goal bytes. Where a limit of memory leaves it next to no room, each change would lead to a collection; there
// are enough then that begin by themselves, and these never take more than half of the processor time.
func worthwhile(live, goal, now uint64) bool {
	return goal > live+live/leastGrowth && 2*now > live+goal
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
