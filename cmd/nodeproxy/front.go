package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/kernel/names"
	"nodeproxy/metrics"
	"nodeproxy/node/health"
	"nodeproxy/node/memory"
	"nodeproxy/source"
	"nodeproxy/ui"
)

// front is where the world asks how it goes: the servers of health and of metrics, and the health check node ports of Services. It
// lasts as long as the process, so that nobody finds a port closed, or a node unhealthy, because one daemon takes the place of
// another. In between, the answers are those of the former one.
type front struct {
	mu       sync.Mutex        // A daemon may begin to answer while a further configuration is tried.
	servers  [2]*health.Server // of health and of metrics
	services *health.Services
	history  inspect.History
	socket   socket

	daemon  atomic.Pointer[daemon] // that answers; nil before the first one does
	cancel  context.CancelFunc
	running sync.WaitGroup
}

func newFront() *front {
	f := &front{servers: [2]*health.Server{health.NewServer("healthz", program()), health.NewServer("metrics", program())}}
	f.services = health.NewServices(health.ServicesConfig{
		Healthy: func() bool { return f.daemon.Load().monitor.node.Healthy() }, Program: program(), NotNode: []string{names.Device},
		Report: func(finding source.Finding) { f.daemon.Load().report(finding) },
	})
	return f
}

// servings say what the servers of health and of metrics are like for a daemon. mode is the one in force, "" for none: that is how
// others distinguish a nodeproxy that waits from a proxy.
func servings(cfg *config.Config, mode string, set *metrics.Set, node *health.Node, page http.Handler, log *slog.Logger) [2]health.Serving {
	answers := health.Debug{
		Metrics: set.Handler(), SLIs: set.SLIHandler(), Mode: mode, Config: cfg.Configz, Profiling: cfg.Servers.Profiling, UI: page,
	}
	return [2]health.Serving{
		{Addrs: []netip.AddrPort{cfg.Servers.Healthz}, Handler: node.Handler(), Log: log},
		{Addrs: []netip.AddrPort{cfg.Servers.Metrics}, Handler: answers.Handler(), Log: log},
	}
}

// prepare opens the addresses that a configuration asks for, and that are not open yet. An error names one that can't be opened
// though it must; nothing has changed then.
func (f *front) prepare(cfg *config.Config) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, addr := range []netip.AddrPort{cfg.Servers.Healthz, cfg.Servers.Metrics} {
		if err := f.servers[i].Prepare(addr); err != nil && cfg.Servers.HardFail {
			f.discardLocked()
			return fmt.Errorf("--bind-address-hard-fail: %w", err)
		}
	}
	return nil
}

// discard closes what prepare has opened.
func (f *front) discard() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.discardLocked()
}

func (f *front) discardLocked() {
	for _, s := range f.servers {
		s.Discard()
	}
}

// serve lets a daemon answer.
func (f *front) serve(d *daemon) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.daemon.Load()
	if before != nil {
		d.monitor.node.Continue(before.monitor.node)
	}
	f.daemon.Store(d)
	answers := func() *inspect.Node { return f.daemon.Load().inspected() }
	var page http.Handler
	if access := ui.Access(d.cfg.Servers.UI); access != ui.Nobody {
		page = ui.Handler(answers, access)
	}
	if d.machine.real() {
		profileMemory(d.cfg.Servers.Profiling)
	}
	for i, serving := range servings(d.cfg, d.mode.name, d.metrics, d.monitor.node, page, d.log) {
		serving.Handler = f.restAfter(serving.Handler)
		f.servers[i].Serve(serving)
	}
	f.socket.serve(d.cfg.Socket, f.restAfter(inspect.Handler(answers)), d.report)
	if before == nil && d.machine.real() {
		var ctx context.Context
		ctx, f.cancel = context.WithCancel(context.Background())
		f.running.Go(func() { f.services.Run(ctx) })
	}
}

// restAfter returns a handler that answers as h does, and tells that nothing more follows: an answer leaves garbage, as a sync does. It makes
// room before a scrape, which leaves megabytes.
func (f *front) restAfter(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" && f.daemon.Load().machine.real() && growthUnset() {
			memory.MakeRoom()
		}
		h.ServeHTTP(w, r)
		f.daemon.Load().monitor.rest()
	})
}

// close ends all answers.
func (f *front) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cancel != nil {
		f.cancel()
	}
	f.running.Wait()
	for _, s := range f.servers {
		s.Close()
	}
	f.socket.close()
}

// socket is the unix socket at which this process answers commands.
type socket struct {
	path     string
	listener net.Listener
	done     chan struct{}
}

// serve answers at a path, "" for none. Where that is not possible, it reports it, and goes on without.
func (s *socket) serve(path string, h http.Handler, report source.Report) {
	if path == s.path {
		return
	}
	s.close()
	if path == "" {
		return
	}
	listener, err := inspect.Listen(path)
	if err != nil {
		report(source.Finding{
			Severity: source.Problem, Field: "--socket", Detail: err.Error(), Effect: "commands such as status and explain can't ask this process",
		})
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := inspect.Serve(listener, h); err != nil {
			slog.Error("commands get no answers any more", "socket", path, "error", err)
		}
	}()
	s.path, s.listener, s.done = path, listener, done
}

// close ends the answers, and removes the socket.
func (s *socket) close() {
	if s.listener != nil {
		s.listener.Close()
		<-s.done
	}
	*s = socket{}
}
