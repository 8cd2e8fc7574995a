package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/plan"
)

// flowMetrics are about connection tracking.
type flowMetrics struct {
	took    *prometheus.HistogramVec
	deleted *prometheus.CounterVec
}

func newFlowMetrics(s *Set) *flowMetrics {
	m := &flowMetrics{}
	m.took = s.histogramVec("kubeproxy_conntrack_reconciler_sync_duration_seconds",
		"Time taken to look through the tracked flows.", syncBuckets, "ip_family")
	m.deleted = s.counterVec("kubeproxy_conntrack_reconciler_deleted_entries_total",
		"Tracked flows that were deleted because their endpoint is no longer one, or because they began before their Service had rules.", "ip_family")
	for _, f := range s.cfg.Families {
		m.took.WithLabelValues(f.String())
		m.deleted.WithLabelValues(f.String())
	}
	s.registry.MustRegister(conntrackTable(procDir))
	return m
}

// FlowsReconciled counts a look through the tracked flows of a family.
func (s *Set) FlowsReconciled(f plan.Family, took time.Duration, deleted int) {
	s.flows.took.WithLabelValues(f.String()).Observe(took.Seconds())
	s.flows.deleted.WithLabelValues(f.String()).Add(float64(deleted))
}
