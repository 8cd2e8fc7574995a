package main

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/config"
	"nodeproxy/metrics"
	"nodeproxy/source"
)

// TestSettingsAreCounted: findings about the configuration are logged, and counted like those about objects.
func TestSettingsAreCounted(t *testing.T) {
	t.Parallel()
	log := &strings.Builder{}
	cfg := &config.Config{Mode: "iptables", Manifests: t.TempDir(), Findings: []source.Finding{
		{Severity: source.Problem, Field: "iptables.minSyncPeriod", Detail: "is strange"},
	}}
	d, err := newDaemon(t.Context(), machine{}, cfg, slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(t, err)
	t.Cleanup(d.stop)
	d.reports.passTo(d.metrics.Report(reporter(d.log)))
	if !strings.Contains(log.String(), "is strange") {
		t.Errorf("it is not logged: %s", log)
	}
	for _, line := range metric(d.metrics, "nodeproxy_findings_total") {
		if strings.HasPrefix(line, `{kind="other",severity="problem"}`) != strings.HasSuffix(line, " 1") {
			t.Errorf("there is one problem: nodeproxy_findings_total%s", line)
		}
	}
	if len(metric(d.metrics, "nodeproxy_findings_total")) == 0 {
		t.Error("there is no metric of it")
	}
}

// metric returns what stands behind the name of a metric, line by line.
func metric(set *metrics.Set, name string) (lines []string) {
	w := httptest.NewRecorder()
	set.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(w.Body.String()) {
		if rest, is := strings.CutPrefix(line, name); is {
			lines = append(lines, strings.TrimSpace(rest))
		}
	}
	return lines
}
