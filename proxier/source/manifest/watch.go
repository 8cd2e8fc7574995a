package manifest

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"nodeproxy/proxier/source"
)

const (
	// quiet is how long no further event must come before what has come is looked at, and busy how long that can go on:
	// programs save a file in several steps.
	quiet = 2 * time.Millisecond
	busy  = 15 * time.Millisecond
	// hold is how long a file that is newly broken, empty or gone is given to become whole again, from its last change on,
	// and patience how long altogether.
	hold     = 40 * time.Millisecond
	patience = 250 * time.Millisecond
	// lookAgain is how often everything is looked through for changes of which no event told, as on network file systems;
	// lookOften the same where there are no events at all.
	lookAgain = 15 * time.Second
	lookOften = 250 * time.Millisecond
)

// watch is a running Source.
type watch struct {
	cfg    *Config
	model  *model
	sink   source.Sink
	events *fsnotify.Watcher // nil where the system grants none

	tree   *scanned
	stamps map[string]stamp     // of each file when it was last read
	texts  map[string][]byte    // the content of each file that is in force
	held   map[string]*heldFile // newly broken, empty or gone
	synced bool

	pending map[string]bool // files of which an event told
	all     bool            // look at everything
	due     time.Time       // when to look; zero if there is nothing
	since   time.Time       // of the first event after the last look
}

// heldFile is a file that is given time to become whole again.
type heldFile struct{ since, until time.Time }

// Run delivers everything, and then what changes, until ctx ends; then it returns nil. Where there is nothing at the path
// yet it waits: nothing is not the same as an empty directory, and must not wipe out what the kernel holds.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	cfg := s.cfg
	w := &watch{
		cfg: &cfg, model: newModel(&cfg), sink: sink, tree: &scanned{},
		stamps: map[string]stamp{}, texts: map[string][]byte{}, held: map[string]*heldFile{}, pending: map[string]bool{},
	}
	var err error
	var events chan fsnotify.Event
	var errs chan error
	period := lookAgain
	if w.events, err = fsnotify.NewWatcher(); err != nil {
		period = lookOften
		cfg.Log.Warn("manifests can't be watched; they are looked at from time to time", "period", period, "error", err)
	} else {
		defer func() { _ = w.events.Close() }()
		events, errs = w.events.Events, w.events.Errors
	}
	w.all = true
	w.look(time.Now())
	poll := time.NewTicker(period)
	defer poll.Stop()
	for {
		var timer <-chan time.Time
		if wake := w.wake(); !wake.IsZero() {
			timer = time.After(time.Until(wake))
		}
		select {
		case <-ctx.Done():
			return nil
		case e, ok := <-events:
			if !ok {
				return errors.New("the watch of the manifests ended by itself")
			}
			w.note(e.Name)
		case err := <-errs:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				cfg.Log.Warn("watching the manifests", "error", err)
			}
			w.all = true
			w.schedule()
		case now := <-timer:
			w.look(now)
		case now := <-poll.C:
			w.all = true
			w.look(now)
		}
	}
}

// note takes an event in.
func (w *watch) note(name string) {
	name = filepath.Clean(name)
	dir, base := filepath.Dir(name), filepath.Base(name)
	switch {
	case name == w.cfg.Path:
		w.pending[name], w.all = true, true
	case w.tree.dirs[name], w.tree.linked[dir], !w.tree.exists:
		w.all = true
	case !w.tree.dirs[dir]:
		return // Beside the manifests.
	case strings.HasPrefix(base, ".."):
		w.all = true // A ConfigMap volume is swapped.
	case strings.HasPrefix(base, "."):
		return
	default:
		info, err := os.Lstat(name)
		if err == nil && (info.IsDir() || info.Mode()&fs.ModeSymlink != 0) {
			w.all = true
		}
		if accepted(base) {
			w.pending[name] = true
		} else if !w.all {
			return // Somebody's temporary file.
		}
	}
	w.schedule()
}

func (w *watch) schedule() {
	now := time.Now()
	if w.since.IsZero() {
		w.since = now
	}
	w.due = now.Add(quiet)
	if last := w.since.Add(busy); w.due.After(last) {
		w.due = last
	}
}

// wake returns when there is something to be done; zero if never.
func (w *watch) wake() time.Time {
	at := w.due
	for _, h := range w.held {
		if at.IsZero() || h.until.Before(at) {
			at = h.until
		}
	}
	return at
}

