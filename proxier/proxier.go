package proxier

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"nodeproxy/plan"
	"nodeproxy/proxier/portion"
	"nodeproxy/source"
)

// Backend keeps the kernel equal to a plan.
type Backend interface {
	// Sync makes the kernel equal to p. change says which ServicePorts differ from those of the last successful Sync, or that
	// nothing may be assumed about the kernel. After an error, what the kernel holds is not known, and the next call must pass
	// plan.Everything. A Sync that a cancelled ctx interrupts leaves every ServicePort either as it was or as it should be.
	Sync(ctx context.Context, p *plan.Plan, change plan.Change) error
}

// Config configures a Proxier.
type Config struct {
	NodeName string
	Settings plan.Settings
	// Families are the families that this node can forward.
	Families []plan.Family
	Backend  Backend
	// MinSyncPeriod is the minimum time between the starts of two syncs; zero by default. A change that finds the Proxier idle is
	// programmed at once, or, where syncs take long, with those that come close behind it. Changes that arrive during a sync go into
	// the next one together. Under continuous changes, pauses are inserted so that in the long run syncs take up four fifths of the time.
	MinSyncPeriod time.Duration
	// CompareEvery is how often everything is compared with the kernel even if nothing changed, to repair what others have changed
	// there; zero for never. If comparisons take long, they are less frequent: they take no more than one part in 1,500 of the time.
	CompareEvery time.Duration
	// Compare, if not nil, takes the place of the syncs of everything that only compare: it compares everything with the kernel beside
	// other syncs, repairs what it can, and reports whether a sync of everything has to follow. It runs in a goroutine of its own, once
	// at a time, and returns soon after its context has ended.
	Compare func(context.Context) (again bool)
	// Unchanged, if not nil, reports whether nothing at all can have changed in the kernel since Compare has found everything as it should
	// be. Then a comparison that only the time makes due is as good as done.
	Unchanged func() bool
	// Unfinished, if not nil, reports after a Sync whether the backend has made a part of a change only, so that others need not wait for all of it.
	// Then the next Sync follows at once, also if nothing else has changed.
	Unfinished func() bool
	// NodeIP, if valid, overrides the Node object's address of its family.
	NodeIP netip.Addr
	// MostAtOnce is about the number of chains of rules that one sync may write for changes; 0 for any number. Larger changes are
	// made in several syncs without a pause, and small ones that arrive meanwhile go in between. A sync of everything is not
	// divided.
	MostAtOnce int
	// Observer is notified of syncs; nil for none.
	Observer Observer
	// Report receives findings for the owners of objects; nil discards them.
	Report source.Report
	Log    *slog.Logger
}

// Observer is notified as changes make their way to the kernel. Its methods must not block, nor call the Proxier.
type Observer interface {
	// Queued is called for objects that wait for a sync. synced is true once all objects have been delivered, with these.
	Queued(in Input, synced bool)
	// Taken is called when a sync has taken all waiting batches. It is not called before all objects have been delivered.
	Taken()
	// Synced is called with the result of that sync. change is as in Backend.Sync; p must not be kept.
	Synced(p *plan.Plan, change plan.Change, r Result)
	// Compared is called after Config.Compare, with what had made it necessary, "" if only the time, and how long it took.
	Compared(why string, began time.Time, took time.Duration, again bool)
}

// Result is the result of one sync.
type Result struct {
	Err                  error
	Retry                bool          // the previous sync had failed
	Apply, Plan, Backend time.Duration // how long its stages took; Backend is 0 if nothing had to be written
	Triggers             []Trigger     // of the changes that it has programmed
	Eligible             bool          // as State.NodeEligible
	Waiting              int           // the number of changed ServicePorts that are left to later syncs
	Unfinished           bool          // as Config.Unfinished: later syncs go on with it
	Began                time.Time     // when the sync began
	Waited               time.Duration // how long the oldest of the changes had waited until then
	Reasons              []Reason      // why it was made
	Suspicion            string        // for the Reason Drift, the sign of a change by another program, if there was one
	In                   Input         // what has come; once for changes that several syncs program
	Difference           Difference    // from what was last programmed; where it failed, what it should have programmed
	// Programmed is the plan that the kernel was made equal to by this sync or, where it failed, by the last one that did not; nil for
	// none.
	Programmed *plan.Snapshot
}

