package manifest

import (
	"bytes"
	"fmt"
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
	// The version in force. A new version of the file costs the decoding of those documents that changed.
	data    []byte
	docs    []*decoded
	objects []*object // in order
	// fault is what keeps the file from being in force as it is; empty if nothing does.
	fault string
	// without says that it is in force without objects that an API server would refuse. That is no fault of this node's, but the kernel may hold
	// rules for what they were before a start.
	without bool
}

// decoded is a document and its objects.
type decoded struct {
	*document.Document
	objects []*object
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
		n > 0 && n <= len(f.docs) && !bytes.Equal(bytes.TrimSpace(r.docs[n-1].Text), bytes.TrimSpace(f.docs[n-1].Text))
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
		if len(f.objects) > 0 {
			effect = effectKept
		}
		f.fault = where + ": " + detail
		return []remark{fileProblem(where, detail, effect)}
	}
	var objects []*object
	for _, d := range r.docs {
		for _, o := range d.objects {
			o.doc, o.order = d.Document, len(objects)
			objects = append(objects, o)
		}
	}
	isBad := func(o *object) bool { return o.bad }
	keep := len(f.objects) > 0 && slices.ContainsFunc(objects, isBad)
	for _, o := range objects {
		maybeCut := endsWithinLine(r.data) && o.doc == r.docs[len(r.docs)-1].Document
		for _, rem := range o.remarks {
			if rem.Effect == "" && keep {
				rem.Effect = effectKept
			} else if rem.Effect == "" {
				rem.Effect = leftOut(o.id.Kind)
			}
			rem.Object, rem.LeftOut = o.id.String(), o.bad
			remarks = append(remarks, rem)
			switch {
			case !o.bad:
			case !keep && !o.unread && !maybeCut:
				f.without = true
			case f.fault == "":
				fault := rem.located(&lineFinder{})
				fault.Effect = ""
				f.fault = fault.String()
			}
		}
	}
	if !keep {
		f.data, f.docs, f.objects = r.data, r.docs, slices.DeleteFunc(objects, isBad)
	}
	return remarks
}

// decodeAll splits new versions of files and decodes what they have that the versions in force have not, on all CPUs. files are these, by
// path.
func decodeAll(readings []*reading, files map[string]*file) {
	type content struct {
		text string
		json bool
		list document.Type
	}
	contentOf := func(d *document.Document) content { return content{string(d.Text), d.JSON, d.List} }
	isList := func(t document.Type) bool { return controlplane.Type(t).IsList() }
	var todo []*decoded
	for _, r := range readings {
		known := map[content]*decoded{}
		if f := files[r.path]; f != nil {
			for _, d := range f.docs {
				if isUnread := len(d.objects) == 1 && d.objects[0].unread; !isUnread { // The line of its fault may be another now.
					known[contentOf(d.Document)] = d
				}
			}
		}
		for _, doc := range document.Split(r.path, r.data, isList) {
			d := &decoded{Document: doc}
			r.docs = append(r.docs, d)
			key := contentOf(doc)
			if was := known[key]; was != nil {
				d.objects = was.objects
				delete(known, key) // The same text twice in a file makes two objects, though only one counts.
			} else {
				todo = append(todo, d)
			}
		}
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(todo)) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(todo)); i = next.Add(1) - 1 {
				todo[i].objects = decode(todo[i].Document)
			}
		})
	}
	wg.Wait()
}
