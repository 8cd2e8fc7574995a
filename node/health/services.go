package health

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// The pause before another attempt to listen on a port doubles from the first to the second of these.
const (
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
)

// mostOfServices is the maximum number of connections of all health check node ports together.
const mostOfServices = 1024

// ServicesConfig configures Services.
type ServicesConfig struct {
	// Healthy reports whether the node as a whole is healthy, as Node.Healthy does.
	Healthy func() bool
	// Program, with its version, is the header Server of each answer; "" for none.
	Program string
	// NotNode names interfaces whose addresses belong to Services and not to the node, such as kube-ipvs0.
	NotNode []string
	// Report receives findings for the owners of Services; nil discards them.
	Report source.Report
	// Log receives what concerns the node as a whole; nil discards it.
	Log *slog.Logger
}

// Services serves the health check node port of each Service that has one: there a load balancer asks whether this node has
// endpoints of the Service, and how many (KEP-1669: terminating ones do not count). It listens where node ports of the Service's
// families answer, and follows changes of the host's addresses.
//
// A Service has one port for both families, but may have endpoints of one only. A request over a family that the Service has is
// answered with the endpoints of that family. Over the other family, it is refused, unless node ports answer everywhere: then a socket
// has both families, as with kube-proxy, and the answer is about the family that the Service has.
type Services struct {
	cfg     ServicesConfig
	host    hostAddresses
	clients *connections
	addrsOf chan struct{} // the host's addresses have changed
	wake    chan struct{}

	mu       sync.Mutex // guards what follows
	byName   map[plan.Service]*port
	at       plan.NodePortAddresses
	node     plan.Node
	known    bool // whether at and node are
	moved    bool // whether sockets may have to move
	dirty    map[*port]bool
	obsolete []*port

	failing      map[*port]bool // only Run uses it
	failingCount atomic.Int64
}

// NewServices returns a Services that listens nowhere before it runs.
func NewServices(cfg ServicesConfig) *Services {
	if cfg.Report == nil {
		cfg.Report = func(source.Finding) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Services{
		cfg: cfg, host: newKernelAddresses(cfg.NotNode), clients: newConnections(mostOfServices),
		addrsOf: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		byName: map[plan.Service]*port{}, dirty: map[*port]bool{}, failing: map[*port]bool{},
	}
}

// Update takes over a plan. change says which ServicePorts may differ from the last call; after a change of the node it is
// everything. It costs work for the Services in change only, opens no socket, and keeps nothing of the plan: answers follow at once,
// sockets within moments.
func (s *Services) Update(p *plan.Plan, change plan.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if change.All() {
		s.updateAll(p)
	} else {
		seen := map[plan.Service]bool{}
		for key := range change.Keys() {
			if !seen[key.Service] {
				seen[key.Service] = true
				s.update(p, key.Service)
			}
		}
	}
	if len(s.dirty) > 0 || len(s.obsolete) > 0 || s.moved {
		notify(s.wake)
	}
}

// updateAll takes over every Service, and what is common to all.
func (s *Services) updateAll(p *plan.Plan) {
	if !s.known || !s.node.Equal(p.Node) || !equalAddresses(s.at, p.Settings.NodePortAddresses) {
		s.node, s.at, s.known, s.moved = p.Node, p.Settings.NodePortAddresses, true, true
		s.node.IPs = slices.Clone(p.Node.IPs)
	}
	here := map[plan.Service]bool{}
	for key := range p.Services {
		if !here[key.Service] {
			here[key.Service] = true
			s.update(p, key.Service)
		}
	}
	for svc := range s.byName {
		if !here[svc] {
			s.update(p, svc)
		}
	}
}

func (s *Services) update(p *plan.Plan, svc plan.Service) {
	number, now := readPort(p, svc)
	had := s.byName[svc]
	if had != nil && had.number == number {
		if had.count.Swap(&now).has != now.has {
			s.dirty[had] = true
		}
		return
	}
	if had != nil {
		s.obsolete = append(s.obsolete, had)
		delete(s.byName, svc)
		delete(s.dirty, had)
	}
	if number != 0 {
		made := newPort(svc, number, s.cfg, s.clients)
		made.count.Store(&now)
		s.byName[svc] = made
		s.dirty[made] = true
	}
}

// Ports returns the number of health check node ports, and the number of those that do not listen everywhere they should.
func (s *Services) Ports() (all, failing int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byName), int(s.failingCount.Load())
}

