package backend

import (
	"context"
	"errors"
	"fmt"

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

// errUnknown is what Verify returns where there is nothing to compare the kernel with.
var errUnknown = errors.New("what the kernel holds is not known until the next sync has succeeded")

// Known calls take with mu locked, which a sync may hold for long, to copy what is known of the kernel. take returns false if nothing is.
func Known(ctx context.Context, mu *Mutex, take func() (known bool)) error {
	if err := mu.LockContext(ctx); err != nil {
		return err
	}
	defer mu.Unlock() // Even if take panics: who asks survives that, and the next sync must not hang.
	if !take() {
		return errUnknown
	}
	return nil
}
