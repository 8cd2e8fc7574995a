package main

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"nodeproxy/config"
	"nodeproxy/kernel/host"
	"nodeproxy/node/exclusive"
	"nodeproxy/node/health"
	"nodeproxy/node/leftovers"
	"nodeproxy/plan"
)

// turn is this program's turn to write to the kernel. It comes when no other proxy runs in the network namespace, and lasts as
// long as the process, whatever configurations come and go.
type turn struct {
	process  context.Context // ends with the process, not with a configuration
	guard    exclusive.Guard
	come     bool
	forced   bool   // taken although another proxy had it; from then on, guard is for claiming alone
	reported string // the proxy that is waited for, as last reported to the cluster
	claiming sync.WaitGroup
}

// awaitTurn waits for the turn. An error says that ctx ended before, or that the mode can't work here: who has made another proxy
// go for this one would learn of that too late. Meanwhile health and metrics are served, unless the other proxy has their
// addresses, and say whom it waits for.
func (d *daemon) awaitTurn(ctx context.Context, t *turn) error {
	if t.come {
		return nil
	}
	t.guard.Log, t.guard.Ports = d.log, proxyPorts(d.cfg)
	if d.cfg.TakeOver {
		t.force(d.log)
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var node *health.Node
	err := t.guard.Wait(ctx, func(other exclusive.Proxy) error {
		if node == nil {
			if err := d.check(); err != nil {
				return err
			}
			node = d.answerMeanwhile(ctx, &running)
		}
		d.log.Warn("another proxy runs here; nothing is written before it is gone (--take-over goes ahead at once)",
			"other", other.String())
		if t.reported != other.String() { // A new configuration makes the wait a new one.
			t.reported = other.String()
			d.event("WaitingForProxy", "StartNodeproxy", "nothing is written before another proxy is gone: "+other.String())
		}
		node.WaitFor(other.String())
		return nil
	})
	if err != nil {
		return err
	}
	t.come = true
	if node != nil { // It was waited for somebody.
		d.metrics.Waiting(false)
		d.log.Info("the other proxy is gone; taking over")
	}
	return nil
}

// lookEvery is how often another proxy is looked for once this program has its turn. That takes a few milliseconds.
const lookEvery = 30 * time.Second

// watchOthers reports a proxy that starts, or comes back, although this program has its turn, as long as ctx lasts. This one goes
// on: which of them is to be here is for people to say, and until they do, traffic has to flow.
func (d *daemon) watchOthers(ctx context.Context, t *turn, every time.Duration) {
	if d.cfg.TakeOver || t.forced { // Then it is known, and wanted.
		return
	}
	t.guard.Log, t.guard.Ports = d.log, proxyPorts(d.cfg)
	t.guard.Watch(ctx, every, func(other *exclusive.Proxy) {
		d.metrics.OtherProxyRuns(other != nil)
		if other == nil {
			d.log.Warn("the other proxy is gone; what it has changed is repaired")
			return
		}
		d.log.Warn("another proxy runs beside this one; both write, and each undoes what the other does: one of them has to go",
			"other", other.String())
		d.event("OtherProxyRuns", "WatchProxies",
			"another proxy runs beside nodeproxy, and each undoes what the other does: one of them has to go: "+other.String())
	})
}

// answerMeanwhile serves the health of a program that waits, and metrics, until ctx ends.
func (d *daemon) answerMeanwhile(ctx context.Context, running *sync.WaitGroup) *health.Node {
	d.metrics.Waiting(true)
	node := health.NewNode(health.NodeConfig{Program: program(), Families: d.families, Answered: d.metrics.Answered})
	// Most often it is the other proxy that has an address, which is no error now; once it has gone, the address is tried again.
	healthz, debug := servings(d.cfg, "", d.metrics, node, slog.New(slog.DiscardHandler))
	for name, serving := range map[string]health.Serving{"healthz": healthz, "metrics": debug} {
		serving.HardFail, serving.Addrs = false, reachable(serving.Addrs)
		running.Go(func() { _ = health.NewServer(name).Run(ctx, serving) }) // Without HardFail, there is no error.
	}
	return node
}

// reachable adds the host's own addresses to an unspecified one that somebody else keeps from being listened at, if only by a
// socket at one address, as k3s has it at 127.0.0.1: the kubelet probes the node's address, and restarts who does not answer.
func reachable(addrs []netip.AddrPort) []netip.AddrPort {
	out := slices.Clone(addrs)
	for _, addr := range addrs {
		if !addr.IsValid() || !addr.Addr().IsUnspecified() {
			continue
		}
		if listener, err := net.Listen("tcp", addr.String()); err == nil {
			_ = listener.Close()
			continue
		}
		own, _ := host.Filter{}.Addresses(plan.Families[:]...) // If they can't be listed, the address itself is tried on.
		for _, a := range own {
			if a.Addr.IsGlobalUnicast() {
				out = append(out, netip.AddrPortFrom(a.Addr, addr.Port()))
			}
		}
	}
	return out
}

// force takes the turn whoever else runs. Later starts wait for this process as soon as nobody else has the claim.
func (t *turn) force(log *slog.Logger) {
	t.come = true
	other := t.guard.Other()
	if other == nil {
		return
	}
	t.forced = true
	log.Warn("another proxy runs here; going ahead, as --take-over asks", "other", other.String())
	t.claiming.Go(func() { _ = t.guard.Claim(t.process) }) // It fails only at the end of the process.
}

// proxyPorts are where another proxy may answer that has the same configuration.
func proxyPorts(cfg *config.Config) []uint16 {
	return []uint16{cfg.Servers.Healthz.Port(), cfg.Servers.Metrics.Port()}
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
	case <-d.monitor.complete:
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
		d.event("LeftoversStay", "RemoveLeftovers", "what a kube-proxy has left can't be removed: "+err.Error())
	}
}
