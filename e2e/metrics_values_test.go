package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// metricCheck says what a metric is to show, given two scrapes with things that have happened between them.
type metricCheck struct {
	metric string // with labels, "NAME LABEL=VALUE..."
	check  func(before, after float64) bool
	what   string
}

func grows(metric string) metricCheck {
	return metricCheck{metric, func(before, after float64) bool { return after > before }, "more than before"}
}

func stays(metric string) metricCheck {
	return metricCheck{metric, func(before, after float64) bool { return after == before }, "as before"}
}

func is(metric string, want float64) metricCheck {
	return metricCheck{metric, func(_, after float64) bool { return after == want }, fmt.Sprint(want)}
}

func atLeast(metric string, want float64) metricCheck {
	return metricCheck{metric, func(_, after float64) bool { return after >= want }, fmt.Sprint("at least ", want)}
}

// absent wants no series at all.
func absent(metric string) metricCheck { return metricCheck{metric: metric} }

func (x metricCheck) compare(before, after *harness.Scrape) error {
	f := strings.Fields(x.metric)
	if is, want := after.Has(f[0], f[1:]...), x.check != nil; is != want {
		return fmt.Errorf("%s is there: %v, want %v", x.metric, is, want)
	}
	if x.check == nil {
		return nil
	}
	if b, a := before.Sum(f[0], f[1:]...), after.Sum(f[0], f[1:]...); !x.check(b, a) {
		return fmt.Errorf("%s was %v and is %v, want %s", x.metric, b, a, x.what)
	}
	return nil
}

// waitForMetrics scrapes until all metrics show what they are to, and returns that scrape.
func waitForMetrics(t *testing.T, w *harness.World, before *harness.Scrape, want []metricCheck) *harness.Scrape {
	t.Helper()
	var after *harness.Scrape
	eventually(t, "metrics", func() error {
		after = w.Node1().Scrape(t)
		var errs []error
		for _, x := range want {
			errs = append(errs, x.compare(before, after))
		}
		return errors.Join(errs...)
	})
	return after
}

// plannedMetrics are those of what metricsWorld has.
var plannedMetrics = []metricCheck{
	is("nodeproxy_service_ports ip_family=IPv4", 10),
	is("nodeproxy_service_ports ip_family=IPv6", 10),
	is("nodeproxy_endpoints ip_family=IPv4 policy=Cluster", 10),
	is("nodeproxy_endpoints ip_family=IPv4 policy=Local", 0),
	is("nodeproxy_excluded_endpoints ip_family=IPv4 policy=Cluster reason=not_ready", 2),
	is("nodeproxy_excluded_endpoints ip_family=IPv4 policy=Local reason=not_local", 2),
	is("nodeproxy_excluded_endpoints ip_family=IPv4 policy=Cluster reason=terminating", 0),
	is("nodeproxy_shadowed_frontends ip_family=IPv4", 2),
	is("nodeproxy_health_check_node_ports state=listening", 1),
	is("nodeproxy_health_check_node_ports state=failing", 0),
	is("kubeproxy_sync_proxy_rules_no_local_endpoints_total traffic_policy=internal ip_family=IPv4", 2),
	is("kubeproxy_sync_proxy_rules_no_local_endpoints_total traffic_policy=external ip_family=IPv6", 2),
	is("kubeproxy_sync_proxy_rules_service_changes_pending", 0),
	is("kubeproxy_sync_proxy_rules_endpoint_changes_pending", 0),
	is("nodeproxy_oldest_change_wait_seconds", 0),
	is("nodeproxy_build_info mode="+string(mode), 1),
	is("nodeproxy_findings_total severity=problem kind=EndpointSlice", 1),
	is("nodeproxy_findings_total severity=problem kind=Service", 1), // of the four frontends that are shadowed
	atLeast("nodeproxy_findings_total severity=note", 1),
	atLeast("nodeproxy_conntrack_entries", 1),
	is("kubeproxy_sync_proxy_rules_service_changes_total", 6), // with that of type ExternalName, as in kube-proxy
	is("kubeproxy_sync_proxy_rules_endpoint_changes_total", 9),
	is("nodeproxy_service_traffic_left_out", 0),
	is("nodeproxy_service_traffic_read_failures_total", 0),
}

