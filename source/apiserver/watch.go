package apiserver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

var errNoAnswer = fmt.Errorf("no answer within %s", requestTimeout)

// because returns the cause of ctx's end if that is the reason for err.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, errNoAnswer) {
		return cause
	}
	return err
}

// openWatch opens a watch that ends by itself once it has delivered nothing for too long: a connection can be dead without being
// closed, and a server, or a load balancer before it, can forget a watch and keep its connection. The reflector then opens another
// one where this one ended.
func (r *resource) openWatch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	begin := time.AfterFunc(requestTimeout, func() { cancel(errNoAnswer) })
	o.Watch = true
	inner, err := r.get(o).Watch(ctx)
	if !begin.Stop() && err == nil {
		inner.Stop()
		err = errNoAnswer
	}
	if err != nil {
		err = because(ctx, err)
		cancel(nil)
		return nil, err
	}
	w := &guardedWatch{resource: r, inner: inner, cancel: cancel, out: make(chan watch.Event), stop: make(chan struct{})}
	r.heard()
	go w.forward()
	return w, nil
}

// guardedWatch is a watch.Interface that ends when nothing has arrived for the resource's silence.
type guardedWatch struct {
	resource *resource
	inner    watch.Interface
	cancel   context.CancelCauseFunc
	out      chan watch.Event
	once     sync.Once
	stop     chan struct{}
}

func (w *guardedWatch) ResultChan() <-chan watch.Event { return w.out }

func (w *guardedWatch) Stop() { w.once.Do(func() { close(w.stop) }) }

func (w *guardedWatch) forward() {
	defer close(w.out)
	defer w.cancel(nil)
	defer w.inner.Stop()
	silence := time.NewTimer(w.resource.silence)
	defer silence.Stop()
	for {
		select {
		case <-w.stop:
			return
		case <-silence.C:
			w.resource.failed("watch", fmt.Errorf("it delivered nothing for %s, not even a bookmark; another is opened",
				w.resource.silence))
			return
		case e, open := <-w.inner.ResultChan():
			if !open {
				return
			}
			if e.Type == watch.Error {
				w.resource.failed("watch", apierrors.FromObject(e.Object))
			} else {
				w.resource.heard()
			}
			silence.Reset(w.resource.silence)
			select {
			case w.out <- e:
			case <-w.stop:
				return
			}
		}
	}
}
