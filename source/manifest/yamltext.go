package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Aliases can make a small text mean a huge document. No manifest needs more than these.
const (
	maxDepth     = 256
	maxExpansion = 4 << 20 // bytes of JSON above ten times the size of the text
)

// yamlError is a fault of a YAML document, at a line that counts from 1 at the document's start; 0 where it is unknown.
type yamlError struct {
	line   int
	detail string
}

func (e *yamlError) Error() string { return e.detail }

var yamlLine = regexp.MustCompile(`^(?:yaml: )?(?:line (\d+): )?`)

// parseYAML parses one document. The node is nil where the document is empty.
func parseYAML(text []byte) (node *yaml.Node, err error) {
	defer func() {
		// The parser has been seen to panic on input that nobody would write; a file must not end the program.
		if r := recover(); r != nil {
			node, err = nil, &yamlError{detail: fmt.Sprintf("the YAML parser gives up: %v", r)}
		}
	}()
	if i := bytes.IndexFunc(text, isControl); i >= 0 {
		line := 1 + bytes.Count(text[:i], []byte{'\n'})
		return nil, &yamlError{line, fmt.Sprintf("character %q is not allowed in YAML", text[i])}
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		m := yamlLine.FindStringSubmatch(err.Error())
		line, _ := strconv.Atoi(m[1])
		return nil, &yamlError{line, "broken YAML: " + err.Error()[len(m[0]):]}
	}
	if len(doc.Content) == 0 {
		return nil, nil
	}
	return doc.Content[0], nil
}

func isControl(r rune) bool {
	return r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r == 0x7f
}

// yamlToJSON writes a node as JSON, reading scalars as kubectl does: the words yes, no, on and off are booleans too
// (YAML 1.1), and timestamps stay text.
func yamlToJSON(node *yaml.Node, size int) ([]byte, error) {
	w := &jsonWriter{out: make([]byte, 0, size+size/4), limit: 10*size + maxExpansion}
	if err := w.value(node, 0); err != nil {
		return nil, err
	}
	return w.out, nil
}

type jsonWriter struct {
	out   []byte
	limit int
}

func (w *jsonWriter) value(n *yaml.Node, depth int) error {
	if depth > maxDepth {
		return &yamlError{n.Line, fmt.Sprintf("nested more than %d deep, or an alias within its own anchor", maxDepth)}
	}
	if len(w.out) > w.limit {
		return &yamlError{n.Line, "aliases blow this document up beyond all use"}
	}
	switch n.Kind {
	case yaml.AliasNode:
		return w.value(n.Alias, depth+1)
	case yaml.MappingNode:
		return w.mapping(n, depth)
	case yaml.SequenceNode:
		w.out = append(w.out, '[')
		for i, item := range n.Content {
			if i > 0 {
				w.out = append(w.out, ',')
			}
			if err := w.value(item, depth+1); err != nil {
				return err
			}
		}
		w.out = append(w.out, ']')
		return nil
	}
	return w.scalar(n)
}

func (w *jsonWriter) mapping(n *yaml.Node, depth int) error {
	pairs, err := mappingPairs(n, depth)
	if err != nil {
		return err
	}
	w.out = append(w.out, '{')
	for i := 0; i < len(pairs); i += 2 {
		if i > 0 {
			w.out = append(w.out, ',')
		}
		w.out = append(appendJSONString(w.out, pairs[i].Value), ':')
		if err := w.value(pairs[i+1], depth+1); err != nil {
			return err
		}
	}
	w.out = append(w.out, '}')
	return nil
}

// mappingPairs lists keys and values of a mapping in turn, with merge keys ("<<") replaced by what they bring in.
func mappingPairs(n *yaml.Node, depth int) ([]*yaml.Node, error) {
	merges := false
	for i := 0; i < len(n.Content); i += 2 {
		key := n.Content[i]
		if key.Kind != yaml.ScalarNode {
			return nil, &yamlError{key.Line, "a key must be a plain word"}
		}
		merges = merges || key.ShortTag() == "!!merge"
	}
	if !merges {
		return n.Content, nil
	}
	if depth > maxDepth {
		return nil, &yamlError{n.Line, "a merge within its own anchor"}
	}
	var own, merged []*yaml.Node
	has := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].ShortTag() != "!!merge" {
			own = append(own, n.Content[i], n.Content[i+1])
			has[n.Content[i].Value] = true
		}
	}
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].ShortTag() != "!!merge" {
			continue
		}
		sources := []*yaml.Node{n.Content[i+1]}
		if sources[0].Kind == yaml.SequenceNode {
			sources = sources[0].Content
		}
		for _, from := range sources {
			if from.Kind == yaml.AliasNode {
				from = from.Alias
			}
			if from.Kind != yaml.MappingNode {
				return nil, &yamlError{from.Line, "only a mapping can be merged in by <<"}
			}
			pairs, err := mappingPairs(from, depth+1)
			if err != nil {
				return nil, err
			}
			for j := 0; j < len(pairs); j += 2 {
				if !has[pairs[j].Value] {
					has[pairs[j].Value] = true
					merged = append(merged, pairs[j], pairs[j+1])
				}
			}
		}
	}
	return append(own, merged...), nil
}

func (w *jsonWriter) scalar(n *yaml.Node) error {
	switch n.ShortTag() {
	case "!!null":
		w.out = append(w.out, "null"...)
	case "!!bool":
		var b bool
		if err := n.Decode(&b); err != nil {
			return &yamlError{n.Line, fmt.Sprintf("%.40q is no boolean", n.Value)}
		}
		w.out = strconv.AppendBool(w.out, b)
	case "!!int", "!!float":
		return w.number(n)
	default:
		if b, ok := yaml11Bool(n); ok {
			w.out = strconv.AppendBool(w.out, b)
		} else {
			w.out = appendJSONString(w.out, n.Value)
		}
	}
	return nil
}

func yaml11Bool(n *yaml.Node) (value, ok bool) {
	if n.Style != 0 || len(n.Value) > 3 || len(n.Value) < 2 {
		return false, false
	}
	switch n.Value {
	case "yes", "Yes", "YES", "on", "On", "ON":
		return true, true
	case "no", "No", "NO", "off", "Off", "OFF":
		return false, true
	}
	return false, false
}

func (w *jsonWriter) number(n *yaml.Node) error {
	if v := n.Value; v != "" && len(v) < 16 && (v[0] != '0' || v == "0") && strings.Trim(v, "0123456789") == "" {
		w.out = append(w.out, v...)
		return nil
	}
	var v any
	if err := n.Decode(&v); err != nil {
		return &yamlError{n.Line, fmt.Sprintf("%.40q is no number", n.Value)}
	}
	switch v := v.(type) {
	case int:
		w.out = strconv.AppendInt(w.out, int64(v), 10)
	case int64:
		w.out = strconv.AppendInt(w.out, v, 10)
	case uint64:
		w.out = strconv.AppendUint(w.out, v, 10)
	case float64:
		if math.IsInf(v, 0) || math.IsNaN(v) {
			w.out = appendJSONString(w.out, n.Value) // JSON has no such number: no field can want it.
		} else {
			w.out = strconv.AppendFloat(w.out, v, 'g', -1, 64)
		}
	default:
		w.out = appendJSONString(w.out, n.Value)
	}
	return nil
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

// asYAMLError returns err as a fault with a line.
func asYAMLError(err error) *yamlError {
	if e, ok := errors.AsType[*yamlError](err); ok {
		return e
	}
	return &yamlError{detail: err.Error()}
}
