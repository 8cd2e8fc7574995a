// Package metrics turns what the program does into Prometheus metrics: kube-proxy's, under its names and with its meaning, so
// that dashboards and alerts carry over, and nodeproxy's own. Every metric is made here, and none is global: a Set is a value
// that is handed to those who have something to count.
//
// Two of kube-proxy's names end in _total although their value can fall (kubeproxy_sync_proxy_rules_iptables_total and
// kubeproxy_sync_proxy_rules_no_local_endpoints_total). There they have type gauge, which the Prometheus linter refuses; here
// they have no type. No query can tell the difference.
package metrics

import (
	"log/slog"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// Config says what a Set is to count.
type Config struct {
	// Mode is the proxy mode: iptables, ipvs or nftables. It decides what metrics there are.
	Mode string
	// Version is the program's.
	Version string
	// Families are those that the node forwards. Metrics have a series for each from the start.
	Families []plan.Family
	// Start is when the program started; zero means now. What was asked for before is not measured.
	Start time.Time
	// Log receives what goes wrong while metrics are read; nil discards it.
	Log *slog.Logger
}

// Set is all metrics of one run of the program. Its methods are safe for concurrent use, and none costs more than a few
// microseconds unless it says so.
type Set struct {
	factory
	cfg      Config
	registry *prometheus.Registry

	syncs    *syncMetrics
	plan     *planMetrics
	answers  map[string]*prometheus.CounterVec // by path
	slis     *healthMetrics
	findings *prometheus.CounterVec
	waiting  prometheus.Gauge
	beside   prometheus.Gauge
	rejected prometheus.Gauge
	rules    *ruleMetrics
	flows    *flowMetrics
	drift    *driftMetrics

	verifications *verificationMetrics
}

// New returns a Set on which nothing has happened yet.
func New(cfg Config) *Set {
	if cfg.Start.IsZero() {
		cfg.Start = time.Now()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Set{cfg: cfg, registry: prometheus.NewRegistry()}
	s.factory = factory{promauto.With(s.registry)}
	s.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.slis = newHealthMetrics()
	s.syncs = newSyncMetrics(s)
	s.plan = newPlanMetrics(s)
	s.answers = map[string]*prometheus.CounterVec{
		"/healthz": s.counterVec("kubeproxy_proxy_healthz_total", "Answers of /healthz, by status code.", "code"),
		"/livez":   s.counterVec("kubeproxy_proxy_livez_total", "Answers of /livez, by status code.", "code"),
		"/readyz":  s.counterVec("nodeproxy_readyz_total", "Answers of /readyz, by status code.", "code"),
	}
	for _, vec := range s.answers {
		vec.WithLabelValues("200")
		vec.WithLabelValues("503")
	}
	s.findings = s.counterVec("nodeproxy_findings_total", "Findings about objects, and about settings (kind other): problem for "+
		"what is refused, in whole or in part, note for what is so by design.", "severity", "kind")
	for _, severity := range []source.Severity{source.Note, source.Problem} {
		for _, kind := range append(findingKinds[:], otherKind) {
			s.findings.WithLabelValues(severity.String(), kind)
		}
	}
	s.waiting = s.gauge("nodeproxy_waiting_for_proxy",
		"1 while nothing is written to the kernel because another proxy runs on this node, else 0.")
	s.beside = s.gauge("nodeproxy_other_proxy_runs", "1 while another proxy runs on this node although nodeproxy has the claim to "+
		"write, so that each undoes what the other does, else 0. It is looked for every 30 seconds, and not with --take-over.")
	s.rejected = s.gauge("nodeproxy_config_rejected", "1 while the configuration file holds what is wrong, or can't be put in force on "+
		"this node, so that an earlier one stays in force, else 0.")
	s.rules = newRuleMetrics(s)
	s.flows = newFlowMetrics(s)
	s.drift = newDriftMetrics(s)
	s.verifications = newVerificationMetrics(s)
	build := s.gaugeVec("nodeproxy_build_info", "Always 1; the labels identify the program.", "version", "go_version", "mode")
	build.WithLabelValues(cfg.Version, runtime.Version(), cfg.Mode).Set(1)
	return s
}

// Gatherer reads all metrics.
func (s *Set) Gatherer() prometheus.Gatherer { return s.registry }

// Handler serves all metrics. What can't be read is logged and left out; the rest is served.
func (s *Set) Handler() http.Handler {
	return promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError,
		ErrorLog:      slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelWarn),
	})
}

// Answered counts an answer of /healthz, /livez or /readyz. Other paths are not counted.
func (s *Set) Answered(path string, code int) {
	if vec := s.answers[path]; vec != nil {
		s.slis.answered(path, code)
		vec.WithLabelValues(strconv.Itoa(code)).Inc()
	}
}

// findingKinds are the kinds of objects that findings are counted by; otherKind is for all others, and for settings.
var findingKinds = [...]string{"Service", "EndpointSlice", "Endpoints", "Pod", "Node", "ServiceCIDR"}

const otherKind = "other"

// Report returns a report that counts findings and passes them on to next, which may be nil.
func (s *Set) Report(next source.Report) source.Report {
	return func(f source.Finding) {
		kind, _, _ := strings.Cut(f.Object, " ")
		if !slices.Contains(findingKinds[:], kind) {
			kind = otherKind // Manifests may be of any kind.
		}
		s.findings.WithLabelValues(f.Severity.String(), kind).Inc()
		if next != nil {
			next(f)
		}
	}
}

// Waiting notes whether another proxy is waited for.
func (s *Set) Waiting(waiting bool) { s.waiting.Set(number(waiting)) }

// OtherProxyRuns notes whether another proxy runs although none is waited for.
func (s *Set) OtherProxyRuns(runs bool) { s.beside.Set(number(runs)) }

// ConfigRejected notes whether the configuration file holds something else than what is in force.
func (s *Set) ConfigRejected(rejected bool) { s.rejected.Set(number(rejected)) }

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// factory makes metrics, and registers them. The zero factory does not register them.
type factory struct{ make promauto.Factory }

// in returns what makes metrics that only some modes have. In the others, they are not registered.
func (s *Set) in(modes ...string) factory {
	if slices.Contains(modes, s.cfg.Mode) {
		return s.factory
	}
	return factory{}
}

func (f factory) counterVec(name, help string, labels ...string) *prometheus.CounterVec {
	return f.make.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func (f factory) gaugeVec(name, help string, labels ...string) *prometheus.GaugeVec {
	return f.make.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
}

func (f factory) histogramVec(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return f.make.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
}

func (f factory) counter(name, help string) prometheus.Counter {
	return f.make.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func (f factory) gauge(name, help string) prometheus.Gauge {
	return f.make.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

// gaugeFunc makes a gauge that is read at each scrape.
func (f factory) gaugeFunc(name, help string, read func() float64) {
	f.make.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, read)
}