// The pause after a failed sync doubles from firstRetry on. It is at most suspectShare times the duration of the sync, within
// leastLastRetry and lastRetry: where an attempt costs little, a failure that has passed is soon repaired. A change that arrives
// meanwhile waits for at most retryShare times the duration of the sync: it may be what helps, and a fault of one Service must not
// delay all others.
const (
	firstRetry     = 200 * time.Millisecond
	leastLastRetry = 2 * time.Second
	lastRetry      = 30 * time.Second
	retryShare     = 5
)

// A comparison of everything is followed by a pause of compareShare times its duration or, if something in the kernel may have been
// changed, of suspectShare times on average: suspectBurst comparisons may follow each other directly. The duration is the least of
// the last three, so that one that was slow, because another program held the lock or much had to be repaired, does not delay the
// next.
const (
	compareShare = 1500
	suspectShare = 25
	suspectBurst = 10
)

// A suspicion is acted on when no other has come for debounce, so that a program that changes many things has finished, or debounceMost
// after the first. A program that flushes all tables leaves Services without rules for that long, so it is short; a program that
// works slowly costs a few comparisons.
const (
	debounce     = 50 * time.Millisecond
	debounceMost = time.Second
)

// A sync is followed by a pause, in which further changes gather, once syncs have taken more than burst beyond their share of the time,
// which is four fifths. With a pause of a quarter of the time that a sync takes, they get no more than that, so none is longer; nor is any
// longer than five quarters of burst, as they never owe more than burst.
const burst = 500 * time.Millisecond

// Before a sync of changes, others may gather that come close behind the first of them: where many Services change at once, the API server
// tells of one after the other, and all others would wait for a sync of the first one alone. That ends when none has come for a part in
// gatherShare of the time that a sync takes, or after a part in gatherMost. Where the former is less than gatherLeast, syncs take so little
// time that they need not wait for anything. A sync that took longer than gatherLong counts as one of gatherLong: it may have waited for
// another program, and so may the one before.
const (
	gatherShare = 32
	gatherMost  = 2
	gatherLeast = 500 * time.Microsecond
	gatherLong  = time.Second
)

// Proxier receives batches of objects, and syncs its backend whenever they change the plan.
type Proxier struct {
	cfg  Config
	wake chan struct{}
	// doubt receives a value when suspicion has changed.
	doubt chan struct{}
	// published has the plan that the backend was last made equal to.
	published plan.Publisher
	// settled says that the backend was last made equal to all of the plan. It is set to false with stateMu held.
	settled atomic.Bool

	// Only Run's goroutine changes state, Apply before synced is set, and Verify where something differs. They hold stateMu while they do.
	stateMu sync.RWMutex
	state   *State

	// Only Run's goroutine uses what follows.
	log      syncLog
	portions *portion.Queue
	full     bool          // nothing may be assumed about the kernel
	why      Reason        // why full is set; "" if that follows from something else
	retry    time.Duration // how long to wait after the failed sync that came last; 0 if it did not fail
	failing  time.Duration // how long that sync took
	inSync   bool          // a sync has succeeded
	goesOn   bool          // the backend has not finished a change
	triggers []Trigger     // of changes that no sync has programmed yet
	late     []Trigger     // of those, the ones of changes that were too large for one portion
	input    Input         // what has come since the last sync
	waits    time.Time     // since when the oldest of that has waited
	// debt is the time that syncs have taken beyond their share, as of owed.
	debt time.Duration
	owed time.Time
	took [3]time.Duration // by the latest syncs of changes
	// beside receives the result of the comparison that is under way beside syncs; nil if there is none.
	beside chan besideResult
	// comparisons are the latest comparisons of everything with the kernel, the last one last.
	comparisons [suspectBurst]comparison

	mu      sync.Mutex
	pending source.Batch
	came    int               // how many batches have
	first   Input             // what is in state already, and no sync has taken yet
	since   time.Time         // when pending or first was first added to
	synced  bool              // a batch with Synced has come
	resync  bool              // everything must be compared with the kernel
	reserve *[]netip.AddrPort // what Reserve was called with last; nil once that is taken
	// The times of the first and the last call of Suspect since everything was compared; zero if there was none.
	suspectedFirst, suspectedLast time.Time
	suspicion                     string // the reason that the first of them gave
	// asked are to be closed after a comparison that has yet to begin, and answered after the one under way.
	asked, answered []chan struct{}
}

