package apiserver

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"nodeproxy/proxier/source"
)

var (
	first  = types.NamespacedName{Namespace: "default", Name: "first"}
	second = types.NamespacedName{Namespace: "default", Name: "second"}
)

func TestSyncedComesOnceAndLast(t *testing.T) {
	t.Parallel()
	for _, slow := range []string{services, endpointSlices, nodes} {
		t.Run(slow, func(t *testing.T) {
			t.Parallel()
			f := newFakeAPI(t)
			hold := make(chan struct{})
			f.held[slow] = hold
			f.lists[services] = serviceList(10, serviceAt(4, "first"))
			f.lists[nodes] = nodeList("n1")
			s, sink := start(t, f, nil)
			wait := 1 // a batch of the Service or of the Node; without EndpointSlices there is none of them
			if slow == endpointSlices {
				wait = 2
			}
			sink.sees("what is not slow", func() bool { return len(sink.batches) == wait })
			time.Sleep(50 * time.Millisecond)
			sink.sees("no Synced yet", func() bool { return sink.synced == 0 })
			close(hold)
			sink.sees("Synced", func() bool { return sink.synced == 1 })
			sink.sees("it with the last batch", func() bool { return sink.batches[len(sink.batches)-1].Synced && len(sink.services) == 1 })
			f.expire(slow)
			f.expire(services)
			for begun := time.Now(); f.watched(services) < 2 && time.Since(begun) < 10*time.Second; {
				time.Sleep(time.Millisecond)
			}
			sink.sees("Synced no more", func() bool { return sink.synced == 1 })
			for _, st := range s.Staleness() {
				if !st.Synced {
					t.Errorf("%+v: not synced", st)
				}
			}
		})
	}
}

// TestNewListTellsWhatIsGone: after a gap in the watch, what is not in the new list is gone, and what is as it was is
// not said again.
func TestNewListTellsWhatIsGone(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	f.lists[services] = serviceList(10, serviceAt(4, "first"), serviceAt(5, "second"))
	_, sink := start(t, f, nil)
	sink.sees("both", func() bool { return sink.synced == 1 && len(sink.services) == 2 })
	f.set(func() { f.lists[services] = serviceList(20, serviceAt(4, "first")) })
	f.expire(services)
	sink.sees("second gone", func() bool { return len(sink.services) == 1 })
	sink.mu.Lock()
	defer sink.mu.Unlock()
	last := sink.batches[len(sink.batches)-1]
	if gone, told := last.Services[second]; !told || gone != nil || len(last.Services) != 1 {
		t.Errorf("after the new list: %v, want only that %s is gone", last.Services, second)
	}
}

func TestChangesOfAWatch(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	_, sink := start(t, f, nil)
	sink.sees("sync", func() bool { return sink.synced == 1 })
	f.events[services] <- watch.Event{Type: watch.Added, Object: serviceAt(11, "first")}
	sink.sees("added", func() bool { return sink.services[first] != nil })
	changed := serviceAt(12, "first")
	changed.Spec.ClusterIP = "10.96.0.8"
	f.events[services] <- watch.Event{Type: watch.Modified, Object: changed}
	sink.sees("modified", func() bool { return sink.services[first].Spec.ClusterIP == "10.96.0.8" })
	f.events[services] <- watch.Event{Type: watch.Deleted, Object: changed}
	sink.sees("deleted", func() bool { return len(sink.services) == 0 })
}

// TestFailedListsChangeNothing: whatever a list fails with, what is known stays, and it shows how old it is.
func TestFailedListsChangeNothing(t *testing.T) {
	t.Parallel()
	for _, status := range []int{http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusForbidden,
		http.StatusServiceUnavailable, http.StatusGone} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			t.Parallel()
			f := newFakeAPI(t)
			f.lists[services] = serviceList(10, serviceAt(4, "first"))
			s, sink := start(t, f, nil)
			sink.sees("sync", func() bool { return sink.synced == 1 && f.watched(services) == 1 })
			batches := len(sink.batches)
			f.set(func() { f.fail[services] = status })
			f.expire(services)
			sink.sees("failure", func() bool {
				st := s.Staleness()[0]
				return st.Resource == services && !st.Watching && strings.Contains(st.Failure, "list")
			})
			time.Sleep(100 * time.Millisecond)
			sink.mu.Lock()
			if len(sink.batches) != batches {
				t.Errorf("a failed list gave %+v", sink.batches[batches:])
			}
			sink.mu.Unlock()
			f.set(func() {
				f.fail[services], f.lists[services] = 0, serviceList(20, serviceAt(4, "first"), serviceAt(15, "second"))
			})
			sink.sees("the end of it", func() bool { return len(sink.services) == 2 })
			sink.sees("a watch", func() bool { st := s.Staleness()[0]; return st.Watching && st.Failure == "" && st.Age >= 0 })
		})
	}
}

// TestSilentWatchIsRenewed: a watch through which not even bookmarks come is given up, though its connection is open.
func TestSilentWatchIsRenewed(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	_, sink := start(t, f, func(c *Config) { c.Silence = 1200 * time.Millisecond })
	sink.sees("sync", func() bool { return sink.synced == 1 })
	sink.sees("another watch", func() bool { return f.watched(services) >= 2 })
	f.events[services] <- watch.Event{Type: watch.Added, Object: serviceAt(11, "first")}
	sink.sees("a change through it", func() bool { return len(sink.services) == 1 })
}

func TestMissingNodeIsReported(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	var mu sync.Mutex
	var reported []source.Finding
	_, sink := start(t, f, func(c *Config) {
		c.Report = func(f source.Finding) {
			mu.Lock()
			defer mu.Unlock()
			reported = append(reported, f)
		}
	})
	sink.sees("sync without a Node", func() bool { return sink.synced == 1 })
	mu.Lock()
	defer mu.Unlock()
	if len(reported) != 1 || reported[0].Object != "Node n1" || reported[0].Severity != source.Problem {
		t.Errorf("reported %v, want one problem of Node n1", reported)
	}
}

func TestSourceRunsOnce(t *testing.T) {
	t.Parallel()
	s, sink := start(t, newFakeAPI(t), nil)
	sink.sees("sync", func() bool { return sink.synced == 1 })
	if err := s.Run(t.Context(), sink); err == nil {
		t.Error("a second Run was accepted")
	}
}

// TestNodeIsNotWaitedForForever: without the right to read Nodes, Services are delivered all the same.
func TestNodeIsNotWaitedForForever(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	f.fail[nodes] = http.StatusForbidden
	f.lists[services] = serviceList(10, serviceAt(4, "first"))
	_, sink := start(t, f, func(c *Config) { c.NodeTimeout = 100 * time.Millisecond })
	sink.sees("sync", func() bool { return sink.synced == 1 && len(sink.services) == 1 })
	f.set(func() { f.fail[nodes], f.lists[nodes] = 0, nodeList("n1") })
	sink.sees("the Node", func() bool { return sink.batches[len(sink.batches)-1].Nodes["n1"] != nil })
	sink.sees("Synced once", func() bool { return sink.synced == 1 })
}
