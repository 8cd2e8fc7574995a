// Package health answers those who ask how this node's proxy is: probes and load balancers at /healthz, /livez and /readyz
// (Node), load balancers that ask for one Service at its health check node port (Services), and people with a browser or
// curl at the debug endpoints (DebugHandler). It knows neither Kubernetes API types nor the kernel's rules.
package health

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"nodeproxy/plan"
)

// DefaultTimeout is how long a change may wait to be programmed by default: twice kube-proxy's default syncPeriod.
const DefaultTimeout = time.Minute

// DefaultStaleAfter is the age at which what is known of a kind of object counts as stale by default. With a sound
// connection the age stays below some 70 seconds, and a watch that is silent for three minutes is replaced.
const DefaultStaleAfter = 5 * time.Minute

// Watch says how current what is known of one kind of object is.
type Watch struct {
	// Resource names the kind, such as services.
	Resource string
	// Synced is true once all objects of the kind have been delivered.
	Synced bool
	// Age is the time since the source last showed this state to be current; negative before it first did.
	Age time.Duration
	// Failure is what went wrong since; empty if nothing did.
	Failure string
}

// NodeConfig says what the health of a node depends on.
type NodeConfig struct {
	// Families are those that the node forwards; the answers name each.
	Families []plan.Family
	// Program and its version are the field program of each answer; "" for none.
	Program string
	// Timeout is how long a change may wait to be programmed before the node counts as unhealthy; zero means
	// DefaultTimeout. kube-proxy takes twice its syncPeriod.
	Timeout time.Duration
	// Watches tells how current the objects are; nil where the source has nothing that can get stale, as with files.
	Watches func() []Watch
	// Faults tells what the source can't read, so that what it read before is in force; nil where that can't be.
	Faults func() []string
	// StaleAfter is the Age from which a Watch is stale; zero means DefaultStaleAfter.
	StaleAfter time.Duration
	// Answered is told of each answer: the path that was asked for, and the status code; nil for nobody.
	Answered func(path string, code int)
}

// Node is the health of this node's proxy. Its methods are safe for concurrent use, and cheap.
//
// A change is in one of two places: queued, or taken for a sync that has not succeeded yet. The node is late when the oldest
// of them is older than NodeConfig.Timeout. A sync that succeeds says nothing of what was queued after it had begun; in
// kube-proxy it does.
type Node struct {
	cfg NodeConfig

	mu         sync.Mutex
	queued     time.Time // when the oldest change came that no sync has taken; zero if there is none
	taken      time.Time // when the oldest change came that a sync has taken and not yet programmed; zero if there is none
	programmed time.Time // when the last successful sync ended; zero before the first
	synced     bool
	leaving    bool
	waitingFor string
}

// NewNode returns the health of a node on which nothing has happened yet: alive, but neither healthy nor ready.
func NewNode(cfg NodeConfig) *Node {
	if cfg.Timeout <= 0 {
		cfg.Timeout = DefaultTimeout
	}
	if cfg.StaleAfter <= 0 {
		cfg.StaleAfter = DefaultStaleAfter
	}
	if cfg.Answered == nil {
		cfg.Answered = func(string, int) {}
	}
	return &Node{cfg: cfg}
}

// Queued notes that a change has come that is to be programmed. It is not to be called before all objects have been
// delivered once: until then nothing may be programmed, so nothing is late.
func (n *Node) Queued() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.queued.IsZero() {
		n.queued = time.Now()
	}
}

// Taken notes that a sync begins which will program all that is queued.
func (n *Node) Taken() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.taken.IsZero() {
		n.taken = n.queued
	}
	n.queued = time.Time{}
}

// Programmed notes that what was taken is in the kernel, or turned out to need no change there.
func (n *Node) Programmed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken, n.programmed = time.Time{}, time.Now()
}

// Progressed notes that a part of what was taken is in the kernel, and that more of it follows: the rest is late when nothing
// more of it has been programmed for NodeConfig.Timeout.
func (n *Node) Progressed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken = time.Now()
	n.programmed = n.taken
}

// Synced notes that the source has delivered all that it had at the start.
func (n *Node) Synced() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.synced = true
}

