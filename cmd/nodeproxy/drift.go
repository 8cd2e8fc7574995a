package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"nodeproxy/inspect"
	"nodeproxy/kernel/drift"
	"nodeproxy/metrics"
)

// driftReporter counts and logs what others have changed of what was written to the kernel, and sends the cluster an event about it.
type driftReporter struct {
	metrics *metrics.Set
	log     *slog.Logger
	// event sends the cluster, if there is one, an event. Some may be dropped where there are too many.
	event   func(text string)
	history *inspect.History
	// left is what has been found, and not been repaired yet.
	left drift.Summary
	// past is what was found lately, the oldest first.
	mu   sync.Mutex
	past []inspect.Changed
	// noticed is the first reason to suspect something since the last report; "" for none.
	noticed string
}

// What is remembered of changes by others: for how long, and how many at most.
const (
	pastKept = 10 * time.Minute
	pastMost = 100
)

// recent returns what others have changed lately.
func (d *driftReporter) recent() []inspect.Changed {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.past = slices.DeleteFunc(d.past, func(c inspect.Changed) bool { return time.Since(c.When) > pastKept })
	return slices.Clone(d.past)
}

// remember adds what has been found, or that it has been repaired.
func (d *driftReporter) remember(found drift.Summary, repaired bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if found.Total() > 0 {
		d.past = append(d.past, inspect.Changed{When: time.Now(), What: inWords(found)})
		d.past = d.past[max(0, len(d.past)-pastMost):]
	}
	for i := range d.past {
		d.past[i].Repaired = d.past[i].Repaired || repaired
	}
}

// inWords is such as "3 rules, such as …".
func inWords(s drift.Summary) string {
	var out []string
	for _, k := range drift.Kinds {
		n := s.Counts[k]
		if n == 0 {
			continue
		}
		name := strings.ReplaceAll(string(k), "_", " ")
		switch {
		case n > 1 && strings.HasSuffix(name, "s"):
			name += "es"
		case n > 1:
			name += "s"
		}
		out = append(out, fmt.Sprintf("%d %s", n, name))
	}
	return strings.Join(out, ", ") + ", such as " + s.First[0].String()
}

// watcher is a backend that notices when others may have changed what it has written.
type watcher interface {
	Watch(ctx context.Context, suspect func(why string)) error
}

// watch lets everything be compared soon when something may have changed, until ctx ends.
func (d *driftReporter) watch(ctx context.Context, w watcher, suspect func(why string)) {
	if err := w.Watch(ctx, d.noting(suspect)); err != nil {
		d.log.Warn("what other programs change in the kernel is noticed only when everything is compared now and then", "error", err)
	}
}

// noting keeps the first reason to suspect something for the report of what is found.
func (d *driftReporter) noting(suspect func(why string)) func(string) {
	return func(why string) {
		d.mu.Lock()
		if d.noticed == "" {
			d.noticed = why
		}
		d.mu.Unlock()
		suspect(why)
	}
}

// fewDifferences is how many differences a log line or an event names one by one.
const fewDifferences = 5

// compared must be called after each comparison; calls must not overlap. What a sync fails to repair is repaired by the next one, which
// does not compare, since it does not know what there was; the comparison after that shows that it was.
func (d *driftReporter) compared(r drift.Report) {
	found := r.Found.Summary(fewDifferences)
	d.metrics.DriftChecked(r.Took, found.Counts)
	if len(r.Found) > 0 {
		d.history.Drifted(len(r.Found), found.String())
	}
	d.left.Merge(found, fewDifferences)
	d.remember(found, r.Err == nil)
	if r.Err != nil {
		if len(r.Found) > 0 {
			d.log.Warn("another program has changed what was written to the kernel; repairing it failed, and is tried again: "+found.String(),
				"things", len(r.Found))
		}
		return
	}
	d.mu.Lock()
	noticed := d.noticed
	d.noticed = ""
	d.mu.Unlock()
	d.repaired(noticed)
}

// repaired reports all that is left to report, and how it was noticed: that may name the other program.
func (d *driftReporter) repaired(noticed string) {
	if d.left.Total() == 0 {
		return
	}
	d.metrics.DriftRepaired(d.left.Counts)
	words := d.left.String()
	text := "another program had changed what was written to the kernel; it has been repaired: " + words
	if noticed != "" {
		text += "; noticed as " + noticed
	}
	d.log.Warn(text, "things", d.left.Total())
	d.event("repaired what another program had changed: " + words)
	d.left = drift.Summary{}
}
