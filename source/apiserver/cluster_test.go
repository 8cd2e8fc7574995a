package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// cluster is one with several API servers behind a load balancer, for tests in simulated time. It has Services only. As with real ones,
// there is one history of changes, each server has a cache that lags behind it, and any of them may get any request.
type cluster struct {
	random *rand.Rand // guarded by mu, as all that follows
	mu     sync.Mutex
	// log is the history, with versions that rise. first is how many of it there were in the beginning, and lost what a restored backup
	// does not have.
	log, lost []change
	first     int
	version   int
	step      int // between versions
	servers   []*apiServer
	// troubles are drawn from for three requests in four while there are any.
	troubles []trouble
	silent   bool          // There was an answer that does not end.
	travel   time.Duration // the longest time of a request, or of the beginning of its answer
	pace     time.Duration // the longest time between two objects of a streamed list
	open     int           // answers that have not ended
	asked    []time.Time
}

// change is one of an object; its name is "" for changes of objects that nobody asks for.
type change struct {
	version    int
	kind, name string
}

// apiServer is one of the servers: its cache has everything up to seen, and can send what came after oldest.
type apiServer struct {
	lag          time.Duration
	seen, oldest int
	news, ended  chan struct{} // closed when there is something new, and to end all answers
	streams      support
	ill          trouble // what happens to each request
}

// support is what an API server makes of requests for streamed lists.
type support int

const (
	supported support = iota
	unknown           // It rejects what it does not understand.
	lacking           // Its storage can't do that, which it says by an event.
	endless           // The end of what there is in the beginning is not told.
)

// trouble is what happens to a request.
type trouble int

const (
	none trouble = iota - 1
	refused
	closed
	timedOut
	broken  // in the middle of the answer
	garbled // the same
	lasting // the connection hangs for some seconds, and then is closed
	firstStatus
)

var (
	internalError = metav1.Status{Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError}
	tooLarge      = metav1.Status{Code: http.StatusGatewayTimeout, Reason: metav1.StatusReasonTimeout}
	expired       = metav1.Status{Code: http.StatusGone, Reason: metav1.StatusReasonExpired}
	invalid       = metav1.Status{Code: http.StatusUnprocessableEntity, Reason: metav1.StatusReasonInvalid}

	statuses = []metav1.Status{
		internalError, tooLarge, expired,
		{Code: http.StatusTooManyRequests, Reason: metav1.StatusReasonTooManyRequests},
		{Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden},
		{Code: http.StatusUnauthorized, Reason: metav1.StatusReasonUnauthorized},
		{Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound},
		{Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable},
	}
)

func newCluster(random *rand.Rand, objects int) *cluster {
	c := &cluster{random: random, version: 1000, step: 4, travel: time.Duration(1+random.IntN(300)) * time.Millisecond}
	for range 1 + random.IntN(3) {
		c.servers = append(c.servers, &apiServer{news: make(chan struct{}), ended: make(chan struct{}), ill: none})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range objects {
		c.change(fmt.Sprint("s", i), false)
	}
	c.first, c.version = len(c.log), 100000
	for _, s := range c.servers {
		s.seen, s.oldest = c.version, c.version
	}
	return c
}

// objects returns what there is at a version, after a log.
func objects(log []change, version int) map[string]int {
	out := map[string]int{}
	for _, o := range log {
		switch {
		case o.version > version || o.name == "":
		case o.kind == "DELETED":
			delete(out, o.name)
		default:
			out[o.name] = o.version
		}
	}
	return out
}

// change changes an object, or removes it. The servers learn of it in their time.
func (c *cluster) change(name string, gone bool) {
	kind := kindOf(objects(c.log, c.version)[name] != 0, gone)
	if kind == "" {
		return
	}
	c.version += c.step
	c.log = append(c.log, change{c.version, kind, name})
	version, step := c.version, c.step
	for _, s := range c.servers {
		time.AfterFunc(s.lag, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if step == c.step && version > s.seen {
				s.see(version)
			}
		})
	}
}

