package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/ipvs/kernel"
	"nodeproxy/proxier/plan"
)

// result is what was measured of one proxy, with one number of Services.
type result struct {
	services           int
	coldStart, coldCPU time.Duration
	changed            []time.Duration // latencies of changes
	patched            []time.Duration // the part of them until the API server has answered the PATCH
	changedCPU         time.Duration   // for each change
	idle               float64         // share of one processor
	memory, peak       int64           // bytes
}

// The longest that may pass until a proxy has programmed everything, or one change, before that counts as never.
const (
	coldStartTimeout = 10 * time.Minute
	changeTimeout    = 5 * time.Minute
)

// trial is the measurement of one proxy under way.
type trial struct {
	*running
	site *site
	result
	changes  int           // to make, in all turns together
	settle   time.Duration // after each
	cpuSoFar time.Duration // of those that were made
}

// compareProxies measures both proxies with each number of Services, prints the table, and returns how many goals are missed.
func compareProxies(ctx context.Context, o options) (missed int, err error) {
	proxies, err := bothProxies()
	if err != nil {
		return 0, err
	}
	l, err := newLab(ctx, o, proxies)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	o.progress("nodeproxy %s, kube-proxy %s, kernel %s; the control plane is up", proxies[0].version, proxies[1].version,
		firstLine("/proc/sys/kernel/osrelease"))
	var results [][2]result
	for i, n := range o.sizes {
		if err := l.objects.createUpTo(ctx, n); err != nil {
			return 0, err
		}
		if err := l.cp.Compact(ctx); err != nil {
			return 0, err
		}
		o.progress("%d Services with %d endpoints each", n, o.endpoints)
		both, err := l.measure(ctx, l.sites[i], o)
		if err != nil {
			return 0, err
		}
		results = append(results, both)
	}
	fmt.Println()
	return printProxies(os.Stdout, o, results), nil
}

// measure measures both proxies with the Services that there are. They take turns, each stopped (SIGSTOP) while the other
// one is measured, so that whatever else the machine does meanwhile disturbs both.
func (l *lab) measure(ctx context.Context, sites [2]*site, o options) (both [2]result, err error) {
	trials := [2]*trial{{changes: o.changes}, {changes: o.theirChanges}}
	for i, t := range trials {
		t.site, t.settle, t.services = sites[i], o.settle, len(l.objects.services)
		if t.running, err = t.site.start(l.Dir); err != nil {
			return both, err
		}
		defer t.stop()
		if err := t.coldStart(l); err != nil {
			return both, t.explain(err)
		}
		o.progress("%s: cold start %s", t.name, seconds(t.result.coldStart))
	}
	for round := range o.rounds {
		for _, t := range trials {
			count := t.changes*(round+1)/o.rounds - t.changes*round/o.rounds
			if err := t.turn(func() error { return t.makeChanges(ctx, l, count) }); err != nil {
				return both, err
			}
			o.progress("%s: %d changes, p50 so far %s", t.name, len(t.changed), seconds(percentile(t.changed, 0.5)))
		}
	}
	for i, t := range trials {
		if err := t.turn(func() error { return t.watchIdle(o.idle) }); err != nil {
			return both, err
		}
		o.progress("%s: %s of a processor at rest, %s resident", t.name, percent(t.idle), mebibytes(t.result.memory))
		both[i] = t.result
	}
	return both, nil
}

// turn lets the proxy go on, runs fn when it has caught up, and stops it again.
func (t *trial) turn(fn func() error) error {
	err := t.thaw()
	for _, step := range []func() error{t.rest, fn, t.freeze} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		return t.explain(err)
	}
	return nil
}

// samples is the number of Services whose answers are awaited after a cold start.
const samples = 100

