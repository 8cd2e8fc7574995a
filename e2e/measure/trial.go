package measure

import (
	"context"
	"errors"
	"fmt"
	"time"

	"nodeproxy/e2e/machine"
)

// Result is what every comparison measures of a proxy.
type Result struct {
	ColdStart, ColdCPU time.Duration
	Changed            []time.Duration // latencies of changes of an endpoint
	Patched            []time.Duration // the part of them until the API server has answered the PATCH
	ChangedCPU         time.Duration   // of one of them
	Resident, Peak     int64           // memory, in bytes
}

// Trial is the measurement of one proxy under way. The proxies share the cluster, so what one is measured by concerns the others
// too: these are stopped meanwhile (SIGSTOP), and get time to catch up before it is their turn. The turns are short, so that
// whatever else the machine does meanwhile disturbs all alike.
type Trial struct {
	*Running
	Site *Site
	Result
	cpuChanges time.Duration // of all changes together
}

// ColdStart starts the site's proxy on a node without rules, and leaves it frozen. What it takes is the time from before the
// process existed until Services from all of the cluster answer, and until complete has seen the rest; complete puts a longer
// time into ColdStart.
func (l *Lab) ColdStart(s *Site, complete func(t *Trial, begun time.Time) error) (t *Trial, err error) {
	begun := time.Now()
	p, err := s.Start()
	if err != nil {
		return nil, err
	}
	t = &Trial{Running: p, Site: s}
	if t.ColdStart, err = l.AwaitSamples(s, begun); err == nil {
		err = complete(t, begun)
	}
	if err == nil {
		t.ColdCPU, err = p.Settle()
	}
	if err != nil {
		p.Stop()
		return nil, p.Explain(fmt.Errorf("cold start: %w", err))
	}
	return t, nil
}

// Turn lets the proxy go on, runs fn when it is at rest, and freezes it again.
func (t *Trial) Turn(fn func() error) error {
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

// TurnCaughtUp is Turn, but the proxy has caught up before it runs fn: a change is in effect, and it has nothing left to do. What it
// returns is about the machine while fn ran. A pause comes before that.
func (t *Trial) TurnCaughtUp(ctx context.Context, l *Lab, pause time.Duration, fn func() error) (others string, err error) {
	err = t.Turn(func() error {
		if _, _, err := l.Change(ctx, t.Site, 1); err != nil {
			return fmt.Errorf("catching up: %w", err)
		}
		if err := t.Rest(); err != nil {
			return err
		}
		time.Sleep(pause)
		before := machine.UsageNow()
		err := fn()
		others = "meanwhile " + machine.UsageNow().OthersSince(before)
		return err
	})
	return others, err
}

// Counted runs fn until the proxy has nothing left to do, and returns the processor time that the proxy took for that and for
// whatever it did besides.
func (t *Trial) Counted(fn func() error) (time.Duration, error) {
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

// Changes makes changes one at a time, with a pause after each. Each probe makes up to so many connections.
func (t *Trial) Changes(ctx context.Context, l *Lab, count, connections int, pause time.Duration) error {
	cpu, err := t.Counted(func() error {
		for range count {
			took, patched, err := l.Change(ctx, t.Site, connections)
			if err != nil {
				return err
			}
			t.Changed, t.Patched = append(t.Changed, took), append(t.Patched, patched)
			time.Sleep(pause)
		}
		return nil
	})
	t.cpuChanges += cpu
	t.ChangedCPU = t.cpuChanges / time.Duration(max(1, len(t.Changed)))
	return err
}

// WeighMemory looks at the proxy's memory.
func (t *Trial) WeighMemory() (err error) {
	t.Resident, t.Peak, err = t.Memory()
	return err
}

// Share is how many of a total are a round's.
func Share(total, round, rounds int) int { return total*(round+1)/rounds - total*round/rounds }
