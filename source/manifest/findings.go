package manifest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"nodeproxy/source"
	"nodeproxy/source/document"
)

// issue is a finding about an object, before it is known where the object stands.
type issue struct {
	source.Finding
	line int // in the document, from 1, of a fault in its text; 0 where the field tells the place
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
		return r.entry.doc.Name
	}
	return r.Where
}

func startOf(r *remark) int {
	if r.entry != nil {
		return r.entry.doc.Start
	}
	return 0
}

// lineFinder finds the lines of remarks. It keeps the places of the last document's fields.
type lineFinder struct {
	doc    *document.Document
	fields *document.Fields
}

func (f *lineFinder) find(r *remark) int {
	doc := r.entry.doc
	if r.line > 0 {
		return doc.Line(r.line)
	}
	if f.doc != doc {
		f.doc, f.fields = doc, doc.Fields()
	}
	path := r.Field
	if prefix := r.entry.prefix; prefix != "" {
		path = strings.TrimSuffix(prefix+"."+path, ".")
		if strings.HasPrefix(r.Field, "[") {
			path = prefix + r.Field
		}
	}
	return f.fields.Line(path)
}
