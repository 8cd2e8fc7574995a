package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/kernel/drift"
)

type driftMetrics struct {
	found, repaired *prometheus.CounterVec
	checked         *prometheus.GaugeVec // without a series until the first check
	took            prometheus.Histogram
	conflicts       prometheus.Gauge
}

func newDriftMetrics(s *Set) *driftMetrics {
	m := &driftMetrics{
		found: s.counterVec("nodeproxy_drift_found_total",
			"Things in the kernel that other programs had changed, added or removed.", "kind"),
		repaired: s.counterVec("nodeproxy_drift_repaired_total", "Things in the kernel that were repaired.", "kind"),
		checked: s.gaugeVec("nodeproxy_drift_last_check_timestamp_seconds",
			"When the kernel was last compared with what had been written."),
		took: s.make.NewHistogram(prometheus.HistogramOpts{Name: "nodeproxy_drift_check_duration_seconds",
			Help: "Time taken to compare the kernel with what had been written.", Buckets: syncBuckets}),
		conflicts: s.gauge("nodeproxy_port_conflicts",
			"Sockets of other programs on this node whose address and port a Service captures."),
	}
	for _, k := range drift.Kinds { // What a mode does not write stays at zero.
		m.found.WithLabelValues(string(k))
		m.repaired.WithLabelValues(string(k))
	}
	return m
}

// DriftChecked counts a comparison of the kernel with what was written, and what it found, by kind.
func (s *Set) DriftChecked(took time.Duration, found map[drift.Kind]int) {
	s.drift.took.Observe(took.Seconds())
	s.drift.checked.WithLabelValues().Set(timestamp(time.Now()))
	for k, n := range found {
		s.drift.found.WithLabelValues(string(k)).Add(float64(n))
	}
}

// DriftRepaired counts what was repaired, by kind.
func (s *Set) DriftRepaired(repaired map[drift.Kind]int) {
	for k, n := range repaired {
		s.drift.repaired.WithLabelValues(string(k)).Add(float64(n))
	}
}

// PortConflicts notes how many sockets of other programs Services capture now.
func (s *Set) PortConflicts(n int) { s.drift.conflicts.Set(float64(n)) }
