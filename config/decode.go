package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logs "k8s.io/component-base/logs/api/v1"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"

	"nodeproxy/source"
	"nodeproxy/source/document"
)

// file is a configuration file as it was read.
type file struct {
	path  string
	lines map[string]int // of each field that has a value
	// ignored are fields that are unknown or given twice. kube-proxy, too, only warns of them in a file of version v1alpha1: older
	// files have fields that are gone since.
	ignored []source.Finding
}

// at returns the place of a field, or of the file where it has no such field.
func (f *file) at(field string) string {
	if f.lines[field] == 0 {
		return f.path
	}
	return fmt.Sprintf("%s:%d", f.path, f.lines[field])
}

// decode reads a KubeProxyConfiguration into kp. Its error has a line, with file, line and field, for every field that can't be
// read. Fields that are unknown are ignored; of those given twice, the last one counts.
func decode(path string, data []byte, kp *proxyconfig.KubeProxyConfiguration) (*file, error) {
	root, err := single(path, data)
	if err != nil {
		return nil, err
	}
	f := &file{path: path, lines: map[string]int{}}
	f.tidy(root, "")
	text, err := document.ToJSON(root, len(data))
	if err != nil {
		return nil, located(path, err)
	}
	unknown, faults, err := document.Decode(text, kp)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, u := range unknown {
		f.ignore(document.Line(root, u.Field), u.Field, u.Detail+similar(kp, u.Field), "it is ignored")
	}
	var errs []error
	for _, x := range faults {
		if v, ok := lookup(kp, x.Field); ok && isDuration(v) {
			x.Detail = fmt.Sprintf("must be a duration such as 30s, not %s", x.Value)
		}
		errs = append(errs, fmt.Errorf("%s:%d: %s: %s", path, document.Line(root, x.Field), x.Field, x.Detail))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	var values map[string]any
	if err := json.Unmarshal(text, &values); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	f.locate(root, values, reflect.ValueOf(kp).Elem(), "")
	return f, errors.Join(f.identity("apiVersion", kp.APIVersion, proxyconfig.SchemeGroupVersion.String()),
		f.identity("kind", kp.Kind, "KubeProxyConfiguration"))
}

// single parses a file that has one document, a mapping.
func single(path string, data []byte) (*yaml.Node, error) {
	var root *yaml.Node
	for _, d := range document.SplitYAML(path, data) {
		node, err := d.Parse()
		switch {
		case err != nil:
			return nil, located(path, err)
		case node == nil || isNull(node): // Between two separators.
		case root != nil:
			return nil, fmt.Errorf("%s:%d: a second document; a configuration file has one", path, node.Line)
		default:
			root = node
		}
	}
	switch {
	case root == nil:
		return nil, fmt.Errorf("%s: the file is empty; it must hold a KubeProxyConfiguration", path)
	case root.Kind != yaml.MappingNode:
		return nil, fmt.Errorf("%s:%d: this is not a KubeProxyConfiguration", path, root.Line)
	}
	return root, nil
}

func isNull(node *yaml.Node) bool { return node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" }

// located puts the place of a fault in front of an error.
func located(path string, err error) error {
	if e, ok := errors.AsType[*document.SyntaxError](err); ok {
		return fmt.Errorf("%s:%d: %w", path, e.Line, err)
	}
	return fmt.Errorf("%s: %w", path, err)
}

// ignore adds a finding about a field without effect.
func (f *file) ignore(line int, field, detail, effect string) {
	f.ignored = append(f.ignored, source.Finding{
		Severity: source.Problem, Where: fmt.Sprintf("%s:%d", f.path, line), Field: field, Detail: detail, Effect: effect,
	})
}

func (f *file) identity(field, got, want string) error {
	if got == want {
		return nil
	}
	return fmt.Errorf("%s: %s: must be %q, not %q", f.at(field), field, want, got)
}

// tidy leaves the last of those entries of a mapping, or of mappings within it, that have the same key, and no field without a
// value: a duration can't be decoded from null. Text that YAML 1.1 takes for a boolean stays text where a field takes text.
func (f *file) tidy(node *yaml.Node, path string) {
	if node.Kind != yaml.MappingNode {
		for _, inner := range node.Content {
			f.tidy(inner, path)
		}
		return
	}
	last := map[string]int{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		last[node.Content[i].Value] = i
	}
	var kept []*yaml.Node
	for i := 0; i+1 < len(node.Content); i += 2 {
		key := node.Content[i]
		if at := last[key.Value]; at != i {
			f.ignore(key.Line, join(path, key.Value),
				fmt.Sprintf("given twice, on line %d too", node.Content[at].Line), "the last one counts")
			continue
		}
		value, field := node.Content[i+1], join(path, key.Value)
		v, known := lookup(&proxyconfig.KubeProxyConfiguration{}, field)
		if known && isNull(value) {
			continue
		}
		if known && v.Kind() == reflect.String && value.ShortTag() == "!!str" {
			value.Style = yaml.DoubleQuotedStyle // What may be a boolean elsewhere, such as no, is text here.
		}
		f.tidy(value, field)
		kept = append(kept, key, value)
	}
	node.Content = kept
}

// locate notes the line of each field of a struct that has a value.
func (f *file) locate(root *yaml.Node, values map[string]any, v reflect.Value, path string) {
	for name, field := range fieldsOf(v) {
		value, path := values[name], join(path, name)
		if value == nil {
			continue
		}
		if group, ok := value.(map[string]any); ok && isObject(field) {
			f.locate(root, group, field, path)
		} else {
			f.lines[path] = document.Line(root, path)
		}
	}
}

// similar names the field that an unknown one may be a misspelling of.
func similar(kp *proxyconfig.KubeProxyConfiguration, path string) string {
	group, name, ok := reflect.ValueOf(kp).Elem(), path, true
	if i := strings.LastIndexByte(path, '.'); i >= 0 {
		group, ok = lookup(kp, path[:i])
		name = path[i+1:]
	}
	if !ok || !isObject(group) {
		return ""
	}
	for other := range fieldsOf(group) {
		if strings.EqualFold(name, other) {
			return fmt.Sprintf("; there is %q", other)
		}
	}
	return ""
}

// isDuration reports whether a field takes a duration.
func isDuration(v reflect.Value) bool {
	switch v.Interface().(type) {
	case metav1.Duration, *metav1.Duration, logs.TimeOrMetaDuration:
		return true
	}
	return false
}

// isObject reports whether a value is a struct that is written as its fields.
func isObject(v reflect.Value) bool {
	_, custom := v.Addr().Interface().(json.Unmarshaler)
	return v.Kind() == reflect.Struct && !custom
}

// fieldsOf returns the fields of a struct by their names in JSON.
func fieldsOf(v reflect.Value) map[string]reflect.Value {
	out := map[string]reflect.Value{}
	for name, index := range indexesOf(v.Type()) {
		out[name] = v.FieldByIndex(index)
	}
	return out
}

// indexes are those of the fields of struct types, by their names in JSON: each command looks for hundreds of fields when it begins.
var indexes sync.Map

func indexesOf(t reflect.Type) map[string][]int {
	if known, is := indexes.Load(t); is {
		return known.(map[string][]int)
	}
	out := map[string][]int{}
	for _, field := range reflect.VisibleFields(t) {
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != "" || !field.Anonymous {
			out[name] = field.Index
		}
	}
	indexes.Store(t, out)
	return out
}

// lookup finds a field by its path.
func lookup(kp *proxyconfig.KubeProxyConfiguration, path string) (reflect.Value, bool) {
	v := reflect.ValueOf(kp).Elem()
	for _, name := range strings.Split(path, ".") {
		if !isObject(v) {
			return v, false
		}
		index, is := indexesOf(v.Type())[name]
		if !is {
			return reflect.Value{}, false
		}
		v = v.FieldByIndex(index)
		if v.Kind() == reflect.Pointer && !v.IsNil() {
			v = v.Elem()
		}
	}
	return v, true
}

// written returns a field's value as it is written in a file.
func written(v reflect.Value) string {
	text, err := json.Marshal(v.Interface())
	if err != nil {
		return fmt.Sprint(v.Interface())
	}
	return strings.Trim(string(text), `"`)
}

// empty reports whether a field has no value.
func empty(v reflect.Value) bool {
	return v.IsZero() || (v.Kind() == reflect.Slice || v.Kind() == reflect.Map) && v.Len() == 0 || written(v) == "0"
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
