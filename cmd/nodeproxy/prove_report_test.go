package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	dto "github.com/prometheus/client_model/go"

	"nodeproxy/plan"
)

// reports compares what probes and metrics say of a node that is in sync with what is true. It returns "" if they agree.
func (w *world) reports(p *plan.Plan) (why string) {
	for _, path := range []string{"/healthz", "/livez", "/readyz"} {
		answer := httptest.NewRecorder()
		w.daemon.monitor.node.Handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		if answer.Code != http.StatusOK {
			return fmt.Sprintf("%s answers %d: %s", path, answer.Code, answer.Body)
		}
	}
	is, err := w.metrics()
	if err != nil {
		return err.Error()
	}
	want := map[string]float64{
		"nodeproxy_oldest_change_wait_seconds":                0,
		"kubeproxy_sync_proxy_rules_service_changes_pending":  0,
		"kubeproxy_sync_proxy_rules_endpoint_changes_pending": 0,
		"nodeproxy_service_ports ip_family=IPv4":              0,
		"nodeproxy_service_ports ip_family=IPv6":              0,
		"nodeproxy_verification_differences_total part=plan":  0,
		"nodeproxy_build_info mode=" + w.cfg.Mode:             1,
		"nodeproxy_waiting_for_proxy":                         0,
	}
	for k := range p.Services {
		want["nodeproxy_service_ports ip_family="+k.Family.String()]++
	}
	w.cluster.Lock()
	if len(w.lost) == 0 && w.cluster.Lost == nil {
		want["nodeproxy_verification_differences_total part=objects"] = 0
	}
	w.cluster.Unlock()
	if !w.troubled && !w.tampered {
		want["nodeproxy_sync_failures_total"] = 0
		want["nodeproxy_verification_differences_total part=kernel"] = 0
	}
	for name, value := range want {
		if got, there := is[name]; !there || got != value {
			return fmt.Sprintf("the metric %s is %v (there: %t), want %v", name, got, there, value)
		}
	}
	for _, f := range plan.Families {
		const sync = "kubeproxy_sync_proxy_rules_last_"
		of := " ip_family=" + f.String()
		queued, was := is[sync+"queued_timestamp_seconds"+of]
		if done, is := is[sync+"timestamp_seconds"+of]; !was || !is || done < queued {
			return fmt.Sprintf("by the metrics, a change of %s has come at %f (there: %t), and the last sync was at %f (there: %t)", f, queued, was, done, is)
		}
	}
	return ""
}

// metrics returns the values of gauges and counters by name and labels, without the labels that identify the program.
func (w *world) metrics() (map[string]float64, error) {
	families, err := w.daemon.metrics.Gatherer().Gather()
	if err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				if l.GetName() != "version" && l.GetName() != "go_version" {
					name += " " + l.GetName() + "=" + l.GetValue()
				}
			}
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				out[name] = m.GetCounter().GetValue()
			case dto.MetricType_GAUGE:
				out[name] = m.GetGauge().GetValue()
			}
		}
	}
	return out, nil
}
