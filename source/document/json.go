package document

import (
	"bytes"
	"encoding/json"
	"errors"
)

// The functions here scan JSON text without decoding it: they find the end of a document, the items of a list and the offset of a
// field. Unlike json.Decoder they match only brackets and strings, so that a fault within a value does not hide what follows it;
// the decoder checks each piece that they cut out.

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

// Span is a range of offsets in a text.
type Span struct{ Start, End int }

// Of returns the text of a span.
func (s Span) Of(data []byte) []byte { return data[s.Start:s.End] }

// Member is one key and value of a JSON object.
type Member struct {
	Key      string
	keyStart int
	Value    Span
}

var errJSON = errors.New("not well-formed JSON")

// Members returns the members of the object that starts at offset i, as far as it is well-formed.
func Members(data []byte, i int) ([]Member, error) {
	var out []Member
	_, err := eachMember(data, i, func(key string, at, start int) (int, error) {
		end := skipValue(data, start)
		out = append(out, Member{key, at, Span{start, end}})
		return end, nil
	})
	if n := len(out); err != nil && n > 0 && out[n-1].Value.End < 0 {
		out = out[:n-1]
	}
	return out, err
}

// eachMember walks the object that starts at offset i. read gets a key, its offset and that of its value, and returns the offset
// after the value.
func eachMember(data []byte, i int, read func(key string, at, start int) (int, error)) (end int, err error) {
	return eachElement(data, i, '{', '}', func(i int) (int, error) {
		end := skipValue(data, i)
		if end < 0 || data[i] != '"' {
			return 0, errJSON
		}
		key, ok := String(data[i:end])
		colon := skipSpace(data, end)
		if !ok || colon >= len(data) || data[colon] != ':' {
			return 0, errJSON
		}
		return read(key, i, skipSpace(data, colon+1))
	})
}

// Items lists the elements of the array that starts at offset i, and returns the offset after it.
func Items(data []byte, i int) (out []Span, end int, err error) {
	end, err = eachElement(data, i, '[', ']', func(i int) (int, error) {
		end := skipValue(data, i)
		if end >= 0 {
			out = append(out, Span{i, end})
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

// String decodes a JSON string; false where it is none.
func String(raw []byte) (string, bool) {
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
