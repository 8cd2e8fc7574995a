// Package filewatch reports when files may have changed, including those behind symbolic links, as in the volume of a ConfigMap.
package filewatch

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// pollPeriod is how often to look for changes without an event, as on network file systems; pollOften the same where the system
	// grants no events at all.
	pollPeriod = 15 * time.Second
	pollOften  = 250 * time.Millisecond
	// mostWaiting is how many events wait to be received. The last of them stands for all that came since: anything may have changed.
	mostWaiting = 1000
)

// Event is a change of a file or directory. The empty path stands for any.
type Event struct {
	Path string
	// Written is false where something has appeared: also where a file was renamed to it.
	Written bool
}

// Watcher watches directories.
type Watcher struct {
	// C receives each event, and one without a path when anything may have changed: when events were lost, and from time
	// to time in any case.
	C <-chan Event

	c      chan Event
	done   chan struct{}
	events *fsnotify.Watcher // nil where the system grants none
	dirs   map[string]bool
	log    *slog.Logger
}

// New returns a Watcher of no directories, which must be closed after use.
func New(log *slog.Logger) *Watcher { return newWatcher(log, pollPeriod) }

func newWatcher(log *slog.Logger, period time.Duration) *Watcher {
	w := &Watcher{c: make(chan Event, mostWaiting), done: make(chan struct{}), log: log}
	w.C = w.c
	var err error
	if w.events, err = fsnotify.NewWatcher(); err != nil {
		period = pollOften
		log.Warn("no events for changed files; files are compared periodically", "period", period, "error", err)
		w.events = nil
	}
	go w.run(period)
	return w
}

// Close ends the watch.
func (w *Watcher) Close() {
	close(w.done)
	if w.events != nil {
		_ = w.events.Close()
	}
}

func (w *Watcher) run(period time.Duration) {
	poll := time.NewTicker(period)
	defer poll.Stop()
	var events chan fsnotify.Event
	var errs chan error
	if w.events != nil {
		events, errs = w.events.Events, w.events.Errors
	}
	for {
		var event Event
		select {
		case <-w.done:
			return
		case e := <-events:
			event = Event{e.Name, !e.Has(fsnotify.Create)}
		case err := <-errs:
			if err != nil && !errors.Is(err, fsnotify.ErrEventOverflow) {
				w.log.Warn("watching files", "error", err)
			}
		case <-poll.C:
		}
		if len(w.c) >= mostWaiting-1 {
			event = Event{}
		}
		// fsnotify must never wait for whoever receives from C: it may hold the lock meanwhile that Watch takes.
		select {
		case w.c <- event:
		default:
		}
	}
}

// Watch watches these directories and no others. It reports whether one of them was not watched before: files may have changed
// in it since the caller has read them.
func (w *Watcher) Watch(dirs map[string]bool) (added bool) {
	if w.events == nil {
		return false
	}
	for dir := range dirs {
		isNew := !w.dirs[dir]
		added = added || isNew
		// Adding a directory again does no harm, and is needed where another one is in its place.
		if err := w.events.Add(dir); err != nil && isNew && !errors.Is(err, fs.ErrNotExist) {
			w.log.Warn("a directory can't be watched; its files are compared periodically", "directory", dir, "period", pollPeriod,
				"error", err)
		}
	}
	for dir := range w.dirs {
		if !dirs[dir] {
			if err := w.events.Remove(dir); err != nil && !errors.Is(err, fsnotify.ErrNonExistentWatch) {
				w.log.Debug("ending a watch", "directory", dir, "error", err)
			}
		}
	}
	w.dirs = dirs
	return added
}

// Directories returns the directories in which a change can make a path lead to something else.
func Directories(path string) map[string]bool {
	dir := filepath.Dir(path)
	out := map[string]bool{dir: true}
	Links(path, out)
	if isLink(dir) {
		out[filepath.Dir(dir)] = true
		Links(dir, out)
	}
	return out
}

// Links adds to dirs the directories that the symbolic links lead through which a path leads to.
func Links(path string, dirs map[string]bool) {
	for range 40 { // As many links as the kernel follows.
		target, err := os.Readlink(path)
		if err != nil {
			return
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		// The target may lead through a link itself, as ..data of a ConfigMap volume.
		dir := filepath.Dir(target)
		dirs[Existing(dir)] = true
		if isLink(dir) {
			dirs[Existing(filepath.Dir(dir))] = true
		}
		path = target
	}
}

func isLink(path string) bool {
	_, err := os.Readlink(path)
	return err == nil
}

// Existing returns the nearest directory at or above a path that exists.
func Existing(dir string) string {
	for {
		if info, err := os.Stat(dir); err == nil && info.IsDir() || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}
