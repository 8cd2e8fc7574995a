package xtables

import (
	"sync"
	"time"
)

// children remembers by which processes this program writes rules, so that what they do is not taken for what others do.
//
// A notification of nf_tables bears the netlink port of who made the change. The kernel makes that the process id of the
// program in its own pid namespace, which is also this program's; the id that the notification has besides is the host's.
type children struct {
	mu   sync.Mutex
	pids map[uint32]time.Time // when it ended; zero while it runs
}

// linger is how long a process is remembered after its end: notifications of what it did may still wait to be read.
const linger = 5 * time.Second

// begin remembers a process that is about to write.
func (c *children) begin(pid uint32) { c.note(pid, time.Time{}) }

// ended notes that it has ended.
func (c *children) ended(pid uint32) { c.note(pid, time.Now()) }

func (c *children) note(pid uint32, ended time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pids == nil {
		c.pids = map[uint32]time.Time{}
	}
	for p, at := range c.pids {
		if !at.IsZero() && time.Since(at) > linger {
			delete(c.pids, p)
		}
	}
	c.pids[pid] = ended
}

// has reports whether a netlink port is that of one of them.
func (c *children) has(port uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended, is := c.pids[port]
	return is && (ended.IsZero() || time.Since(ended) <= linger)
}
