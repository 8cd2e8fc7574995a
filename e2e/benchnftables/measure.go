package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
	"nodeproxy/e2e/probe"
)

// result is what was measured of one node. Numbers are in seconds; NaN is what was not measured.
type result struct {
	measure.Result
	name string
	// late is set if the proxy was not done within the limit: with the cold start, or with changes.
	lateStart, lateChange bool
	// synced is the time of the syncs of the cold start, written the part of it in which the kernel is written and read, as the proxy
	// itself has counted them. syncs are those of one change each.
	synced, written float64
	syncs           []float64
	first, last     float64 // connect to the Services with the lowest and the highest address, or to a pod where there is no proxy
	rate            float64 // connections a second to the last one
	// firstTimes, lastTimes and rateTimes are these by what they are on a node without a proxy that tracks connections.
	firstTimes, lastTimes, rateTimes float64
}

// node is a node under measurement; trial is nil where no proxy is, or has been stopped.
type node struct {
	*measure.Site
	trial *measure.Trial
	result
}

// The nodes without a proxy come last: one that tracks connections, and one without any rule.
const (
	tracked = 3 + iota
	plain
)

// measureAll measures all nodes: those with a proxy one after the other, and then all in short turns.
func measureAll(ctx context.Context, l *measure.Lab, o options) ([]result, error) {
	var nodes []*node
	for i, s := range l.Sites {
		n := &node{Site: s}
		if i < len(names) {
			n.name = names[i]
		}
		nan := math.NaN()
		n.synced, n.written, n.first, n.last, n.rate = nan, nan, nan, nan, nan
		n.firstTimes, n.lastTimes, n.rateTimes = nan, nan, nan
		nodes = append(nodes, n)
	}
	// As on nodes whose CNI plugin masquerades what leaves the cluster.
	_, err := nodes[tracked].Node.Output(harness.NFT.Tool("iptables"), "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.0/24", "-j", "MASQUERADE")
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, n := range nodes {
			n.stop()
		}
	}()
	for _, n := range nodes {
		if slices.Contains(o.proxies, n.name) {
			if err := n.start(l, o); err != nil {
				return nil, err
			}
		}
	}
	for round := range turns {
		for _, n := range nodes {
			if n.trial != nil {
				if err := n.change(ctx, l, o, round); err != nil {
					return nil, err
				}
			}
		}
	}
	for _, n := range nodes {
		if n.trial != nil {
			n.Result = n.trial.Result
		}
	}
	if err := connect(l, nodes, o); err != nil {
		return nil, err
	}
	var results []result
	for _, n := range nodes {
		results = append(results, n.result)
	}
	return results, nil
}

func (n *node) stop() {
	if n.trial != nil {
		n.trial.Stop()
		n.trial = nil
	}
}

// start measures the cold start.
func (n *node) start(l *measure.Lab, o options) error {
	before := machine.UsageNow()
	t, err := l.ColdStart(n.Site, func(t *measure.Trial, begun time.Time) error {
		if err := errors.Join(l.AwaitAll(t, begun), t.Rest()); err != nil {
			return err
		}
		s, err := n.syncTime()
		n.synced, n.written = s.all, s.written
		return err
	})
	switch {
	case errors.Is(err, probe.ErrLate):
		n.lateStart = true
		o.Progress("%s: not programmed within %s; meanwhile %s", n.name, o.limit, machine.UsageNow().OthersSince(before))
		return nil
	case err != nil:
		return err
	}
	n.trial = t
	o.Progress("%s: cold start %s; meanwhile %s", n.name, measure.Duration(t.ColdStart), machine.UsageNow().OthersSince(before))
	return nil
}

