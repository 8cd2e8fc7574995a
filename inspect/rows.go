package inspect

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"iter"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// A list of all Services has megabytes. It is written and read row by row, so that it takes no memory that counts, and the daemon need not
// collect it while others wait for a change. The text is that of encoding/json, made in a fraction of the time.

// rowFields are the fields of a struct in the order in which encoding/json writes them.
type rowFields []rowField

type rowField struct {
	index []int
	name  string // as in the text, with quotes and colon
	// omit says that the field is left out when it is empty.
	omit bool
	// inner are the fields of the struct that it points to; nil for any other field.
	inner rowFields
}

// fieldsOf returns the fields of a type of struct, each of which has a name in its tag.
func fieldsOf(t reflect.Type) (out rowFields) {
	for _, f := range reflect.VisibleFields(t) {
		if f.Anonymous {
			continue
		}
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		field := rowField{index: f.Index, name: strconv.Quote(name) + ":", omit: options != ""}
		if f.Type.Kind() == reflect.Pointer {
			field.inner = fieldsOf(f.Type.Elem())
		}
		out = append(out, field)
	}
	return out
}

// portFields are the fields of a ServicePort.
var portFields = sync.OnceValue(func() rowFields { return fieldsOf(reflect.TypeFor[ServicePort]()) })

// piece is how much of a list is written at once, and pieces are buffers for that.
const piece = 32 << 10

var pieces = sync.Pool{New: func() any { return new(make([]byte, 0, piece+piece/8)) }}