// coldStart waits until the proxy that was just started has programmed everything, and leaves it frozen. What it takes is
// the time until Services from all of the cluster answer, and each one has its virtual server with all real servers.
func (t *trial) coldStart(l *lab) error {
	begun, all := time.Now(), l.objects.services
	err := t.site.client.Do(func() error {
		for i := len(all) - 1; i >= 0; i -= max(1, len(all)/samples) {
			if _, err := await(begun, all[i].frontend(), all[i].has, 1, coldStartTimeout); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		t.result.coldStart, err = t.awaitComplete(begun, all)
	}
	if err == nil {
		err = t.rest()
	}
	if err == nil {
		t.coldCPU, err = t.cpu()
	}
	if err == nil {
		err = t.freeze()
	}
	if err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	return nil
}

// awaitComplete waits until each of the services has a virtual server with all real servers, and returns the time since
// begun. A look at them takes a while itself: what counts is when the one began that found all.
func (t *trial) awaitComplete(begun time.Time, all []*service) (time.Duration, error) {
	for {
		took := time.Since(begun)
		held, err := virtualServers(t.site.node.Netns)
		if err != nil {
			return 0, err
		}
		missing := slices.DeleteFunc(slices.Clone(all), func(s *service) bool {
			return held[s.frontend()] >= len(s.endpoints)
		})
		switch {
		case len(missing) == 0:
			return took, nil
		case took > coldStartTimeout:
			return 0, fmt.Errorf("%d of %d Services, such as %s, are not programmed: %w (%s)", len(missing), len(all),
				missing[0].name, errLate, coldStartTimeout)
		}
		time.Sleep(took / 10)
	}
}

// virtualServers are those over IPv4 in a namespace, with the number of their real servers. They are read by netlink: in
// /proc/net/ip_vs, one namespace's are left out at random where another one has some too.
func virtualServers(n *harness.Netns) (map[netip.AddrPort]int, error) {
	held := map[netip.AddrPort]int{}
	err := n.Do(func() error {
		k, err := kernel.OpenServers()
		if err != nil {
			return err
		}
		list, err := k.List(plan.IPv4)
		for id, v := range list {
			held[netip.AddrPortFrom(id.Addr, id.Port)] = len(v.Destinations)
		}
		return errors.Join(err, k.Close())
	})
	if err != nil {
		return nil, fmt.Errorf("virtual servers of %s: %w", n.Name, err)
	}
	return held, nil
}

// makeChanges replaces endpoints, of another Service each time.
func (t *trial) makeChanges(ctx context.Context, l *lab, count int) error {
	before, err := t.cpu()
	if err != nil {
		return err
	}
	for range count {
		took, patched, err := l.change(ctx, t.site)
		if err != nil {
			return err
		}
		t.changed, t.patched = append(t.changed, took), append(t.patched, patched)
		time.Sleep(t.settle)
	}
	after, err := t.cpu()
	t.cpuSoFar += after - before
	t.changedCPU = t.cpuSoFar / time.Duration(len(t.changed))
	return err
}

// change replaces an endpoint, and returns the time from before the PATCH is sent until the new endpoint answers a
// connection, and until the API server has answered.
func (l *lab) change(ctx context.Context, s *site) (took, patched time.Duration, err error) {
	svc := l.objects.next()
	endpoint, patch, err := l.objects.prepareChange(svc)
	if err != nil {
		return 0, 0, err
	}
	sent := make(chan error, 1)
	begun := time.Now()
	go func() {
		err := patch(ctx)
		patched = time.Since(begun)
		sent <- err
	}()
	isNew := func(from netip.Addr) bool { return from == endpoint }
	err = s.client.Do(func() (err error) {
		took, err = await(begun, svc.frontend(), isNew, len(svc.endpoints), changeTimeout)
		return err
	})
	if err := errors.Join(<-sent, err); err != nil {
		return 0, 0, fmt.Errorf("changed service %s: %w", svc.name, err)
	}
	return took, patched, nil
}

// watchIdle counts the processor time of a while in which nothing changes.
func (t *trial) watchIdle(period time.Duration) error {
	before, err := t.cpu()
	if err != nil {
		return err
	}
	time.Sleep(period)
	after, err := t.cpu()
	if err != nil {
		return err
	}
	t.idle = (after - before).Seconds() / period.Seconds()
	t.result.memory, t.peak, err = t.running.memory()
	return err
}

// percentile is the value that a share p of all is not above; p is between 0 and 1.
func percentile(values []time.Duration, p float64) time.Duration {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}
