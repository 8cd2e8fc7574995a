package flows

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Config says how a Reconciler works.
type Config struct {
	// Families are the families whose flows are looked at.
	Families []plan.Family
	// ServiceCIDRs are the ranges of cluster IPs, for flows to Services that were removed before this process started. Without any,
	// those flows remain.
	ServiceCIDRs []netip.Prefix
	// Period is the time between full passes, 30 seconds by default. It is longer if passes take long, so that they take no more
	// than two percent of the time.
	Period time.Duration
	// ResetTCP selects the TCP ServicePorts whose flows to endpoints that are no longer listed are removed too; nil selects none.
	// The client's next packet then goes to another endpoint, which knows nothing of the connection and resets it. This needs
	// net.netfilter.nf_conntrack_tcp_loose, which is on by default. If no endpoint is left, the rules decide: only a reject with a
	// TCP reset ends the connection at once.
	ResetTCP func(*plan.ServicePort) bool
	// StrayAnswers removes flows that began with an answer: where IPVS translates, they keep clients from an endpoint. See the
	// package documentation.
	StrayAnswers bool
	// Dial opens a socket of connection tracking, and Local reads which addresses are the machine's own; nil for those of the kernel.
	Dial  func() (*netlink.Conn, error)
	Local func(plan.Family) (*host.Local, error)
	// Observe, unless nil, is called after each sweep.
	Observe func(Sweep)
	Log     *slog.Logger
}

// Sweep describes one pass over the flows of a family and protocol.
type Sweep struct {
	Family   plan.Family
	Protocol plan.Protocol
	// Full is true if all frontends were looked for, and not only those that a change concerns.
	Full bool
	// Read counts the flows that the kernel returned, Deleted those that were removed.
	Read, Deleted int
	Took          time.Duration
	Err           error
}

const (
	defaultPeriod = 30 * time.Second
	// fullShare times the duration of a full pass is the minimum time to the next one.
	fullShare = 50
	// After a pass, the next one waits restShare times the pass's duration, so that changes never keep more than a quarter of a
	// core busy, but no longer than longestRest.
	restShare   = 3
	longestRest = 10 * time.Second
	// The wait after a failed pass doubles from the first to the second of these.
	firstRetry = 200 * time.Millisecond
	lastRetry  = time.Minute
)

// lookAgainAfter are the pauses between searches for stray answers of an endpoint that is back. Together they are as long as a slow
// server may take to answer.
var lookAgainAfter = []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second}

// Reconciler removes stale flows. Update passes it the plan, and Run does the work.
type Reconciler struct {
	cfg  Config
	wake chan struct{}

	again []time.Duration // replaced by tests

	mu    sync.RWMutex
	index *index
	work  work
	back  returned
	// known is set once there is a plan. settled is set while the rules match that plan: what a pass finds before that must be
	// looked for again.
	known, settled bool
	// started is set once a full pass has succeeded with a complete plan. partial is set while the plan is not complete.
	started, partial bool

	table conntrack.Table // only Run's goroutine uses it
	// session is open until a pass fails. A socket of netfilter that is closed soon after a transaction of nf_tables, as after each sync,
	// keeps all others waiting for ten milliseconds: the kernel holds its lock until it has destroyed what has been removed.
	session *conntrack.Session
}

// New returns a Reconciler. It does nothing before it has a plan and runs.
func New(cfg Config) *Reconciler {
	if cfg.Period <= 0 {
		cfg.Period = defaultPeriod
	}
	if cfg.Observe == nil {
		cfg.Observe = func(Sweep) {}
	}
	if cfg.Local == nil {
		cfg.Local = host.ReadLocal
	}
	return &Reconciler{cfg: cfg, wake: make(chan struct{}, 1), again: lookAgainAfter, index: newIndex(&cfg),
		table: conntrack.Table{Dial: cfg.Dial}}
}

// Backend makes the kernel's rules equal to a plan, as the proxier's does.
type Backend interface {
	Sync(ctx context.Context, p *plan.Plan, change plan.Change) error
}

// After returns a Backend that calls b, and from which r learns which plan is being applied, and when it is in force. Run removes
// flows after Sync has returned. unfinished, if not nil, reports after a Sync whether b has made a part of the change only; then flows that
// it finds are looked for again once a later Sync has made the rest.
func (r *Reconciler) After(b Backend, unfinished func() bool) Backend {
	return &follower{backend: b, unfinished: unfinished, reconciler: r}
}

type follower struct {
	backend    Backend
	unfinished func() bool
	reconciler *Reconciler
	goesOn     bool // a change that concerns flows is not finished
}

func (f *follower) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	concerned := f.reconciler.begin(p, change) || f.goesOn
	err := f.backend.Sync(ctx, p, change)
	f.goesOn = concerned && err == nil && f.unfinished != nil && f.unfinished()
	if concerned {
		f.reconciler.end(err == nil && !f.goesOn)
	}
	return err
}

