package proxier

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"nodeproxy/plan"
)

// fewServices is how many Services a log line names.
const fewServices = 3

// logEvery is the time between log lines about syncs at level info. Under churn, one line sums up those in between.
const logEvery = time.Second

// syncLog logs a line for each sync: at level info those that changed something, one in a second at most, and the others at level debug.
type syncLog struct {
	log *slog.Logger

	mu   sync.Mutex
	last time.Time // of the last line at level info
	// What has happened since and is to be summed up; timer is nil if that is nothing.
	timer          *time.Timer
	syncs          int
	services       map[plan.Service]struct{} // of which others more were not noted
	named          []string                  // the first fewServices of them
	others         int
	added, removed int
}

// mostSummedUp is how many Services a summary tells apart.
const mostSummedUp = 10000

// synced logs a sync that succeeded. first is set for the first one.
func (l *syncLog) synced(first bool, desired *plan.Plan, change plan.Change, r Result) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	level := slog.LevelDebug
	switch d := r.Difference; {
	case first || r.Retry || l.timer == nil && now.Sub(l.last) >= logEvery && len(d.Services) > 0:
		l.sumUp()
		level, l.last = slog.LevelInfo, now
	case len(d.Services) > 0:
		l.hold(d)
	}
	if !l.log.Enabled(context.Background(), level) {
		return
	}
	took := (r.Plan + r.Backend).Round(10 * time.Microsecond)
	changed := "all"
	if !change.All() {
		changed = strconv.Itoa(len(change.Keys()))
	}
	what := r.Difference.text()
	if first {
		what = fmt.Sprintf("the first sync, of %d ServicePorts", len(desired.Services))
	}
	text := fmt.Sprintf("in sync: %s; it took %s, and was made because %s", what, took, r.why())
	if r.Waiting > 0 {
		text += fmt.Sprintf("; %d changed ServicePorts are left to the next one", r.Waiting)
	}
	l.log.Log(context.Background(), level, text, "took", took, "changed", changed, "service-ports", len(desired.Services))
}

// hold keeps a difference for the next summary.
func (l *syncLog) hold(d Difference) {
	if l.timer == nil {
		l.services = map[plan.Service]struct{}{}
		l.timer = time.AfterFunc(time.Until(l.last.Add(logEvery)), func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.sumUp()
		})
	}
	l.syncs++
	l.others += d.Others
	l.added, l.removed = l.added+d.EndpointsAdded, l.removed+d.EndpointsRemoved
	for _, s := range d.Services {
		if _, known := l.services[s.Service]; known || len(l.services) == mostSummedUp {
			continue
		}
		l.services[s.Service] = struct{}{}
		if len(l.named) < fewServices {
			l.named = append(l.named, s.Service.String())
		}
	}
}

// sumUp logs what has been held.
func (l *syncLog) sumUp() {
	if l.timer == nil {
		return
	}
	l.timer.Stop()
	l.timer, l.last = nil, time.Now()
	text := someOf(l.named, len(l.services)+l.others)
	l.log.Info(fmt.Sprintf("more syncs within a second changed %s, endpoints +%d/-%d", text, l.added, l.removed), "syncs", l.syncs,
		"services", len(l.services)+l.others)
	l.syncs, l.services, l.named, l.others, l.added, l.removed = 0, nil, nil, 0, 0, 0
}

// end logs what is left.
func (l *syncLog) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sumUp()
}

// failed logs a sync that failed.
func (l *syncLog) failed(r Result, again time.Duration) {
	what := ""
	if len(r.Difference.Services) > 0 {
		what = ", without what is new of " + r.Difference.names()
	}
	l.log.Error(fmt.Sprintf("sync failed; the kernel keeps its rules%s, and everything is compared and written again in %s: %s", what, again, r.Err),
		"retry-in", again)
}

// names names the first few Services, and counts the others.
func (d Difference) names() string {
	var names []string
	for _, s := range d.Services[:min(fewServices, len(d.Services))] {
		name := s.Service.String()
		switch {
		case s.Added:
			name += " (new)"
		case s.Removed:
			name += " (gone)"
		}
		names = append(names, name)
	}
	return someOf(names, len(d.Services)+d.Others)
}

// someOf is as in "default/a, default/b and 7 more Services".
func someOf(names []string, total int) string {
	text := strings.Join(names, ", ")
	switch more := total - len(names); {
	case more == 1:
		text += " and another Service"
	case more > 1:
		text += fmt.Sprintf(" and %d more Services", more)
	}
	return text
}

// text says what has changed.
func (d Difference) text() string {
	if len(d.Services) == 0 {
		return "no Service has changed"
	}
	text := d.names()
	if d.EndpointsAdded+d.EndpointsRemoved > 0 {
		text += fmt.Sprintf(", endpoints +%d/-%d", d.EndpointsAdded, d.EndpointsRemoved)
	}
	return text
}

// why says why a sync was made.
func (r Result) why() string {
	var out []string
	for _, reason := range r.Reasons {
		out = append(out, map[Reason]string{
			Start: "nodeproxy has started", Arrived: "objects have changed", Rest: "a change was too large for one sync", Retry: "the one before had failed",
			Resync: "the kernel's state was not certain", Drift: "another program may have changed something", Compare: "it was time to compare everything",
		}[reason])
	}
	text := strings.Join(out, ", and ")
	if r.Suspicion != "" {
		text += " (" + r.Suspicion + ")"
	}
	return text
}
