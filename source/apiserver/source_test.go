package apiserver

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

var (
	first  = types.NamespacedName{Namespace: "default", Name: "first"}
	second = types.NamespacedName{Namespace: "default", Name: "second"}
)

func TestSyncedComesOnceAndLast(t *testing.T) {
	t.Parallel()
	for _, slow := range []string{services, endpointSlices, nodes, serviceCIDRs} {
		t.Run(slow, func(t *testing.T) {
			t.Parallel()
			f := apiservertest.New(t)
			hold := make(chan struct{})
			f.Hold(hold, slow)
			f.Serve(services, serviceList(10, serviceAt(4, "first")))
			f.Serve(nodes, nodeList("n1"))
			f.Serve(serviceCIDRs, serviceCIDRList("10.96.0.0/16"))
			s, sink := start(t, f, func(c *Config) { c.NodeTimeout, c.optionalTimeout = time.Hour, time.Hour })
			wait := 2 // batches of the Service, the Node and the ServiceCIDR; without EndpointSlices there is none of them
			if slow == endpointSlices {
				wait = 3
			}
			sink.sees("what is not slow", func() bool { return len(sink.batches) == wait })
			time.Sleep(50 * time.Millisecond) // It is not to come, and there is no sign of that.
			sink.sees("no Synced yet", func() bool { return sink.synced == 0 })
			close(hold)
			sink.sees("Synced", func() bool { return sink.synced == 1 })
			sink.sees("it with the last batch", func() bool { return sink.batches[len(sink.batches)-1].Synced && len(sink.services) == 1 })
			f.Expire(slow)
			f.Expire(services)
			sink.sees("another watch", func() bool { return f.Watches(services) >= 2 })
			sink.sees("Synced no more", func() bool { return sink.synced == 1 })
			for _, w := range s.Watches() {
				if !w.Synced {
					t.Errorf("%+v: not synced", w)
				}
			}
		})
	}
}

// TestNewListTellsWhatIsGone: after a gap in the watch, what is not in the new list is gone, and what is as it was is
// not said again.
func TestNewListTellsWhatIsGone(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	f.Serve(services, serviceList(10, serviceAt(4, "first"), serviceAt(5, "second")))
	_, sink := start(t, f, nil)
	sink.sees("both", func() bool { return sink.synced == 1 && len(sink.services) == 2 })
	f.Serve(services, serviceList(20, serviceAt(4, "first")))
	f.Expire(services)
	sink.sees("second gone", func() bool { return len(sink.services) == 1 })
	sink.mu.Lock()
	defer sink.mu.Unlock()
	last := sink.batches[len(sink.batches)-1]
	if gone, listed := last.Services[second]; !listed || gone != nil || len(last.Services) != 1 {
		t.Errorf("after the new list: %v, want only that %s is gone", last.Services, second)
	}
}

// TestListWithoutVersion: a server whose lists have no version is watched, too.
func TestListWithoutVersion(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	f.Serve(services, &v1.ServiceList{Items: []v1.Service{*serviceAt(4, "first")}})
	_, sink := start(t, f, nil)
	sink.sees("sync", func() bool { return sink.synced == 1 && len(sink.services) == 1 })
	f.Send(services, watch.Added, serviceAt(11, "second"))
	sink.sees("a change", func() bool { return len(sink.services) == 2 })
}

func TestChangesOfAWatch(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	_, sink := start(t, f, nil)
	sink.sees("sync", func() bool { return sink.synced == 1 })
	f.Send(services, watch.Added, serviceAt(11, "first"))
	sink.sees("added", func() bool { return sink.services[first] != nil })
	changed := serviceAt(12, "first")
	changed.Spec.ClusterIP = "10.96.0.8"
	f.Send(services, watch.Modified, changed)
	sink.sees("modified", func() bool { return sink.services[first].Spec.ClusterIP == "10.96.0.8" })
	f.Send(services, watch.Deleted, changed)
	sink.sees("deleted", func() bool { return len(sink.services) == 0 })
}

