package manifest

import (
	"bytes"
	gojson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sort"
	"strings"

	"go.yaml.in/yaml/v3"
	"sigs.k8s.io/json"

	"nodeproxy/source"
	"nodeproxy/source/controlplane"
)

// body is what was read from a document, or from one item of a List. It does not change, and outlives the file's
// text when a new version of the file holds the same document.
type body struct {
	id     controlplane.ID // of a broken document: as far as it can be told
	obj    any             // what controlplane.Type.New has made; nil for other kinds
	issues []issue
	bad    bool              // broken or refused: the last good version counts
	other  controlplane.Type // of an object that is not used
	prefix string            // of field paths, within a List
}

// unread reports whether this is what could not be read: text that breaks the rules of YAML or JSON.
func (b *body) unread() bool {
	return b.bad && slices.ContainsFunc(b.issues, func(is issue) bool { return is.at })
}

// entry is a body at its place.
type entry struct {
	*body
	doc   *document
	order int // within the file
	mark  int // when last seen, see model.replaceEntries
}

// decode reads a document. It returns a body for each object, broken ones included.
func decode(doc *document) []*body {
	data := doc.bytes()
	if doc.json {
		return []*body{decodeJSON(data, doc.typ)}
	}
	node, err := parseYAML(data)
	if err != nil {
		e := asYAMLError(err)
		line := faultLine(data, e.line)
		return []*body{broken(identifyYAML(data, line), issue{Finding: source.Finding{Detail: e.detail}, line: line, at: true})}
	}
	if node == nil || node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" {
		return nil
	}
	if node.Kind != yaml.MappingNode {
		return []*body{broken(controlplane.ID{}, issue{
			Finding: source.Finding{Detail: "a document must be one object, a mapping of apiVersion, kind, metadata …"},
			line:    node.Line, at: true,
		})}
	}
	if items, typ := yamlList(node); items != nil {
		var out []*body
		for i, item := range items {
			b := decodeYAML(item, len(data), typ)
			b.prefix = fmt.Sprintf("items[%d]", i)
			out = append(out, b)
		}
		return out
	}
	return []*body{decodeYAML(node, len(data), controlplane.Type{})}
}

func decodeYAML(node *yaml.Node, size int, typ controlplane.Type) *body {
	if key := secondHead(node); key != nil {
		return broken(controlplane.ID{}, issue{line: key.Line, at: true, Finding: source.Finding{Detail: fmt.Sprintf(
			`a second %q in one object: two objects need a line "---" between them, or in a List a "- " before each`, key.Value)}})
	}
	js, err := yamlToJSON(node, min(size, 1<<16))
	if err != nil {
		e := asYAMLError(err)
		return broken(controlplane.ID{}, issue{Finding: source.Finding{Detail: e.detail}, line: e.line, at: true})
	}
	return decodeJSON(js, typ)
}

// secondHead returns the first key of a mapping that tells what an object is and is there for the second time; nil if there is
// none. It is the first key of another object that no line "---" separates from the one before. If the last value of each key
// counted, as it does within an object, all objects but the last would be lost.
func secondHead(node *yaml.Node) *yaml.Node {
	var apiVersion, kind bool
	for i := 0; i+1 < len(node.Content) && node.Kind == yaml.MappingNode; i += 2 {
		var seen *bool
		switch node.Content[i].Value {
		case "apiVersion":
			seen = &apiVersion
		case "kind":
			seen = &kind
		default:
			continue
		}
		if *seen {
			return node.Content[i]
		}
		*seen = true
	}
	return nil
}

// yamlList returns the items of a List that holds nothing unexpected, and the type of those that don't tell their own.
func yamlList(node *yaml.Node) (items []*yaml.Node, typ controlplane.Type) {
	for i := 0; i < len(node.Content); i += 2 {
		value := node.Content[i+1]
		switch node.Content[i].Value {
		case "kind":
			typ.Kind = value.Value
		case "apiVersion":
			typ.APIVersion = value.Value
		case "metadata":
		case "items":
			if value.Kind == yaml.SequenceNode {
				items = value.Content
			}
		default:
			return nil, typ
		}
	}
	if !typ.IsList() {
		return nil, typ
	}
	return items, typ.Item()
}

func broken(id controlplane.ID, is issue) *body {
	is.Severity = source.Problem
	return &body{id: id, bad: true, issues: []issue{is}}
}

func wellFormed(data []byte) bool { return gojson.Valid(data) }

// head is what tells one object from another.
type head struct {
	controlplane.Type
	namespace, name string
}

