package manifest

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"nodeproxy/source"
	"nodeproxy/source/filewatch"
)

const (
	// quiet is the time without another event after which files are read, and busy the time after which they are read in any case:
	// programs save a file in several steps.
	quiet = 2 * time.Millisecond
	busy  = 15 * time.Millisecond
	// grace is the time that a newly broken or removed file has to become whole again, from its last change on, and
	// patience the time that it has altogether.
	grace    = 40 * time.Millisecond
	patience = 250 * time.Millisecond
	// settle is the time without a change after which it counts that a file has become smaller or lacks objects: it may be
	// written in pieces.
	settle = 2 * time.Second
)

// watch is a running Source.
type watch struct {
	cfg    *Config
	store  *store
	sink   source.Sink
	events *filewatch.Watcher
	faults func([]string) // receives what keeps files from being in force as they are

	tree     *scanned
	fresh    bool                 // the tree has been listed in this look
	root     fileID               // of the path when all files below it were there last
	stamps   map[string]stamp     // of each file when it was last read
	texts    map[string][]byte    // the content of each file that is in force
	whole    map[string]version   // the last content of each file that could be read completely
	deferred map[string]*deferred // by path
	reported map[string][]remark  // faults of those, by the path that they are about
	synced   bool
	// unknown are the paths that could not be read since the start.
	unknown map[string]bool

	pending map[string]bool // files with an event
	all     bool            // look at everything
	due     time.Time       // when to look; zero if there is nothing
	since   time.Time       // of the first event after the last look
	last    time.Time       // of the last event
}

// Run delivers everything, and then what changes, until ctx ends; then it returns nil. It waits while there is nothing at the
// path: that is not the same as an empty directory, and must not remove what the kernel holds.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	cfg := s.cfg
	w := &watch{
		cfg: &cfg, store: s.store, sink: sink, faults: s.setFaults, tree: &scanned{},
		stamps: map[string]stamp{}, texts: map[string][]byte{}, whole: map[string]version{}, deferred: map[string]*deferred{},
		reported: map[string][]remark{}, pending: map[string]bool{},
	}
	w.events = filewatch.New(cfg.Log)
	defer w.events.Close()
	w.all = true
	w.look(time.Now())
	for {
		var timer <-chan time.Time
		if wake := w.wake(); !wake.IsZero() {
			timer = time.After(time.Until(wake))
		}
		select {
		case <-ctx.Done():
			return nil
		case path := <-w.events.C:
			w.note(path)
		case now := <-timer:
			w.look(now)
		}
	}
}

// note records the path of an event; the empty path stands for any.
func (w *watch) note(name string) {
	if name == "" {
		w.all = true
		w.schedule()
		return
	}
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
			return // A temporary file.
		}
	}
	w.schedule()
}

func (w *watch) schedule() {
	now := time.Now()
	w.last = now
	if w.since.IsZero() {
		w.since = now
	}
	w.due = now.Add(quiet)
	if last := w.since.Add(busy); w.due.After(last) {
		w.due = last
	}
}

// wake returns the time of the next look without an event; zero for never.
func (w *watch) wake() time.Time {
	at := w.due
	for _, h := range w.deferred {
		for _, t := range []time.Time{h.again, h.reportAt()} {
			if !t.IsZero() && (at.IsZero() || t.Before(at)) {
				at = t
			}
		}
	}
	return at
}