// movedMetrics are those that what moveMetrics does moves, in every mode.
var movedMetrics = []metricCheck{
	grows("kubeproxy_sync_proxy_rules_duration_seconds ip_family=IPv4"),
	grows("kubeproxy_sync_proxy_rules_duration_seconds ip_family=IPv6"),
	grows("kubeproxy_sync_proxy_rules_last_timestamp_seconds ip_family=IPv4"),
	grows("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds ip_family=IPv6"),
	grows("kubeproxy_network_programming_duration_seconds ip_family=IPv4"),
	grows("kubeproxy_sync_proxy_rules_endpoint_changes_total"),
	grows("kubeproxy_sync_proxy_rules_service_changes_total"),
	grows("kubeproxy_proxy_healthz_total code=200"),
	stays("kubeproxy_proxy_healthz_total code=503"),
	grows("kubeproxy_proxy_livez_total code=200"),
	grows("nodeproxy_readyz_total code=200"),
	grows("kubeproxy_conntrack_reconciler_sync_duration_seconds ip_family=IPv4"),
	grows("kubeproxy_conntrack_reconciler_deleted_entries_total ip_family=IPv4"),
	grows("kubeproxy_conntrack_reconciler_deleted_entries_total ip_family=IPv6"),
	stays(writeFailures),
	grows("nodeproxy_sync_stage_duration_seconds stage=apply"),
	grows("nodeproxy_sync_stage_duration_seconds stage=plan"),
	grows("nodeproxy_sync_stage_duration_seconds stage=backend"),
	stays("nodeproxy_sync_failures_total"),
	stays("nodeproxy_sync_retries_total"),
	grows("nodeproxy_drift_found_total kind=" + ruleDrift),
	grows("nodeproxy_drift_repaired_total kind=" + ruleDrift),
	grows("nodeproxy_drift_check_duration_seconds"),
	grows("nodeproxy_drift_last_check_timestamp_seconds"),
	grows("nodeproxy_verification_duration_seconds"),
	grows("nodeproxy_verification_last_timestamp_seconds"),
	stays("nodeproxy_verification_differences_total part=plan"),
	atLeast("nodeproxy_port_conflicts", 1),
	grows("nodeproxy_service_connections_total service=s port=a ip_family=IPv4"),
	grows("nodeproxy_service_connections_total service=s port=a-udp ip_family=IPv6"),
	is("nodeproxy_service_ports ip_family=IPv4", 12),
}

// movedIn are those of one mode only.
var movedIn = map[harness.Mode][]metricCheck{
	harness.IPTables: {
		grows("kubeproxy_sync_full_proxy_rules_duration_seconds ip_family=IPv4"),
		grows("kubeproxy_sync_partial_proxy_rules_duration_seconds ip_family=IPv4"),
		grows("kubeproxy_sync_proxy_rules_iptables_total table=nat ip_family=IPv4"),
		grows("kubeproxy_iptables_ct_state_invalid_dropped_packets_total"),
		grows("kubeproxy_iptables_localhost_nodeports_accepted_packets_total"),
		stays("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total"),
	},
	harness.NFTables: {
		grows("kubeproxy_sync_full_proxy_rules_duration_seconds ip_family=IPv4"),
		grows("kubeproxy_sync_partial_proxy_rules_duration_seconds ip_family=IPv4"),
		stays("kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total"),
	},
	harness.IPVS: {
		grows("nodeproxy_service_packets_total service=s port=a ip_family=IPv4 direction=in"),
		grows("nodeproxy_service_packets_total service=s port=a ip_family=IPv4 direction=out"),
		grows("nodeproxy_service_bytes_total service=s port=a ip_family=IPv6 direction=in"),
		grows("nodeproxy_service_bytes_total service=s port=a ip_family=IPv6 direction=out"),
	},
}

// shownElsewhere are the metrics that other tests show: TestMetricsOfTrouble, TestMetricsAreTheKernels, TestWaitEnds,
// TestOtherProxyStarts, TestFaultManifests, TestBadConfigurations and, of counters of the kernel that nothing here moves, those of
// package metrics; of clients of affinity, nftables.TestManyClients.
var shownElsewhere = []string{
	"kubeproxy_sync_proxy_rules_iptables_last", "nodeproxy_conntrack_entries_limit", "nodeproxy_waiting_for_proxy",
	"nodeproxy_other_proxy_runs", "nodeproxy_manifests_faulty", "nodeproxy_config_rejected",
	"nodeproxy_conntrack_insert_failures_total", "nodeproxy_conntrack_drops_total", "nodeproxy_affinity_clients",
}

// TestMetricsMove: every metric shows what there is, or moves with what happens.
func TestMetricsMove(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := metricsWorld(t)
		// Where conntrack is liberal, there is no rule to count what it finds invalid.
		require.NoError(t, w.Node1().Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "0"))
		w.Run(t, variant, clusterCIDR, "--service-metrics=100")
		before := waitForMetrics(t, w, &harness.Scrape{}, plannedMetrics)
		moveMetrics(t, w, variant)
		want := append(movedMetrics[:len(movedMetrics):len(movedMetrics)], movedIn[mode]...)
		after := waitForMetrics(t, w, before, want)

		shown := map[string]bool{}
		for _, x := range append(want, plannedMetrics...) {
			shown[strings.Fields(x.metric)[0]] = true
		}
		for _, name := range shownElsewhere {
			shown[name] = true
		}
		for name := range after.Types {
			own := strings.HasPrefix(name, "kubeproxy_") || strings.HasPrefix(name, "nodeproxy_")
			if own && !shown[name] {
				t.Errorf("no test shows %s", name)
			}
		}
	})
}

