package config

import (
	"bytes"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	kyaml "sigs.k8s.io/yaml"
)

// Effective is the configuration from defaults, file and flags, before it is validated.
type Effective struct {
	values
	doc   *file                              // nil without a file
	file  proxyconfig.KubeProxyConfiguration // as the file says it
	given map[string]string                  // which flag gave a field its value; flags without a field by their own name
}

// Effective reads the file, if there is one, and applies the flags to it. The error is about the file, or about each of its fields
// that can't be read.
func (f *Flags) Effective() (*Effective, error) {
	path := f.values.own.configFile
	if path == "" {
		return f.over(nil)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	f.read = data
	return f.over(data)
}

// over applies the flags to a file with this content.
func (f *Flags) over(data []byte) (*Effective, error) {
	e := &Effective{}
	if path := f.values.own.configFile; path != "" {
		var err error
		if e.doc, err = decode(path, data, &e.file); err != nil {
			return nil, err
		}
		e.kp = *e.file.DeepCopy()
	}
	e.defaults()
	var err error
	e.given, err = e.apply(f.args)
	return e, err
}

// YAML returns the configuration as a file that both nodeproxy and kube-proxy read. Comments show the values of the file that flags
// override, and nodeproxy's own settings, for which there are only flags.
func (e *Effective) YAML() ([]byte, error) {
	text, err := kyaml.Marshal(&e.kp)
	if err != nil {
		return nil, err
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return nil, err
	}
	for _, field := range e.saidFields() {
		if o, ok := e.overridden(field); ok {
			comment(doc.Content[0], strings.Split(field, "."),
				fmt.Sprintf("%s overrides %s, which has %s", e.given[field], e.doc.at(field), o.file))
		}
	}
	var out bytes.Buffer
	out.WriteString(e.ownSettings())
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(&doc); err != nil {
		return nil, err
	}
	return out.Bytes(), encoder.Close()
}

// comment puts a comment behind a field.
func comment(node *yaml.Node, path []string, text string) {
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		switch {
		case key.Value != path[0]:
		case len(path) > 1:
			comment(value, path[1:], text)
		case value.Kind == yaml.ScalarNode:
			value.LineComment = text
		default:
			key.LineComment = text
		}
	}
}

// commandFlags are flags to do something else than to run.
var commandFlags = map[string]bool{"write-config-to": true, "cleanup": true, "init-only": true}

// ownSettings returns nodeproxy's own settings as comments.
func (e *Effective) ownSettings() string {
	var b strings.Builder
	b.WriteString("# Settings without a field, which are made by flags:\n")
	v := e.values // Flags are bound to a copy, whose values are their defaults.
	v.flags().VisitAll(func(f *pflag.Flag) {
		if flagFields[f.Name] == "" && !f.Hidden && !commandFlags[f.Name] && f.DefValue != "" {
			fmt.Fprintf(&b, "#   --%s=%s\n", f.Name, f.DefValue)
		}
	})
	for _, s := range []struct{ field, address string }{
		{"healthzBindAddress", e.kp.HealthzBindAddress}, {"metricsBindAddress", e.kp.MetricsBindAddress},
	} {
		if s.address == "" {
			fmt.Fprintf(&b, "#   %s=    (off; %s: \"\" in a file is the default)\n", flagOf(s.field), s.field)
		}
	}
	return b.String()
}
