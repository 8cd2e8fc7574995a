package apiserver

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// retries are the pauses after consecutive failures: half a second, doubled up to five seconds, each lengthened by a random time of
// up to its own length, so that the nodes of a cluster do not all reconnect at once. client-go's own pauses grow up to a minute.
// But connections fail while a node sends to pods that are gone, and requests to an API server that is down cost it nothing.
var retries = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 5 * time.Second}

// steadyFor is how long a watch must have run for its end to count as a first failure.
const steadyFor = 10 * time.Second

// keepWatching lists and watches until ctx ends. Unlike the reflector's own Run, it resets the pauses after a watch that ran well,
// not only after minutes without a failure: the restart of an API server usually causes one failure (of the connection) and then
// another (it does not know the old resource versions).
func keepWatching(ctx context.Context, reflector *cache.Reflector, r *resource) {
	backoff := retries
	for ctx.Err() == nil {
		begun := time.Now()
		_ = reflector.ListAndWatchWithContext(ctx) // the resource has recorded the failure
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
		select {
		case <-c.ctx.Done():
		case <-time.After(d):
		}
		out <- time.Now()
	}()
	return out
}
