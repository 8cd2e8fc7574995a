package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
	kjson "sigs.k8s.io/json"

	"nodeproxy/source"
	"nodeproxy/source/controlplane"
	"nodeproxy/source/document"
)

// object is one object of a file, broken or not. It outlives the file's text if a new version of the file holds the same document.
type object struct {
	id      controlplane.ID // of a broken document: as much of it as is known
	obj     any             // made by controlplane.Type.New; nil for types that are not used
	remarks []remark
	bad     bool   // it can't be read, or an API server would refuse it
	unread  bool   // the text breaks the rules of YAML or JSON: what it holds is not known
	other   string // type of an object that is not used

	// Its place in the latest version of the file.
	doc    *document.Document
	order  int
	prefix string // of field paths, within a list
}

// decode reads a document. It returns each object, broken ones included.
func decode(doc *document.Document) []*object {
	if doc.JSON && json.Valid(doc.Text) {
		return decodeObject(doc.Text, controlplane.Type(doc.List).Item())
	}
	node, err := doc.Parse()
	if err == nil && (node == nil || node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null") {
		return nil
	}
	if key := secondHead(node); err == nil && key != nil {
		return unread(nil, &document.SyntaxError{Line: key.Line, Detail: fmt.Sprintf(
			`a second %q in one object: two objects need a line "---" between them, or in a List a "- " before each`, key.Value)})
	}
	var text []byte
	if err == nil {
		text, err = document.ToJSON(node, len(doc.Text))
	}
	if err != nil {
		return unread(node, err)
	}
	return decodeObject(text, controlplane.Type{})
}

// unread returns the object of a document that breaks the rules of YAML or JSON after a node.
func unread(before *yaml.Node, err error) []*object {
	o := &object{unread: true}
	if before != nil {
		if text, err := document.ToJSON(before, 1024); err == nil {
			if h := readHead(text); h.Used() && h.Metadata.Name != "" {
				o.id = h.id()
			}
		}
	}
	o.reject("", err.Error())
	if e, ok := errors.AsType[*document.SyntaxError](err); ok {
		o.remarks[0].line = e.Line
	}
	return []*object{o}
}

// secondHead returns the first key of an object, or of an item of a list, that is apiVersion or kind for the second time, or nil.
// It begins another object, which no line "---" separates from the one before. If the last value of each key counted, all objects
// but the last would be lost.
func secondHead(node *yaml.Node) *yaml.Node {
	if node == nil || node.Kind != yaml.MappingNode {
		return nil
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		switch {
		case (key.Value == "apiVersion" || key.Value == "kind") && seen[key.Value]:
			return key
		case key.Value == "items" && value.Kind == yaml.SequenceNode:
			for _, item := range value.Content {
				if key := secondHead(item); key != nil {
					return key
				}
			}
		}
		seen[key.Value] = true
	}
	return nil
}

// head identifies an object.
type head struct {
	controlplane.Type
	Metadata struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
}

// readHead reads as much of the head as can be read.
func readHead(data []byte) (h head) {
	_ = kjson.UnmarshalCaseSensitivePreserveInts(data, &h)
	return h
}

func (h head) id() controlplane.ID { return h.ID(h.Metadata.Namespace, h.Metadata.Name) }

// decodeObject reads an object, or those of a list. If it names no type, it is of type typ.
func decodeObject(data []byte, typ controlplane.Type) []*object {
	h := readHead(data)
	if h.Type == (controlplane.Type{}) {
		h.Type = typ
	}
	o := &object{id: h.id()}
	switch field, detail := h.Problem(); {
	case data[0] != '{':
		o.id = controlplane.ID{}
		o.reject("", "a document must be one object, a mapping of apiVersion, kind, metadata …")
	case h.IsList():
		if items := o.readList(data, h.Type); !o.bad {
			return items
		}
	case detail != "":
		o.reject(field, detail)
	case h.Used():
		o.read(data, h.Type)
	default:
		o.other = h.Type.String()
		o.add(source.Finding{Detail: h.WhyNotProxied(), Effect: source.NotForProxy})
	}
	return []*object{o}
}

func (o *object) add(f source.Finding) { o.remarks = append(o.remarks, remark{Finding: f, object: o}) }

// reject adds a fault because of which the object can't be used.
func (o *object) reject(field, detail string) {
	o.bad = true
	o.add(source.Finding{Severity: source.Problem, Field: field, Detail: detail})
}

// decode decodes an object or a list, and adds what is wrong with its fields. A field that is unknown has an effect, or else makes o bad.
func (o *object) decode(data []byte, into any, effect string) {
	ignored, faults, err := document.Decode(data, into)
	if err != nil {
		o.reject("", err.Error())
	}
	for _, f := range append(ignored, faults...) {
		switch {
		case f.Detail == document.UnknownField && effect != "":
			o.add(source.Finding{Severity: source.Problem, Field: f.Field, Detail: f.Detail, Effect: effect})
		case f.Detail == document.DuplicateField:
			// Which of them is meant, nobody can tell. kubectl refuses to apply such an object.
			o.reject(f.Field, "the field is given more than once")
			if f.Field == "metadata" || strings.HasPrefix(f.Field, "metadata.name") { // Nor which object it is.
				o.id.Name = ""
			}
		default:
			o.reject(f.Field, f.Detail)
		}
	}
}

// readList reads the items of a list. A fault of the list itself makes o bad.
func (o *object) readList(data []byte, typ controlplane.Type) (out []*object) {
	var list struct {
		controlplane.Type
		Metadata any               `json:"metadata"`
		Items    []json.RawMessage `json:"items"`
	}
	o.decode(data, &list, "")
	for i, text := range list.Items {
		item := &object{}
		if h := readHead(text); h.IsList() {
			item.id = h.id()
			item.reject("items", "a List within a List is not read")
		} else {
			item = decodeObject(text, typ.Item())[0]
		}
		item.prefix = fmt.Sprintf("items[%d]", i)
		out = append(out, item)
	}
	return out
}

// read decodes an object and admits it as the API server would.
func (o *object) read(data []byte, typ controlplane.Type) {
	obj := typ.New()
	o.decode(data, obj, "the field is ignored, the rest of the object is used")
	if o.bad {
		return
	}
	found, refused := controlplane.Admit(obj)
	for _, f := range found {
		o.add(f)
	}
	if o.bad = refused; !refused {
		o.obj = obj
	}
}
