package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"

	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

// TestAnySchedule: whatever happens to several API servers, and on the way to them, nothing is passed on that is older than what was passed
// on before, nothing is said to be gone that was not, only what is complete is said to be, and in the end everything has come in time.
// NODEPROXY_SCHEDULES says how many schedules there are to be, and NODEPROXY_SCHEDULE which one. The pauses of the program are random, so
// one need not fail each time. A verification at any time finds what watches have lost, and nothing else.
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
	c := schedule{cluster: cluster{apiservertest.NewCluster(random, 1+random.IntN(3))}, travel: upTo(random, 300*time.Millisecond)}
	c.Travel = func(apiservertest.Request) time.Duration { return upTo(random, c.travel) }
	c.Pace = func() time.Duration { return upTo(random, c.pace) }
	for i := range 3 + random.IntN(6) {
		c.put(fmt.Sprint("s", i))
	}
	c.Backup()
	answer := roundTrip(c.RoundTrip)
	if random.IntN(2) == 0 {
		answer = inProtobuf(answer)
	}
	steps, loses := random.IntN(60), random.IntN(2) == 0
	var verifications sync.WaitGroup
	defer verifications.Wait()
	f, got := c.followServices(t, answer) // It draws from random, too, from here on.
	c.follower, c.lister = f, resources(Config{Client: answeredBy(t, answer), Log: slog.New(slog.DiscardHandler), Silence: DefaultSilence})[0]
	c.with(func() {
		if c.lost = map[string]bool{}; loses {
			c.Lose, got.loses = c.lose, true
		}
	})
	for range steps {
		c.Lock()
		if c.Random.IntN(10) == 0 {
			verifications.Go(func() { c.verify(t) })
		}
		c.happen()
		pause := time.Duration(random.IntN(200)) * time.Millisecond
		switch random.IntN(8) {
		case 0:
			pause = time.Duration(random.IntN(10000)) * time.Millisecond
		case 1, 2, 3:
			pause = 0
		}
		c.Unlock()
		time.Sleep(pause) // in simulated time: other things happen, or are under way, meanwhile
	}
	c.Lock()
	c.Lose = nil
	c.Troubles, c.pace, c.travel = nil, 0, 10*time.Millisecond
	for _, s := range c.Servers {
		s.Lag, s.Ill = 0, apiservertest.None
		if s.Streams == apiservertest.Endless {
			s.Streams = apiservertest.Supported
		}
		s.See(c.Version)
	}
	// Connections that hang do so for 20 seconds more, and pauses are up to ten seconds.
	wait := 35 * time.Second
	if c.Lost != nil || c.silent {
		wait += 2 * DefaultSilence
	}
	c.Unlock()
	time.Sleep(wait) // in simulated time
	synctest.Wait()
	c.verify(t) // until the next bookmark
	synctest.Wait()
	got.check("in the end")
	if found := c.verify(t); len(found) > 0 {
		t.Errorf("the next verification finds %v", found)
	}
	c.with(func() {
		c.put("s1")
		c.put("new")
	})
	time.Sleep(100 * time.Millisecond) // in simulated time: events come
	synctest.Wait()
	got.check("after another change")
	c.checkRequests(t)
}

// schedule is a cluster to which things happen.
type schedule struct {
	cluster
	silent       bool          // There was an answer that does not end.
	travel, pace time.Duration // the longest
	follower     *follower
	lister       *resource       // for verifications
	lost         map[string]bool // the Services of which a watch has lost something
}

// lose loses one change in ten.
func (c *schedule) lose(o apiservertest.Change) bool {
	loses := c.Random.IntN(10) == 0
	c.lost[o.Name.Name] = c.lost[o.Name.Name] || loses
	return loses
}

// verify verifies once, and returns what that has found. It is an error if no watch has lost it.
func (c *schedule) verify(t *testing.T) []source.Difference {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	_, found, err := c.follower.verify(ctx, c.lister)
	t.Logf("a verification finds %v, and ends with %v", found, err)
	c.Lock()
	defer c.Unlock()
	for _, d := range found {
		if _, name, _ := strings.Cut(d.Object, " "); !c.lost[name] {
			t.Errorf("a verification finds %s, which no watch has lost", d)
		}
	}
	return found
}

func upTo(random *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(random.Int64N(max(int64(d), 1)))
}