func (s *apiServer) see(version int) {
	s.seen = version
	close(s.news)
	s.news = make(chan struct{})
}

// end ends all answers of a server.
func (s *apiServer) end() {
	close(s.ended)
	s.ended = make(chan struct{})
}

// restart has a server read everything anew, and forget what was before.
func (c *cluster) restart(s *apiServer) {
	s.see(c.version)
	s.oldest = c.version
	s.end()
}

// restore puts the cluster back to where it was in the beginning.
func (c *cluster) restore() {
	if c.lost != nil {
		return
	}
	c.lost, c.log = c.log, slices.Clone(c.log[:c.first])
	c.version, c.step = 10000, 1
	for _, s := range c.servers {
		c.restart(s)
	}
}

func (c *cluster) upTo(d time.Duration) time.Duration {
	if d == 0 {
		return 0
	}
	return time.Duration(c.random.Int64N(int64(d)))
}

// RoundTrip implements http.RoundTripper.
func (c *cluster) RoundTrip(r *http.Request) (*http.Response, error) {
	q := r.URL.Query()
	c.mu.Lock()
	s := c.servers[c.random.IntN(len(c.servers))]
	there, back := c.upTo(c.travel), c.upTo(c.travel)
	what := s.ill
	if what == none && len(c.troubles) > 0 && c.random.IntN(4) > 0 {
		what = c.troubles[c.random.IntN(len(c.troubles))]
	}
	c.asked = append(c.asked, time.Now())
	c.mu.Unlock()
	time.Sleep(there)      // in simulated time
	defer time.Sleep(back) // in simulated time
	switch {
	case what == refused:
		return nil, syscall.ECONNREFUSED
	case what == closed:
		return nil, io.EOF
	case what == timedOut:
		return nil, context.DeadlineExceeded
	case what >= firstStatus:
		return answer(int(statuses[what-firstStatus].Code), statusOf(statuses[what-firstStatus])), nil
	case q.Get("watch") == "":
		return c.answerList(s, q.Get("resourceVersion"), what)
	}
	return c.answerWatch(r.Context(), s, q.Get("resourceVersion"), q.Get("sendInitialEvents"), what), nil
}

func statusOf(s metav1.Status) map[string]any {
	return map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": s.Code, "reason": s.Reason}
}

func answer(code int, body any) *http.Response {
	r := response(code, body)
	if code == http.StatusTooManyRequests {
		r.Header.Set("Retry-After", "1")
	}
	return r
}

// fresh waits until a server has seen a version, and reports whether it has, in time.
func (c *cluster) fresh(s *apiServer, version int) bool {
	for late := time.Now().Add(3 * time.Second); time.Now().Before(late); time.Sleep(50 * time.Millisecond) { // in simulated time
		c.mu.Lock()
		seen := s.seen
		c.mu.Unlock()
		if seen >= version {
			return true
		}
	}
	return false
}

func (c *cluster) answerList(s *apiServer, from string, what trouble) (*http.Response, error) {
	version, _ := strconv.Atoi(from)
	if !c.fresh(s, version) {
		return answer(http.StatusGatewayTimeout, statusOf(tooLarge)), nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	as := s.seen
	if from == "" {
		as = c.version
	}
	items := []any{}
	for n, v := range objects(c.log, as) {
		items = append(items, object(n, v))
	}
	r := answer(http.StatusOK, map[string]any{"apiVersion": "v1", "kind": "ServiceList", "items": items,
		"metadata": map[string]any{"resourceVersion": fmt.Sprint(as)}})
	switch what {
	case broken:
		r.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, 50), failing{}))
	case garbled:
		r.Body = io.NopCloser(strings.NewReader(`{"kind": "`))
	}
	return r, nil
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func object(name string, version int) map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "Service",
		"metadata": map[string]any{"name": name, "resourceVersion": fmt.Sprint(version)}}
}

func happened(kind string, object any) map[string]any {
	return map[string]any{"type": kind, "object": object}
}