// comparison is a sync that compared everything with the kernel.
type comparison struct {
	ended time.Time
	took  time.Duration
}

// besideResult is the result of Config.Compare.
type besideResult struct {
	comparison
	why   string // the suspicion that led to it
	again bool
}

// New returns a Proxier that does nothing until it runs.
func New(cfg Config) *Proxier {
	p := &Proxier{
		cfg:   cfg,
		state: NewState(cfg.NodeName, cfg.Settings, cfg.Families, cfg.Report),
		wake:  make(chan struct{}, 1),
		doubt: make(chan struct{}, 1),
	}
	p.state.setNodeIP(cfg.NodeIP)
	p.portions = portion.New(cfg.MostAtOnce)
	p.log.log = cfg.Log
	return p
}

// Apply records a batch; it never waits for a sync. Of an object that changes again before it is used, only the last version
// counts. Until everything has been delivered, objects are read at once: nothing is programmed before that, and read objects take a third
// of the memory.
func (p *Proxier) Apply(b source.Batch) {
	p.mu.Lock()
	if p.came++; p.since.IsZero() {
		p.since = time.Now()
	}
	if p.synced = p.synced || b.Synced; p.synced {
		p.pending.Merge(b)
	} else {
		p.stateMu.Lock()
		p.state.applyFirst(b)
		p.stateMu.Unlock()
		p.first.Add(arrived(b))
	}
	if p.cfg.Observer != nil {
		p.cfg.Observer.Queued(countInput(b), p.synced) // with the lock held, so that Taken can't come between
	}
	p.mu.Unlock()
	signal(p.wake)
}

// Resync makes the next sync assume nothing about the kernel, and start soon.
func (p *Proxier) Resync() {
	p.mu.Lock()
	p.resync = true
	p.mu.Unlock()
	signal(p.wake)
}

// Reserve sets the addresses of the API server. No Service gets an external IP or a load balancer IP with such an address and port.
// It takes effect before anything that has not been synced yet.
func (p *Proxier) Reserve(list []netip.AddrPort) {
	p.mu.Lock()
	p.reserve = &list
	p.mu.Unlock()
	signal(p.wake)
}

// Suspect reports that the kernel's state may differ from what the backend has written, and why. Everything is compared soon: calls
// close together cost one comparison, and comparisons take no more than one part in 25 of the time.
func (p *Proxier) Suspect(why string) {
	now := time.Now()
	p.mu.Lock()
	first := p.suspectedFirst.IsZero()
	if first {
		p.suspectedFirst, p.suspicion = now, why
	}
	p.suspectedLast = now
	p.mu.Unlock()
	if first { // Otherwise a comparison is pending already.
		p.cfg.Log.Debug("everything will be compared with the kernel", "reason", why)
		signal(p.doubt)
	}
}

// Snapshot returns the plan that the kernel was made equal to by the last Sync that did not fail; nil if there was none. It may be
// called at any time, from any goroutine, and waits for nothing.
func (p *Proxier) Snapshot() *plan.Snapshot { return p.published.Latest() }

// View calls read with what is known of the objects and desired, and holds up the next sync until it returns: it must be quick. It may
// be called at any time, from any goroutine.
func (p *Proxier) View(read func(*State)) {
	p.stateMu.RLock()
	defer p.stateMu.RUnlock()
	read(p.state)
}

