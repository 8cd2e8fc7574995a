package backend

import (
	"context"
	"fmt"
	"sync"
)

// Mutex is a mutex that an engine holds during a sync, while programs run and the kernel works; so it can also be waited for no longer than
// a context lasts. The zero Mutex is unlocked. In simulated time (testing/synctest), time passes for those who wait for it, unlike for those
// who wait for a sync.Mutex.
type Mutex struct {
	made sync.Once
	held chan struct{}
}

func (m *Mutex) semaphore() chan struct{} {
	m.made.Do(func() { m.held = make(chan struct{}, 1) })
	return m.held
}

// Lock locks m.
func (m *Mutex) Lock() { m.semaphore() <- struct{}{} }

// LockContext locks m, unless ctx ends before.
func (m *Mutex) LockContext(ctx context.Context) error {
	if m.TryLock() { // also where ctx has ended
		return nil
	}
	select {
	case m.semaphore() <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("a sync was running all the time: %w", ctx.Err())
	}
}

// TryLock locks m if it is unlocked, and reports whether it did.
func (m *Mutex) TryLock() bool {
	select {
	case m.semaphore() <- struct{}{}:
		return true
	default:
		return false
	}
}

// Unlock unlocks m, which must be locked.
func (m *Mutex) Unlock() {
	select {
	case <-m.semaphore():
	default:
		panic("backend: Unlock of an unlocked Mutex")
	}
}
