package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"nodeproxy/source"
)

// requestTimeout is how long to wait for a list, or for a watch to begin. API servers allow the same time for a list.
const requestTimeout = time.Minute

// DefaultSilence is how long a watch may deliver nothing by default. API servers send a bookmark each minute.
const DefaultSilence = 3 * time.Minute

// resource is a watched resource: how to request it, and how that goes.
type resource struct {
	name    string // as in URLs: services
	example runtime.Object
	// apiVersion and kind are those of an object.
	apiVersion, kind string
	// put sets an object in its part of a batch; nil means that the object is gone.
	put func(b *source.Batch, name types.NamespacedName, obj any)
	// fields and labels select among the objects.
	fields, labels string
	client         rest.Interface
	newList        func() runtime.Object
	silence        time.Duration
	log            *slog.Logger
	// random returns a random time below a limit.
	random func(limit time.Duration) time.Duration
	// optional is true for a resource that not every API server has, and that the program can do without. group is its API group.
	// If it is not served, or not to this program, it is requested again only after askAgain; unavailable is called after each
	// failed request for it, whatever the reason.
	optional    bool
	group       string
	askAgain    time.Duration
	unavailable func()
	answers     *answers // of all resources
	// turn is the one of all resources in which they are listed again, and before is how long it is left to others.
	turn   turn
	before time.Duration

	mu    sync.Mutex
	state source.Watch
	// missing says that the API server last answered that it has no such resource for this program.
	missing bool
	heardAt time.Time // zero before the first answer
	// partial says that changes may be missing in what is known until everything is listed: no answer but that confirms it.
	partial bool
	failing time.Time // when the current series of failures began; zero if the last request succeeded
}

// current returns how current the known objects are.
func (r *resource) current(now time.Time) source.Watch {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.state
	out.Resource, out.Age = r.name, -1
	if !r.heardAt.IsZero() {
		out.Age = now.Sub(r.heardAt)
	}
	return out
}

// heard records that the API server has sent something.
func (r *resource) heard() {
	now := time.Now()
	r.mu.Lock()
	since, partial := r.failing, r.partial
	if r.missing = false; !partial {
		r.heardAt, r.failing, r.state.Failure = now, time.Time{}, ""
	}
	r.mu.Unlock()
	if since.IsZero() {
		return
	}
	if r.answers.came(); !partial {
		r.log.Info("the API server answers again", "resource", r.name, "after", now.Sub(since).Round(time.Millisecond))
	}
}

// setPartial records whether changes may be missing in what is known.
func (r *resource) setPartial(partial bool) {
	r.mu.Lock()
	r.partial = partial
	r.mu.Unlock()
}

// failed records a failed request, and logs it if it is the first since a good one.
func (r *resource) failed(what string, err error) {
	r.mu.Lock()
	first := r.failing.IsZero()
	if first {
		r.failing = time.Now()
	}
	r.state.Failure = fmt.Sprintf("%s: %v", what, err)
	news := first || !r.missing
	r.missing = r.optional && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err))
	absent := r.missing
	r.mu.Unlock()
	if r.optional {
		defer r.unavailable()
	}
	level := slog.LevelDebug
	switch {
	case absent && news && apierrors.IsForbidden(err):
		r.log.Warn("this program may not read a resource; Services are proxied without it. The rule that allows it: apiGroups ["+
			r.group+"], resources ["+r.name+"], verbs [list, watch]", "resource", r.name, "asked-again-in", r.askAgain, "error", err)
		return
	case absent && news:
		r.log.Info("the API server does not serve a resource; Services are proxied without it", "resource", r.name, "group", r.group,
			"asked-again-in", r.askAgain)
		return
	case absent:
		return
	case first && (apierrors.IsResourceExpired(err) || apierrors.IsGone(err)):
		level = slog.LevelInfo // A restarted API server does not know older versions; a new list solves that.
	case first:
		level = slog.LevelWarn
	}
	r.log.Log(context.Background(), level, "request to the API server failed; the known objects stay in force, and the request is repeated",
		"resource", r.name, "request", what, "error", err)
}

// absent reports whether the API server last answered that it has no such resource for this program.
func (r *resource) absent() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.missing
}

// synced records that all objects have been delivered, and reports whether this is the first time.
func (r *resource) synced() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := !r.state.Synced
	r.state.Synced = true
	return first
}
