package apiserver

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// retries are the waits after requests that fail one after the other: half a second, doubled up to five, and each
// lengthened by up to as much again at random, so that the nodes of a cluster do not come all at once. client-go's own
// go up to a minute. But connections fail while a node sends to pods that are gone; and what the nodes ask in vain of an
// API server that is down costs it nothing.
var retries = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 5 * time.Second}

// steadyFor is how long a watch must have gone on for its end to count as the first failure.
const steadyFor = 10 * time.Second

// keepWatching lists and watches until ctx ends. It differs from the reflector's own Run in that the waits begin anew
// after a watch that went well, not only after minutes without a failure: after the restart of an API server, one
// failure (of the connection) is followed by another (the versions it knows begin anew) as a rule.
func keepWatching(ctx context.Context, reflector *cache.Reflector, r *resource) {
	backoff := retries
	for ctx.Err() == nil {
		begun := time.Now()
		_ = reflector.ListAndWatchWithContext(ctx) // the resource has taken note of what failed
		if time.Since(begun) >= steadyFor {
			backoff = retries
		}
		pause := backoff.Step()
		if r.absent() {
			pause = wait.Jitter(r.askAgain, 0.2)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// interruptible is a clock whose waits end with ctx. The reflector does not look at its context while it waits for the next attempt at
// a streamed list, for up to ten seconds.
type interruptible struct {
	clock.RealClock
	ctx context.Context
}

func (c interruptible) After(d time.Duration) <-chan time.Time {
	out := make(chan time.Time, 1)
	go func() {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-c.ctx.Done():
			out <- time.Now()
		case now := <-timer.C:
			out <- now
		}
	}()
	return out
}
