package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/source"
)

// TestAnySchedule: whatever happens to several API servers, and on the way to them, nothing is passed on that is older than what was passed
// on before, nothing is said to be gone that was not, only what is complete is said to be, and in the end everything has come in time.
// NODEPROXY_SCHEDULES says how many schedules there are to be, and NODEPROXY_SCHEDULE which one. The pauses of the program are random, so
// one need not fail each time.
func TestAnySchedule(t *testing.T) {
	t.Parallel()
	first, n := uint64(0), uint64(300)
	if s := os.Getenv("NODEPROXY_SCHEDULES"); s != "" {
		n, _ = strconv.ParseUint(s, 10, 64)
	}
	if s := os.Getenv("NODEPROXY_SCHEDULE"); s != "" {
		first, _ = strconv.ParseUint(s, 10, 64)
		n = 1
	}
	for seed := first; seed < first+n; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { runSchedule(t, rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func runSchedule(t *testing.T, random *rand.Rand) {
	c := newCluster(random, 3+random.IntN(6))
	answer := roundTrip(c.RoundTrip)
	if random.IntN(2) == 0 {
		answer = inProtobuf(answer)
	}
	steps := random.IntN(60)
	_, got := c.follow(t, answer) // It draws from random, too, from here on.
	for range steps {
		c.mu.Lock()
		c.happen()
		pause := time.Duration(random.IntN(200)) * time.Millisecond
		switch random.IntN(8) {
		case 0:
			pause = time.Duration(random.IntN(10000)) * time.Millisecond
		case 1, 2, 3:
			pause = 0
		}
		c.mu.Unlock()
		time.Sleep(pause) // in simulated time: other things happen, or are under way, meanwhile
	}
	c.mu.Lock()
	c.troubles, c.pace, c.travel = nil, 0, 10*time.Millisecond
	for _, s := range c.servers {
		s.lag, s.ill = 0, none
		if s.streams == endless {
			s.streams = supported
		}
		s.see(c.version)
	}
	// Connections that hang do so for 20 seconds more, and pauses are up to ten seconds.
	wait := 35 * time.Second
	if c.lost != nil || c.silent {
		wait += 2 * DefaultSilence
	}
	c.mu.Unlock()
	time.Sleep(wait) // in simulated time
	synctest.Wait()
	got.check("in the end")
	c.mu.Lock()
	c.change("s1", false)
	c.change("new", false)
	c.mu.Unlock()
	time.Sleep(100 * time.Millisecond) // in simulated time: events come
	synctest.Wait()
	got.check("after another change")
	c.checkRequests(t)
}

// follow runs a follower of the Services until the test ends.
func (c *cluster) follow(t *testing.T, answer roundTrip) (*resource, *witness) {
	r := resources(Config{Client: answeredBy(t, answer), Log: slog.New(slog.DiscardHandler), Silence: DefaultSilence})[0]
	w := &witness{t: t, cluster: c, versions: map[string]int{}, last: map[string]int{}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		newFollower(r, newStore(r, w.deliver)).run(ctx)
		close(ended)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		synctest.Wait()
		if c.open != 0 {
			t.Errorf("%d watches are left", c.open)
		}
	})
	return r, w
}

// happen has something happen.
func (c *cluster) happen() {
	s := c.servers[c.random.IntN(len(c.servers))]
	switch c.random.IntN(30) {
	case 0:
		s.end()
	case 1:
		c.restart(s)
	case 2, 13, 14, 15: // They forget what was, and are of different speed from then on; and much changes.
		for range 10 {
			time.AfterFunc(c.upTo(time.Second), func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.changeAny(4)
			})
		}
		for _, s := range c.servers {
			c.restart(s)
			s.lag = c.upTo(time.Duration(c.random.IntN(3)) * 3 * time.Second)
		}
	case 3:
		s.oldest = s.seen
	case 16:
		s.ill = trouble(c.random.IntN(int(firstStatus) + len(statuses)))
		s.end()
	case 17:
		s.ill = none
	case 4, 5:
		s.lag = c.upTo(5 * time.Second)
	case 6:
		c.troubles = []trouble{trouble(c.random.IntN(int(firstStatus) + len(statuses)))}
	case 7:
		c.troubles = append(c.troubles, trouble(c.random.IntN(int(firstStatus)+len(statuses))))
	case 8, 9:
		c.troubles = nil
	case 10:
		c.pace = c.upTo(time.Second)
	case 11:
		if c.random.IntN(4) == 0 {
			s.streams = support(c.random.IntN(4))
			c.silent = c.silent || s.streams == endless
		}
	case 12:
		if c.random.IntN(4) == 0 {
			c.restore()
		}
	default:
		c.changeAny(8)
	}
}

// changeAny changes one of so many objects, or removes it, if it is not the first.
func (c *cluster) changeAny(n int) {
	i := c.random.IntN(n)
	c.change(fmt.Sprint("s", i), i > 0 && c.random.IntN(3) == 0)
}

// witness sees what a follower passes on, and compares it with what there is.
type witness struct {
	t        *testing.T
	cluster  *cluster
	versions map[string]int // of what was passed on
	last     map[string]int // the version of each object's last state, also of one that is gone
	complete bool
}

func (w *witness) deliver(_ *resource, b source.Batch, complete bool) {
	c := w.cluster
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, svc := range b.Services {
		w.see(name.Name, svc)
	}
	if !complete {
		return
	}
	w.complete = true
	for _, log := range [][]change{c.log, c.lost} {
		for i := range log {
			if maps.Equal(objects(log[:i+1], log[i].version), w.versions) {
				return
			}
		}
	}
	if c.lost == nil { // After that, a watch from before may be beside a list from then.
		w.t.Errorf("what was passed on is said to be complete, and never was so: %v", w.versions)
	}
}

// see takes what was passed on of an object.
func (w *witness) see(name string, svc *v1.Service) {
	log, last := w.cluster.log, w.last[name]
	if svc == nil {
		delete(w.versions, name)
		i := slices.IndexFunc(log, func(o change) bool { return o.name == name && o.kind == "DELETED" && o.version > last })
		if i >= 0 {
			w.last[name] = log[i].version
		} else if delete(w.last, name); w.cluster.lost == nil || name == "s0" {
			w.t.Errorf("%s is said to be gone, which it was not since %d", name, last)
		}
		return
	}
	version, _ := strconv.Atoi(svc.ResourceVersion)
	if back := w.cluster.lost != nil && last > 100000 && version < 100000; version <= last && !back {
		w.t.Errorf("%s is passed on as of %d, after it was as of %d", name, version, last)
	}
	w.versions[name], w.last[name] = version, version
}

// check compares what was passed on with what there is.
func (w *witness) check(when string) {
	w.t.Helper()
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	if want := objects(w.cluster.log, w.cluster.version); !w.complete || !maps.Equal(want, w.versions) {
		w.t.Errorf("%s (restored: %t), it was told of %v, complete: %t; there is %v", when, w.cluster.lost != nil, w.versions, w.complete, want)
	}
	if w.cluster.open != 1 {
		w.t.Errorf("%s, there are %d watches", when, w.cluster.open)
	}
}

// checkRequests looks for too many requests at a time.
func (c *cluster) checkRequests(t *testing.T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const n = 30
	for i := n; i < len(c.asked); i++ {
		if d := c.asked[i].Sub(c.asked[i-n]); d < time.Second {
			t.Errorf("%d requests within %v", n, d)
			return
		}
	}
}
