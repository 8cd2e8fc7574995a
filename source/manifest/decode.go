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
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"sigs.k8s.io/json"

	"nodeproxy/source"
)

// objectID names an object. Nodes and ServiceCIDRs have no namespace.
type objectID struct{ kind, namespace, name string }

func (id objectID) String() string {
	kind, name := id.kind, id.name
	if id.namespace != "" && name != "" {
		name = id.namespace + "/" + name
	}
	if name != "" && !printable(name) || strings.ContainsAny(name, `"'`) {
		name = sayf("%.80q", name)
	}
	if kind != "" && !printable(kind) {
		kind = sayf("%.40q", kind)
	}
	return strings.TrimSpace(kind + " " + name)
}

// body is what was read from a document, or from one item of a List. It does not change, and outlives the file's
// text when a new version of the file holds the same document.
type body struct {
	id     objectID // of a broken document: as far as it can be told
	obj    any      // a pointer to one of the types in object; nil for other kinds
	issues []issue
	bad    bool   // broken or refused: the last good version counts
	other  string // API version and kind of an object that is not made use of
	prefix string // of field paths, within a List
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
		return []*body{decodeJSON(data, doc.kind, doc.apiVersion)}
	}
	node, err := parseYAML(data)
	if err != nil {
		e := asYAMLError(err)
		line := faultLine(data, e.line)
		return []*body{broken(identifyYAML(data, line), issue{detail: e.detail, line: line, at: true})}
	}
	if node == nil || node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" {
		return nil
	}
	if node.Kind != yaml.MappingNode {
		return []*body{broken(objectID{}, issue{
			detail: "a document must be one object, a mapping of apiVersion, kind, metadata …", line: node.Line, at: true,
		})}
	}
	if items, kind, apiVersion := yamlList(node); items != nil {
		var out []*body
		for i, item := range items {
			b := decodeYAML(item, len(data), kind, apiVersion)
			b.prefix = sayf("items[%d]", i)
			out = append(out, b)
		}
		return out
	}
	return []*body{decodeYAML(node, len(data), "", "")}
}

func decodeYAML(node *yaml.Node, size int, kind, apiVersion string) *body {
	js, err := yamlToJSON(node, min(size, 1<<16))
	if err != nil {
		e := asYAMLError(err)
		return broken(objectID{}, issue{detail: e.detail, line: e.line, at: true})
	}
	return decodeJSON(js, kind, apiVersion)
}

// yamlList returns the items of a List that holds nothing unexpected, and the type of those that don't tell their own.
func yamlList(node *yaml.Node) (items []*yaml.Node, kind, apiVersion string) {
	for i := 0; i < len(node.Content); i += 2 {
		value := node.Content[i+1]
		switch node.Content[i].Value {
		case "kind":
			kind = value.Value
		case "apiVersion":
			apiVersion = value.Value
		case "metadata":
		case "items":
			if value.Kind == yaml.SequenceNode {
				items = value.Content
			}
		default:
			return nil, "", ""
		}
	}
	if !isList(kind, apiVersion) {
		return nil, "", ""
	}
	kind, apiVersion = itemType(kind, apiVersion)
	return items, kind, apiVersion
}

func broken(id objectID, is issue) *body {
	is.severity = source.Problem
	return &body{id: id, bad: true, issues: []issue{is}}
}

func wellFormed(data []byte) bool { return gojson.Valid(data) }

// head is what tells one object from another.
type head struct{ kind, apiVersion, namespace, name string }

