package manifest

import (
	"strings"
	"testing"

	"nodeproxy/source"
	"nodeproxy/source/document"
)

// TestLastGood plays two versions of a file and holds what is in force after the second.
func TestLastGood(t *testing.T) {
	t.Parallel()
	web1, web1Line := at("web", 1)
	web2, web2Line := at("web", 2)
	api1, api1Line := at("api", 5)
	api2, api2Line := at("api", 6)
	inX := func(manifest string) string { return manifest + "metadata: {name: web, namespace: x}\n" }
	const specFirst = "apiVersion: v1\nkind: Service\nspec:\n  clusterIP: 10.96.0.1\n  ports: [{port: 80}]\n"
	for name, test := range map[string]struct{ before, after, want, said string }{
		"same":   {web1 + "---\n" + api1, "# comment\n" + api1 + "---\n" + web1, api1Line + web1Line, ""},
		"syntax": {web1 + "---\n" + api1, strings.Replace(web2, "ports:", "ports: }", 1) + "---\n" + api2, api2Line + web1Line, effectKept},
		"type":   {web1 + "---\n" + api1, strings.Replace(web2, "80", "http", 1) + "---\n" + api2, api2Line + web1Line, effectKept},
		"rule":   {web1 + "---\n" + api1, strings.Replace(web2, "80", "0", 1) + "---\n" + api2, api2Line + web1Line, effectKept},
		"field twice": {web1 + "---\n" + api1, strings.Replace(web2, "name: web", "name: web\n  labels: {a: b}\n  labels: {a: c}", 1) + "---\n" + api2,
			api2Line + web1Line, effectKept},
		"name twice":            {web1 + "---\n" + api1, strings.Replace(web2, "name: web", "name: web\n  name: other", 1) + "---\n" + api2, api2Line + web1Line, effectKept},
		"kind misspelt":         {web1 + "---\n" + api1, strings.Replace(web2, "Service", "Serivce", 1) + "---\n" + api2, api2Line + web1Line, effectKept},
		"separator lost":        {web1 + "---\n" + api1, web1 + api2, api1Line + web1Line, effectFile},
		"new and broken":        {web1, web2 + "---\n" + strings.Replace(api1, "80", "0", 1), web2Line, leftOut("Service")},
		"broken and removed":    {web1 + "---\n" + api1, strings.Replace(web2, "80", "0", 1), web1Line, effectKept},
		"name lost, one left":   {web1 + "---\n" + api1, "kind: [\n---\n" + api2, api2Line + web1Line, effectKept},
		"name lost, two left":   {web1 + "---\n" + api1, "kind: [\n", api1Line + web1Line, effectFile},
		"name lost, none left":  {web1 + "---\n" + api1, "kind: [\n---\n" + api2 + "---\n" + web2, api2Line + web2Line, effectLeftOut},
		"two broken, two left":  {web1 + "---\n" + api1, "kind: [\n---\nkind: {\n", api1Line + web1Line, effectFile},
		"namespace after fault": {inX(specFirst), inX(strings.Replace(specFirst, "80", "0", 1)), strings.Replace(web1Line, "default", "x", 1), effectKept},
		"namespace unread": {strings.Replace(web1, "name: web", "name: web\n  namespace: x", 1) + "---\n" + api1,
			strings.Replace(web2, "name: web", "name: web\n  : : namespace: x", 1) + "---\n" + api2,
			api2Line + strings.Replace(web1Line, "default", "x", 1), effectKept},
		"JSON": {`{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}`,
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.2","ports":[{"port":80},]}}`,
			web1Line, effectKept},
		"JSON, items twice": {
			`{"kind":"List","apiVersion":"v1","items":[{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}]}`,
			`{"kind":"List","apiVersion":"v1","items":[{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.2","ports":[{"port":80}]}}],"items":[]}`,
			web1Line, effectKept},
		"JSON, cut off": {`{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}`,
			`{"apiVersion":"v1","kind":"Serv`, web1Line, effectKept},
		"List": {"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: web}, " +
			"spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}\n",
			"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: web}, " +
				"spec: {clusterIP: 10.96.0.2, ports: [{port: 0}]}}\n", web1Line, effectKept},
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
			for _, other := range []string{effectKept, effectLeftOut, leftOut("Service"), effectFile} {
				if other != test.said && strings.Contains(text, other) {
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
	if err != nil {
		t.Fatal(err)
	}
	put := func(name, content string) string {
		r := &reading{path: name, text: &document.Text{Name: name, Data: []byte(content)}}
		decodeAll([]*reading{r}, s.files)
		return describe(s.update([]*reading{r}, nil))
	}
	first := put("a.yaml", service("web", "ports: [{port: 80}]"))
	ip := strings.Fields(first)[3]
	put("b.yaml", service("thief", "clusterIP: "+ip, "ports: [{port: 80}]"))
	if want := "a.yaml:5: Service default/web: spec.clusterIPs: the allocated [" + ip + "] belongs to another Service now; it moves to ["; !strings.Contains(f.String(), want) {
		t.Errorf("want %s\ngot %s", want, f)
	}
	before := len(f)
	put("c.yaml", service("honest", "ports: [{port: 80}]"))
	for _, x := range f[before:] {
		if strings.Contains(x.Effect, "moves to") {
			t.Error(x)
		}
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
