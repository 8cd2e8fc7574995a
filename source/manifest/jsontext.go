package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
)

// The functions here find their way through JSON text without decoding it: where one document ends and the next begins,
// where the items of a List are, and at which offset a field stands. They check only what they need; each piece that
// they cut out is checked by the decoder.

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

func skipSpace(data []byte, i int) int {
	for i < len(data) && isSpace(data[i]) {
		i++
	}
	return i
}

// skipString returns the offset after the string that starts at i, or -1.
func skipString(data []byte, i int) int {
	for i++; i < len(data); {
		n := bytes.IndexByte(data[i:], '"')
		if n < 0 {
			return -1
		}
		i += n
		backslashes := 0
		for data[i-1-backslashes] == '\\' {
			backslashes++ // The opening quote stops this.
		}
		i++
		if backslashes%2 == 0 {
			return i
		}
	}
	return -1
}

// skipValue returns the offset after the value that starts at i, or -1 where it has no end.
func skipValue(data []byte, i int) int {
	if i >= len(data) {
		return -1
	}
	switch data[i] {
	case '"':
		return skipString(data, i)
	case '{', '[':
	default:
		start := i
		for i < len(data) && !isSpace(data[i]) && !bytes.ContainsRune([]byte(`,:]}[{"`), rune(data[i])) {
			i++
		}
		if i == start {
			return -1
		}
		return i
	}
	depth := 0
	for i < len(data) {
		switch data[i] {
		case '"':
			if i = skipString(data, i); i < 0 {
				return -1
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
		i++
	}
	return -1
}

// span is a range of offsets in a text.
type span struct{ start, end int }

func (s span) of(data []byte) []byte { return data[s.start:s.end] }

// member is one key and value of a JSON object.
type member struct {
	key      string
	keyStart int
	value    span
}

var errJSON = errors.New("not well-formed JSON")

// jsonMembers lists what the object that starts at offset i holds.
func jsonMembers(data []byte, i int) ([]member, error) {
	var out []member
	_, err := eachMember(data, i, func(key string, at, start int) (int, error) {
		end := skipValue(data, start)
		out = append(out, member{key, at, span{start, end}})
		return end, nil
	})
	if n := len(out); err != nil && n > 0 && out[n-1].value.end < 0 {
		out = out[:n-1]
	}
	return out, err
}

// eachMember walks the object that starts at offset i. read is given a key, where it stands, and where its value starts,
// and returns the offset after the value.
func eachMember(data []byte, i int, read func(key string, at, start int) (int, error)) (end int, err error) {
	return eachElement(data, i, '{', '}', func(i int) (int, error) {
		end := skipValue(data, i)
		if end < 0 || data[i] != '"' {
			return 0, errJSON
		}
		key, ok := jsonString(data[i:end])
		colon := skipSpace(data, end)
		if !ok || colon >= len(data) || data[colon] != ':' {
			return 0, errJSON
		}
		return read(key, i, skipSpace(data, colon+1))
	})
}

// jsonItems lists the elements of the array that starts at offset i, and returns the offset after it.
func jsonItems(data []byte, i int) (out []span, end int, err error) {
	end, err = eachElement(data, i, '[', ']', func(i int) (int, error) {
		end := skipValue(data, i)
		if end >= 0 {
			out = append(out, span{i, end})
		}
		return end, nil
	})
	return out, end, err
}

// eachElement walks the comma-separated list between two brackets, and returns the offset after it. read returns the
// offset after an element, or a negative one where it has no end.
func eachElement(data []byte, i int, open, closing byte, read func(int) (int, error)) (int, error) {
	if i >= len(data) || data[i] != open {
		return 0, errJSON
	}
	if i = skipSpace(data, i+1); i < len(data) && data[i] == closing {
		return i + 1, nil
	}
	for {
		end, err := read(i)
		if err != nil || end < 0 {
			return 0, errJSON
		}
		if i = skipSpace(data, end); i >= len(data) {
			return 0, errJSON
		}
		switch data[i] {
		case closing:
			return i + 1, nil
		case ',':
			i = skipSpace(data, i+1)
		default:
			return 0, errJSON
		}
	}
}

// jsonString decodes a JSON string; false where it is none.
func jsonString(raw []byte) (string, bool) {
	if len(raw) < 2 || raw[0] != '"' {
		return "", false
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1]), true
	}
	var s string
	err := json.Unmarshal(raw, &s)
	return s, err == nil
}

// appendJSONString appends s as a JSON string.
func appendJSONString(out []byte, s string) []byte {
	plain := true
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c == '"' || c == '\\' || c >= 0x7f {
			plain = false
			break
		}
	}
	if plain {
		return append(append(append(out, '"'), s...), '"')
	}
	quoted, _ := json.Marshal(s) // A string can always be marshalled.
	return append(out, quoted...)
}

// tree is the skeleton of a document: where its fields stand. pos is a byte offset in JSON and a line number in YAML.
type tree struct {
	pos    int
	span   span // of the value, in JSON only
	keys   []string
	values []*tree // of keys in an object, or the elements of an array
	array  bool
}

// jsonTree reads the skeleton of the value at offset i of well-formed JSON, which is at pos as far as its owner is
// concerned.
func jsonTree(data []byte, at span, pos int) *tree {
	t := &tree{pos: pos, span: at}
	switch data[at.start] {
	case '{':
		members, _ := jsonMembers(data, at.start)
		for _, m := range members {
			t.keys = append(t.keys, m.key)
			t.values = append(t.values, jsonTree(data, m.value, m.keyStart))
		}
	case '[':
		t.array = true
		items, _, _ := jsonItems(data, at.start)
		for _, item := range items {
			t.values = append(t.values, jsonTree(data, item, item.start))
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
