package manifest

import (
	"bytes"
	"cmp"
	"fmt"
	"hash/maphash"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"nodeproxy/source/controlplane"
	"nodeproxy/source/document"
)

// file is a file as it was last read, and those of its objects that are in force.
type file struct {
	path string
	// decoded are the documents by a hash of their text. A new version of the file costs the decoding of those that changed.
	decoded map[uint64]*decodedDocument
	entries []*entry // in force, in order; of a broken document the last good version
	remarks []remark
	// bad is set if there are documents that can't be used. fault is about the first of them that can't be read, that the file ends
	// in, or that leaves a last good version in force; empty if there is none.
	bad   bool
	fault string
}

// decodedDocument is a document and its content.
type decodedDocument struct {
	doc     *document.Document
	hash    uint64
	bodies  []*body
	entries []*entry // of the bodies, once the document has been in a version that was put in force
	usedBy  *reading // the latest version of the file that holds the same document
}

// reading is a new version of a file that is not in force yet.
type reading struct {
	path    string
	text    *document.Text
	err     error // the file can't be read
	id      fileID
	open    bool // a program had it open for writing
	decoded []*decodedDocument
	// suspect is set if something is newly broken: perhaps a program is writing the file.
	suspect bool
}

// blank reports whether the file is empty.
func (r *reading) blank() bool { return len(bytes.TrimSpace(r.text.Data)) == 0 }

// whole reports whether every document could be read, even if some can't be used.
func (r *reading) whole() bool {
	return r.err == nil && !slices.ContainsFunc(r.decoded, func(d *decodedDocument) bool {
		return slices.ContainsFunc(d.bodies, func(b *body) bool { return b.unread })
	})
}

// lacks reports whether one of the objects is not in this version of a file.
func (r *reading) lacks(entries []*entry) bool {
	has := map[controlplane.ID]bool{}
	for _, d := range r.decoded {
		for _, b := range d.bodies {
			has[b.id] = true
		}
	}
	return slices.ContainsFunc(entries, func(e *entry) bool { return e.obj != nil && !has[e.id] })
}

var seed = maphash.MakeSeed()

// isList reports whether a JSON document is a list, each of whose items is a document.
func isList(t document.Type) bool { return controlplane.Type(t).IsList() }

