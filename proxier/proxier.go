package proxier

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/source"
)

// Backend keeps the kernel equal to a plan.
type Backend interface {
	// Sync makes the kernel equal to p. changed names the ServicePorts that differ from those of the last successful
	// Sync, vanished ones included; nil means that nothing may be assumed about the kernel. After an error, what the
	// kernel holds is not known, and the next call must pass nil. A Sync that a cancelled ctx interrupts leaves every
	// ServicePort either as it was or as it should be.
	Sync(ctx context.Context, p *plan.Plan, changed plan.Keys) error
}

// Config says what a Proxier works with.
type Config struct {
	NodeName string
	Settings plan.Settings
	// Families are those that this node can forward.
	Families []plan.Family
	Backend  Backend
	// MinSyncPeriod is the least time between the starts of two syncs; zero by default. A change that finds the Proxier idle
	// is programmed at once. Changes that arrive while a sync of other changes runs go into the next one together, which
	// begins after a rest as long as that sync took, so that changes never keep the machine busy for more than half of
	// the time.
	MinSyncPeriod time.Duration
	// AfterSync, if set, is called after each successful sync, in the goroutine that runs the Proxier: p is not to be kept,
	// since it changes, and what takes long is to be done elsewhere. changed is as it was for the Backend.
	AfterSync func(p *plan.Plan, changed plan.Keys, took time.Duration)
	// Report receives what owners of objects should know; nil discards it.
	Report source.Report
	Log    *slog.Logger
}

// The wait after a failed sync doubles from the first to the second of these.
const (
	firstRetry = 200 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// longestRest is how long changes may have to wait at most for the sake of a sync that took long.
const longestRest = time.Second

// Proxier receives batches of objects, and syncs its backend whenever they change the plan.
type Proxier struct {
	cfg   Config
	state *State // only Run's goroutine uses it
	wake  chan struct{}

	mu      sync.Mutex
	pending source.Batch
	resync  bool // everything is to be compared with the kernel
}

// New returns a Proxier that does nothing until it runs.
func New(cfg Config) *Proxier {
	return &Proxier{
		cfg:   cfg,
		state: NewState(cfg.NodeName, cfg.Settings, cfg.Families, cfg.Report),
		wake:  make(chan struct{}, 1),
	}
}

// Apply notes a batch down; it never waits for a sync. Of an object that changes again before it is used, only the last
// version counts.
func (p *Proxier) Apply(b source.Batch) {
	p.mu.Lock()
	p.pending.Merge(b)
	p.mu.Unlock()
	p.rouse()
}

// Resync makes the next sync assume nothing about the kernel, and lets it come soon.
func (p *Proxier) Resync() {
	p.mu.Lock()
	p.resync = true
	p.mu.Unlock()
	p.rouse()
}

func (p *Proxier) rouse() {
	select {
	case p.wake <- struct{}{}:
	default: // It will look anyway.
	}
}

// Run keeps the backend in step until ctx ends. It leaves the rules in place when it returns: traffic flows on without it.
func (p *Proxier) Run(ctx context.Context) {
	retry := time.Duration(0)
	full := false // whether the last sync failed, so that nothing may be assumed about the kernel
	inSync := false
	for {
		var again <-chan time.Time
		if retry > 0 {
			again = time.After(retry)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-p.wakeUnless(retry > 0):
		}
		if ctx.Err() != nil { // select takes any of what is ready
			return
		}
		batch, resync := p.take()
		p.state.Apply(batch)
		full = full || resync
		if !p.state.Synced() {
			continue
		}
		start := time.Now()
		desired, changed := p.state.Update()
		if changed != nil && len(changed) == 0 && !full {
			continue
		}
		if full {
			changed = nil
		}
		p.warnOnce(&inSync)
		err := p.cfg.Backend.Sync(ctx, desired, changed)
		if ctx.Err() != nil {
			return
		}
		if full = err != nil; full {
			retry = min(max(2*retry, firstRetry), lastRetry)
			p.cfg.Log.Error("sync failed; the kernel keeps what it has and everything is compared and written anew",
				"retry-in", retry, "error", err)
			continue
		}
		retry = 0
		level := slog.LevelDebug
		if !inSync {
			inSync, level = true, slog.LevelInfo
		}
		took := time.Since(start)
		p.cfg.Log.Log(ctx, level, "in sync", "took", took.Round(10*time.Microsecond), "changed", len(changed),
			"service-ports", len(desired.Services))
		if p.cfg.AfterSync != nil {
			p.cfg.AfterSync(desired, changed, took)
		}
		p.pause(ctx, start, changed == nil)
	}
}

// wakeUnless returns the channel of new batches, or none while a failed sync waits for its retry: batches that arrive
// meanwhile go into that.
func (p *Proxier) wakeUnless(waiting bool) <-chan struct{} {
	if waiting {
		return nil
	}
	return p.wake
}

func (p *Proxier) take() (b source.Batch, resync bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, resync = p.pending, p.resync
	p.pending, p.resync = source.Batch{}, false
	return b, resync
}

// warnOnce tells, before the first sync, of settings that can't take effect.
func (p *Proxier) warnOnce(inSync *bool) {
	if !*inSync && p.state.podCIDRsMissing() {
		p.cfg.Log.Warn("detect-local-mode is NodeCIDR, but the Node has no spec.podCIDRs; traffic from pods is not told "+
			"from other traffic until it has", "node", p.cfg.NodeName)
	}
}

// pause waits until MinSyncPeriod has passed since start, when a sync began that has just ended. If changes have arrived
// meanwhile, there are many: it also waits as long as that sync took, and what arrives by then goes along. A sync of
// everything is no measure of what changes cost.
func (p *Proxier) pause(ctx context.Context, start time.Time, all bool) {
	took := time.Since(start)
	left := p.cfg.MinSyncPeriod - took
	if !all && p.waiting() {
		left = max(left, min(took, longestRest))
	}
	if left <= 0 {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(left):
	}
}

// waiting reports whether there are batches that no sync has taken yet.
func (p *Proxier) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.pending.Empty()
}
