package manifest

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"nodeproxy/source/controlplane"
	"nodeproxy/source/document"
)

// file is a file as it was last read.
type file struct {
	path string
	info fs.FileInfo // when it was looked at
	err  error       // for which it could not be read then
	data []byte      // of the version in force
	docs []*decoded  // of the version in force
	// decoded are the documents by a hash of their text. A new version of the file costs the decoding of those that changed.
	decoded map[uint64]*decoded
	entries []*entry // in force, in order
	// fault is what keeps the file from being in force as it is; empty if nothing does.
	fault string
	// without says that it is in force without objects that an API server would refuse. That is no fault of this node's, but the kernel may hold
	// rules for what they were before a start.
	without bool
}

// decoded is a document and its content.
type decoded struct {
	doc     *document.Document
	hash    uint64
	bodies  []*body
	entries []*entry // of the bodies, once the document has been in a version of the file that was looked at
	usedBy  *reading // the latest version of the file that holds the same document
}

// reading is a new version of a file that is not in force yet.
type reading struct {
	path string
	info fs.FileInfo // nil for what is no file, or is read only once
	data []byte
	err  error // the file can't be read
	docs []*decoded
}

// read reads a file. It returns false if the file changed meanwhile: then a program is writing it.
func (r *reading) read() (unchanged bool) {
	if r.err != nil {
		return true
	}
	var err error
	if r.data, err = os.ReadFile(r.path); err != nil {
		r.err = because(r.path, err)
		return true
	}
	info, err := os.Stat(r.path)
	return err == nil && sameVersion(r.info, info) && info.Size() == int64(len(r.data))
}

func sameVersion(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// The effects of a fault.
const (
	effectKept    = "all objects of the file stay as they were"
	effectBelow   = "all objects of the files below stay as they were"
	effectNothing = "it is left out"
	effectLeftOut = "the object is left out until this is corrected; all others are used"
)

// leftOut is the effect on an object of a file of which nothing was in force.
func leftOut(kind string) string {
	switch kind {
	case "Service":
		return "the Service is not proxied until this is corrected; all other objects are used"
	case "EndpointSlice":
		return "its endpoints get no traffic until this is corrected; all other objects are used"
	}
	return effectLeftOut
}

// unreadable says why a version can't be read as a whole, and on which line, if on any.
func (f *file) unreadable(r *reading) (line int, detail string) {
	switch {
	case r.err != nil:
		return 0, r.err.Error()
	case r.info != nil && len(bytes.TrimSpace(r.data)) == 0:
		return 1, "the file is empty, as while it is being written"
	case f.cutOff(r):
		return 1 + bytes.Count(bytes.TrimRight(r.data, "\r\n"), []byte{'\n'}),
			"the file is cut off: it ends within a document, which goes on in its last good version; if that is meant, end it with a line \"...\""
	}
	return 0, ""
}

// inPlace reports whether the file was not replaced by another one.
func (f *file) inPlace(r *reading) bool {
	return f.info != nil && r.info != nil && os.SameFile(f.info, r.info)
}

// cutOff reports whether a file was overwritten in place by the beginning of what it was, which ends within a document: port: 80 may
// be what is left of port: 8080.
func (f *file) cutOff(r *reading) bool {
	n := len(r.docs)
	return f.inPlace(r) && len(r.data) < len(f.data) && bytes.HasPrefix(f.data, r.data) &&
		n > 0 && n <= len(f.docs) && !bytes.Equal(bytes.TrimSpace(r.docs[n-1].doc.Text), bytes.TrimSpace(f.docs[n-1].doc.Text))
}

// endsWithinLine reports whether a file ends within a line, as one that was cut off may. A closing bracket ends a JSON text or a flow
// collection of YAML, with or without the end of the line.
func endsWithinLine(data []byte) bool {
	return len(data) > 0 && !bytes.ContainsAny(data[len(data)-1:], "\n}]")
}

// put looks at a new version of a file, and puts it in force if each of its documents can be read, or if nothing of the file is in
// force: then what can be read of it is used. It returns what there is to say of the version.
func (f *file) put(r *reading) (remarks []remark) {
	line, detail := f.unreadable(r)
	f.err, f.fault, f.without = r.err, "", false
	if r.info != nil {
		f.info = r.info
	}
	if detail != "" {
		where, effect := f.path, effectNothing
		if line > 0 {
			where = fmt.Sprintf("%s:%d", f.path, line)
		}
		if len(f.entries) > 0 {
			effect = effectKept
		}
		f.fault = where + ": " + detail
		return []remark{fileProblem(where, detail, effect)}
	}
	entries := make([]*entry, 0, len(r.docs))
	f.decoded = make(map[uint64]*decoded, len(r.docs))
	for _, d := range r.docs {
		f.decoded[d.hash] = d
		if d.entries == nil {
			for _, b := range d.bodies {
				d.entries = append(d.entries, &entry{body: b})
			}
		}
		for _, e := range d.entries {
			e.doc, e.order = d.doc, len(entries)
			entries = append(entries, e)
		}
	}
	isBad := func(e *entry) bool { return e.bad }
	maybeCut := func(e *entry) bool { return endsWithinLine(r.data) && e.doc == r.docs[len(r.docs)-1].doc }
	keep := len(f.entries) > 0 && slices.ContainsFunc(entries, isBad)
	for _, e := range entries {
		for _, is := range e.issues {
			if is.Effect == "" && keep {
				is.Effect = effectKept
			} else if is.Effect == "" {
				is.Effect = leftOut(e.id.Kind)
			}
			is.Object, is.LeftOut = e.id.String(), e.bad
			rem := remark{issue: is, entry: e}
			remarks = append(remarks, rem)
			switch {
			case !e.bad:
			case !keep && !e.unread && !maybeCut(e):
				f.without = true
			case f.fault == "":
				f.fault = rem.located()
			}
		}
	}
	if !keep {
		f.data, f.docs, f.entries = r.data, r.docs, slices.DeleteFunc(entries, isBad)
	}
	return remarks
}

var seed = maphash.MakeSeed()

// decodeAll splits new versions of files and decodes them on all CPUs. files are the versions read last, by path.
func decodeAll(readings []*reading, files map[string]*file) {
	isList := func(t document.Type) bool { return controlplane.Type(t).IsList() }
	var todo []*decoded
	for _, r := range readings {
		old := files[r.path]
		for _, doc := range document.Split(r.path, r.data, isList) {
			d := &decoded{doc: doc, hash: maphash.Bytes(seed, doc.Text)}
			if old != nil {
				if was := old.decoded[d.hash]; was != nil && was.usedBy != r && was.doc.Same(doc) {
					was.usedBy = r // The same text twice in a file makes two objects, though only one counts.
					d.bodies, d.entries = was.bodies, was.entries
				}
			}
			if d.bodies == nil {
				todo = append(todo, d)
			}
			r.docs = append(r.docs, d)
		}
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(todo)) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(todo)); i = next.Add(1) - 1 {
				todo[i].bodies = decode(todo[i].doc)
			}
		})
	}
	wg.Wait()
}
