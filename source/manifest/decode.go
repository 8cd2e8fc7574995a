package manifest

import (
	"bytes"
	"errors"
	"fmt"

	"go.yaml.in/yaml/v3"

	"nodeproxy/source"
	"nodeproxy/source/controlplane"
	"nodeproxy/source/document"
)

// body is the content of a document, or of one item of a List. It does not change, and it outlives the file's text if a new
// version of the file holds the same document.
type body struct {
	id     controlplane.ID // of a broken document: as much of it as is known
	obj    any             // made by controlplane.Type.New; nil for types that are not used
	issues []issue
	bad    bool   // broken or refused: the last good version counts
	unread bool   // broken: the text breaks the rules of YAML or JSON
	noKind bool   // broken: no API server has its kind
	other  string // type of an object that is not used
	prefix string // of field paths, within a List
}

// anonymous reports whether a broken document does not identify its object.
func (b *body) anonymous() bool { return b.id.Name == "" || b.id.Kind == "" || b.noKind }

// entry is a body and its place.
type entry struct {
	*body
	doc   *document.Document
	order int // within the file
	mark  int // see store.replaceEntries
}

// decode reads a document. It returns a body for each object, broken ones included.
func decode(doc *document.Document) []*body {
	data := doc.Bytes()
	if doc.JSON {
		return []*body{decodeJSON(data, controlplane.Type(doc.List).Item())}
	}
	node, err := doc.YAML()
	if e, ok := errors.AsType[*document.SyntaxError](err); ok {
		return []*body{unread(identifyYAML(data, e.Line), e.Line, e.Detail)}
	}
	if node == nil || node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" {
		return nil
	}
	if node.Kind != yaml.MappingNode {
		return []*body{unread(controlplane.ID{}, node.Line, "a document must be one object, a mapping of apiVersion, kind, metadata …")}
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
		return unread(controlplane.ID{}, key.Line, fmt.Sprintf(
			`a second %q in one object: two objects need a line "---" between them, or in a List a "- " before each`, key.Value))
	}
	js, err := document.ToJSON(node, size)
	if e, ok := errors.AsType[*document.SyntaxError](err); ok {
		return unread(controlplane.ID{}, e.Line, e.Detail)
	}
	return decodeJSON(js, typ)
}

// secondHead returns the first key of a mapping that is apiVersion or kind for the second time, or nil. It begins another object,
// which no line "---" separates from the one before. If the last value of each key counted, as it does within an object, all
// objects but the last would be lost.
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