// compareAt returns when everything must be compared with the kernel next; zero for never.
func (p *Proxier) compareAt() time.Time {
	var at time.Time
	compared := p.comparisons[suspectBurst-1].ended
	if compared.IsZero() || p.beside != nil { // The first sync compares anyway.
		return at
	}
	takes := p.comparing()
	if p.cfg.CompareEvery > 0 {
		at = compared.Add(max(p.cfg.CompareEvery, compareShare*takes))
	}
	p.mu.Lock()
	first, last := p.suspectedFirst, p.suspectedLast
	p.mu.Unlock()
	if first.IsZero() {
		return at
	}
	due := last.Add(debounce)
	if most := first.Add(debounceMost); most.Before(due) {
		due = most
	}
	if earliest := p.comparisons[0].ended; !earliest.IsZero() {
		rest := earliest.Add(suspectBurst * suspectShare * takes)
		if most := compared.Add(suspectShare * takes); most.Before(rest) {
			rest = most // After a burst, comparisons get their full share again.
		}
		if rest.After(due) {
			due = rest
		}
	}
	if at.IsZero() || due.Before(at) {
		at = due
	}
	return at
}

// comparing returns the expected duration of a comparison of everything.
func (p *Proxier) comparing() time.Duration {
	takes := p.comparisons[suspectBurst-1].took
	for _, c := range p.comparisons[suspectBurst-3:] {
		if !c.ended.IsZero() {
			takes = min(takes, c.took)
		}
	}
	return takes
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // It has a signal already.
	}
}

// Run keeps the backend in step until ctx ends. It leaves the rules in place when it returns: traffic continues without it.
func (p *Proxier) Run(ctx context.Context) {
	for p.wait(ctx) {
		p.gather(ctx)
		p.round(ctx)
	}
	p.log.end()
	if p.beside != nil {
		<-p.beside
	}
}

// compare begins a comparison with the kernel. It reports whether that is to be a sync.
func (p *Proxier) compare(ctx context.Context) bool {
	if p.cfg.Compare == nil {
		p.why = Compare // unless there is a suspicion
		return true
	}
	why := p.unsuspect()
	ended := make(chan besideResult, 1)
	p.beside = ended
	go func() {
		start := time.Now()
		again := p.cfg.Compare(ctx)
		ended <- besideResult{comparison{time.Now(), time.Since(start)}, why, again}
	}()
	return false
}

// unchanged reports whether the comparison that is due would find nothing, and records it then. How long it took says nothing about the
// next one, and so is not recorded.
func (p *Proxier) unchanged() bool {
	p.mu.Lock()
	suspected := !p.suspectedFirst.IsZero()
	p.mu.Unlock()
	if suspected || p.cfg.Unchanged == nil || !p.cfg.Unchanged() {
		return false
	}
	p.comparisons[suspectBurst-1].ended = time.Now()
	return true
}

// compared records a comparison beside syncs, and reports whether a sync of everything has to follow.
func (p *Proxier) compared(r besideResult) bool {
	p.beside = nil
	if p.cfg.Observer != nil {
		p.cfg.Observer.Compared(r.why, r.ended.Add(-r.took), r.took, r.again)
	}
	if r.again {
		p.why = Drift
	} else {
		p.answer()
	}
	copy(p.comparisons[:], p.comparisons[1:])
	p.comparisons[suspectBurst-1] = r.comparison
	return r.again
}

// unsuspect forgets suspicions before everything is compared, and returns the first one; "" for none. Those from here on count.
func (p *Proxier) unsuspect() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	why := p.suspicion
	p.suspectedFirst, p.suspectedLast, p.suspicion = time.Time{}, time.Time{}, ""
	p.answered, p.asked = append(p.answered, p.asked...), nil
	return why
}

