package harness

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// What the daemon logs when a sync begins, and when it has ended well or badly.
const (
	syncing    = "msg=syncing"
	syncFailed = `msg="sync failed`
)

// settleTimeout is how long Settle waits for a sync: one that is held up is what some tests are about.
const settleTimeout = 30 * time.Second

// Settle waits until each daemon of the test's Worlds has ended the sync that it is in. A sync takes effect piece by piece: once
// one of its effects is seen, the others can be asked for only then.
func Settle(t testing.TB) {
	begun := time.Now()
	for _, d := range daemonsOf(t.Name()) {
		for ended := false; !ended && busy(d.Log()) && time.Since(begun) < settleTimeout; {
			ended = d.pause()
		}
	}
}

// Applied waits until a sync of changed objects has ended that began after the given line of the log; see WaitForAfter. What the change is to
// bring about holds for whatever begins from then on.
func (d *Daemon) Applied(line int) error {
	for begun := ""; ; line++ {
		if err := d.WaitForAfter(line, Limit, "msg="); err != nil {
			return err
		}
		switch now := d.Log()[line]; {
		case strings.Contains(now, syncing):
			begun = now
		case begun == "" || !strings.Contains(now, InSync):
		case !strings.Contains(begun, " changed=0"), strings.Contains(now, "objects have changed"), strings.Contains(now, "the one before had failed"):
			return nil // A sync of everything counts no changed objects, but says so.
		}
	}
}

// daemonsOf are the daemons of the Worlds of a test, or of one that it is part of.
func daemonsOf(test string) []*Daemon {
	live.Lock()
	defer live.Unlock()
	var out []*Daemon
	for w := range live.worlds {
		if w.test != "" && (w.test == test || strings.HasPrefix(test, w.test+"/")) {
			out = append(out, w.daemons...)
		}
	}
	return out
}

// name notes whose World this is.
func (w *World) name(test string) {
	live.Lock()
	defer live.Unlock()
	w.test = test
}

// busy reports whether a log ends within a sync.
func busy(lines []string) bool {
	for _, line := range slices.Backward(lines) {
		switch {
		case strings.Contains(line, syncing):
			return true
		case strings.Contains(line, InSync), strings.Contains(line, syncFailed):
			return false
		}
	}
	return false
}
