package e2e

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"nodeproxy/e2e/harness"
)

// kubeProxyMetrics is what kube-proxy v1.36.3 has: its metrics, their types, their labels in order of name, and the modes with
// them. Two that are gauges there although their names end in _total have no type here; Prometheus's linter would refuse it.
const kubeProxyMetrics = `
kubeproxy_conntrack_reconciler_deleted_entries_total                  counter   ip_family                 iptables ipvs nftables
kubeproxy_conntrack_reconciler_sync_duration_seconds                  histogram ip_family                 iptables ipvs nftables
kubeproxy_iptables_ct_state_invalid_dropped_packets_total             counter   -                         iptables
kubeproxy_iptables_localhost_nodeports_accepted_packets_total         counter   -                         iptables
kubeproxy_network_programming_duration_seconds                        histogram ip_family                 iptables ipvs nftables
kubeproxy_proxy_healthz_total                                         counter   code                      iptables ipvs nftables
kubeproxy_proxy_livez_total                                           counter   code                      iptables ipvs nftables
kubeproxy_sync_full_proxy_rules_duration_seconds                      histogram ip_family                 iptables nftables
kubeproxy_sync_partial_proxy_rules_duration_seconds                   histogram ip_family                 iptables nftables
kubeproxy_sync_proxy_rules_duration_seconds                           histogram ip_family                 iptables ipvs nftables
kubeproxy_sync_proxy_rules_endpoint_changes_pending                   gauge     -                         iptables ipvs nftables
kubeproxy_sync_proxy_rules_endpoint_changes_total                     counter   -                         iptables ipvs nftables
kubeproxy_sync_proxy_rules_iptables_last                              gauge     ip_family,table           iptables
kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total    counter   ip_family                 iptables
kubeproxy_sync_proxy_rules_iptables_restore_failures_total            counter   ip_family                 iptables ipvs
kubeproxy_sync_proxy_rules_iptables_total                             untyped   ip_family,table           iptables
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds              gauge     ip_family                 iptables ipvs nftables
kubeproxy_sync_proxy_rules_last_timestamp_seconds                     gauge     ip_family                 iptables ipvs nftables
kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total            counter   ip_family                 nftables
kubeproxy_sync_proxy_rules_nftables_sync_failures_total               counter   ip_family                 nftables
kubeproxy_sync_proxy_rules_no_local_endpoints_total                   untyped   ip_family,traffic_policy  iptables ipvs nftables
kubeproxy_sync_proxy_rules_service_changes_pending                    gauge     -                         iptables ipvs nftables
kubeproxy_sync_proxy_rules_service_changes_total                      counter   -                         iptables ipvs nftables
`

// metricsWorld is a World with Services of which there is something to count; see its metrics in plannedMetrics.
func metricsWorld(t *testing.T) *harness.World {
	t.Helper()
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
	local := harness.Service("local", 2, harness.Policies("Local", "Local"), func(s *v1.Service) { s.Spec.HealthCheckNodePort = 32100 })
	w.Write(t, "local.yaml", harness.Objects(local, w.Ready("n2a")...)...)
	starting := w.Ready("n1b", "n2b")
	starting[1].Conditions = discovery.EndpointConditions{Ready: new(false), Serving: new(false), Terminating: new(false)}
	w.Write(t, "starting.yaml", harness.Objects(harness.Service("starting", 3), starting...)...)
	shadowed := harness.Service("t", 4, func(s *v1.Service) { s.Spec.ExternalIPs = harness.Service("s", 1).Spec.ExternalIPs })
	w.Write(t, "shadowed.yaml", harness.Objects(shadowed, w.Ready("n1c")...)...)
	refused := harness.Slices(harness.Service("refused", 5))
	refused[0].(*discovery.EndpointSlice).Endpoints = []discovery.Endpoint{{Addresses: []string{"127.0.0.1"}}}
	w.Write(t, "refused.yaml", append(refused, harness.Service("refused", 5))...)
	w.Write(t, "named.yaml", harness.Service("named", 6, func(s *v1.Service) {
		s.Spec = v1.ServiceSpec{Type: v1.ServiceTypeExternalName, ExternalName: "example.com"}
		s.Status = v1.ServiceStatus{}
	}))
	return w
}

