package backend

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"nodeproxy/kernel/drift"
)

// BesideComparer is an Engine that can compare everything with the kernel, and repair what differs, beside a Sync. again says that a Sync
// of everything has to follow.
type BesideComparer interface {
	Engine
	CompareBeside(ctx context.Context) (found drift.Found, again bool, err error)
}

// CompareBeside compares everything that engines have written with the kernel, one engine after the other: nobody waits for it. It reports
// whether a Sync of everything has to follow, to repair what was not repaired, or because nothing is known. compared, if not nil, is called
// with what was found, unless it is left to that Sync to report it.
func CompareBeside[E BesideComparer](ctx context.Context, engines []E, compared func(drift.Report), log *slog.Logger) (again bool) {
	begin := time.Now()
	var report drift.Report
	for _, e := range engines {
		found, more, err := e.CompareBeside(ctx)
		if ctx.Err() != nil {
			return false
		}
		report.Found, again = append(report.Found, found...), again || more || err != nil
		if err != nil {
			log.Debug("comparing beside syncs", "family", e.Family(), "error", err)
			report.Err = err
		}
	}
	report.Took = time.Since(begin)
	if compared != nil && (len(report.Found) > 0 || !again) {
		compared(report)
	}
	return again
}

// OneByOne returns a function that calls compared, but not twice at once.
func OneByOne(compared func(drift.Report)) func(drift.Report) {
	if compared == nil {
		return nil
	}
	var mu sync.Mutex
	return func(r drift.Report) {
		mu.Lock()
		defer mu.Unlock()
		compared(r)
	}
}
