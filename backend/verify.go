package backend

import (
	"context"
	"fmt"
	"sync"
	"time"

	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// Verifier is an Engine that can compare what it has written of one Service with the kernel, beside a Sync.
type Verifier interface {
	Engine
	Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error)
}

// Verify compares what the engines have written of a Service with the kernel, and changes nothing. It returns how many things were
// compared, and what differs. A difference that a second look does not find was a sync under way.
func Verify[E Verifier](ctx context.Context, engines []E, svc plan.Service) (things int, found drift.Found, err error) {
	for _, e := range engines {
		n, some, err := e.Verify(ctx, svc)
		if err == nil && len(some) > 0 {
			n, some, err = e.Verify(ctx, svc)
		}
		if err != nil {
			return things, found, fmt.Errorf("%s: %w", e.Family(), err)
		}
		things, found = things+n, append(found, some...)
	}
	return things, found, nil
}

// lockTry is the interval between attempts to lock what a sync has locked.
const lockTry = 5 * time.Millisecond

// Lock locks what a sync may have locked for long, unless ctx ends before.
func Lock(ctx context.Context, mu *sync.Mutex) error {
	for !mu.TryLock() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("a sync was running all the time: %w", ctx.Err())
		case <-time.After(lockTry):
		}
	}
	return nil
}
