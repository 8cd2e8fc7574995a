package measure

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"nodeproxy/e2e/probe"
)

// The longest that may pass by default until a proxy has programmed everything, or one change, before that counts as never.
const (
	ColdStartTimeout = 10 * time.Minute
	ChangeTimeout    = 5 * time.Minute
)

// Limits are these times for one lab.
type Limits struct{ ColdStart, Change time.Duration }

// Prober waits for a SYN-ACK, which comes within some 100 us or not at all. It finds out what is measured to a percent, and
// does not slow down a proxy that takes seconds.
var Prober = probe.Prober{
	Connect:   probe.ConnectLooking,
	Handshake: 2 * time.Millisecond,
	Pause: func(since time.Duration) time.Duration {
		return min(max(since/100, 300*time.Microsecond), 100*time.Millisecond)
	},
}

// samples is the number of Services whose answers are awaited after a cold start.
const samples = 100

// AwaitSamples waits until Services from all of the cluster answer to a site's client, and returns the time since begun.
func (l *Lab) AwaitSamples(s *Site, begun time.Time) (took time.Duration, err error) {
	all := l.Objects.Services
	err = s.Client.Do(func() (err error) {
		for i := len(all) - 1; i >= 0 && err == nil; i -= max(1, len(all)/samples) {
			took, err = l.prober.Await(begun, all[i].Frontend(), all[i].Has, 1, l.Limits.ColdStart)
		}
		return err
	})
	return took, err
}

// AwaitAll asks each of the Services, and takes the cold start to have lasted until the last one that had to be waited for.
func (l *Lab) AwaitAll(t *Trial, begun time.Time) error {
	return t.Site.Client.Do(func() error {
		for _, svc := range l.Objects.Services {
			a, err := l.prober.Ask(svc.Frontend(), probe.Patience)
			if err == nil && !svc.Has(a.Endpoint) {
				t.ColdStart, err = l.prober.Await(begun, svc.Frontend(), svc.Has, 1, l.Limits.ColdStart)
			}
			if err != nil {
				return fmt.Errorf("service %s: %w", svc.Name, err)
			}
		}
		return nil
	})
}

// Change replaces an endpoint, of another Service each time. It returns the time from before the PATCH is sent until the
// new endpoint answers a connection of the site's client, and until the API server has answered. Each probe makes up to so
// many connections.
func (l *Lab) Change(ctx context.Context, s *Site, connections int) (took, patched time.Duration, err error) {
	svc := l.Objects.Next()
	endpoint, patch, err := l.Objects.PrepareChange(svc)
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
	err = s.Client.Do(func() (err error) {
		took, err = l.prober.Await(begun, svc.Frontend(), isNew, connections, l.Limits.Change)
		return err
	})
	if err := errors.Join(<-sent, err); err != nil {
		return 0, 0, fmt.Errorf("changed service %s: %w", svc.Name, err)
	}
	return took, patched, nil
}
