package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/install"
	"nodeproxy/kernel/host"
	"nodeproxy/node/exclusive"
	"nodeproxy/node/health"
	"nodeproxy/node/leftovers"
	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/source/apiserver"
)

// claim is this program's claim to write to the kernel. It is acquired when no other proxy runs in the network namespace, and lasts as
// long as the process, whatever configurations come and go.
type claim struct {
	process  context.Context // ends with the process, not with a configuration
	guard    exclusive.Guard
	acquired bool
	forced   bool   // taken although another proxy had it; from then on, guard is for claiming alone
	reported string // the proxy that is waited for, as last reported to the cluster
	claiming sync.WaitGroup
}

// awaitClaim waits until the claim is acquired. An error says that ctx has ended, or that the mode can't work here: if that were found
// only later, somebody might have stopped the other proxy for nothing. Meanwhile health and metrics are served, unless the other proxy
// uses their addresses, and name the proxy that is waited for.
func (d *daemon) awaitClaim(ctx context.Context, c *claim) error {
	if c.acquired {
		return nil
	}
	c.guard.Log, c.guard.Ports = d.log, proxyPorts(d.cfg)
	if d.cfg.TakeOver {
		c.force(d.log)
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var node *health.Node
	err := c.guard.Wait(ctx, func(other exclusive.Proxy) error {
		if node == nil {
			if err := d.check(); err != nil {
				return err
			}
			node = d.answerMeanwhile(ctx, &running)
		}
		d.log.Warn("another proxy runs here; nothing is written before it is gone (--take-over goes ahead at once): " +
			other.String())
		if c.reported != other.String() { // A new configuration makes the wait a new one.
			c.reported = other.String()
			d.event("WaitingForProxy", "StartNodeproxy", "nothing is written before another proxy is gone: "+other.String())
		}
		node.WaitFor(other.String())
		return nil
	})
	if err != nil {
		return err
	}
	c.acquired = true
	if node != nil { // It was waited for somebody.
		d.metrics.Waiting(false)
		d.log.Info("the other proxy is gone; taking over")
	}
	return nil
}

// lookEvery is the interval at which other proxies are looked for once the claim is acquired. That takes a few milliseconds.
const lookEvery = 30 * time.Second

// watchOthers reports a proxy that starts, or comes back, although this program has the claim, until ctx ends. This one goes
// on: people have to decide which of them should run here, and until they do, traffic has to flow.
func (d *daemon) watchOthers(ctx context.Context, c *claim, every time.Duration) {
	if d.cfg.TakeOver || c.forced { // Then it is known, and wanted.
		return
	}
	c.guard.Log, c.guard.Ports = d.log, proxyPorts(d.cfg)
	c.guard.Watch(ctx, every, func(other *exclusive.Proxy) {
		d.metrics.OtherProxyRuns(other != nil)
		if other == nil {
			d.neighbours.set("proxy", nil)
			d.log.Warn("the other proxy is gone; what it has changed is repaired")
			return
		}
		d.neighbours.set("proxy", &inspect.Neighbour{Kind: "proxy", Problem: true,
			What: "another proxy runs beside this one, and each undoes what the other does: " + other.String() + "; one of them has to go"})
		d.log.Warn("another proxy runs beside this one; both write, and each undoes what the other does: one of them has to go: " +
			other.String())
		d.event("OtherProxyRuns", "WatchProxies",
			"another proxy runs beside nodeproxy, and each undoes what the other does: one of them has to go: "+other.String())
	})
}

// daemonSetEvery is about the interval at which watchDaemonSet asks.
const daemonSetEvery = 5 * time.Minute

// watchDaemonSet reports as long as kube-proxy's DaemonSet wants this node, until ctx ends: its pod gets the place of this program's once
// that is replaced. "kubeadm upgrade" restores the DaemonSet as it was.
func (d *daemon) watchDaemonSet(ctx context.Context, every time.Duration) {
	const about = "kube-proxy's DaemonSet"
	wanted, unknown := false, false
	for ctx.Err() == nil {
		labels, wants, err := d.client.KubeProxyWants(ctx, d.cfg.NodeName)
		if errors.Is(err, apiserver.ErrNoKubeProxy) {
			err = nil
		}
		switch {
		case err != nil && !unknown && ctx.Err() == nil: // Old roles don't allow it.
			d.log.Debug("it is not known whether kube-proxy's DaemonSet wants this node", "error", err)
		case err == nil && wants && !wanted:
			f := daemonSetFinding(labels)
			d.lasting.set(about, &f)
			d.neighbours.set(about, &inspect.Neighbour{Kind: inspect.DaemonSet, What: f.String(), Problem: true})
			d.report(f)
		case err == nil && !wants && wanted:
			d.lasting.set(about, nil)
			d.neighbours.set(about, nil)
			d.log.Info("kube-proxy's DaemonSet does not want this node any more")
		}
		if unknown = err != nil; !unknown {
			wanted = wants
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait.Jitter(every, 0.2)):
		}
	}
}