// verified waits until a verification finds nothing. The repair that metrics show may have reached only one family so far.
func verified(t *testing.T, w *harness.World) {
	t.Helper()
	eventually(t, "a verification finds nothing", func() error {
		code, body, err := w.Node1().Get(harness.HealthAddr, "/readyz?verify")
		if err == nil && code != 200 {
			err = errors.New(body)
		}
		return err
	})
}

// TestMetrics: a scrape has exactly the metrics of kube-proxy in this mode, with their types and labels and a series for each
// family; Prometheus's linter finds nothing; and the dashboard's queries resolve, but for those of notThere. Package cluster
// has those that need an API server.
func TestMetrics(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := metricsWorld(t)
		w.Run(t, variant, clusterCIDR, "--service-metrics=100")
		wantServers(t, w.Client, clusterIP(1, 4), "n1a", "n2a")
		emptyDispatch(t, w, variant) // so that everything is compared with the kernel soon
		waitForMetrics(t, w, &harness.Scrape{}, []metricCheck{atLeast("nodeproxy_drift_repaired_total kind="+ruleDrift, 1)})
		verified(t, w)
		s := w.Node1().Scrape(t) // That one may have been read while it was counted.
		compareMetrics(t, s)
		compareDocs(t, s)
		problems, err := promlint.New(strings.NewReader(s.Text)).Lint()
		require.NoError(t, err)
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
		queries, err := harness.DashboardQueries("../deploy/dashboard/nodeproxy.json")
		if err != nil || len(queries) < 40 {
			t.Fatalf("%d queries of the dashboard: %v", len(queries), err)
		}
		for _, q := range queries {
			there := true
			for _, name := range notThere[mode] {
				there = there && !strings.Contains(q, name)
			}
			if err := s.Resolve(q); (err == nil) != there {
				t.Errorf("%s: %v", q, err)
			}
		}
	})
}

// emptyPanels are the panels of the dashboard that a daemon which has just started with manifests has nothing for, and why.
var emptyPanels = []struct {
	modes  []harness.Mode
	why    string
	titles []string
}{
	{anyMode, "there is no API server; package cluster has one", []string{"Staleness of watches", "Stalest nodes", "Requests to the API server"}},
	{anyMode, "quantiles are of changes since the start", []string{"Network programming latency"}},
	{ownKernel, "rules see only the first packet of a connection", []string{"Packets", "Bytes"}},
	{inIPTables, "rules are read for --service-metrics only; TestMetrics has it", []string{"Connections", "Service ports without metrics", "Errors in reading counters"}},
}

// TestDashboardPanels: when a daemon has started, forwarded some traffic and compared everything once, and nothing else has happened, each
// panel of the dashboard shows something, be it zero, but for emptyPanels.
func TestDashboardPanels(t *testing.T) {
	d, err := harness.ReadDashboard("../deploy/dashboard/nodeproxy.json")
	require.NoError(t, err)
	empty := map[string]string{}
	for _, e := range emptyPanels {
		for _, title := range e.titles {
			if !slices.ContainsFunc(d.Panels, func(p harness.Panel) bool { return p.Title == title }) {
				t.Errorf("there is no panel %q", title)
			}
			if slices.Contains(e.modes, mode) {
				empty[title] = e.why
			}
		}
	}
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := metricsWorld(t)
		w.Run(t, variant, clusterCIDR, "--nftables-sync-period=1s") // The other modes compare everything when they begin to watch.
		wantServers(t, w.Client, clusterIP(1, 4), "n1a", "n2a")
		var s *harness.Scrape
		eventually(t, "a panel shows nothing", func() error {
			s = w.Node1().Scrape(t)
			var errs []error
			for _, p := range d.Panels {
				if err := s.Shows(p); err != nil && empty[p.Title] == "" {
					errs = append(errs, fmt.Errorf("%s: %w", p.Title, err))
				}
			}
			return errors.Join(errs...)
		})
		for _, p := range d.Panels {
			if why := empty[p.Title]; why != "" && len(p.Targets) > 0 && s.Shows(p) == nil {
				t.Errorf("%s shows something, although %s", p.Title, why)
			}
		}
	})
}

