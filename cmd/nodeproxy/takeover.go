package main

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"sync"

	"nodeproxy/config"
	"nodeproxy/proxier/exclusive"
	"nodeproxy/proxier/health"
	"nodeproxy/proxier/leftovers"
	"nodeproxy/proxier/plan"
)

// turn is this program's turn to write to the kernel. It comes when no other proxy runs in the network namespace, and lasts as
// long as the process, whatever configurations come and go.
type turn struct {
	process  context.Context // ends with the process, not with a configuration
	guard    exclusive.Guard
	come     bool
	told     bool // the cluster has been told that it is waited for
	claiming sync.WaitGroup
}

// await waits for the turn; an error tells that ctx ended before. Meanwhile the health server answers, unless the other proxy
// has its address, and says whom it waits for; tell tells the cluster, once.
func (t *turn) await(ctx context.Context, cfg *config.Config, families []plan.Family, tell func(string), log *slog.Logger) error {
	if t.come {
		return nil
	}
	t.guard.Log = log
	t.guard.Ports = []uint16{cfg.Servers.Healthz.Port(), cfg.Servers.Metrics.Port()}
	if cfg.TakeOver {
		t.force(log)
		return nil
	}
	node := health.NewNode(health.NodeConfig{Families: families})
	server := health.Server{Name: "healthz", Addrs: []netip.AddrPort{cfg.Servers.Healthz}, Handler: node.Handler(),
		Log: slog.New(slog.DiscardHandler)} // Most often it is the other proxy that has its address, and that is told.
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	waited := false
	err := t.guard.Wait(ctx, func(other exclusive.Proxy) {
		log.Warn("another proxy runs here; nothing is written before it is gone (--take-over goes ahead at once)", "other", other)
		node.WaitFor(other.String())
		if !t.told {
			t.told = true
			tell("waits until another proxy is gone: " + other.String())
		}
		if !waited {
			waited = true
			running.Go(func() { _ = server.Run(ctx) }) // Without HardFail, it goes on trying.
		}
	})
	if err != nil {
		return err
	}
	if t.come = true; waited {
		log.Info("the other proxy is gone; taking over")
	}
	return nil
}

// force takes the turn whoever else runs. Later starts wait for this process as soon as nobody else has the claim.
func (t *turn) force(log *slog.Logger) {
	t.come = true
	other := t.guard.Other()
	if other == nil {
		return
	}
	log.Warn("another proxy runs here; going ahead, as --take-over asks", "other", other)
	t.claiming.Go(func() { _ = t.guard.Claim(t.process) }) // An error tells of the end of process alone.
}

// close ends the turn. process must have ended.
func (t *turn) close() {
	t.claiming.Wait()
	_ = t.guard.Close() // It goes with the process anyway.
}

// removeLeftovers removes, after the first sync, what a kube-proxy has left that no mode of this program has.
func (d *daemon) removeLeftovers(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-d.monitor.inSync:
	}
	found, err := leftovers.Find()
	if err != nil {
		d.log.Warn("what a kube-proxy may have left is not known", "error", err)
	}
	removed, err := leftovers.Remove(found)
	if len(removed) > 0 {
		var names []string
		for _, l := range removed {
			names = append(names, l.String())
		}
		d.log.Info("a kube-proxy ran here before; what it left is removed", "removed", strings.Join(names, ", "))
	}
	if err != nil {
		d.log.Warn("something of a kube-proxy's stays until the next start", "error", err)
		d.warn("what a kube-proxy has left can't be removed: " + err.Error())
	}
}
