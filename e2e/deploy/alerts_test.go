package deploy

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"
)

// TestAlerts: the chart's objects for the Prometheus Operator are of its types, and its alerts fire when they should and not before,
// by Prometheus's own engine. Package metrics holds their queries to the metrics that there are.
func TestAlerts(t *testing.T) {
	t.Parallel()
	program := t.TempDir() + "/rules"
	build := exec.Command("go", "build", "-o", program, ".")
	build.Dir = project(t, "e2e", "deploy", "rules")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	check := func(manifests string) (string, error) {
		cmd := exec.Command(program, project(t, "e2e", "deploy", "testdata", "alerts_test.yaml"))
		cmd.Stdin = strings.NewReader(manifests)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		return out.String(), err
	}
	good := charted(t, "--set=podMonitor.enabled=true,serviceMonitor.enabled=true,prometheusRule.enabled=true",
		"--set=config.metricsBindAddress=0.0.0.0:10249,podMonitor.interval=15s,serviceMonitor.interval=15s",
		"--set=podMonitor.labels.release=p,serviceMonitor.labels.release=p,prometheusRule.labels.release=p")
	if out, err := check(good); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// The checks can fail.
	for _, broken := range []struct{ good, bad, complaint string }{
		{"expr: nodeproxy_other_proxy_runs == 1", "expr: nodeproxy_other_proxy_runs == 2", "NodeproxyOtherProxy fires as"},
		{"for: 2m", "for: 1m", "NodeproxyNotInSync fires as"},
		{"expr: nodeproxy_other_proxy_runs == 1", "expr: nodeproxy_other_proxy_runs ==", "parse error"},
		{"alert: NodeproxyDrift", "alert: NodeproxyDrifts", "no test of NodeproxyDrifts"},
		{"podMetricsEndpoints:", "endpoints:", "PodMonitor"},
		{"relabelings:", "relabelConfigs:", "relabelConfigs"},
	} {
		if !strings.Contains(good, broken.good) {
			t.Errorf("the chart has no %q", broken.good)
		}
		if out, err := check(strings.Replace(good, broken.good, broken.bad, 1)); err == nil || !strings.Contains(out, broken.complaint) {
			t.Errorf("%s: got %v %s, want %s", broken.bad, err, out, broken.complaint)
		}
	}
}
