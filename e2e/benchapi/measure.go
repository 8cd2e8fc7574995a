package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
)

// trial is the measurement of one proxy under way.
type trial struct {
	*measure.Trial
	load
	cpuAdditions time.Duration // of all additions together
}

// result is what was measured of one proxy.
type result struct {
	measure.Result
	load
}

// load is what was measured beside changes made one at a time: new Services, and changes at a steady rate.
type load struct {
	added, paced       []time.Duration // latencies
	addedCPU, pacedCPU time.Duration   // for each
}

// measureProxies measures the proxies of all sites, in turns.
func measureProxies(ctx context.Context, l *measure.Lab, sites []*measure.Site, o options) ([]result, error) {
	var results []result
	var trials []*trial
	defer func() {
		for _, t := range trials {
			t.Stop()
		}
	}()
	for _, s := range sites {
		before := machine.UsageNow()
		t, err := l.ColdStart(s, l.AwaitAll)
		if err != nil {
			return nil, err
		}
		trials = append(trials, &trial{Trial: t})
		o.Progress("%s: cold start %s; meanwhile %s", t.Name, measure.Duration(t.ColdStart),
			machine.UsageNow().OthersSince(before))
	}
	for round := range o.rounds {
		for _, t := range trials {
			text, err := t.TurnCaughtUp(ctx, l, o.settle, func() error { return t.round(ctx, l, o, round) })
			if err != nil {
				return nil, err
			}
			o.Progress("%s, round %d: p50 so far %s for a changed endpoint, %s for a new Service; %s", t.Name, round+1,
				median(t.Changed), median(t.added), text)
		}
	}
	for _, t := range trials {
		text, err := t.TurnCaughtUp(ctx, l, o.settle, func() error { return t.steady(ctx, l, o) })
		if err != nil {
			return nil, err
		}
		o.Progress("%s, %d changes a second: p50 %s; %s", t.Name, o.rate, median(t.paced), text)
		results = append(results, result{t.Result, t.load})
	}
	return results, nil
}

func median(of []time.Duration) string { return measure.Duration(measure.Percentile(of, 0.5)) }

// round makes a round's share of changes and additions.
func (t *trial) round(ctx context.Context, l *measure.Lab, o options, round int) error {
	if err := t.Changes(ctx, l, measure.Share(o.changes, round, o.rounds), 1, o.settle); err != nil {
		return err
	}
	cpu, err := t.Counted(func() error {
		for range measure.Share(o.additions, round, o.rounds) {
			took, err := add(ctx, l, t.Site)
			if err != nil {
				return err
			}
			t.added = append(t.added, took)
			time.Sleep(o.settle)
		}
		return nil
	})
	t.cpuAdditions += cpu
	t.addedCPU = t.cpuAdditions / time.Duration(max(1, len(t.added)))
	return err
}

// steady makes changes at a steady rate, and looks at the memory after that.
func (t *trial) steady(ctx context.Context, l *measure.Lab, o options) error {
	cpu, err := t.Counted(func() (err error) {
		t.paced, err = measureRate(ctx, l, t.Site, o)
		return err
	})
	if err != nil {
		return err
	}
	t.pacedCPU = cpu / time.Duration(len(t.paced))
	return t.WeighMemory()
}

// add creates a Service with its endpoints, and returns the time from before the first POST is sent until the new Service
// answers a connection.
func add(ctx context.Context, l *measure.Lab, s *measure.Site) (took time.Duration, err error) {
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
		took, err = measure.Prober.Await(begun, svc.Frontend(), svc.Has, 1, measure.ChangeTimeout)
		return err
	})
	if err := errors.Join(<-sent, err); err != nil {
		return 0, fmt.Errorf("new service %s: %w", svc.Name, err)
	}
	return took, nil
}
