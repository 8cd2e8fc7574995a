package main

import (
	"sync"
	"time"

	"nodeproxy/inspect"
	"nodeproxy/kernel/names"
	"nodeproxy/metrics"
	"nodeproxy/node/flows"
	"nodeproxy/node/health"
	"nodeproxy/node/listeners"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// monitor tells the world how it goes: health, metrics, and the health check node ports of Services.
type monitor struct {
	metrics  *metrics.Set
	node     *health.Node
	services *health.Services // of the front
	// listeners looks for programs that listen where a Service captures the traffic.
	listeners *listeners.Watcher
	backend   *openMode
	// traffic reads counters; nil if there are none.
	traffic metrics.TrafficReader
	history *inspect.History // of the front
	// inSync is closed when the kernel has been brought to the plan for the first time, and complete when that was a plan with
	// all there is.
	inSync, complete     chan struct{}
	first, firstComplete func()
	// worked has a value after each sync, comparison and answer.
	worked chan struct{}
}

// started is when this program began, whatever restarts in place came after.
var started = time.Now()

// requests counts requests to the API server.
var requests = metrics.NewRESTClient()

func newMonitor(d *daemon, families []plan.Family, f *front) *monitor {
	m := &monitor{metrics: d.metrics, backend: d.backend, services: f.services, history: &f.history,
		inSync: make(chan struct{}), complete: make(chan struct{}), worked: make(chan struct{}, 1)}
	m.first = sync.OnceFunc(func() { close(m.inSync) })
	m.firstComplete = sync.OnceFunc(func() { close(m.complete) })
	m.node = health.NewNode(health.NodeConfig{
		Program: program(), Families: families, Timeout: 2 * d.cfg.SyncPeriod, Answered: m.metrics.Answered, Watches: d.watches, Faults: d.faults,
		Verify: d.verification,
	})
	m.listeners = listeners.New(listeners.Config{
		NotNode: []string{names.Device}, Report: d.conflict, Count: m.metrics.PortConflicts, Held: m.services.Held, Log: d.log,
	})
	if d.client != nil {
		m.metrics.CollectWatches(func() map[string]time.Duration {
			out := map[string]time.Duration{}
			for _, w := range d.watches() {
				out[w.Resource] = w.Age
			}
			return out
		})
	}
	m.metrics.CollectFaults(func() bool { return len(d.faults()) > 0 })
	m.metrics.CollectOldestChange(m.node.OldestChange)
	m.metrics.CollectHealthCheckNodePorts(m.services.Ports)
	return m
}

// Queued implements proxier.Observer.
func (m *monitor) Queued(in proxier.Input, synced bool) {
	m.metrics.Queued(in.Services, in.EndpointSlices)
	if synced {
		m.node.Synced()
		m.node.Queued()
	}
}

// Taken implements proxier.Observer.
func (m *monitor) Taken() {
	m.metrics.Taken()
	m.node.Taken()
}

// Synced implements proxier.Observer.
func (m *monitor) Synced(p *plan.Plan, change plan.Change, r proxier.Result) {
	defer m.rest()
	s := metrics.Sync{
		Full: change.All(), Failed: r.Err != nil, Retry: r.Retry,
		Stages: map[metrics.Stage]time.Duration{metrics.Apply: r.Apply, metrics.Plan: r.Plan},
	}
	if r.Backend > 0 {
		s.Stages[metrics.Backend] = r.Backend
		s.ByFamily = map[plan.Family]time.Duration{}
		for family, took := range m.backend.Took() {
			s.ByFamily[family] = r.Apply + r.Plan + took
		}
	}
	for _, t := range r.Triggers {
		s.Triggers = append(s.Triggers, metrics.Trigger(t))
	}
	m.metrics.Synced(s)
	m.record(change, r)
	m.metrics.Planned(p, change)
	m.services.Update(p, change)
	m.listeners.Update(r.Programmed, change)
	if r, follows := m.traffic.(interface{ Update(*plan.Plan, plan.Change) }); follows { // Some readers have to know the plan.
		r.Update(p, change)
	}
	m.node.Leaving(!r.Eligible)
	switch {
	case r.Err != nil:
		return
	case r.Waiting > 0 || r.Unfinished:
		m.node.Progressed()
	default:
		m.node.Programmed()
	}
	m.first()
	if !p.Partial {
		m.firstComplete()
	}
}

// rest tells that nothing more follows from what was done.
func (m *monitor) rest() {
	select {
	case m.worked <- struct{}{}:
	default: // It has a value already.
	}
}

// record adds a sync to the history.
func (m *monitor) record(change plan.Change, r proxier.Result) {
	written := map[string]int{}
	if r.Backend > 0 {
		for kind, n := range m.backend.Written() {
			written[string(kind)] = n
		}
	}
	m.history.Add(inspect.NewSync(change, r, written))
}

// Compared implements proxier.Observer.
func (m *monitor) Compared(why string, began time.Time, took time.Duration, again bool) {
	s := inspect.Sync{Began: began, Reasons: []proxier.Reason{proxier.Compare}, Suspicion: why, Everything: true,
		Took: inspect.Stages{Compare: took.Seconds()}, Services: []inspect.ServiceChange{}}
	if why != "" {
		s.Reasons[0] = proxier.Drift
	}
	m.history.Add(s)
	m.rest()
}

// conflict reports a program that listens where a Service captures the traffic, a problem as an event too.
func (d *daemon) conflict(f source.Finding) {
	d.report(f)
	if f.Severity == source.Problem {
		d.event("PortConflict", "WatchPorts", f.String())
	}
}

// countTraffic adds metrics of what goes through at most limit ServicePorts and through rules.
func (m *monitor) countTraffic(limit int) {
	m.metrics.CollectPacketCounters(m.backend.invalidDropped, m.backend.localhostNodePorts)
	if limit > 0 {
		m.traffic = m.backend.traffic()
		m.metrics.CollectTraffic(m.traffic, limit)
	}
}

// flowsSwept passes on what the removal of stale flows did.
func flowsSwept(set *metrics.Set) func(flows.Sweep) {
	return func(s flows.Sweep) {
		if s.Err == nil {
			set.FlowsReconciled(s.Family, s.Took, s.Deleted)
		}
	}
}
