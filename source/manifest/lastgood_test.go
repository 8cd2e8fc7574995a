package manifest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/source"
)

// TestLastGood plays two versions of a file and holds what is in force after the second: if any document of that can't be read, the
// first.
func TestLastGood(t *testing.T) {
	t.Parallel()
	web1, web1Line := at("web", 1)
	web2, _ := at("web", 2)
	api1, api1Line := at("api", 5)
	api2, api2Line := at("api", 6)
	const jsonWeb = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}`
	const list = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: web}, " +
		"spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}\n"
	both, bothLines := web1+"---\n"+api1, api1Line+web1Line
	for name, test := range map[string]struct{ before, after, want, said string }{
		"same":          {both, "# comment\n" + api1 + "---\n" + web1, bothLines, ""},
		"one less":      {both, api2, api2Line, ""},
		"syntax":        {both, strings.Replace(web2, "ports:", "ports: }", 1) + "---\n" + api2, bothLines, effectKept},
		"type":          {both, strings.Replace(web2, "80", "http", 1) + "---\n" + api2, bothLines, effectKept},
		"rule":          {both, strings.Replace(web2, "ports", "type: Nodeport\n  ports", 1) + "---\n" + api2, bothLines, effectKept},
		"field twice":   {both, strings.Replace(web2, "name: web", "name: web\n  labels: {a: b}\n  labels: {a: c}", 1) + "---\n" + api2, bothLines, effectKept},
		"name twice":    {both, strings.Replace(web2, "name: web", "name: web\n  name: other", 1) + "---\n" + api2, bothLines, effectKept},
		"kind misspelt": {both, strings.Replace(web2, "Service", "Serivce", 1) + "---\n" + api2, bothLines, effectKept},
		"kind in lower case": {both, strings.Replace(both, "kind: Service\n", "kind: service\n", 1), bothLines,
			`v1 has no kind "service"; ` + effectKept},
		"all kinds in lower case": {both, strings.ReplaceAll(both, "kind: Service\n", "kind: service\n"), bothLines,
			`v1 has no kind "service"; ` + effectKept},
		"lines that end with a carriage return alone": {both, strings.ReplaceAll(both, "\n", "\r"), bothLines,
			"lines have to end with a line feed; " + effectKept},
		"nothing behind a fault": {both, web1 + "---\n" + strings.Replace(api1, "spec:", "spec: {", 1), bothLines, effectKept},
		"no separator":           {both, web1 + api2, bothLines, effectKept},
		"new":                    {web1, web2 + "---\n" + strings.Replace(api1, "Service", "Serivce", 1), web1Line, effectKept},
		"one removed":            {both, strings.Replace(web2, "80", "http", 1), bothLines, effectKept},
		"name lost":              {both, "kind: [\n---\n" + api2 + "---\n" + web2, bothLines, effectKept},
		"JSON":                   {jsonWeb, strings.Replace(jsonWeb, "}]", "]", 1), web1Line, effectKept},
		"JSON, items twice": {`{"kind":"List","apiVersion":"v1","items":[` + jsonWeb + `]}`,
			`{"kind":"List","apiVersion":"v1","items":[` + strings.Replace(jsonWeb, "0.1", "0.2", 1) + `],"items":[]}`, web1Line, effectKept},
		"JSON, cut off": {jsonWeb, `{"apiVersion":"v1","kind":"Serv`, web1Line, effectKept},
		"List":          {list, strings.Replace(list, "port: 80", "port: x", 1), web1Line, effectKept},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var f findings
			p := newPlayer()
			p.s.findings.report = f.Report
			p.put(map[string]string{"f.yaml": test.before})
			before := len(f)
			p.put(map[string]string{"f.yaml": test.after})
			text := f[before:].String()
			same(t, "objects", describe(p.all), test.want)
			if test.said == "" && strings.Contains(text, "problem") || !strings.Contains(text, test.said) {
				t.Errorf("want %s\ngot %s", test.said, text)
			}
			for _, other := range []string{effectKept, effectLeftOut, leftOut("Service")} {
				if !strings.HasSuffix(test.said, other) && strings.Contains(text, other) {
					t.Errorf("want only %q\ngot %s", test.said, text)
				}
			}
			// The same file once more: nothing is delivered and nothing is said again, not even of other lines.
			before = len(f)
			p.put(map[string]string{"f.yaml": "\n" + test.after})
			if len(f) != before {
				t.Errorf("said again: %s", f[before:])
			}
			// A start over the file as it was at first has the same result as a repair.
			p.put(map[string]string{"f.yaml": test.before})
			fresh := newPlayer()
			fresh.put(map[string]string{"f.yaml": test.before})
			same(t, "repaired", describe(p.all), describe(fresh.all))
		})
	}
}

