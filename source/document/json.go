package document

import (
	"encoding/json"
	"fmt"
	"math"

	"go.yaml.in/yaml/v3"
)

// Aliases can make a small text mean a huge document. No configuration needs more than these.
const (
	maxDepth     = 256
	maxExpansion = 4 << 20 // bytes of JSON above ten times the size of the text
)

// ToJSON writes a node of a document of this size as JSON. The words yes, no, on and off are booleans too, as in YAML 1.1 and for
// kubectl, and timestamps stay text. Keys keep their order and their repetitions, so that the decoder sees
// them. The error is a *SyntaxError.
func ToJSON(node *yaml.Node, size int) ([]byte, error) {
	w := &jsonWriter{out: make([]byte, 0, min(size, 1<<16)*5/4), limit: 10*size + maxExpansion}
	err := w.value(node, 0)
	return w.out, err
}

type jsonWriter struct {
	out   []byte
	limit int
}

func (w *jsonWriter) value(n *yaml.Node, depth int) error {
	if depth > maxDepth {
		return &SyntaxError{n.Line, fmt.Sprintf("nested more than %d deep, or an alias within its own anchor", maxDepth)}
	}
	if len(w.out) > w.limit {
		return &SyntaxError{n.Line, "the aliases of this document expand to too much text"}
	}
	opening, closing, content := byte('['), byte(']'), n.Content
	switch n.Kind {
	case yaml.AliasNode:
		return w.value(n.Alias, depth+1)
	case yaml.SequenceNode:
	case yaml.MappingNode:
		opening, closing = '{', '}'
		var err error
		if content, err = mappingPairs(n, depth); err != nil {
			return err
		}
	default:
		return w.scalar(n)
	}
	for i, item := range content {
		switch {
		case i == 0:
			w.out = append(w.out, opening)
		case n.Kind == yaml.MappingNode && i%2 == 1:
			w.out = append(w.out, ':')
		default:
			w.out = append(w.out, ',')
		}
		if n.Kind == yaml.MappingNode && i%2 == 0 {
			w.string(item.Value)
		} else if err := w.value(item, depth+1); err != nil {
			return err
		}
	}
	if len(content) == 0 {
		w.out = append(w.out, opening)
	}
	w.out = append(w.out, closing)
	return nil
}

// mappingPairs lists keys and values of a mapping in turn, with merge keys ("<<") replaced by what they bring in.
func mappingPairs(n *yaml.Node, depth int) ([]*yaml.Node, error) {
	var own, sources []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		switch {
		case key.Kind != yaml.ScalarNode:
			return nil, &SyntaxError{key.Line, "a key must be a plain word"}
		case key.Value != "<<" || key.ShortTag() != "!!merge":
			own = append(own, key, value)
		case value.Kind == yaml.SequenceNode:
			sources = append(sources, value.Content...)
		default:
			sources = append(sources, value)
		}
	}
	if len(sources) == 0 {
		return own, nil
	}
	if depth > maxDepth {
		return nil, &SyntaxError{n.Line, "a merge within its own anchor"}
	}
	has := map[string]bool{}
	for i := 0; i < len(own); i += 2 {
		has[own[i].Value] = true
	}
	for _, from := range sources {
		if from.Kind == yaml.AliasNode {
			from = from.Alias
		}
		if from.Kind != yaml.MappingNode {
			return nil, &SyntaxError{from.Line, "only a mapping can be merged in by <<"}
		}
		pairs, err := mappingPairs(from, depth+1)
		if err != nil {
			return nil, err
		}
		for j := 0; j < len(pairs); j += 2 {
			if key := pairs[j].Value; !has[key] {
				has[key] = true
				own = append(own, pairs[j], pairs[j+1])
			}
		}
	}
	return own, nil
}

func (w *jsonWriter) scalar(n *yaml.Node) error {
	var v any
	switch n.ShortTag() {
	case "!!null":
	case "!!bool", "!!int", "!!float":
		if err := n.Decode(&v); err != nil {
			return &SyntaxError{n.Line, fmt.Sprintf("%.40q is not a boolean or number", n.Value)}
		}
		if f, ok := v.(float64); ok && (math.IsInf(f, 0) || math.IsNaN(f)) {
			v = n.Value // JSON has no such number: no field can want it.
		}
	default:
		if n.Style == 0 {
			switch n.Value {
			case "yes", "Yes", "YES", "on", "On", "ON":
				v = true
			case "no", "No", "NO", "off", "Off", "OFF":
				v = false
			}
		}
		if v == nil {
			w.string(n.Value)
			return nil
		}
	}
	text, err := json.Marshal(v)
	if err != nil {
		return &SyntaxError{n.Line, err.Error()}
	}
	w.out = append(w.out, text...)
	return nil
}

// string writes a string: one without anything to escape at less cost.
func (w *jsonWriter) string(s string) {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c == '"' || c == '\\' || c >= 0x7f {
			quoted, _ := json.Marshal(s) // A string can always be marshalled.
			w.out = append(w.out, quoted...)
			return
		}
	}
	w.out = append(append(append(w.out, '"'), s...), '"')
}
