package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"

	"nodeproxy/config"
	"nodeproxy/kernel/names"
	"nodeproxy/metrics"
	"nodeproxy/node/health"
	"nodeproxy/source"
)

// front is where the world asks how it goes: the servers of health and of metrics, and the health check node ports of Services. It
// lasts as long as the process, so that nobody finds a port closed, or a node unhealthy, because one daemon takes the place of
// another. In between, the answers are those of the former one.
type front struct {
	healthz, metrics *health.Server
	services         *health.Services

	daemon  atomic.Pointer[daemon] // that answers; nil before the first one does
	cancel  context.CancelFunc
	running sync.WaitGroup
}

func newFront() *front {
	f := &front{healthz: health.NewServer("healthz"), metrics: health.NewServer("metrics")}
	f.services = health.NewServices(health.ServicesConfig{
		Healthy: func() bool { return f.daemon.Load().monitor.node.Healthy() }, Program: program(), NotNode: []string{names.Device},
		Report: func(finding source.Finding) { f.daemon.Load().report(finding) },
		Log:    slog.New(defaultLog{}),
	})
	return f
}

// servings say what a daemon's servers of health and of metrics are like. mode is the one in force, "" for none: that is how others
// distinguish a nodeproxy that waits from a proxy.
func servings(cfg *config.Config, mode string, set *metrics.Set, node *health.Node, log *slog.Logger) (healthz, debug health.Serving) {
	answers := health.Debug{
		Metrics: set.Handler(), SLIs: set.SLIHandler(), Mode: mode, Config: cfg.Configz, Profiling: cfg.Servers.Profiling,
	}
	hard := cfg.Servers.HardFail
	return health.Serving{Addrs: []netip.AddrPort{cfg.Servers.Healthz}, Handler: node.Handler(), Program: program(), HardFail: hard, Log: log},
		health.Serving{Addrs: []netip.AddrPort{cfg.Servers.Metrics}, Handler: answers.Handler(), Program: program(), HardFail: hard, Log: log}
}

// prepare opens the addresses that a configuration asks for, and that are not open yet. An error names one that can't be opened
// though it must; nothing has changed then.
func (f *front) prepare(cfg *config.Config) error {
	for _, s := range []struct {
		server *health.Server
		addr   netip.AddrPort
	}{{f.healthz, cfg.Servers.Healthz}, {f.metrics, cfg.Servers.Metrics}} {
		err := s.server.Prepare(health.Serving{Addrs: []netip.AddrPort{s.addr}, HardFail: cfg.Servers.HardFail})
		if err != nil {
			f.discard()
			return fmt.Errorf("--bind-address-hard-fail: %w", err)
		}
	}
	return nil
}

// discard closes what prepare has opened.
func (f *front) discard() {
	f.healthz.Discard()
	f.metrics.Discard()
}

// serve lets a daemon answer.
func (f *front) serve(d *daemon) {
	before := f.daemon.Load()
	if before != nil {
		d.monitor.node.Continue(before.monitor.node)
	}
	f.daemon.Store(d)
	healthz, debug := servings(d.cfg, d.mode.name, d.metrics, d.monitor.node, d.log)
	f.healthz.Serve(healthz)
	f.metrics.Serve(debug)
	if before == nil {
		var ctx context.Context
		ctx, f.cancel = context.WithCancel(context.Background())
		f.running.Go(func() { f.services.Run(ctx) })
	}
}

// close ends all answers.
func (f *front) close() {
	if f.cancel != nil {
		f.cancel()
	}
	f.running.Wait()
	f.healthz.Close()
	f.metrics.Close()
}

// defaultLog logs by whatever slog's default logger is at the time.
type defaultLog struct{}

func (defaultLog) Enabled(ctx context.Context, level slog.Level) bool {
	return slog.Default().Handler().Enabled(ctx, level)
}

func (defaultLog) Handle(ctx context.Context, r slog.Record) error {
	return slog.Default().Handler().Handle(ctx, r)
}

func (defaultLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return slog.Default().Handler().WithAttrs(attrs)
}

func (defaultLog) WithGroup(name string) slog.Handler {
	return slog.Default().Handler().WithGroup(name)
}
