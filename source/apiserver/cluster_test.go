package apiserver

import (
	"context"
	"log/slog"
	"maps"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

// cluster is one of Services without any content.
type cluster struct{ *apiservertest.Cluster }

// newCluster returns a cluster with one API server, which changes nothing by chance.
func newCluster() cluster {
	return cluster{apiservertest.NewCluster(rand.New(rand.NewPCG(1, 1)), 1)}
}

// with calls f with the cluster locked.
func (c cluster) with(f func()) {
	c.Lock()
	defer c.Unlock()
	f()
}

// put creates or changes a Service, and remove removes it; the cluster is locked.
func (c cluster) put(name string) {
	c.Put(services, &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}})
}

func (c cluster) remove(name string) { c.Delete(services, types.NamespacedName{Name: name}) }

// change creates or changes a Service.
func (c cluster) change(name string) { c.with(func() { c.put(name) }) }

// end ends all watches, and forgets the versions from which they would go on if they are to be too old. Services change at the same moment,
// before there can be another watch.
func (c cluster) end(forget bool, changes ...string) {
	c.with(func() {
		for _, s := range c.Servers {
			if forget {
				c.Version++
				c.Restart(s)
			} else {
				s.End()
			}
		}
		for _, name := range changes {
			c.put(name)
		}
	})
}

// suffer sets what happens to each request.
func (c cluster) suffer(what apiservertest.Trouble) {
	c.with(func() {
		for _, s := range c.Servers {
			s.Ill = what
		}
	})
}

// versions returns the versions of the Services that there are as of a version, after a history.
func versions(log []apiservertest.Change, as int) map[string]int {
	out := map[string]int{}
	for name, o := range apiservertest.Objects(log, services, as) {
		out[name.Name] = o.Version
	}
	return out
}

// listed returns when a resource was last asked for as a streamed list.
func (c cluster) listed(resource string) (at time.Time) {
	c.Lock()
	defer c.Unlock()
	for _, r := range c.Asked {
		if r.Verb == "watchtrue" && r.Resource == resource {
			at = r.At
		}
	}
	return at
}

// until runs something until the test ends.
func until(t *testing.T, run func(context.Context)) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		run(ctx)
		close(ended)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// follow runs a Source of the cluster until the test ends.
func (c cluster) follow(t *testing.T) *sees { return c.followBy(t, c.RoundTrip) }

// followBy does so through something that answers in place of the cluster.
func (c cluster) followBy(t *testing.T, answer roundTrip) *sees {
	s := &sees{t: t, services: map[string]int{}, came: map[string]time.Time{}}
	src := New(Config{Client: answeredBy(t, answer), NodeName: "n1", Log: slog.New(slog.DiscardHandler)})
	until(t, func(ctx context.Context) { _ = src.Run(ctx, s) })
	return s
}

// followServices runs a follower of the Services until the test ends.
func (c cluster) followServices(t *testing.T, answer roundTrip) (*follower, *witness) {
	t.Cleanup(func() {
		synctest.Wait()
		if c.Open != 0 {
			t.Errorf("%d answers have not ended", c.Open)
		}
	})
	r := resources(Config{Client: answeredBy(t, answer), Log: slog.New(slog.DiscardHandler), Silence: DefaultSilence})[0]
	w := &witness{t: t, cluster: c, versions: map[string]int{}, last: map[string]int{}}
	f := newFollower(r, newStore(r, w.deliver))
	until(t, f.run)
	return f, w
}

// sees are the Services that a sink has been told of, with their versions.
type sees struct {
	t        *testing.T
	mu       sync.Mutex
	services map[string]int
	came     map[string]time.Time // when each was last told of
}

func (s *sees) Apply(b source.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, svc := range b.Services {
		s.came[name.Name] = time.Now()
		if svc == nil {
			delete(s.services, name.Name)
			continue
		}
		version, _ := strconv.Atoi(svc.ResourceVersion)
		if s.services[name.Name] == version {
			s.t.Errorf("%s is told again as it was", name)
		}
		s.services[name.Name] = version
	}
}

// told returns the version of a Service that the sink was told of, and when that came.
func (s *sees) told(name string) (version int, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.services[name], s.came[name]
}

// check compares with what there is.
func (s *sees) check(c cluster) {
	s.t.Helper()
	c.Lock()
	defer c.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if want := versions(c.Log, c.Version); !maps.Equal(s.services, want) {
		s.t.Errorf("told of %v, want %v", s.services, want)
	}
}
