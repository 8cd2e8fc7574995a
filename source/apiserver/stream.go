package apiserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
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
	end   context.CancelFunc // for one of which nothing more is wanted
	begun bool               // The first message has come.
	// asked is when the request was sent, and answered is closed at an answer to another one since then. They are there with the first
	// message.
	asked    time.Time
	answered <-chan struct{}
}

// message is what comes by a stream. The first one says only that the API server has begun to answer, and the last one has an error: io.EOF
// where the answer was complete.
type message struct {
	watchEvent
	// listed is the version of a list all of whose objects have come; "0", for any, where it has none.
	listed string
	err    error
}

// request is what a stream asks for: to watch with these options or, if plain, to list.
type request struct {
	metav1.ListOptions
	plain bool
	again bool          // All has been listed before: this takes its turn.
	pause pause         // before it
	begin time.Duration // how long to wait for the answer to begin
}

// lists reports whether the answer is to have all objects.
func (q *request) lists() bool { return q.plain || ptr.Deref(q.SendInitialEvents, false) }

// open begins a stream. Its messages are received one after the other, until that fails.
func (r *resource) open(ctx context.Context, q request, receive func(*stream, message) error) *stream {
	ctx, end := context.WithCancel(ctx)
	s := &stream{end: end}
	what := "watch"
	if q.lists() {
		what = "list"
	}
	go func() {
		defer end()
		r.rest(ctx, q.pause)
		over := func() {}
		if q.again {
			over = r.turn.take(ctx)
			defer over()
		}
		s.asked, s.answered = time.Now(), r.answers.next()
		err := r.forward(ctx, q, func(m message) error {
			if m.listed != "" {
				defer over()
			}
			return receive(s, m)
		})
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
		_ = receive(s, message{err: err})
	}()
	return s
}

// ask makes a request, and returns the answer once that has begun.
func ask(ctx context.Context, request *rest.Request) (io.ReadCloser, error) {
	answer, err := request.Stream(ctx)
	switch {
	case err == nil:
		return answer, nil
	case !reached(err) && (utilnet.IsProbableEOF(err) || utilnet.IsTimeout(err)): // IsProbableEOF looks at texts, also at those of API servers.
		err = fmt.Errorf("%w: %s", errClosed, err.Error()) // Wrapped, an io.EOF would say that the answer was complete.
	}
	return nil, because(ctx, err)
}

// forward makes a request and passes on what comes, until the answer ends or that fails, and returns why it has.
func (r *resource) forward(ctx context.Context, q request, receive func(message) error) error {
	if q.plain {
		return r.forwardList(ctx, q, receive)
	}
	q.Watch, q.AllowWatchBookmarks = true, true
	q.TimeoutSeconds = ptr.To(int64((leastWatch + r.random(leastWatch)).Seconds()))
	asking, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := time.AfterFunc(q.begin, func() { cancel(noAnswer(q.begin)) })
	answer, err := ask(asking, r.get(q.ListOptions).Throttle(nil)) // Watches are not limited, as those of client-go are not.
	if err != nil {
		return err
	}
	defer answer.Close()
	if !late.Stop() {
		return noAnswer(q.begin)
	}
	r.heard()
	if err := receive(message{}); err != nil {
		return err
	}
	silence := time.AfterFunc(r.silence, func() { cancel(errSilent) })
	defer silence.Stop()
	err = r.forwardEvents(newEventReader(r, answer), q.lists(), func(m message) error {
		r.heard()
		silence.Reset(r.silence)
		return receive(m)
	})
	switch {
	case !errors.Is(context.Cause(asking), errSilent):
		return err
	case r.isBefore(ctx, q.ResourceVersion):
		return apierrors.NewResourceExpired("the API server is at an earlier version than it was, as after a backup was restored")
	}
	return fmt.Errorf("for %s, %w", r.silence, errSilent)
}

// forwardEvents passes on what a watch brings. Where it begins with a list, that ends with the first bookmark, if the API server understands
// what was asked of it.
func (r *resource) forwardEvents(from *eventReader, listing bool, receive func(message) error) error {
	for {
		e, err := from.next()
		if err != nil {
			return err
		}
		m := message{watchEvent: e}
		if e.kind == watch.Bookmark {
			o, err := meta.Accessor(e.object)
			switch {
			case err != nil:
				return err
			case o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true":
				m.listed, listing = cmp.Or(e.version, "0"), false
			case listing:
				return errEndless
			}
		}
		if err := receive(m); err != nil {
			return err
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
