package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// refuseWrites makes the kernel refuse what daemons of w write, or accept it again.
func refuseWrites(t *testing.T, w *harness.World, variant harness.Variant) (refuse func(bool)) {
	if mode == harness.NFTables {
		return refuseTables(t, w)
	}
	return refuseRestores(t, w, variant)
}

// writeFailures is the metric of writes that the kernel has refused.
var writeFailures = map[harness.Mode]string{
	harness.IPTables: "kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
	harness.IPVS:     "kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
	harness.NFTables: "kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
}[mode]

// refuseRestores puts programs before iptables-restore that refuse everything while a file exists, for daemons of w. It returns
// what makes that file, or removes it.
func refuseRestores(t *testing.T, w *harness.World, variant harness.Variant) (refuse func(bool)) {
	t.Helper()
	dir := t.TempDir()
	flag := filepath.Join(dir, "refuse")
	for _, name := range []string{"iptables", "ip6tables"} {
		program := variant.Tool(name) + "-restore"
		script := fmt.Sprintf("#!/bin/sh\n%s[ -e %s ] && { sleep 1; echo refused for a test >&2; exit 1; }\nexec /usr/sbin/%s \"$@\"\n",
			whenGiven, flag, program)
		require.NoError(t, os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755))
	}
	w.DaemonEnv = append(w.DaemonEnv, "PATH="+dir+":"+os.Getenv("PATH"))
	return func(yes bool) {
		t.Helper()
		err := os.Remove(flag)
		if yes {
			err = os.WriteFile(flag, nil, 0o644)
		} else if os.IsNotExist(err) {
			err = nil
		}
		require.NoError(t, err)
	}
}

// TestMetricsOfTrouble: failures of iptables-restore or of transactions, of syncs and of probes are counted as they happen, and what
// waits for them is shown; when it is over, nothing waits any more.
func TestMetricsOfTrouble(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := metricsWorld(t)
		refuse := refuseWrites(t, w, variant)
		refuse(true)
		// The node counts as dead when a change has waited for twice the period.
		flags := []string{"--iptables-backend=" + string(variant), clusterCIDR, "--iptables-sync-period=1s", "--ipvs-sync-period=1s"}
		d, err := w.StartDaemon(w.Node1(), flags...)
		if err == nil {
			err = d.WaitFor(harness.StartupTimeout, "sync failed")
		}
		require.NoError(t, err)
		nothing := &harness.Scrape{}
		waitForMetrics(t, w, nothing, []metricCheck{atLeast("nodeproxy_oldest_change_wait_seconds", 2)})
		for _, path := range []string{"/healthz", "/livez", "/readyz"} {
			if code, _, err := w.Node1().Get(harness.HealthAddr, path); err != nil || code != 503 {
				t.Errorf("%s without rules: %d, %v", path, code, err)
			}
		}
		troubled := []metricCheck{
			atLeast(writeFailures+" ip_family=IPv4", 1),
			atLeast(writeFailures+" ip_family=IPv6", 1),
			absent("kubeproxy_sync_proxy_rules_last_timestamp_seconds"),
			atLeast("kubeproxy_sync_proxy_rules_duration_seconds ip_family=IPv4", 1),
			is("kubeproxy_network_programming_duration_seconds", 0),
			atLeast("nodeproxy_sync_failures_total", 1),
			atLeast("nodeproxy_sync_retries_total", 1),
			is("kubeproxy_proxy_healthz_total code=503", 1),
			is("kubeproxy_proxy_livez_total code=503", 1),
			is("nodeproxy_readyz_total code=503", 1),
		}
		if mode == harness.IPTables { // the only one with partial restores
			troubled = append(troubled, is("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total", 0))
		}
		failed := waitForMetrics(t, w, nothing, troubled)
		// A change that comes while a try is under way has to wait for its end, and longer.
		require.NoError(t, d.WaitForAfter(len(d.Log()), harness.Limit, "msg=syncing"))
		w.Write(t, "added.yaml", harness.Objects(harness.Service("added", 6), w.Ready("n1b", "n2b")...)...)
		if mode != harness.NFTables { // whose tries take no time
			waitForMetrics(t, w, nothing, []metricCheck{
				is("kubeproxy_sync_proxy_rules_service_changes_pending", 1),
				is("kubeproxy_sync_proxy_rules_endpoint_changes_pending", 2),
			})
		}
		refuse(false)
		restored := waitForMetrics(t, w, failed, []metricCheck{
			is("nodeproxy_oldest_change_wait_seconds", 0),
			is("kubeproxy_sync_proxy_rules_service_changes_pending", 0),
			is("kubeproxy_sync_proxy_rules_endpoint_changes_pending", 0),
			grows("kubeproxy_sync_proxy_rules_last_timestamp_seconds ip_family=IPv4"),
			grows("kubeproxy_sync_proxy_rules_last_timestamp_seconds ip_family=IPv6"),
		})
		failChange(t, w, variant, refuse, restored)
	})
}

// failChange lets a change fail when all was well before. In mode iptables it is one that writes the change only, unless a
// comparison of everything is due in the same moment: then it is tried once more.
func failChange(t *testing.T, w *harness.World, variant harness.Variant, refuse func(bool), before *harness.Scrape) {
	t.Helper()
	want := []metricCheck{
		grows(writeFailures + " ip_family=IPv4"),
		grows(writeFailures + " ip_family=IPv6"),
		grows("nodeproxy_sync_failures_total"),
	}
	partial := []metricCheck{
		grows("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total ip_family=IPv4"),
		grows("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total ip_family=IPv6"),
	}
	var failed []error
	for _, pods := range [][]string{{"n1c", "n2b"}, {"n1b", "n2a"}, {"n1c", "n2a"}} {
		refuse(true)
		failed = nil
		if mode == harness.IPVS { // whose rules change with no Service
			emptyDispatch(t, w, variant)
		} else {
			w.Write(t, "added.yaml", harness.Objects(harness.Service("added", 6), w.Ready(pods...)...)...)
		}
		after := waitForMetrics(t, w, before, want)
		for _, x := range partial {
			if err := x.compare(before, after); err != nil && mode == harness.IPTables {
				failed = append(failed, err)
			}
		}
		refuse(false)
		before = waitForMetrics(t, w, after, []metricCheck{
			is("nodeproxy_oldest_change_wait_seconds", 0), is("nodeproxy_service_ports ip_family=IPv4", 12),
			grows("kubeproxy_sync_proxy_rules_last_timestamp_seconds ip_family=IPv4"),
		})
		if failed == nil {
			return
		}
	}
	t.Error(errors.Join(failed...))
}
