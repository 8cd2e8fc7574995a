package document

import (
	"bytes"
	"cmp"
	gojson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sort"
	"strings"

	"sigs.k8s.io/json"
)

// Fault is what is wrong with a field.
type Fault struct {
	Field  string // its path; empty for the whole
	Detail string
	Value  []byte // as JSON
}

// The details of faults for which a field is ignored.
const (
	UnknownField   = "unknown field"
	DuplicateField = "duplicate field"
)

// Decode decodes JSON into an empty value as the API server does. Fields that are unknown or repeated are ignored; of those
// repeated, the last one counts. If some fields can't be read, obj must not be used: faults are the first of them. The error
// is a *SyntaxError, where the JSON itself is broken.
func Decode(data []byte, obj any) (ignored, faults []Fault, err error) {
	strict, err := json.UnmarshalStrict(data, obj)
	if err != nil {
		if err := CheckJSON(data); err != nil {
			return nil, nil, err
		}
		return nil, unreadable(data, reflect.TypeOf(obj).Elem(), err), nil
	}
	for _, s := range strict {
		f := Fault{Detail: s.Error()}
		if fe, ok := errors.AsType[json.FieldError](s); ok {
			f.Field = fe.FieldPath()
			f.Detail, _, _ = strings.Cut(f.Detail, " \"")
		}
		ignored = append(ignored, f)
	}
	return ignored, nil, nil
}

// CheckJSON says where JSON is broken, by a *SyntaxError.
func CheckJSON(data []byte) error {
	var v gojson.RawMessage
	err := gojson.Unmarshal(data, &v)
	if err == nil {
		return nil
	}
	line := 1
	if syntax, ok := errors.AsType[*gojson.SyntaxError](err); ok {
		line += bytes.Count(data[:max(int(syntax.Offset)-1, 0)], []byte{'\n'})
	}
	return &SyntaxError{line, "broken JSON: " + err.Error()}
}

// unreadable says which fields can't be read. The decoder names none, or not which of a list; so fields are taken away until
// it no longer complains.
func unreadable(data []byte, t reflect.Type, err error) []Fault {
	fails := func(data []byte) error {
		return json.UnmarshalCaseSensitivePreserveInts(data, reflect.New(t).Interface())
	}
	var out []Fault
	const most = 20
	for range most {
		at, cause := findFault(data, fails)
		if cause == nil {
			break
		}
		if at == nil {
			return append(out, Fault{Detail: plainError(err, nil)})
		}
		value := at.node().span.Of(data)
		out = append(out, Fault{at.path, plainError(cause, value), value})
		data = at.parent.without(data, func(i int) bool { return i == at.index })
	}
	return out
}

// place is a value within an object or array, and its field path.
type place struct {
	parent *tree
	index  int
	path   string
}

func (p *place) node() *tree { return p.parent.values[p.index] }

// findFault finds the first value without which data decodes further, and what the decoder says of it. The place is nil where no
// part alone is at fault; the error is nil where nothing is.
func findFault(data []byte, fails func([]byte) error) (at *place, cause error) {
	if cause = fails(data); cause == nil {
		return nil, nil
	}
	whole := parseJSON(data) // Of the data as they were given; the places in narrowed data differ.
	for steps := []int(nil); ; {
		node := parseJSON(data).at(steps)
		n := len(node.values)
		if n == 0 || fails(node.without(data, func(int) bool { return true })) != nil {
			return at, cause // No child, but the value as such.
		}
		// Without any child it decodes; so as more and more of them are left in, one is the first to fail.
		first := sort.Search(n-1, func(k int) bool { return fails(node.without(data, func(i int) bool { return i > k })) != nil })
		data = node.without(data, func(i int) bool { return i != first })
		err := fails(data)
		if err == nil {
			return at, cause
		}
		path := ""
		if at != nil {
			path = at.path
		}
		cause, at = err, &place{whole.at(steps), first, node.childPath(path, first)}
		steps = append(steps, first)
	}
}

// at returns what lies at the end of the steps from t.
func (t *tree) at(steps []int) *tree {
	for _, i := range steps {
		t = t.values[i]
	}
	return t
}

// without leaves some children of t out of the text. The others keep their index.
func (t *tree) without(data []byte, out func(i int) bool) []byte {
	text := make([]byte, 0, len(data)+8*len(t.values))
	done := 0
	for i, child := range t.values {
		if !out(i) {
			continue
		}
		start, nothing := child.span.Start, "null"
		if !t.array {
			start, nothing = child.pos, `"":null` // Some types can't be decoded from null, but unknown fields are ignored.
		}
		text = append(append(text, data[done:start]...), nothing...)
		done = child.span.End
	}
	return append(text, data[done:]...)
}

// plainError says in plain words what the decoder found wrong.
func plainError(err error, value []byte) string {
	if t, ok := errors.AsType[*gojson.UnmarshalTypeError](err); ok {
		want := wanted(t.Type)
		if len(value) > 0 && len(value) <= 60 {
			return fmt.Sprintf("must be %s, not %s", want, value)
		}
		return fmt.Sprintf("must be %s, not %s", want, cmp.Or(plain[t.Value], "a "+t.Value))
	}
	text := err.Error()
	if len(value) > 0 && len(value) <= 60 && !strings.Contains(text, string(bytes.Trim(value, `"`))) {
		text = fmt.Sprintf("%s: %s", text, value)
	}
	return "can't be read: " + strings.TrimPrefix(text, "json: ")
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string (quote it)"
	case reflect.Bool:
		return "true or false"
	case reflect.Int32:
		return "a whole number of 32 bits"
	case reflect.Uint32:
		return "a whole number of 32 bits that is not negative"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "a mapping of fields"
	case reflect.Pointer:
		return wanted(t.Elem())
	}
	return "of another type"
}

// plain are plain words for types of JSON.
var plain = map[string]string{"object": "a mapping of fields", "array": "a list", "bool": "true or false"}