// happen has something happen.
func (c *schedule) happen() {
	s := c.Servers[c.Random.IntN(len(c.Servers))]
	trouble := apiservertest.Trouble(c.Random.IntN(apiservertest.Troubles))
	switch c.Random.IntN(30) {
	case 0:
		s.End()
	case 1:
		c.Restart(s)
	case 2, 13, 14, 15: // They forget what was, and are of different speed from then on; and much changes.
		for range 10 {
			time.AfterFunc(upTo(c.Random, time.Second), func() { c.with(func() { c.changeAny(4) }) })
		}
		for _, s := range c.Servers {
			c.Restart(s)
			s.Lag = upTo(c.Random, time.Duration(c.Random.IntN(3))*3*time.Second)
		}
	case 3:
		s.Oldest = s.Seen
	case 16:
		s.Ill = trouble
		s.End()
	case 17:
		s.Ill = apiservertest.None
	case 4, 5:
		s.Lag = upTo(c.Random, 5*time.Second)
	case 6:
		c.Troubles = []apiservertest.Trouble{trouble}
	case 7:
		c.Troubles = append(c.Troubles, trouble)
	case 8, 9:
		c.Troubles = nil
	case 10:
		c.pace = upTo(c.Random, time.Second)
	case 11:
		if c.Random.IntN(4) == 0 {
			s.Streams = apiservertest.Support(c.Random.IntN(4))
			c.silent = c.silent || s.Streams == apiservertest.Endless
		}
	case 12:
		if c.Random.IntN(4) == 0 {
			c.Restore()
		}
	default:
		c.changeAny(8)
	}
}

// changeAny changes one of so many objects, or removes it, if it is not the first.
func (c *schedule) changeAny(n int) {
	i := c.Random.IntN(n)
	if name := fmt.Sprint("s", i); i > 0 && c.Random.IntN(3) == 0 {
		c.remove(name)
	} else {
		c.put(name)
	}
}

// witness sees what a follower passes on, and compares it with what there is.
type witness struct {
	t        *testing.T
	cluster  cluster
	versions map[string]int // of what was passed on
	last     map[string]int // the version of each object's last state, also of one that is gone
	complete bool
	loses    bool // Watches may lose something.
}

func (w *witness) deliver(_ *resource, b source.Batch, complete bool) {
	c := w.cluster
	c.Lock()
	defer c.Unlock()
	for name, svc := range b.Services {
		w.see(name.Name, svc)
	}
	if !complete {
		return
	}
	w.complete = true
	for _, log := range [][]apiservertest.Change{c.Log, c.Lost} {
		for i := range len(log) + 1 {
			if maps.Equal(versions(log[:i], math.MaxInt), w.versions) {
				return
			}
		}
	}
	if c.Lost == nil && !w.loses { // After that, a watch from before may be beside a list from then.
		w.t.Errorf("what was passed on is said to be complete, and never was so: %v", w.versions)
	}
}

// see takes what was passed on of an object.
func (w *witness) see(name string, svc *v1.Service) {
	log, last := w.cluster.Log, w.last[name]
	if svc == nil {
		delete(w.versions, name)
		i := slices.IndexFunc(log, func(o apiservertest.Change) bool {
			return o.Name.Name == name && o.Kind == watch.Deleted && o.Version > last
		})
		if i >= 0 {
			w.last[name] = log[i].Version
		} else if delete(w.last, name); w.cluster.Lost == nil || name == "s0" {
			w.t.Errorf("%s is said to be gone, which it was not since %d", name, last)
		}
		return
	}
	version, _ := strconv.Atoi(svc.ResourceVersion)
	if back := w.cluster.Lost != nil && last > 100000 && version < 100000; version <= last && !back {
		w.t.Errorf("%s is passed on as of %d, after it was as of %d", name, version, last)
	}
	w.versions[name], w.last[name] = version, version
}

// check compares what was passed on with what there is.
func (w *witness) check(when string) {
	w.t.Helper()
	w.cluster.Lock()
	defer w.cluster.Unlock()
	if want := versions(w.cluster.Log, w.cluster.Version); !w.complete || !maps.Equal(want, w.versions) {
		w.t.Errorf("%s (restored: %t), it was told of %v, complete: %t; there is %v", when, w.cluster.Lost != nil, w.versions, w.complete, want)
	}
	if w.cluster.Open != 1 {
		w.t.Errorf("%s, %d answers have not ended", when, w.cluster.Open)
	}
}

// checkRequests looks for too many requests at a time.
func (c *schedule) checkRequests(t *testing.T) {
	c.Lock()
	defer c.Unlock()
	const n = 30
	for i := n; i < len(c.Asked); i++ {
		if d := c.Asked[i].At.Sub(c.Asked[i-n].At); d < time.Second {
			t.Errorf("%d requests within %v", n, d)
			return
		}
	}
}
