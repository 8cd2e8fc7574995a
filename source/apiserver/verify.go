package apiserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"nodeproxy/source"
)

// Verify lists everything anew beside the watches, and compares it with what was passed on. What differs is passed on, too, and returned.
//
// Both the list and a watch may lag, so that they differ is no fault in itself. A difference is one only once the watch has said that it is past
// the version at which the list had the object, or had it no more, and has brought nothing of that object since the list was asked for. Where
// the API server is silent, the next bookmark says so: within a minute or so, for which Verify waits. A difference of which that is not known
// when ctx ends is not returned.
func (s *Source) Verify(ctx context.Context) (compared []source.Compared, found []source.Difference) {
	ctx = quietly(ctx, s.cfg.Log)
	s.mu.Lock()
	followers := slices.Clone(s.followers)
	s.mu.Unlock()
	listers := resources(s.cfg) // Of their own, since an answer to these says nothing of how the watches fare.
	results := make([]struct {
		compared []source.Compared
		found    []source.Difference
	}, len(followers))
	var running sync.WaitGroup
	for i, f := range followers {
		if f.optional && f.absent() {
			continue
		}
		running.Go(func() { // All at once, so that none takes the time of the others where its watch is silent.
			n, found, err := f.verify(ctx, listers[i])
			c := source.Compared{What: f.kind + "s of the API server", Count: n}
			if err != nil {
				c.Not = err.Error()
			}
			results[i].compared, results[i].found = []source.Compared{c}, found
		})
	}
	running.Wait()
	for _, r := range results {
		compared, found = append(compared, r.compared...), append(found, r.found...)
	}
	return compared, found
}

// mostSuspects is how many objects that differ are kept at a time. Where there are more, everything is listed once more after these.
const mostSuspects = 256

// verification compares a store with a list that is made beside the watch.
type verification struct {
	store *store
	least uint64 // the version that the list must not be older than
	count int
	// touched are the objects of which the watch has brought something since the list was asked for: the list may be older or newer.
	touched  map[types.NamespacedName]struct{}
	suspects map[types.NamespacedName]suspect
	more     bool // More objects differ than are suspects.
	begun    bool // The list has begun to come.
	// moved has a value when the watch has gone on, or the verification is over, because everything is listed again.
	moved chan struct{}
}

// suspect is an object that the list has otherwise than the store. obj is nil where the list does not have it.
type suspect struct {
	obj     any
	version uint64
	// at is the version that the watch must be past: then it has brought, or lost, what makes the list differ.
	at uint64
}

// errListed ends a list that is complete.
var errListed = errors.New("all objects have come")

var errOver = errors.New("everything is being listed again, so there is nothing to compare with")

var errMany = fmt.Errorf("more than %d objects differed, and the watch has brought what these lacked", mostSuspects)

// verify compares what is known with a list by r, and repairs it.
func (f *follower) verify(ctx context.Context, r *resource) (count int, found []source.Difference, err error) {
	for {
		v, some, err := f.verifyOnce(ctx, r)
		found = append(found, some...)
		switch {
		case v == nil:
			return 0, found, err
		case err != nil || !v.more:
			return v.count, found, err
		case len(some) == 0:
			return v.count, found, errMany
		}
	}
}

// verifyOnce does so with one list, which v is for; nil if there is none. Where v.more is set, there may be more to repair.
func (f *follower) verifyOnce(ctx context.Context, r *resource) (v *verification, found []source.Difference, err error) {
	v, err = f.beginVerification()
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.store.verifying == v {
			f.store.verifying = nil
		}
	}()
	q := request{begin: requestTimeout}
	q.SendInitialEvents, q.ResourceVersionMatch = ptr.To(true), metav1.ResourceVersionMatchNotOlderThan
	err = f.listBeside(ctx, r, q, v)
	if v.plainInstead(err) {
		if v, err = f.beginVerification(); err != nil {
			return nil, nil, err
		}
		q = request{begin: requestTimeout, plain: true}
		q.ResourceVersion = fmt.Sprint(v.least)
		err = f.listBeside(ctx, r, q, v)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("listing them anew: %w", err) // An error of an API server may have no text.
	}
	for {
		differences, left, err := f.judge(v)
		if found = append(found, differences...); err != nil || left == 0 {
			return v, found, err
		}
		select {
		case <-v.moved:
		case <-ctx.Done():
			return v, found, fmt.Errorf("%d objects differ, but the watch may still bring what they lack", left)
		}
	}
}

// plainInstead reports whether a list is to be asked for as a whole after a stream has ended with err: not from an API server that has too
// much to do, as that would cost it more.
func (v *verification) plainInstead(err error) bool {
	return errors.Is(err, errEndless) || errors.Is(err, errNoAnswer) && v.begun ||
		reached(err) && !apierrors.IsTooManyRequests(err) && !apierrors.IsServiceUnavailable(err)
}

