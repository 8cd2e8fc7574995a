package manifest

import (
	"bytes"
	"path/filepath"
	"sort"
	"strings"
	"sync"

	"nodeproxy/source/controlplane"
)

// text is the content of a file.
type text struct {
	name string // as it is to be told: the path within or below what the user named
	data []byte

	once     sync.Once
	newlines []int // offsets, found when the first line number is asked for
}

// line returns the number of the line, from 1, in which an offset lies.
func (t *text) line(offset int) int {
	t.once.Do(func() {
		for i, c := range t.data {
			if c == '\n' {
				t.newlines = append(t.newlines, i)
			}
		}
	})
	return 1 + sort.SearchInts(t.newlines, offset)
}

// document is one YAML or JSON document of a file, or one item of a JSON List.
type document struct {
	text *text
	span
	json bool
	// typ is that of items that leave theirs out, in lists such as a ServiceList.
	typ controlplane.Type
}

func (d *document) bytes() []byte { return d.of(d.text.data) }

// accepted reports whether a file of this name holds manifests.
func accepted(name string) bool {
	base := filepath.Base(name)
	switch strings.ToLower(filepath.Ext(base)) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(base, ".")
	}
	return false
}

// split cuts a file into documents; those without content are left out.
func split(t *text) []*document {
	start := 0
	if bytes.HasPrefix(t.data, []byte("\ufeff")) {
		start = 3
	}
	i := skipSpace(t.data, start)
	isJSON := strings.EqualFold(filepath.Ext(t.name), ".json")
	if !isJSON && i < len(t.data) && t.data[i] == '{' {
		// YAML's flow style begins like JSON; what JSON's rules accept as a whole is JSON.
		end := skipValue(t.data, i)
		next := skipSpace(t.data, max(end, 0))
		isJSON = end > 0 && jsonShaped(t.data[i:end]) && (next == len(t.data) || t.data[next] == '{')
	}
	if isJSON {
		return splitJSON(t, start)
	}
	return splitYAML(t, start)
}

// jsonShaped tells JSON from YAML's flow style by its first key.
func jsonShaped(data []byte) bool {
	i := skipSpace(data, 1)
	return i < len(data) && (data[i] == '"' || data[i] == '}')
}

// splitJSON cuts a file of one or more JSON values, and a List into its items.
func splitJSON(t *text, start int) []*document {
	var docs []*document
	for i := skipSpace(t.data, start); i < len(t.data); i = skipSpace(t.data, i) {
		if items, end := splitList(t, i); len(items) > 0 {
			docs = append(docs, items...)
			i = end
			continue
		}
		end := skipValue(t.data, i)
		if end < 0 {
			end = len(t.data) // Broken: the decoder says how.
		}
		docs = append(docs, &document{text: t, span: span{i, end}, json: true})
		i = end
	}
	return docs
}

// splitList returns the items of the JSON List that starts at offset i as documents, and the offset after it; none where
// there is no List, or one that is not well-formed enough to tell.
func splitList(t *text, i int) (docs []*document, end int) {
	data := t.data
	var typ controlplane.Type
	var items []span
	end, err := eachMember(data, i, func(key string, _, start int) (int, error) {
		if key == "items" {
			var end int
			var err error
			items, end, err = jsonItems(data, start)
			return end, err
		}
		end := skipValue(data, start)
		if end < 0 {
			return end, nil
		}
		switch key {
		case "kind":
			typ.Kind, _ = jsonString(data[start:end])
		case "apiVersion":
			typ.APIVersion, _ = jsonString(data[start:end])
		case "metadata":
		default:
			return 0, errJSON // No List, or an unknown field, which the slow way reports.
		}
		return end, nil
	})
	if err != nil || !typ.IsList() {
		return nil, 0
	}
	docs = make([]*document, len(items))
	all := make([]document, len(items))
	for n, s := range items {
		all[n] = document{text: t, span: s, json: true, typ: typ.Item()}
		docs[n] = &all[n]
	}
	return docs, end
}

// splitYAML cuts at the lines that YAML reserves for this: "---" and "..." at the start of a line. They can't be part of
// a document, not even of a block of text.
func splitYAML(t *text, start int) []*document {
	var docs []*document
	add := func(start, end int) {
		if hasContent(t.data[start:end]) {
			docs = append(docs, &document{text: t, span: span{start, end}})
		}
	}
	begin := start
	for i := start; i < len(t.data); {
		end := len(t.data)
		if n := bytes.IndexByte(t.data[i:], '\n'); n >= 0 {
			end = i + n + 1
		}
		switch line := t.data[i:end]; {
		case isMarker(line, "---"):
			add(begin, i)
			begin = i
		case isMarker(line, "..."):
			add(begin, i)
			begin = end
		}
		i = end
	}
	add(begin, len(t.data))
	return docs
}

func isMarker(line []byte, marker string) bool {
	return len(line) >= 3 && string(line[:3]) == marker && (len(line) == 3 || isSpace(line[3]))
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