// TestFailedListsChangeNothing: whatever a list fails with, what is known stays, and it shows how old it is.
func TestFailedListsChangeNothing(t *testing.T) {
	t.Parallel()
	for _, status := range []int{http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusForbidden,
		http.StatusServiceUnavailable, http.StatusGone} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			t.Parallel()
			f := apiservertest.New(t)
			f.Serve(services, serviceList(10, serviceAt(4, "first")))
			s, sink := start(t, f, nil)
			sink.sees("sync", func() bool { return sink.synced == 1 && f.Watches(services) == 1 })
			batches := len(sink.batches)
			f.Fail(services, status)
			f.Expire(services)
			sink.sees("failure", func() bool {
				w := s.Watches()[0]
				return w.Resource == services && strings.Contains(w.Failure, "list")
			})
			time.Sleep(100 * time.Millisecond) // No batch is to come, and there is no sign of that.
			sink.mu.Lock()
			if len(sink.batches) != batches {
				t.Errorf("a failed list gave %+v", sink.batches[batches:])
			}
			sink.mu.Unlock()
			f.Serve(services, serviceList(20, serviceAt(4, "first"), serviceAt(15, "second")))
			f.Fail(services, 0)
			sink.sees("the end of it", func() bool { return len(sink.services) == 2 })
			sink.sees("a watch", func() bool {
				w := s.Watches()[0]
				return f.Watches(services) == 2 && w.Failure == "" && w.Age >= 0
			})
		})
	}
}

// TestSilentWatchIsRenewed: a watch through which not even bookmarks come is given up, though its connection is open.
func TestSilentWatchIsRenewed(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	_, sink := start(t, f, func(c *Config) { c.Silence = 1200 * time.Millisecond })
	sink.sees("sync", func() bool { return sink.synced == 1 })
	sink.sees("another watch", func() bool { return f.Watches(services) >= 2 })
	for version := 11; ; version++ { // On a busy machine, it may be given up in turn while the change is under way.
		f.Send(services, watch.Added, serviceAt(version, "first"))
		came := false
		for begun := time.Now(); !came && time.Since(begun) < 20*time.Second; time.Sleep(2 * time.Millisecond) {
			sink.mu.Lock()
			came = len(sink.services) == 1
			sink.mu.Unlock()
		}
		if came {
			break
		} else if version == 20 {
			t.Fatal("no change comes through it")
		}
	}
}

// TestMissingNodeIsReported: what a cluster without this node's Node delivers leads to a finding that says what to do.
func TestMissingNodeIsReported(t *testing.T) {
	t.Parallel()
	_, sink := start(t, apiservertest.New(t), nil)
	sink.sees("sync without a Node", func() bool { return sink.synced == 1 })
	sink.mu.Lock()
	defer sink.mu.Unlock()
	s := proxier.NewState("n1", plan.Settings{}, plan.Families[:], nil)
	for _, b := range sink.batches {
		s.Apply(b)
	}
	found := s.Findings()
	if len(found) != 1 || found[0].Object != "Node n1" || found[0].Severity != source.Problem {
		t.Fatalf("found %v, want one problem of Node n1", found)
	}
	if effect := found[0].Effect; !strings.Contains(effect, "--hostname-override") || !strings.Contains(effect, "policy Local is dropped") {
		t.Errorf("the effect is %q, which does not say what a wrong name costs", effect)
	}
}

func TestSourceRunsOnce(t *testing.T) {
	t.Parallel()
	s, sink := start(t, apiservertest.New(t), nil)
	sink.sees("sync", func() bool { return sink.synced == 1 })
	if err := s.Run(t.Context(), sink); err == nil {
		t.Error("a second Run was accepted")
	}
}

// TestNodeIsNotWaitedForForever: without the right to read Nodes, Services are delivered all the same.
func TestNodeIsNotWaitedForForever(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	f.Fail(nodes, http.StatusForbidden)
	f.Serve(services, serviceList(10, serviceAt(4, "first")))
	_, sink := start(t, f, func(c *Config) { c.NodeTimeout = 100 * time.Millisecond })
	sink.sees("sync", func() bool { return sink.synced == 1 && len(sink.services) == 1 })
	sink.sees("that nothing is known of it", func() bool {
		last := sink.batches[len(sink.batches)-1]
		return last.NodeUnread && !last.NodeMissing
	})
	f.Serve(nodes, nodeList("n1"))
	f.Fail(nodes, 0)
	sink.sees("the Node", func() bool { return sink.batches[len(sink.batches)-1].Nodes["n1"] != nil })
	sink.sees("Synced once", func() bool { return sink.synced == 1 })
}

// logged collects what is logged at level info or above.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logged) lines(with string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, with) {
			out = append(out, line)
		}
	}
	return out
}

