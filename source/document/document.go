// Package document reads YAML and JSON text and keeps track of lines. It splits a file into documents, finds the lines of their
// fields and of their faults, and decodes them as the API server does, reporting each field that can't be read.
//
// No library serves instead: encoding/json/jsontext is an experiment of Go 1.26 and, like json.Decoder, ends at the first fault,
// after which a file may have other objects; sigs.k8s.io/yaml has no positions; and go.yaml.in/yaml/v3, which parses here, does
// not find the line of a fault.
package document

import (
	"bytes"
	"path/filepath"
	"sort"
	"strings"
	"sync"
)

// Text is the content of a file.
type Text struct {
	Name string // as it is reported: the path within or below what the user named
	Data []byte

	once     sync.Once
	newlines []int // offsets, found when the first line number is asked for
}

// Line returns the number of the line, from 1, in which an offset lies.
func (t *Text) Line(offset int) int {
	t.once.Do(func() {
		for i, c := range t.Data {
			if c == '\n' {
				t.newlines = append(t.newlines, i)
			}
		}
	})
	return 1 + sort.SearchInts(t.newlines, offset)
}

// start is the offset after a byte order mark.
func (t *Text) start() int {
	if bytes.HasPrefix(t.Data, []byte("\ufeff")) {
		return 3
	}
	return 0
}

// Type is the kind and apiVersion of an object.
type Type struct{ Kind, APIVersion string }

// Document is one YAML or JSON document of a file, or one item of a JSON list.
type Document struct {
	*Text
	Span
	JSON bool
	// List is the type of the list that this is an item of, such as a ServiceList, whose items may leave theirs out.
	List Type
}

// Bytes returns the text of a document.
func (d *Document) Bytes() []byte { return d.Of(d.Data) }

// Line returns the line of the file that is the n-th of the document.
func (d *Document) Line(n int) int { return d.Text.Line(d.Start) + max(n, 1) - 1 }

// LineAt returns the line of the file at an offset in the document.
func (d *Document) LineAt(offset int) int {
	return d.Text.Line(min(d.Start+offset, max(len(d.Data)-1, 0)))
}

// Same reports whether two documents have the same text, wherever they are.
func (d *Document) Same(o *Document) bool {
	return d.JSON == o.JSON && d.List == o.List && bytes.Equal(d.Bytes(), o.Bytes())
}

// Split cuts a file into documents; those without content are left out. Of a JSON document of a type that isList accepts, each
// item is a document.
func Split(t *Text, isList func(Type) bool) []*Document {
	start := t.start()
	i := skipSpace(t.Data, start)
	isJSON := strings.EqualFold(filepath.Ext(t.Name), ".json")
	if !isJSON && i < len(t.Data) && t.Data[i] == '{' {
		// YAML's flow style begins like JSON; what JSON's rules accept as a whole is JSON.
		end := skipValue(t.Data, i)
		next := skipSpace(t.Data, max(end, 0))
		isJSON = end > 0 && jsonShaped(t.Data[i:end]) && (next == len(t.Data) || t.Data[next] == '{')
	}
	if isJSON {
		return splitJSON(t, start, isList)
	}
	return SplitYAML(t)
}

// jsonShaped distinguishes JSON from YAML's flow style by its first key.
func jsonShaped(data []byte) bool {
	i := skipSpace(data, 1)
	return i < len(data) && (data[i] == '"' || data[i] == '}')
}

// splitJSON cuts a file of one or more JSON values, and a List into its items.
func splitJSON(t *Text, start int, isList func(Type) bool) []*Document {
	var docs []*Document
	for i := skipSpace(t.Data, start); i < len(t.Data); i = skipSpace(t.Data, i) {
		if items, end := splitList(t, i, isList); len(items) > 0 {
			docs = append(docs, items...)
			i = end
			continue
		}
		end := skipValue(t.Data, i)
		if end < 0 {
			end = len(t.Data) // Broken: the decoder says how.
		}
		docs = append(docs, &Document{Text: t, Span: Span{i, end}, JSON: true})
		i = end
	}
	return docs
}

// splitList returns the items of the JSON List that starts at offset i as documents, and the offset after it; none where
// there is no List, or one that is not well-formed enough to tell.
func splitList(t *Text, i int, isList func(Type) bool) (docs []*Document, end int) {
	data := t.Data
	var list Type
	var items []Span
	seen := map[string]bool{}
	end, err := eachMember(data, i, func(key string, _, start int) (int, error) {
		if seen[key] {
			return 0, errJSON
		}
		seen[key] = true
		if key == "items" {
			var end int
			var err error
			items, end, err = Items(data, start)
			return end, err
		}
		end := skipValue(data, start)
		if end < 0 {
			return end, nil
		}
		switch key {
		case "kind":
			list.Kind, _ = String(data[start:end])
		case "apiVersion":
			list.APIVersion, _ = String(data[start:end])
		case "metadata":
		default:
			return 0, errJSON // No List, or an unknown field, which the slow way reports.
		}
		return end, nil
	})
	if err != nil || !isList(list) {
		return nil, 0
	}
	docs = make([]*Document, len(items))
	all := make([]Document, len(items))
	for n, s := range items {
		all[n] = Document{Text: t, Span: s, JSON: true, List: list}
		docs[n] = &all[n]
	}
	return docs, end
}

// SplitYAML cuts a file at the lines that YAML reserves for this: "---" and "..." at the start of a line. They can't be part of
// a document, not even of a block of text.
func SplitYAML(t *Text) []*Document {
	start := t.start()
	var docs []*Document
	add := func(start, end int) {
		if hasContent(t.Data[start:end]) {
			docs = append(docs, &Document{Text: t, Span: Span{start, end}})
		}
	}
	begin := start
	for i := start; i < len(t.Data); {
		end := len(t.Data)
		if n := bytes.IndexByte(t.Data[i:], '\n'); n >= 0 {
			end = i + n + 1
		}
		switch line := t.Data[i:end]; {
		case IsMarker(line, "---"):
			add(begin, i)
			begin = i
		case IsMarker(line, "..."):
			add(begin, i)
			begin = end
		}
		i = end
	}
	add(begin, len(t.Data))
	return docs
}

// IsMarker reports whether a line is one of those that YAML reserves: "---" or "...".
func IsMarker(line []byte, marker string) bool {
	return len(line) >= 3 && string(line[:3]) == marker && (len(line) == 3 || isSpace(line[3]))
}

// hasContent reports whether there is more to a document than comments, directives and its marker.
func hasContent(data []byte) bool {
	for line := range bytes.Lines(data) {
		if IsMarker(line, "---") {
			line = line[3:]
		}
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && line[0] != '%' {
			return true
		}
	}
	return false
}
