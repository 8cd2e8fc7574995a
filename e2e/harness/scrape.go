package harness

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// MetricsAddr is where a daemon serves metrics by default, in its network namespace.
var MetricsAddr = netip.MustParseAddrPort("127.0.0.1:10249")

// HealthAddr is where it serves probes.
var HealthAddr = netip.MustParseAddrPort("127.0.0.1:10256")

// HTTP is a client of servers that are reached from inside the namespace. It keeps no connection.
func (n *Netns) HTTP() *http.Client {
	return &http.Client{Timeout: Limit, Transport: &http.Transport{DisableKeepAlives: true, DialContext: n.DialContext(Limit)}}
}

// DialContext is for clients that take a function with which they make their connections, each within most.
func (n *Netns) DialContext(most time.Duration) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return nil, err
		}
		deadline := time.Now().Add(most)
		if due, limited := ctx.Deadline(); limited && due.Before(deadline) {
			deadline = due
		}
		conn, err := n.Dial(network, to, deadline)
		if err != nil {
			return nil, err
		}
		return conn, conn.SetDeadline(time.Time{})
	}
}

// Get asks for a path by HTTP from inside the namespace, and returns status code and body.
func (n *Netns) Get(at netip.AddrPort, path string) (int, string, error) {
	answer, err := n.HTTP().Get("http://" + at.String() + path)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(body), err
}

// Series is one series of a metric.
type Series struct {
	Labels map[string]string
	Value  float64
}

// Scrape is what a daemon shows at /metrics.
type Scrape struct {
	// Text is as the daemon wrote it.
	Text string
	// Types are those of the metrics, and Help is what is said of them, by name.
	Types, Help map[string]string
	// Series are by the name that queries have: those of a histogram by three names, ending in _bucket, _sum and _count.
	Series map[string][]Series
}

// Scrape reads the metrics of the daemon in a namespace.
func (n *Netns) Scrape(t testing.TB) *Scrape {
	t.Helper()
	s, err := n.Metrics()
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	return s
}

// Metrics are those of the daemon, or a kube-proxy, in a namespace.
func (n *Netns) Metrics() (*Scrape, error) {
	code, text, err := n.Get(MetricsAddr, "/metrics")
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("status %d", code)
	}
	if err != nil {
		return nil, fmt.Errorf("metrics in %s: %w", n.Name, err)
	}
	return ParseScrape(text)
}

// ParseScrape reads Prometheus's text format.
func ParseScrape(text string) (*Scrape, error) {
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	s := &Scrape{Text: text, Types: map[string]string{}, Help: map[string]string{}, Series: map[string][]Series{}}
	for name, family := range families {
		s.Types[name], s.Help[name] = strings.ToLower(family.GetType().String()), family.GetHelp()
		samples, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{}, family)
		if err != nil {
			return nil, err
		}
		for _, sample := range samples {
			one := Series{Labels: map[string]string{}, Value: float64(sample.Value)}
			for label, value := range sample.Metric {
				one.Labels[string(label)] = string(value)
			}
			name := one.Labels[model.MetricNameLabel]
			delete(one.Labels, model.MetricNameLabel)
			s.Series[name] = append(s.Series[name], one)
		}
	}
	return s, nil
}

// Labels are the names of the labels that series of a metric have, sorted; those of a histogram without le.
func (s *Scrape) Labels(metric string) []string {
	if s.Types[metric] == "histogram" {
		metric += "_count"
	}
	var out []string
	for _, series := range s.Series[metric] {
		for name := range series.Labels {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Select returns the series of a name with these labels, each "name=value".
func (s *Scrape) Select(name string, labels ...string) []Series {
	return slices.DeleteFunc(slices.Clone(s.Series[name]), func(x Series) bool {
		return slices.ContainsFunc(labels, func(l string) bool {
			label, value, _ := strings.Cut(l, "=")
			return x.Labels[label] != value
		})
	})
}

// Sum adds up the series of a name with these labels; 0 if there are none. Of a histogram it is the number of observations.
func (s *Scrape) Sum(name string, labels ...string) float64 {
	sum := 0.0
	for _, x := range s.counts(name, labels) {
		sum += x.Value
	}
	return sum
}

// Has reports whether there is a series of a name with these labels.
func (s *Scrape) Has(name string, labels ...string) bool { return len(s.counts(name, labels)) > 0 }

func (s *Scrape) counts(name string, labels []string) []Series {
	if s.Types[name] == "histogram" {
		name += "_count"
	}
	return s.Select(name, labels...)
}
