package main

import (
	"log/slog"
	"strings"
	"testing"

	"nodeproxy/config"
	"nodeproxy/source"
)

// TestSettingsAreCounted: findings about the configuration are logged, and counted like those about objects.
func TestSettingsAreCounted(t *testing.T) {
	t.Parallel()
	log := &strings.Builder{}
	cfg := &config.Config{Mode: "iptables", Manifests: t.TempDir(), Findings: []source.Finding{
		{Severity: source.Problem, Field: "iptables.minSyncPeriod", Detail: "is strange"},
	}}
	d, err := newDaemon(t.Context(), cfg, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.stop)
	d.reports.passTo(d.metrics.Report(reporter(d.log)))
	if !strings.Contains(log.String(), "is strange") {
		t.Errorf("it is not logged: %s", log)
	}
	families, err := d.metrics.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "nodeproxy_findings_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			want := 0.0
			if m.GetLabel()[0].GetValue() == "other" && m.GetLabel()[1].GetValue() == "problem" {
				want = 1
			}
			if got := m.GetCounter().GetValue(); got != want {
				t.Errorf("%v: %v, want %v", m.GetLabel(), got, want)
			}
		}
		return
	}
	t.Error("there is no metric of it")
}
