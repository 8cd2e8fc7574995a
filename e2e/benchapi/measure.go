package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"
)

// result is what was measured of one proxy.
type result struct {
	coldStart, coldCPU    time.Duration
	changed, added, paced []time.Duration // latencies
	// Processor time for each change.
	changedCPU, addedCPU, pacedCPU time.Duration
	memory, peak                   int64 // bytes
}

// The longest that may pass until a proxy has programmed everything, or one change, before that counts as never.
const (
	coldStartTimeout = 10 * time.Minute
	changeTimeout    = time.Minute
)

// trial is the measurement of one proxy under way.
type trial struct {
	*running
	site *site
	result
	// cpuChanges and cpuAdditions are the processor time that these have taken in all.
	cpuChanges, cpuAdditions time.Duration
}

// measure measures the proxies of all sites. They share the cluster, so what one is measured by concerns the others too:
// these are stopped meanwhile (SIGSTOP), and get time to catch up before it is their turn. The turns are short, so
// that whatever else the machine does meanwhile disturbs all alike.
func measure(ctx context.Context, l *lab, sites []*site, o options) ([]result, error) {
	var results []result
	var trials []*trial
	defer func() {
		for _, t := range trials {
			t.stop()
		}
	}()
	for _, s := range sites {
		before := usageNow()
		t, err := coldStart(l, s)
		if err != nil {
			return nil, err
		}
		trials = append(trials, t)
		o.progress("%s: cold start %s; meanwhile %s", t.name, seconds(t.coldStart), usageNow().othersSince(before))
	}
	for round := range o.rounds {
		for _, t := range trials {
			text, err := t.turn(ctx, l, o, func() error { return t.round(ctx, l, o, round) })
			if err != nil {
				return nil, err
			}
			o.progress("%s, round %d: p50 so far %s for a changed endpoint, %s for a new Service; %s", t.name, round+1,
				seconds(percentile(t.changed, 0.5)), seconds(percentile(t.added, 0.5)), text)
		}
	}
	for _, t := range trials {
		text, err := t.turn(ctx, l, o, func() error { return t.steady(ctx, l, o) })
		if err != nil {
			return nil, err
		}
		o.progress("%s, %d changes a second: p50 %s; %s", t.name, o.rate, seconds(percentile(t.paced, 0.5)), text)
		results = append(results, t.result)
	}
	return results, nil
}

// turn lets the proxy go on, runs fn when it has caught up, and stops it again. What it returns is about the machine
// meanwhile.
func (t *trial) turn(ctx context.Context, l *lab, o options, fn func() error) (machine string, err error) {
	if err := t.thaw(ctx, l, o); err != nil {
		return "", t.explain(err)
	}
	before := usageNow()
	if err := fn(); err != nil {
		return "", t.explain(err)
	}
	return "meanwhile " + usageNow().othersSince(before), t.freeze()
}

// freeze stops the proxy until thaw.
func (t *trial) freeze() error { return t.cmd.Process.Signal(syscall.SIGSTOP) }

// thaw lets the proxy go on, and waits until it has caught up: a change is in effect, and it has nothing left to do.
func (t *trial) thaw(ctx context.Context, l *lab, o options) error {
	if err := t.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	if err := t.rest(); err != nil {
		return err
	}
	if _, err := l.change(ctx, t.site); err != nil {
		return fmt.Errorf("catching up: %w", err)
	}
	if err := t.rest(); err != nil {
		return err
	}
	time.Sleep(o.settle)
	return nil
}

// round makes a round's share of changes and additions.
func (t *trial) round(ctx context.Context, l *lab, o options, round int) error {
	share := func(total int) int { return total*(round+1)/o.rounds - total*round/o.rounds }
	cpu, err := t.counted(func() error {
		for range share(o.changes) {
			took, err := l.change(ctx, t.site)
			if err != nil {
				return err
			}
			t.changed = append(t.changed, took)
			time.Sleep(o.settle)
		}
		return nil
	})
	if err != nil {
		return err
	}
	t.cpuChanges += cpu
	cpu, err = t.counted(func() error {
		for range share(o.additions) {
			took, err := l.add(ctx, t.site)
			if err != nil {
				return err
			}
			t.added = append(t.added, took)
			time.Sleep(o.settle)
		}
		return nil
	})
	t.cpuAdditions += cpu
	t.changedCPU = t.cpuChanges / time.Duration(max(1, len(t.changed)))
	t.addedCPU = t.cpuAdditions / time.Duration(max(1, len(t.added)))
	return err
}

