package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"nodeproxy/source/document"
)

// An object is gone only if its file could be read completely and no longer has it, or if the file was removed from a directory
// that can be read. Whatever else happens to a file, the version read last stays in force, the fault is reported, and the node is
// not ready. The functions here decide when a change of a file counts.

// version is the content of a file, and the file that had it.
type version struct {
	data []byte
	id   fileID
}

// deferred is a change of a file, or its removal, that does not count, or not yet.
type deferred struct {
	since   time.Time // of the first difference from what is in force
	changed time.Time // of the last change
	sum     uint64    // of the content after that
	gone    bool
	again   time.Time // when to look again without an event; zero for never
	// fault is what is wrong, if anything is known to be. where is the path that it is about.
	fault    *remark
	where    string
	reported bool
}

func (d *deferred) isGone() bool { return d.gone }

// reportAt returns when to report the fault; zero for never.
func (d *deferred) reportAt() time.Time {
	if d.fault == nil || d.reported {
		return time.Time{}
	}
	return d.since.Add(patience)
}

// deferChange returns the deferred change of a path, which now has content with this sum.
func (w *watch) deferChange(path string, sum uint64, now time.Time) *deferred {
	d := w.deferred[path]
	if d == nil {
		d = &deferred{since: now, changed: now, sum: sum}
		w.deferred[path] = d
	}
	if d.sum != sum {
		d.changed, d.sum = now, sum
	}
	d.gone, d.again = false, time.Time{}
	return d
}

// setFault records a fault.
func (d *deferred) setFault(where, detail, effect string) {
	rem := fileProblem(where, detail, effect, false)
	d.fault, d.where = &rem, where
}

// until schedules another look at the file at a time, or a little later if that has passed. It returns false.
func (d *deferred) until(at, now time.Time) bool {
	if d.again = at; !at.After(now) {
		d.again = now.Add(grace)
	}
	return false
}

// counts decides whether to put a new version of a file in force now.
func (w *watch) counts(r *reading, now time.Time) bool {
	d := w.deferChange(r.path, maphash.Bytes(seed, r.text.Data), now)
	return w.decide(r.path, d, func() bool { return w.weigh(r, d, now) })
}

// decide calls weigh, which may set another fault, and drops the deferred change if it counts now.
func (w *watch) decide(path string, d *deferred, weigh func() bool) bool {
	before := d.fault
	d.fault = nil
	counts := weigh()
	if counts {
		delete(w.deferred, path)
	}
	d.reported = d.reported && d.fault != nil && before != nil && d.fault.Detail == before.Detail && d.fault.Effect == before.Effect
	return counts
}

func (w *watch) weigh(r *reading, d *deferred, now time.Time) bool {
	f := w.store.files[r.path]
	effect := "it is left out"
	if f != nil && len(f.entries) > 0 {
		effect = effectFile
	}
	name := r.text.Name
	switch {
	case r.err != nil:
		d.setFault(name, "can't be read: "+r.err.Error(), effect)
		return false
	case r.blank():
		d.setFault(name+":1", "the file is empty, as while it is being written", effect+" until it holds something, or is removed")
		return false
	}
	last, known := w.whole[r.path]
	if r.open && (!w.synced || w.unknown[r.path]) { // Its final content is not known.
		d.setFault(name, "a program has the file open for writing", fmt.Sprintf("%s until that is done, or the file has not changed for %v", effect, settle))
		at := d.changed.Add(settle)
		return !now.Before(at) || d.until(at, now)
	}
	if known {
		if cut := cutOff(last.data, r.text.Data); cut != notCut {
			return w.weighCut(r, d, cut, last, now)
		}
	}
	inPlace := known && last.id == r.id
	switch {
	case inPlace && (len(r.text.Data) < len(last.data) || r.lacks(f.entries) || endsEarly(last.data, r.text.Data)):
		return w.settled(r, d, now)
	case w.synced && (r.suspect || r.open && (known || f == nil)):
		if !now.Before(d.changed.Add(grace)) && !r.open || !now.Before(d.since.Add(patience)) {
			return true
		}
		return d.until(d.changed.Add(grace), now)
	}
	return true
}

// settled reports whether a file has not changed for a while and no program has it open.
func (w *watch) settled(r *reading, d *deferred, now time.Time) bool {
	at := d.changed.Add(settle)
	return !r.open && !now.Before(at) || d.until(at, now)
}

// cut says where a file is cut off, compared with its last good version.
type cut int

const (
	notCut       cut = iota
	betweenDocs      // between two documents
	betweenLines     // within a document, at the end of a line
	withinLine
)

// cutOff compares a new version of a file with the last good one.
func cutOff(last, data []byte) cut {
	if len(data) >= len(last) || !bytes.HasPrefix(last, data) || len(bytes.TrimSpace(last[len(data):])) == 0 {
		return notCut
	}
	rest := last[len(data):]
	switch {
	case data[len(data)-1] != '\n' && rest[0] != '\n' && rest[0] != '\r':
		return withinLine
	case !betweenDocuments(data, rest):
		return betweenLines
	}
	return betweenDocs
}

// betweenDocuments reports whether a document ends between two parts of a file.
func betweenDocuments(data, rest []byte) bool {
	for line := range bytes.Lines(rest) {
		text := bytes.TrimSpace(line)
		if document.IsMarker(line, "---") || document.IsMarker(line, "...") || len(text) > 0 && text[0] == '{' {
			return true
		}
		if len(text) > 0 && text[0] != '#' {
			break
		}
	}
	data = bytes.TrimRight(data, " \t\r\n")
	line := data[bytes.LastIndexByte(data, '\n')+1:]
	return document.IsMarker(line, "---") || document.IsMarker(line, "...")
}