// wait returns true when there is something to do, and false when ctx ends.
func (p *Proxier) wait(ctx context.Context) bool {
	if p.retry > 0 { // Batches that arrive meanwhile go into that sync, which compares everything.
		p.waitToRetry(ctx)
		return ctx.Err() == nil // select picks any ready case
	}
	for ctx.Err() == nil {
		at := p.compareAt() // Another program may have changed something, also while a large change is being written.
		if !at.IsZero() && !time.Now().Before(at) {
			if p.unchanged() {
				continue
			}
			if p.compare(ctx) {
				p.full = true
				return true
			}
			at = time.Time{} // A comparison is under way now.
		}
		if p.more() {
			select {
			case r := <-p.beside: // What it has found is not to wait for another portion.
				p.full = p.compared(r)
			default:
			}
			return ctx.Err() == nil
		}
		var due <-chan time.Time
		if !at.IsZero() {
			due = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
		case <-p.doubt: // It may be sooner now.
		case <-p.wake:
			return ctx.Err() == nil
		case r := <-p.beside:
			if p.full = p.compared(r); p.full {
				return ctx.Err() == nil
			}
		case <-due:
		}
	}
	return false
}

// waitToRetry waits after a failed sync, for a shorter time if a change has arrived.
func (p *Proxier) waitToRetry(ctx context.Context) {
	due := time.After(p.retry)
	select {
	case <-ctx.Done():
		return
	case <-due:
		return
	case <-time.After(max(firstRetry, retryShare*p.failing)):
	}
	select {
	case <-ctx.Done():
	case <-due:
	case <-p.wake:
	}
}

// round applies what has arrived, and syncs the backend if that changes anything.
func (p *Proxier) round(ctx context.Context) {
	begin := time.Now()
	batch, since, resync, reserve := p.take()
	p.input.Add(countInput(batch))
	if p.waits.IsZero() {
		p.waits = since
	}
	p.stateMu.Lock()
	if reserve != nil {
		p.state.Reserve(*reserve)
	}
	p.state.Apply(batch)
	p.full = p.full || resync
	if !p.state.Synced() {
		p.stateMu.Unlock()
		return
	}
	p.settled.Store(false)
	start := time.Now()
	result := Result{Retry: p.retry > 0, Apply: start.Sub(begin), Eligible: p.state.NodeEligible(), Began: begin}
	desired, change := p.state.Update()
	p.stateMu.Unlock()
	if p.full || !p.inSync {
		change = plan.Everything()
	}
	result.Reasons = p.reasons(reserve != nil, resync)
	desired, change = p.portions.Next(desired, change)
	p.noteTriggers()
	result.Plan, result.Waiting = time.Since(start), p.portions.Waiting()
	if result.In, p.input = p.input, (Input{}); !p.waits.IsZero() {
		result.Waited, p.waits = begin.Sub(p.waits), time.Time{}
	}
	if p.goesOn || !change.None() {
		if change.Unknown() {
			if result.Suspicion = p.unsuspect(); result.Suspicion != "" {
				result.Reasons = append(slices.DeleteFunc(result.Reasons, func(r Reason) bool { return r == Compare || r == Drift }), Drift)
			}
		}
		p.cfg.Log.Debug("syncing", "all", change.All(), "changed", len(change.Keys()))
		writing := time.Now()
		result.Err = p.cfg.Backend.Sync(ctx, desired, change)
		if ctx.Err() != nil {
			return
		}
		result.Backend = time.Since(writing)
		result.Difference = difference(p.published.Latest(), desired, change)
		p.ended(desired, change, start, result)
		result.Unfinished = p.goesOn
	}
	p.settled.Store(result.Err == nil && result.Waiting == 0)
	if result.Err == nil {
		result.Triggers, p.triggers = p.triggers, nil
	}
	if p.cfg.Observer != nil {
		result.Programmed = p.published.Latest()
		p.cfg.Observer.Synced(desired, change, result)
	}
	if (!change.None() || p.goesOn) && result.Err == nil {
		p.pause(ctx, start, change.All())
	}
}

// more reports whether a change has been programmed in part only.
func (p *Proxier) more() bool { return p.portions.Waiting() > 0 || p.goesOn }

// noteTriggers records the triggers of the last Update. Those of a change that is too large for one portion count with its last
// one.
func (p *Proxier) noteTriggers() {
	fresh := &p.triggers
	if p.portions.Late() {
		fresh = &p.late
	}
	*fresh = append(*fresh, p.state.Triggers()...)
	if p.portions.Waiting() == 0 {
		p.triggers, p.late = append(p.triggers, p.late...), nil
	}
}

