package manifest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"nodeproxy/source"
)

// issue is a finding about an object, before it is known where the object stands.
type issue struct {
	source.Finding
	offset int  // in the document's text, where positioned
	line   int  // in the document, where positioned and offset is 0; from 1
	at     bool // positioned: offset or line tell the place, not the field
}

// remark is an issue with its place.
type remark struct {
	issue
	entry *entry // where it stands; nil where it stands nowhere, or at Finding.Where
}

// fileProblem is a remark about a file as a whole.
func fileProblem(where, detail, effect string, leftOut bool) remark {
	return remark{issue: issue{
		Finding: source.Finding{Severity: source.Problem, Where: where, Detail: detail, Effect: effect, LeftOut: leftOut},
	}}
}

// said is what makes two findings the same, though lines above them come and go.
func (r *remark) said() source.Finding {
	f := r.Finding
	f.Where, f.LeftOut = fileOf(r), false
	return f
}

// located is what a remark says, with its place in front.
func (r *remark) located() string {
	var lines lineFinder
	f := r.Finding
	f.Where, f.Effect = fmt.Sprintf("%s:%d", fileOf(r), lines.find(r)), ""
	return f.String()
}

// reporter reports findings, each once as long as it holds.
type reporter struct {
	report  source.Report
	current map[string][]source.Finding // by topic: what was last said
	fresh   []remark
}

// set replaces what there is to say on a topic, such as a file or an object. What is new is kept for flush.
func (r *reporter) set(topic string, remarks []remark) {
	before := r.current[topic]
	if len(remarks) == 0 {
		if before != nil {
			delete(r.current, topic)
		}
		return
	}
	known := map[source.Finding]bool{}
	for _, s := range before {
		known[s] = true
	}
	now := make([]source.Finding, 0, len(remarks))
	for _, rem := range remarks {
		s := rem.said()
		now = append(now, s)
		if !known[s] {
			known[s] = true
			r.fresh = append(r.fresh, rem)
		}
	}
	r.current[topic] = now
}

// flush reports the fresh findings in order of file and line.
func (r *reporter) flush() {
	fresh := r.fresh
	r.fresh = nil
	if r.report == nil {
		return
	}
	type located struct {
		file    string
		line    int
		finding source.Finding
	}
	// Documents are parsed again to find a line; in this order each of them only once.
	slices.SortStableFunc(fresh, func(a, b remark) int {
		return cmp.Or(cmp.Compare(fileOf(&a), fileOf(&b)), cmp.Compare(startOf(&a), startOf(&b)))
	})
	out := make([]located, 0, len(fresh))
	var lines lineFinder
	for i := range fresh {
		rem := &fresh[i]
		l := located{file: fileOf(rem), finding: rem.Finding}
		if rem.entry != nil {
			l.line = lines.find(rem)
			l.finding.Where = fmt.Sprintf("%s:%d", l.file, l.line)
		}
		out = append(out, l)
	}
	slices.SortStableFunc(out, func(a, b located) int {
		return cmp.Or(cmp.Compare(a.file, b.file), cmp.Compare(a.line, b.line), cmp.Compare(a.finding.Object, b.finding.Object),
			cmp.Compare(a.finding.Field, b.finding.Field), cmp.Compare(a.finding.Detail, b.finding.Detail))
	})
	for _, l := range out {
		r.report(l.finding)
	}
}

func fileOf(r *remark) string {
	if r.entry != nil {
		return r.entry.doc.text.name
	}
	return r.Where
}

func startOf(r *remark) int {
	if r.entry != nil {
		return r.entry.doc.start
	}
	return 0
}

// lineFinder finds the lines of fields. It keeps the skeleton of the last document.
type lineFinder struct {
	doc  *document
	tree *tree
}

func (f *lineFinder) find(r *remark) int {
	doc := r.entry.doc
	first := doc.text.line(doc.start)
	if r.at {
		if r.offset > 0 {
			return doc.text.line(min(doc.start+r.offset, max(len(doc.text.data)-1, 0)))
		}
		return first + max(r.line, 1) - 1
	}
	if f.doc != doc {
		f.doc, f.tree = doc, skeleton(doc)
	}
	if f.tree == nil {
		return first
	}
	path := r.Field
	if prefix := r.entry.prefix; prefix != "" {
		path = strings.TrimSuffix(prefix+"."+path, ".")
		if strings.HasPrefix(r.Field, "[") {
			path = prefix + r.Field
		}
	}
	pos := f.tree.find(path).pos
	if doc.json {
		return doc.text.line(doc.start + pos)
	}
	return first + pos - 1
}

// skeleton parses a document for its fields' places; nil where it can't be parsed.
func skeleton(doc *document) *tree {
	data := doc.bytes()
	if doc.json {
		if !wellFormed(data) {
			return nil
		}
		return jsonTree(data, span{0, len(data)}, 0)
	}
	node, err := parseYAML(data)
	if err != nil || node == nil {
		return nil
	}
	return yamlTree(node, firstLine(node), 0)
}
