package apiserver

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

// heldWatch is a cluster of which the watch of Services can be held up, as by a slow way to its API server.
type heldWatch struct {
	cluster
	once sync.Once
	open chan struct{} // A Read of the watch takes what is in it and puts it back.
}

func newHeldWatch() *heldWatch {
	h := &heldWatch{cluster: newCluster(), open: make(chan struct{}, 1)}
	h.open <- struct{}{}
	return h
}

// RoundTrip holds up the first answer about Services, of which the watch is the rest.
func (h *heldWatch) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := h.cluster.RoundTrip(r)
	if err == nil && strings.HasSuffix(r.URL.Path, "/"+services) {
		h.once.Do(func() { answer.Body = heldBody{answer.Body, h} })
	}
	return answer, err
}

type heldBody struct {
	io.ReadCloser
	held *heldWatch
}

func (b heldBody) Read(into []byte) (int, error) {
	n, err := b.ReadCloser.Read(into)
	b.held.open <- <-b.held.open
	return n, err
}

// verifyAll verifies everything within the time that the daemon takes for it.
func verifyAll(t *testing.T, s *Source) (compared map[string]source.Compared, found []source.Difference) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	all, found := s.Verify(ctx)
	compared = map[string]source.Compared{}
	for _, c := range all {
		compared[strings.Fields(c.What)[0]] = c
	}
	return compared, found
}

// TestVerifyBesideSilence: where the watch of a resource does not say whether it has lost something, what another has lost is found in time.
func TestVerifyBesideSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHeldWatch()
		src := New(Config{Client: answeredBy(t, h.RoundTrip), NodeName: "n1", Log: slog.New(slog.DiscardHandler)})
		until(t, func(ctx context.Context) {
			_ = src.Run(ctx, &sees{t: t, services: map[string]int{}, came: map[string]time.Time{}})
		})
		time.Sleep(time.Second) // in simulated time: everything is listed
		<-h.open
		h.with(func() { h.Lose = func(o apiservertest.Change) bool { return o.Resource == endpointSlices } })
		h.change("s1")
		h.with(func() { h.Put(endpointSlices, &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "lost"}}) })
		synctest.Wait()
		compared, found := verifyAll(t, src)
		if c := compared["Services"]; c.Not == "" || c.Count != 1 {
			t.Errorf("Services: %+v", c)
		}
		if c := compared["EndpointSlices"]; c.Not != "" || len(found) != 1 || found[0].Object != "EndpointSlice lost" {
			t.Errorf("EndpointSlices: %+v, found %v", c, found)
		}
		h.open <- struct{}{}
	})
}

// TestVerifyMany: of more differences than are kept at a time, one verification finds all; and where the watch brings what was lacking, it says
// that it has not compared everything.
func TestVerifyMany(t *testing.T) {
	t.Parallel()
	for _, lost := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			const many = mostSuspects + 10
			h := newHeldWatch()
			for i := range many {
				h.change(fmt.Sprint("gone", i))
			}
			f, w := h.followServices(t, h.RoundTrip)
			lister := resources(Config{Client: answeredBy(t, h.RoundTrip), Log: slog.New(slog.DiscardHandler), Silence: DefaultSilence})[0]
			time.Sleep(time.Second) // in simulated time: everything is listed
			w.loses = lost
			h.with(func() { h.Lose = func(apiservertest.Change) bool { return lost } })
			<-h.open
			for i := range many {
				h.with(func() {
					h.put(fmt.Sprint("new", i))
					h.remove(fmt.Sprint("gone", i))
				})
			}
			go func() {
				time.Sleep(time.Second) // in simulated time: the list is complete
				h.open <- struct{}{}
			}()
			_, found, err := f.verify(t.Context(), lister)
			if lost && (len(found) != 2*many || err != nil) || !lost && (len(found) > 0 || err != errMany) {
				t.Errorf("lost: %t, found %d differences, %v", lost, len(found), err)
			}
			synctest.Wait()
			w.check("in the end")
			if n := len(slices.Collect(f.store.known.All())); n != many {
				t.Errorf("lost: %t, %d are known", lost, n)
			}
		})
	}
}

// TestVerifyAsAWhole: a list as a whole is asked for where the API server does not stream one, and not where it has too much to do for that.
func TestVerifyAsAWhole(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		streams apiservertest.Support
		ill     apiservertest.Trouble
		hangs   bool
		wholes  int // lists as a whole
	}{
		"streams are not understood":    {streams: apiservertest.Unknown, ill: apiservertest.None, wholes: 1},
		"its storage can't stream":      {streams: apiservertest.Lacking, ill: apiservertest.None, wholes: 1},
		"the end of a list is not told": {streams: apiservertest.Endless, ill: apiservertest.None, wholes: 1},
		"all is well":                   {ill: apiservertest.None},
		"too many requests":             {ill: apiservertest.TooManyRequests},
		"unavailable":                   {ill: apiservertest.Unavailable},
		"no answer":                     {ill: apiservertest.None, hangs: true},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				cluster := newCluster()
				cluster.change("s1")
				f, _ := cluster.followServices(t, cluster.RoundTrip)
				time.Sleep(time.Second) // in simulated time: everything is listed
				cluster.with(func() { cluster.Servers[0].Streams = c.streams })
				cluster.suffer(c.ill)
				wholes := 0
				answer := func(r *http.Request) (*http.Response, error) {
					if !r.URL.Query().Has("watch") {
						wholes++
					}
					if c.hangs {
						<-r.Context().Done()
						return nil, r.Context().Err()
					}
					return cluster.RoundTrip(r)
				}
				lister := resources(Config{Client: answeredBy(t, answer), Log: slog.New(slog.DiscardHandler), Silence: DefaultSilence})[0]
				n, _, err := f.verify(t.Context(), lister)
				if well := c.ill == apiservertest.None && !c.hangs; wholes != c.wholes || well != (n == 1 && err == nil) || err != nil && err.Error() == "" {
					t.Errorf("%d lists as a whole, of %d objects, %v", wholes, n, err)
				}
			})
		})
	}
}
