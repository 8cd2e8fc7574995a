package document

import (
	"bytes"
	"cmp"
	gojson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
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
// repeated, the last one counts. If some fields can't be read, obj must not be used: faults are all of them. The error
// is a *SyntaxError, where the JSON itself is broken.
func Decode(data []byte, obj any) (ignored, faults []Fault, err error) {
	strict, err := json.UnmarshalStrict(data, obj)
	if err != nil {
		// The decoder names only the first such field, and not which of a list: each is tried by itself.
		node, broken := parseJSON(data, 1)
		if broken != nil {
			return nil, nil, broken
		}
		if faults = unreadable(node, reflect.TypeOf(obj).Elem(), ""); faults == nil {
			faults = []Fault{{Detail: plainError(err, nil)}}
		}
		return nil, faults, nil
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

var unmarshaler = reflect.TypeFor[gojson.Unmarshaler]()

// unreadable returns the fields of a node, which is to become a value of type t, that can't be read.
func unreadable(n *yaml.Node, t reflect.Type, path string) (out []Fault) {
	for t.Kind() == reflect.Pointer && !t.Implements(unmarshaler) {
		t = t.Elem()
	}
	custom := t.Implements(unmarshaler) || reflect.PointerTo(t).Implements(unmarshaler)
	switch {
	case !custom && n.Kind == yaml.SequenceNode && t.Kind() == reflect.Slice:
		for i, item := range n.Content {
			out = append(out, unreadable(item, t.Elem(), path+"["+strconv.Itoa(i)+"]")...)
		}
		return out
	case !custom && n.Kind == yaml.MappingNode && (t.Kind() == reflect.Struct || t.Kind() == reflect.Map):
		for i := 0; i < len(n.Content); i += 2 {
			name := n.Content[i].Value
			if field := fieldType(t, name); field != nil {
				out = append(out, unreadable(n.Content[i+1], field, join(path, name))...)
			}
		}
		return out
	}
	value, err := ToJSON(n, 0)
	if err == nil {
		err = json.UnmarshalCaseSensitivePreserveInts(value, reflect.New(t).Interface())
	}
	if err != nil {
		detail := plainError(err, value)
		if strings.HasSuffix(path, "selector.matchLabels") || strings.HasSuffix(path, "selector.matchExpressions") {
			detail = "unlike that of a Deployment, this selector has the labels themselves"
		}
		return []Fault{{path, detail, value}}
	}
	return nil
}

// fieldType returns the type of what a map or struct has by a name; nil for nothing.
func fieldType(t reflect.Type, name string) reflect.Type {
	if t.Kind() == reflect.Map {
		return t.Elem()
	}
	for i := range t.NumField() {
		f := t.Field(i)
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if tag == "" && f.Anonymous && f.Type.Kind() == reflect.Struct {
			if inner := fieldType(f.Type, name); inner != nil {
				return inner
			}
		} else if cmp.Or(tag, f.Name) == name {
			return f.Type
		}
	}
	return nil
}

// plainError says in plain words what the decoder found wrong.
func plainError(err error, value []byte) string {
	if t, ok := errors.AsType[*gojson.UnmarshalTypeError](err); ok {
		want := wanted(t.Type)
		if t.Type.Kind() == reflect.String && t.Value != "object" && t.Value != "array" {
			want += " (quote it)"
		}
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

// wanted says what a field of a type takes.
func wanted(t reflect.Type) string {
	if t.Kind() == reflect.Pointer {
		return wanted(t.Elem())
	}
	return cmp.Or(takes[t.Kind()], "of another type")
}

var takes = map[reflect.Kind]string{
	reflect.String: "a string", reflect.Bool: plain["bool"], reflect.Slice: plain["array"], reflect.Map: plain["object"], reflect.Struct: plain["object"],
	reflect.Int: "a whole number", reflect.Int64: "a whole number", reflect.Float32: "a number", reflect.Float64: "a number",
	reflect.Int32: "a whole number of 32 bits", reflect.Uint32: "a whole number of 32 bits that is not negative",
}

// plain are plain words for types of JSON.
var plain = map[string]string{"object": "a mapping of fields", "array": "a list", "bool": "true or false"}
