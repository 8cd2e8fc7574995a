package apiserver

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"path"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
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
	c := newCluster()
	api := c.Servers[0]
	if random.IntN(4) == 0 {
		api.Streams = apiservertest.Unknown
	}
	travel, pace := random.IntN(30)+1, 0
	c.Travel = func(apiservertest.Request) time.Duration { return rand.N(time.Duration(travel) * time.Millisecond) }
	c.Pace = func() time.Duration { return time.Duration(pace) * 10 * time.Millisecond }
	change := func() {
		name := fmt.Sprint("s", random.IntN(12))
		c.with(func() {
			if c.put(name); random.IntN(3) == 0 {
				c.remove(name)
			}
		})
	}
	for range random.IntN(20) {
		change()
	}
	told := c.follow(t)
	for range random.IntN(60) {
		switch random.IntN(12) {
		case 0:
			c.end(true)
		case 1:
			c.end(false)
		case 2:
			c.suffer(apiservertest.Refused)
		case 3:
			c.suffer(apiservertest.Unavailable)
		case 4:
			c.suffer(apiservertest.None)
		case 5:
			c.with(func() { pace = random.IntN(3) })
		case 6:
			c.with(func() { api.Streams = apiservertest.Unknown - api.Streams })
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
	c.suffer(apiservertest.None)
	time.Sleep(time.Minute) // in simulated time, longer than all pauses
	synctest.Wait()
	told.check(c)
	change()
	synctest.Wait()
	told.check(c)
}

// TestChangesWhileListed: a change that comes while everything is listed, because the API server has forgotten the version, is told of at once;
// what came between the watches, with the list; and what is as it was, not again.
func TestChangesWhileListed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		for i := range 20 {
			c.change(fmt.Sprint("s", i))
		}
		told := c.follow(t)
		time.Sleep(time.Minute) // in simulated time: a watch has lasted
		c.with(func() { c.Pace = func() time.Duration { return time.Second } })
		begun := time.Now()
		c.end(true, "between", "a", "s0")
		time.Sleep(2*spread + 10*time.Second) // in simulated time: half of the list has come
		for _, name := range []string{"s0", "s1", "s19", "other"} {
			c.change(name)
		}
		c.with(func() {
			c.remove("s2")
			c.remove("s18")
			c.remove("a")
		})
		synctest.Wait()
		for _, name := range []string{"s0", "s1", "s19", "other", "s2", "s18"} {
			if _, at := told.told(name); !at.Equal(time.Now()) {
				t.Errorf("%s was last told of at %v, want now", name, at)
			}
		}
		if version, _ := told.told("between"); version != 0 {
			t.Error("what differs is told of before the list is complete")
		}
		time.Sleep(time.Minute) // in simulated time: the list is complete
		if _, at := told.told("between"); at.Sub(begun) > 2*spread+25*time.Second {
			t.Errorf("the list took %v", at.Sub(begun))
		}
		told.check(c)
	})
}

// TestListedOnceWatched: what changes before there is a watch again is in the list, however long that takes.
func TestListedOnceWatched(t *testing.T) {
	t.Parallel()
	for _, takes := range []time.Duration{time.Second, beginning, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			told := c.follow(t)
			time.Sleep(time.Minute) // in simulated time: a watch has lasted
			c.with(func() {
				c.Travel = func(r apiservertest.Request) time.Duration {
					if r.Verb == "watchfalse" {
						return takes
					}
					return 0
				}
			})
			c.end(true)
			time.Sleep(takes / 2) // in simulated time: no watch has begun
			c.change("new")
			time.Sleep(2 * time.Minute) // in simulated time, longer than all pauses
			told.check(c)
		})
	}
}

