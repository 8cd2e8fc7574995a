package metrics

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/plan"
)

// syncBuckets are kube-proxy's, 1 ms to 16.4 s, and go on to 17 minutes: syncs of minutes are what large clusters suffer from.
var syncBuckets = prometheus.ExponentialBuckets(0.001, 2, 21)

// programmingBuckets are kube-proxy's, a quarter of a second to five minutes, and two beyond.
var programmingBuckets = slices.Concat(
	[]float64{0.25, 0.5},
	prometheus.LinearBuckets(1, 1, 59),
	prometheus.LinearBuckets(60, 5, 12),
	prometheus.LinearBuckets(120, 30, 7),
	[]float64{600, 1800},
)

// stageBuckets go from 10 µs to 84 s: the stages of one change take microseconds, those of everything seconds.
var stageBuckets = prometheus.ExponentialBuckets(0.00001, 3, 15)

// Stage is a part of a sync.
type Stage string

// The stages, in order: taking objects in, making the plan, and bringing the kernel to it.
const (
	Apply   Stage = "apply"
	Plan    Stage = "plan"
	Backend Stage = "backend"
)

type syncMetrics struct {
	duration, full, partial  *prometheus.HistogramVec
	programming              *prometheus.HistogramVec
	lastDone, lastQueued     *prometheus.GaugeVec
	services, slices         prometheus.Counter
	servicesWait, slicesWait prometheus.Gauge
	stages                   *prometheus.HistogramVec
	failures, retries        prometheus.Counter
}

func newSyncMetrics(s *Set) *syncMetrics {
	const family = "ip_family"
	m := &syncMetrics{
		duration: s.histogramVec("kubeproxy_sync_proxy_rules_duration_seconds", "Duration of syncs.", syncBuckets, family),
		full: s.in(iptables, nftables).histogramVec("kubeproxy_sync_full_proxy_rules_duration_seconds",
			"Duration of syncs that compared everything with the kernel.", syncBuckets, family),
		partial: s.in(iptables, nftables).histogramVec("kubeproxy_sync_partial_proxy_rules_duration_seconds",
			"Duration of syncs that wrote only what had changed.", syncBuckets, family),
		programming: s.histogramVec("kubeproxy_network_programming_duration_seconds",
			"Time from a change of a Service or pod to its being in the kernel's rules.", programmingBuckets, family),
		lastDone:   s.gaugeVec("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "When the last successful sync ended.", family),
		lastQueued: s.gaugeVec("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "When a sync was last requested.", family),
		services:   s.counter("kubeproxy_sync_proxy_rules_service_changes_total", "Changes of Services received."),
		slices:     s.counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices received."),
		servicesWait: s.gauge("kubeproxy_sync_proxy_rules_service_changes_pending",
			"Changes of Services that no sync has processed yet."),
		slicesWait: s.gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending",
			"Changes of EndpointSlices that no sync has processed yet."),
		stages: s.histogramVec("nodeproxy_sync_stage_duration_seconds", "How long the parts of syncs took: apply takes objects in, "+
			"plan makes the desired state, backend writes it.", stageBuckets, "stage"),
		failures: s.counter("nodeproxy_sync_failures_total", "Syncs that failed in whole or in part."),
		retries:  s.counter("nodeproxy_sync_retries_total", "Syncs made because the previous one had failed."),
	}
	for _, f := range s.cfg.Families {
		for _, vec := range []*prometheus.HistogramVec{m.duration, m.programming, m.full, m.partial} {
			vec.WithLabelValues(f.String())
		}
		m.lastQueued.WithLabelValues(f.String()).Set(timestamp(s.cfg.Start)) // as in kube-proxy
	}
	for _, stage := range []Stage{Apply, Plan, Backend} {
		m.stages.WithLabelValues(string(stage))
	}
	return m
}

// timestamp is a time as metrics have it: seconds since 1970.
func timestamp(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// Queued counts changed objects that have come and wait for a sync.
func (s *Set) Queued(services, endpointSlices int) {
	s.syncs.services.Add(float64(services))
	s.syncs.servicesWait.Add(float64(services))
	s.syncs.slices.Add(float64(endpointSlices))
	s.syncs.slicesWait.Add(float64(endpointSlices))
	now := timestamp(time.Now())
	for _, f := range s.cfg.Families {
		s.syncs.lastQueued.WithLabelValues(f.String()).Set(now)
	}
}

// Taken notes that a sync has taken all changes that waited.
func (s *Set) Taken() {
	s.syncs.servicesWait.Set(0)
	s.syncs.slicesWait.Set(0)
}

// Sync is how one sync went.
type Sync struct {
	// Full is true for one that assumed nothing about the kernel.
	Full bool
	// Stages are how long its parts took. Those that are absent did not take place.
	Stages map[Stage]time.Duration
	// ByFamily is how long it took for each family. A family that is absent took as long as all stages together.
	ByFamily map[plan.Family]time.Duration
	// Failed is true for one that did not program all it should. Retry is true for one that was made because of that.
	Failed, Retry bool
	// Triggers are the times at which what it programmed was asked for; see NetworkProgrammed. They count unless it failed.
	Triggers []Trigger
}

// Trigger is when somebody changed what led to a change of an EndpointSlice, as the API's annotation
// endpoints.kubernetes.io/last-change-trigger-time has it.
type Trigger struct {
	Family plan.Family
	Time   time.Time
}

// Synced counts a sync that has just ended.
func (s *Set) Synced(x Sync) {
	now := time.Now()
	total := time.Duration(0)
	for stage, took := range x.Stages {
		total += took
		s.syncs.stages.WithLabelValues(string(stage)).Observe(took.Seconds())
	}
	kind := s.syncs.partial
	if x.Full {
		kind = s.syncs.full
	}
	for _, f := range s.cfg.Families {
		took, known := x.ByFamily[f]
		if !known {
			took = total
		}
		s.syncs.duration.WithLabelValues(f.String()).Observe(took.Seconds())
		kind.WithLabelValues(f.String()).Observe(took.Seconds())
		if !x.Failed {
			s.syncs.lastDone.WithLabelValues(f.String()).Set(timestamp(now))
		}
	}
	if x.Retry {
		s.syncs.retries.Inc()
	}
	if x.Failed {
		s.syncs.failures.Inc()
		return
	}
	for _, t := range x.Triggers {
		s.programmed(t, now)
	}
}

// programmed measures the network programming latency of one trigger (an SLI of SIG Scalability). Triggers from before the
// program started are left out: they show how long it was away.
func (s *Set) programmed(t Trigger, now time.Time) {
	if t.Time.After(s.cfg.Start) {
		s.syncs.programming.WithLabelValues(t.Family.String()).Observe(max(0, now.Sub(t.Time).Seconds()))
	}
}
