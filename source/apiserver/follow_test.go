package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"path"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/source"
)

// TestFollowsWhatThereIs: whatever the API server does, and however watches and lists fall together with changes, what has been told of in the
// end is what there is; and nothing is told of twice.
func TestFollowsWhatThereIs(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { followAtRandom(t, rand.New(rand.NewPCG(seed, 0))) })
		})
	}
}

func followAtRandom(t *testing.T, random *rand.Rand) {
	h := newHistory()
	h.streams = random.IntN(4) > 0
	travel := time.Duration(random.IntN(30)+1) * time.Millisecond
	h.travel = func(string) time.Duration { return rand.N(travel) }
	change := func() { h.change(fmt.Sprint("s", random.IntN(12)), random.IntN(3) == 0) }
	for range random.IntN(20) {
		change()
	}
	told := h.follow(t)
	for range random.IntN(60) {
		switch random.IntN(12) {
		case 0:
			h.end(true)
		case 1:
			h.end(false)
		case 2:
			h.set(func() { h.refused = syscall.ECONNREFUSED })
		case 3:
			h.set(func() { h.status = http.StatusServiceUnavailable })
		case 4:
			h.set(func() { h.refused, h.status = nil, 0 })
		case 5:
			h.set(func() { h.pace = time.Duration(random.IntN(3)) * 10 * time.Millisecond })
		case 6:
			h.set(func() { h.streams = !h.streams })
		default:
			change()
		}
		switch random.IntN(4) { // in simulated time: other things happen, or are under way, meanwhile
		case 0:
			synctest.Wait()
		case 1:
			time.Sleep(time.Duration(random.IntN(50)) * time.Millisecond) // see above
		case 2:
			time.Sleep(time.Duration(random.IntN(5000)) * time.Millisecond) // see above
		}
	}
	h.set(func() { h.refused, h.status = nil, 0 })
	time.Sleep(time.Minute) // in simulated time, longer than all pauses
	synctest.Wait()
	told.check(h)
	change()
	synctest.Wait()
	told.check(h)
}

// TestChangesWhileListed: a change that comes while everything is listed, because the API server has forgotten the version, is told of at once;
// what came between the watches, with the list; and what is as it was, not again.
func TestChangesWhileListed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHistory()
		for i := range 20 {
			h.change(fmt.Sprint("s", i), false)
		}
		told := h.follow(t)
		time.Sleep(time.Minute) // in simulated time: a watch has lasted
		h.set(func() { h.pace = time.Second })
		begun := time.Now()
		h.end(true, "between", "a", "s0")
		time.Sleep(2*spread + 10*time.Second) // in simulated time: half of the list has come
		for _, name := range []string{"s0", "s1", "s19", "other"} {
			h.change(name, false)
		}
		h.change("s2", true)
		h.change("s18", true)
		h.change("a", true)
		synctest.Wait()
		for _, name := range []string{"s0", "s1", "s19", "other", "s2", "s18"} {
			if _, at := told.told(name); !at.Equal(time.Now()) {
				t.Errorf("%s was last told of at %v, want now", name, at)
			}
		}
		if version, _ := told.told("between"); version != "" {
			t.Error("what differs is told of before the list is complete")
		}
		time.Sleep(time.Minute) // in simulated time: the list is complete
		if _, at := told.told("between"); at.Sub(begun) > 2*spread+25*time.Second {
			t.Errorf("the list took %v", at.Sub(begun))
		}
		told.check(h)
	})
}

// TestListedOnceWatched: what changes before there is a watch again is in the list, however long that takes.
func TestListedOnceWatched(t *testing.T) {
	t.Parallel()
	for _, takes := range []time.Duration{time.Second, beginning, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			h := newHistory()
			told := h.follow(t)
			time.Sleep(time.Minute) // in simulated time: a watch has lasted
			h.set(func() {
				h.travel = func(what string) time.Duration {
					if what == "watchfalse" {
						return takes
					}
					return 0
				}
			})
			h.end(true)
			time.Sleep(takes / 2) // in simulated time: no watch has begun
			h.change("new", false)
			time.Sleep(2 * time.Minute) // in simulated time, longer than all pauses
			told.check(h)
		})
	}
}

// TestTimeToChange: how long a change takes that comes at the worst moment, in which the API server answers nothing.
func TestTimeToChange(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what        string
		trouble     func(*history)
		most, least time.Duration
	}{
		{"watches end", func(h *history) { h.end(false, "new") }, 0, 0},
		{"watches end and versions are forgotten", func(h *history) { h.end(true, "new") }, 2 * spread, 0},
		{"the same without streamed lists", func(h *history) {
			h.set(func() { h.streams = false })
			h.end(true, "new")
		}, 2 * shortest, shortest},
		{"connections are refused for ten minutes", func(h *history) {
			h.set(func() { h.refused = syscall.ECONNREFUSED })
			h.end(false)
			time.Sleep(10 * time.Minute) // in simulated time
			h.set(func() { h.refused = nil; h.resources[services].change("new", false) })
		}, 2 * longestUnreached, 0},
		{"the same, and versions are forgotten", func(h *history) {
			h.set(func() { h.refused = syscall.ECONNREFUSED })
			h.end(true)
			time.Sleep(10 * time.Minute) // in simulated time
			h.set(func() { h.refused = nil; h.resources[services].change("new", false) })
		}, 2*longestUnreached + 2*spread, 0},
		{"the API server is overloaded for ten minutes", func(h *history) {
			h.set(func() { h.status = http.StatusServiceUnavailable })
			h.end(false)
			time.Sleep(10 * time.Minute) // in simulated time
			h.set(func() { h.status = 0; h.resources[services].change("new", false) })
		}, 2 * longest, 0},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			for range 5 {
				synctest.Test(t, func(t *testing.T) {
					h := newHistory()
					told := h.follow(t)
					time.Sleep(time.Minute) // in simulated time: a watch has lasted
					c.trouble(h)
					begun := time.Now()
					time.Sleep(time.Minute) // in simulated time, longer than all pauses
					told.check(h)
					_, at := told.told("new")
					if took := at.Sub(begun); took > c.most || took < c.least {
						t.Errorf("it took %v, want %v to %v", took, c.least, c.most)
					}
				})
			}
		})
	}
}