// TestFaultMoves holds that a fault is on the line on which it is now, though its document is as it was.
func TestFaultMoves(t *testing.T) {
	t.Parallel()
	p := newPlayer()
	for line, above := range []string{"", "# one\n", "# one\n# two\n"} {
		p.put(map[string]string{"f.yaml": above + "---\na: [\n"})
		if want := fmt.Sprintf("f.yaml:%d: ", line+2); !strings.HasPrefix(p.s.files["f.yaml"].fault, want) {
			t.Errorf("%q is not at %s", p.s.files["f.yaml"].fault, want)
		}
	}
}

// TestDuplicateGoesAway holds that the second of two definitions comes into force when the first goes away.
func TestDuplicateGoesAway(t *testing.T) {
	t.Parallel()
	web1, web1Line := at("web", 1)
	web2, web2Line := at("web", 2)
	p := newPlayer()
	p.put(map[string]string{"a.yaml": web1, "b.yaml": web2})
	same(t, "both", describe(p.all), web1Line)
	p.put(nil, "a.yaml")
	same(t, "one", describe(p.all), web2Line)
	p.put(map[string]string{"a.yaml": web1})
	same(t, "both again", describe(p.all), web1Line)
}

// TestMove holds that a Service which takes another one's allocated address is reported.
func TestMove(t *testing.T) {
	t.Parallel()
	var f findings
	_, s, err := Config{Path: "x", Report: f.Report}.open()
	require.NoError(t, err)
	put := func(name, content string) string {
		return describe(s.update([]*reading{{path: name, data: []byte(content)}}, nil))
	}
	first := put("a.yaml", service("web", "ports: [{port: 80}]"))
	ip := strings.Fields(first)[3]
	put("b.yaml", service("thief", "clusterIP: "+ip, "ports: [{port: 80}]"))
	if want := "a.yaml:5: Service default/web: spec.clusterIP: the allocated " + ip + " belongs to another Service now; it moves to "; !strings.Contains(f.String(), want) {
		t.Errorf("want %s\ngot %s", want, f)
	}
	before := len(f)
	put("c.yaml", service("honest", "ports: [{port: 80}]"))
	for _, x := range f[before:] {
		if strings.Contains(x.Effect, "moves to") {
			t.Error(x)
		}
	}
	standing := func() (n int) {
		for _, x := range s.findings.all() {
			if strings.Contains(x.Effect, "moves to") {
				n++
			}
		}
		return n
	}
	if n := standing(); n != 1 {
		t.Errorf("%d findings stand, want 1", n)
	}
	if again := describe(s.update(nil, []string{"b.yaml"})); !strings.Contains(again, ip) || standing() != 0 {
		t.Errorf("without the thief, %d findings stand: %s", standing(), again)
	}
}

// TestComment holds that a comment above an object delivers nothing.
func TestComment(t *testing.T) {
	t.Parallel()
	p := newPlayer()
	p.put(map[string]string{"services.yaml": service("web", webSelector, "ports: [{port: 80}]"), "pod.yaml": pod("a", "10.0.0.1")})
	before := describe(p.all)
	p.all = source.Batch{}
	p.put(map[string]string{"pod.yaml": "# only a comment\n" + pod("a", "10.0.0.1")})
	if !p.all.Empty() || before == "" {
		t.Errorf("a comment delivers %s", describe(p.all))
	}
}
