// Package exclusive keeps two proxies from working in one network namespace at a time, where each would undo what the other
// has written.
//
// Programs that use this package exclude each other by a claim: a name that only one process in a network namespace can own, and
// that the kernel releases when the process ends, however it ends. A kube-proxy knows nothing of the claim. It is detected by the
// ports on which it answers, or by its process name where other processes are visible.
package exclusive

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Proxy is another proxy that runs in this network namespace.
type Proxy struct {
	// Name is the name of its process, or what the name must be; "" if neither is known.
	Name string
	// PID is its process ID as seen by this process; 0 if it can't be seen.
	PID int
	// At is the address on which it was seen to listen; the zero AddrPort if it was detected in another way.
	At netip.AddrPort
}

func (p Proxy) String() string {
	out := p.Name
	if out == "" {
		out = "another proxy"
	}
	var more []string
	if p.PID != 0 {
		more = append(more, fmt.Sprintf("process %d", p.PID))
	}
	if p.At.IsValid() {
		more = append(more, "listens at "+p.At.String())
	}
	if len(more) == 0 {
		return out + " (its process can't be seen from here)"
	}
	return out + " (" + strings.Join(more, ", ") + ")"
}

// same reports whether both are the same proxy, as far as can be seen: one proxy may be detected in two ways.
func (p Proxy) same(other Proxy) bool {
	return p == other || p.PID != 0 && p.PID == other.PID
}

// The default ports of a kube-proxy: for its health and for its metrics.
const (
	HealthzPort = 10256
	MetricsPort = 10249
)

// pollEvery is the interval between two checks for another proxy. When that proxy ends, its rules stay in force, so the delay costs
// nothing.
const pollEvery = 100 * time.Millisecond

// Guard detects other proxies and holds the claim of this process. Its methods are not safe for concurrent use. They look at the
// network namespace of the calling thread.
type Guard struct {
	// Ports are those on which other proxies may answer, besides the default ones.
	Ports []uint16
	// Log receives a warning, once each, for whatever can't be found out.
	Log *slog.Logger

	claim net.Listener
	// seen maps the inodes of listening sockets that have been probed to the proxies that own them; nil for other owners.
	seen map[uint32]*Proxy
	// process is the kube-proxy that was found by its name.
	process *Proxy
	warned  map[string]bool
}

// Other returns a proxy that runs beside this one. It returns nil if there is none; this process then holds the claim until Close.
// If something can't be found out, Other assumes that there is no proxy: a node without a proxy is worse than one with two.
func (g *Guard) Other() *Proxy {
	if other := g.makeClaim(); other != nil {
		return other
	}
	return g.Beside()
}

// Beside returns a proxy that works beside this one, whoever holds the claim; nil if there is none, or if that can't be found out.
func (g *Guard) Beside() *Proxy {
	if other := g.listening(); other != nil {
		return other
	}
	return g.named()
}

// Wait waits until no other proxy runs; this process then holds the claim. It calls report for each proxy that it waits for. It
// returns an error if ctx ends first, or if report returns one, which ends the wait.
func (g *Guard) Wait(ctx context.Context, report func(Proxy) error) error {
	var last Proxy
	return wait.PollUntilContextCancel(ctx, pollEvery, true, func(context.Context) (gone bool, err error) {
		other := g.Other()
		if other == nil {
			return true, nil
		}
		if !other.same(last) {
			err = report(*other)
		}
		last = *other
		return false, err
	})
}

// Watch checks at an interval, until ctx ends, for a proxy that works beside this one although this one holds the claim: a
// kube-proxy ignores claims. It calls report with a proxy when one appears, and with nil when it is gone.
func (g *Guard) Watch(ctx context.Context, every time.Duration, report func(*Proxy)) {
	there := false
	_ = wait.PollUntilContextCancel(ctx, every, true, func(context.Context) (bool, error) {
		other := g.Beside()
		if there != (other != nil) {
			there = !there
			report(other)
		}
		return false, nil
	})
}

// Claim waits for the claim only, not for proxies that don't use claims. It is for a program that already works, whatever else
// runs, so that others wait for it.
func (g *Guard) Claim(ctx context.Context) error {
	return wait.PollUntilContextCancel(ctx, pollEvery, true, func(context.Context) (bool, error) { return g.makeClaim() == nil, nil })
}

// Close releases the claim, if this process holds it.
func (g *Guard) Close() error {
	if g.claim == nil {
		return nil
	}
	err := g.claim.Close()
	g.claim = nil
	return err
}

// warn logs a warning once.
func (g *Guard) warn(what string, err error) {
	if g.warned == nil {
		g.warned = map[string]bool{}
	}
	if !g.warned[what] {
		g.warned[what] = true
		g.Log.Warn(what, "error", err)
	}
}
