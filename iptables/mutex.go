package iptables

import "sync"

// mutex is a sync.Mutex that may be held while programs run: in tests in simulated time, these take time, which stands still as long as
// anybody waits for a sync.Mutex (testing/synctest). The zero mutex is unlocked.
type mutex struct {
	mu    sync.Mutex
	freed sync.Cond
	held  bool
}

func (m *mutex) Lock() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.freed.L = &m.mu
	for m.held {
		m.freed.Wait()
	}
	m.held = true
}

// TryLock locks m if nobody has, and reports whether it did.
func (m *mutex) TryLock() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := m.held
	m.held = true
	return !was
}

func (m *mutex) Unlock() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held = false
	m.freed.Signal()
}
