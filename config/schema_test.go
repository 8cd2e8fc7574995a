package config

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/resource"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
)

// addrPort is the pattern of an IP address with a port, which the probes and monitors of the chart take from it.
const addrPort = `^([0-9.]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}$`

// schemaRules are what the chart's schema demands of fields beside their type. The chart reads the mode and both addresses itself.
var schemaRules = map[string]map[string]any{
	"apiVersion":         {"const": proxyconfig.SchemeGroupVersion.String()},
	"kind":               {"const": "KubeProxyConfiguration"},
	"mode":               {"enum": Modes()},
	"detectLocalMode":    {"enum": []any{"", "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", nil}},
	"healthzBindAddress": {"type": "string", "pattern": addrPort},
	"metricsBindAddress": {"type": "string", "pattern": "^$|" + addrPort},
	"logging.format":     {"enum": []any{"", "text", "json", nil}},
	"oomScoreAdj":        {"type": []string{"integer", "null"}, "minimum": -1000, "maximum": 1000},
}

// schemaOf is the JSON schema of a field of a KubeProxyConfiguration: its fields and no others, of their types, or null for one
// that is not given.
func schemaOf(t *testing.T, v reflect.Value, path string) map[string]any {
	t.Helper()
	if rule := schemaRules[path]; rule != nil {
		return rule
	}
	orNull := func(name string) map[string]any { return map[string]any{"type": []string{name, "null"}} }
	if isDuration(v) {
		out := orNull("string")
		if path == "logging.flushFrequency" {
			out["type"] = []string{"string", "integer", "null"}
		}
		out["pattern"] = `^(0|[0-9.]+(ns|us|µs|ms|s|m|h))*$`
		return out
	}
	if _, ok := v.Interface().(resource.QuantityValue); ok {
		return map[string]any{"type": []string{"string", "integer", "null"}}
	}
	switch v.Kind() {
	case reflect.Struct:
		properties := map[string]any{}
		for name, field := range fieldsOf(v) {
			properties[name] = schemaOf(t, field, join(path, name))
		}
		out := map[string]any{"type": []string{"object", "null"}, "additionalProperties": false, "properties": properties}
		if path == "" {
			out["type"], out["required"] = "object", []string{"mode", "healthzBindAddress"}
		}
		return out
	case reflect.Pointer:
		return schemaOf(t, reflect.New(v.Type().Elem()).Elem(), path)
	case reflect.Slice:
		out := orNull("array")
		out["items"] = schemaOf(t, reflect.New(v.Type().Elem()).Elem(), path+"[]")
		return out
	case reflect.Map:
		out := orNull("object")
		out["additionalProperties"] = schemaOf(t, reflect.New(v.Type().Elem()).Elem(), path+"[]")
		return out
	case reflect.String:
		return orNull("string")
	case reflect.Bool:
		return orNull("boolean")
	case reflect.Int32:
		out := orNull("integer")
		out["minimum"], out["maximum"] = -1<<31, 1<<31-1
		return out
	case reflect.Uint32:
		out := orNull("integer")
		out["minimum"], out["maximum"] = 0, 1<<32-1
		return out
	case reflect.Float32:
		return orNull("number")
	}
	t.Fatalf("%s: no schema for %s", path, v.Type())
	return nil
}

// TestChartSchema: the chart's schema knows the fields of a KubeProxyConfiguration, and no others. UPDATE=1, as "make docs" sets it,
// writes that part of it anew.
func TestChartSchema(t *testing.T) {
	t.Parallel()
	const path, mark, end = "../deploy/chart/values.schema.json", "\n    \"config\": {", "\n  }\n}\n"
	text := must(os.ReadFile(path))(t)
	schema, err := json.MarshalIndent(schemaOf(t, reflect.ValueOf(&proxyconfig.KubeProxyConfiguration{}).Elem(), ""), "    ", "  ")
	require.NoError(t, err)
	at := strings.LastIndex(string(text), mark)
	if at < 0 || !strings.HasSuffix(string(text), end) {
		t.Fatalf("%s does not end with $defs.config", path)
	}
	want := string(text[:at]) + strings.TrimSuffix(mark, "{") + string(schema) + end
	if want == string(text) {
		return
	}
	if os.Getenv("UPDATE") == "" {
		t.Errorf("%s is not what the fields are; \"make docs\" mends it", path)
	} else if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}