// watching is the answer to a watch.
type watching struct {
	*apiServer
	initial bool // It begins with all there is.
	after   int  // the version after which events come
	ended   chan struct{}
	limit   int // how many events come before the answer breaks off, while there is trouble
	what    trouble
	to      *json.Encoder
}

func (c *cluster) answerWatch(ctx context.Context, s *apiServer, from, initial string, what trouble) *http.Response {
	c.mu.Lock()
	defer c.mu.Unlock()
	failed := func(s metav1.Status) *http.Response { return answer(http.StatusOK, happened("ERROR", statusOf(s))) }
	w := &watching{apiServer: s, initial: initial == "true", ended: s.ended, limit: math.MaxInt, what: what}
	w.after, _ = strconv.Atoi(from)
	switch {
	case initial != "" && s.streams == unknown:
		return answer(http.StatusUnprocessableEntity, statusOf(invalid))
	case w.initial && s.streams == lacking:
		return failed(internalError)
	case w.initial:
		w.after = c.version
		c.mu.Unlock()
		isFresh := c.fresh(s, w.after)
		if c.mu.Lock(); !isFresh {
			return failed(tooLarge)
		}
	case initial == "false":
		w.after = c.version
	case w.after < s.oldest && c.random.IntN(2) == 0:
		return answer(http.StatusGone, statusOf(expired))
	case w.after < s.oldest:
		return failed(expired)
	}
	if what != none {
		w.limit = c.random.IntN(4)
	}
	out, in := io.Pipe()
	w.to = json.NewEncoder(in)
	c.open++
	go c.serve(ctx, w, in)
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: out}
}

func (c *cluster) serve(ctx context.Context, w *watching, in *io.PipeWriter) {
	defer context.AfterFunc(ctx, func() { _ = in.CloseWithError(ctx.Err()) })()
	c.sendAll(ctx, w)
	switch w.what {
	case garbled:
		_, _ = io.WriteString(in, "{{\n")
	case broken:
		_ = in.CloseWithError(io.ErrUnexpectedEOF)
	case lasting:
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Second):
		}
	}
	_ = in.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
}

// send sends an event, and reports whether that was possible.
func (c *cluster) send(w *watching, e map[string]any) bool {
	c.mu.Lock()
	breaks := w.limit == 0 && (len(c.troubles) > 0 || w.ill != none)
	c.mu.Unlock()
	if breaks {
		return false
	}
	w.limit = max(w.limit, 1) - 1
	return w.to.Encode(e) == nil
}

// sendAll sends the events of a watch until it ends.
func (c *cluster) sendAll(ctx context.Context, w *watching) {
	if w.initial {
		c.mu.Lock()
		w.after = w.seen
		all, streams := objects(c.log, w.after), w.streams
		c.mu.Unlock()
		for _, n := range slices.Sorted(maps.Keys(all)) {
			c.mu.Lock()
			pace := c.upTo(c.pace)
			c.mu.Unlock()
			time.Sleep(pace) // in simulated time, as a slow server does
			if !c.send(w, happened("ADDED", object(n, all[n]))) {
				return
			}
		}
		end := object("", w.after)
		end["metadata"].(map[string]any)["annotations"] = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		if streams != endless && !c.send(w, happened("BOOKMARK", end)) {
			return
		}
	}
	for bookmark := time.After(time.Minute); ; {
		c.mu.Lock()
		var more []map[string]any
		for _, o := range c.log {
			if o.version > w.after && o.version <= w.seen {
				more = append(more, happened(o.kind, object(o.name, o.version)))
				if c.random.IntN(20) == 0 {
					more = append(more, more[len(more)-1])
				}
			}
		}
		behind := w.seen < w.after
		w.after = max(w.after, w.seen)
		news := w.news
		c.mu.Unlock()
		for _, e := range more {
			if !c.send(w, e) {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-w.ended:
			return
		case <-news:
		case <-bookmark:
			bookmark = time.After(time.Minute)
			if !behind && !c.send(w, happened("BOOKMARK", object("", w.after))) {
				return
			}
		}
	}
}
