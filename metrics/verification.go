package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/source"
)

type verificationMetrics struct {
	found *prometheus.CounterVec
	last  *prometheus.GaugeVec // without a series until the first one
	took  prometheus.Histogram
}

func newVerificationMetrics(s *Set) *verificationMetrics {
	m := &verificationMetrics{
		found: s.counterVec("nodeproxy_verification_differences_total", "Differences that verifications have found and repaired: objects that a "+
			"watch had lost, parts of the plan that were not what the objects make, and comparisons that found changes in the kernel.", "part"),
		last: s.gaugeVec("nodeproxy_verification_last_timestamp_seconds", "When objects, plan and kernel were last compared as a whole."),
		took: s.make.NewHistogram(prometheus.HistogramOpts{Name: "nodeproxy_verification_duration_seconds",
			Help: "Time taken by verifications, with waits for bookmarks of the API server.", Buckets: syncBuckets}),
	}
	for _, part := range []string{source.PartObjects, source.PartPlan, source.PartKernel} {
		m.found.WithLabelValues(part)
	}
	return m
}

// Verified counts a verification, and the differences that it has found. One that could not compare everything is not the last one.
func (s *Set) Verified(v source.Verification) {
	s.verifications.took.Observe(v.TookSeconds)
	if v.Whole() {
		s.verifications.last.WithLabelValues().Set(timestamp(time.Now()))
	}
	for _, d := range v.Differences {
		s.verifications.found.WithLabelValues(d.Part).Inc()
	}
}
