package main

import (
	"context"
	"log/slog"

	"nodeproxy/kernel/drift"
	"nodeproxy/metrics"
)

// driftReporter counts and logs what others have changed of what was written to the kernel, and sends the cluster an event about it.
type driftReporter struct {
	metrics *metrics.Set
	log     *slog.Logger
	// event sends the cluster an event; nil if there is none. Some may be dropped where there are too many.
	event func(text string)
	// left is what has been found, and not been repaired yet.
	left drift.Summary
}

// watcher is a backend that notices when others may have changed what it has written.
type watcher interface {
	Watch(ctx context.Context, suspect func(why string)) error
}

// watch lets everything be compared soon when something may have changed, until ctx ends.
func (d *driftReporter) watch(ctx context.Context, w watcher, suspect func(why string)) {
	if err := w.Watch(ctx, suspect); err != nil {
		d.log.Warn("what other programs change in the kernel is noticed only when everything is compared now and then", "error", err)
	}
}

// fewDifferences is how many differences a log line or an event names one by one.
const fewDifferences = 5

// compared must be called after each comparison; calls must not overlap. What a sync fails to repair is repaired by the next one, which
// does not compare, since it does not know what there was; the comparison after that shows that it was.
func (d *driftReporter) compared(r drift.Report) {
	found := r.Found.Summary(fewDifferences)
	d.metrics.DriftChecked(r.Took, found.Counts)
	d.left.Merge(found, fewDifferences)
	if r.Err != nil {
		if len(r.Found) > 0 {
			d.log.Warn("another program has changed what was written to the kernel; repairing it failed, and is tried again",
				"things", len(r.Found), "found", found.String())
		}
		return
	}
	d.repaired()
}

// repaired reports all that is left to report.
func (d *driftReporter) repaired() {
	if d.left.Total() == 0 {
		return
	}
	d.metrics.DriftRepaired(d.left.Counts)
	words := d.left.String()
	d.log.Warn("another program had changed what was written to the kernel; it has been repaired",
		"things", d.left.Total(), "found", words)
	if d.event != nil {
		d.event("repaired what another program had changed: " + words)
	}
	d.left = drift.Summary{}
}
