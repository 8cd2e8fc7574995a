package metrics

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"nodeproxy/plan"
)

// trafficTimeout is how long reading all counters may take. Prometheus waits ten seconds by default.
const trafficTimeout = 8 * time.Second

// TrafficReader reads counters from the kernel. Backends implement it.
type TrafficReader interface {
	// Traffic yields the traffic of each ServicePort once, in any order, until ctx ends. An error says that something could not
	// be read, and may be followed by more.
	Traffic(ctx context.Context) iter.Seq2[plan.Traffic, error]
}

// trafficMetrics is the traffic by ServicePort. A ServicePort that has got a place keeps it for as long as it is
// read: series that come and go with what is busiest at the moment would be of no use. Free places go to those with the most
// bytes, packets or connections at that time.
type trafficMetrics struct {
	reader                                   TrafficReader
	limit                                    int
	connections, packets, bytes, out, failed metric
	warn                                     func(error)

	mu       sync.Mutex
	admitted map[plan.Key]bool
	failures int
}

// CollectTraffic adds connections, packets and bytes of at most limit ServicePorts, each of which has up to five series; nothing
// where the limit is 0. The reader is asked at each scrape and at no other time. It is to be called once.
func (s *Set) CollectTraffic(r TrafficReader, limit int) {
	if limit == 0 {
		return
	}
	labels := []string{"namespace", "service", "port", "protocol", "ip_family"}
	directed := append(slices.Clone(labels), "direction")
	const counter = prometheus.CounterValue
	m := &trafficMetrics{
		reader: r, limit: limit, admitted: map[plan.Key]bool{},
		warn:        func(err error) { s.cfg.Log.Warn("counters of traffic could not all be read", "error", err) },
		connections: newMetric(counter, "nodeproxy_service_connections_total", "Connections through a port of a Service.", labels...),
		packets: newMetric(counter, "nodeproxy_service_packets_total",
			"Packets through a port of a Service, in to its endpoints and out from them.", directed...),
		bytes: newMetric(counter, "nodeproxy_service_bytes_total",
			"Bytes through a port of a Service, in to its endpoints and out from them.", directed...),
		out: newMetric(prometheus.GaugeValue, "nodeproxy_service_traffic_left_out",
			"Ports of Services without metrics of their traffic, because there are more than the limit."),
		failed: newMetric(counter, "nodeproxy_service_traffic_read_failures_total",
			"Errors in reading counters of traffic from the kernel."),
	}
	s.registry.MustRegister(collector{[]metric{m.connections, m.packets, m.bytes, m.out, m.failed}, m.collect})
}

// collect reads the counters.
func (m *trafficMetrics) collect(ch chan<- prometheus.Metric) {
	m.mu.Lock() // Two scrapes at once read one after the other.
	defer m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), trafficTimeout)
	defer cancel()
	var placed, others []plan.Traffic
	count := 0
	var first error
	for t, err := range m.reader.Traffic(ctx) {
		if err != nil {
			m.failures++
			first = cmp.Or(first, err)
			continue
		}
		if count++; m.admitted[t.Key] {
			placed = append(placed, t)
		} else if others = append(others, t); len(others)/2 >= m.limit { // No more than the limit can get a place.
			slices.SortFunc(others, busier)
			others = others[:m.limit]
		}
	}
	if first != nil {
		m.warn(first)
	}
	shown := m.admit(append(placed, others...), first == nil)
	for i := range shown {
		m.send(ch, &shown[i])
	}
	m.out.send(ch, float64(count-len(shown)))
	m.failed.send(ch, float64(m.failures))
}

// admit returns those that have a place. complete is false where some may be missing that still exist: those keep theirs.
func (m *trafficMetrics) admit(read []plan.Traffic, complete bool) []plan.Traffic {
	if complete {
		still := make(map[plan.Key]bool, len(m.admitted))
		for i := range read {
			if m.admitted[read[i].Key] {
				still[read[i].Key] = true
			}
		}
		m.admitted = still
	}
	slices.SortFunc(read, busier)
	var shown []plan.Traffic
	for i := range read {
		if key := read[i].Key; m.admitted[key] || len(m.admitted) < m.limit {
			m.admitted[key] = true
			shown = append(shown, read[i])
		}
	}
	return shown
}

// busier orders ServicePorts, those with the most traffic first.
func busier(a, b plan.Traffic) int {
	return cmp.Or(
		cmp.Compare(b.BytesIn+b.BytesOut, a.BytesIn+a.BytesOut),
		cmp.Compare(b.PacketsIn+b.PacketsOut, a.PacketsIn+a.PacketsOut),
		cmp.Compare(b.Connections, a.Connections),
		a.Key.Compare(b.Key),
	)
}

// series is a counter of a ServicePort. Those of one share their labels: with five for each of a thousand, labels of their own would take
// megabytes at each scrape.
type series struct {
	metric
	value  float64
	labels []*dto.LabelPair // in the order of their names
}

// Desc implements prometheus.Metric.
func (s *series) Desc() *prometheus.Desc { return s.metric.Desc }

// Write implements prometheus.Metric.
func (s *series) Write(out *dto.Metric) error {
	out.Label, out.Counter = s.labels, &dto.Counter{Value: &s.value}
	return nil
}

// inward and outward are label pairs whose name sorts before all others. All series share them, so they must not be changed.
var inward, outward = &dto.LabelPair{Name: new("direction"), Value: new("in")}, &dto.LabelPair{Name: new("direction"), Value: new("out")}

func (m *trafficMetrics) send(ch chan<- prometheus.Metric, t *plan.Traffic) {
	k := t.Key
	plain := prometheus.MakeLabelPairs(m.connections.Desc, []string{
		k.Service.Namespace, k.Service.Name, k.Port, string(k.Protocol), k.Family.String()})
	in, out := append([]*dto.LabelPair{inward}, plain...), append([]*dto.LabelPair{outward}, plain...)
	all := [...]series{
		{m.connections, float64(t.Connections), plain},
		{m.packets, float64(t.PacketsIn), in}, {m.packets, float64(t.PacketsOut), out},
		{m.bytes, float64(t.BytesIn), in}, {m.bytes, float64(t.BytesOut), out},
	}
	for i := range all {
		if all[i].value != plan.NotCounted {
			ch <- &all[i]
		}
	}
}