// Continue notes that the rules are those that another Node knows of, as where one configuration takes the place of another: what was
// programmed still is, until a change is late.
func (n *Node) Continue(before *Node) {
	was := before.state()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.programmed, n.leaving = was.programmed, was.leaving
	n.synced = n.synced || was.synced
}

// Leaving notes whether the node is about to go: its Node object is being deleted, is gone, or has the cluster autoscaler's
// taint ToBeDeletedByClusterAutoscaler (KEP-3836). /healthz then tells load balancers to leave the node out.
func (n *Node) Leaving(leaving bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leaving = leaving
}

// WaitFor notes whom the program waits for before it writes anything, such as a kube-proxy that still runs; "" for nobody.
func (n *Node) WaitFor(whom string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.waitingFor = whom
}

// state is the health of a node at one time.
type state struct {
	now, programmed time.Time
	waited          time.Duration // how long the oldest change has
	synced, leaving bool
	waitingFor      string
	alive, inStep   bool
}

func (n *Node) state() state {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := state{now: time.Now(), programmed: n.programmed, synced: n.synced, leaving: n.leaving, waitingFor: n.waitingFor}
	oldest := n.taken
	if oldest.IsZero() {
		oldest = n.queued
	}
	if !oldest.IsZero() {
		s.waited = s.now.Sub(oldest)
	}
	s.alive = s.waited < n.cfg.Timeout
	s.inStep = s.alive && !n.programmed.IsZero()
	return s
}

// Healthy reports whether the rules are there and follow what is asked for: a sync has succeeded, and no change waits for
// too long.
func (n *Node) Healthy() bool { return n.state().inStep }

// OldestChange returns how long the oldest change that is not programmed yet has waited; 0 if there is none.
func (n *Node) OldestChange() time.Duration { return n.state().waited }

// Missing is something that a node needs to be ready.
type Missing struct {
	// Condition is one of free, synced, whole, programmed, in-time and fresh.
	Condition string `json:"condition"`
	// Detail says what is missing, for people.
	Detail string `json:"detail"`
}

// Missing lists what the node lacks to be ready; nothing if it is.
func (n *Node) Missing() []Missing { return n.missing(n.state(), n.watches()) }

func (n *Node) watches() []Watch {
	if n.cfg.Watches == nil {
		return nil
	}
	return n.cfg.Watches()
}

// mostFaults is how many faults are listed one by one.
const mostFaults = 10

func (n *Node) faults() []string {
	if n.cfg.Faults == nil {
		return nil
	}
	faults := n.cfg.Faults()
	if more := len(faults) - mostFaults; more > 0 {
		return append(slices.Clone(faults[:mostFaults]), fmt.Sprintf("and %d more", more))
	}
	return faults
}

func (n *Node) missing(s state, watches []Watch) []Missing {
	out := []Missing{} // not nil: it is shown as JSON
	add := func(condition, detail string, args ...any) {
		out = append(out, Missing{condition, fmt.Sprintf(detail, args...)})
	}
	if s.waitingFor != "" {
		add("free", "nothing is written before this is gone: %s", s.waitingFor)
	}
	if !s.synced {
		add("synced", "not all objects have been delivered yet")
	}
	for _, fault := range n.faults() {
		add("whole", "%s", fault)
	}
	if s.programmed.IsZero() {
		add("programmed", "no sync has succeeded yet")
	}
	if !s.alive {
		add("in-time", "a change has waited to be programmed for %s; more than %s is too long", s.waited.Round(time.Millisecond),
			n.cfg.Timeout)
	}
	for _, w := range watches {
		failure := ""
		if w.Failure != "" {
			failure = ": " + w.Failure
		}
		switch {
		case w.Age < 0 && !s.synced: // That is what not synced means.
			if failure != "" {
				add("fresh", "%s: nothing has come from the source%s", w.Resource, failure)
			}
		case w.Age < 0:
			add("fresh", "%s: nothing has ever come from the source%s", w.Resource, failure)
		case w.Age >= n.cfg.StaleAfter:
			add("fresh", "%s: nothing has come from the source for %s; %s or more is too long%s", w.Resource,
				w.Age.Round(time.Millisecond), n.cfg.StaleAfter, failure)
		}
	}
	return out
}