// look reads what has changed and delivers what follows.
func (w *watch) look(now time.Time) {
	pending, all := w.pending, w.all
	w.pending, w.all, w.due, w.since = map[string]bool{}, false, time.Time{}, time.Time{}
	for path, h := range w.deferred {
		if all || !h.again.IsZero() && !now.Before(h.again) {
			pending[path] = true
		}
	}
	if w.fresh = all; all {
		w.rescan(pending)
	}
	readings, gone := w.read(pending)
	decodeAll(readings, w.store.files)
	readings = slices.DeleteFunc(readings, func(r *reading) bool { return !w.counts(r, now) })
	gone = slices.DeleteFunc(gone, func(path string) bool { return !w.hasGone(path, now) })
	if !w.synced && !w.tree.exists {
		w.reportFaults(now)
		return
	}
	for _, r := range readings {
		w.texts[r.path] = r.text.Data
		if r.whole() {
			w.whole[r.path] = version{r.text.Data, r.id}
		}
	}
	for _, path := range gone {
		delete(w.texts, path)
		delete(w.whole, path)
		delete(w.stamps, path)
	}
	if w.tree.exists && len(w.tree.files) > 0 && !slices.ContainsFunc(slices.Collect(maps.Values(w.deferred)), (*deferred).isGone) {
		w.root = w.tree.root
	}
	batch := w.store.update(readings, gone)
	w.reportFaults(now)
	w.complete(&batch)
	if !batch.Empty() {
		w.sink.Apply(batch)
	}
}

// complete sets in a batch whether it is the first one, and whether all that existed at the start is known.
func (w *watch) complete(b *source.Batch) {
	first := !w.synced
	b.Synced, w.synced = first, true
	faults := w.faultyPaths()
	if first {
		w.unknown = faults
		if len(faults) > 0 {
			b.Extent = source.Partial
		}
		return
	}
	if len(w.unknown) == 0 {
		return
	}
	for path := range w.unknown {
		if !faults[path] && w.deferred[path] == nil {
			delete(w.unknown, path)
		}
	}
	if len(w.unknown) == 0 {
		b.Extent = source.Whole
	}
}

// rescan lists all files and adds those that differ from what was read to the pending ones.
func (w *watch) rescan(pending map[string]bool) {
	w.tree = scan(w.cfg.Path)
	for path, st := range w.tree.files {
		if w.stamps[path] != st {
			pending[path] = true
		}
	}
	for path := range w.stamps {
		if _, ok := w.tree.files[path]; !ok && w.deferred[path] == nil {
			pending[path] = true
		}
	}
	w.setWatches()
}

// read reads the pending files. It returns those that differ from what is in force, and those that are gone.
func (w *watch) read(pending map[string]bool) (readings []*reading, gone []string) {
	var paths []string
	for path := range pending {
		info, err := os.Stat(path)
		if _, lerr := os.Lstat(path); err == nil || lerr != nil { // What was there before is not there any longer.
			delete(w.tree.errs, path)
			delete(w.tree.dangling, path)
		}
		switch {
		case err == nil && info.IsDir(), errors.Is(err, fs.ErrNotExist), !accepted(path) && path != w.cfg.Path:
			// Of a file that could not be read since the start, nothing is in force, but the kernel may hold rules for it.
			if w.store.files[path] != nil || w.unknown[path] && errors.Is(err, fs.ErrNotExist) {
				gone = append(gone, path)
			} else {
				delete(w.deferred, path)
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
		if r.err == nil && known && bytes.Equal(old, r.text.Data) {
			delete(w.deferred, r.path) // It is as it was before.
			if v, ok := w.whole[r.path]; ok && bytes.Equal(v.data, r.text.Data) {
				w.whole[r.path] = version{v.data, r.id}
			}
			return true
		}
		return errors.Is(r.err, fs.ErrNotExist) // An event follows.
	})
	return readings, gone
}

// movedAway reports whether a file that is gone was only renamed, so that there is no need to wait. A new file with the inode of a
// removed one is another file.
func (w *watch) movedAway(path string) bool {
	was := w.stamps[path]
	for other, st := range w.stamps {
		if other != path && st.id() == was.id() && st.size == was.size && st.mtime == was.mtime {
			return true
		}
	}
	return false
}

// setWatches watches the directories of the tree.
func (w *watch) setWatches() {
	if w.events.Watch(w.tree.watched()) {
		w.all = true // Files may have changed between the listing and the watch.
		w.schedule()
	}
}

// watched returns the directories in which a change matters.
func (s *scanned) watched() map[string]bool {
	out := maps.Clone(s.dirs)
	maps.Copy(out, s.linked)
	if s.above != "" {
		out[s.above] = true
	}
	return out
}
