package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/probe"
	"nodeproxy/e2e/sidebyside"
)

// prober waits for a SYN-ACK, which comes within some 100 us or not at all. It finds out what is measured to a percent, and
// does not slow down a proxy that takes seconds.
var prober = probe.Prober{
	Connect:   probe.ConnectLooking,
	Handshake: 2 * time.Millisecond,
	Pause: func(since time.Duration) time.Duration {
		return min(max(since/100, 300*time.Microsecond), 100*time.Millisecond)
	},
}

// result is what was measured of one proxy.
type result struct {
	coldStart, coldCPU    time.Duration
	changed, added, paced []time.Duration // latencies
	// Processor time for each change.
	changedCPU, addedCPU, pacedCPU time.Duration
	memory, peak                   int64 // bytes
}

// trial is the measurement of one proxy under way.
type trial struct {
	*sidebyside.Running
	site *sidebyside.Site
	result
	// cpuChanges and cpuAdditions are the processor time that these have taken in all.
	cpuChanges, cpuAdditions time.Duration
}

// measure measures the proxies of all sites. They share the cluster, so what one is measured by concerns the others too:
// these are stopped meanwhile (SIGSTOP), and get time to catch up before it is their turn. The turns are short, so
// that whatever else the machine does meanwhile disturbs all alike.
func measure(ctx context.Context, l *sidebyside.Lab, sites []*sidebyside.Site, o options) ([]result, error) {
	var results []result
	var trials []*trial
	defer func() {
		for _, t := range trials {
			t.Stop()
		}
	}()
	for _, s := range sites {
		before := machine.UsageNow()
		t, err := coldStart(l, s)
		if err != nil {
			return nil, err
		}
		trials = append(trials, t)
		o.Progress("%s: cold start %s; meanwhile %s", t.Name, sidebyside.Duration(t.coldStart),
			machine.UsageNow().OthersSince(before))
	}
	for round := range o.rounds {
		for _, t := range trials {
			text, err := t.turn(ctx, l, o, func() error { return t.round(ctx, l, o, round) })
			if err != nil {
				return nil, err
			}
			o.Progress("%s, round %d: p50 so far %s for a changed endpoint, %s for a new Service; %s", t.Name, round+1,
				median(t.changed), median(t.added), text)
		}
	}
	for _, t := range trials {
		text, err := t.turn(ctx, l, o, func() error { return t.steady(ctx, l, o) })
		if err != nil {
			return nil, err
		}
		o.Progress("%s, %d changes a second: p50 %s; %s", t.Name, o.rate, median(t.paced), text)
		results = append(results, t.result)
	}
	return results, nil
}

func median(of []time.Duration) string { return sidebyside.Duration(sidebyside.Percentile(of, 0.5)) }

// turn lets the proxy go on, runs fn when it has caught up, and stops it again. What it returns is about the machine
// meanwhile.
func (t *trial) turn(ctx context.Context, l *sidebyside.Lab, o options, fn func() error) (others string, err error) {
	if err := t.resume(ctx, l, o); err != nil {
		return "", t.Explain(err)
	}
	before := machine.UsageNow()
	if err := fn(); err != nil {
		return "", t.Explain(err)
	}
	return "meanwhile " + machine.UsageNow().OthersSince(before), t.Freeze()
}

// resume lets the proxy go on, and waits until it has caught up: a change is in effect, and it has nothing left to do.
func (t *trial) resume(ctx context.Context, l *sidebyside.Lab, o options) error {
	if err := t.Thaw(); err != nil {
		return err
	}
	if err := t.Rest(); err != nil {
		return err
	}
	if _, _, err := l.Change(ctx, t.site, 1); err != nil {
		return fmt.Errorf("catching up: %w", err)
	}
	if err := t.Rest(); err != nil {
		return err
	}
	time.Sleep(o.settle)
	return nil
}

// round makes a round's share of changes and additions.
func (t *trial) round(ctx context.Context, l *sidebyside.Lab, o options, round int) error {
	share := func(total int) int { return total*(round+1)/o.rounds - total*round/o.rounds }
	cpu, err := t.counted(func() error {
		for range share(o.changes) {
			took, _, err := l.Change(ctx, t.site, 1)
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
			took, err := add(ctx, l, t.site)
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
func (t *trial) steady(ctx context.Context, l *sidebyside.Lab, o options) error {
	cpu, err := t.counted(func() (err error) {
		t.paced, err = measureRate(ctx, l, t.site, o)
		return err
	})
	if err != nil {
		return err
	}
	t.pacedCPU = cpu / time.Duration(len(t.paced))
	t.memory, t.peak, err = t.Memory()
	return err
}

// counted runs something until the proxy has nothing left to do, and returns the processor time that the proxy took for
// that and for whatever it did besides.
func (t *trial) counted(fn func() error) (time.Duration, error) {
	before, err := t.CPU()
	if err != nil {
		return 0, err
	}
	if err := errors.Join(fn(), t.Rest()); err != nil {
		return 0, err
	}
	after, err := t.CPU()
	return after - before, err
}

// coldStart starts the proxy on a node without rules, and leaves it frozen. What it takes is the time from before the
// process existed until Services from all of the cluster answered. Those that then still do not are waited for, too.
func coldStart(l *sidebyside.Lab, s *sidebyside.Site) (t *trial, err error) {
	begun := time.Now()
	p, err := s.Start()
	if err != nil {
		return nil, err
	}
	t = &trial{Running: p, site: s}
	if t.coldStart, err = l.AwaitSamples(s, begun); err == nil {
		err = t.awaitAll(begun, l.Objects.Services)
	}
	if err == nil {
		t.coldCPU, err = p.Settle()
	}
	if err != nil {
		p.Stop()
		return nil, p.Explain(fmt.Errorf("cold start: %w", err))
	}
	return t, nil
}

// awaitAll asks each of the Services, and takes the cold start to have lasted until the last one that had to be waited for.
func (t *trial) awaitAll(begun time.Time, all []*sidebyside.Service) error {
	return t.site.Client.Do(func() error {
		for _, svc := range all {
			a, err := prober.Ask(svc.Frontend(), probe.Patience)
			if err == nil && !svc.Has(a.Endpoint) {
				t.coldStart, err = prober.Await(begun, svc.Frontend(), svc.Has, 1, sidebyside.ColdStartTimeout)
			}
			if err != nil {
				return fmt.Errorf("service %s: %w", svc.Name, err)
			}
		}
		return nil
	})
}

// add creates a Service with its endpoints, and returns the time from before the first POST is sent until the new Service
// answers a connection.
func add(ctx context.Context, l *sidebyside.Lab, s *sidebyside.Site) (took time.Duration, err error) {
	svc := l.Objects.NewService()
	named, sent := make(chan struct{}), make(chan error, 1)
	begun := time.Now()
	go func() { sent <- l.Objects.Create(ctx, svc, func() { close(named) }) }()
	select {
	case <-named:
	case err := <-sent:
		return 0, err
	}
	err = s.Client.Do(func() (err error) {
		took, err = prober.Await(begun, svc.Frontend(), svc.Has, 1, sidebyside.ChangeTimeout)
		return err
	})
	if err := errors.Join(<-sent, err); err != nil {
		return 0, fmt.Errorf("new service %s: %w", svc.Name, err)
	}
	return took, nil
}
