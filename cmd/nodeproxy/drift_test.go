package main

import (
	"bytes"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"nodeproxy/inspect"
	"nodeproxy/kernel/drift"
	"nodeproxy/metrics"
)

// TestDriftReporter: a log line and an event name a few differences and say how many more there are; what could not be repaired is
// reported when it has been, and does not pile up until then.
func TestDriftReporter(t *testing.T) {
	var logged bytes.Buffer
	var told []string
	d := &driftReporter{metrics: metrics.New(metrics.Config{}), log: slog.New(slog.NewTextHandler(&logged, nil)), history: &inspect.History{},
		event: func(text string) { told = append(told, text) }}
	found := make(drift.Found, 7)
	for i := range found {
		found[i] = drift.Difference{Kind: drift.Chain, State: drift.Missing, Object: string(rune('a' + i))}
	}
	const few = "chain a: missing; chain b: missing; chain c: missing; chain d: missing; chain e: missing; and "
	for range 100 {
		logged.Reset()
		d.compared(drift.Report{Found: found, Err: errors.New("refused")})
		if !strings.Contains(logged.String(), "and is tried again: "+few+"2 more\" things=7\n") || len(told) > 0 {
			t.Fatalf("after a repair that failed: %s, told %q", &logged, told)
		}
	}
	if len(d.left.First) != fewDifferences {
		t.Errorf("%d differences are kept until they are repaired", len(d.left.First))
	}
	logged.Reset()
	for _, why := range []string{"chain a changed by mallory (process 7 of the host)", "chain b changed"} {
		d.noting(func(string) {})(why)
	}
	d.compared(drift.Report{})
	if !strings.Contains(logged.String(), "it has been repaired: "+few+"695 more; noticed as chain a changed by mallory (process 7 of the host)\" things=700\n") {
		t.Errorf("after the repair: %s", &logged)
	}
	if want := []string{"repaired what another program had changed: " + few + "695 more"}; !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	logged.Reset()
	d.compared(drift.Report{})
	if logged.Len() > 0 || len(told) != 1 {
		t.Errorf("where nothing was found: %s, told %q", &logged, told)
	}
}
