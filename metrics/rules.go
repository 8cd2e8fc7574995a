package metrics

import (
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/plan"
)

// Tables of iptables that rules are written to.
var tables = [...]string{"filter", "nat"}

// ruleMetrics are about what is written to the kernel. Each is shown in some modes only.
type ruleMetrics struct {
	restoreFailures, partialFailures *prometheus.CounterVec
	nftSyncFailures, nftCleanups     *prometheus.CounterVec
	total                            sync.Map // numbers, by table and family
	last, clients                    *prometheus.GaugeVec
}

func newRuleMetrics(s *Set) *ruleMetrics {
	const family = "ip_family"
	m := &ruleMetrics{
		restoreFailures: s.in(iptables, ipvs).counterVec("kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
			"Runs of iptables-restore that failed.", family),
		partialFailures: s.in(iptables).counterVec("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
			"Runs of iptables-restore for single changes that failed, so that everything was compared anew; they are among all failures too.", family),
		last: s.in(iptables).gaugeVec("kubeproxy_sync_proxy_rules_iptables_last", "Rules of iptables that the last sync wrote.", "table", family),
		nftSyncFailures: s.in(nftables).counterVec("kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
			"Transactions of nftables that failed.", family),
		nftCleanups: s.in(nftables).counterVec("kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total",
			"Removals of nftables objects that nothing wants any more which failed.", family),
		clients: s.in(nftables).gaugeVec("nodeproxy_affinity_clients",
			"Clients that session affinity remembers in each of its maps, of at most 131,072, at the last comparison, if the kernel tells, as Linux 6.18 does.",
			family, "share"),
	}
	if s.cfg.Mode == iptables {
		total := newMetric(prometheus.UntypedValue, "kubeproxy_sync_proxy_rules_iptables_total",
			"Rules of iptables that belong to this program. It may fall.", "table", family)
		s.registry.MustRegister(collector{[]metric{total}, func(ch chan<- prometheus.Metric) {
			for of, n := range m.total.Range {
				labels := of.([2]string)
				total.send(ch, float64(n.(int)), labels[:]...)
			}
		}})
	}
	for _, f := range s.cfg.Families {
		for _, vec := range []*prometheus.CounterVec{m.restoreFailures, m.partialFailures, m.nftSyncFailures, m.nftCleanups} {
			vec.WithLabelValues(f.String())
		}
		for _, table := range tables {
			m.setRules(f, table, 0, 0)
		}
	}
	return m
}

func (m *ruleMetrics) setRules(f plan.Family, table string, total, written int) {
	m.total.Store([2]string{table, f.String()}, total)
	m.last.WithLabelValues(table, f.String()).Set(float64(written))
}

// RestoreFailed counts a run of iptables-restore that failed. One that wrote single changes, for which partial is true, is
// counted twice, as by kube-proxy: among all and by itself. In modes that have no such metric, what is counted is shown nowhere,
// like what the other methods about rules count.
func (s *Set) RestoreFailed(f plan.Family, partial bool) {
	s.rules.restoreFailures.WithLabelValues(f.String()).Inc()
	if partial {
		s.rules.partialFailures.WithLabelValues(f.String()).Inc()
	}
}

// AffinityClients says how many clients session affinity remembers for a share of all frontends.
func (s *Set) AffinityClients(f plan.Family, share, n int) {
	s.rules.clients.WithLabelValues(f.String(), strconv.Itoa(share)).Set(float64(n))
}

// NFTablesFailed counts a transaction of nftables that failed. cleanup is true for one that only removed things.
func (s *Set) NFTablesFailed(f plan.Family, cleanup bool) {
	vec := s.rules.nftSyncFailures
	if cleanup {
		vec = s.rules.nftCleanups
	}
	vec.WithLabelValues(f.String()).Inc()
}

// IPTablesRules notes how many rules a table (filter or nat) holds that belong to this program, and how many the last sync
// wrote.
func (s *Set) IPTablesRules(f plan.Family, table string, total, written int) {
	s.rules.setRules(f, table, total, written)
}