// readHead reads as much of the head as can be found, also in broken JSON.
func readHead(data []byte) head {
	var h head
	members, _ := jsonMembers(data, 0)
	for _, m := range members {
		switch m.key {
		case "kind":
			h.kind, _ = jsonString(m.value.of(data))
		case "apiVersion":
			h.apiVersion, _ = jsonString(m.value.of(data))
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

// id names the object. A kind of another API than Kubernetes' own is told from its namesake by its group.
func (h head) id() objectID {
	id := objectID{kind: h.kind, namespace: h.namespace, name: h.name}
	switch {
	case foreign(h.kind, h.apiVersion):
		group, _, _ := strings.Cut(h.apiVersion, "/")
		id.kind += "." + group
	case id.kind == kindNode || id.kind == kindServiceCIDR:
		id.namespace = ""
	case id.namespace == "" && versions[h.kind] != "":
		id.namespace = v1.NamespaceDefault
	}
	return id
}

// used reports whether objects like this are made use of, as far as kind and group tell.
func (h head) used() bool { return versions[h.kind] != "" && !foreign(h.kind, h.apiVersion) }

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
func identifyYAML(data []byte, line int) objectID {
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
			if h.name == "" || !h.used() {
				return objectID{}
			}
			return h.id()
		}
	}
	return objectID{}
}

// decodeJSON reads one object. kind and apiVersion stand in where it has none.
func decodeJSON(data []byte, kind, apiVersion string) *body {
	h := readHead(data)
	if h.kind == "" && h.apiVersion == "" {
		h.kind, h.apiVersion = kind, apiVersion
	}
	if len(data) == 0 || data[0] != '{' || !h.used() {
		if is, ok := syntaxIssue(data); !ok {
			return broken(h.id(), is)
		}
	}
	if len(data) == 0 || data[0] != '{' {
		return broken(objectID{}, issue{
			detail: "a document must be one object with apiVersion, kind, metadata …", line: 1, at: true,
		})
	}
	if field, detail := kindProblem(h.kind, h.apiVersion); detail != "" && !isList(h.kind, h.apiVersion) {
		return broken(h.id(), issue{field: field, detail: detail})
	}
	b := &body{id: h.id()}
	c := &checker{}
	kind = h.kind
	if !h.used() {
		kind = ""
	}
	switch kind {
	case kindService:
		b.obj = read(data, c, setServiceDefaults, checkService)
	case kindEndpointSlice:
		b.obj = read(data, c, setSliceDefaults, checkSlice)
	case kindEndpoints:
		b.obj = read(data, c, setEndpointsDefaults, checkEndpoints)
	case kindPod:
		b.obj = read(data, c, setPodDefaults, checkPod)
	case kindNode:
		b.obj = read(data, c, setNodeDefaults, checkNode)
	case kindServiceCIDR:
		b.obj = read(data, c, setServiceCIDRDefaults, checkServiceCIDR)
	default:
		if isList(h.kind, h.apiVersion) {
			checkList(data, c)
		} else {
			b.other = h.apiVersion + " " + h.kind
			c.note("", "not proxied", "%s", whyNotProxied(h.kind, h.apiVersion))
		}
	}
	b.issues, b.bad = c.issues, c.refused
	if b.bad {
		b.obj = nil
	}
	return b
}

// checkList says what keeps a List from being read.
func checkList(data []byte, c *checker) {
	members, _ := jsonMembers(data, 0)
	for _, m := range members {
		switch m.key {
		case "kind", "apiVersion", "metadata":
		case "items":
			if raw := m.value.of(data); raw[0] != '[' && string(raw) != "null" {
				c.refuse("items", "must be a list")
			} else if items, _, _ := jsonItems(data, m.value.start); len(items) > 0 {
				c.refuse("items", "a List within a List, or beside unknown fields, is not read")
			}
		default:
			c.refuse(m.key, "a List has no field %.60q", m.key)
		}
	}
}

// kinds of objects that are read.
type object interface {
	v1.Service | discovery.EndpointSlice | legacyEndpoints | v1.Pod | v1.Node | networking.ServiceCIDR
}

// read decodes an object, sets the API's defaults and checks it as the API server would.
func read[T object](data []byte, c *checker, defaults func(*T), check func(*T, *checker)) *T {
	obj := new(T)
	strict, err := json.UnmarshalStrict(data, obj)
	if err != nil {
		decodingIssues[T](data, err, c)
		return nil
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
		c.problem(field, effect, "%s", detail)
	}
	defaults(obj)
	check(obj, c)
	return obj
}

// syntaxIssue says where JSON breaks; true where it does not.
func syntaxIssue(data []byte) (issue, bool) {
	var v gojson.RawMessage
	err := gojson.Unmarshal(data, &v)
	if err == nil {
		return issue{}, true
	}
	is := issue{severity: source.Problem, detail: "broken JSON: " + err.Error(), at: true, line: 1}
	if syntax, ok := errors.AsType[*gojson.SyntaxError](err); ok {
		is.offset = max(int(syntax.Offset)-1, 0)
	}
	return is, false
}

// decodingIssues says which fields can't be read. The decoder names none, or not which of a list; so fields are taken
// away until it no longer complains.
func decodingIssues[T object](data []byte, err error, c *checker) {
	c.refused = true
	if is, ok := syntaxIssue(data); !ok {
		c.issues = append(c.issues, is)
		return
	}
	fails := func(data []byte) error {
		return json.UnmarshalCaseSensitivePreserveInts(data, new(T))
	}
	const most = 5
	for range most {
		steps, field, cause := findFault(data, fails)
		if cause == nil {
			break
		}
		if steps == nil {
			c.refuse("", "%s", plainError(err, nil))
			return
		}
		at := treeAt(data, steps).span
		c.refuse(field, "%s", plainError(cause, at.of(data)))
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
			return sayf("must be %s, not %s", want, value)
		}
		return sayf("must be %s, not %s", want, article(t.Value))
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
