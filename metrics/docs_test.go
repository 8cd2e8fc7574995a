package metrics

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write docs/metrics.md anew")

const docsFile = "../docs/metrics.md"

// docsTable is the table of the metrics whose names have a prefix: a line for each, in order of name.
func docsTable(t *testing.T, prefix string) string {
	t.Helper()
	modes := map[string][]string{}
	lines := map[string]string{}
	all := Modes()
	for _, mode := range all {
		for name, m := range gather(t, inUse(mode)) {
			if !strings.HasPrefix(name, prefix) {
				continue
			}
			var labels []string
			for _, l := range m.GetMetric()[0].GetLabel() {
				labels = append(labels, "`"+l.GetName()+"`")
			}
			modes[name] = append(modes[name], mode)
			lines[name] = fmt.Sprintf("| `%s` | %s | %s | %%s | %s |\n", name, strings.ToLower(m.GetType().String()),
				strings.Join(labels, " "), strings.ReplaceAll(m.GetHelp(), "%", "%%"))
		}
	}
	var names []string
	for name := range lines {
		names = append(names, name)
	}
	slices.Sort(names)
	var out strings.Builder
	out.WriteString("| metric | type | labels | mode | |\n|---|---|---|---|---|\n")
	for _, name := range names {
		in := ""
		if len(modes[name]) < len(all) {
			in = strings.Join(modes[name], ", ")
		}
		fmt.Fprintf(&out, lines[name], in)
	}
	return out.String()
}

// withTable returns text with a table in place of the one behind its mark, which ends with an empty line or the text.
func withTable(t *testing.T, text, prefix string) string {
	t.Helper()
	mark := "<!-- " + prefix + " -->\n"
	before, after, found := strings.Cut(text, mark)
	if !found {
		t.Fatalf("%s has no line %s", docsFile, mark)
	}
	for strings.HasPrefix(after, "|") {
		_, after, _ = strings.Cut(after, "\n")
	}
	return before + mark + docsTable(t, prefix) + after
}

// TestDocs: docs/metrics.md has a line for every metric of each mode, and no other. Package e2e compares what is served with it.
func TestDocs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(docsFile)
	require.NoError(t, err)
	want := withTable(t, withTable(t, string(text), "kubeproxy_"), "nodeproxy_")
	if *update {
		require.NoError(t, os.WriteFile(docsFile, []byte(want), 0o644))
	} else if string(text) != want {
		t.Errorf("%s is not what the program has; go test ./metrics -run TestDocs -update writes it anew", docsFile)
	}
}
