package apiserver

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// beginning is how long a watch from now on, beside which everything is to be listed, may take to begin. Something before the API server may
// hold back the beginning of an answer until an event comes.
const beginning = 5 * time.Second

// failures is how often in a row a request may fail, where the reason may last, before something else is requested.
const failures = 4

// follower keeps what has been passed on of a resource equal to what the API server has. It does what client-go's reflector does, with two
// differences. When the API server has forgotten the version from which a watch would go on, the reflector waits, lists everything, and only
// then hears of changes again. This opens a watch from now on, and lists everything beside it: so a change waits for the list only if it came
// between the two watches. And objects of a list are compared as they come, so that there is never a second copy of all of them.
//
// Why nothing is lost: the list is requested once the watch has begun, as of the latest version, so whatever is not in it comes by the watch.
// Of what both the list and the watch have of an object, the later version holds: they may come from two servers, and either may lag behind
// the other. Where a watch ends, another goes on after its last event; where it had none, after the list.
type follower struct {
	*resource
	mu    sync.Mutex // guards all that follows; the goroutines of the streams take it in turns
	store *store
	// version is what a watch goes on after; "" if that is not known, or forgotten. newest is the version that a list must not be older
	// than: "0" for none, "" for the latest.
	version, newest string
	// whole says that everything has been passed on, but for what is to come by the watch.
	whole bool
	// alone says that the next list is not to be beside a watch: the first one, or where there can't be one from now on. plain says that it
	// is to come as a whole, not as a stream.
	alone, plain bool
	// changes and listing are the streams that are open, or wait for their time; nil for none.
	changes, listing *stream
	// watches and lists have the attempts at them, and the others the pauses before the next.
	watches, lists          attempts
	beforeWatch, beforeList pause
	listed                  time.Time // when the last list was complete
}

func newFollower(r *resource, s *store) *follower {
	return &follower{resource: r, store: s, newest: "0", alone: true, lists: attempts{n: 1, random: r.random}, watches: attempts{random: r.random}}
}

// run goes on until ctx ends.
func (f *follower) run(ctx context.Context) {
	f.mu.Lock()
	f.openMissing(ctx)
	f.mu.Unlock()
	<-ctx.Done()
	f.mu.Lock() // Whatever is received after this is not passed on.
	defer f.mu.Unlock()
}

// openMissing opens the streams that there should be.
func (f *follower) openMissing(ctx context.Context) {
	if f.changes == nil && (f.version != "" || !f.alone) {
		q := request{pause: f.beforeWatch, begin: requestTimeout}
		if q.ResourceVersion = f.version; f.version == "" {
			q.SendInitialEvents, q.ResourceVersionMatch, q.begin = ptr.To(false), metav1.ResourceVersionMatchNotOlderThan, beginning
		}
		f.changes = f.open(ctx, q)
	}
	if f.listing != nil || f.whole || !f.alone && !f.changes.begun {
		return
	}
	q := request{pause: f.beforeList, begin: requestTimeout, plain: f.plain, again: !f.listed.IsZero()}
	switch {
	case !q.again || q.pause.length > 0:
	case f.plain:
		q.pause.length = jittered(shortest, f.random)
	default:
		q.pause.length = f.before + f.random(spread)
	}
	switch {
	case !f.plain:
		q.SendInitialEvents, q.ResourceVersionMatch = ptr.To(true), metav1.ResourceVersionMatchNotOlderThan
	case f.alone:
		q.ResourceVersion = f.newest
	}
	f.store.begin()
	f.listing = f.open(ctx, q)
}

// open opens a stream, for as long as ctx does not end.
func (f *follower) open(ctx context.Context, q request) *stream {
	return f.resource.open(ctx, q, func(s *stream, m message) error { return f.receive(ctx, s, m) })
}

// errUnwanted ends a stream that is not wanted any more.
var errUnwanted = errors.New("it is not wanted any more")

// receive takes a message of a stream, on the goroutine of that.
func (f *follower) receive(ctx context.Context, s *stream, m message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil || s != f.listing && s != f.changes {
		return errUnwanted
	}
	defer f.openMissing(ctx)
	switch {
	case m.err != nil && s == f.listing:
		f.listEnded(m.err)
	case m.err != nil:
		f.watchEnded(m.err)
	case m.listed != "" && s == f.listing:
		f.complete(m.listed)
	case m.kind == "":
		s.begun = true
	case s == f.listing:
		return f.store.list(m.watchEvent)
	default:
		return f.change(m.watchEvent)
	}
	return nil
}

