package metrics

import (
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// CollectWatches adds how long ago the source last showed each kind of object to be current. read is called at each scrape; it
// returns ages by resource (services, …), negative ones for what has never been heard of. It must be called only once.
func (s *Set) CollectWatches(read func() map[string]time.Duration) {
	s.collect(prometheus.GaugeValue, "nodeproxy_watch_staleness_seconds",
		"Time since the API server last showed that what is known of a resource is current; NaN before it first did.",
		func(send func(float64, ...string)) error {
			for resource, age := range read() {
				if age < 0 {
					send(math.NaN(), resource)
				} else {
					send(age.Seconds(), resource)
				}
			}
			return nil
		}, "resource")
}

// CollectFaults adds whether something can't be read of what objects are read from. read is called at each scrape. It must be
// called only once.
func (s *Set) CollectFaults(read func() bool) {
	s.gaugeFunc("nodeproxy_manifests_faulty",
		"1 while manifests can't be read or used as they are, so that their last good version is in force, else 0.",
		func() float64 { return number(read()) })
}

// CollectOldestChange adds for how long the oldest change that is not programmed yet has waited; 0 if there is none. read is
// called at each scrape. It must be called only once.
func (s *Set) CollectOldestChange(read func() time.Duration) {
	s.gaugeFunc("nodeproxy_oldest_change_wait_seconds", "How long the oldest change that is not programmed yet has waited; 0 if there is none.",
		func() float64 { return read().Seconds() })
}

// CollectHealthCheckNodePorts adds how many health check node ports there are, and how many of them are not listened at
// everywhere they should be. read is called at each scrape. It must be called only once.
func (s *Set) CollectHealthCheckNodePorts(read func() (all, failing int)) {
	s.collect(prometheus.GaugeValue, "nodeproxy_health_check_node_ports",
		"Health check node ports of Services: listening, or failing, which can't be listened at somewhere.",
		func(send func(float64, ...string)) error {
			all, failing := read()
			send(float64(all-failing), "listening")
			send(float64(failing), "failing")
			return nil
		}, "state")
}

// CollectPacketCounters adds kube-proxy's two counters of packets, in mode iptables: those that were dropped since connection
// tracking took them for invalid, and those that were accepted for node ports at loopback addresses. What is nil is left
// out. They are called at scrapes, but no more often than a thousandth of a processor's time allows, and what is sent is never older than
// half a minute, as each runs a program. An error is logged, and the metric left out of that scrape. It must be called only once.
func (s *Set) CollectPacketCounters(invalidDropped, localhostNodePorts func() (uint64, error)) {
	if s.cfg.Mode != iptables {
		return
	}
	for _, c := range []struct {
		name, help string
		read       func() (uint64, error)
	}{
		{"kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
			"Packets dropped because connection tracking considers them invalid.", invalidDropped},
		{"kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
			"Packets accepted for node ports at loopback addresses.", localhostNodePorts},
	} {
		if c.read == nil {
			continue
		}
		read := seldom(c.read)
		s.collect(prometheus.CounterValue, c.name, c.help, func(send func(float64, ...string)) error {
			n, err := read()
			if err == nil {
				send(float64(n))
			}
			return err
		})
	}
}

// longestUnread is for how long a counter is not read again at most.
const longestUnread = 30 * time.Second

// seldom returns what reads a counter, and returns the same again for 1,000 times as long as that has taken.
func seldom(read func() (uint64, error)) func() (uint64, error) {
	var mu sync.Mutex
	var last uint64
	var due time.Time
	return func() (uint64, error) {
		mu.Lock()
		defer mu.Unlock()
		begun := time.Now()
		if begun.Before(due) {
			return last, nil
		}
		n, err := read()
		if err != nil {
			return 0, err
		}
		end := time.Now()
		last, due = n, end.Add(min(1000*end.Sub(begun), longestUnread))
		return last, nil
	}
}

// collect adds a metric that is read at each scrape. read sends each value with those of the labels.
func (s *Set) collect(kind prometheus.ValueType, name, help string, read func(send func(float64, ...string)) error, labels ...string) {
	m := newMetric(kind, name, help, labels...)
	s.registry.MustRegister(collector{[]metric{m}, func(ch chan<- prometheus.Metric) {
		if err := read(func(value float64, labels ...string) { m.send(ch, value, labels...) }); err != nil {
			ch <- prometheus.NewInvalidMetric(m.Desc, err)
		}
	}})
}

// metric is one that a collector reads.
type metric struct {
	*prometheus.Desc
	kind prometheus.ValueType
}

func newMetric(kind prometheus.ValueType, name, help string, labels ...string) metric {
	return metric{prometheus.NewDesc(name, help, labels, nil), kind}
}

func (m metric) send(ch chan<- prometheus.Metric, value float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(m.Desc, m.kind, value, labels...)
}

// collector is a collector of metrics that are read at each scrape.
type collector struct {
	metrics []metric
	read    func(chan<- prometheus.Metric)
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		ch <- m.Desc
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) { c.read(ch) }
