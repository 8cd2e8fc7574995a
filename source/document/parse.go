package document

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sort"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// SyntaxError is a fault in the text of a document.
type SyntaxError struct {
	Line   int // of the file
	Detail string
}

func (e *SyntaxError) Error() string { return e.Detail }

// Parse parses a document into nodes that have their line in the file. The node is nil where there is nothing in it. The error is
// a *SyntaxError; then the node is what comes before the fault, as far as that can be told.
func (d *Document) Parse() (*yaml.Node, error) {
	if d.JSON {
		return parseJSON(d.Text, d.Line)
	}
	node, err := parseYAML(d.Text)
	if e, ok := errors.AsType[*SyntaxError](err); ok {
		// The parser tells where the construct around the fault begins. The fault is on the line without which the text can be read.
		lines := bytes.SplitAfter(d.Text, []byte{'\n'})
		before := sort.Search(len(lines), func(n int) bool {
			_, err := parseYAML(bytes.Join(lines[:n+1], nil))
			return err != nil
		})
		node, _ = parseYAML(bytes.Join(lines[:before], nil))
		e.Line = d.Line + min(before, len(lines)-1)
	}
	if node != nil {
		shift(node, d.Line-1)
	}
	return node, err
}

func shift(node *yaml.Node, lines int) {
	node.Line += lines
	for _, n := range node.Content {
		shift(n, lines)
	}
}

var yamlPrefix = regexp.MustCompile(`^(yaml: )?(line \d+: )?`)

// parseYAML parses the text of one document; the error has no line.
func parseYAML(text []byte) (node *yaml.Node, err error) {
	defer func() {
		// The parser has been seen to panic on unusual input; a file must not end the program.
		if r := recover(); r != nil {
			node, err = nil, &SyntaxError{Detail: fmt.Sprintf("the YAML parser gives up: %v", r)}
		}
	}()
	if i := bytes.IndexFunc(text, isControl); i >= 0 {
		return nil, &SyntaxError{Detail: fmt.Sprintf("character %q is not allowed in YAML", text[i])}
	}
	broken := func(err error) error {
		return &SyntaxError{Detail: "broken YAML: " + yamlPrefix.ReplaceAllString(err.Error(), "")}
	}
	var doc, more yaml.Node
	stream := yaml.NewDecoder(bytes.NewReader(text))
	if err := stream.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		return nil, broken(err)
	}
	switch err := stream.Decode(&more); {
	case err == nil:
		return nil, &SyntaxError{Detail: `a second document begins here without a line "---" before it: lines have to end with a line feed`}
	case !errors.Is(err, io.EOF):
		return nil, broken(err)
	case len(doc.Content) == 0:
		return nil, nil
	}
	return doc.Content[0], nil
}

func isControl(r rune) bool {
	return r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r == 0x7f
}

// parseJSON reads JSON, which begins on this line, as YAML nodes, and says where it is broken. YAML's own parser would not do: it takes a comma too many, and
// refuses tabs and some escapes.
func parseJSON(data []byte, line int) (*yaml.Node, error) {
	r := &jsonReader{data: data, line: line, dec: json.NewDecoder(bytes.NewReader(data))}
	r.dec.UseNumber()
	node := r.value()
	var v json.RawMessage
	err := json.Unmarshal(data, &v)
	if err == nil {
		return node, nil
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		line += bytes.Count(data[:max(int(e.Offset)-1, 0)], []byte{'\n'})
	}
	return node, &SyntaxError{line, "broken JSON: " + err.Error()}
}

type jsonReader struct {
	data     []byte
	dec      *json.Decoder
	at, line int // the line on which offset at is
	depth    int
}

// value reads a value, or as much of it as there is before a fault; nil for nothing, and for what is nested too deep.
func (r *jsonReader) value() *yaml.Node {
	r.depth++
	defer func() { r.depth-- }()
	token, err := r.dec.Token()
	if err != nil || r.depth > maxDepth {
		return nil
	}
	end := int(r.dec.InputOffset())
	r.line += bytes.Count(r.data[r.at:end], []byte{'\n'})
	r.at = end
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: r.line, Value: fmt.Sprint(token)}
	switch t := token.(type) {
	case string:
		n.Tag, n.Style = "!!str", yaml.DoubleQuotedStyle
	case bool:
		n.Tag = "!!bool"
	case nil:
		n.Tag = "!!null"
	case json.Delim:
		n.Kind, n.Value = yaml.SequenceNode, ""
		if t == '{' {
			n.Kind = yaml.MappingNode
		}
		for r.dec.More() {
			child := r.value()
			if child == nil {
				break
			}
			n.Content = append(n.Content, child)
		}
		_, _ = r.dec.Token() // the closing bracket
		if t == '{' {
			n.Content = n.Content[:len(n.Content)/2*2]
		}
	}
	return n
}

// Line returns the line of the field that a path leads to from a node, or of the nearest one above it that there is.
func Line(n *yaml.Node, path string) int {
	line := n.Line
	for path != "" {
		at, value, rest := step(n, path)
		if value == nil {
			break
		}
		line, n, path = at.Line, value, rest
	}
	return line
}

// step takes the first step of a path. Keys may hold dots themselves, so the longest key that fits is taken; of a key that is given
// twice, the last.
func step(n *yaml.Node, path string) (at, value *yaml.Node, rest string) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind == yaml.SequenceNode {
		index, rest, _ := strings.Cut(path[1:], "]")
		i, err := strconv.Atoi(index)
		if err != nil || i < 0 || i >= len(n.Content) {
			return nil, nil, ""
		}
		return n.Content[i], n.Content[i], strings.TrimPrefix(rest, ".")
	}
	longest := 1
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		for _, form := range []string{key.Value, "[" + key.Value + "]"} {
			after, fits := strings.CutPrefix(path, form)
			if fits && len(form) >= longest && (after == "" || after[0] == '.' || after[0] == '[') {
				longest, at, value, rest = len(form), key, n.Content[i+1], strings.TrimPrefix(after, ".")
			}
		}
	}
	return at, value, rest
}

// join extends a path by a key.
func join(path, key string) string {
	if strings.ContainsAny(key, "./ []") {
		return path + "[" + key + "]"
	}
	if path == "" {
		return key
	}
	return path + "." + key
}
