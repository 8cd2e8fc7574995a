package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// groups are the values of the chart whose own values have a row each.
var groups = []string{
	"image", "apiServer", "config", "existingConfigMap", "serviceAccount", "podMonitor", "serviceMonitor", "prometheusRule",
}

// rows are the rows of the table for the values of a mapping.
func rows(t *testing.T, node *yaml.Node, prefix string) string {
	t.Helper()
	var out strings.Builder
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		name := prefix + key.Value
		var lines []string
		// A comment before an empty line is not about the value below it.
		about := key.HeadComment[strings.LastIndex(key.HeadComment, "\n\n")+1:]
		for line := range strings.Lines(about) {
			lines = append(lines, strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "#")))
		}
		comment := strings.ReplaceAll(strings.TrimSpace(strings.Join(lines, " ")), "|", "\\|")
		if slices.Contains(groups, name) {
			fmt.Fprintf(&out, "| `%s` | | %s |\n%s", name, comment, rows(t, value, name+"."))
			continue
		}
		var v any
		require.NoError(t, value.Decode(&v))
		text, err := json.Marshal(v)
		require.NoError(t, err)
		shown := "`" + string(text) + "`"
		if len(text) > 100 {
			shown = "see values.yaml"
		}
		fmt.Fprintf(&out, "| `%s` | %s | %s |\n", name, shown, comment)
	}
	return out.String()
}

// TestChartValues: docs/chart.md has a row for each value of the chart. UPDATE=1, as "make docs" sets it, writes them anew.
func TestChartValues(t *testing.T) {
	t.Parallel()
	values, err := os.ReadFile("chart/values.yaml")
	require.NoError(t, err)
	var doc yaml.Node
	require.NoError(t, yaml.Unmarshal(values, &doc))
	want := "| value | default | |\n|---|---|---|\n" + rows(t, doc.Content[0], "")
	const path, mark, end = "../docs/chart.md", "<!-- values: make docs writes this -->\n", "<!-- end -->"
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	head, rest, found := strings.Cut(string(text), mark)
	got, tail, ended := strings.Cut(rest, end)
	switch {
	case !found || !ended:
		t.Fatalf("%s has no table of values", path)
	case got == want:
	case os.Getenv("UPDATE") == "":
		t.Errorf("%s does not have the values of the chart; \"make docs\" mends it", path)
	default:
		require.NoError(t, os.WriteFile(path, []byte(head+mark+want+end+tail), 0o644))
	}
}