// moveMetrics does what movedMetrics count.
func moveMetrics(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	for _, path := range []string{"/healthz", "/livez", "/readyz"} {
		if code, body, err := w.Node1().Get(harness.HealthAddr, path); err != nil || code != 200 {
			t.Fatalf("%s: %d %s %v", path, code, body, err)
		}
	}
	_, text, err := w.Node1().Get(harness.MetricsAddr, "/metrics/slis")
	if want := `kubernetes_healthcheck{name="nodeproxy",type="livez"} 1`; err != nil || !strings.Contains(text, want) {
		t.Errorf("%s is not in /metrics/slis: %v\n%s", want, err, text)
	}
	for _, family := range families {
		wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a")
		track(t, w, syscall.IPPROTO_UDP, 7001, clusterIP(1, family), netip.AddrPortFrom(w.Pod("n1a").IP(family), 8080))
	}
	// Rules that go take with them what they have counted since the last scrape.
	waitForMetrics(t, w, &harness.Scrape{}, []metricCheck{atLeast("nodeproxy_service_connections_total service=s port=a", 2)})
	taken := netip.AddrPortFrom(netip.IPv4Unspecified(), harness.AddressesOf(1).NodePort)
	require.NoError(t, w.ServeTCP(w.Node1().Netns, "thief", taken))
	emptyDispatch(t, w, variant)
	waitForMetrics(t, w, &harness.Scrape{}, []metricCheck{atLeast("nodeproxy_drift_repaired_total kind="+ruleDrift, 1)})
	verified(t, w)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1c")...)...)
	added := harness.Objects(harness.Service("added", 6), w.Ready("n1b", "n2b")...)
	for _, o := range added[1:] {
		meta := o.(interface{ SetAnnotations(map[string]string) })
		meta.SetAnnotations(map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)})
	}
	w.Write(t, "added.yaml", added...)
	eventually(t, "added", answers(w.Client, clusterIP(6, 4), "n1b", "n2b"))
	// What the rules count begins anew when they are written, so this comes after all changes.
	if mode == harness.IPTables {
		wantServers(t, w.Node1().Host, nodePort(netip.MustParseAddr("127.0.0.1"), 6), "n1b", "n2b")
		from := netip.AddrPortFrom(w.Client.IP4, 5001)
		to := netip.AddrPortFrom(w.Pod("n1a").IP4, 4444)
		if err := w.Client.SendTCP(from, to, harness.SYN|harness.FIN); err != nil { // which no packet may have both
			t.Fatal(err)
		}
	}
}

// TestMetricsAreTheKernels: numbers of rules are those that iptables lists, also after a change, and limits those of the kernel.
func TestMetricsAreTheKernels(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := metricsWorld(t)
		w.Run(t, variant, clusterCIDR, "--service-metrics=1", "--iptables-sync-period=1h") // no comparison comes after the change
		counted := func() []metricCheck {
			var out []metricCheck
			for family, program := range map[string]string{"IPv4": "iptables", "IPv6": "ip6tables"} {
				for _, table := range []string{"nat", "filter"} {
					saved := output(t, w, variant.Tool(program)+"-save -t "+table)
					out = append(out, is("kubeproxy_sync_proxy_rules_iptables_total ip_family="+family+" table="+table,
						float64(strings.Count("\n"+saved, "\n-A KUBE-"))))
				}
			}
			return out
		}
		before := w.Node1().Scrape(t)
		limit, err := w.Node1().ReadSysctl("net/netfilter/nf_conntrack_max")
		require.NoError(t, err)
		n, err := strconv.ParseFloat(strings.TrimSpace(limit), 64)
		require.NoError(t, err)
		want := []metricCheck{is("nodeproxy_conntrack_entries_limit", n), is("nodeproxy_service_traffic_left_out", 20-1)}
		if mode != harness.IPTables {
			waitForMetrics(t, w, before, want)
			return
		}
		first := "kubeproxy_sync_proxy_rules_iptables_last table=nat ip_family=IPv4"
		// The comparison that follows the first sync writes nothing.
		waitForMetrics(t, w, before, append(append(want, counted()...), is(first, 0)))
		w.Write(t, "added.yaml", harness.Objects(harness.Service("added", 6), w.Ready("n1b", "n2b")...)...)
		eventually(t, "added", answers(w.Client, clusterIP(6, 4), "n1b", "n2b"))
		all := before.Sum("kubeproxy_sync_proxy_rules_iptables_total", "table=nat", "ip_family=IPv4")
		written := metricCheck{first, func(_, a float64) bool { return a > 0 && a < all }, "some, but not all"}
		waitForMetrics(t, w, before, append(counted(), written))
	})
}
