package listeners

import (
	"context"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
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
	// frontend.
	Report source.Report
	// Count receives the number of conflicts after each check.
	Count func(int)
	// Held reports whether this program fails to listen at the health check node port of a Service.
	Held func(plan.Service) bool
	// Log receives the reason if sockets could not be listed.
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

	plan atomic.Pointer[plan.Snapshot]

	looking sync.Mutex          // held during a look; guards what follows
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
	return &Watcher{
		cfg: cfg, period: defaultPeriod, gap: defaultGap, keep: defaultKeep, wake: make(chan struct{}, 1),
		dump: dumpSockets, host: hostAddresses, own: sockets.Own, found: map[conflict]string{},
	}
}

// Update passes the plan as it was last programmed; nil if it never was. change says which ServicePorts differ from the last call. It costs
// work for those only, and waits for no look at sockets.
func (w *Watcher) Update(now *plan.Snapshot, change plan.Change) {
	if now == nil {
		return
	}
	before := w.plan.Swap(now)
	differs := before == nil || change.All()
	for key := range change.Keys() {
		differs = differs || !slices.Equal(frontends(before.ServicePort(key)), frontends(now.ServicePort(key)))
	}
	if differs {
		select {
		case w.wake <- struct{}{}:
		default: // A check is due anyway.
		}
	}
}

func frontends(sp *plan.ServicePort) []plan.Frontend {
	if sp == nil {
		return nil
	}
	return sp.Frontends
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
	s := w.plan.Load()
	if s == nil {
		return nil
	}
	list, err := w.sockets(s)
	if err != nil {
		return err
	}
	addrs, err := w.host(w.cfg.NotNode)
	if err != nil {
		return err
	}
	w.report(s, w.conflicts(s, list, addrs))
	w.looked = time.Now()
	return nil
}

// all iterates over the frontends of all ServicePorts.
func all(s *plan.Snapshot) iter.Seq2[*plan.ServicePort, plan.Frontend] {
	return func(yield func(*plan.ServicePort, plan.Frontend) bool) {
		for _, ports := range s.Services() {
			for _, sp := range ports {
				for _, f := range sp.Frontends {
					if !yield(sp, f) {
						return
					}
				}
			}
		}
	}
}

// spot is where sockets and frontends may meet.
type spot struct {
	protocol plan.Protocol
	port     uint16
}

// sockets returns the sockets of protocols that Services have: to ask for those of others may load a module.
func (w *Watcher) sockets(s *plan.Snapshot) (map[spot][]socket, error) {
	used := map[plan.Protocol]bool{}
	for _, f := range all(s) {
		used[f.Protocol] = true
	}
	out := map[spot][]socket{}
	for p := range used {
		list, err := w.dump(p)
		if err != nil {
			return nil, err
		}
		for _, one := range list {
			at := spot{p, one.Port}
			out[at] = append(out[at], one)
		}
	}
	return out, nil
}

// conflicts returns the current conflicts, each with the inodes of its sockets.
func (w *Watcher) conflicts(s *plan.Snapshot, list map[spot][]socket, addrs []netip.Addr) map[conflict][]uint32 {
	now, own := map[conflict][]uint32{}, sync.OnceValue(w.own)
	doubtful, at, ephemeral := map[uint32]time.Time{}, time.Now(), host.EphemeralPorts()
	for sp, f := range all(s) {
		check := f.Kind == plan.HealthCheckNodePort
		for _, to := range list[spot{f.Protocol, f.Port}] {
			if !captures(s, sp, f, to, addrs) || check && own()[to.Inode] || !check && endpointOf(s, sp.Key, to, addrs) {
				continue
			}
			c := conflictOf(to, sp.Key, f)
			// At a health check node port, it may have been this program's, and is closed by now.
			doubt := check && !w.cfg.Held(sp.Key.Service) || to.Protocol == plan.UDP && ephemeral.Contains(to.Port)
			if _, found := w.found[c]; doubt && !found {
				first, seen := w.doubtful[to.Inode]
				if !seen {
					first = at
				}
				if doubtful[to.Inode] = first; !seen || at.Sub(first) < w.gap {
					continue
				}
			}
			now[c] = append(now[c], to.Inode)
		}
	}
	w.doubtful = doubtful
	return now
}

func conflictOf(s socket, key plan.Key, f plan.Frontend) conflict {
	s.Inode, s.UID, key.Family = 0, 0, 0
	return conflict{s, key, f}
}