// ended records the result of a sync.
func (p *Proxier) ended(desired *plan.Plan, change plan.Change, start time.Time, r Result) {
	if p.full = r.Err != nil; p.full {
		p.goesOn = false
		p.failing = time.Since(start)
		last := min(max(suspectShare*p.failing, leastLastRetry), lastRetry)
		p.retry = min(max(2*p.retry, firstRetry), last)
		p.log.failed(r, p.retry)
		return
	}
	p.retry = 0
	took := time.Since(start)
	p.published.Publish(desired, change)
	p.goesOn = p.cfg.Unfinished != nil && p.cfg.Unfinished()
	if change.Unknown() {
		copy(p.comparisons[:], p.comparisons[1:])
		p.comparisons[suspectBurst-1] = comparison{ended: time.Now(), took: took}
		p.answer()
	}
	p.log.synced(!p.inSync, desired, change, r)
	p.inSync = true
}

// reasons returns why a sync is made.
func (p *Proxier) reasons(reserve, resync bool) []Reason {
	if !p.inSync && p.retry == 0 {
		return []Reason{Start}
	}
	var out []Reason
	for _, r := range []struct {
		is     bool
		reason Reason
	}{
		{p.retry > 0, Retry}, {reserve || p.input != Input{}, Arrived}, {p.more(), Rest}, {resync, Resync}, {p.why != "", p.why},
	} {
		if r.is {
			out = append(out, r.reason)
		}
	}
	p.why = ""
	return out
}

func (p *Proxier) take() (b source.Batch, since time.Time, resync bool, reserve *[]netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.synced && p.cfg.Observer != nil {
		p.cfg.Observer.Taken()
	}
	p.input.Add(p.first)
	p.first = Input{}
	b, since, resync, reserve = p.pending, p.since, p.resync, p.reserve
	p.pending, p.since, p.resync, p.reserve = source.Batch{}, time.Time{}, false, nil
	return b, since, resync, reserve
}

// pause waits until MinSyncPeriod has passed since start, the start of the sync that has just ended. If syncs have taken too much
// of the time lately and changes are waiting already, it waits longer. A sync of everything does not count: it says nothing about
// the cost of changes. Each other one counts as the median of the last three: one that took far longer than the others may have waited for
// another program. Portions of one change follow each other without a pause.
func (p *Proxier) pause(ctx context.Context, start time.Time, all bool) {
	now := time.Now()
	left := p.cfg.MinSyncPeriod - now.Sub(start)
	p.debt = max(p.debt-min(now.Sub(p.owed), time.Minute)*4/5, -burst)
	p.owed = now
	if !all {
		p.took = [...]time.Duration{p.took[1], p.took[2], now.Sub(start)}
	}
	usual := p.usual()
	if !all {
		p.debt = min(p.debt+usual, burst)
	}
	if p.more() {
		return
	}
	if p.debt > 0 && p.waiting() {
		left = max(left, min(p.debt*5/4, usual/4))
	}
	if left <= 0 {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(left):
	}
}

// usual is how long a sync of changes usually takes.
func (p *Proxier) usual() time.Duration {
	sorted := p.took
	slices.Sort(sorted[:])
	return sorted[1]
}

// gather waits for changes that come close behind the first of them.
func (p *Proxier) gather(ctx context.Context) {
	usual := min(p.usual(), gatherLong)
	quiet := usual / gatherShare
	if quiet < gatherLeast || p.full || p.retry > 0 || p.more() {
		return
	}
	for came, first := p.arrivals(); !first.IsZero() && time.Since(first) < usual/gatherMost; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(quiet):
		}
		before := came
		if came, _ = p.arrivals(); came == before {
			return
		}
	}
}

// arrivals returns how many batches have come, and when the first of those came that no sync has taken.
func (p *Proxier) arrivals() (came int, first time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.came, p.since
}

// waiting reports whether there are batches that no sync has taken.
func (p *Proxier) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.pending.Empty()
}
