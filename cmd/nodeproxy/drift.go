package main

import (
	"context"
	"log/slog"

	"nodeproxy/kernel/drift"
	"nodeproxy/metrics"
)

// driftReporter counts, logs and tells the cluster what others have changed of what was written to the kernel.
type driftReporter struct {
	metrics *metrics.Set
	log     *slog.Logger
	// tell tells the cluster; nil if there is none. Calls of it may be dropped where there are too many.
	tell func(text string)
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

// compared is told of each comparison; calls must not overlap. What a sync fails to repair is repaired by the next one, which
// does not compare, since it does not know what there was; the comparison after that tells that it was.
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

// repaired tells of all that is left to tell.
func (d *driftReporter) repaired() {
	if d.left.Total() == 0 {
		return
	}
	d.metrics.DriftRepaired(d.left.Counts)
	words := d.left.String()
	d.log.Warn("another program had changed what was written to the kernel; it has been repaired",
		"things", d.left.Total(), "found", words)
	if d.tell != nil {
		d.tell("repaired what another program had changed: " + words)
	}
	d.left = drift.Summary{}
}