// daemonSetFinding says that kube-proxy's DaemonSet wants the node with these labels, and what to do.
func daemonSetFinding(labels map[string]string) source.Finding {
	command := "nodeproxy install -o kube-proxy-off > off.json"
	if labels[install.Label] != "" { // Others may not have this program yet, and must keep kube-proxy.
		command = "nodeproxy install --migrate -o kube-proxy-off > off.json"
	}
	return source.Finding{
		Severity: source.Problem, Object: "DaemonSet kube-system/kube-proxy", Event: "KubeProxyWantsNode",
		Detail: `it selects this node, as after "kubeadm upgrade", and kube-proxy gets the place of nodeproxy's pod when that is next replaced`,
		Effect: "keep it off: " + command + "; kubectl -n kube-system patch daemonset kube-proxy --type=json --patch-file=off.json",
	}
}

// answerMeanwhile serves the health of a program that waits, and metrics, until ctx ends.
func (d *daemon) answerMeanwhile(ctx context.Context, running *sync.WaitGroup) *health.Node {
	d.metrics.Waiting(true)
	node := health.NewNode(health.NodeConfig{Program: program(), Families: d.families, Answered: d.metrics.Answered})
	// Most often it is the other proxy that has an address, which is no error now; once it has gone, the address is tried again.
	for _, serving := range servings(d.cfg, "", d.metrics, node, nil, slog.New(slog.DiscardHandler)) {
		serving.Addrs = reachable(serving.Addrs[0])
		server := health.NewServer("", program())
		server.Serve(serving)
		running.Go(func() {
			<-ctx.Done()
			server.Close()
		})
	}
	return node
}

// reachable returns an address, and with an unspecified one the host's own where another program prevents listening, if only by a socket
// at one address, such as that of k3s at 127.0.0.1: the kubelet probes the node's address, and restarts a pod that does not answer.
func reachable(addr netip.AddrPort) []netip.AddrPort {
	out := []netip.AddrPort{addr}
	if !addr.IsValid() || !addr.Addr().IsUnspecified() {
		return out
	}
	if listener, err := net.Listen("tcp", addr.String()); err == nil {
		_ = listener.Close()
		return out
	}
	own, _ := host.Filter{}.Addresses(plan.Families[:]...) // If they can't be listed, the address itself is tried on.
	for _, a := range own {
		if a.Addr.IsGlobalUnicast() {
			out = append(out, netip.AddrPortFrom(a.Addr, addr.Port()))
		}
	}
	return out
}

// force goes ahead although another proxy runs. Later starts wait for this process once it has acquired the claim too.
func (c *claim) force(log *slog.Logger) {
	c.acquired = true
	other := c.guard.Other()
	if other == nil {
		return
	}
	c.forced = true
	log.Warn("another proxy runs here; going ahead, as --take-over asks: " + other.String())
	c.claiming.Go(func() { _ = c.guard.Claim(c.process) }) // It fails only at the end of the process.
}

// proxyPorts are where another proxy may answer that has the same configuration.
func proxyPorts(cfg *config.Config) []uint16 {
	return []uint16{cfg.Servers.Healthz.Port(), cfg.Servers.Metrics.Port()}
}

// close gives the claim up. process must have ended.
func (c *claim) close() {
	c.claiming.Wait()
	_ = c.guard.Close() // It goes with the process anyway.
}

// removeLeftovers removes what a kube-proxy has left that no mode of this program has.
func (d *daemon) removeLeftovers() {
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
		text := "a kube-proxy ran here before; what it left is removed: " + strings.Join(names, ", ")
		d.log.Info(text)
		d.neighbours.set("removed", &inspect.Neighbour{Kind: "leftovers", What: text})
	}
	if err != nil {
		reason := strings.ReplaceAll(err.Error(), "\n", "; ")
		text := "something of a kube-proxy's stays until the next start: " + reason
		d.log.Warn(text)
		d.neighbours.set("leftovers", &inspect.Neighbour{Kind: "leftovers", What: text, Problem: true})
		d.event("LeftoversStay", "RemoveLeftovers", "what a kube-proxy has left can't be removed: "+reason)
	}
}
