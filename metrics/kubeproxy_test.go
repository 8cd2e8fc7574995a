package metrics

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// kubeProxy is what kube-proxy v1.36.3 has: its metrics, their types, their labels in order of name, and the modes with them.
// Types in brackets are refused by the linter for a name that ends in _total, and so are no type here.
const kubeProxy = `
kubeproxy_sync_proxy_rules_duration_seconds                           histogram ip_family                 iptables ipvs nftables
kubeproxy_sync_full_proxy_rules_duration_seconds                      histogram ip_family                 iptables nftables
kubeproxy_sync_partial_proxy_rules_duration_seconds                   histogram ip_family                 iptables nftables
kubeproxy_sync_proxy_rules_last_timestamp_seconds                     gauge     ip_family                 iptables ipvs nftables
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds              gauge     ip_family                 iptables ipvs nftables
kubeproxy_network_programming_duration_seconds                        histogram ip_family                 iptables ipvs nftables
kubeproxy_sync_proxy_rules_endpoint_changes_pending                   gauge     -                         iptables ipvs nftables
kubeproxy_sync_proxy_rules_endpoint_changes_total                     counter   -                         iptables ipvs nftables
kubeproxy_sync_proxy_rules_service_changes_pending                    gauge     -                         iptables ipvs nftables
kubeproxy_sync_proxy_rules_service_changes_total                      counter   -                         iptables ipvs nftables
kubeproxy_sync_proxy_rules_no_local_endpoints_total                   [gauge]   ip_family,traffic_policy  iptables ipvs nftables
kubeproxy_proxy_healthz_total                                         counter   code                      iptables ipvs nftables
kubeproxy_proxy_livez_total                                           counter   code                      iptables ipvs nftables
kubeproxy_conntrack_reconciler_sync_duration_seconds                  histogram ip_family                 iptables ipvs nftables
kubeproxy_conntrack_reconciler_deleted_entries_total                  counter   ip_family                 iptables ipvs nftables
kubeproxy_sync_proxy_rules_iptables_restore_failures_total            counter   ip_family                 iptables ipvs
kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total    counter   ip_family                 iptables
kubeproxy_sync_proxy_rules_iptables_total                             [gauge]   ip_family,table           iptables
kubeproxy_sync_proxy_rules_iptables_last                              gauge     ip_family,table           iptables
kubeproxy_iptables_ct_state_invalid_dropped_packets_total             counter   -                         iptables
kubeproxy_iptables_localhost_nodeports_accepted_packets_total         counter   -                         iptables
kubeproxy_sync_proxy_rules_nftables_sync_failures_total               counter   ip_family                 nftables
kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total            counter   ip_family                 nftables
`

// inUse returns a Set with everything in it that it can collect, of which a first sync has just succeeded.
func inUse(mode string) *Set {
	s := New(Config{Mode: mode, Version: "v1", Families: plan.Families[:]})
	withConntrackTable(s, "testdata/proc")
	counter := func() (uint64, error) { return 7, nil }
	s.CollectOldestChange(func() time.Duration { return 2 * time.Second })
	s.CollectPacketCounters(counter, counter)
	s.CollectWatches(func() map[string]time.Duration {
		return map[string]time.Duration{"services": 3 * time.Second, "nodes": -1}
	})
	s.CollectFaults(func() bool { return true })
	s.CollectHealthCheckNodePorts(func() (int, int) { return 3, 1 })
	traffic := plan.Traffic{Key: testKey("a", plan.IPv4), Connections: 1, PacketsIn: 2, PacketsOut: 3, BytesIn: 4, BytesOut: 5}
	if mode != ipvs { // whose rules see the first packet of a connection only
		traffic.PacketsIn, traffic.PacketsOut, traffic.BytesIn, traffic.BytesOut = plan.NotCounted, plan.NotCounted, plan.NotCounted, plan.NotCounted
	}
	s.CollectTraffic(fakeTraffic{traffic}, 1000)
	p := plan.New(plan.Node{}, plan.Settings{})
	s.Queued(1, 1)
	s.Taken()
	s.Planned(p, plan.Everything())
	s.DriftChecked(time.Second, nil)
	s.Verified(source.Verification{Finished: true})
	s.AffinityClients(plan.IPv4, 3, 12)
	s.Synced(Sync{Full: true, Stages: map[Stage]time.Duration{Backend: time.Second}})
	return s
}

// withConntrackTable makes s read the state of connection tracking elsewhere than from this machine's kernel.
func withConntrackTable(s *Set, proc string) {
	s.registry.Unregister(conntrackTable(procDir))
	s.registry.MustRegister(conntrackTable(proc))
}

func gather(t testing.TB, s *Set) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := s.Gatherer().Gather()
	require.NoError(t, err)
	out := map[string]*dto.MetricFamily{}
	for _, f := range families {
		out[f.GetName()] = f
	}
	return out
}

