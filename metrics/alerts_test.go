package metrics

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// TestAlerts: every metric and label that an alert asks for is in a scrape, in any mode, and docs/metrics.md lists the alerts. Package
// e2e/deploy tests when they fire.
func TestAlerts(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../deploy/chart/alerts.yaml")
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr, For string
				Labels           map[string]string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(text, &file))
	docs, err := os.ReadFile(docsFile)
	require.NoError(t, err)
	_, listed, _ := strings.Cut(string(docs), "## Alerts\n")
	listed, _, _ = strings.Cut(listed, "\n## ")
	seen := 0
	for _, mode := range Modes() {
		series := scraped(t, mode)
		for _, g := range file.Groups {
			for _, r := range g.Rules {
				seen++
				checkQuery(t, r.Expr, series)
				if row := fmt.Sprintf("\n| `%s` | %s | %s | ", r.Alert, r.Labels["severity"], r.For); !strings.Contains(listed, row) {
					t.Errorf("%s has no row that begins with %q", docsFile, row)
				}
			}
		}
	}
	if rows := strings.Count(listed, "\n| `"); rows*len(Modes()) != seen || seen == 0 {
		t.Errorf("%d alerts are listed; there are %d in %d modes", rows, seen, len(Modes()))
	}
}
