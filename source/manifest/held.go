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

// An object leaves only when its file could be read whole and no longer has it, or when the file was removed from a directory
// that can be read. What else becomes of a file leaves in force what was read of it last, is reported, and keeps the node from
// being ready. This file decides when a change of a file counts.

// version is a content of a file, and which file had it.
type version struct {
	data []byte
	id   fileID
}

// held is a file that differs from what is in force, or is gone, where that does not count, or not yet.
type held struct {
	since   time.Time // since when it differs
	changed time.Time // when it last became something else
	sum     uint64    // of what it became
	gone    bool
	again   time.Time // when to look again though no event comes; zero for never
	// fault is what is wrong; nil where nothing is, as far as is known. where is the path that it is said of.
	fault *remark
	where string
	told  bool
}

func (h *held) isGone() bool { return h.gone }

// tellAt is when the fault is to be told; zero for never.
func (h *held) tellAt() time.Time {
	if h.fault == nil || h.told {
		return time.Time{}
	}
	return h.since.Add(patience)
}

// hold returns what is held of a path, with the time of its last change.
func (w *watch) hold(path string, sum uint64, now time.Time) *held {
	h := w.held[path]
	if h == nil {
		h = &held{since: now, changed: now, sum: sum}
		w.held[path] = h
	}
	if h.sum != sum {
		h.changed, h.sum = now, sum
	}
	h.gone, h.again = false, time.Time{}
	return h
}

// wrong notes what is wrong with what is held.
func (h *held) wrong(where, detail, effect string) {
	rem := fileProblem(where, detail, effect, false)
	h.fault, h.where = &rem, where
}

// until has it looked at again at a time, or a little later where that has passed.
func (h *held) until(at, now time.Time) bool {
	if h.again = at; !at.After(now) {
		h.again = now.Add(hold)
	}
	return false
}

// counts decides whether a new version of a file is to be put in force now.
func (w *watch) counts(r *reading, now time.Time) bool {
	h := w.hold(r.path, maphash.Bytes(seed, r.text.Data), now)
	return w.decide(r.path, h, func() bool { return w.weigh(r, h, now) })
}

// decide follows what is wrong with what is held, and forgets what is no longer held.
func (w *watch) decide(path string, h *held, weigh func() bool) bool {
	before := h.fault
	h.fault = nil
	counts := weigh()
	if counts {
		delete(w.held, path)
	}
	h.told = h.told && h.fault != nil && before != nil && h.fault.Detail == before.Detail && h.fault.Effect == before.Effect
	return counts
}

func (w *watch) weigh(r *reading, h *held, now time.Time) bool {
	f := w.store.files[r.path]
	effect := "it is left out"
	if f != nil && len(f.entries) > 0 {
		effect = effectFile
	}
	name := r.text.Name
	switch {
	case r.err != nil:
		h.wrong(name, "can't be read: "+r.err.Error(), effect)
		return false
	case r.blank():
		h.wrong(name+":1", "the file is empty, as while it is being written", effect+" until it holds something, or is removed")
		return false
	}
	last, known := w.whole[r.path]
	if r.open && (!w.synced || w.unknown[r.path]) { // What it will have in the end, nobody knows.
		h.wrong(name, "a program has the file open for writing", fmt.Sprintf("%s until that is done, or the file has not changed for %v", effect, settle))
		at := h.changed.Add(settle)
		return !now.Before(at) || h.until(at, now)
	}
	if known {
		if cut := cutOff(last.data, r.text.Data); cut != notCut {
			return w.weighCut(r, h, cut, last, now)
		}
	}
	inPlace := known && last.id == r.id
	switch {
	case inPlace && (len(r.text.Data) < len(last.data) || r.lacks(f.entries) || endsEarly(last.data, r.text.Data)):
		return w.settled(r, h, now)
	case w.synced && (r.suspect || r.open && (known || f == nil)):
		if !now.Before(h.changed.Add(hold)) && !r.open || !now.Before(h.since.Add(patience)) {
			return true
		}
		return h.until(h.changed.Add(hold), now)
	}
	return true
}

// settled reports whether a file has not changed for a while, and nobody is about to change it.
func (w *watch) settled(r *reading, h *held, now time.Time) bool {
	at := h.changed.Add(settle)
	return !r.open && !now.Before(at) || h.until(at, now)
}

// How a file is cut off, compared with its last good version.
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