// yamlList returns the items of a list that has no other fields, and the type of those that leave theirs out.
func yamlList(node *yaml.Node) (items []*yaml.Node, typ controlplane.Type) {
	seen := map[string]bool{}
	for i := 0; i < len(node.Content); i += 2 {
		key, value := node.Content[i].Value, node.Content[i+1]
		if seen[key] {
			return nil, typ
		}
		seen[key] = true
		switch key {
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

// unread returns the body of a document that breaks the rules of YAML or JSON.
func unread(id controlplane.ID, line int, detail string) *body {
	return &body{id: id, bad: true, unread: true, issues: []issue{{
		Finding: source.Finding{Severity: source.Problem, Detail: detail}, line: max(line, 1),
	}}}
}

// head identifies an object.
type head struct {
	controlplane.Type
	namespace, name string
}

// readHead reads as much of the head as can be found, also in broken JSON.
func readHead(data []byte) head {
	var h head
	members, _ := document.Members(data, 0)
	for _, m := range members {
		switch m.Key {
		case "kind":
			h.Kind, _ = document.String(m.Value.Of(data))
		case "apiVersion":
			h.APIVersion, _ = document.String(m.Value.Of(data))
		case "metadata":
			inner, _ := document.Members(data, m.Value.Start)
			for _, m := range inner {
				switch m.Key {
				case "name":
					h.name, _ = document.String(m.Value.Of(data))
				case "namespace":
					h.namespace, _ = document.String(m.Value.Of(data))
				}
			}
		}
	}
	return h
}

func (h head) id() controlplane.ID { return h.ID(h.namespace, h.name) }

// identifyYAML returns the ID of the object in a broken document, from the lines before the fault.
func identifyYAML(data []byte, line int) controlplane.ID {
	lines := bytes.SplitAfter(data, []byte{'\n'})
	if line <= 0 || line > len(lines) {
		line = len(lines)
	}
	for n := line; n > 0 && n > line-20; n-- {
		node, err := document.ParseYAML(bytes.Join(lines[:n], nil))
		if err != nil || node == nil || node.Kind != yaml.MappingNode {
			continue
		}
		if js, err := document.ToJSON(node, 1024); err == nil {
			h := readHead(js)
			if h.name == "" || !h.Used() {
				return controlplane.ID{}
			}
			return h.id()
		}
	}
	return controlplane.ID{}
}

// decodeJSON reads one object. If it names no type, it is of type typ.
func decodeJSON(data []byte, typ controlplane.Type) *body {
	h := readHead(data)
	if h.Type == (controlplane.Type{}) {
		h.Type = typ
	}
	isObject := len(data) > 0 && data[0] == '{'
	if !isObject || !h.Used() {
		if e, ok := errors.AsType[*document.SyntaxError](document.CheckJSON(data)); ok {
			return unread(h.id(), e.Line, e.Detail)
		}
	}
	if !isObject {
		return unread(controlplane.ID{}, 1, "a document must be one object with apiVersion, kind, metadata …")
	}
	b := &body{id: h.id()}
	switch field, detail := h.Problem(); {
	case detail != "" && !h.IsList():
		b.reject(field, detail)
		b.noKind = field == "kind"
	case h.Used():
		b.read(data, h.Type)
	case h.IsList():
		b.checkList(data)
	default:
		b.other = h.Type.String()
		b.add(source.Finding{Detail: h.WhyNotProxied(), Effect: "not proxied"})
	}
	return b
}

func (b *body) add(f source.Finding) { b.issues = append(b.issues, issue{Finding: f}) }

// reject adds a fault because of which the object can't be used.
func (b *body) reject(field, detail string) {
	b.bad = true
	b.add(source.Finding{Severity: source.Problem, Field: field, Detail: detail})
}

// checkList reports why a list can't be read.
func (b *body) checkList(data []byte) {
	members, _ := document.Members(data, 0)
	seen := map[string]bool{}
	for _, m := range members {
		if seen[m.Key] {
			b.reject(m.Key, twice)
			return
		}
		seen[m.Key] = true
	}
	for _, m := range members {
		switch m.Key {
		case "kind", "apiVersion", "metadata":
		case "items":
			if raw := m.Value.Of(data); raw[0] != '[' && string(raw) != "null" {
				b.reject("items", "must be a list")
			} else if items, _, _ := document.Items(data, m.Value.Start); len(items) > 0 {
				b.reject("items", "a List within a List, or beside unknown fields, is not read")
			}
		default:
			b.reject(m.Key, fmt.Sprintf("a List has no field %.60q", m.Key))
		}
	}
}

// twice is the fault of a field that an object has more than once. kubectl refuses to apply such an object.
const twice = "the field is given more than once"

// read decodes an object and admits it as the API server would.
func (b *body) read(data []byte, typ controlplane.Type) {
	obj := typ.New()
	ignored, faults, err := document.Decode(data, obj)
	if e, ok := errors.AsType[*document.SyntaxError](err); ok {
		*b = *unread(b.id, e.Line, e.Detail)
		return
	}
	for _, f := range ignored {
		if f.Detail == document.DuplicateField { // Which of them is meant, nobody can tell.
			b.reject(f.Field, twice)
			switch f.Field {
			case "metadata", "metadata.name", "metadata.namespace": // Nor which object it is.
				b.id.Name = ""
			}
			continue
		}
		b.add(source.Finding{Severity: source.Problem, Field: f.Field, Detail: f.Detail, Effect: "the field is ignored, the rest of the object is used"})
	}
	for _, f := range faults {
		b.reject(f.Field, f.Detail)
	}
	if b.bad {
		return
	}
	found, refused := controlplane.Admit(obj)
	for _, f := range found {
		b.add(f)
	}
	if b.bad = refused; !refused {
		b.obj = obj
	}
}
