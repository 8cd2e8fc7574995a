package listeners

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"nodeproxy/kernel/host"
	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
	"nodeproxy/source"
)

// Config says how a Watcher works.
type Config struct {
	// NotNode names devices whose addresses belong to Services and not to the node.
	NotNode []string
	// Report receives a problem once for each conflict, when it is found, and a note when it ends while the Service still has the
	// frontend; nil discards them.
	Report source.Report
	// Count receives the number of conflicts after each check; nil discards it.
	Count func(int)
	// Log receives the reason if sockets could not be listed; nil discards it.
	Log *slog.Logger
}

// The intervals between checks.
const (
	defaultPeriod = 30 * time.Second
	// defaultGap is the minimum time between two checks, whatever changes.
	defaultGap = 5 * time.Second
	// defaultKeep is for how long Current returns what the last look has found.
	defaultKeep = time.Second
)

// Watcher looks for conflicts. Update passes it the plan; Run does the work.
type Watcher struct {
	cfg         Config
	period, gap time.Duration
	keep        time.Duration
	wake        chan struct{}

	// Replaced by tests.
	dump func(plan.Protocol) ([]socket, error)
	host func(not []string) ([]netip.Addr, error)
	own  func() map[uint32]bool

	mu    sync.Mutex
	index *index
	known bool // whether there is a plan

	// looking is held during a look, and guards what follows. mu may be locked meanwhile, but not the other way round.
	looking sync.Mutex
	looked  time.Time           // when the last look ended
	found   map[conflict]string // and the processes that own the sockets
	// doubtful are the sockets that count if they are still there after a gap, by inode, and when they were first seen.
	doubtful map[uint32]time.Time
}

// conflict is a socket and a frontend that match the same packets. Sockets with the same address and port are one, and so are the
// node ports of both families.
type conflict struct {
	socket   socket   // without inode and user
	port     plan.Key // without family
	frontend plan.Frontend
}

// New returns a Watcher that does nothing until it runs and has a plan.
func New(cfg Config) *Watcher {
	if cfg.Report == nil {
		cfg.Report = func(source.Finding) {}
	}
	if cfg.Count == nil {
		cfg.Count = func(int) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Watcher{
		cfg: cfg, period: defaultPeriod, gap: defaultGap, keep: defaultKeep, wake: make(chan struct{}, 1),
		dump: dumpSockets, host: hostAddresses, own: sockets.Own, index: newIndex(), found: map[conflict]string{},
	}
}

// Update passes the plan. change says which ServicePorts differ from the last call. It costs work for those only, waits for no look
// at sockets, and keeps nothing of p that changes.
func (w *Watcher) Update(p *plan.Plan, change plan.Change) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.index.update(p, change) {
		select {
		case w.wake <- struct{}{}:
		default: // A check is due anyway.
		}
	}
	w.known = true
}

// Current returns the conflicts that there are now, or were a second ago: all who ask at once, or soon after another, share one look at
// the sockets. It reports what has begun and ended, as Run does, and may run beside it.
func (w *Watcher) Current() []source.Finding {
	w.looking.Lock()
	defer w.looking.Unlock()
	if time.Since(w.looked) >= w.keep {
		if err := w.look(); err != nil {
			w.cfg.Log.Debug("looking for programs that listen where a Service is", "error", err)
		}
	}
	var out []source.Finding
	for _, c := range slices.SortedFunc(maps.Keys(w.found), conflict.compare) {
		out = append(out, c.finding(w.found[c]))
	}
	return out
}

// Run looks for conflicts until ctx ends: once there is a plan, every 30 seconds, and soon after frontends have changed.
func (w *Watcher) Run(ctx context.Context) {
	logged := ""
	next := time.NewTimer(w.period)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-next.C:
		}
		w.looking.Lock()
		err := w.look()
		again := len(w.doubtful) > 0
		w.looking.Unlock()
		switch {
		case err == nil:
			logged = ""
		case err.Error() != logged:
			logged = err.Error()
			w.cfg.Log.Warn("programs that listen where a Service captures the traffic are not looked for", "error", err)
		}
		wait := w.period
		if again {
			wait = w.gap
		}
		next.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case <-time.After(w.gap):
		}
	}
}

// look compares the current sockets with the plan, once there is one, and reports what has begun and ended.
func (w *Watcher) look() error {
	w.mu.Lock()
	known := w.known
	w.mu.Unlock()
	if !known {
		return nil
	}
	list, addrs, err := w.sockets()
	if err != nil {
		return err
	}
	w.report(w.conflicts(list, addrs))
	w.looked = time.Now()
	return nil
}

// sockets returns the sockets of protocols that Services have, and the addresses of the node.
func (w *Watcher) sockets() (list []socket, addrs []netip.Addr, err error) {
	w.mu.Lock()
	count := maps.Clone(w.index.count)
	w.mu.Unlock()
	for _, p := range []plan.Protocol{plan.TCP, plan.UDP, plan.SCTP} {
		if count[p] == 0 {
			continue
		}
		some, err := w.dump(p)
		if err != nil {
			return nil, nil, err
		}
		list = append(list, some...)
	}
	addrs, err = w.host(w.cfg.NotNode)
	return list, addrs, err
}

// conflicts returns the current conflicts, each with the inodes of its sockets.
func (w *Watcher) conflicts(list []socket, addrs []netip.Addr) map[conflict][]uint32 {
	now := map[conflict][]uint32{}
	doubtful, at := map[uint32]time.Time{}, time.Now()
	ephemeral := host.EphemeralPorts()
	var own map[uint32]bool
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range list {
		for _, o := range w.index.captured(s, addrs) {
			doubt := s.Protocol == plan.UDP && ephemeral.Contains(s.Port)
			if o.frontend.Kind == plan.HealthCheckNodePort {
				if own == nil {
					own = w.own()
				}
				if own[s.Inode] {
					continue
				}
				doubt = true // It may have been this program's, and is closed by now.
			}
			c := conflictOf(s, o)
			if _, found := w.found[c]; doubt && !found {
				first, seen := w.doubtful[s.Inode]
				if !seen {
					first = at
				}
				if doubtful[s.Inode] = first; !seen || at.Sub(first) < w.gap {
					continue
				}
			}
			now[c] = append(now[c], s.Inode)
		}
	}
	w.doubtful = doubtful
	return now
}

func conflictOf(s socket, o owner) conflict {
	s.Inode, s.UID, o.key.Family = 0, 0, 0
	return conflict{s, o.key, o.frontend}
}