// change takes what the watch brings. What is no newer than the last list was in that: the server of the watch lags behind the list's.
func (f *follower) change(e watchEvent) error {
	if n := number(e.version); n != 0 && n <= f.store.asOf {
		return nil
	}
	if e.kind != watch.Bookmark {
		if err := f.store.change(e); err != nil {
			return err
		}
	}
	if e.version != "" {
		f.version, f.newest = e.version, e.version
	}
	if f.store.verifying != nil {
		f.store.verifying.move()
	}
	return nil
}

// complete records that all objects of the list have come.
func (f *follower) complete(version string) {
	f.store.complete(number(version))
	f.setPartial(false)
	f.heard()
	if f.version == "" || number(f.version) < number(version) {
		f.version, f.newest = version, version
	}
	if f.changes == nil && !f.plain {
		f.changes = f.listing // It goes on with changes.
	} else {
		f.listing.end()
	}
	f.listing, f.whole, f.plain, f.listed, f.beforeWatch, f.beforeList = nil, true, false, time.Now(), pause{}, pause{}
}

// watchEnded decides how to go on after the end of a watch.
func (f *follower) watchEnded(err error) {
	ended := f.changes
	f.changes, f.beforeWatch = nil, pause{}
	switch {
	case f.version != "" && (forgotten(err) || apierrors.IsInternalError(err) && f.watches.n >= failures):
		// After internal errors, it may not be able to send what comes next, or this program to read it.
		f.version, f.whole, f.alone = "", false, false
		f.setPartial(true)
		f.beforeList = f.lists.next(nil, time.Since(f.listed), err)
	case f.version == "": // It was one from now on, and has brought nothing.
		f.beforeWatch = f.watches.next(ended.answered, time.Since(ended.asked), err)
		f.alone = ended.begun || reached(err) || errors.Is(err, noAnswer(beginning))
		f.plain = f.plain || apierrors.IsInvalid(err)
	default:
		f.beforeWatch = f.watches.next(ended.answered, time.Since(ended.asked), err)
		if f.absent() {
			f.beforeWatch = pause{length: wait.Jitter(f.askAgain, 0.2)}
		}
		return // Another one goes on where it was, and a list beside it goes on, too.
	}
	if f.listing != nil {
		f.listing.end()
		f.listing = nil
	}
}

// listEnded decides how to go on after a list that has failed.
func (f *follower) listEnded(err error) {
	f.beforeList = f.lists.next(f.listing.answered, 0, err)
	f.listing = nil
	switch {
	case f.absent():
		f.beforeList = pause{length: wait.Jitter(f.askAgain, 0.2)}
	case !f.plain && f.wholeInstead(err):
		f.plain = true // The API server, or something before it, does not stream lists.
		if apierrors.IsInvalid(err) {
			f.beforeList, f.lists.n = pause{}, f.lists.n-1
		}
	case forgotten(err):
		f.newest = ""
	}
}

// wholeInstead reports whether the next list is to come as a whole, after one that has ended with err: the API server, its storage, or
// something before it does not stream lists.
func (f *follower) wholeInstead(err error) bool {
	switch {
	case forgotten(err), errors.Is(err, errSilent), errors.Is(err, errEndless):
		return true
	case apierrors.IsTooManyRequests(err), apierrors.IsServiceUnavailable(err):
		return false
	case apierrors.IsInternalError(err) && !apierrors.HasStatusCause(err, metav1.CauseType("ClientWatchDecoding")):
		return true // So says a storage without that. With the cause, the connection was lost in the middle.
	}
	return f.lists.n >= failures && (reached(err) || errors.Is(err, io.EOF))
}

// forgotten reports whether the API server will not answer a request for a version, however often it is asked: it has forgotten that, does not
// know it yet, or does not understand the question.
func forgotten(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsTimeout(err) || apierrors.IsInvalid(err) ||
		apierrors.IsBadRequest(err) || apierrors.IsNotFound(err)
}