// change takes a turn at changes: first those that are timed, and then those after each of which the proxy is asked how long its sync
// took. That costs the proxy time itself. Its memory is looked at in between.
func (n *node) change(ctx context.Context, l *measure.Lab, o options, turn int) error {
	count := measure.Share(o.changes, turn, turns)
	asked := count
	if n.name == theirs {
		count, asked = measure.Share(o.theirChanges, turn, turns), 1
	}
	others, err := n.trial.TurnCaughtUp(ctx, l, o.settle, func() error {
		if err := errors.Join(n.trial.Changes(ctx, l, count, o.endpoints, o.settle), n.trial.WeighMemory()); err != nil {
			return err
		}
		before, err := n.syncTime()
		for i := 0; i < asked && err == nil; i++ {
			if _, _, err = l.Change(ctx, n.Site, o.endpoints); err != nil {
				return err
			}
			time.Sleep(o.settle)
			var after syncTime
			after, err = n.syncTime()
			n.syncs = append(n.syncs, after.all-before.all)
			before = after
		}
		return err
	})
	switch {
	case errors.Is(err, probe.ErrLate):
		n.lateChange = true
		n.Result = n.trial.Result
		n.stop()
		o.Progress("%s: a change is not in effect within %s", n.name, o.limit)
		return nil
	case err != nil:
		return err
	}
	o.Progress("%s, turn %d: p50 of a change so far %s, in it a sync of %s; %s", n.name, turn+1,
		measure.Duration(measure.Percentile(n.trial.Changed, 0.5)), measure.Seconds(measure.Percentile(n.syncs, 0.5)), others)
	return nil
}

// syncTime is how long the syncs of a proxy have taken, in seconds.
type syncTime struct{ all, written float64 }

// syncTime asks the node's proxy.
func (n *node) syncTime() (syncTime, error) {
	code, text, err := n.Node.Get(harness.MetricsAddr, "/metrics")
	if err != nil || code != http.StatusOK {
		return syncTime{}, fmt.Errorf("metrics of %s: status %d, %w", n.name, code, err)
	}
	s, err := harness.ParseScrape(text)
	if err != nil {
		return syncTime{}, fmt.Errorf("metrics of %s: %w", n.name, err)
	}
	const syncs, stages = "kubeproxy_sync_proxy_rules_duration_seconds_sum", "nodeproxy_sync_stage_duration_seconds_sum"
	if !s.Has(syncs, "ip_family=IPv4") {
		return syncTime{}, fmt.Errorf("metrics of %s: no %s", n.name, syncs)
	}
	out := syncTime{all: s.Sum(syncs, "ip_family=IPv4"), written: math.NaN()}
	if s.Has(stages) {
		out.written = s.Sum(stages, "stage=backend")
	}
	return out, nil
}

// connect compares connections to the Services. Proxies are stopped meanwhile.
func connect(l *measure.Lab, nodes []*node, o options) error {
	byAddress := func(a, b *measure.Service) int { return a.Addr.Compare(b.Addr) }
	first, last := slices.MinFunc(l.Objects.Services, byAddress), slices.MaxFunc(l.Objects.Services, byAddress)
	var firsts, lasts []measure.Target
	var measured []*node
	for i, n := range nodes {
		target := func(to netip.AddrPort) measure.Target {
			return measure.Target{Name: n.name, From: n.Client.Netns, To: to}
		}
		switch {
		case i >= tracked:
			firsts, lasts = append(firsts, target(n.Pod())), append(lasts, target(n.Pod()))
		case n.trial != nil:
			firsts, lasts = append(firsts, target(first.Frontend())), append(lasts, target(last.Frontend()))
		default:
			continue
		}
		measured = append(measured, n)
	}
	times, err := measure.ConnectTimes(o.rounds, append(firsts, lasts...)...)
	if err != nil {
		return err
	}
	rates, err := measure.Rates(o.rounds, lasts...)
	if err != nil {
		return err
	}
	for i, n := range measured {
		n.first = measure.Percentile(times[i], measure.BestTime).Seconds()
		n.last = measure.Percentile(times[len(firsts)+i], measure.BestTime).Seconds()
		n.rate = measure.Percentile(rates[i], measure.BestRate)
	}
	base := nodes[tracked]
	for _, n := range measured {
		n.firstTimes, n.lastTimes, n.rateTimes = n.first/base.first, n.last/base.last, n.rate/base.rate
	}
	return nil
}