// TestServiceCIDRsNotServed: where there are no ServiceCIDRs to read, nothing waits for them, it is said once, and they are
// asked for again now and then.
func TestServiceCIDRsNotServed(t *testing.T) {
	t.Parallel()
	for status, want := range map[int][2]string{
		http.StatusNotFound:  {"level=INFO", "does not serve a resource"},
		http.StatusForbidden: {"level=WARN", "apiGroups [networking.k8s.io], resources [servicecidrs], verbs [list, watch]"},
	} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			t.Parallel()
			f, log := apiservertest.New(t), &logged{}
			f.Fail(serviceCIDRs, status)
			f.Serve(services, serviceList(10, serviceAt(4, "first")))
			s, sink := start(t, f, func(c *Config) {
				c.optionalTimeout, c.askAgain, c.Log = time.Hour, 20*time.Millisecond, slog.New(slog.NewTextHandler(log, nil))
			})
			sink.sees("Synced", func() bool { return sink.synced == 1 && len(sink.services) == 1 })
			sink.sees("further requests", func() bool {
				return f.Lists(serviceCIDRs) >= 4
			})
			lines := log.lines(serviceCIDRs)
			if len(lines) != 1 || !strings.Contains(lines[0], want[0]) || !strings.Contains(lines[0], want[1]) {
				t.Errorf("logged %q, want one line with %q", lines, want)
			}
			cidrs := s.resources[slices.IndexFunc(s.resources, func(r *resource) bool { return r.name == serviceCIDRs })]
			if w := cidrs.current(time.Now()); !cidrs.absent() || w.Synced {
				t.Errorf("%+v, want it to be absent", w)
			}
			f.Serve(serviceCIDRs, serviceCIDRList("10.96.0.0/16"))
			f.Fail(serviceCIDRs, 0)
			sink.sees("the ServiceCIDR", func() bool { return sink.batches[len(sink.batches)-1].ServiceCIDRs["kubernetes"] != nil })
			if w := cidrs.current(time.Now()); cidrs.absent() || !w.Synced {
				t.Errorf("%+v, want it to be synced", w)
			}
			sink.sees("Synced once", func() bool { return sink.synced == 1 })
		})
	}
}

