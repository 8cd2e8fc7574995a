package manifest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/source"
)

// FuzzDecode holds that no content of a file ends the program, that each finding says where it belongs and what happens,
// that whatever is delivered has safe names, and that a second reading of the same changes nothing.
func FuzzDecode(f *testing.F) {
	files, err := filepath.Glob("../../testdata/seeds/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatal(err, files)
	}
	for _, path := range files {
		data, err := os.ReadFile(path)
		require.NoError(f, err)
		f.Add(data, false)
	}
	for _, s := range []string{
		"", "\x00", "---", "...\n", "{", "[", "\"", "{\"a\"", "{\"a\":", "{\"items\":[", "a: &a [*a]", "<<: *a", "&a {<<: *a}", "? {a: b}\n: c",
		"- - - -", "%YAML 9.9\n---\na: b", "\ufeff", "\xff\xfea\x00", "a: |\n  ---\n", "{kind: List, apiVersion: v1, items: {}}",
		`{"kind":"List","apiVersion":"v1","items":[{},1,null,"x",[],{"kind":"Service"}]}`,
		`{"apiVersion":"v1","kind":"Service","metadata":{"name":"a\n-A X"},"spec":{"ports":[{"port":1e9}]}}`,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","labels":null},"status":{"podIPs":[{"ip":null}]}}`,
		`{"apiVersion":"v1","kind":"Service","metadata":null,"spec":null}`,
		"apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {type: LoadBalancer, sessionAffinity: ClientIP, sessionAffinityConfig: {}, ports: [{}]}",
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: x}\nports: [{}]\nendpoints: [{}]\n",
		"a: .inf\nb: .nan\nc: 0x7f\nd: 1_000\ne: 2001-01-01\nf: !!binary aGk=\ng: !foo bar\n",
	} {
		f.Add([]byte(s), false)
		f.Add([]byte(s), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, asJSON bool) {
		name := "f.yaml"
		if asJSON {
			name = "f.json"
		}
		var found findings
		cfg := tightConfig()
		cfg.Report = found.Report
		s, err := newStore(cfg)
		require.NoError(t, err)
		put := func() source.Batch {
			return s.update([]*reading{{path: name, data: data}}, nil)
		}
		b := put()
		for _, x := range found {
			if x.Where == "" || x.Detail == "" || x.Effect == "" {
				t.Errorf("%#v", x)
			}
		}
		for id, svc := range b.Services {
			if !safe(id.Name) || !safe(id.Namespace) || id.Name != svc.Name {
				t.Errorf("%q", id)
			}
			for _, p := range svc.Spec.Ports {
				if p.Port < 1 || p.Port > 65535 || p.Name != "" && !safe(p.Name) {
					t.Errorf("%+v", p)
				}
			}
		}
		for id := range b.EndpointSlices {
			if !safe(id.Name) || !safe(id.Namespace) {
				t.Errorf("%q", id)
			}
		}
		said := len(found)
		if again := put(); !again.Empty() || len(found) != said {
			t.Errorf("a second reading delivers %v and reports %v", again, found[said:])
		}
	})
}

// safe reports whether a text can't break out of a line or a word of a rule.
func safe(s string) bool {
	return len(s) < 200 && !strings.ContainsFunc(s, func(r rune) bool { return r < 0x21 || r > 0x7e })
}
