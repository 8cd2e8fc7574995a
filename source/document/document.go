// Package document reads YAML and JSON text and keeps track of lines. It splits a file into documents, parses each into nodes that
// have their line in the file, and decodes it as the API server does, reporting each field that can't be read by its path, which
// leads to a node and its line.
package document

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"strings"

	kjson "sigs.k8s.io/json"
)

// Type is the kind and apiVersion of an object.
type Type struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
}

// Document is one YAML or JSON document of a file, or one item of a JSON list.
type Document struct {
	Name string // of the file, as it is reported
	Text []byte
	Line int  // of the file, from 1, on which the text begins
	JSON bool // by its first character or the name of the file; the text may be broken
	// List is the type of the list that this is an item of, such as a ServiceList, whose items may leave theirs out.
	List Type
}

// splitter cuts the text of a file. It counts lines as far as it has got.
type splitter struct {
	name       string
	data       []byte
	at, line   int // the line on which offset at is
	docs       []*Document
	isJSON     bool
	acceptList func(Type) bool
}

func newSplitter(name string, data []byte) *splitter {
	return &splitter{name: name, data: bytes.TrimPrefix(data, []byte("\ufeff")), line: 1}
}

func (s *splitter) add(start, end int, list Type) {
	s.line += bytes.Count(s.data[s.at:start], []byte{'\n'})
	s.at = start
	s.docs = append(s.docs, &Document{Name: s.name, Text: s.data[start:end:end], Line: s.line, JSON: s.isJSON, List: list})
}

// Split cuts a file into documents; those without content are left out. Of a JSON document of a type that isList accepts, each
// item is a document.
func Split(name string, data []byte, isList func(Type) bool) []*Document {
	s := newSplitter(name, data)
	s.isJSON, s.acceptList = true, isList
	if s.splitJSON() || strings.EqualFold(filepath.Ext(name), ".json") {
		return s.docs
	}
	return SplitYAML(name, data)
}

// splitJSON cuts a file of one or more JSON values, and a list into its items. All from a broken value on is one document. It returns
// false for what may be YAML in its flow style, which resembles JSON: the first value is broken or no object, or something else follows.
func (s *splitter) splitJSON() (isJSON bool) {
	dec := json.NewDecoder(bytes.NewReader(s.data))
	for first := true; ; first = false {
		var raw json.RawMessage
		err := dec.Decode(&raw)
		end := int(dec.InputOffset())
		rest := bytes.TrimLeft(s.data[end:], " \t\r\n")
		switch {
		case errors.Is(err, io.EOF):
			return isJSON
		case err != nil:
			s.add(len(s.data)-len(rest), len(s.data), Type{})
			return isJSON
		case first:
			isJSON = raw[0] == '{' && (len(rest) == 0 || rest[0] == '{')
		}
		if start := end - len(raw); !s.splitList(start, end) {
			s.add(start, end, Type{})
		}
	}
}

// splitList adds the items of the list at [start, end); false if this is no list, or one with something else in it, such as an unknown
// field, which is reported of the list as a whole.
func (s *splitter) splitList(start, end int) bool {
	var list struct {
		Type
		Metadata any               `json:"metadata"`
		Items    []json.RawMessage `json:"items"`
	}
	ignored, err := kjson.UnmarshalStrict(s.data[start:end], &list)
	if err != nil || len(ignored) > 0 || !s.acceptList(list.Type) || len(list.Items) == 0 {
		return false
	}
	at := start + max(0, bytes.Index(s.data[start:end], []byte(`"items"`)))
	for _, item := range list.Items {
		at += bytes.Index(s.data[at:], item) // From one item to the next there is nothing that looks like one.
		s.add(at, at+len(item), list.Type)
		at += len(item)
	}
	return true
}

// SplitYAML cuts a file at the lines that YAML reserves for this: "---" and "..." at the start of a line. They can't be part of
// a document, not even of a block of text.
func SplitYAML(name string, data []byte) []*Document {
	s := newSplitter(name, data)
	begin, i := 0, 0
	add := func(end int) {
		if hasContent(s.data[begin:end]) {
			s.add(begin, end, Type{})
		}
	}
	for line := range bytes.Lines(s.data) {
		switch {
		case isMarker(line, "---"):
			add(i)
			begin = i
		case isMarker(line, "..."):
			add(i)
			begin = i + len(line)
		}
		i += len(line)
	}
	add(len(s.data))
	return s.docs
}

// isMarker reports whether a line is one of those that YAML reserves: "---" or "...".
func isMarker(line []byte, marker string) bool {
	rest, found := bytes.CutPrefix(line, []byte(marker))
	return found && (len(rest) == 0 || bytes.IndexByte([]byte(" \t\r\n"), rest[0]) >= 0)
}

// hasContent reports whether there is more to a document than comments, directives and its marker.
func hasContent(data []byte) bool {
	for line := range bytes.Lines(data) {
		if isMarker(line, "---") {
			line = line[3:]
		}
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && line[0] != '%' {
			return true
		}
	}
	return false
}
