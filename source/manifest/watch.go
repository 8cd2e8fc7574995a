package manifest

import (
	"bytes"
	"context"
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
	// quiet is how long a file must not have been written to before it is read, or must have been missing before it counts as
	// removed: programs save a file in several steps.
	quiet = 150 * time.Millisecond
	// settle is the same for a file that was overwritten in place and is smaller than it was: there may be more to come.
	settle = 2 * time.Second
	// pause is the time from an event to a look, for other events that belong to it.
	pause = 2 * time.Millisecond
)

// watch is a running Source.
type watch struct {
	*Source
	sink   source.Sink
	events *filewatch.Watcher

	tree   *tree
	filled fs.FileInfo // of the root when there were files last
	// changed are the files with an event since they were read, and when they were written to last, or went missing. A file that another
	// one was renamed to, in place of the former, was not written to.
	changed map[string]time.Time
	due     time.Time // when to look next; zero for never
	begun   time.Time // of the first look
	synced  bool
	partial bool // something could not be read since the start
}

// Run delivers everything, and then what changes, until ctx ends; then it returns nil. It waits while there is nothing at the
// path: that is not the same as an empty directory, and must not remove what the kernel holds.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	w := &watch{
		Source: s, sink: sink, events: filewatch.New(s.cfg.Log), tree: &tree{}, changed: map[string]time.Time{}, begun: time.Now(),
	}
	defer w.events.Close()
	w.look(w.begun)
	for {
		var timer <-chan time.Time
		if !w.due.IsZero() {
			timer = time.After(time.Until(w.due))
		}
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.events.C:
			w.note(e, time.Now())
		case <-timer:
			w.look(time.Now())
		}
	}
}

// note records an event.
func (w *watch) note(e filewatch.Event, now time.Time) {
	path := filepath.Clean(e.Path)
	dir, base := filepath.Dir(path), filepath.Base(path)
	switch {
	case e.Path == "" || path == w.cfg.Path || w.tree.info == nil || w.tree.linked[dir]:
	case w.tree.dirs[dir] && strings.HasPrefix(base, ".."): // The volume of a ConfigMap is swapped.
	case !w.tree.dirs[dir] || strings.HasPrefix(base, "."):
		return
	case !accepted(base) && !w.tree.dirs[path] && w.tree.errs[path] == nil:
		if info, err := os.Lstat(path); err != nil || info.Mode().IsRegular() {
			return // A temporary file.
		}
	}
	if _, again := w.changed[path]; again || e.Written || w.files[path] == nil {
		w.changed[path] = now
	} else {
		w.changed[path] = time.Time{}
	}
	w.lookAt(now.Add(pause))
}

// lookAt makes sure that there is a look at a time.
func (w *watch) lookAt(at time.Time) {
	if w.due.IsZero() || at.Before(w.due) {
		w.due = at
	}
}

// still reports whether nothing has happened to a file for a time, and sees to another look if not. last is when something
// happened as far as the file itself tells.
func (w *watch) still(path string, last, now time.Time, enough time.Duration) bool {
	if at, noted := w.changed[path]; noted && (at.IsZero() || at.After(last)) {
		last = at
	}
	if wait := last.Add(enough).Sub(now); wait > 0 && wait <= 2*enough { // The clock may have been set back.
		w.lookAt(now.Add(wait + pause)) // With what was saved together.
		return false
	}
	return true
}

// look reads what has changed and delivers what follows.
func (w *watch) look(now time.Time) {
	w.due = time.Time{}
	w.tree = scan(w.cfg.Path)
	if w.events.Watch(w.tree.watched()) {
		w.lookAt(now.Add(pause)) // Files may have changed between the listing and the watch.
	}
	readings, gone, missing, waits := w.differences(now)
	if !w.synced && (w.tree.info == nil || waits && now.Before(w.begun.Add(2*quiet))) {
		w.report(missing, "nothing is programmed until there is")
		return
	}
	if len(w.tree.files) > 0 {
		w.filled = w.tree.info
	}
	batch := w.update(readings, gone)
	whole := w.report(missing, effectBelow) && !waits
	batch.Synced = !w.synced
	switch {
	case !w.synced && !whole:
		batch.Extent, w.partial = source.Partial, true
	case w.partial && whole:
		batch.Extent, w.partial = source.Whole, false
	}
	w.synced = true
	if !batch.Empty() {
		w.sink.Apply(batch)
	}
}

// differences compares the tree with what was read before. It returns new versions of files, the files that are gone, what is
// wrong with places at which there may be files, and whether some are to be looked at later.
func (w *watch) differences(now time.Time) (readings []*reading, gone []string, missing map[string]error, waits bool) {
	missing = w.tree.unreadable()
	if err := w.tree.errs[w.cfg.Path]; err != nil && !w.synced {
		missing[w.cfg.Path] = err
	}
	var absent []*file
	for path, f := range w.files {
		if w.tree.files[path] == nil {
			absent = append(absent, f)
			if _, noted := w.changed[path]; !noted {
				w.changed[path] = now
			}
		}
	}
	for _, path := range slices.Sorted(maps.Keys(w.tree.files)) {
		r, f := w.tree.files[path], w.files[path]
		if f != nil && f.err == nil && r.err == nil && sameVersion(f.info, r.info) {
			delete(w.changed, path)
			continue
		}
		if i := slices.IndexFunc(absent, func(f *file) bool { return f.info != nil && r.info != nil && os.SameFile(f.info, r.info) }); f == nil && i >= 0 {
			w.changed[path], w.changed[absent[i].path] = time.Time{}, time.Time{} // It was renamed.
		}
		var last time.Time
		if r.info != nil {
			last = r.info.ModTime()
		}
		enough := quiet
		if f != nil && f.inPlace(r) && r.info.Size() < int64(len(f.data)) {
			enough = settle
		}
		if !w.still(path, last, now, enough) {
			waits = true
			continue
		}
		if !r.read() {
			w.changed[path], waits = now, true
			w.lookAt(now.Add(quiet))
			continue
		}
		delete(w.changed, path)
		if f == nil || f.fault != "" || r.err != nil || !bytes.Equal(f.data, r.data) {
			readings = append(readings, r)
		} else {
			f.info = r.info
		}
	}
	for _, f := range absent {
		if !w.still(f.path, time.Time{}, now, quiet) {
			waits = true
		} else if where, err := w.tree.lost(f.path, w.filled); err != nil {
			missing[where] = err
		} else {
			gone = append(gone, f.path)
			delete(w.changed, f.path)
		}
	}
	maps.DeleteFunc(w.changed, func(path string, _ time.Time) bool { // What was noted of files that are not there.
		return w.tree.files[path] == nil && w.files[path] == nil
	})
	return readings, gone, missing, waits
}

// report reports what is wrong with places and what keeps files from being in force as they are. It returns whether that is nothing, and
// no file is in force without some of its objects.
func (w *watch) report(missing map[string]error, effect string) (whole bool) {
	faults := w.findings.setPlaces(missing, effect)
	whole = true
	for _, f := range w.files {
		whole = whole && !f.without
		if f.fault != "" {
			faults = append(faults, f.fault)
		}
	}
	slices.Sort(faults)
	w.findings.flush()
	w.faults.Store(&faults)
	return whole && len(faults) == 0
}

// watched returns the directories in which a change matters.
func (t *tree) watched() map[string]bool {
	out := maps.Clone(t.dirs)
	maps.Copy(out, t.linked)
	out[t.above] = true
	return out
}
