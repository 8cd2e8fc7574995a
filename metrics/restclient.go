package metrics

import (
	"context"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientmetrics "k8s.io/client-go/tools/metrics"
)

// RESTClient counts requests to the API server, under the names that every Kubernetes component has for them. client-go tells
// only one receiver in a process, whatever number of clients and Sets it has over time, so this stands beside Set.
type RESTClient struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// NewRESTClient returns a RESTClient without any requests.
func NewRESTClient() *RESTClient {
	var f factory // which registers nothing
	return &RESTClient{
		requests: f.counterVec("rest_client_requests_total",
			"Requests to the API server, by status code (or <error>) and method.", "code", "method", "host"),
		duration: f.histogramVec("rest_client_request_duration_seconds", "How long requests to the API server took.",
			[]float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60}, "verb", "host"),
	}
}

// Listen has client-go report all requests of this process to r. The first call in a process counts, and it must come before
// the first client is made.
func (r *RESTClient) Listen() {
	clientmetrics.Register(clientmetrics.RegisterOpts{RequestResult: requestResult{r}, RequestLatency: requestLatency{r}})
}

// CollectRESTClient adds what r counts. It must be called only once.
func (s *Set) CollectRESTClient(r *RESTClient) { s.registry.MustRegister(r.requests, r.duration) }

type requestResult struct{ *RESTClient }

// Increment implements client-go's ResultMetric.
func (r requestResult) Increment(_ context.Context, code, method, host string) {
	r.requests.WithLabelValues(code, method, host).Inc()
}

type requestLatency struct{ *RESTClient }

// Observe implements client-go's LatencyMetric.
func (r requestLatency) Observe(_ context.Context, verb string, u url.URL, latency time.Duration) {
	r.duration.WithLabelValues(verb, u.Host).Observe(latency.Seconds())
}