// endsEarly reports whether a file no longer ends with a complete line, like one that is half written.
func endsEarly(last, data []byte) bool {
	return endsLine(last) && !endsLine(data)
}

func endsLine(data []byte) bool { return bytes.HasSuffix(data, []byte{'\n'}) }

// weighCut decides about a file that is the beginning of its last good version. That may be intended, or written so far, or all
// that is left. It can be intended only if it ends with a complete line; and if it ends within a document, only if the file was
// replaced as a whole.
func (w *watch) weighCut(r *reading, d *deferred, c cut, last version, now time.Time) bool {
	renamed := last.id != r.id && !r.open
	where := fmt.Sprintf("%s:%d", r.text.Name, r.text.Line(len(bytes.TrimRight(r.text.Data, "\r\n"))))
	switch {
	case c == withinLine || r.suspect || c == betweenLines && !renamed:
		d.setFault(where, "the file is cut off: it ends within a document, which goes on in its last good version", effectFile+"; if that is meant, end it with a line \"...\"")
		return false
	case renamed:
		return true
	}
	d.setFault(where, "the file is cut off: its last good version has more documents", fmt.Sprintf("%s until it has not changed for %v", effectFile, settle))
	return w.settled(r, d, now)
}

// hasGone decides whether the absence of a file counts.
func (w *watch) hasGone(path string, now time.Time) bool {
	d := w.deferChange(path, 0, now)
	d.gone = true
	return w.decide(path, d, func() bool { return w.weighGone(path, d, now) })
}

func (w *watch) weighGone(path string, d *deferred, now time.Time) bool {
	if w.movedAway(path) {
		return true
	}
	if w.removedFrom(filepath.Dir(path), path) {
		at := d.changed.Add(grace)
		return !now.Before(at) || d.until(at, now)
	}
	if !w.fresh { // The list of directories may be old.
		w.tree, w.fresh = scan(w.cfg.Path), true
		w.setWatches()
	}
	yes, where := w.tree.removed(path, w.cfg.Path)
	if !yes || w.replacedByNothing() {
		d.setFault(where, w.whyLost(where), "all objects of the files below stay as they were")
		return false
	}
	// The directory is gone, or another one is in its place and may still be filled.
	at := d.changed.Add(settle)
	if later := w.last.Add(settle); later.After(at) {
		at = later
	}
	return !now.Before(at) || d.until(at, now)
}

// removedFrom reports whether a file was removed from its directory, and the directory is still the same one.
func (w *watch) removedFrom(dir, path string) bool {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	info, err := os.Stat(dir)
	if path == w.cfg.Path {
		return err == nil && info.IsDir()
	}
	return err == nil && w.tree.errs[dir] == nil && w.tree.ids[dir] == stampOf(info).id() && w.tree.root == w.root
}

// replacedByNothing reports whether an empty directory is in the place of the one that had the manifests: a new one that is about
// to be filled, or the mount point of a file system.
func (w *watch) replacedByNothing() bool { return w.tree.root != w.root && len(w.tree.files) == 0 }

func (w *watch) whyLost(where string) string {
	switch {
	case w.tree.errs[where] != nil:
		return "can't be read: " + w.tree.errs[where].Error()
	case w.tree.dangling[where]:
		return "can't be read: " + errDangling.Error()
	case !w.tree.exists:
		return "there is nothing at this path"
	case w.tree.dirs[where]:
		return "another directory, without manifests, is in the place of the one that had them"
	}
	return "this is not a directory any more"
}

// reportFaults reports lasting faults, and withdraws those that are fixed. At the start it reports all at once.
func (w *watch) reportFaults(now time.Time) {
	found := map[string][]remark{}
	for path, err := range w.tree.errs {
		if w.deferred[path] == nil {
			found[path] = []remark{fileProblem(path, "can't be read: "+err.Error(), "it is left out", false)}
		}
	}
	if !w.synced && !w.tree.exists {
		found[w.cfg.Path] = []remark{fileProblem(w.cfg.Path, "there is nothing at this path",
			"nothing is programmed until there is", false)}
	}
	for _, path := range slices.Sorted(maps.Keys(w.deferred)) {
		d := w.deferred[path]
		if d.fault == nil || w.synced && !d.reported && now.Before(d.since.Add(patience)) {
			continue
		}
		d.reported = true
		found[d.where] = []remark{*d.fault}
	}
	for where := range w.reported {
		if found[where] == nil {
			w.store.findings.set("deferred "+where, nil)
		}
	}
	for where, remarks := range found {
		w.store.findings.set("deferred "+where, remarks)
	}
	w.reported = found
	w.store.findings.flush()
	w.publish()
}

// publish passes on the faults that keep files from being in force as they are.
func (w *watch) publish() {
	var out []string
	for _, remarks := range w.reported {
		for _, rem := range remarks {
			out = append(out, rem.Where+": "+rem.Detail)
		}
	}
	for _, f := range w.store.faulty {
		if f.fault != "" {
			out = append(out, f.fault)
		}
	}
	slices.Sort(out)
	w.faults(out)
}

// faultyPaths returns the files and directories with a fault.
func (w *watch) faultyPaths() map[string]bool {
	out := map[string]bool{}
	for path := range w.store.faulty {
		out[path] = true
	}
	for path := range w.tree.errs {
		out[path] = true
	}
	for path, d := range w.deferred {
		if d.fault != nil {
			out[path] = true
		}
	}
	return out
}
