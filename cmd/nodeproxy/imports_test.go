package main

import (
	"slices"
	"strings"
	"testing"

	"nodeproxy/config"
	"nodeproxy/internal/nstest"
)

// TestImports: data flows one way. What comes before the plan does not know the kernel, what comes after it does not know where objects
// are from, the kernel's packages know neither, no mode knows another, and nobody but package metrics knows Prometheus.
func TestImports(t *testing.T) {
	imports := importsOf(t, false)
	const prometheus = "github.com/prometheus"
	before := []string{"plan", "topology", "proxier", "source"}
	for _, rule := range []struct{ of, not []string }{
		{before, append([]string{"kernel", "backend", "node", "config", "metrics", "cmd", prometheus}, config.Modes()...)},
		{[]string{"plan"}, []string{"topology", "proxier", "source", "k8s.io"}},
		{append([]string{"backend"}, config.Modes()...), []string{"topology", "proxier", "source", "node", "config", "metrics", "cmd", prometheus, "k8s.io"}},
		{[]string{"backend"}, config.Modes()},
		{[]string{"kernel"}, append([]string{"backend", "topology", "proxier", "source", "node", "config", "metrics", "cmd", prometheus, "k8s.io"}, config.Modes()...)},
		{[]string{"inspect", "ui"}, append([]string{"kernel", "node", "config", "metrics", "cmd", prometheus}, config.Modes()...)},
		{[]string{"node", "config"}, append([]string{"backend", "proxier", "metrics", "cmd", prometheus}, config.Modes()...)},
		{[]string{"config"}, []string{"kernel", "node"}},
		{[]string{"metrics"}, append([]string{"proxier", "node", "config", "cmd"}, config.Modes()...)},
	} {
		for _, of := range rule.of {
			seen := 0
			for pkg := range imports {
				if !within(pkg, "nodeproxy/"+of) || strings.HasSuffix(pkg, "test") { // What tests use, such as plantest, knows more.
					continue
				}
				seen++
				for _, not := range rule.not {
					if !strings.Contains(not, ".") {
						not = "nodeproxy/" + not
					}
					if way := wayTo(imports, pkg, func(p string) bool { return within(p, not) }); way != nil {
						t.Errorf("%s must not know %s, and does: %s", pkg, not, strings.Join(way, " imports "))
					}
				}
			}
			if seen == 0 {
				t.Errorf("there is no package %s", of)
			}
		}
	}
	for _, mode := range config.Modes() { // What modes share is in packages of its own, such as iptables/common.
		for _, other := range config.Modes() {
			way := wayTo(imports, "nodeproxy/"+mode, func(p string) bool { return p == "nodeproxy/"+other })
			if mode != other && way != nil {
				t.Errorf("mode %s must not know mode %s, and does: %s", mode, other, strings.Join(way, " imports "))
			}
		}
	}
}

// TestSeed: all property tests draw the examples of the seed that the first tier gives them.
func TestSeed(t *testing.T) {
	seen := 0
	for pkg, imports := range importsOf(t, true) {
		if slices.Contains(imports, "pgregory.net/rapid") {
			seen++
			if !slices.ContainsFunc([]string{"internal/seed", "plan/plantest", "source/sourcetest"}, func(with string) bool {
				return pkg == "nodeproxy/"+with || slices.Contains(imports, "nodeproxy/"+with)
			}) {
				t.Errorf("the tests of %s import neither internal/seed nor what imports it", pkg)
			}
		}
	}
	if seen == 0 {
		t.Error("there are no property tests")
	}
}

// importsOf returns what each package of the module imports outside of its tests, or in them.
func importsOf(t *testing.T, tests bool) map[string][]string {
	t.Helper()
	of := `{{join .Imports " "}}`
	if tests {
		of = `{{join .TestImports " "}} {{join .XTestImports " "}}`
	}
	out := map[string][]string{}
	// For a pattern of import paths, the go command would look into all modules, and download what is missing of them.
	for line := range strings.Lines(nstest.Exec(t, "go", "list", "-f", "{{.ImportPath}} "+of, "../../...")) {
		words := strings.Fields(line)
		out[words[0]] = words[1:]
	}
	return out
}

// wayTo returns the packages by which pkg imports one of some kind; nil if it does not.
func wayTo(imports map[string][]string, pkg string, is func(string) bool) []string {
	from := map[string]string{pkg: ""}
	for todo := []string{pkg}; len(todo) > 0; todo = todo[1:] {
		for _, next := range imports[todo[0]] {
			if _, known := from[next]; known {
				continue
			}
			from[next] = todo[0]
			if is(next) {
				way := []string{next}
				for p := todo[0]; p != ""; p = from[p] {
					way = append(way, p)
				}
				slices.Reverse(way)
				return way
			}
			todo = append(todo, next)
		}
	}
	return nil
}

// within reports whether a package is another one or below it.
func within(pkg, other string) bool { return pkg == other || strings.HasPrefix(pkg, other+"/") }

// TestImportsSeesAWay: a forbidden import is found, however far off, and a package of a like name is not taken for one below.
func TestImportsSeesAWay(t *testing.T) {
	imports := map[string][]string{"a": {"b", "ker"}, "b": {"a", "c"}, "c": {"kernel/x"}, "d": {"kernels"}}
	for pkg, want := range map[string][]string{"a": {"a", "b", "c", "kernel/x"}, "c": {"c", "kernel/x"}, "d": nil} {
		if got := wayTo(imports, pkg, func(p string) bool { return within(p, "kernel") }); !slices.Equal(got, want) {
			t.Errorf("from %s: %q, want %q", pkg, got, want)
		}
	}
}
