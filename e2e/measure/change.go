package measure

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// The longest that may pass until a proxy has programmed everything, or one change, before that counts as never.
const (
	ColdStartTimeout = 10 * time.Minute
	ChangeTimeout    = 5 * time.Minute
)

// samples is the number of Services whose answers are awaited after a cold start.
const samples = 100

// AwaitSamples waits until Services from all of the cluster answer to a site's client, and returns the time since begun.
func (l *Lab) AwaitSamples(s *Site, begun time.Time) (took time.Duration, err error) {
	all := l.Objects.Services
	err = s.Client.Do(func() (err error) {
		for i := len(all) - 1; i >= 0 && err == nil; i -= max(1, len(all)/samples) {
			took, err = l.prober.Await(begun, all[i].Frontend(), all[i].Has, 1, ColdStartTimeout)
		}
		return err
	})
	return took, err
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
		took, err = l.prober.Await(begun, svc.Frontend(), isNew, connections, ChangeTimeout)
		return err
	})
	if err := errors.Join(<-sent, err); err != nil {
		return 0, 0, fmt.Errorf("changed service %s: %w", svc.Name, err)
	}
	return took, patched, nil
}
