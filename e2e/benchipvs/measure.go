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
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/probe"
	"nodeproxy/e2e/sidebyside"
	"nodeproxy/ipvs/kernel"
	"nodeproxy/plan"
)

// prober leaves the one processor of the test kernel, whose system calls are slow, to the proxy. A connection comes there
// within a millisecond or not at all.
var prober = probe.Prober{
	Connect:   probe.ConnectBlocking,
	Handshake: 30 * time.Millisecond,
	Pause: func(since time.Duration) time.Duration {
		return min(max(since/30, 2*time.Millisecond), 200*time.Millisecond)
	},
}

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

// trial is the measurement of one proxy under way.
type trial struct {
	*sidebyside.Running
	site *sidebyside.Site
	result
	changes  int           // to make, in all turns together
	cpuSoFar time.Duration // of those that were made
}

// compareProxies measures both proxies with each number of Services, prints the table, and returns how many goals are missed.
func compareProxies(ctx context.Context, o options) (missed int, err error) {
	np, kp, err := sidebyside.FindProxies()
	if err != nil {
		return 0, err
	}
	np.Flags, kp.Flags = []string{"--proxy-mode=ipvs"}, []string{"--proxy-mode=ipvs"}
	var proxies []sidebyside.Proxy // for each number of Services both, so that every cold start is on a node as good as new
	for range o.sizes {
		proxies = append(proxies, np, kp)
	}
	l, err := sidebyside.NewLab(ctx, o.endpoints, prober, proxies...)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	o.Progress("nodeproxy %s, kube-proxy %s, kernel %s; the control plane is up", np.Version, kp.Version,
		machine.FirstLine("/proc/sys/kernel/osrelease"))
	var results [][2]result
	for i, n := range o.sizes {
		if err := l.Objects.CreateUpTo(ctx, n); err != nil {
			return 0, err
		}
		if err := l.ControlPlane.Compact(ctx); err != nil {
			return 0, err
		}
		o.Progress("%d Services with %d endpoints each", n, o.endpoints)
		both, err := measure(ctx, l, l.Sites[2*i:2*i+2], o)
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
func measure(ctx context.Context, l *sidebyside.Lab, sites []*sidebyside.Site, o options) (both [2]result, err error) {
	trials := [2]*trial{{changes: o.changes}, {changes: o.theirChanges}}
	for i, t := range trials {
		t.site, t.services = sites[i], len(l.Objects.Services)
		if t.Running, err = t.site.Start(); err != nil {
			return both, err
		}
		defer t.Stop()
		if err := t.coldStart(l); err != nil {
			return both, t.Explain(err)
		}
		o.Progress("%s: cold start %s", t.Name, sidebyside.Duration(t.result.coldStart))
	}
	for round := range o.rounds {
		for _, t := range trials {
			count := t.changes*(round+1)/o.rounds - t.changes*round/o.rounds
			if err := t.turn(func() error { return t.makeChanges(ctx, l, o, count) }); err != nil {
				return both, err
			}
			o.Progress("%s: %d changes, p50 so far %s", t.Name, len(t.changed), sidebyside.Seconds(median(t.result)))
		}
	}
	for i, t := range trials {
		if err := t.turn(func() error { return t.watchIdle(o.idle) }); err != nil {
			return both, err
		}
		o.Progress("%s: %s of a processor at rest, %s resident", t.Name, percent(t.idle), sidebyside.Mebibytes(float64(t.memory)))
		both[i] = t.result
	}
	return both, nil
}

// turn lets the proxy go on, runs fn when it has caught up, and stops it again.
func (t *trial) turn(fn func() error) error {
	err := t.Thaw()
	for _, step := range []func() error{t.Rest, fn, t.Freeze} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		return t.Explain(err)
	}
	return nil
}

// coldStart waits until the proxy that was just started has programmed everything, and leaves it frozen. What it takes is
// the time until Services from all of the cluster answer, and each one has its virtual server with all real servers.
func (t *trial) coldStart(l *sidebyside.Lab) error {
	begun, all := time.Now(), l.Objects.Services
	_, err := l.AwaitSamples(t.site, begun)
	if err == nil {
		t.result.coldStart, err = t.awaitComplete(begun, all)
	}
	if err == nil {
		t.coldCPU, err = t.Settle()
	}
	if err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	return nil
}

// awaitComplete waits until each of the services has a virtual server with all real servers, and returns the time since
// begun. A look at them takes a while itself: what counts is when the one began that found all.
func (t *trial) awaitComplete(begun time.Time, all []*sidebyside.Service) (time.Duration, error) {
	for {
		took := time.Since(begun)
		held, err := virtualServers(t.site.Node.Netns)
		if err != nil {
			return 0, err
		}
		missing := slices.DeleteFunc(slices.Clone(all), func(s *sidebyside.Service) bool {
			return held[s.Frontend()] >= len(s.Endpoints)
		})
		switch {
		case len(missing) == 0:
			return took, nil
		case took > sidebyside.ColdStartTimeout:
			return 0, fmt.Errorf("%d of %d Services, such as %s, are not programmed: %w (%s)", len(missing), len(all),
				missing[0].Name, probe.ErrLate, sidebyside.ColdStartTimeout)
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

// makeChanges replaces endpoints, of another Service each time. It may take as many connections as a Service has endpoints
// until the new one answers, so each probe makes up to that many.
func (t *trial) makeChanges(ctx context.Context, l *sidebyside.Lab, o options, count int) error {
	before, err := t.CPU()
	if err != nil {
		return err
	}
	for range count {
		took, patched, err := l.Change(ctx, t.site, o.endpoints)
		if err != nil {
			return err
		}
		t.changed, t.patched = append(t.changed, took), append(t.patched, patched)
		time.Sleep(o.settle)
	}
	after, err := t.CPU()
	t.cpuSoFar += after - before
	t.changedCPU = t.cpuSoFar / time.Duration(len(t.changed))
	return err
}

// watchIdle counts the processor time of a while in which nothing changes.
func (t *trial) watchIdle(period time.Duration) error {
	before, err := t.CPU()
	if err != nil {
		return err
	}
	time.Sleep(period)
	after, err := t.CPU()
	if err != nil {
		return err
	}
	t.idle = (after - before).Seconds() / period.Seconds()
	t.memory, t.peak, err = t.Memory()
	return err
}