// TestKubeProxyMetrics: in each mode there is exactly what kube-proxy has in that mode under its prefix, from the first sync
// on and without anything having failed, with its type and labels and a series for each family.
func TestKubeProxyMetrics(t *testing.T) {
	t.Parallel()
	for _, mode := range Modes() {
		got := gather(t, inUse(mode))
		maps.DeleteFunc(got, func(name string, _ *dto.MetricFamily) bool { return !strings.HasPrefix(name, "kubeproxy_") })
		for line := range strings.Lines(strings.TrimSpace(kubeProxy)) {
			f := strings.Fields(line)
			name, kind, labels, modes := f[0], f[1], f[2], f[3:]
			if !slices.Contains(modes, mode) {
				continue
			}
			if kind == "[gauge]" {
				kind = "untyped"
			}
			m := got[name]
			delete(got, name)
			if m == nil {
				t.Errorf("%s: %s is missing", mode, name)
				continue
			}
			if k := strings.ToLower(m.GetType().String()); k != kind || m.GetHelp() == "" {
				t.Errorf("%s: %s is a %s with help %q, want a %s", mode, name, k, m.GetHelp(), kind)
			}
			families := map[string]bool{}
			for _, series := range m.GetMetric() {
				var names []string
				for _, l := range series.GetLabel() {
					names = append(names, l.GetName())
					if l.GetName() == "ip_family" {
						families[l.GetValue()] = true
					}
				}
				if joined := strings.Join(names, ","); joined != labels && (joined != "" || labels != "-") {
					t.Errorf("%s: %s has labels %s, want %s", mode, name, joined, labels)
				}
			}
			if strings.Contains(labels, "ip_family") && (len(families) != 2 || !families["IPv4"] || !families["IPv6"]) {
				t.Errorf("%s: %s has series for %v", mode, name, families)
			}
		}
		for name := range got {
			t.Errorf("%s: kube-proxy has no %s", mode, name)
		}
	}
}

// TestLint: Prometheus's linter finds nothing, in any mode.
func TestLint(t *testing.T) {
	t.Parallel()
	for _, mode := range Modes() {
		families, err := inUse(mode).Gatherer().Gather()
		require.NoError(t, err)
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		require.NoError(t, err)
		for _, p := range problems {
			t.Errorf("%s: %s: %s", mode, p.Metric, p.Text)
		}
	}
}

// TestBuckets: every boundary that kube-proxy has is there, and longer times fall in no last bucket of everything.
func TestBuckets(t *testing.T) {
	t.Parallel()
	short := prometheus.ExponentialBuckets(0.001, 2, 15)
	long := []float64{0.25, 0.5}
	for s := 1.0; s < 60; s++ {
		long = append(long, s)
	}
	for s := 60.0; s <= 115; s += 5 {
		long = append(long, s)
	}
	for s := 120.0; s <= 300; s += 30 {
		long = append(long, s)
	}
	got := gather(t, inUse(iptables))
	for name, want := range map[string][]float64{
		"kubeproxy_sync_proxy_rules_duration_seconds":          short,
		"kubeproxy_sync_full_proxy_rules_duration_seconds":     short,
		"kubeproxy_sync_partial_proxy_rules_duration_seconds":  short,
		"kubeproxy_conntrack_reconciler_sync_duration_seconds": short,
		"kubeproxy_network_programming_duration_seconds":       long,
	} {
		has := map[float64]bool{}
		last := 0.0
		for _, b := range got[name].GetMetric()[0].GetHistogram().GetBucket() {
			has[b.GetUpperBound()] = true
			last = b.GetUpperBound()
		}
		for _, bound := range want {
			if !has[bound] {
				t.Errorf("%s has no bucket up to %v", name, bound)
			}
		}
		if last < 600 {
			t.Errorf("%s ends at %v s", name, last)
		}
	}
}

// value returns the value of one series, whose labels are "name=value" in order of name.
func value(t testing.TB, s *Set, name string, labels ...string) float64 {
	t.Helper()
	for _, m := range gather(t, s)[name].GetMetric() {
		var have []string
		for _, l := range m.GetLabel() {
			have = append(have, l.GetName()+"="+l.GetValue())
		}
		if !slices.Equal(have, labels) {
			continue
		}
		switch {
		case m.Histogram != nil:
			return float64(m.GetHistogram().GetSampleCount())
		case m.Counter != nil:
			return m.GetCounter().GetValue()
		case m.Untyped != nil:
			return m.GetUntyped().GetValue()
		}
		return m.GetGauge().GetValue()
	}
	t.Fatalf("there is no %s%q", name, labels)
	return 0
}

// holds checks values, each of "NAME LABEL=VALUE...".
func holds(t testing.TB, s *Set, want map[string]float64) {
	t.Helper()
	for series, v := range want {
		f := strings.Fields(series)
		if got := value(t, s, f[0], f[1:]...); got != v {
			t.Errorf("%s is %v, want %v", series, got, v)
		}
	}
}

func testKey(name string, f plan.Family) plan.Key {
	return plan.Key{Service: plan.Service{Namespace: "ns", Name: name}, Port: "http", Protocol: plan.TCP, Family: f}
}

func ExampleSet_Answered() {
	s := New(Config{Mode: "iptables"})
	s.Answered("/healthz", 503)
	families, _ := s.Gatherer().Gather()
	for _, f := range families {
		if f.GetName() == "kubeproxy_proxy_healthz_total" {
			for _, m := range f.GetMetric() {
				fmt.Println(m.GetLabel()[0].GetValue(), m.GetCounter().GetValue())
			}
		}
	}
	// Output:
	// 200 0
	// 503 1
}
