package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logs "k8s.io/component-base/logs/api/v1"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"

	"nodeproxy/source"
)

// document is a configuration file as it was read.
type document struct {
	path  string
	lines map[string]int // of each field that has a value
	// passedOver are fields that are unknown or given twice. kube-proxy, too, only warns of them in a file of version v1alpha1:
	// older files have fields that are gone since.
	passedOver []source.Finding
}

// at says where a field stands.
func (d *document) at(field string) string { return fmt.Sprintf("%s:%d", d.path, d.lines[field]) }

// decode reads a KubeProxyConfiguration into kp. Its error has a line, with file, line and field, for every field of the wrong
// type. Fields that are unknown are passed over; of those given twice, the last one counts.
func decode(path string, data []byte, kp *proxyconfig.KubeProxyConfiguration) (*document, error) {
	root, err := single(path, data)
	if err != nil {
		return nil, err
	}
	d := &decoder{document: document{path: path, lines: map[string]int{}}}
	if root.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s:%d: a KubeProxyConfiguration is wanted here", path, max(root.Line, 1))
	}
	d.object(root, reflect.ValueOf(kp).Elem(), "")
	if len(d.errs) == 0 {
		d.identity("apiVersion", kp.APIVersion, proxyconfig.SchemeGroupVersion.String())
		d.identity("kind", kp.Kind, "KubeProxyConfiguration")
	}
	return &d.document, errors.Join(d.errs...)
}

var yamlLine = regexp.MustCompile(`^yaml: line (\d+): `)

// single parses a file that has one document.
func single(path string, data []byte) (*yaml.Node, error) {
	stream := yaml.NewDecoder(bytes.NewReader(data))
	var found *yaml.Node
	for {
		var node yaml.Node
		err := stream.Decode(&node)
		switch {
		case errors.Is(err, io.EOF) && found == nil:
			return nil, fmt.Errorf("%s: the file is empty; a KubeProxyConfiguration is wanted", path)
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil && yamlLine.MatchString(err.Error()):
			return nil, errors.New(yamlLine.ReplaceAllString(err.Error(), path+":$1: not YAML: "))
		case err != nil:
			return nil, fmt.Errorf("%s: not YAML: %s", path, strings.TrimPrefix(err.Error(), "yaml: "))
		}
		content := node.Content[0]
		switch {
		case content.Kind == yaml.ScalarNode && content.Tag == "!!null": // Between two separators.
		case found != nil:
			return nil, fmt.Errorf("%s:%d: a second document; a configuration file has one", path, content.Line)
		default:
			found = content
		}
	}
}

// decoder fills a value by a document and gathers what is wrong.
type decoder struct {
	document
	errs []error
}

func (d *decoder) fail(node *yaml.Node, field, format string, args ...any) {
	where := fmt.Sprintf("%s:%d: ", d.path, node.Line)
	if field != "" {
		where += field + ": "
	}
	d.errs = append(d.errs, errors.New(where+fmt.Sprintf(format, args...)))
}

// passOver notes a field that has no effect where it stands.
func (d *decoder) passOver(node *yaml.Node, field, detail, effect string) {
	d.passedOver = append(d.passedOver, source.Finding{
		Severity: source.Problem, Where: fmt.Sprintf("%s:%d", d.path, node.Line), Field: field, Detail: detail, Effect: effect,
	})
}

func (d *decoder) identity(field, got, want string) {
	if got != want {
		where := d.path
		if d.lines[field] > 0 {
			where = d.at(field)
		}
		d.errs = append(d.errs, fmt.Errorf("%s: %s: %q; only %q is understood", where, field, got, want))
	}
}

// object reads a mapping into a struct.
func (d *decoder) object(node *yaml.Node, v reflect.Value, path string) {
	fields := fieldsOf(v)
	seen := map[string]int{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		name := key.Value
		field, known := fields[name]
		switch {
		case !known:
			d.passOver(key, join(path, name), "unknown field"+similar(name, fields), "it is ignored")
			continue
		case seen[name] > 0:
			d.passOver(key, join(path, name), fmt.Sprintf("given twice, on line %d too", seen[name]), "the last one counts")
			d.forget(field, join(path, name))
		}
		seen[name] = key.Line
		d.value(value, field, join(path, name))
	}
}

// forget takes back what a field was set to.
func (d *decoder) forget(v reflect.Value, path string) {
	v.SetZero()
	for field := range d.lines {
		if field == path || strings.HasPrefix(field, path+".") {
			delete(d.lines, field)
		}
	}
}

func similar(name string, fields map[string]reflect.Value) string {
	for other := range fields {
		if strings.EqualFold(name, other) {
			return fmt.Sprintf("; there is %q", other)
		}
	}
	return ""
}

