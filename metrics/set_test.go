package metrics

import (
	"bytes"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
	"nodeproxy/source"
)

// TestSyncs walks through changes, a sync that fails, its retry, and one of a single change.
func TestSyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		s := New(Config{Mode: iptables, Families: []plan.Family{plan.IPv4}})
		if gather(t, s)["kubeproxy_sync_proxy_rules_last_timestamp_seconds"] != nil {
			t.Error("there is a time of the last sync before any")
		}
		s.Queued(2, 3)
		s.Queued(1, 0)
		holds(t, s, map[string]float64{
			"kubeproxy_sync_proxy_rules_service_changes_total":                        3,
			"kubeproxy_sync_proxy_rules_service_changes_pending":                      3,
			"kubeproxy_sync_proxy_rules_endpoint_changes_total":                       3,
			"kubeproxy_sync_proxy_rules_endpoint_changes_pending":                     3,
			"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds ip_family=IPv4": timestamp(start),
		})
		s.Taken()
		trigger := Trigger{plan.IPv4, start.Add(500 * time.Millisecond)}
		time.Sleep(2 * time.Second)
		s.Synced(Sync{Full: true, Failed: true, Triggers: []Trigger{trigger},
			Stages: map[Stage]time.Duration{Apply: time.Millisecond, Plan: time.Millisecond, Backend: time.Second}})
		holds(t, s, map[string]float64{
			"kubeproxy_sync_proxy_rules_service_changes_pending":            0,
			"kubeproxy_sync_proxy_rules_endpoint_changes_pending":           0,
			"kubeproxy_sync_proxy_rules_endpoint_changes_total":             3,
			"kubeproxy_sync_proxy_rules_duration_seconds ip_family=IPv4":    1,
			"kubeproxy_network_programming_duration_seconds ip_family=IPv4": 0,
			"nodeproxy_sync_stage_duration_seconds stage=plan":              1,
			"nodeproxy_sync_failures_total":                                 1,
			"nodeproxy_sync_retries_total":                                  0,
		})
		time.Sleep(time.Second)
		old := Trigger{plan.IPv4, start.Add(-time.Second)}
		s.Synced(Sync{Full: true, Retry: true, Triggers: []Trigger{old, trigger}, Stages: map[Stage]time.Duration{Backend: time.Second}})
		s.Synced(Sync{Stages: map[Stage]time.Duration{Apply: time.Millisecond}, ByFamily: map[plan.Family]time.Duration{plan.IPv4: time.Minute}})
		holds(t, s, map[string]float64{
			"kubeproxy_sync_proxy_rules_duration_seconds ip_family=IPv4":         3,
			"kubeproxy_sync_full_proxy_rules_duration_seconds ip_family=IPv4":    2,
			"kubeproxy_sync_partial_proxy_rules_duration_seconds ip_family=IPv4": 1,
			"kubeproxy_network_programming_duration_seconds ip_family=IPv4":      1,
			"kubeproxy_sync_proxy_rules_last_timestamp_seconds ip_family=IPv4":   timestamp(start.Add(3 * time.Second)),
			"nodeproxy_sync_failures_total":                                      1,
			"nodeproxy_sync_retries_total":                                       1,
		})
		sum := func(name string) float64 { return gather(t, s)[name].GetMetric()[0].GetHistogram().GetSampleSum() }
		if got := sum("kubeproxy_network_programming_duration_seconds"); got != 2.5 {
			t.Errorf("network programming took %v s, want 2.5", got)
		}
		if got := sum("kubeproxy_sync_proxy_rules_duration_seconds"); math.Abs(got-62.002) > 1e-9 {
			t.Errorf("syncs took %v s, want 62.002", got)
		}
	})
}

