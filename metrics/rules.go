package metrics

import (
	"maps"
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/plan"
)

// Tables of iptables that rules are written to.
var tables = [...]string{"filter", "nat"}

// ruleMetrics are about what is written to the kernel, each for some modes only; what a mode does not have is nil.
type ruleMetrics struct {
	restoreFailures, partialFailures *prometheus.CounterVec
	nftSyncFailures, nftCleanups     *prometheus.CounterVec
	total                            *untyped
	last, clients                    *prometheus.GaugeVec
}

func newRuleMetrics(s *Set) *ruleMetrics {
	const family = "ip_family"
	m := &ruleMetrics{}
	if s.has.restores {
		m.restoreFailures = s.counterVec("kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
			"Runs of iptables-restore that failed.", family)
	}
	if s.has.chains {
		m.partialFailures = s.counterVec("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
			"Runs of iptables-restore for single changes that failed, so that everything was compared anew; they are among all failures too.", family)
		m.total = &untyped{desc: prometheus.NewDesc("kubeproxy_sync_proxy_rules_iptables_total",
			"Rules of iptables that belong to this program. It may fall.", []string{"table", family}, nil),
			values: map[[2]string]float64{}}
		s.registry.MustRegister(m.total)
		m.last = s.gaugeVec("kubeproxy_sync_proxy_rules_iptables_last", "Rules of iptables that the last sync wrote.", "table", family)
	}
	if s.has.transactions {
		m.nftSyncFailures = s.counterVec("kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
			"Transactions of nftables that failed.", family)
		m.nftCleanups = s.counterVec("kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total",
			"Removals of nftables objects that nothing wants any more which failed.", family)
		m.clients = s.gaugeVec("nodeproxy_affinity_clients",
			"Clients that session affinity remembers in each of its maps, of at most 131,072, at the last comparison, if the kernel tells, as Linux 6.18 does.",
			family, "share")
	}
	for _, f := range s.cfg.Families {
		for _, vec := range []*prometheus.CounterVec{m.restoreFailures, m.partialFailures, m.nftSyncFailures, m.nftCleanups} {
			if vec != nil {
				vec.WithLabelValues(f.String())
			}
		}
		for _, table := range tables {
			m.setRules(f, table, 0, 0)
		}
	}
	return m
}

func (m *ruleMetrics) setRules(f plan.Family, table string, total, written int) {
	if m.total != nil {
		m.total.set(table, f.String(), float64(total))
		m.last.WithLabelValues(table, f.String()).Set(float64(written))
	}
}

// RestoreFailed counts a run of iptables-restore that failed. One that wrote single changes, for which partial is true, is
// counted twice, as by kube-proxy: among all and by itself. It counts nothing in modes that have no such metric, like the other
// methods about rules.
func (s *Set) RestoreFailed(f plan.Family, partial bool) {
	inc(s.rules.restoreFailures, f)
	if partial {
		inc(s.rules.partialFailures, f)
	}
}

// AffinityClients says how many clients session affinity remembers for a share of all frontends.
func (s *Set) AffinityClients(f plan.Family, share, n int) {
	if s.rules.clients != nil {
		s.rules.clients.WithLabelValues(f.String(), strconv.Itoa(share)).Set(float64(n))
	}
}

// NFTablesFailed counts a transaction of nftables that failed. cleanup is true for one that only removed things.
func (s *Set) NFTablesFailed(f plan.Family, cleanup bool) {
	if cleanup {
		inc(s.rules.nftCleanups, f)
	} else {
		inc(s.rules.nftSyncFailures, f)
	}
}

func inc(vec *prometheus.CounterVec, f plan.Family) {
	if vec != nil {
		vec.WithLabelValues(f.String()).Inc()
	}
}

// IPTablesRules notes how many rules a table (filter or nat) holds that belong to this program, and how many the last sync
// wrote.
func (s *Set) IPTablesRules(f plan.Family, table string, total, written int) {
	s.rules.setRules(f, table, total, written)
}

// untyped is a metric without a type, of two labels.
type untyped struct {
	desc   *prometheus.Desc
	mu     sync.Mutex
	values map[[2]string]float64
}

func (u *untyped) set(first, second string, value float64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.values[[2]string{first, second}] = value
}

// Describe implements prometheus.Collector.
func (u *untyped) Describe(ch chan<- *prometheus.Desc) { ch <- u.desc }

// Collect implements prometheus.Collector.
func (u *untyped) Collect(ch chan<- prometheus.Metric) {
	u.mu.Lock()
	values := maps.Clone(u.values)
	u.mu.Unlock()
	for labels, value := range values {
		ch <- prometheus.MustNewConstMetric(u.desc, prometheus.UntypedValue, value, labels[0], labels[1])
	}
}
