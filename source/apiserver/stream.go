package apiserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// leastWatch is the least time after which the API server is to end a watch, and twice that the most, so that it can divide watches among
// its servers anew.
const leastWatch = 5 * time.Minute

// noAnswer is the error of a request to which there was no answer within that time.
type noAnswer time.Duration

func (n noAnswer) Error() string { return fmt.Sprintf("no answer within %s", time.Duration(n)) }

var (
	errNoAnswer = noAnswer(requestTimeout)
	errSilent   = errors.New("it delivered nothing, not even a bookmark; another is opened")
	errEndless  = errors.New("the stream goes on with changes, and has not said that all objects have come")
	errClosed   = errors.New("no connection could be made in time, or it was closed before an answer came")
)

// because returns the cause of ctx's end if that is the reason for err.
func because(ctx context.Context, err error) error {
	if late := noAnswer(0); errors.As(context.Cause(ctx), &late) {
		return late
	}
	return err
}

// stream is a request to the API server whose answer comes in parts: a watch, or a list.
type stream struct {
	// messages ends with one that has an error: io.EOF where the answer was complete.
	messages chan message
	end      context.CancelFunc // for one of which nothing more is wanted
	begun    bool               // The first message has been received.
	// asked is when the request was sent, and answered is closed at an answer to another one since then. They are there with the first
	// message.
	asked    time.Time
	answered <-chan struct{}
}

// message is what comes by a stream. The first one says only that the API server has begun to answer.
type message struct {
	watch.Event
	// listed is the version of a list all of whose objects have come; "0", for any, where it has none.
	listed string
	err    error
}

// received returns the messages of a stream; those of no stream never come.
func (s *stream) received() <-chan message {
	if s == nil {
		return nil
	}
	return s.messages
}

// request is what a stream asks for: to watch with these options or, if plain, to list.
type request struct {
	metav1.ListOptions
	plain bool
	pause pause         // before it
	begin time.Duration // how long to wait for the answer to begin
}

// lists reports whether the answer is to have all objects.
func (q *request) lists() bool { return q.plain || ptr.Deref(q.SendInitialEvents, false) }

// open begins a stream.
func (r *resource) open(ctx context.Context, q request) *stream {
	ctx, end := context.WithCancel(ctx)
	s := &stream{messages: make(chan message), end: end}
	what := "watch"
	if q.lists() {
		what = "list"
	}
	go func() {
		defer end()
		r.rest(ctx, q.pause)
		s.asked, s.answered = time.Now(), r.answers.next()
		err := r.forward(ctx, q, s)
		if ctx.Err() != nil {
			return
		}
		switch {
		case errors.Is(err, io.EOF):
		case q.SendInitialEvents != nil && apierrors.IsInvalid(err):
			r.log.Debug("the API server does not stream lists; they are requested as a whole", "resource", r.name)
		default:
			r.failed(what, err)
		}
		s.send(ctx, message{err: err})
	}()
	return s
}

// send passes a message on, and reports whether it was wanted.
func (s *stream) send(ctx context.Context, m message) bool {
	select {
	case s.messages <- m:
		return true
	case <-ctx.Done():
		return false
	}
}

// forward makes a request and passes on what comes, until the answer ends, and returns why it has.
func (r *resource) forward(ctx context.Context, q request, s *stream) error {
	if q.plain {
		return r.forwardList(ctx, q, s)
	}
	q.Watch, q.AllowWatchBookmarks = true, true
	q.TimeoutSeconds = ptr.To(int64((leastWatch + rand.N(leastWatch)).Seconds()))
	asking, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := time.AfterFunc(q.begin, func() { cancel(noAnswer(q.begin)) })
	w, err := r.get(q.ListOptions).Watch(asking)
	if !late.Stop() && err == nil {
		w.Stop()
		err = noAnswer(q.begin)
	}
	if err == nil && reflect.TypeOf(w) == reflect.TypeOf(watch.NewEmptyWatch()) {
		err = errClosed // This is how client-go says so.
	}
	if err != nil {
		return because(asking, err)
	}
	defer w.Stop()
	r.heard()
	if !s.send(ctx, message{}) {
		return ctx.Err()
	}
	return r.forwardEvents(ctx, w, s, q)
}

// forwardEvents passes on what a watch brings. It gives the watch up once that has delivered nothing for too long: a connection can be dead
// without being closed, and a server, or a load balancer before it, can forget a watch and keep its connection. Where it begins with a
// list, that ends with the first bookmark, if the API server understands what was asked of it.
func (r *resource) forwardEvents(ctx context.Context, w watch.Interface, s *stream, q request) error {
	listing := q.lists()
	silence := time.NewTimer(r.silence)
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-silence.C:
			if r.isBefore(ctx, q.ResourceVersion) {
				return apierrors.NewResourceExpired("the API server is at an earlier version than it was, as after a backup was restored")
			}
			return fmt.Errorf("for %s, %w", r.silence, errSilent)
		case e, open := <-w.ResultChan():
			switch {
			case !open:
				return io.EOF
			case e.Type == watch.Error:
				return apierrors.FromObject(e.Object)
			}
			r.heard()
			silence.Reset(r.silence)
			if got, want := reflect.TypeOf(e.Object), reflect.TypeOf(r.example); got != want {
				return apierrors.NewInternalError(fmt.Errorf("an event of a %v came where one of a %v should", got, want))
			}
			m := message{Event: e}
			if o, err := meta.Accessor(e.Object); err != nil {
				return fmt.Errorf("event %s: %w", e.Type, err)
			} else if e.Type == watch.Bookmark && o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
				m.listed, listing = cmp.Or(o.GetResourceVersion(), "0"), false
			} else if e.Type == watch.Bookmark && listing {
				return errEndless
			}
			if !s.send(ctx, m) {
				return ctx.Err()
			}
		}
	}
}

// isBefore reports whether the API server is at an earlier version than one that it had. It keeps a watch from that version silent, as it
// may one of objects that do not change.
func (r *resource) isBefore(ctx context.Context, version string) bool {
	if number(version) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, beginning)
	defer cancel()
	list, err := r.list(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return false
	}
	l, err := meta.ListAccessor(list)
	return err == nil && l.GetResourceVersion() != "" && number(l.GetResourceVersion()) < number(version)
}

// forwardList passes on a list that comes as a whole.
func (r *resource) forwardList(ctx context.Context, q request, s *stream) error {
	asking, cancel := context.WithTimeoutCause(ctx, q.begin, noAnswer(q.begin))
	defer cancel()
	list, err := r.list(asking, q.ListOptions)
	if err != nil {
		return because(asking, err)
	}
	r.heard()
	if !s.send(ctx, message{}) {
		return ctx.Err()
	}
	err = meta.EachListItemWithAlloc(list, func(obj runtime.Object) error {
		if !s.send(ctx, message{Event: watch.Event{Type: watch.Added, Object: obj}}) {
			return ctx.Err()
		}
		return nil
	})
	if err != nil {
		return err
	}
	l, err := meta.ListAccessor(list)
	if err != nil {
		return fmt.Errorf("list from the API server: %w", err)
	}
	s.send(ctx, message{listed: cmp.Or(l.GetResourceVersion(), "0")})
	return io.EOF
}