// readHead reads as much of the head as can be found, also in broken JSON.
func readHead(data []byte) head {
	var h head
	members, _ := jsonMembers(data, 0)
	for _, m := range members {
		switch m.key {
		case "kind":
			h.Kind, _ = jsonString(m.value.of(data))
		case "apiVersion":
			h.APIVersion, _ = jsonString(m.value.of(data))
		case "metadata":
			inner, _ := jsonMembers(data, m.value.start)
			for _, m := range inner {
				switch m.key {
				case "name":
					h.name, _ = jsonString(m.value.of(data))
				case "namespace":
					h.namespace, _ = jsonString(m.value.of(data))
				}
			}
		}
	}
	return h
}

func (h head) id() controlplane.ID { return h.ID(h.namespace, h.name) }

// faultLine finds the line of a fault: the first from which on every further line leaves the document broken. The parser
// tells only where the construct around it began, if at all.
func faultLine(data []byte, hint int) int {
	const (
		most  = 300 // lines to look at
		after = 4   // so many more broken lines make sure that this is no value that goes on over several lines
	)
	var ends []int // offsets after each line
	for i, c := range data {
		if c == '\n' {
			ends = append(ends, i+1)
		}
	}
	ends = append(ends, len(data))
	first, run := 0, 0
	for n := max(hint-2, 0); n < len(ends) && n < hint+most; n++ {
		if _, err := parseYAML(data[:ends[n]]); err == nil {
			run = 0
			continue
		}
		if run++; run == 1 {
			first = n + 1
		}
		if run > after {
			return first
		}
	}
	if run > 0 {
		return first
	}
	return max(hint, 1)
}

// identifyYAML says which object a broken document is about, from the lines before the fault.
func identifyYAML(data []byte, line int) controlplane.ID {
	lines := bytes.SplitAfter(data, []byte{'\n'})
	if line <= 0 || line > len(lines) {
		line = len(lines)
	}
	for n := line; n > 0 && n > line-20; n-- {
		node, err := parseYAML(bytes.Join(lines[:n], nil))
		if err != nil || node == nil || node.Kind != yaml.MappingNode {
			continue
		}
		if js, err := yamlToJSON(node, 1024); err == nil {
			h := readHead(js)
			if h.name == "" || !h.Used() {
				return controlplane.ID{}
			}
			return h.id()
		}
	}
	return controlplane.ID{}
}

// decodeJSON reads one object. typ stands in where it has none.
func decodeJSON(data []byte, typ controlplane.Type) *body {
	h := readHead(data)
	if h.Type == (controlplane.Type{}) {
		h.Type = typ
	}
	isObject := len(data) > 0 && data[0] == '{'
	if !isObject || !h.Used() {
		if is, ok := syntaxIssue(data); !ok {
			return broken(h.id(), is)
		}
	}
	if !isObject {
		return broken(controlplane.ID{}, issue{
			Finding: source.Finding{Detail: "a document must be one object with apiVersion, kind, metadata …"}, line: 1, at: true,
		})
	}
	if field, detail := h.Problem(); detail != "" && !h.IsList() {
		return broken(h.id(), issue{Finding: source.Finding{Field: field, Detail: detail}})
	}
	b := &body{id: h.id()}
	switch {
	case h.Used():
		b.read(data, h.Type)
	case h.IsList():
		b.checkList(data)
	default:
		b.other = h.Type
		b.add(source.Finding{Detail: h.WhyNotProxied(), Effect: "not proxied"})
	}
	return b
}

func (b *body) add(f source.Finding) { b.issues = append(b.issues, issue{Finding: f}) }

// refuse adds a fault for which the object can't be used.
func (b *body) refuse(field, detail string) {
	b.bad = true
	b.add(source.Finding{Severity: source.Problem, Field: field, Detail: detail})
}

// checkList says what keeps a List from being read.
func (b *body) checkList(data []byte) {
	members, _ := jsonMembers(data, 0)
	for _, m := range members {
		switch m.key {
		case "kind", "apiVersion", "metadata":
		case "items":
			if raw := m.value.of(data); raw[0] != '[' && string(raw) != "null" {
				b.refuse("items", "must be a list")
			} else if items, _, _ := jsonItems(data, m.value.start); len(items) > 0 {
				b.refuse("items", "a List within a List, or beside unknown fields, is not read")
			}
		default:
			b.refuse(m.key, fmt.Sprintf("a List has no field %.60q", m.key))
		}
	}
}

// read decodes an object and admits it as the API server would.
func (b *body) read(data []byte, typ controlplane.Type) {
	obj := typ.New()
	strict, err := json.UnmarshalStrict(data, obj)
	if err != nil {
		b.decodingIssues(data, typ, err)
		return
	}
	for _, s := range strict {
		field, detail := "", s.Error()
		if fe, ok := errors.AsType[json.FieldError](s); ok {
			field = fe.FieldPath()
			detail, _, _ = strings.Cut(detail, " \"")
		}
		effect := "the field is ignored, the rest of the object is used"
		if strings.HasPrefix(detail, "duplicate") {
			effect = "the last of them is used"
		}
		b.add(source.Finding{Severity: source.Problem, Field: field, Detail: detail, Effect: effect})
	}
	found, refused := controlplane.Admit(obj)
	for _, f := range found {
		b.add(f)
	}
	if b.bad = refused; !refused {
		b.obj = obj
	}
}