// steady makes changes at a steady rate, and looks at the memory after that.
func (t *trial) steady(ctx context.Context, l *lab, o options) error {
	cpu, err := t.counted(func() (err error) {
		t.paced, err = measureRate(ctx, l, t.site, o)
		return err
	})
	if err != nil {
		return err
	}
	t.pacedCPU = cpu / time.Duration(len(t.paced))
	t.result.memory, t.peak, err = t.running.memory()
	return err
}

// counted runs something until the proxy has nothing left to do, and returns the processor time that the proxy took for
// that and for whatever it did besides.
func (r *running) counted(fn func() error) (time.Duration, error) {
	before, err := r.cpu()
	if err != nil {
		return 0, err
	}
	if err := errors.Join(fn(), r.rest()); err != nil {
		return 0, err
	}
	after, err := r.cpu()
	return after - before, err
}

// samples is the number of Services whose answers are awaited after a cold start; all others are asked once more after that.
const samples = 100

// coldStart starts the proxy on a node without rules, and leaves it frozen. What it takes is the time from before the
// process existed until Services from all of the cluster answered. Those that then still do not are waited for, too.
func coldStart(l *lab, s *site) (t *trial, err error) {
	begun := time.Now()
	p, err := s.start(l.Dir)
	if err != nil {
		return nil, err
	}
	t = &trial{running: p, site: s}
	err = s.client.Do(func() error {
		t.coldStart, err = awaitAll(begun, l.objects.services)
		return err
	})
	if err == nil {
		err = p.rest()
	}
	if err == nil {
		t.coldCPU, err = p.cpu()
	}
	if err == nil {
		err = t.freeze()
	}
	if err != nil {
		p.stop()
		return nil, p.explain(fmt.Errorf("cold start: %w", err))
	}
	return t, nil
}

// awaitAll waits until each of the services answers, in the calling thread's namespace, and returns the time since begun.
func awaitAll(begun time.Time, all []*service) (took time.Duration, err error) {
	step := max(1, len(all)/samples)
	for i := len(all) - 1; i >= 0; i -= step {
		if took, err = await(begun, all[i].frontend(), all[i].has, coldStartTimeout); err != nil {
			return 0, err
		}
	}
	for _, svc := range all {
		from, err := ask(svc.frontend(), patience)
		if err == nil && !svc.has(from) {
			took, err = await(begun, svc.frontend(), svc.has, coldStartTimeout)
		}
		if err != nil {
			return 0, fmt.Errorf("service %s: %w", svc.name, err)
		}
	}
	return took, nil
}

// change replaces an endpoint, of another Service each time, and returns the time from before the PATCH is sent until
// the new endpoint answers a connection.
func (l *lab) change(ctx context.Context, s *site) (time.Duration, error) {
	svc := l.objects.next()
	endpoint, patch, err := l.objects.prepareChange(svc)
	if err != nil {
		return 0, err
	}
	sent := make(chan error, 1)
	begun := time.Now()
	go func() { sent <- patch(ctx) }()
	took, err := s.await(begun, svc.frontend(), is(endpoint))
	if err := errors.Join(<-sent, err); err != nil {
		return 0, fmt.Errorf("changed service %s: %w", svc.name, err)
	}
	return took, nil
}

// add creates a Service with its endpoints, and returns the time from before the first POST is sent until the new Service
// answers a connection.
func (l *lab) add(ctx context.Context, s *site) (time.Duration, error) {
	svc := l.objects.newService()
	named, sent := make(chan struct{}), make(chan error, 1)
	begun := time.Now()
	go func() { sent <- l.objects.create(ctx, svc, func() { close(named) }) }()
	select {
	case <-named:
	case err := <-sent:
		return 0, err
	}
	took, err := s.await(begun, svc.frontend(), svc.has)
	if err := errors.Join(<-sent, err); err != nil {
		return 0, fmt.Errorf("new service %s: %w", svc.name, err)
	}
	return took, nil
}

// await awaits an answer to the site's client; see the function await.
func (s *site) await(begun time.Time, to netip.AddrPort, want func(netip.Addr) bool) (took time.Duration, err error) {
	err = s.client.Do(func() (err error) {
		took, err = await(begun, to, want, changeTimeout)
		return err
	})
	return took, err
}

func is(endpoint netip.Addr) func(netip.Addr) bool {
	return func(from netip.Addr) bool { return from == endpoint }
}

// percentile is the value that a share p of all is not above; p is between 0 and 1.
func percentile(values []time.Duration, p float64) time.Duration {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}
