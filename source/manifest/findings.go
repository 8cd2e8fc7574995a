package manifest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"nodeproxy/source"
)

func sayf(format string, args ...any) string { return fmt.Sprintf(format, args...) }

// issue is what is to be said of an object, before it is known where the object stands.
type issue struct {
	severity source.Severity
	field    string
	detail   string
	effect   string // empty for one that lets the object be refused: what that means is seen later
	offset   int    // in the document's text, where positioned
	line     int    // in the document, where positioned and offset is 0; from 1
	at       bool   // positioned: offset or line tell the place, not the field
	leftOut  bool   // as in source.Finding
}

// checker collects the issues of one object.
type checker struct {
	issues  []issue
	refused bool
}

// refuse reports a fault for which the API server would not take the object.
func (c *checker) refuse(field, format string, args ...any) {
	c.refused = true
	c.issues = append(c.issues, issue{severity: source.Problem, field: field, detail: sayf(format, args...)})
}

// problem reports a fault that leaves the object in use.
func (c *checker) problem(field, effect, format string, args ...any) {
	c.issues = append(c.issues, issue{severity: source.Problem, field: field, detail: sayf(format, args...), effect: effect})
}

// note reports what is so by design.
func (c *checker) note(field, effect, format string, args ...any) {
	c.issues = append(c.issues, issue{severity: source.Note, field: field, detail: sayf(format, args...), effect: effect})
}

// remark is an issue with its place.
type remark struct {
	issue
	object string
	entry  *entry // where it stands; nil where it stands nowhere
	file   string // for issues of a file as a whole
}

// said is what makes two findings the same, though lines above them come and go.
type said struct {
	severity                            source.Severity
	file, object, field, detail, effect string
}

func (r *remark) said() said {
	s := said{r.severity, r.file, r.object, r.field, r.detail, r.effect}
	if r.entry != nil {
		s.file = r.entry.doc.text.name
	}
	return s
}

// located is what a remark says, with its place in front.
func (r *remark) located() string {
	var lines lineFinder
	f := source.Finding{Where: sayf("%s:%d", fileOf(r), lines.find(r)), Object: r.object, Field: r.field, Detail: r.detail}
	return f.String()
}

// reporter reports findings, each once as long as it holds.
type reporter struct {
	report  source.Report
	current map[string][]said // by owner: what was last said
	fresh   []remark
}

// tell replaces what is to be said by one owner: a file, or one side of an object. What it had not said yet is put by for
// flush.
func (r *reporter) tell(owner string, remarks []remark) {
	before := r.current[owner]
	if len(remarks) == 0 {
		if before != nil {
			delete(r.current, owner)
		}
		return
	}
	known := map[said]bool{}
	for _, s := range before {
		known[s] = true
	}
	now := make([]said, 0, len(remarks))
	for _, rem := range remarks {
		s := rem.said()
		now = append(now, s)
		if !known[s] {
			known[s] = true
			r.fresh = append(r.fresh, rem)
		}
	}
	r.current[owner] = now
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
		l := located{file: fileOf(rem)}
		l.finding = source.Finding{
			Severity: rem.severity, Object: rem.object, Field: rem.field, Detail: rem.detail, Effect: rem.effect, Where: l.file,
			LeftOut: rem.leftOut,
		}
		if rem.entry != nil {
			l.line = lines.find(rem)
			l.finding.Where = sayf("%s:%d", l.file, l.line)
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
	return r.file
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
	path := r.field
	if prefix := r.entry.prefix; prefix != "" {
		path = strings.TrimSuffix(prefix+"."+path, ".")
		if strings.HasPrefix(r.field, "[") {
			path = prefix + r.field
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