// TestFewRequests: an API server that can't do what is asked of it is not asked more often than it can bear.
func TestFewRequests(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		trouble func(*history)
		most    int // requests for all resources in ten minutes
	}{
		"refused":    {func(h *history) { h.refused = syscall.ECONNREFUSED }, 4 * 600 / 2},
		"overloaded": {func(h *history) { h.status = http.StatusServiceUnavailable }, 4 * 600 / 4},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				h := newHistory()
				h.follow(t)
				time.Sleep(time.Minute) // in simulated time: a watch has lasted
				h.set(func() { c.trouble(h); h.asked = nil })
				h.end(true)
				time.Sleep(10 * time.Minute) // in simulated time
				if n := h.count(""); n > c.most {
					t.Errorf("%d requests in ten minutes, want %d at most", n, c.most)
				}
			})
		})
	}
}

// TestListsInTurn: what is listed again, is after the EndpointSlices, but does not wait for ever for a list of them that hangs.
func TestListsInTurn(t *testing.T) {
	t.Parallel()
	const n, pace = 30, 10 * time.Millisecond
	for _, hangs := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := newHistory()
			h.set(func() {
				for i := range n {
					h.resources[endpointSlices].change(fmt.Sprint(i), false)
				}
			})
			told, asked, again := &sees{t: t, services: map[string]string{}, came: map[string]time.Time{}}, map[string]time.Time{}, false
			client := answeredBy(t, func(r *http.Request) (*http.Response, error) {
				if r.URL.Query().Get("sendInitialEvents") == "true" {
					h.set(func() { asked[path.Base(r.URL.Path)] = time.Now() })
					if again && hangs && path.Base(r.URL.Path) == endpointSlices {
						<-r.Context().Done()
						return nil, r.Context().Err()
					}
				}
				return h.answer(r)
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				_ = New(Config{Client: client, NodeName: "n1", Log: slog.New(slog.DiscardHandler)}).Run(ctx, told)
			}()
			time.Sleep(time.Minute) // in simulated time: a watch has lasted
			h.set(func() { h.pace, again = pace, true })
			begun := time.Now()
			h.end(true, "new")
			time.Sleep(time.Minute / 2) // in simulated time, longer than all pauses
			told.check(h)
			var first, second time.Duration
			h.set(func() { first, second = asked[endpointSlices].Sub(begun), asked[services].Sub(begun) })
			if least := first + n*pace; !hangs && (first >= spread || second < least || second > least+2*spread) {
				t.Errorf("EndpointSlices were listed after %v, Services after %v", first, second)
			}
			if hangs && (second < longestTurn || second > longestTurn+2*spread) {
				t.Errorf("EndpointSlices can't be listed, Services were after %v", second)
			}
			cancel()
			synctest.Wait()
		})
	}
}

// TestForgottenAgain: an API server that forgets versions all the time is asked for lists at growing intervals.
func TestForgottenAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHistory()
		told := h.follow(t)
		time.Sleep(time.Minute) // in simulated time: a watch has lasted
		h.set(func() { h.asked = nil })
		for range 600 {
			h.end(true)
			time.Sleep(100 * time.Millisecond) // in simulated time
		}
		if n := h.count("watchtrue " + services); n > 60 {
			t.Errorf("%d lists in a minute", n)
		}
		h.change("new", false)
		time.Sleep(time.Minute) // in simulated time, longer than all pauses
		told.check(h)
	})
}

// TestListInParts: objects of the first list are passed on as they arrive, each once; what is gone from one attempt to the next is said to
// be. A later list is passed on as a whole.
func TestListInParts(t *testing.T) {
	told, batches, complete := map[types.NamespacedName]*v1.Service{}, 0, false
	s := newStore(resources(Config{Client: &Client{}})[0], func(_ *resource, b source.Batch, all bool) {
		batches, complete = batches+1, all
		for name, svc := range b.Services {
			if told[name] != nil && svc != nil {
				t.Errorf("%s comes again", name)
			}
			told[name] = svc
			if svc == nil {
				delete(told, name)
			}
		}
	})
	list := func(first, n int) {
		s.begin()
		for i := first; i < first+n; i++ {
			require.NoError(t, s.list(decoded(watch.Added, &v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(i), ResourceVersion: "1"}})))
		}
	}
	list(0, aheadSize+10) // This attempt breaks off.
	if len(told) != aheadSize || batches != 1 || complete {
		t.Errorf("%d have come in %d batches, complete: %t", len(told), batches, complete)
	}
	list(5, 2*aheadSize)
	s.complete(1)
	if len(told) != 2*aheadSize || told[types.NamespacedName{Namespace: "ns", Name: "4"}] != nil || !complete {
		t.Errorf("in the end there are %d, complete: %t", len(told), complete)
	}
	batches = 0
	list(5, 3*aheadSize)
	if batches != 0 {
		t.Errorf("a later list comes in parts")
	}
	if s.complete(1); len(told) != 3*aheadSize || batches != 1 {
		t.Errorf("after another list there are %d, in %d batches", len(told), batches)
	}
}
