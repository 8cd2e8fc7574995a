package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
)

// disturbance is something that others do while endpoints change.
type disturbance struct {
	name, what string
	every      time.Duration
	once       func(ctx context.Context, b *bench, n *node) error
}

const relisting = "relist"

var disturbances = []disturbance{
	{"lock", "another program holds the xtables lock for 2 s in every 10", 10 * time.Second, holdLock},
	{"tables", "another program rewrites its own rules each second", time.Second, rewriteTables},
	{relisting, "everything is listed again every 20 s", 20 * time.Second, relist},
	{"questions", "health, metrics and services are asked for each second", time.Second, askAll},
}

// disturbs reports whether a disturbance is among those that are asked for.
func (o *options) disturbs(name string) bool {
	return slices.Contains(o.disturb, name) || slices.Contains(o.disturb, "all")
}

// series is the name of the times of changes under it.
func (d disturbance) series() string { return "paced " + d.name }

// disturbed is the step of changes at a pace under one disturbance after the other.
func disturbed(ctx context.Context, b *bench, n *node, _ int) {
	for _, d := range disturbances {
		if !b.disturbs(d.name) {
			continue
		}
		during, cancel := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- d.repeat(during, b, n) }()
		err := attempt(func() { b.paced(ctx, n, d.series()) })
		cancel()
		check(errors.Join(err, <-ended), "while "+d.what)
		n.rest()
		_, peak, err := machine.Memory(n.process.PID)
		check(err)
		b.progress("%s, while %s: p99 %s; at its highest so far, %s", n.name, d.what, duration(percentile(n.series[d.series()], 0.99)),
			mebibytes(float64(peak)))
	}
}

// repeat does it until ctx ends, once at least.
func (d disturbance) repeat(ctx context.Context, b *bench, n *node) error {
	tick := time.NewTicker(d.every)
	defer tick.Stop()
	for {
		if err := d.once(ctx, b, n); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// holdLock holds the lock that the programs of the legacy variant take.
func holdLock(ctx context.Context, _ *bench, n *node) error {
	lock, err := os.OpenFile(n.lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-time.After(2 * time.Second):
	}
	return nil
}

// rewriteTables writes chains of its own in the tables that the proxy uses too, as kubelet and network plugins do, with other rules each
// time; and beside a proxy in mode nftables, a table of its own too.
func rewriteTables(_ context.Context, b *bench, n *node) error {
	var rules, native strings.Builder
	other := time.Now().UnixNano() / int64(time.Second) % 200
	for _, table := range []string{"mangle", "nat", "filter"} {
		fmt.Fprintf(&rules, "*%s\n:KUBE-KUBELET-CANARY - [0:0]\n:BENCH-PODS - [0:0]\n", table)
		for pod := range 30 {
			fmt.Fprintf(&rules, "-A BENCH-PODS -s 10.200.%d.%d/32 -j RETURN\n", other, pod)
		}
		rules.WriteString("COMMIT\n")
	}
	variant := harness.NFT
	if b.mode == string(harness.IPTables) {
		variant = harness.Variant(b.backends[0])
	}
	_, err := n.OutputWithInput(rules.String(), "env", lockVariable+n.lock, variant.Tool("iptables")+"-restore", "--noflush", "--wait", "60")
	if err != nil || b.mode != string(harness.NFTables) {
		return err
	}
	fmt.Fprintf(&native, "add table ip bench\nflush table ip bench\ntable ip bench {\nchain pods {\n")
	for pod := range 30 {
		fmt.Fprintf(&native, "ip saddr 10.200.%d.%d return\n", other, pod)
	}
	_, err = n.OutputWithInput(native.String()+"}\n}\n", "nft", "-f", "-")
	return err
}

// relist makes the proxy list everything again.
func relist(_ context.Context, b *bench, n *node) error { return b.front.Expire(n.IP4) }

// askAll asks for health and metrics, and a nodeproxy for its Services.
func askAll(_ context.Context, _ *bench, n *node) error {
	_, _, health := n.Get(harness.HealthAddr, "/healthz")
	_, _, metrics := n.Get(harness.MetricsAddr, "/metrics")
	if err := errors.Join(health, metrics); err != nil || n.program != nodeProxy {
		return err
	}
	out, err := n.Output(n.path, "get", "services", "--all-namespaces", "--socket="+n.socket)
	if out != "" { // It ends with 1 where it has a problem to show.
		return nil
	}
	return err
}