// decodeAll splits new versions of files and decodes them on all CPUs. files are the versions in force, by path.
func decodeAll(readings []*reading, files map[string]*file) {
	var todo []*decodedDocument
	for _, r := range readings {
		if r.err != nil || r.text == nil {
			continue
		}
		old := files[r.path]
		for _, doc := range document.Split(r.text, isList) {
			d := &decodedDocument{doc: doc, hash: maphash.Bytes(seed, doc.Bytes())}
			if old != nil {
				if was := old.decoded[d.hash]; was != nil && was.usedBy != r && was.doc.Same(doc) {
					was.usedBy = r // The same text twice in a file makes two objects, though only one counts.
					d.bodies, d.entries = was.bodies, was.entries
				}
			}
			if d.bodies == nil {
				todo = append(todo, d)
			}
			r.decoded = append(r.decoded, d)
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
	fresh := map[*decodedDocument]bool{}
	for _, d := range todo {
		fresh[d] = true
	}
	for _, r := range readings {
		for _, d := range r.decoded {
			r.suspect = r.suspect || fresh[d] && slices.ContainsFunc(d.bodies, func(b *body) bool { return b.bad })
		}
	}
}

// The effects of a fault on an object.
const (
	effectKept    = "its last good version stays in force"
	effectFile    = "all objects of the file stay as they were"
	effectLeftOut = "the object is left out until this is corrected; all others are used"
)

// leftOut is the effect on an object that is in force in no version.
func leftOut(kind string) string {
	switch kind {
	case "Service":
		return "the Service is not proxied until this is corrected; all other objects are used"
	case "EndpointSlice":
		return "its endpoints get no traffic until this is corrected; all other objects are used"
	}
	return effectLeftOut
}

// put puts a new version of a file in force. If a document is broken, the last good version of its object stays in force; if it
// is not known which object that is, the whole file stays as it was. An object that is missing is not gone while there is a
// document that can't be read: it may be in that one, or hidden by a fault before it.
func (f *file) put(r *reading) {
	f.decoded = make(map[uint64]*decodedDocument, len(r.decoded))
	f.remarks, f.fault = nil, ""
	entries := make([]*entry, 0, len(r.decoded))
	bad := 0
	for _, d := range r.decoded {
		f.decoded[d.hash] = d
		if d.entries == nil {
			for _, b := range d.bodies {
				d.entries = append(d.entries, &entry{body: b})
			}
		}
		for _, e := range d.entries {
			e.doc, e.order = d.doc, len(entries)
			entries = append(entries, e)
			if e.bad {
				bad++
			}
		}
	}
	var kept map[*entry]*entry
	whole := false
	if f.bad = bad > 0; f.bad {
		kept, whole = keep(entries, f.entries)
	}
	for _, e := range entries {
		effect := leftOut(e.id.Kind)
		if whole {
			effect = effectFile
		} else if kept[e] != nil {
			effect = effectKept
		}
		for _, is := range e.issues {
			if is.Effect == "" {
				is.Effect = effect
			}
			is.Object, is.LeftOut = e.id.String(), e.bad
			rem := remark{issue: is, entry: e}
			f.remarks = append(f.remarks, rem)
			if f.fault == "" && e.bad && (whole || kept[e] != nil || e.unread || e == entries[len(entries)-1] && !endsLine(r.text.Data)) {
				f.fault = rem.located()
			}
		}
	}
	if whole {
		return
	}
	if bad == 0 {
		f.entries = entries
		return
	}
	before := f.entries
	f.entries = nil
	for _, e := range entries {
		if last := kept[e]; last != nil {
			last.order = e.order
			f.entries = append(f.entries, last)
		} else if !e.bad {
			f.entries = append(f.entries, e)
		}
	}
	if !r.whole() {
		f.keepMissing(before, len(entries))
	}
}

// keepMissing keeps the objects in force that a new version of the file lacks, since they may be in the part that can't be read.
func (f *file) keepMissing(before []*entry, order int) {
	has := map[controlplane.ID]bool{}
	var missing []string
	for _, e := range f.entries {
		has[e.id] = true
	}
	for _, e := range before {
		if e.obj != nil && !has[e.id] {
			e.order = order
			order++
			f.entries = append(f.entries, e)
			missing = append(missing, e.id.String())
		}
	}
	if len(missing) > 0 {
		f.remarks = append(f.remarks, fileProblem(f.path,
			fmt.Sprintf("the file can't be read whole, and it is not known whether it still has %s", enumerate(missing)),
			"they stay in force as they were", false))
	}
}

// enumerate names the first of a list, and the number of the others.
func enumerate(names []string) string {
	const most = 3
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more objects", strings.Join(names[:most], ", "), len(names)-most)
}

// keep finds the last good version of each broken document's object among those in force. whole is set if a broken document may
// be any of several objects that are missing now.
func keep(entries, inForce []*entry) (kept map[*entry]*entry, whole bool) {
	kept = map[*entry]*entry{}
	missing := map[controlplane.ID]*entry{}
	for _, e := range inForce {
		if e.obj != nil && missing[e.id] == nil {
			missing[e.id] = e
		}
	}
	good := map[controlplane.ID]bool{}
	for _, e := range entries {
		if !e.bad {
			good[e.id] = true
			delete(missing, e.id)
		}
	}
	claim := func(b *entry, last *entry) {
		kept[b] = last
		delete(missing, last.id)
	}
	var open []*entry
	for _, b := range entries {
		if !b.bad {
			continue
		}
		if last := missing[b.id]; last != nil {
			claim(b, last)
		} else if !good[b.id] {
			open = append(open, b)
		}
	}
	unknown := 0
	for _, b := range open {
		// The namespace may follow the fault, and an unknown kind may be any that is misspelt.
		var fits []*entry
		for id, e := range missing {
			if id.Name == b.id.Name && (id.Kind == b.id.Kind || b.noKind) {
				fits = append(fits, e)
			}
		}
		if len(fits) == 1 {
			claim(b, fits[0])
		} else if b.anonymous() {
			unknown++
		}
	}
	if unknown == 0 || len(missing) == 0 {
		return kept, false
	}
	if unknown == 1 && len(missing) == 1 {
		for _, b := range open {
			if kept[b] == nil && b.anonymous() {
				for _, last := range missing {
					claim(b, last)
				}
			}
		}
		return kept, false
	}
	return kept, true
}

// compareEntries orders entries of one object: by file name, then by place.
func compareEntries(a, b *entry) int {
	return cmp.Or(cmp.Compare(a.doc.Name, b.doc.Name), cmp.Compare(a.order, b.order))
}