// beginVerification begins one, in place of any other.
func (f *follower) beginVerification() (*verification, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.whole || f.listing != nil || number(f.version) == 0 {
		return nil, errOver
	}
	f.store.lists++
	f.store.verifying = &verification{store: f.store, least: number(f.version), touched: map[types.NamespacedName]struct{}{},
		suspects: map[types.NamespacedName]suspect{}, moved: make(chan struct{}, 1)}
	return f.store.verifying, nil
}

// listBeside lists all objects and compares them. It takes its turn with the other lists of this node.
func (f *follower) listBeside(ctx context.Context, r *resource, q request, v *verification) error {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, errNoAnswer)
	defer cancel()
	defer f.turn.take(ctx)()
	err := r.forward(ctx, q, func(m message) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		switch {
		case f.store.verifying != v:
			return errOver
		case m.listed != "":
			return v.complete(number(m.listed))
		case m.kind == "":
			v.begun = true
			return nil
		}
		return v.list(m.watchEvent)
	})
	if errors.Is(err, errListed) {
		return nil
	}
	return because(ctx, incomplete(err))
}

// list takes an object of the list.
func (v *verification) list(e watchEvent) error {
	version := number(e.version)
	if _, touched := v.touched[e.name]; touched || e.kind == watch.Bookmark {
		return nil
	}
	had := v.store.known.Get(e.name)
	delete(v.suspects, e.name)
	if e.kind == watch.Deleted { // while the list was under way
		if had != nil {
			had.list = v.store.lists - 1
		}
		return nil
	}
	v.count++
	at := version
	if had != nil {
		had.list = v.store.lists
		if had.version == version {
			return nil
		}
		at = max(version, had.version)
	}
	if len(v.suspects) == mostSuspects {
		v.more = true
		return nil
	}
	obj, err := v.store.resource.decode(e)
	if err != nil {
		return err
	}
	name, version := identify(obj)
	v.suspects[name] = suspect{strip(obj), version, at}
	return nil
}

// complete records that all objects of the list have come, as of a version.
func (v *verification) complete(asOf uint64) error {
	if asOf < v.least {
		return fmt.Errorf("the list is of version %d, and %d is known: the API server may be at an earlier version than it was", asOf, v.least)
	}
	for k := range v.store.known.All() {
		_, touched := v.touched[k.name]
		if k.list != v.store.lists && !touched { // Any number: no object is kept of these.
			v.suspects[k.name] = suspect{at: asOf}
		}
	}
	return errListed
}

// bring notes that the watch has brought something of an object.
func (v *verification) bring(name types.NamespacedName) {
	v.touched[name] = struct{}{}
	delete(v.suspects, name)
}

// move notes that the watch has gone on.
func (v *verification) move() {
	select {
	case v.moved <- struct{}{}:
	default: // It has a value already.
	}
}

// judge passes on what differs in any case, and returns that and how many other objects may differ.
func (f *follower) judge(v *verification) (found []source.Difference, left int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.store.verifying != v || !f.whole {
		return nil, 0, errOver
	}
	found = v.judge(number(f.version))
	return found, len(v.suspects), nil
}

func (v *verification) judge(passed uint64) (found []source.Difference) {
	var b source.Batch
	s := v.store
	inOrder := func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) }
	for _, name := range slices.SortedFunc(maps.Keys(v.suspects), inOrder) {
		suspect, had := v.suspects[name], s.known.Get(name)
		if suspect.at > passed {
			continue
		}
		delete(v.suspects, name)
		d := source.Difference{Part: source.PartObjects, Object: s.resource.kind + " " + strings.TrimPrefix(name.String(), "/"),
			Field: "metadata.resourceVersion"}
		switch {
		case suspect.obj == nil:
			d.Field = ""
			d.Detail = fmt.Sprintf("the API server has none since version %d at the latest, and it was known as of version %d", suspect.at, had.version)
			s.known.Delete(name)
			s.resource.put(&b, name, nil)
		case had == nil:
			d.Field, d.Detail = "", fmt.Sprintf("the API server has it as of version %d, and it was not known", suspect.version)
			s.put(&b, name, suspect.version, s.lists, suspect.obj)
		default:
			d.Detail = fmt.Sprintf("the API server has version %d, and version %d was known", suspect.version, had.version)
			s.put(&b, name, suspect.version, s.lists, suspect.obj)
		}
		found = append(found, d)
	}
	if len(found) > 0 {
		s.deliver(s.resource, b, false)
	}
	return found
}
