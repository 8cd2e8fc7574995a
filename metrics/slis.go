package metrics

import (
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// healthMetrics are those of health checks that every component of Kubernetes serves at /metrics/slis (KEP-3466). A check is
// there once it has been asked for.
type healthMetrics struct {
	registry *prometheus.Registry
	now      *prometheus.GaugeVec
	all      *prometheus.CounterVec
}

func newHealthMetrics() *healthMetrics {
	m := &healthMetrics{registry: prometheus.NewRegistry()}
	f := factory{promauto.With(m.registry)}
	m.now = f.gaugeVec("kubernetes_healthcheck", "What a health check answered last: 1 for success, 0 for failure.", "name", "type")
	m.all = f.counterVec("kubernetes_healthchecks_total", "Answers of health checks, by outcome: success or error.", "name", "status", "type")
	return m
}

// answered counts an answer of a health check: /healthz, /livez or /readyz.
func (m *healthMetrics) answered(path string, code int) {
	kind := strings.TrimPrefix(path, "/")
	value, status := 0.0, "error"
	if code == http.StatusOK {
		value, status = 1, "success"
	}
	m.now.WithLabelValues("nodeproxy", kind).Set(value)
	m.all.WithLabelValues("nodeproxy", status, kind).Inc()
}

// SLIHandler serves what is at /metrics/slis.
func (s *Set) SLIHandler() http.Handler {
	return promhttp.HandlerFor(s.slis.registry, promhttp.HandlerOpts{})
}
