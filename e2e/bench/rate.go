package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/probe"
)

// change is a change made at a steady pace, and when it took effect.
type change struct {
	service  *service
	endpoint netip.Addr
	begun    time.Time
	due      time.Time // of the next probe
	inForce  time.Time // when a packet reached the endpoint
}

// steady is the step of changes at a pace, and nothing else.
func steady(ctx context.Context, b *bench, n *node, _ int) {
	n.counted("paced", func() { b.paced(ctx, n, "paced") })
	now, _, err := machine.Memory(n.process.PID)
	check(err)
	n.figures["churned"] = float64(now)
}

// watcher is a client that only watches EndpointSlices: it waits for the API server and for a processor, but not for a proxy.
type watcher struct {
	stop func()
	mu   sync.Mutex
	at   map[netip.Addr]time.Time // when it learned of each first endpoint
}

func (b *bench) watch(ctx context.Context) *watcher {
	api := b.controlPlane.Admin.DiscoveryV1().EndpointSlices(namespace)
	now := must(api.List(ctx, metav1.ListOptions{Limit: 1}))
	watch := must(api.Watch(ctx, metav1.ListOptions{ResourceVersion: now.ResourceVersion}))
	w := &watcher{stop: watch.Stop, at: map[netip.Addr]time.Time{}}
	go func() {
		for event := range watch.ResultChan() {
			slice, is := event.Object.(*discovery.EndpointSlice)
			if !is || len(slice.Endpoints) == 0 {
				continue
			}
			if a, err := netip.ParseAddr(slice.Endpoints[0].Addresses[0]); err == nil {
				w.mu.Lock()
				if _, known := w.at[a]; !known {
					w.at[a] = time.Now()
				}
				w.mu.Unlock()
			}
		}
	}()
	return w
}

// watchedLimit is how long after all changes are in force the watcher may learn of the last.
const watchedLimit = 30 * time.Second

// learned returns when the watcher learned of each of these endpoints; nil if it did not learn of all, as the API server may end a watch at
// any time.
func (w *watcher) learned(endpoints []netip.Addr) map[netip.Addr]time.Time {
	for since := time.Now(); time.Since(since) < watchedLimit; time.Sleep(10 * time.Millisecond) {
		learned := map[netip.Addr]time.Time{}
		w.mu.Lock()
		for _, a := range endpoints {
			if at, known := w.at[a]; known {
				learned[a] = at
			}
		}
		w.mu.Unlock()
		if len(learned) == len(endpoints) {
			return learned
		}
	}
	return nil
}

// paced makes changes as bench.change does, but b.rate times a second, whether the change before has taken effect or not.
func (b *bench) paced(ctx context.Context, n *node, series string) {
	count := int(b.rateDuration.Seconds() * float64(b.options.rate))
	made := make(chan *change, count) // sending never waits for the probes
	failed := make(chan error, count)
	over := make(chan struct{}) // Where one comes too late, others may be left to make.
	defer close(over)
	w := b.watch(ctx)
	defer w.stop()
	go func() {
		defer close(made)
		tick := time.NewTicker(time.Second / time.Duration(b.options.rate))
		defer tick.Stop()
		for range count {
			select {
			case <-over:
				return
			case <-tick.C:
			}
			s, patch, err := b.prepareChange()
			if err != nil {
				failed <- err
				return
			}
			now := time.Now()
			made <- &change{service: s, endpoint: s.endpoints[0], begun: now, due: now.Add(soonest)}
			go func() {
				if err := patch(ctx); err != nil {
					failed <- err
				}
			}()
		}
	}()
	var seen []*change
	n.inClient(func() { seen = must(probeAll(b.prober, made, failed, b.limit)) })
	if got := len(seen); got != count {
		check(fmt.Errorf("%d of %d changes were made", got, count))
	}
	var endpoints []netip.Addr
	for _, c := range seen {
		endpoints = append(endpoints, c.endpoint)
	}
	learned := w.learned(endpoints)
	for _, c := range seen {
		n.series[series] = append(n.series[series], c.inForce.Sub(c.begun))
		if at, is := learned[c.endpoint]; is {
			n.series[series+watchedSuffix] = append(n.series[series+watchedSuffix], at.Sub(c.begun))
			n.series[series+afterSuffix] = append(n.series[series+afterSuffix], max(0, c.inForce.Sub(at)))
		}
	}
}

// Suffixes are appended to the name of a series: for the times until a client that only watches learned of its changes, and for those from
// then on.
const (
	watchedSuffix = " watched"
	afterSuffix   = " after"
)

// soonest is the time from a change to its first probe, and, where the prober does not want more, the least time between two probes of one
// change.
const soonest = time.Millisecond

// probeAll probes for the effects of changes, by one thread, until the channel is closed and all have been seen. Each change is probed
// again after a tenth of the time that it has been waiting; but as proxies program what has gathered in one go, all are probed at once when
// one is seen. So what it finds is exact to some percent, by a few hundred probes a second.
func probeAll(
	prober probe.Prober, made <-chan *change, failed <-chan error, limit time.Duration,
) (seen []*change, err error) {
	var waiting []*change
	for open := true; open || len(waiting) > 0; {
		select {
		case err := <-failed:
			return nil, err
		default:
		}
		for more := true; open && more; {
			select {
			case c, ok := <-made:
				if open = ok; !ok {
					break
				}
				if slices.ContainsFunc(waiting, func(other *change) bool { return other.service == c.service }) {
					return nil, fmt.Errorf("service %s changes again before it was seen to have changed: there are too few", c.service.name)
				}
				waiting = append(waiting, c)
			default:
				more = false
			}
		}
		var c *change // The one whose probe is due first, and of those the oldest.
		if len(waiting) > 0 {
			c = slices.MinFunc(waiting, func(a, b *change) int { return a.due.Compare(b.due) })
		}
		if c == nil || time.Until(c.due) > 0 {
			time.Sleep(soonest / 2)
			continue
		}
		endpoint, err := prober.Ask(c.service.frontend(), prober.Handshake)
		now := time.Now()
		age := now.Sub(c.begun)
		switch {
		case err != nil:
			return nil, err
		case endpoint == c.endpoint:
			c.inForce, seen = now, append(seen, c)
			waiting = slices.DeleteFunc(waiting, func(other *change) bool { return other == c })
			for _, other := range waiting {
				if other.due.After(now) {
					other.due = now
				}
			}
		case age > limit:
			return nil, fmt.Errorf("service %s: %w (%s)", c.service.name, probe.ErrLate, limit)
		default:
			c.due = now.Add(max(soonest, prober.Pause(0), age/10))
		}
	}
	return seen, nil
}
