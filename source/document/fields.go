package document

import (
	"encoding/json"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Fields are the positions of a document's fields.
type Fields struct {
	doc  *Document
	root *tree // nil where the document can't be parsed
}

// Fields parses a document for the positions of its fields.
func (d *Document) Fields() *Fields {
	data := d.Bytes()
	if d.JSON {
		if !json.Valid(data) {
			return &Fields{doc: d}
		}
		return &Fields{d, parseJSON(data)}
	}
	node, err := ParseYAML(data)
	if err != nil || node == nil {
		return &Fields{doc: d}
	}
	return &Fields{d, yamlTree(node, firstLine(node), 0)}
}

// Line returns the line of a field in the file, or of the nearest existing field above it. The empty path is the document itself.
func (f *Fields) Line(path string) int {
	if f.root == nil {
		return f.doc.Line(1)
	}
	pos := f.root.find(path).pos
	if f.doc.JSON {
		return f.doc.LineAt(pos)
	}
	return f.doc.Line(pos)
}

// firstLine returns the line, from 1, on which a node's own text begins.
func firstLine(n *yaml.Node) int {
	if n.Kind == yaml.MappingNode && len(n.Content) > 0 {
		return n.Content[0].Line
	}
	return n.Line
}

// tree has the positions of a document's fields. pos is an offset in JSON and a line, from 1, in YAML.
type tree struct {
	pos    int
	span   Span // of the value, in JSON only
	keys   []string
	values []*tree // of keys in an object, or the elements of an array
	array  bool
}

// parseJSON reads the skeleton of well-formed JSON.
func parseJSON(data []byte) *tree { return jsonTree(data, Span{0, len(data)}, 0) }

// jsonTree reads the skeleton of the value at offset i of well-formed JSON, which is at pos as far as its owner is
// concerned.
func jsonTree(data []byte, at Span, pos int) *tree {
	t := &tree{pos: pos, span: at}
	switch data[at.Start] {
	case '{':
		members, _ := Members(data, at.Start)
		for _, m := range members {
			t.keys = append(t.keys, m.Key)
			t.values = append(t.values, jsonTree(data, m.Value, m.keyStart))
		}
	case '[':
		t.array = true
		items, _, _ := Items(data, at.Start)
		for _, item := range items {
			t.values = append(t.values, jsonTree(data, item, item.Start))
		}
	}
	return t
}

// find follows a field path as far as it leads.
func (t *tree) find(path string) *tree {
	for path != "" {
		child, rest := t.step(path)
		if child == nil {
			return t
		}
		t, path = child, rest
	}
	return t
}

// step takes the first step of a path. Keys may hold dots themselves, so the longest key that fits is taken.
func (t *tree) step(path string) (*tree, string) {
	if path[0] == '[' {
		end := strings.IndexByte(path, ']')
		if end < 0 {
			return nil, ""
		}
		inner, rest := path[1:end], strings.TrimPrefix(path[end+1:], ".")
		if !t.array {
			return t.byKey(inner), rest
		}
		n, err := strconv.Atoi(inner)
		if err != nil || n < 0 || n >= len(t.values) {
			return nil, ""
		}
		return t.values[n], rest
	}
	for end := len(path); end > 0; end-- {
		if end < len(path) && path[end] != '.' && path[end] != '[' {
			continue
		}
		if child := t.byKey(path[:end]); child != nil {
			return child, strings.TrimPrefix(path[end:], ".")
		}
	}
	return nil, ""
}

func (t *tree) byKey(key string) *tree {
	if t.array {
		return nil
	}
	for i := len(t.keys) - 1; i >= 0; i-- { // Of a key given twice the last one counts.
		if t.keys[i] == key {
			return t.values[i]
		}
	}
	return nil
}

// childPath extends a field path by the i-th child of t.
func (t *tree) childPath(path string, i int) string {
	if t.array {
		return path + "[" + strconv.Itoa(i) + "]"
	}
	key := t.keys[i]
	if strings.ContainsAny(key, "./ []") {
		return path + "[" + key + "]"
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// yamlTree reads the skeleton of a node; pos is the line within the document, counting from 1.
func yamlTree(n *yaml.Node, line, depth int) *tree {
	t := &tree{pos: line}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if depth > maxDepth {
		return t
	}
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			t.keys = append(t.keys, n.Content[i].Value)
			t.values = append(t.values, yamlTree(n.Content[i+1], n.Content[i].Line, depth+1))
		}
	case yaml.SequenceNode:
		t.array = true
		for _, item := range n.Content {
			t.values = append(t.values, yamlTree(item, item.Line, depth+1))
		}
	}
	return t
}