// betweenDocuments reports whether a file has a document's end between two parts of it.
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

// endsEarly reports whether a file no longer ends with the end of a line, as one does of which a part is written.
func endsEarly(last, data []byte) bool {
	return endsLine(last) && !endsLine(data)
}

func endsLine(data []byte) bool { return bytes.HasSuffix(data, []byte{'\n'}) }

// weighCut decides about a file that is the beginning of its last good version. That may be what somebody has saved, or what
// was written so far, or all that is left. Only what ends with a line can be meant; within a document, only where it was put in
// place as a whole.
func (w *watch) weighCut(r *reading, h *held, c cut, last version, now time.Time) bool {
	renamed := last.id != r.id && !r.open
	where := fmt.Sprintf("%s:%d", r.text.Name, r.text.Line(len(bytes.TrimRight(r.text.Data, "\r\n"))))
	switch {
	case c == withinLine || r.suspect || c == betweenLines && !renamed:
		h.wrong(where, "the file is cut off: it ends within a document, which goes on in its last good version", effectFile+"; if that is meant, end it with a line \"...\"")
		return false
	case renamed:
		return true
	}
	h.wrong(where, "the file is cut off: its last good version has more documents", fmt.Sprintf("%s until it has not changed for %v", effectFile, settle))
	return w.settled(r, h, now)
}

// hasGone decides whether it counts that there is no file at a path any more.
func (w *watch) hasGone(path string, now time.Time) bool {
	h := w.hold(path, 0, now)
	h.gone = true
	return w.decide(path, h, func() bool { return w.weighGone(path, h, now) })
}

func (w *watch) weighGone(path string, h *held, now time.Time) bool {
	if w.movedAway(path) {
		return true
	}
	if w.removedFrom(filepath.Dir(path), path) {
		at := h.changed.Add(hold)
		return !now.Before(at) || h.until(at, now)
	}
	if !w.fresh { // What is known of the directories may be old.
		w.tree, w.fresh = scan(w.cfg.Path), true
		w.setWatches()
	}
	yes, where := w.tree.removed(path, w.cfg.Path)
	if !yes || w.replacedByNothing() {
		h.wrong(where, w.whyLost(where), "all objects of the files below stay as they were")
		return false
	}
	// A directory has gone, or another one is in its place, which may be being filled.
	at := h.changed.Add(settle)
	if later := w.last.Add(settle); later.After(at) {
		at = later
	}
	return !now.Before(at) || h.until(at, now)
}

// removedFrom reports whether a file has been removed from a directory that is still the one in which it was.
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

// replacedByNothing reports whether an empty directory is in the place of the one that had the manifests: one that is about to
// be filled, or the place at which a file system was mounted.
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
	return "this is no directory any more"
}

// tell reports what is wrong, once it has lasted, and takes back what no longer is. At the start, everything is told at once.
func (w *watch) tell(now time.Time) {
	found := map[string][]remark{}
	for path, err := range w.tree.errs {
		if w.held[path] == nil {
			found[path] = []remark{fileProblem(path, "can't be read: "+err.Error(), "it is left out", false)}
		}
	}
	if !w.synced && !w.tree.exists {
		found[w.cfg.Path] = []remark{fileProblem(w.cfg.Path, "there is nothing at this path",
			"nothing is programmed until there is", false)}
	}
	for _, path := range slices.Sorted(maps.Keys(w.held)) {
		h := w.held[path]
		if h.fault == nil || w.synced && !h.told && now.Before(h.since.Add(patience)) {
			continue
		}
		h.told = true
		found[h.where] = []remark{*h.fault}
	}
	for where := range w.told {
		if found[where] == nil {
			w.store.findings.set("held "+where, nil)
		}
	}
	for where, remarks := range found {
		w.store.findings.set("held "+where, remarks)
	}
	w.told = found
	w.store.findings.flush()
	w.publish()
}

// publish passes on what keeps the files from being in force as they are.
func (w *watch) publish() {
	var out []string
	for _, remarks := range w.told {
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

// faultyPaths are the files and directories with something that could not be taken as it is.
func (w *watch) faultyPaths() map[string]bool {
	out := map[string]bool{}
	for path := range w.store.faulty {
		out[path] = true
	}
	for path := range w.tree.errs {
		out[path] = true
	}
	for path, h := range w.held {
		if h.fault != nil {
			out[path] = true
		}
	}
	return out
}
