package apiserver

import (
	"context"
	"errors"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// The pauses between requests keep the nodes of a cluster from doing to an API server in trouble what it can't survive, without keeping
// changes from those that it does serve. What costs it little may be asked for soon, and what costs it much is spread:
//
//   - A watch from a known version, or from now on, costs next to nothing. Watches end all the time, and when an API server restarts, those
//     of all nodes do. Then each is opened again at once, as client-go's reflectors do; and if that fails because the server has forgotten
//     the version, one from now on, also at once. Changes come by that, so no node is blind while everything is listed beside it.
//   - A streamed list costs processor time for as long as it lasts, and no memory to speak of: it is sent from the watch cache. A node begins
//     within spread, so that all do not in the same moment. What limits how many of them an API server works at is its own priority and
//     fairness, with queues; what it rejects (429) says when to come back, and client-go's requests heed that. The lists of a node follow each
//     other, EndpointSlices first, which change most: so there is a processor for changes, here and at the API server.
//   - A list as a whole, from an API server that does not stream them, is in its memory as often as it is asked for at the same time. It
//     waits half a second to a second, as everything did before there were streams.
//   - After a failure of what is not a first attempt, pauses grow from half a second up to longest, each lengthened by a random time of up to
//     its own length. client-go's grow up to a minute. But connections fail while a node sends to pods that are gone.
//   - A server that can't be reached has no cost of attempts: a refused connection is one packet and its answer. So those pauses stay below
//     twice longestUnreached, and the first resource that gets an answer ends them for the others. Of these, each then opens a watch, and
//     lists nothing if the API server still knows the version.
const (
	shortest         = 500 * time.Millisecond
	longest          = 5 * time.Second
	longestUnreached = 2 * time.Second
	spread           = 50 * time.Millisecond
	longestTurn      = time.Second
)

// attempts counts those since the last that has lasted. The first one after that follows without a pause.
type attempts struct {
	n      int
	random func(time.Duration) time.Duration // as in resource
}

// pause is one before an attempt. What ends it early, unless that is nil, is an answer of the API server to another request.
type pause struct {
	length   time.Duration
	answered <-chan struct{}
}

// next returns the pause after an attempt that has lasted for a while and ended with err. One that has lasted for longer than the pause is
// the last of a series. answered is closed when there was an answer to another request since the attempt began.
func (a *attempts) next(answered <-chan struct{}, lasted time.Duration, err error) pause {
	n := a.n
	a.n = min(n+1, 10)
	if n == 0 {
		return pause{}
	}
	out, most := pause{}, longest
	if !reached(err) {
		out.answered, most = answered, longestUnreached
	}
	out.length = jittered(min(shortest<<(n-1), most), a.random)
	if lasted >= out.length {
		a.n = 1
		return pause{}
	}
	return out
}

// jittered returns a random time between d and twice that.
func jittered(d time.Duration, random func(time.Duration) time.Duration) time.Duration {
	return d + random(d)
}

// reached reports whether an error came from the API server, not from the way to it.
func reached(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status)
}

// rest waits for a pause. An answer does not end it before the shortest one has passed: other requests may get them all the time.
func (r *resource) rest(ctx context.Context, p pause) {
	if p.length <= 0 {
		return
	}
	least := min(p.length, shortest)
	for _, step := range []pause{{length: least}, {p.length - least, p.answered}} {
		over := time.NewTimer(step.length)
		select {
		case <-ctx.Done():
		case <-over.C:
		case <-step.answered:
		}
		over.Stop()
	}
}

// turn has lists follow each other. It has room for one.
type turn chan struct{}

// take waits until no other list is under way, but not for longer than longestTurn, since that may hang, and returns what ends the turn.
func (t turn) take(ctx context.Context) (end func()) {
	over := time.NewTimer(longestTurn)
	defer over.Stop()
	select {
	case t <- struct{}{}:
		return sync.OnceFunc(func() { <-t })
	case <-over.C:
	case <-ctx.Done():
	}
	return func() {}
}

// answers tells the requests that have to wait when one of them gets an answer. The zero value is ready.
type answers struct {
	mu      sync.Mutex
	waiting chan struct{}
}

// next returns a channel that is closed at the next answer after failures.
func (a *answers) next() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waiting == nil {
		a.waiting = make(chan struct{})
	}
	return a.waiting
}

// came is called for an answer.
func (a *answers) came() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waiting != nil {
		close(a.waiting)
		a.waiting = nil
	}
}