// writeRows writes a list of rows as a json.Encoder does.
func writeRows(w io.Writer, rows iter.Seq[ServicePort]) error {
	buffer := pieces.Get().(*[]byte)
	defer pieces.Put(buffer)
	fields, text, before := portFields(), *buffer, byte('[')
	var row ServicePort
	value := reflect.ValueOf(&row).Elem()
	for row = range rows {
		text = fields.append(append(text, before), value)
		before = ','
		if len(text) < piece {
			continue
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
		text = text[:0]
		runtime.Gosched() // Where there is one processor, a change does not wait for the rest.
	}
	if before == '[' {
		text = append(text, before)
	}
	_, err := w.Write(append(text, "]\n"...))
	return err
}

// append appends a struct as an object.
func (fields rowFields) append(b []byte, v reflect.Value) []byte {
	before := byte('{')
	for i := range fields {
		f := v.FieldByIndex(fields[i].index)
		if fields[i].omit && empty(f) {
			continue
		}
		b = append(append(b, before), fields[i].name...)
		if before = ','; fields[i].inner != nil {
			b = fields[i].inner.append(b, f.Elem())
		} else {
			b = appendValue(b, f)
		}
	}
	return append(b, '}')
}

// empty reports whether encoding/json leaves a value out that may be.
func empty(v reflect.Value) bool {
	if v.Kind() == reflect.Slice {
		return v.Len() == 0
	}
	if t, is := v.Addr().Interface().(*time.Time); is {
		return t.IsZero()
	}
	return v.IsZero()
}

func appendValue(b []byte, v reflect.Value) []byte {
	switch p := v.Addr().Interface().(type) {
	case *time.Time:
		return append(p.AppendFormat(append(b, '"'), time.RFC3339Nano), '"')
	case *netip.Addr:
		return append(p.AppendTo(append(b, '"')), '"')
	case *[]string:
		if len(*p) > 0 {
			before := byte('[')
			for _, s := range *p {
				b, before = appendText(append(b, before), s), ','
			}
			return append(b, ']')
		}
	}
	switch {
	case v.Kind() == reflect.String:
		return appendText(b, v.String())
	case v.CanInt():
		return strconv.AppendInt(b, v.Int(), 10)
	case v.CanUint():
		return strconv.AppendUint(b, v.Uint(), 10)
	}
	text, err := json.Marshal(v.Interface())
	if err != nil {
		panic(err) // A type that has no text is a mistake in this package.
	}
	return append(b, text...)
}

// plain reports whether a byte stands for itself in every string of encoding/json.
func plain(c byte) bool {
	return c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
}

func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if !plain(s[i]) {
			text, _ := json.Marshal(s) // A string has a text.
			return append(b, text...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}

// mostRow is how long the text of a row may be: that of a Service with all addresses that an object has room for.
const mostRow = 16 << 20

// readRows reads a list as json.Unmarshal does.
func readRows(r io.Reader) iter.Seq2[ServicePort, error] {
	return func(yield func(ServicePort, error) bool) {
		fields, rows := portFields(), bufio.NewScanner(r)
		rows.Buffer(make([]byte, 0, piece), mostRow)
		rows.Split(splitRows)
		var row ServicePort
		value, whole := reflect.ValueOf(&row).Elem(), false
		for rows.Scan() {
			text := rows.Bytes()
			if text[0] == ']' {
				whole = true
				continue // to the end of what is sent
			}
			var err error
			if !fields.read(text, value) { // It is by another version, or has characters that are rare.
				value.SetZero()
				err = json.Unmarshal(text, &row)
			}
			if !yield(row, err) || err != nil {
				return
			}
		}
		err := rows.Err()
		if err == nil && !whole {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			yield(ServicePort{}, err)
		}
	}
}

// splitRows is a bufio.SplitFunc for a list: each object in it, and the bracket at its end.
func splitRows(text []byte, _ bool) (advance int, token []byte, err error) {
	begin := bytes.IndexAny(text, "{]")
	if begin < 0 {
		return len(text), nil, nil
	}
	if text[begin] == ']' {
		return begin + 1, text[begin : begin+1], nil
	}
	depth, quoted := 0, false
	for i := begin; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{':
			depth++
		case c == '}':
			if depth--; depth == 0 {
				return i + 1, text[begin : i+1], nil
			}
		}
	}
	return begin, nil, nil
}

// read reads the text of an object into a struct, in place of what that had before. It returns false for one that append does not write, or
// writes with the help of encoding/json.
func (fields rowFields) read(text []byte, v reflect.Value) bool {
	text = text[1:] // without the brace
	for i := range fields {
		f := v.FieldByIndex(fields[i].index)
		if !bytes.HasPrefix(text, []byte(fields[i].name)) {
			if !fields[i].omit {
				return false
			}
			f.SetZero()
			continue
		}
		rest, ok := fields[i].read(text[len(fields[i].name):], f)
		if !ok || len(rest) == 0 || rest[0] != ',' && rest[0] != '}' {
			return false
		}
		if text = rest[1:]; rest[0] == '}' {
			for _, f := range fields[i+1:] {
				v.FieldByIndex(f.index).SetZero()
			}
			return len(text) == 0
		}
	}
	return false
}

// read reads the value that a text begins with, and returns the rest.
func (field *rowField) read(text []byte, v reflect.Value) (rest []byte, ok bool) {
	if field.inner == nil {
		return readValue(text, v)
	}
	end := bytes.IndexByte(text, '}') + 1
	v.Set(reflect.New(v.Type().Elem())) // The row before keeps its own.
	return text[end:], end > 0 && field.inner.read(text[:end], v.Elem())
}

func readValue(text []byte, v reflect.Value) (rest []byte, ok bool) {
	switch p := v.Addr().Interface().(type) {
	case *time.Time:
		s, rest, ok := cutText(text)
		return rest, ok && p.UnmarshalText(s) == nil
	case *netip.Addr:
		s, rest, ok := cutText(text)
		return rest, ok && p.UnmarshalText(s) == nil
	case *[]string:
		*p = nil
		for begin := byte('['); len(text) > 0 && text[0] == begin; begin = ',' {
			var s []byte
			if s, text, ok = cutText(text[1:]); !ok {
				return nil, false
			}
			*p = append(*p, string(s))
		}
		return bytes.CutPrefix(text, []byte("]"))
	}
	if v.Kind() == reflect.String {
		s, rest, ok := cutText(text)
		if ok && string(s) != v.String() { // Most are as in the row before.
			v.SetString(string(s))
		}
		return rest, ok
	}
	end := slices.IndexFunc(text, func(c byte) bool { return c == ',' || c == '}' })
	if end < 0 {
		return nil, false
	}
	switch number := string(text[:end]); {
	case v.CanInt():
		n, err := strconv.ParseInt(number, 10, v.Type().Bits())
		v.SetInt(n)
		return text[end:], err == nil
	case v.CanUint():
		n, err := strconv.ParseUint(number, 10, v.Type().Bits())
		v.SetUint(n)
		return text[end:], err == nil
	}
	return nil, false
}

// cutText returns the string that a text begins with, if all its characters stand for themselves, and the rest.
func cutText(text []byte) (s, rest []byte, ok bool) {
	if len(text) == 0 || text[0] != '"' {
		return nil, nil, false
	}
	for i := 1; i < len(text); i++ {
		if !plain(text[i]) {
			return text[1:i], text[i+1:], text[i] == '"'
		}
	}
	return nil, nil, false
}
