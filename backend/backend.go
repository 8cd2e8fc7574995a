// Package backend has the part of a proxier.Backend that is the same in every mode: it syncs one engine per address family, measures how
// long each takes, and reports what they found.
package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// Engine brings the kernel's objects of one address family to a plan.
type Engine interface {
	Family() plan.Family
	Sync(ctx context.Context, p *plan.Plan, change plan.Change) error
	// Differences returns and forgets the differences that the last Sync found. compared is false if it did not compare the kernel with
	// what had been written before.
	Differences() (found drift.Found, compared bool)
	// CompareBeside compares everything with the kernel beside a Sync, and repairs what differs if it is not much. again says that a Sync
	// of everything has to follow.
	CompareBeside(ctx context.Context) (found drift.Found, again bool, err error)
	// TakeWritten returns how many things of each kind were written or removed since the last call.
	TakeWritten() map[drift.Kind]int
}

// Comparison is the part of an Engine that implements Differences and TakeWritten.
type Comparison struct {
	// Compared says that the last Sync knew what had been written before and compared the kernel with it; Found are the differences.
	Compared bool
	Found    drift.Found

	mu      sync.Mutex // for what follows
	written map[drift.Kind]int
}

// Wrote counts n things of a kind. Like TakeWritten, it is safe for concurrent use.
func (c *Comparison) Wrote(kind drift.Kind, n int) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.written == nil {
		c.written = map[drift.Kind]int{}
	}
	c.written[kind] += n
}

// TakeWritten implements Engine.
func (c *Comparison) TakeWritten() map[drift.Kind]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.written
	c.written = nil
	return out
}

// Differences implements Engine.
func (c *Comparison) Differences() (found drift.Found, compared bool) {
	found, c.Found = c.Found, nil // It may be large.
	return found, c.Compared
}

// PerFamily is a backend of one engine per family. Its methods are not safe for concurrent use, but for Compare and Report.
type PerFamily[E Engine] struct {
	Engines []E
	// Concurrent says that the engines need not wait for each other.
	Concurrent bool
	// Shared, if not nil, is called after the engines in each Sync and Compare. It repairs what is not of one family, and returns what
	// differed.
	Shared func(plan.Change) drift.Found
	// Compared, if not nil, is called after each Compare, and each Sync in which an engine compared the kernel with what had been written
	// before; never twice at once. It must not block.
	Compared  func(drift.Report)
	reporting sync.Mutex
	Log       *slog.Logger // for what goes wrong in Compare; may be nil

	took    map[plan.Family]time.Duration
	written map[drift.Kind]int
}

// Open opens the engine of each family. A family whose engine can't be opened is left out with a warning; it is an error if none remains.
func Open[E Engine](mode string, families []plan.Family, log *slog.Logger, open func(plan.Family) (E, error)) ([]E, error) {
	var engines []E
	var missing []error
	for _, f := range families {
		if e, err := open(f); err != nil {
			missing = append(missing, fmt.Errorf("%s: %w", f, err))
		} else {
			engines = append(engines, e)
		}
	}
	if len(engines) == 0 {
		return nil, fmt.Errorf("mode %s can't work here: %w", mode, errors.Join(missing...))
	}
	for _, err := range missing {
		log.Warn("Services of this family are not proxied", "error", err)
	}
	return engines, nil
}

// Families returns the families that the backend programs.
func (b *PerFamily[E]) Families() []plan.Family {
	var out []plan.Family
	for _, e := range b.Engines {
		out = append(out, e.Family())
	}
	return out
}

// Took returns how long the last Sync took for each family. It must not be called during a Sync.
func (b *PerFamily[E]) Took() map[plan.Family]time.Duration { return b.took }

// Written returns how many things of each kind were written or removed since the Sync before the last one. It must not be called during a
// Sync.
func (b *PerFamily[E]) Written() map[drift.Kind]int { return b.written }

// Sync implements proxier.Backend.
func (b *PerFamily[E]) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	begin := time.Now()
	errs, took := make([]error, len(b.Engines)), make([]time.Duration, len(b.Engines))
	var wg sync.WaitGroup
	for i, e := range b.Engines {
		one := func() {
			begin := time.Now()
			errs[i] = e.Sync(ctx, p, change)
			took[i] = time.Since(begin)
		}
		if b.Concurrent {
			wg.Go(one)
		} else {
			one()
		}
	}
	wg.Wait()
	report, known := drift.Report{Err: errors.Join(errs...)}, false
	if b.Shared != nil {
		report.Found = b.Shared(change)
	}
	report.Took = time.Since(begin)
	b.took, b.written = map[plan.Family]time.Duration{}, map[drift.Kind]int{}
	for i, e := range b.Engines {
		b.took[e.Family()] = took[i]
		for kind, n := range e.TakeWritten() {
			b.written[kind] += n
		}
		found, compared := e.Differences()
		known = known || compared
		report.Found = append(report.Found, found...)
	}
	if known {
		b.Report(report)
	}
	return report.Err
}