// TestCounted goes through what is counted one by one.
func TestCounted(t *testing.T) {
	t.Parallel()
	s := inUse(iptables)
	if gather(t, New(Config{Mode: iptables}))["nodeproxy_drift_last_check_timestamp_seconds"] != nil {
		t.Error("there is a time of the last check before any")
	}
	s.RestoreFailed(plan.IPv6, true)
	s.RestoreFailed(plan.IPv4, false)
	s.NFTablesFailed(plan.IPv4, false) // not in this mode
	s.IPTablesRules(plan.IPv4, "nat", 100, 7)
	s.FlowsReconciled(plan.IPv4, time.Second, 5)
	s.DriftChecked(time.Second, map[drift.Kind]int{drift.Rule: 2, drift.Chain: 1})
	s.DriftRepaired(map[drift.Kind]int{drift.Rule: 2})
	s.PortConflicts(4)
	s.Waiting(false)
	s.Waiting(true)
	s.OtherProxyRuns(false)
	s.OtherProxyRuns(true)
	s.ConfigRejected(true)
	var passed []source.Finding
	report := s.Report(func(f source.Finding) { passed = append(passed, f) })
	report(source.Finding{Severity: source.Problem, Object: "x"})
	s.Report(nil)(source.Finding{Severity: source.Problem, Object: "EndpointSlice ns/x"})
	s.Report(nil)(source.Finding{Severity: source.Note})
	for _, a := range []struct {
		path string
		code int
	}{{"/healthz", 200}, {"/livez", 503}, {"/readyz", 503}, {"/readyz", 503}, {"/other", 200}} {
		s.Answered(a.path, a.code)
	}
	holds(t, s, map[string]float64{
		"kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total ip_family=IPv6": 1,
		"kubeproxy_sync_proxy_rules_iptables_restore_failures_total ip_family=IPv6":         1, // that one too
		"kubeproxy_sync_proxy_rules_iptables_restore_failures_total ip_family=IPv4":         1,
		"kubeproxy_sync_proxy_rules_iptables_total ip_family=IPv4 table=nat":                100,
		"kubeproxy_sync_proxy_rules_iptables_last ip_family=IPv4 table=nat":                 7,
		"kubeproxy_sync_proxy_rules_iptables_total ip_family=IPv4 table=filter":             0,
		"kubeproxy_conntrack_reconciler_sync_duration_seconds ip_family=IPv4":               1,
		"kubeproxy_conntrack_reconciler_deleted_entries_total ip_family=IPv4":               5,
		"kubeproxy_iptables_ct_state_invalid_dropped_packets_total":                         7,
		"nodeproxy_drift_found_total kind=rule":                                             2,
		"nodeproxy_drift_found_total kind=chain":                                            1,
		"nodeproxy_drift_repaired_total kind=rule":                                          2,
		"nodeproxy_drift_repaired_total kind=chain":                                         0,
		"nodeproxy_drift_check_duration_seconds":                                            2,
		"nodeproxy_waiting_for_proxy":                                                       1,
		"nodeproxy_other_proxy_runs":                                                        1,
		"nodeproxy_config_rejected":                                                         1,
		"nodeproxy_port_conflicts":                                                          4,
		"nodeproxy_findings_total kind=other severity=problem":                              1,
		"nodeproxy_findings_total kind=other severity=note":                                 1,
		"nodeproxy_findings_total kind=EndpointSlice severity=problem":                      1,
		"nodeproxy_findings_total kind=Service severity=problem":                            0,
		"kubeproxy_proxy_healthz_total code=200":                                            1,
		"kubeproxy_proxy_healthz_total code=503":                                            0,
		"kubeproxy_proxy_livez_total code=503":                                              1,
		"nodeproxy_readyz_total code=503":                                                   2,
		"nodeproxy_watch_staleness_seconds resource=services":                               3,
		"nodeproxy_oldest_change_wait_seconds":                                              2,
		"nodeproxy_health_check_node_ports state=listening":                                 2,
		"nodeproxy_health_check_node_ports state=failing":                                   1,
	})
	if len(passed) != 1 || passed[0].Object != "x" {
		t.Errorf("findings passed on: %v", passed)
	}
	if v := value(t, s, "nodeproxy_watch_staleness_seconds", "resource=nodes"); !math.IsNaN(v) {
		t.Errorf("a resource that was never heard of is %v s old", v)
	}
	v := inUse(ipvs)
	v.RestoreFailed(plan.IPv4, true) // ipvs does not tell the two apart
	v.IPTablesRules(plan.IPv4, "nat", 1, 1)
	n := inUse(nftables)
	n.RestoreFailed(plan.IPv4, true)
	n.NFTablesFailed(plan.IPv4, false)
	n.NFTablesFailed(plan.IPv6, true)
	holds(t, v, map[string]float64{"kubeproxy_sync_proxy_rules_iptables_restore_failures_total ip_family=IPv4": 1})
	holds(t, n, map[string]float64{
		"kubeproxy_sync_proxy_rules_nftables_sync_failures_total ip_family=IPv4":    1,
		"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total ip_family=IPv4": 0,
		"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total ip_family=IPv6": 1,
		"nodeproxy_affinity_clients ip_family=IPv4 share=3":                         12,
	})
}

// TestHandler: one metric that can't be read is logged, and the others are served.
func TestHandler(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := New(Config{Mode: iptables, Log: slog.New(slog.NewTextHandler(&log, nil))})
	s.CollectPacketCounters(func() (uint64, error) { return 0, errors.New("no such counter") }, nil)
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body := w.Body.String()
	if w.Code != 200 || !strings.Contains(body, "nodeproxy_build_info{") || !strings.Contains(body, "go_goroutines ") ||
		strings.Contains(body, "invalid_dropped") {
		t.Errorf("%d\n%s", w.Code, body)
	}
	if !strings.Contains(log.String(), "no such counter") {
		t.Errorf("the log is %s", &log)
	}
}

func TestConntrackTable(t *testing.T) {
	t.Parallel()
	s := New(Config{Mode: iptables})
	withConntrackTable(s, t.TempDir())
	if gather(t, s)["nodeproxy_conntrack_entries"] != nil {
		t.Error("there are entries without a table")
	}
	holds(t, inUse(ipvs), map[string]float64{
		"nodeproxy_conntrack_entries":               12,
		"nodeproxy_conntrack_entries_limit":         262144,
		"nodeproxy_conntrack_insert_failures_total": 26,
		"nodeproxy_conntrack_drops_total":           3,
	})
}

// BenchmarkServe measures an answer of /metrics to a Prometheus server.
func BenchmarkServe(b *testing.B) {
	h := New(Config{Mode: iptables, Families: plan.Families[:]}).Handler()
	r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept-Encoding", "gzip")
	b.ReportAllocs()
	for b.Loop() {
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
}