// Update tells that the rules are those of this plan now. change says which ServicePorts differ from those of the
// last call. It does not wait for flows to be removed, and keeps nothing of p that changes.
func (r *Reconciler) Update(p *plan.Plan, change plan.Change) {
	if r.begin(p, change) {
		r.end(true)
	}
}

// begin records a plan whose rules are about to be written, and reports whether it changes anything. From now on, flows that this
// plan wants are not stale. Flows that it does not want may return as long as the old rules are in force, so they are looked for
// again after end.
func (r *Reconciler) begin(p *plan.Plan, change plan.Change) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	concerned := change.All()
	if concerned {
		r.updateAll(p)
	}
	for key := range change.Keys() {
		if todo, flows := r.index.set(key, p.Services[key]); flows {
			concerned = true
			r.back.note(todo.returned, r.again)
			r.work.add(todo)
		}
	}
	if concerned {
		r.known, r.settled = true, false
	}
	return concerned
}

// end records that the rules match the plan, or that writing them has failed. In that case flows are judged by the plan all the
// same: the kernel may never accept some of its rules, and that must not affect the flows of others.
func (r *Reconciler) end(inForce bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settled = inForce
	if !r.work.empty() {
		r.poke()
	}
}

func (r *Reconciler) updateAll(p *plan.Plan) {
	x := r.index
	x.settings, x.node, r.partial = p.Settings, p.Node, p.Partial
	for _, sp := range slices.Collect(x.ports.All()) {
		if p.Services[sp.Key] == nil {
			x.set(sp.Key, nil)
		}
	}
	x.expect(len(p.Services))
	x.early = false
	for key, sp := range p.Services {
		x.set(key, sp)
		// This sync may repair any rule, so any frontend may lead to endpoints only now.
		x.early = x.early || key.Protocol == plan.TCP && sp.Any
	}
	r.work.add(work{all: true})
}

func (r *Reconciler) poke() {
	select {
	case r.wake <- struct{}{}:
	default: // A pass is due anyway.
	}
}

// Run removes stale flows until ctx ends.
func (r *Reconciler) Run(ctx context.Context) {
	defer r.closeSession()
	var retry time.Duration
	reported := ""
	period := time.NewTimer(r.cfg.Period)
	defer period.Stop()
	for {
		wake, again, tick, look := r.wake, (<-chan time.Time)(nil), period.C, r.nextLook()
		if retry > 0 {
			wake, again, tick, look = nil, time.After(retry), nil, nil // The retry does everything that is due.
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-wake:
		case <-tick:
			r.mu.Lock()
			r.work.all = true
			r.mu.Unlock()
		case <-look:
			r.mu.Lock()
			r.work.add(r.back.look(r.again))
			r.mu.Unlock()
		}
		start := time.Now()
		full, err := r.pass(ctx)
		if ctx.Err() != nil {
			return
		}
		took := time.Since(start)
		if err != nil {
			retry = min(max(2*retry, firstRetry), lastRetry)
			level := slog.LevelDebug // for a failure that the next attempt may mend, and for one that was reported
			if again != nil && err.Error() != reported {
				level, reported = slog.LevelWarn, err.Error()
			}
			r.cfg.Log.Log(ctx, level, "flows to endpoints or Services that are gone may remain", "retry-in", retry, "error", err)
			period.Reset(r.cfg.Period)
			continue
		}
		retry, reported = 0, ""
		if full {
			period.Reset(max(r.cfg.Period, fullShare*took))
		}
		rest(ctx, min(restShare*took, longestRest))
	}
}

func rest(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// nextLook returns a channel that delivers when stray answers must be looked for again; nil for never.
func (r *Reconciler) nextLook() <-chan time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.back.endpoints) == 0 {
		return nil
	}
	return time.After(time.Until(r.back.due))
}

// returned are endpoints that are back, whose stray answers may still be under way.
type returned struct {
	endpoints map[netip.AddrPort]struct{}
	looks     int       // how often they have been looked for so far
	due       time.Time // when the next one is due
}

// note adds endpoints that are back. All are looked for together, as often and as long as for the latest one.
func (b *returned) note(list map[netip.AddrPort]struct{}, after []time.Duration) {
	if len(list) == 0 {
		return
	}
	b.endpoints = union(b.endpoints, maps.Clone(list))
	b.looks, b.due = 0, time.Now().Add(after[0])
}

// look returns the endpoints to look for now, and schedules the next search.
func (b *returned) look(after []time.Duration) work {
	todo := work{returned: maps.Clone(b.endpoints)}
	if b.looks++; b.looks == len(after) {
		*b = returned{}
	} else {
		b.due = time.Now().Add(after[b.looks])
	}
	return todo
}
