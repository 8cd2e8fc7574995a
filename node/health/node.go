// Package health serves the health of this node's proxy: to probes and load balancers at /healthz, /livez and /readyz (Node), to
// load balancers that ask for one Service at its health check node port (Services), and to people at the debug endpoints (Debug).
// It knows neither Kubernetes API types nor the kernel's rules.
package health

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// DefaultTimeout is how long a change may wait to be programmed by default: twice kube-proxy's default syncPeriod.
const DefaultTimeout = time.Minute

// staleAfter is the age from which the known objects of a kind count as stale. With a sound connection the age stays below some 70
// seconds, and a watch that is silent for three minutes is replaced.
const staleAfter = 5 * time.Minute

// NodeConfig configures a Node.
type NodeConfig struct {
	// Families are the families that the node forwards; the answers name each.
	Families []plan.Family
	// Program, with its version, is the field program of each answer; "" for none.
	Program string
	// Timeout is how long a change may wait to be programmed before the node counts as unhealthy; zero means
	// DefaultTimeout. kube-proxy takes twice its syncPeriod.
	Timeout time.Duration
	// Watches returns how current the objects are; nil if the source's objects can't become stale, as with files.
	Watches func() []source.Watch
	// Faults returns what the source can't read, so that what it read before stays in force; nil if that can't happen.
	Faults func() []string
	// Verify verifies that what the objects say is in force, for at most half a minute, or returns a recent result; nil if there are no verifications.
	Verify func(context.Context) source.Verification
	// Answered is called for each answer with the requested path and the status code; nil for none.
	Answered func(path string, code int)
}

// Node is the health of this node's proxy. Its methods are safe for concurrent use, and cheap.
//
// A change is either queued or taken for a sync that has not succeeded yet. The node is late when the oldest of both is older than
// NodeConfig.Timeout. A successful sync says nothing about changes that were queued after it began; in kube-proxy it does.
type Node struct {
	cfg NodeConfig

	mu         sync.Mutex
	queued     time.Time // when the oldest change arrived that no sync has taken; zero for none
	taken      time.Time // when the oldest change arrived that a sync has taken and not yet programmed; zero for none
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
	if cfg.Answered == nil {
		cfg.Answered = func(string, int) {}
	}
	return &Node{cfg: cfg}
}

// Queued records that a change has arrived. It must not be called before all objects have been delivered once: until then nothing
// may be programmed, so nothing is late.
func (n *Node) Queued() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.queued.IsZero() {
		n.queued = time.Now()
	}
}

// Taken records that a sync begins that will program everything that is queued.
func (n *Node) Taken() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.taken.IsZero() {
		n.taken = n.queued
	}
	n.queued = time.Time{}
}

// Programmed records that everything that was taken is in the kernel, or needed no change there.
func (n *Node) Programmed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken, n.programmed = time.Time{}, time.Now()
}

// Progressed records that part of what was taken is in the kernel and that more follows: the rest is late when nothing more has
// been programmed for NodeConfig.Timeout.
func (n *Node) Progressed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken = time.Now()
	n.programmed = n.taken
}

// Synced records that the source has delivered everything that it had at the start.
func (n *Node) Synced() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.synced = true
}

// Continue takes over the state of rules from another Node, when one configuration replaces another: what was programmed still is,
// until a change is late.
func (n *Node) Continue(before *Node) {
	was := before.state()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.programmed, n.leaving = was.programmed, was.leaving
	n.synced = n.synced || was.synced
}

// Leaving records whether the node is about to be removed: its Node object is being deleted, is gone, or has the cluster
// autoscaler's taint ToBeDeletedByClusterAutoscaler (KEP-3836). /healthz then tells load balancers to leave the node out.
func (n *Node) Leaving(leaving bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leaving = leaving
}

// WaitFor records what the program waits for before it writes anything, such as a kube-proxy that still runs; "" for nothing.
func (n *Node) WaitFor(whom string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.waitingFor = whom
}

// state is the health of a node at one time.
type state struct {
	now, programmed time.Time
	waited          time.Duration // how long the oldest change has waited
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

// Healthy reports whether the rules exist and follow the objects: a sync has succeeded, and no change has waited for too long.
func (n *Node) Healthy() bool { return n.state().inStep }

// OldestChange returns how long the oldest change has waited that is not programmed yet; 0 if there is none.
func (n *Node) OldestChange() time.Duration { return n.state().waited }

// Missing is a condition for readiness that is not met.
type Missing struct {
	// Condition is one of free, synced, whole, programmed, in-time and fresh.
	Condition string `json:"condition"`
	// Detail describes what is missing.
	Detail string `json:"detail"`
}

// Missing returns the conditions for readiness that are not met; none if the node is ready.
func (n *Node) Missing() []Missing { return n.missing(n.state(), n.watches()) }

func (n *Node) watches() []source.Watch {
	if n.cfg.Watches == nil {
		return nil
	}
	return n.cfg.Watches()
}

// mostFaults is the number of faults that are listed one by one.
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

func (n *Node) missing(s state, watches []source.Watch) []Missing {
	out := []Missing{} // not nil, which JSON would show as null
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
		case w.Age < 0 && !s.synced: // The condition synced says so.
			if failure != "" {
				add("fresh", "%s: nothing has come from the source%s", w.Resource, failure)
			}
		case w.Age < 0:
			add("fresh", "%s: nothing has ever come from the source%s", w.Resource, failure)
		case w.Age >= staleAfter:
			add("fresh", "%s: nothing has come from the source for %s; %s or more is too long%s", w.Resource,
				w.Age.Round(time.Millisecond), staleAfter, failure)
		}
	}
	return out
}