// stillHeld is how long to wait for an address that has just been closed here: a process that was started a moment before holds
// all sockets of this one until its own program runs.
const stillHeld = time.Second

// calm is how long to wait after a change of the host's addresses, as several often change together.
const calm = 50 * time.Millisecond

// Run serves until ctx ends, and then closes all sockets. A Services runs once.
func (s *Services) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	defer s.closeAll()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	following := false
	for {
		if !following && s.follows() {
			following = true
			running.Go(func() { s.host.watch(ctx, func() { notify(s.addrsOf) }) })
		}
		var again <-chan time.Time
		if first := s.nextTry(); !first.IsZero() {
			again = time.After(time.Until(first))
		}
		select {
		case <-ctx.Done():
			return
		case <-s.addrsOf:
			s.addressesChanged(ctx)
		case <-s.wake:
		case <-again:
		}
		s.reconcile()
	}
}

// follows reports whether the host's addresses matter.
func (s *Services) follows() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known && !everywhere(s.at)
}

func (s *Services) addressesChanged(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(calm):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.moved = true
}

// work is the pending work on sockets.
type work struct {
	close []*port
	open  map[*port]bool
	at    plan.NodePortAddresses
	node  plan.Node
}

// take returns the pending work. The lock is not held while it is done: there may be thousands of sockets, and the sync loop must
// not wait for them.
func (s *Services) take() work {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := work{close: s.obsolete, open: s.dirty, at: s.at, node: s.node}
	s.obsolete, s.dirty = nil, map[*port]bool{}
	if s.moved {
		for _, p := range s.byName {
			w.open[p] = true
		}
	}
	s.moved = false
	return w
}

// reconcile closes sockets that are no longer wanted, then opens those that are missing.
func (s *Services) reconcile() {
	w := s.take()
	closed := map[uint16]bool{} // ports
	for _, p := range w.close {
		closed[p.number] = true
		p.close()
		delete(s.failing, p)
	}
	maps.Copy(w.open, s.due(len(w.close) > 0))
	var host []netip.Addr
	if !everywhere(w.at) && len(w.open) > 0 {
		var err error
		if host, err = s.host.list(); err != nil {
			s.cfg.Log.Warn("health check node ports do not follow this host's addresses for now; they are asked for again",
				"error", err)
			for p := range w.open {
				p.putOff(time.Now())
				s.failing[p] = true
			}
			s.failingCount.Store(int64(len(s.failing)))
			return
		}
	}
	at := func(p *port) []listenAt { return sockets(w.at, w.node, host, p.count.Load().families()) }
	for p := range w.open { // Close first, since a socket on a single address keeps one on all addresses from opening.
		if p.closeExcept(at(p)) {
			closed[p.number] = true
		}
	}
	until := time.Now().Add(stillHeld)
	for p := range w.open {
		var patience time.Time
		if closed[p.number] {
			patience = until
		}
		if delete(s.failing, p); !p.listen(at(p), patience, s.lost) {
			s.failing[p] = true
		}
	}
	s.failingCount.Store(int64(len(s.failing)))
}

// due returns the ports to retry now: all if freed is true, since a port was closed that another Service may have waited for.
func (s *Services) due(freed bool) map[*port]bool {
	out, now := map[*port]bool{}, time.Now()
	for p := range s.failing {
		if freed || !p.retryAt.After(now) {
			out[p] = true
		}
	}
	return out
}

// lost records that a socket of p has ended by itself.
func (s *Services) lost(p *port, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byName[p.service] != p {
		return
	}
	s.cfg.Log.Warn("a health check node port stopped listening; it is retried", "service", p.service,
		"port", p.number, "error", err)
	s.dirty[p] = true
	notify(s.wake)
}

// nextTry returns the time of the next retry of a port; zero for none.
func (s *Services) nextTry() time.Time {
	var first time.Time
	for p := range s.failing {
		if first.IsZero() || p.retryAt.Before(first) {
			first = p.retryAt
		}
	}
	return first
}

// closeAll closes all sockets.
func (s *Services) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.obsolete {
		p.close()
	}
	for _, p := range s.byName {
		p.close()
	}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // It runs anyway.
	}
}
