package main

import (
	"context"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"

	"nodeproxy/node/memory"
)

// startGrowth is by how many percent the heap grows, once all objects have been read, before garbage is collected, and restGrowth once they are
// programmed, unless the environment variable GOGC says otherwise. Go's own 100 is for programs that make much garbage, as reading objects does,
// while there is little else. Behind that it takes hundreds of changes to make as much as there is of objects, so that more frequent collections
// cost next to nothing, and a third of the memory is left to others. After the start, most collections begin at half of that
// (memory.CollectBetween): the other half is room for what 100 changes at once, or a comparison, leave behind.
const startGrowth, restGrowth = 40, 20

// limitMemory has garbage collected more often where this process comes near the limit of its container, unless the environment variable
// GOMEMLIMIT says when. A quarter of the limit is left to what is not on the heap: the pages of the program, and what the kernel keeps for
// it. Where that is too little for what there is, garbage is collected all the time while it is made, but never for more than half of the
// processor time: that is slow, where the kernel would end the process otherwise.
func limitMemory() {
	if limit, limited := memory.Limit(); limited && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(limit - limit/4)
	}
}

// profileMemory has the Go runtime note where memory is allocated, for /debug/pprof/heap, only if that is served: the notes take more than a
// megabyte.
func profileMemory(served bool) {
	switch {
	case !served:
		runtime.MemProfileRate = 0
	case runtime.MemProfileRate == 0: // It was not served by an earlier configuration.
		runtime.MemProfileRate = 512 << 10
	}
}

// saveMemory gives back what has been taken to initialize the program, to read objects and, when all of them are programmed, to start.
func (d *daemon) saveMemory(ctx context.Context) {
	releaseProgram(d.log)
	for _, part := range []struct {
		over   <-chan struct{}
		growth int
	}{{d.read.Synced(), startGrowth}, {d.monitor.complete, restGrowth}} {
		select {
		case <-ctx.Done():
			return
		case <-part.over:
		}
		if growthUnset() {
			debug.SetGCPercent(part.growth)
		}
		releaseProgram(d.log)
	}
	debug.FreeOSMemory()
}

// saveMemoryAgain gives back memory that changes or a verification took and that is no longer needed.
func (d *daemon) saveMemoryAgain() {
	if d.machine.real() {
		releaseProgram(d.log)
		debug.FreeOSMemory()
	}
}

// growthUnset reports whether it is left to this program when garbage is collected.
func growthUnset() bool { return os.Getenv("GOGC") == "" }

func releaseProgram(log *slog.Logger) {
	if err := memory.ReleaseProgram(); err != nil {
		log.Debug("pages of the program that only its start needs stay in memory", "error", err)
	}
}
