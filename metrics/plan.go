package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/plan"
)

// reasons are the label values for the reasons to leave an endpoint out; the last is for all that are not listed.
var reasons = [...]struct {
	reason plan.Reason
	label  string
}{
	{plan.NotReady, "not_ready"},
	{plan.Terminating, "terminating"},
	{plan.TerminatingStopped, "terminating_not_serving"},
	{plan.NotForThisNode, "node_hints"},
	{plan.NotForThisZone, "zone_hints"},
	{plan.NotLocal, "not_local"},
	{plan.NodeUnknown, "node_unknown"},
	{"", "other"},
}

func reasonIndex(r plan.Reason) int {
	for i := range reasons {
		if reasons[i].reason == r {
			return i
		}
	}
	return len(reasons) - 1
}

var policies = [...]plan.Policy{plan.Cluster, plan.Local}

// counts is what one ServicePort, or all of a family, has.
type counts struct {
	ports, shadowed        int32
	noneInside, noneBeyond int32 // without a local endpoint for internal, external traffic under policy Local
	endpoints              [len(policies)]int32
	excluded               [len(policies)][len(reasons)]int32
}

// add adds n times o.
func (c *counts) add(o *counts, n int32) {
	c.ports += n * o.ports
	c.shadowed += n * o.shadowed
	c.noneInside += n * o.noneInside
	c.noneBeyond += n * o.noneBeyond
	for p := range policies {
		c.endpoints[p] += n * o.endpoints[p]
		for r := range reasons {
			c.excluded[p][r] += n * o.excluded[p][r]
		}
	}
}

func countsOf(sp *plan.ServicePort) counts {
	c := counts{ports: 1, shadowed: int32(len(sp.Shadowed))}
	c.endpoints[plan.Cluster] = int32(len(sp.Endpoints.Cluster))
	c.endpoints[plan.Local] = int32(len(sp.Endpoints.Local))
	for i := range sp.Excluded {
		c.excluded[sp.Excluded[i].Policy][reasonIndex(sp.Excluded[i].Reason)]++
	}
	if sp.Any && len(sp.Endpoints.Local) == 0 {
		if sp.InternalPolicy == plan.Local {
			c.noneInside = 1
		}
		if sp.ExternalPolicy == plan.Local && sp.HasExternal() {
			c.noneBeyond = 1
		}
	}
	return c
}

// planMetrics is what the plan holds. It keeps the ServicePorts that it has counted, so that a change costs what
// differs.
type planMetrics struct {
	ports, shadowed, endpoints, excluded, noLocal metric

	mu    sync.Mutex
	known *plan.Ports
	total map[plan.Family]*counts
}

func newPlanMetrics(s *Set) *planMetrics {
	const family, gauge = "ip_family", prometheus.GaugeValue
	m := &planMetrics{
		ports: newMetric(gauge, "nodeproxy_service_ports", "Ports of Services that are proxied.", family),
		shadowed: newMetric(gauge, "nodeproxy_shadowed_frontends",
			"Addresses and ports that a Service asks for but another Service owns.", family),
		endpoints: newMetric(gauge, "nodeproxy_endpoints", "Endpoints in use, each once for every port of a Service.", family, "policy"),
		excluded: newMetric(gauge, "nodeproxy_excluded_endpoints",
			"Endpoints that are not used under a traffic policy, by reason.", family, "policy", "reason"),
		noLocal: newMetric(prometheus.UntypedValue, "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
			"Ports of Services with traffic policy Local that have endpoints, but none on this node. It may fall.", "traffic_policy", family),
	}
	m.reset()
	s.registry.MustRegister(collector{[]metric{m.ports, m.shadowed, m.endpoints, m.excluded, m.noLocal}, func(ch chan<- prometheus.Metric) {
		for _, f := range s.cfg.Families {
			m.collect(f, ch)
		}
	}})
	return m
}

func (m *planMetrics) reset() {
	m.known, m.total = plan.NewPorts(), map[plan.Family]*counts{}
	for _, f := range plan.Families {
		m.total[f] = &counts{}
	}
}

// Planned counts what a plan holds now. change says which ServicePorts may differ from the last call. It costs work for those
// only, and keeps nothing of the plan that changes.
func (s *Set) Planned(p *plan.Plan, change plan.Change) {
	m := s.plan
	m.mu.Lock()
	defer m.mu.Unlock()
	if change.All() {
		m.reset()
		for key, sp := range p.Services {
			m.put(key, sp)
		}
		return
	}
	for key := range change.Keys() {
		m.put(key, p.Services[key])
	}
}

// put counts a ServicePort in place of what was counted of its key; nil if it is gone.
func (m *planMetrics) put(key plan.Key, sp *plan.ServicePort) {
	total := m.total[key.Family]
	if old := m.known.Get(key); old != nil {
		was := countsOf(old)
		total.add(&was, -1)
	}
	if sp == nil {
		m.known.Delete(key)
		return
	}
	now := countsOf(sp)
	total.add(&now, 1)
	m.known.Put(sp)
}

// collect sends what a family has.
func (m *planMetrics) collect(f plan.Family, ch chan<- prometheus.Metric) {
	m.mu.Lock()
	c := *m.total[f]
	m.mu.Unlock()
	family := f.String()
	m.ports.send(ch, float64(c.ports), family)
	m.shadowed.send(ch, float64(c.shadowed), family)
	for p, policy := range policies {
		m.endpoints.send(ch, float64(c.endpoints[p]), family, policy.String())
		for r := range reasons {
			m.excluded.send(ch, float64(c.excluded[p][r]), family, policy.String(), reasons[r].label)
		}
	}
	m.noLocal.send(ch, float64(c.noneInside), "internal", family)
	m.noLocal.send(ch, float64(c.noneBeyond), "external", family)
}
