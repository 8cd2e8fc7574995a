package document

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Aliases can make a small text mean a huge document. No configuration needs more than these.
const (
	maxDepth     = 256
	maxExpansion = 4 << 20 // bytes of JSON above ten times the size of the text
)

// SyntaxError is a fault in the text of a document.
type SyntaxError struct {
	Line   int // from 1 at the document's start; 0 where it is unknown
	Detail string
}

func (e *SyntaxError) Error() string { return e.Detail }

var yamlLine = regexp.MustCompile(`^(?:yaml: )?(?:line (\d+): )?`)

// ParseYAML parses the text of one document. The node is nil where there is nothing in it. The error is a *SyntaxError, whose
// line is that of the construct around the fault, if it is known at all.
func ParseYAML(text []byte) (node *yaml.Node, err error) {
	defer func() {
		// The parser has been seen to panic on unusual input; a file must not end the program.
		if r := recover(); r != nil {
			node, err = nil, &SyntaxError{Detail: fmt.Sprintf("the YAML parser gives up: %v", r)}
		}
	}()
	if i := bytes.IndexFunc(text, isControl); i >= 0 {
		line := 1 + bytes.Count(text[:i], []byte{'\n'})
		return nil, &SyntaxError{line, fmt.Sprintf("character %q is not allowed in YAML", text[i])}
	}
	var doc, more yaml.Node
	stream := yaml.NewDecoder(bytes.NewReader(text))
	if err := stream.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		return nil, brokenYAML(err)
	}
	switch err := stream.Decode(&more); {
	case err == nil:
		return nil, &SyntaxError{more.Line, `a second document begins here without a line "---" before it: lines have to end with a line feed`}
	case !errors.Is(err, io.EOF):
		return nil, brokenYAML(err)
	case len(doc.Content) == 0:
		return nil, nil
	}
	return doc.Content[0], nil
}

func brokenYAML(err error) *SyntaxError {
	m := yamlLine.FindStringSubmatch(err.Error())
	line, _ := strconv.Atoi(m[1])
	return &SyntaxError{line, "broken YAML: " + err.Error()[len(m[0]):]}
}

func isControl(r rune) bool {
	return r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r == 0x7f
}

// ToJSON writes a node of a document of this size as JSON. The words yes, no, on and off are booleans too, as in YAML 1.1 and for
// kubectl, and timestamps stay text. Keys keep their order and their repetitions, so that the decoder sees
// them. The error is a *SyntaxError.
func ToJSON(node *yaml.Node, size int) ([]byte, error) {
	size = min(size, 1<<16)
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
		return &SyntaxError{n.Line, fmt.Sprintf("nested more than %d deep, or an alias within its own anchor", maxDepth)}
	}
	if len(w.out) > w.limit {
		return &SyntaxError{n.Line, "the aliases of this document expand to too much text"}
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
			return nil, &SyntaxError{key.Line, "a key must be a plain word"}
		}
		merges = merges || key.ShortTag() == "!!merge"
	}
	if !merges {
		return n.Content, nil
	}
	if depth > maxDepth {
		return nil, &SyntaxError{n.Line, "a merge within its own anchor"}
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
				return nil, &SyntaxError{from.Line, "only a mapping can be merged in by <<"}
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
			return &SyntaxError{n.Line, fmt.Sprintf("%.40q is not a boolean", n.Value)}
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
		return &SyntaxError{n.Line, fmt.Sprintf("%.40q is not a number", n.Value)}
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

// YAML parses a YAML document as ParseYAML does, but finds the line of a fault.
func (d *Document) YAML() (*yaml.Node, error) {
	data := d.Bytes()
	node, err := ParseYAML(data)
	if e, ok := errors.AsType[*SyntaxError](err); ok {
		return nil, &SyntaxError{faultLine(data, e.Line), e.Detail}
	}
	return node, err
}

// faultLine finds the line of a fault: the first from which on every further line leaves the document broken. The parser
// reports only where the construct around it began, if at all.
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
		if _, err := ParseYAML(data[:ends[n]]); err == nil {
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
