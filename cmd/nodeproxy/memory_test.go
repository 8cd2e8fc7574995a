package main

import (
	"context"
	"log/slog"
	"net/netip"
	"runtime/debug"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// TestSaveMemory: garbage is collected more often once all objects have been read, unless GOGC says how often.
func TestSaveMemory(t *testing.T) {
	const before = 99
	for _, test := range []struct {
		name, gogc string
		read       bool
		want       int
	}{
		{"not all objects have been read", "", false, before},
		{"all have, and are programmed", "", true, restGrowth},
		{"GOGC is given", "99", true, before},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("GOGC", test.gogc)
			was := debug.SetGCPercent(before)
			defer debug.SetGCPercent(was)
			d := &daemon{log: slog.New(slog.DiscardHandler), monitor: &monitor{complete: make(chan struct{})},
				read: proxier.NewObjects("n", netip.Addr{}, plan.Settings{}, plan.Families[:])}
			ctx, cancel := context.WithCancel(t.Context())
			if !test.read {
				cancel()
			} else {
				defer cancel()
				close(d.monitor.complete)
				d.read.Apply(source.Batch{Synced: true})
			}
			d.saveMemory(ctx)
			if got := debug.SetGCPercent(before); got != test.want {
				t.Errorf("the heap grows by %d %%, want %d", got, test.want)
			}
		})
	}
}