// TestServiceCIDRsAreRarelyAskedFor: by default it takes minutes until they are asked for again.
func TestServiceCIDRsAreRarelyAskedFor(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	f.Fail(serviceCIDRs, http.StatusNotFound)
	_, sink := start(t, f, nil)
	sink.sees("Synced", func() bool { return sink.synced == 1 })
	time.Sleep(1500 * time.Millisecond) // other failures are followed by an attempt within a second
	if n := f.Lists(serviceCIDRs); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

// TestServiceCIDRsAreNotWaitedForLong: no answer at all to the question for them keeps no Service from working.
func TestServiceCIDRsAreNotWaitedForLong(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	f.Hold(make(chan struct{}), serviceCIDRs)
	f.Serve(services, serviceList(10, serviceAt(4, "first")))
	_, sink := start(t, f, nil)
	sink.sees("Synced", func() bool { return sink.synced == 1 && len(sink.services) == 1 })
	f.Serve(serviceCIDRs, serviceCIDRList("10.96.0.0/16"))
	f.Send(services, watch.Deleted, serviceAt(12, "first"))
	sink.sees("a change", func() bool { return len(sink.services) == 0 })
}

// TestPodCIDRsAreWaitedFor: who needs the Node's podCIDRs gets Synced when they are there, or after a while.
func TestPodCIDRsAreWaitedFor(t *testing.T) {
	t.Parallel()
	node := func(version string, podCIDRs ...string) *v1.Node {
		return &v1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"},
			ObjectMeta: metav1.ObjectMeta{Name: "n1", ResourceVersion: version}, Spec: v1.NodeSpec{PodCIDRs: podCIDRs}}
	}
	t.Run("they come", func(t *testing.T) {
		t.Parallel()
		f, log := apiservertest.New(t), &logged{}
		f.Serve(nodes, nodeList("n1"))
		s, sink := start(t, f, func(c *Config) {
			c.PodCIDRTimeout, c.NodeTimeout, c.Log = time.Minute, time.Millisecond, slog.New(slog.NewTextHandler(log, nil))
		})
		sink.sees("the Node", func() bool {
			return len(sink.batches) == 1 && sink.batches[0].Nodes["n1"] != nil && !sink.batches[0].NodeMissing
		})
		f.Send(nodes, watch.Modified, node("11"))
		sink.sees("a change of it", func() bool { return len(sink.batches) == 2 })
		f.Serve(nodes, &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "11"}, Items: []v1.Node{*node("11")}})
		f.Expire(nodes) // a new list, in which the Node is as it was
		sink.sees("another watch", func() bool { return f.Watches(nodes) == 2 })
		time.Sleep(50 * time.Millisecond) // It is not to come, and there is no sign of that.
		sink.sees("no Synced yet", func() bool { return sink.synced == 0 })
		if lines := log.lines("podCIDRs"); len(lines) != 1 {
			t.Errorf("logged %q, want one line", lines)
		}
		for _, w := range s.Watches() {
			if !w.Synced {
				t.Errorf("%+v: all that there is has been delivered", w)
			}
		}
		f.Send(nodes, watch.Modified, node("12", "10.244.1.0/24"))
		sink.sees("Synced with them", func() bool {
			last := sink.batches[len(sink.batches)-1]
			return sink.synced == 1 && last.Synced && last.Nodes["n1"] != nil
		})
	})
	t.Run("they are there", func(t *testing.T) {
		t.Parallel()
		f := apiservertest.New(t)
		f.Serve(nodes, &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}, Items: []v1.Node{*node("3", "10.244.1.0/24")}})
		_, sink := start(t, f, func(c *Config) { c.PodCIDRTimeout = time.Minute })
		sink.sees("Synced", func() bool { return sink.synced == 1 })
	})
	t.Run("they do not come", func(t *testing.T) {
		t.Parallel()
		f := apiservertest.New(t)
		f.Serve(nodes, nodeList("n1"))
		_, sink := start(t, f, func(c *Config) { c.PodCIDRTimeout = 10 * time.Second }) // after the Node has been delivered, on any machine
		sink.sees("the Node, and Synced", func() bool { return len(sink.batches) == 2 && sink.synced == 1 })
		if first := sink.batches[0]; first.Synced || first.Nodes["n1"] == nil {
			t.Errorf("the first batch is %+v, want the Node without Synced", first)
		}
		if sink.batches[1].NodeMissing || sink.batches[1].NodeUnread {
			t.Error("the Node without pod CIDRs is said to be missing, or not to have been read")
		}
		f.Send(nodes, watch.Modified, node("12", "10.244.1.0/24"))
		sink.sees("them later", func() bool { return len(sink.batches) == 3 && sink.synced == 1 })
	})
	t.Run("there is no Node", func(t *testing.T) {
		t.Parallel()
		f := apiservertest.New(t)
		_, sink := start(t, f, func(c *Config) { c.PodCIDRTimeout = time.Minute })
		sink.sees("that it is missing, and no Synced yet", func() bool {
			return len(sink.batches) == 1 && sink.batches[0].NodeMissing && sink.synced == 0
		})
		f.Send(nodes, watch.Added, node("12", "10.244.1.0/24"))
		sink.sees("Synced with it", func() bool { return sink.synced == 1 })
	})
}

// roundTrip is an http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestRunEndsAtOnce: Run ends with its context, also while it waits to ask again an API server that refuses connections, or waits
// for the answer of one that gives none.
func TestRunEndsAtOnce(t *testing.T) {
	t.Parallel()
	for what, answer := range map[string]roundTrip{
		"refuses": func(*http.Request) (*http.Response, error) { return nil, syscall.ECONNREFUSED },
		"hangs":   func(r *http.Request) (*http.Response, error) { <-r.Context().Done(); return nil, r.Context().Err() },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := New(Config{Client: answeredBy(t, answer), NodeName: "n1", Log: slog.New(slog.DiscardHandler)})
				sink := &recorder{t: t, services: map[types.NamespacedName]*v1.Service{}}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- s.Run(ctx, sink) }()
				time.Sleep(time.Minute) // By then, it waits for many seconds between two attempts.
				cancel()
				begun := time.Now()
				assert.NoError(t, <-ended)
				if took := time.Since(begun); took > 0 {
					t.Errorf("Run ends %v after its context", took)
				}
				s.goOn()
				assert.Zero(t, sink.synced, "a timer that waited for Run passes something on after it")
			})
		})
	}
}
