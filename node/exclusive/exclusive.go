// Package exclusive keeps two proxies from working in one network namespace at a time, where each would undo what the other
// has written.
//
// Programs with this package keep each other out by a claim: a name that one process of a network namespace can have, and that
// the kernel takes back when the process ends, however it ends. A kube-proxy knows nothing of that, and is seen by the ports
// at which it answers, or by its name where other processes can be seen.
package exclusive

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"
)

// Proxy is another proxy that runs in this network namespace.
type Proxy struct {
	// Name is what its process is called, or what it must be; "" where neither is known.
	Name string
	// PID is its process, as this one sees it; 0 where it can't.
	PID int
	// At is where it was seen to listen; the zero AddrPort if it was seen otherwise.
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

// same reports whether both are one proxy as far as can be seen; it may have been seen in two ways.
func (p Proxy) same(other Proxy) bool {
	return p == other || p.PID != 0 && p.PID == other.PID
}

// The ports at which a kube-proxy answers if nobody told it otherwise: its health, and its metrics.
const (
	HealthzPort = 10256
	MetricsPort = 10249
)

// pollEvery is how often it is looked whether another proxy is still there. Its rules stay in force when it ends, so nobody
// misses it in the meantime.
const pollEvery = 100 * time.Millisecond

// Guard finds other proxies, and makes the claim of this process. Its methods are not safe for concurrent use. It looks at the
// network namespace of the thread that calls.
type Guard struct {
	// Ports are where other proxies may answer, besides the usual ones.
	Ports []uint16
	// Log is told of what can't be found out, each thing once.
	Log *slog.Logger

	claim *claim
	// seen are listening sockets whose owners have been asked, by inode; nil for owners that are no proxies.
	seen map[uint32]*Proxy
	// process is the kube-proxy that was found by its name.
	process *Proxy
	told    map[string]bool
}

// Other returns a proxy that runs beside this one; nil if there is none. Then this process has the claim, until Close. What
// can't be found out does not keep anybody from working: a node without a proxy is worse than one with two.
func (g *Guard) Other() *Proxy {
	if other := g.makeClaim(); other != nil {
		return other
	}
	if other := g.listening(); other != nil {
		return other
	}
	return g.named()
}

// Wait waits until no other proxy runs, and then has the claim. told is called for each proxy that it waits for. It returns an
// error if ctx ends before, and that of told, which ends the wait.
func (g *Guard) Wait(ctx context.Context, told func(Proxy) error) error {
	var last Proxy
	for {
		other := g.Other()
		if other == nil {
			return nil
		}
		if !other.same(last) {
			if err := told(*other); err != nil {
				return err
			}
		}
		last = *other
		if err := pause(ctx, pollEvery); err != nil {
			return err
		}
	}
}

// Watch looks every so often, until ctx ends, for a proxy that works beside this one although this one has the claim: a kube-proxy
// knows of none. told is called with one when there is, and with nil when there is none any more.
func (g *Guard) Watch(ctx context.Context, every time.Duration, told func(*Proxy)) {
	there := false
	for {
		other := g.listeningBeside()
		if other == nil {
			other = g.named()
		}
		if there != (other != nil) {
			there = !there
			told(other)
		}
		if pause(ctx, every) != nil {
			return
		}
	}
}

// Claim waits for the claim alone, and not for proxies that know none: it is for a program that works already, whoever else
// does, so that others wait for it.
func (g *Guard) Claim(ctx context.Context) error {
	for g.makeClaim() != nil {
		if err := pause(ctx, pollEvery); err != nil {
			return err
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// Close gives the claim back, if this process has it.
func (g *Guard) Close() error {
	if g.claim == nil {
		return nil
	}
	err := g.claim.close()
	g.claim = nil
	return err
}

// warn tells once of what can't be done.
func (g *Guard) warn(what string, err error) {
	if g.told == nil {
		g.told = map[string]bool{}
	}
	if !g.told[what] {
		g.told[what] = true
		g.Log.Warn(what, "error", err)
	}
}

// makeClaim makes the claim, and returns who has it if that is somebody else.
func (g *Guard) makeClaim() *Proxy {
	if g.claim != nil {
		return nil
	}
	made, err := newClaim()
	var taken *takenError
	switch {
	case err == nil:
		g.claim = made
	case errors.As(err, &taken) && taken.mayProxy():
		return &Proxy{Name: "nodeproxy", PID: taken.pid}
	default:
		g.warn("another nodeproxy would not be noticed", err)
	}
	return nil
}