// syntaxIssue says where JSON breaks; true where it does not.
func syntaxIssue(data []byte) (issue, bool) {
	var v gojson.RawMessage
	err := gojson.Unmarshal(data, &v)
	if err == nil {
		return issue{}, true
	}
	is := issue{Finding: source.Finding{Severity: source.Problem, Detail: "broken JSON: " + err.Error()}, at: true, line: 1}
	if syntax, ok := errors.AsType[*gojson.SyntaxError](err); ok {
		is.offset = max(int(syntax.Offset)-1, 0)
	}
	return is, false
}

// decodingIssues says which fields can't be read. The decoder names none, or not which of a list; so fields are taken
// away until it no longer complains.
func (b *body) decodingIssues(data []byte, typ controlplane.Type, err error) {
	b.bad = true
	if is, ok := syntaxIssue(data); !ok {
		b.issues = append(b.issues, is)
		return
	}
	fails := func(data []byte) error {
		return json.UnmarshalCaseSensitivePreserveInts(data, typ.New())
	}
	const most = 5
	for range most {
		steps, field, cause := findFault(data, fails)
		if cause == nil {
			break
		}
		if steps == nil {
			b.refuse("", plainError(err, nil))
			return
		}
		at := treeAt(data, steps).span
		b.refuse(field, plainError(cause, at.of(data)))
		data = blank(data, at)
	}
}

// findFault finds the first value without which data decodes further: the way to it from the root, its field path, and
// what the decoder says of it. The steps are nil where no part alone is at fault; the error is nil where nothing is.
func findFault(data []byte, fails func([]byte) error) (steps []int, path string, cause error) {
	if cause = fails(data); cause == nil {
		return nil, "", nil
	}
	for {
		node := treeAt(data, steps)
		spans := make([]span, len(node.values))
		for i, child := range node.values {
			spans[i] = child.span
		}
		if len(spans) == 0 || fails(blank(data, spans...)) != nil {
			return steps, path, cause // No child, but the value as such.
		}
		// With all children blanked it decodes; so as more and more of them are left in, one is the first to fail.
		first := sort.Search(len(spans)-1, func(i int) bool { return fails(blank(data, spans[i+1:]...)) != nil })
		data = blank(data, slices.Concat(spans[:first], spans[first+1:])...)
		err := fails(data)
		if err == nil {
			return steps, path, cause
		}
		cause, path = err, node.childPath(path, first)
		steps = append(steps, first)
	}
}

// treeAt returns what lies at the end of the steps from the root.
func treeAt(data []byte, steps []int) *tree {
	t := jsonTree(data, span{0, len(data)}, 0)
	for _, i := range steps {
		t = t.values[i]
	}
	return t
}

// blank replaces values by null. The spans are in order.
func blank(data []byte, spans ...span) []byte {
	out := make([]byte, 0, len(data)+4*len(spans))
	at := 0
	for _, s := range spans {
		out = append(append(out, data[at:s.start]...), "null"...)
		at = s.end
	}
	return append(out, data[at:]...)
}

// plainError says in plain words what the decoder found wrong.
func plainError(err error, value []byte) string {
	if t, ok := errors.AsType[*gojson.UnmarshalTypeError](err); ok {
		want := wanted(t.Type)
		if len(value) > 0 && len(value) <= 60 {
			return fmt.Sprintf("must be %s, not %s", want, value)
		}
		return fmt.Sprintf("must be %s, not %s", want, article(t.Value))
	}
	text := err.Error()
	if len(value) > 0 && len(value) <= 60 && !strings.Contains(text, string(bytes.Trim(value, `"`))) {
		text = fmt.Sprintf("%s: %s", text, value)
	}
	return "can't be read: " + strings.TrimPrefix(text, "json: ")
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string (quote it)"
	case reflect.Bool:
		return "true or false"
	case reflect.Int32:
		return "a whole number of 32 bits"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Slice:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "a mapping of fields"
	case reflect.Pointer:
		return wanted(t.Elem())
	}
	return "of another type"
}

func article(what string) string {
	switch what {
	case "object":
		return "a mapping of fields"
	case "array":
		return "a list"
	case "bool":
		return "true or false"
	}
	return "a " + what
}

// firstLine returns the line, from 1, on which a node's own text begins.
func firstLine(n *yaml.Node) int {
	if n.Kind == yaml.MappingNode && len(n.Content) > 0 {
		return n.Content[0].Line
	}
	return n.Line
}
