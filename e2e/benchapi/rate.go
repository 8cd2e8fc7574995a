package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"nodeproxy/e2e/measure"
	"nodeproxy/e2e/probe"
)

// outstanding is a change that no packet has shown the effect of yet.
type outstanding struct {
	service  *measure.Service
	endpoint netip.Addr
	begun    time.Time
	due      time.Time // of the next probe
}

// measureRate changes endpoints as Lab.Change does, but o.rate times a second, whether the change before has taken
// effect or not.
func measureRate(ctx context.Context, l *measure.Lab, s *measure.Site, o options) ([]time.Duration, error) {
	count := int(o.rateDuration.Seconds() * float64(o.rate))
	changes := make(chan *outstanding, count) // sending never waits for the probes
	failed := make(chan error, count)
	go func() {
		defer close(changes)
		tick := time.NewTicker(time.Second / time.Duration(o.rate))
		defer tick.Stop()
		for range count {
			<-tick.C
			svc := l.Objects.Next()
			endpoint, patch, err := l.Objects.PrepareChange(svc)
			if err != nil {
				failed <- err
				return
			}
			now := time.Now()
			changes <- &outstanding{service: svc, endpoint: endpoint, begun: now, due: now.Add(soonest)}
			go func() {
				if err := patch(ctx); err != nil {
					failed <- err
				}
			}()
		}
	}()
	var took []time.Duration
	err := s.Client.Do(func() (err error) {
		took, err = probeAll(changes, failed)
		return err
	})
	if err == nil && len(took) != count {
		err = fmt.Errorf("%d of %d changes were made", len(took), count)
	}
	return took, err
}

// soonest is the time from a change to its first probe, and the least time between two probes of one change.
const soonest = time.Millisecond

// probeAll probes for the effects of changes, by one thread, until the channel is closed and all have been seen. Each
// change is probed again after a tenth of the time that it has been waiting; but as proxies program what has gathered
// in one go, all are probed at once when one is seen. So what it finds is exact to some percent, by a few hundred probes
// a second.
func probeAll(changes <-chan *outstanding, failed <-chan error) (took []time.Duration, err error) {
	var waiting []*outstanding
	for open := true; open || len(waiting) > 0; {
		select {
		case err := <-failed:
			return nil, err
		default:
		}
		for more := true; open && more; {
			select {
			case c, ok := <-changes:
				if open = ok; ok {
					waiting = append(waiting, c)
				}
			default:
				more = false
			}
		}
		next := earliest(waiting)
		if next < 0 || time.Until(waiting[next].due) > 0 {
			time.Sleep(soonest / 2)
			continue
		}
		c := waiting[next]
		a, err := measure.Prober.Ask(c.service.Frontend(), measure.Prober.Handshake)
		now := time.Now()
		age := now.Sub(c.begun)
		switch {
		case err != nil:
			return nil, err
		case a.Endpoint == c.endpoint:
			took = append(took, age)
			waiting = append(waiting[:next], waiting[next+1:]...)
			for _, other := range waiting {
				if other.due.After(now) {
					other.due = now
				}
			}
		case age > measure.ChangeTimeout:
			return nil, fmt.Errorf("service %s: %w (%s)", c.service.Name, probe.ErrLate, measure.ChangeTimeout)
		default:
			c.due = now.Add(max(soonest, age/10))
		}
	}
	return took, nil
}

// earliest is the index of the change whose probe is due first, and of those the oldest one; -1 if there is none.
func earliest(waiting []*outstanding) int {
	best := -1
	for i, c := range waiting {
		if best < 0 || c.due.Before(waiting[best].due) {
			best = i
		}
	}
	return best
}