// look reads what has changed and delivers what follows.
func (w *watch) look(now time.Time) {
	pending, all := w.pending, w.all
	w.pending, w.all, w.due, w.since = map[string]bool{}, false, time.Time{}, time.Time{}
	for path, h := range w.held {
		if !now.Before(h.until) {
			pending[path] = true
		}
	}
	if all {
		w.rescan(pending)
	}
	readings, gone := w.read(pending)
	decodeAll(readings, w.model.files)
	if w.synced {
		readings = slices.DeleteFunc(readings, func(r *reading) bool { return r.suspect && w.holdBack(r.path, now) })
		gone = slices.DeleteFunc(gone, func(path string) bool { return !w.movedAway(path) && w.holdBack(path, now) })
	} else if !w.tree.exists {
		w.tellMissing("nothing is programmed until there is")
		w.model.report.flush()
		return
	}
	for _, r := range readings {
		delete(w.held, r.path)
		if r.err == nil {
			w.texts[r.path] = r.text.data
		} else {
			delete(w.texts, r.path)
		}
	}
	for _, path := range gone {
		delete(w.held, path)
		delete(w.texts, path)
		delete(w.stamps, path)
	}
	if w.tree.exists {
		w.model.report.tell("path", nil)
	} else if len(w.held) == 0 {
		w.tellMissing("all objects are gone until there is")
	}
	batch := w.model.update(readings, gone)
	batch.Synced, w.synced = !w.synced, true
	if !batch.Empty() {
		w.sink.Apply(batch)
	}
}

func (w *watch) tellMissing(effect string) {
	w.model.report.tell("path", []remark{{file: w.cfg.Path, issue: issue{severity: source.Problem,
		detail: "there is nothing at this path", effect: effect}}})
}

// rescan lists everything, and adds what differs from what was read to the pending files.
func (w *watch) rescan(pending map[string]bool) {
	old := w.tree
	w.tree = scan(w.cfg.Path)
	w.tree.tellErrors(old, &w.model.report)
	for path, st := range w.tree.files {
		if w.stamps[path] != st {
			pending[path] = true
		}
	}
	for path := range w.stamps {
		if _, ok := w.tree.files[path]; !ok && w.held[path] == nil {
			pending[path] = true
		}
	}
	w.setWatches(old)
}

// read reads the pending files. It returns those that differ from what is in force or held, and those that are gone.
func (w *watch) read(pending map[string]bool) (readings []*reading, gone []string) {
	var paths []string
	for path := range pending {
		info, err := os.Stat(path)
		switch {
		case err == nil && info.IsDir(), errors.Is(err, fs.ErrNotExist), !accepted(path) && path != w.cfg.Path:
			if w.model.files[path] != nil {
				gone = append(gone, path)
			}
			continue
		case err == nil:
			w.stamps[path] = stampOf(info)
		}
		paths = append(paths, path)
	}
	slices.Sort(gone)
	readings = slices.DeleteFunc(readAll(paths), func(r *reading) bool {
		old, known := w.texts[r.path]
		if r.err == nil && known && bytes.Equal(old, r.text.data) {
			delete(w.held, r.path) // It is as it was before.
			return true
		}
		return errors.Is(r.err, fs.ErrNotExist) // The next event tells.
	})
	return readings, gone
}

// holdBack decides whether to wait with a file that is newly broken, empty or gone. Each new event extends the time.
func (w *watch) holdBack(path string, now time.Time) bool {
	h := w.held[path]
	if h == nil {
		w.held[path] = &heldFile{since: now, until: now.Add(hold)}
		return true
	}
	if !now.Before(h.until) {
		return false
	}
	h.until = now.Add(hold)
	if last := h.since.Add(patience); h.until.After(last) {
		h.until = last
	}
	return true
}

// movedAway reports whether a file that is gone has only got another name, so that nothing is to be waited for.
func (w *watch) movedAway(path string) bool {
	was := w.stamps[path]
	for other, st := range w.stamps {
		if other != path && st.inode == was.inode && st.dev == was.dev {
			return true
		}
	}
	return false
}

// setWatches watches the directories of the tree. Adding one again does no harm, and is needed where it was made anew.
func (w *watch) setWatches(old *scanned) {
	if w.events == nil {
		return
	}
	before, wanted := old.watched(), w.tree.watched()
	for _, dir := range sortedKeys(wanted) {
		if err := w.events.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			w.cfg.Log.Warn("a directory can't be watched; it is looked at from time to time", "directory", dir,
				"period", lookAgain, "error", err)
		}
		if !before[dir] {
			w.all = true // Files may have come between the listing and the watch.
			w.schedule()
		}
	}
	for dir := range before {
		if !wanted[dir] {
			if err := w.events.Remove(dir); err != nil && !errors.Is(err, fsnotify.ErrNonExistentWatch) {
				w.cfg.Log.Debug("ending a watch", "directory", dir, "error", err)
			}
		}
	}
}

// watched returns the directories in which a change matters.
func (s *scanned) watched() map[string]bool {
	out := map[string]bool{}
	for _, dirs := range []map[string]bool{s.dirs, s.linked} {
		for dir := range dirs {
			out[dir] = true
		}
	}
	if s.above != "" {
		out[s.above] = true
	}
	return out
}
