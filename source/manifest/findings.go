package manifest

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"

	"nodeproxy/source"
	"nodeproxy/source/document"
)

// remark is a finding about an object, whose place is found when it is reported, or about a place, which Where names.
type remark struct {
	source.Finding
	object *object // nil for a finding about a place
	line   int     // of a fault in the text of a document; 0 to find it by the field
}

// fileProblem is a remark about a file or directory as a whole.
func fileProblem(where, detail, effect string) remark {
	return remark{Finding: source.Finding{
		Severity: source.Problem, Where: where, Detail: detail, Effect: effect, LeftOut: effect == effectNothing,
	}}
}

// file returns the file that a remark is about.
func (r *remark) file() string {
	if r.object == nil {
		return r.Where
	}
	return r.object.doc.Name
}

// said returns the finding without what changes with the lines above it.
func (r *remark) said() source.Finding {
	f := r.Finding
	f.Where, f.LeftOut = r.file(), false
	return f
}

// located returns the finding with its place.
func (r *remark) located(lines *lineFinder) source.Finding {
	f := r.Finding
	if r.object != nil {
		f.Where = fmt.Sprintf("%s:%d", r.file(), lines.find(r))
	}
	return f
}

// reporter reports each finding once while it holds.
type reporter struct {
	report  source.Report
	mu      sync.Mutex                  // for current
	current map[string][]source.Finding // by topic
	fresh   []remark
}

// set replaces the findings on a topic, such as a file or an object. It keeps new ones for flush.
func (r *reporter) set(topic string, remarks []remark) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := map[source.Finding]bool{}
	for _, f := range r.current[topic] {
		known[f] = true
	}
	delete(r.current, topic)
	for _, rem := range remarks {
		f := rem.said()
		if !known[f] {
			known[f] = true
			r.fresh = append(r.fresh, rem)
		}
		r.current[topic] = append(r.current[topic], f)
	}
}

// setPlaces replaces what is wrong with files and directories as a whole, and returns it with the places.
func (r *reporter) setPlaces(faults map[string]error, effect string) (located []string) {
	var remarks []remark
	for _, where := range slices.Sorted(maps.Keys(faults)) {
		remarks = append(remarks, fileProblem(where, faults[where].Error(), effect))
		located = append(located, where+": "+faults[where].Error())
	}
	r.set("places", remarks)
	return located
}

// all returns the findings that hold, in order of topic.
func (r *reporter) all() []source.Finding {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []source.Finding
	for _, topic := range slices.Sorted(maps.Keys(r.current)) {
		out = append(out, r.current[topic]...)
	}
	return out
}

// flush reports the new findings in order of file and line.
func (r *reporter) flush() {
	fresh := r.fresh
	r.fresh = nil
	if r.report == nil {
		return
	}
	// Documents are parsed again to find a line; in this order each of them only once.
	start := func(r *remark) int {
		if r.object == nil {
			return 0
		}
		return r.object.doc.Line
	}
	slices.SortStableFunc(fresh, func(a, b remark) int {
		return cmp.Or(cmp.Compare(a.file(), b.file()), cmp.Compare(start(&a), start(&b)))
	})
	var lines lineFinder
	for i := range fresh {
		if fresh[i].object != nil {
			fresh[i].line = lines.find(&fresh[i])
		}
	}
	slices.SortStableFunc(fresh, func(a, b remark) int {
		return cmp.Or(cmp.Compare(a.file(), b.file()), cmp.Compare(a.line, b.line), cmp.Compare(a.Object, b.Object),
			cmp.Compare(a.Field, b.Field), cmp.Compare(a.Detail, b.Detail))
	})
	for _, rem := range fresh {
		r.report(rem.located(&lines))
	}
}

// lineFinder finds the lines of remarks. It keeps the last document that it has parsed.
type lineFinder struct {
	doc  *document.Document
	root *yaml.Node
}

func (f *lineFinder) find(r *remark) int {
	if r.line > 0 {
		return r.line
	}
	if doc := r.object.doc; f.doc != doc {
		f.doc = doc
		f.root, _ = doc.Parse()
	}
	if f.root == nil {
		return f.doc.Line
	}
	path := r.Field
	if prefix := r.object.prefix; prefix != "" && strings.HasPrefix(path, "[") {
		path = prefix + path
	} else if prefix != "" {
		path = strings.TrimSuffix(prefix+"."+path, ".")
	}
	return document.Line(f.root, path)
}