// value reads a node into a field.
func (d *decoder) value(node *yaml.Node, v reflect.Value, path string) {
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	if node.Kind == yaml.ScalarNode && node.Tag == "!!null" {
		return
	}
	if v.Kind() == reflect.Pointer {
		v.Set(reflect.New(v.Type().Elem()))
		v = v.Elem()
	}
	if isObject(v) {
		if node.Kind != yaml.MappingNode {
			d.fail(node, path, "%s is no group of fields", shown(node))
			return
		}
		d.object(node, v, path)
		return
	}
	d.lines[path] = node.Line
	d.dropRepeated(node, path)
	err := decodeLeaf(node, v, true)
	if err != nil && strings.Contains(err.Error(), "unknown field") {
		d.passOver(node, path, strings.TrimPrefix(err.Error(), "json: "), "it is ignored")
		v.SetZero()
		err = decodeLeaf(node, v, false)
	}
	if err != nil {
		d.fail(node, path, "%s is no %s", shown(node), wanted(v))
	}
}

// dropRepeated leaves the last of those entries of a mapping, or of mappings within it, that have the same key.
func (d *decoder) dropRepeated(node *yaml.Node, path string) {
	if node.Kind != yaml.MappingNode {
		for _, inner := range node.Content {
			d.dropRepeated(inner, path)
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
			d.passOver(key, join(path, key.Value), fmt.Sprintf("given twice, on line %d too", node.Content[at].Line),
				"the last one counts")
			continue
		}
		d.dropRepeated(node.Content[i+1], join(path, key.Value))
		kept = append(kept, key, node.Content[i+1])
	}
	node.Content = kept
}

// decodeLeaf reads a node into a value without named fields of its own. Booleans may be spelt as in YAML 1.1, all else is as
// in JSON. With strict, an unknown field in it is an error.
func decodeLeaf(node *yaml.Node, v reflect.Value, strict bool) error {
	if v.Kind() == reflect.Bool {
		return node.Decode(v.Addr().Interface())
	}
	var content any
	if err := node.Decode(&content); err != nil {
		return err
	}
	text, err := json.Marshal(content)
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	if strict {
		decoder.DisallowUnknownFields()
	}
	return decoder.Decode(v.Addr().Interface())
}

// isObject reports whether a value is a struct that is written as its fields.
func isObject(v reflect.Value) bool {
	_, custom := v.Addr().Interface().(json.Unmarshaler)
	return v.Kind() == reflect.Struct && !custom
}

// fieldsOf returns the fields of a struct by their names in JSON.
func fieldsOf(v reflect.Value) map[string]reflect.Value {
	out := map[string]reflect.Value{}
	for i := range v.NumField() {
		field := v.Type().Field(i)
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" && field.Anonymous {
			for inner, field := range fieldsOf(v.Field(i)) {
				out[inner] = field
			}
		} else {
			out[name] = v.Field(i)
		}
	}
	return out
}

// lookup finds a field by its path.
func lookup(kp *proxyconfig.KubeProxyConfiguration, path string) (reflect.Value, bool) {
	v := reflect.ValueOf(kp).Elem()
	for _, name := range strings.Split(path, ".") {
		var ok bool
		if !isObject(v) {
			return v, false
		}
		if v, ok = fieldsOf(v)[name]; !ok {
			return v, false
		}
		if v.Kind() == reflect.Pointer && !v.IsNil() {
			v = v.Elem()
		}
	}
	return v, true
}

// written returns a field's value as a file would have it.
func written(v reflect.Value) string {
	text, err := json.Marshal(v.Interface())
	if err != nil {
		return fmt.Sprint(v.Interface())
	}
	return strings.Trim(string(text), `"`)
}

// empty reports whether a field says nothing.
func empty(v reflect.Value) bool {
	return v.IsZero() || (v.Kind() == reflect.Slice || v.Kind() == reflect.Map) && v.Len() == 0 || written(v) == "0"
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// shown is a node as an error shows it.
func shown(node *yaml.Node) string {
	switch {
	case node.Kind == yaml.MappingNode:
		return "a group of fields"
	case node.Kind == yaml.SequenceNode:
		return "this list"
	case node.Tag == "!!str":
		return fmt.Sprintf("%q", node.Value)
	}
	return node.Value
}

// wanted describes the values that a field takes.
func wanted(v reflect.Value) string {
	switch v.Interface().(type) {
	case metav1.Duration, logs.TimeOrMetaDuration:
		return "duration such as 30s"
	}
	switch kind := v.Kind(); {
	case kind == reflect.String:
		return "string"
	case kind == reflect.Bool:
		return "boolean"
	case slices.Contains([]reflect.Kind{reflect.Int32, reflect.Uint32}, kind):
		return fmt.Sprintf("%s number of 32 bits", map[bool]string{true: "whole", false: "natural"}[kind == reflect.Int32])
	case kind == reflect.Float32:
		return "number"
	case kind == reflect.Map:
		return "map of names to booleans"
	case v.Type() == reflect.TypeFor[[]string]():
		return "list of strings"
	}
	return v.Type().Name()
}
