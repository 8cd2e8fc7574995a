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
	"nodeproxy/e2e/measure"
	"nodeproxy/e2e/probe"
	"nodeproxy/kernel/ipvs"
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
	measure.Result
	services int
	idle     float64 // share of one processor
}

// compareProxies measures both proxies with each number of Services, prints the table, and returns how many goals are missed.
func compareProxies(ctx context.Context, o options) (missed int, err error) {
	np, kp, err := measure.FindProxies(harness.IPVS)
	if err != nil {
		return 0, err
	}
	var proxies []measure.Proxy // for each number of Services both, so that every cold start is on a node as good as new
	for range o.sizes {
		proxies = append(proxies, np, kp)
	}
	l, err := measure.NewLab(ctx, o.endpoints, prober, proxies...)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	o.Progress("nodeproxy %s, kube-proxy %s, kernel %s; the control plane is up", np.Version, kp.Version,
		machine.FirstLine("/proc/sys/kernel/osrelease"))
	var results [][2]result
	for i, n := range o.sizes {
		if err := l.Fill(ctx, n, o.Clock); err != nil {
			return 0, err
		}
		both, err := measureBoth(ctx, l, l.Sites[2*i:2*i+2], o)
		if err != nil {
			return 0, err
		}
		results = append(results, both)
	}
	fmt.Println()
	return printProxies(os.Stdout, o, results), nil
}

// measureBoth measures both proxies with the Services that there are, in turns.
func measureBoth(ctx context.Context, l *measure.Lab, sites []*measure.Site, o options) (both [2]result, err error) {
	var trials [2]*measure.Trial
	for i, s := range sites {
		t, err := l.ColdStart(s, func(t *measure.Trial, begun time.Time) error { return awaitComplete(t, begun, l.Objects.Services) })
		if err != nil {
			return both, err
		}
		defer t.Stop()
		o.Progress("%s: cold start %s", t.Name, measure.Duration(t.ColdStart))
		trials[i] = t
	}
	changes := [2]int{o.changes, o.theirChanges}
	for round := range o.rounds {
		for i, t := range trials {
			// It may take as many connections as a Service has endpoints until the new one answers.
			count := measure.Share(changes[i], round, o.rounds)
			if err := t.Turn(func() error { return t.Changes(ctx, l, count, o.endpoints, o.settle) }); err != nil {
				return both, err
			}
			o.Progress("%s: %d changes, p50 so far %s", t.Name, len(t.Changed), measure.Duration(measure.Percentile(t.Changed, 0.5)))
		}
	}
	for i, t := range trials {
		r := &both[i]
		r.services = len(l.Objects.Services)
		if err := t.Turn(func() (err error) {
			r.idle, err = watchIdle(t, o.idle)
			return err
		}); err != nil {
			return both, err
		}
		r.Result = t.Result
		o.Progress("%s: %s of a processor at rest, %s resident", t.Name, percent(r.idle), measure.Mebibytes(float64(r.Resident)))
	}
	return both, nil
}

// awaitComplete waits until each of the Services has a virtual server with all real servers. A look at them takes a while itself:
// the cold start has lasted until the one began that found all.
func awaitComplete(t *measure.Trial, begun time.Time, all []*measure.Service) error {
	for {
		took := time.Since(begun)
		servers, err := virtualServers(t.Site.Node.Netns)
		if err != nil {
			return err
		}
		missing := slices.DeleteFunc(slices.Clone(all), func(s *measure.Service) bool {
			return servers[s.Frontend()] >= len(s.Endpoints)
		})
		switch {
		case len(missing) == 0:
			t.ColdStart = took
			return nil
		case took > measure.ColdStartTimeout:
			return fmt.Errorf("%d of %d Services, such as %s, are not programmed: %w (%s)", len(missing), len(all),
				missing[0].Name, probe.ErrLate, measure.ColdStartTimeout)
		}
		time.Sleep(took / 10)
	}
}

// virtualServers are those over IPv4 in a namespace, with the number of their real servers. They are read by netlink: in
// /proc/net/ip_vs, one namespace's are left out at random where another one has some too.
func virtualServers(n *harness.Netns) (map[netip.AddrPort]int, error) {
	held := map[netip.AddrPort]int{}
	err := n.Do(func() error {
		k, err := ipvs.OpenServers()
		if err != nil {
			return err
		}
		list, err := k.List(plan.IPv4)
		for id, v := range list {
			held[netip.AddrPortFrom(id.Addr, id.Port)] = len(v.RealServers)
		}
		return errors.Join(err, k.Close())
	})
	if err != nil {
		return nil, fmt.Errorf("virtual servers of %s: %w", n.Name, err)
	}
	return held, nil
}

// watchIdle returns the share of a processor that the proxy takes while nothing changes, and looks at its memory.
func watchIdle(t *measure.Trial, period time.Duration) (share float64, err error) {
	before, err := t.CPU()
	if err != nil {
		return 0, err
	}
	time.Sleep(period)
	after, err := t.CPU()
	if err != nil {
		return 0, err
	}
	return (after - before).Seconds() / period.Seconds(), t.WeighMemory()
}
