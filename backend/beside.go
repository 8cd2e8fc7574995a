package backend

import (
	"context"
	"errors"
	"time"

	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// Compare compares everything that the engines have written with the kernel, and repairs what differs if it is not much. It may run beside
// Sync, which waits for it only while something is repaired. It reports whether a Sync of everything has to follow: to repair more than
// that, or because it is not known what the kernel should have.
//
// Families are compared one after the other. Both at once would end sooner only where both have many Services, and take a second
// processor from changes and from everything else on the node, for work that nobody waits for, and that is limited to a small part of
// the time anyway.
func (b *PerFamily[E]) Compare(ctx context.Context) (again bool) {
	begin := time.Now()
	var report drift.Report
	for _, e := range b.Engines {
		found, more, err := e.CompareBeside(ctx)
		if ctx.Err() != nil {
			return false
		}
		report.Found, again = append(report.Found, found...), again || more || err != nil
		report.Err = errors.Join(report.Err, err)
		if err != nil && b.Log != nil {
			b.Log.Debug("comparing beside syncs", "family", e.Family(), "error", err)
		}
	}
	if b.Shared != nil {
		report.Found = append(report.Found, b.Shared(plan.Everything())...)
	}
	report.Took = time.Since(begin)
	if len(report.Found) > 0 || !again { // Otherwise the Sync that follows reports.
		b.Report(report)
	}
	return again
}

// AllUnchanged reports whether nothing can have changed in the kernel since Compare has found everything as it should be, which unchanged
// says of each engine. That counts as another comparison. It must not be called during a Sync or Compare.
func (b *PerFamily[E]) AllUnchanged(unchanged func(E) bool) bool {
	begin := time.Now()
	for _, e := range b.Engines {
		if !unchanged(e) {
			return false
		}
	}
	b.Report(drift.Report{Took: time.Since(begin)})
	return true
}

// Report calls Compared, but not twice at once: Sync and Compare may end at the same time.
func (b *PerFamily[E]) Report(r drift.Report) {
	b.reporting.Lock()
	defer b.reporting.Unlock()
	if b.Compared != nil {
		b.Compared(r)
	}
}