// TestServiceConnections: the connections to a Service are counted, in every mode, also those before its endpoints change.
func TestServiceConnections(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := metricsWorld(t)
		w.Run(t, variant, clusterCIDR, "--service-metrics=100")
		for _, family := range families {
			wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a")
		}
		counted := "nodeproxy_service_connections_total service=s port=a"
		before := waitForMetrics(t, w, &harness.Scrape{}, []metricCheck{atLeast(counted, 4)})
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1c")...)...)
		eventually(t, "changed", answers(w.Client, clusterIP(1, 4), "n1c"))
		waitForMetrics(t, w, before, []metricCheck{grows(counted)})
	})
}

// compareDocs compares a scrape with docs/metrics.md.
func compareDocs(t *testing.T, s *harness.Scrape) {
	t.Helper()
	text, err := os.ReadFile("../docs/metrics.md")
	require.NoError(t, err)
	told := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		row := strings.Split(strings.TrimSpace(line), " | ") // name, type, labels, mode, help
		if len(row) != 5 || !strings.HasPrefix(row[0], "| `") {
			continue
		}
		name := strings.Trim(row[0], "|` ")
		told[name] = true
		if row[3] != "" && !slices.Contains(strings.Split(row[3], ", "), string(mode)) ||
			slices.ContainsFunc(notThere[mode], func(begin string) bool { return strings.HasPrefix(name, begin) }) {
			continue
		}
		labels := strings.ReplaceAll(strings.Join(s.Labels(name), " "), "`", "")
		if s.Types[name] != row[1] || labels != strings.ReplaceAll(row[2], "`", "") || s.Help[name] != strings.TrimSuffix(row[4], " |") {
			t.Errorf("%s is of type %q with labels %q and help %q, unlike in %s", name, s.Types[name], labels, s.Help[name], line)
		}
	}
	for name := range s.Types {
		own := strings.HasPrefix(name, "kubeproxy_") || strings.HasPrefix(name, "nodeproxy_")
		if own && !told[name] {
			t.Errorf("docs/metrics.md does not have %s", name)
		}
	}
}

// notThere begin the names of metrics that a daemon with manifests does not have in a mode. Nothing counts all packets of a
// Service in modes iptables and nftables: their rules see the first one of a connection. How many clients affinity remembers is told by some
// kernels, and at comparisons.
var notThere = map[harness.Mode][]string{
	harness.IPTables: {"nodeproxy_watch_", "rest_client_", "nodeproxy_service_packets_", "nodeproxy_service_bytes_"},
	harness.IPVS:     {"nodeproxy_watch_", "rest_client_"},
	harness.NFTables: {"nodeproxy_watch_", "rest_client_", "nodeproxy_service_packets_", "nodeproxy_service_bytes_", "nodeproxy_affinity_"},
}

// compareMetrics compares a scrape with kube-proxy's metrics.
func compareMetrics(t *testing.T, s *harness.Scrape) {
	t.Helper()
	wanted := map[string]bool{}
	for line := range strings.Lines(strings.TrimSpace(kubeProxyMetrics)) {
		f := strings.Fields(line)
		name, kind, labels, modes := f[0], f[1], f[2], f[3:]
		if !slices.Contains(modes, string(mode)) {
			continue
		}
		wanted[name] = true
		if s.Types[name] != kind || s.Help[name] == "" {
			t.Errorf("%s is of type %q with help %q, want type %s", name, s.Types[name], s.Help[name], kind)
		}
		got := strings.Join(s.Labels(name), ",")
		if got == "" {
			got = "-"
		}
		if got != labels {
			t.Errorf("%s has labels %s, want %s", name, got, labels)
		}
		series := name
		if kind == "histogram" {
			series += "_count"
		}
		for _, family := range []string{"IPv4", "IPv6"} {
			if strings.Contains(labels, "ip_family") && len(s.Select(series, "ip_family="+family)) == 0 {
				t.Errorf("%s has no series for %s", name, family)
			}
		}
	}
	for name := range s.Types {
		if strings.HasPrefix(name, "kubeproxy_") && !wanted[name] {
			t.Errorf("kube-proxy has no %s in this mode", name)
		}
	}
}