// TestTimeToChange: how long a change takes that comes at the worst moment, in which the API server answers nothing.
func TestTimeToChange(t *testing.T) {
	t.Parallel()
	// For ten minutes, something happens to each request.
	long := func(what apiservertest.Trouble, forget bool) func(cluster) {
		return func(c cluster) {
			c.suffer(what)
			c.end(forget)
			time.Sleep(10 * time.Minute) // in simulated time
			c.with(func() {
				c.Servers[0].Ill = apiservertest.None
				c.put("new")
			})
		}
	}
	for _, test := range []struct {
		what        string
		trouble     func(cluster)
		most, least time.Duration
	}{
		{"watches end", func(c cluster) { c.end(false, "new") }, 0, 0},
		{"watches end and versions are forgotten", func(c cluster) { c.end(true, "new") }, 2 * spread, 0},
		{"the same without streamed lists", func(c cluster) {
			c.with(func() { c.Servers[0].Streams = apiservertest.Unknown })
			c.end(true, "new")
		}, 2 * shortest, shortest},
		{"connections are refused for ten minutes", long(apiservertest.Refused, false), 2 * longestUnreached, 0},
		{"the same, and versions are forgotten", long(apiservertest.Refused, true), 2*longestUnreached + 2*spread, 0},
		{"the API server is overloaded for ten minutes", long(apiservertest.Unavailable, false), 2 * longest, 0},
	} {
		t.Run(test.what, func(t *testing.T) {
			t.Parallel()
			for range 5 {
				synctest.Test(t, func(t *testing.T) {
					c := newCluster()
					told := c.follow(t)
					time.Sleep(time.Minute) // in simulated time: a watch has lasted
					test.trouble(c)
					begun := time.Now()
					time.Sleep(time.Minute) // in simulated time, longer than all pauses
					told.check(c)
					_, at := told.told("new")
					if took := at.Sub(begun); took > test.most || took < test.least {
						t.Errorf("it took %v, want %v to %v", took, test.least, test.most)
					}
				})
			}
		})
	}
}

// TestFewRequests: an API server that can't do what is asked of it is not asked more often than it can bear.
func TestFewRequests(t *testing.T) {
	t.Parallel()
	for what, most := range map[apiservertest.Trouble]int{ // requests for all resources in ten minutes
		apiservertest.Refused: 4 * 600 / 2, apiservertest.Unavailable: 4 * 600 / 4,
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			c.follow(t)
			time.Sleep(time.Minute) // in simulated time: a watch has lasted
			c.suffer(what)
			c.with(func() { c.Asked = nil })
			c.end(true)
			time.Sleep(10 * time.Minute) // in simulated time
			c.Lock()
			defer c.Unlock()
			if n := len(c.Asked); n > most {
				t.Errorf("%d requests in ten minutes, want %d at most", n, most)
			}
		})
	}
}

// TestListsInTurn: what is listed again, is after the EndpointSlices, but does not wait for ever for a list of them that hangs.
func TestListsInTurn(t *testing.T) {
	t.Parallel()
	const n, pace = 30, 10 * time.Millisecond
	for _, hangs := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c, again := newCluster(), atomic.Bool{}
			for i := range n {
				c.Put(endpointSlices, &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i)}})
			}
			told := c.followBy(t, func(r *http.Request) (*http.Response, error) {
				q := r.URL.Query()
				if again.Load() && hangs && path.Base(r.URL.Path) == endpointSlices && q.Get("sendInitialEvents") == "true" {
					<-r.Context().Done()
					return nil, r.Context().Err()
				}
				return c.RoundTrip(r)
			})
			time.Sleep(time.Minute) // in simulated time: a watch has lasted
			again.Store(true)
			c.with(func() { c.Pace, c.Asked = func() time.Duration { return pace }, nil })
			begun := time.Now()
			c.end(true, "new")
			time.Sleep(time.Minute / 2) // in simulated time, longer than all pauses
			told.check(c)
			first, second := c.listed(endpointSlices).Sub(begun), c.listed(services).Sub(begun)
			if least := first + n*pace; !hangs && (first >= spread || second < least || second > least+2*spread) {
				t.Errorf("EndpointSlices were listed after %v, Services after %v", first, second)
			}
			if hangs && (second < longestTurn || second > longestTurn+2*spread) {
				t.Errorf("EndpointSlices can't be listed, Services were after %v", second)
			}
		})
	}
}

// TestForgottenAgain: an API server that forgets versions all the time is asked for lists at growing intervals.
func TestForgottenAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		told := c.follow(t)
		time.Sleep(time.Minute) // in simulated time: a watch has lasted
		c.with(func() { c.Asked = nil })
		for range 600 {
			c.end(true)
			time.Sleep(100 * time.Millisecond) // in simulated time
		}
		lists := 0
		c.with(func() {
			for _, r := range c.Asked {
				if r.Verb == "watchtrue" && r.Resource == services {
					lists++
				}
			}
		})
		if lists > 60 {
			t.Errorf("%d lists in a minute", lists)
		}
		c.change("new")
		time.Sleep(time.Minute) // in simulated time, longer than all pauses
		told.check(c)
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
