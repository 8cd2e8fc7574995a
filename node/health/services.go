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

// The pause before another attempt to listen doubles from the first to the second of these, and begins anew with every change.
const (
	firstRetry = time.Millisecond
	lastRetry  = time.Second
)

// stillHeld is how long a port may fail to listen before it is reported: a process that was started a moment before holds all sockets
// of this one, even those closed since, until its own program runs.
const stillHeld = time.Second

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
	// Report receives findings for the owners of Services. What concerns the node as a whole is logged by default.
	Report source.Report
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
	wake    chan struct{} // sockets may have to be opened or closed

	mu     sync.Mutex // guards what follows
	byName map[plan.Service]*port
	at     plan.NodePortAddresses
	node   plan.Node

	failing atomic.Int64
	// Only Run's goroutine uses these.
	running  map[plan.Service]*port // those that may have sockets
	unlisted string                 // why the host's addresses could not be listed; empty if they could
}

// NewServices returns a Services that listens nowhere before it runs.
func NewServices(cfg ServicesConfig) *Services {
	return &Services{cfg: cfg, host: newKernelAddresses(cfg.NotNode), clients: newConnections(mostOfServices), wake: make(chan struct{}, 1),
		byName: map[plan.Service]*port{}}
}

// Update takes over a plan. change says which ServicePorts may differ from the last call; after a change of the node it is
// everything. It costs work for the Services in change only, opens no socket, and keeps nothing of the plan: answers follow at once,
// sockets within moments.
func (s *Services) Update(p *plan.Plan, change plan.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	services := map[plan.Service]bool{}
	for key := range change.Keys() {
		services[key.Service] = true
	}
	if change.All() {
		s.at, s.node = p.Settings.NodePortAddresses, p.Node
		s.node.IPs = slices.Clone(p.Node.IPs)
		for key := range p.Services {
			services[key.Service] = true
		}
		for svc := range s.byName {
			services[svc] = true
		}
	}
	moved := change.All()
	for svc := range services {
		moved = s.update(p, svc) || moved
	}
	if moved {
		notify(s.wake)
	}
}

// update takes over one Service. It reports whether that may open or close a socket.
func (s *Services) update(p *plan.Plan, svc plan.Service) bool {
	number, now := readPort(p, svc)
	had := s.byName[svc]
	switch {
	case had != nil && had.number == number:
		before := had.count.Swap(&now)
		return !slices.Equal(before.families(), now.families())
	case number == 0:
		delete(s.byName, svc)
		return had != nil
	}
	made := newPort(svc, number, s.cfg, s.clients)
	made.count.Store(&now)
	s.byName[svc] = made
	return true
}

// Ports returns the number of health check node ports, and the number of those that do not listen everywhere they should.
func (s *Services) Ports() (all, failing int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byName), int(s.failing.Load())
}

// Held reports whether the health check node port of a Service has failed to listen for a while.
func (s *Services) Held(svc plan.Service) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.byName[svc]
	return p != nil && p.reported.Load() != nil
}

// Run serves until ctx ends, and then closes all sockets. A Services runs once.
func (s *Services) Run(ctx context.Context) {
	var watch sync.WaitGroup
	defer watch.Wait()
	defer s.closeAll()
	watch.Go(func() { s.host.watch(ctx, func() { notify(s.wake) }) })
	pause := firstRetry
	var again <-chan time.Time // nil while nothing fails
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
			pause = firstRetry
		case <-again:
			pause = min(2*pause, lastRetry)
		}
		again = nil
		if s.reconcile(); s.failing.Load() > 0 {
			again = time.After(pause)
		}
	}
}

// reconcile closes sockets that are no longer wanted, then opens those that are missing. The lock is not held meanwhile: there may be
// thousands, and the sync loop must not wait for them.
func (s *Services) reconcile() {
	s.mu.Lock()
	ports, at, node := maps.Clone(s.byName), s.at, s.node
	s.mu.Unlock()
	for svc, p := range s.running {
		if ports[svc] != p {
			p.close()
		}
	}
	s.running = ports
	var host []netip.Addr
	if len(ports) > 0 && !everywhere(at) {
		var err error
		if host, err = s.host.list(); err != nil {
			if s.unlisted != err.Error() {
				slog.Warn("health check node ports do not follow this host's addresses for now; they are asked for again",
					"error", err)
			}
			s.unlisted = err.Error()
			s.failing.Store(int64(len(ports)))
			return
		}
	}
	s.unlisted = ""
	all := sockets(at, node, host)
	for _, p := range ports { // Close first, since a socket on a single address keeps one on all addresses from opening.
		p.closeExcept(p.places(all))
	}
	failing := 0
	for _, p := range ports {
		if !p.listen(p.places(all), s.wake) {
			failing++
		}
	}
	s.failing.Store(int64(failing))
}

// closeAll closes all sockets.
func (s *Services) closeAll() {
	for _, p := range s.running {
		p.close()
	}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // It runs anyway.
	}
}
