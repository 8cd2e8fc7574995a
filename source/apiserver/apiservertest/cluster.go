package apiservertest

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing/iotest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// Cluster is a cluster with several API servers behind a load balancer, for tests in simulated time (testing/synctest). As with real ones,
// there is one history of all objects, with versions that rise; each server has a cache that lags behind it; and any of them may get any
// request. It is an http.RoundTripper that answers in JSON, and takes everything that is written for granted. The mutex guards all fields; methods other than RoundTrip need it locked.
type Cluster struct {
	sync.Mutex
	// Random draws what happens where several things may.
	Random  *rand.Rand
	Servers []*CachingServer
	// Log is the history, and Lost what a restored backup does not have.
	Log, Lost []Change
	// Version is the latest.
	Version int
	// Travel returns how long a request takes to a server, or the beginning of its answer back, and Pace the time that a server takes for an
	// object of a list; nil for no time.
	Travel func(Request) time.Duration
	Pace   func() time.Duration
	// Lose, if not nil, reports whether a watch loses a change: it goes on as if that had been sent.
	Lose func(Change) bool
	// Troubles are drawn from for three requests in four while there are any.
	Troubles []Trouble
	// Asked are the requests so far, and Open is how many answers have not ended.
	Asked []Request
	Open  int

	resources map[string]metav1.TypeMeta
	seed      uint64
	step      int // between versions
	backup    int // how much of the history a backup has
}

// Object is an object of the API.
type Object interface {
	metav1.Object
	runtime.Object
}

// Change is one of an object.
type Change struct {
	Version  int
	Kind     watch.EventType
	Resource string
	Name     types.NamespacedName
	Object   Object
}

// Request is one that was made. Verb is list or watch; or watchtrue or watchfalse, by sendInitialEvents.
type Request struct {
	At             time.Time
	Verb, Resource string
}

// CachingServer is an API server: its cache has everything up to Seen, and it can send what came after Oldest.
type CachingServer struct {
	Lag          time.Duration
	Seen, Oldest int
	Streams      Support
	// Ill is what happens to each request.
	Ill Trouble

	news, ended chan struct{} // closed when there is something new, and to end all answers
}

// Support is what an API server makes of requests for streamed lists.
type Support int

// What a server can make of them.
const (
	Supported Support = iota
	Unknown           // It rejects what it does not understand.
	Lacking           // Its storage can't do that, which it says by an event.
	Endless           // The end of what there is in the beginning is not told.
)

// Trouble is what happens to a request.
type Trouble int

// Those with a status are answers, the others are not.
const (
	None Trouble = iota - 1
	Refused
	Closed
	TimedOut
	Broken  // in the middle of the answer
	Garbled // the same
	Lasting // the connection hangs for some seconds, and then is closed
	InternalError
	TooLarge // a version that the server has not seen in time
	Expired
	TooManyRequests
	Forbidden
	Unauthorized
	NotFound
	Unavailable
	invalid
	// Troubles is how many there are to draw from.
	Troubles = int(invalid)
)

var troubleNames = map[Trouble]string{None: "none", Refused: "refused", Closed: "closed", TimedOut: "timed out", Broken: "broken", Garbled: "garbled",
	Lasting: "lasting", InternalError: "internal error", TooLarge: "too large resource version", Expired: "expired",
	TooManyRequests: "too many requests", Forbidden: "forbidden", Unauthorized: "unauthorized", NotFound: "not found", Unavailable: "unavailable"}

func (t Trouble) String() string { return troubleNames[t] }

var statuses = map[Trouble]metav1.Status{
	InternalError:   {Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError},
	TooLarge:        {Code: http.StatusGatewayTimeout, Reason: metav1.StatusReasonTimeout},
	Expired:         {Code: http.StatusGone, Reason: metav1.StatusReasonExpired},
	TooManyRequests: {Code: http.StatusTooManyRequests, Reason: metav1.StatusReasonTooManyRequests},
	Forbidden:       {Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden},
	Unauthorized:    {Code: http.StatusUnauthorized, Reason: metav1.StatusReasonUnauthorized},
	NotFound:        {Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound},
	Unavailable:     {Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable},
	invalid:         {Code: http.StatusUnprocessableEntity, Reason: metav1.StatusReasonInvalid},
}

// NewCluster returns a cluster of so many servers, without objects.
func NewCluster(random *rand.Rand, servers int) *Cluster {
	c := &Cluster{Random: random, seed: random.Uint64(), Version: 1000, step: 4, resources: map[string]metav1.TypeMeta{
		"services": {APIVersion: "v1", Kind: "Service"}, "nodes": {APIVersion: "v1", Kind: "Node"},
		"endpointslices": {APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		"servicecidrs":   {APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"}}}
	for range servers {
		c.Servers = append(c.Servers, &CachingServer{Seen: c.Version, Oldest: c.Version, Ill: None,
			news: make(chan struct{}), ended: make(chan struct{})})
	}
	return c
}

// Objects returns what there is of a resource at a version, after a history.
func Objects(log []Change, resource string, version int) map[types.NamespacedName]Change {
	out := map[types.NamespacedName]Change{}
	for _, o := range log {
		switch {
		case o.Version > version || o.Resource != resource:
		case o.Kind == watch.Deleted:
			delete(out, o.Name)
		default:
			out[o.Name] = o
		}
	}
	return out
}

// Put creates an object, or changes it. The servers learn of it in their time.
func (c *Cluster) Put(resource string, o Object) {
	name, kind := types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}, watch.Modified
	if _, had := Objects(c.Log, resource, c.Version)[name]; !had {
		kind = watch.Added
	}
	c.change(Change{Kind: kind, Resource: resource, Name: name, Object: o})
}

// Delete removes an object, if there is one.
func (c *Cluster) Delete(resource string, name types.NamespacedName) {
	if had, ok := Objects(c.Log, resource, c.Version)[name]; ok {
		c.change(Change{Kind: watch.Deleted, Resource: resource, Name: name, Object: had.Object})
	}
}

func (c *Cluster) change(o Change) {
	c.Version += c.step
	meta := c.resources[o.Resource]
	o.Version, o.Object = c.Version, o.Object.DeepCopyObject().(Object)
	o.Object.SetResourceVersion(fmt.Sprint(o.Version))
	o.Object.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(meta.APIVersion, meta.Kind))
	c.Log = append(c.Log, o)
	step := c.step
	for _, s := range c.Servers {
		see := func() {
			if step == c.step && o.Version > s.Seen {
				s.See(o.Version)
			}
		}
		if s.Lag == 0 {
			see()
			continue
		}
		time.AfterFunc(s.Lag, func() {
			c.Lock()
			defer c.Unlock()
			see()
		})
	}
}

// See brings the server's cache up to a version.
func (s *CachingServer) See(version int) {
	s.Seen = version
	close(s.news)
	s.news = make(chan struct{})
}

// End ends all answers of the server. What has changed at the same moment does not come by them.
func (s *CachingServer) End() {
	close(s.ended)
	s.ended = make(chan struct{})
}

// Restart has a server read everything anew, and forget what was before.
func (c *Cluster) Restart(s *CachingServer) {
	s.See(c.Version)
	s.Oldest = c.Version
	s.End()
}

// Backup makes a backup. Later versions are far above its own.
func (c *Cluster) Backup() {
	c.backup, c.Version = len(c.Log), 100*c.Version
	for _, s := range c.Servers {
		s.Seen, s.Oldest = c.Version, c.Version
	}
}

// Restore puts the cluster back to the backup, once. Versions between that and what is lost are used from then on.
func (c *Cluster) Restore() {
	if c.Lost != nil {
		return
	}
	c.Lost, c.Log = c.Log, slices.Clone(c.Log[:c.backup])
	c.Version, c.step = 10000, 1
	for _, s := range c.Servers {
		c.Restart(s)
	}
}

// random returns what draws for a request: the same for the same one at the same time, whatever others there are.
func (c *Cluster) random(r *http.Request) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprint(h, r.Method, r.URL, time.Now().UnixNano())
	return rand.New(rand.NewPCG(c.seed, h.Sum64()))
}

func sorted(objects map[types.NamespacedName]Change) []Change {
	return slices.SortedFunc(maps.Values(objects), func(a, b Change) int { return strings.Compare(a.Name.String(), b.Name.String()) })
}

// RoundTrip implements http.RoundTripper.
func (c *Cluster) RoundTrip(r *http.Request) (*http.Response, error) {
	q := r.URL.Query()
	a := Request{At: time.Now(), Verb: "list", Resource: path.Base(r.URL.Path)}
	random := c.random(r)
	if q.Get("watch") != "" {
		a.Verb = "watch" + q.Get("sendInitialEvents")
	}
	c.Lock()
	c.Asked = append(c.Asked, a)
	s := c.Servers[random.IntN(len(c.Servers))]
	var there, back time.Duration
	if c.Travel != nil {
		there, back = c.Travel(a), c.Travel(a)
	}
	what := s.Ill
	if what == None && len(c.Troubles) > 0 && random.IntN(4) > 0 {
		what = c.Troubles[random.IntN(len(c.Troubles))]
	}
	c.Unlock()
	time.Sleep(there)
	defer time.Sleep(back)
	switch status, fails := statuses[what]; {
	case what == Refused:
		return nil, syscall.ECONNREFUSED
	case what == Closed:
		return nil, io.EOF
	case what == TimedOut:
		return nil, context.DeadlineExceeded
	case fails:
		return respond(int(status.Code), statusOf(what)), nil
	case r.Method != http.MethodGet:
		return &http.Response{StatusCode: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}}, Body: r.Body}, nil
	case a.Verb == "list":
		return c.list(r.Context(), s, a.Resource, q.Get("resourceVersion"), what)
	}
	return c.watch(r.Context(), s, a, q.Get("resourceVersion"), what, random), nil
}

// Respond returns the answer that a trouble with a status consists in.
func Respond(t Trouble) *http.Response { return respond(int(statuses[t].Code), statusOf(t)) }

// RespondEvent returns the answer of a watch to which that trouble happens.
func RespondEvent(t Trouble) *http.Response {
	return respond(http.StatusOK, event(watch.Error, statusOf(t)))
}

func statusOf(t Trouble) *metav1.Status {
	s := statuses[t]
	s.TypeMeta, s.Status = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, metav1.StatusFailure
	return &s
}

func respond(code int, body any) *http.Response {
	text, _ := json.Marshal(body)
	header := http.Header{"Content-Type": {"application/json"}}
	if code == http.StatusTooManyRequests {
		header.Set("Retry-After", "1")
	}
	return &http.Response{StatusCode: code, Header: header, Body: io.NopCloser(strings.NewReader(string(text)))}
}

// fresh waits until a server has seen a version, and reports whether it has, in time.
func (c *Cluster) fresh(s *CachingServer, version int) bool {
	for late := time.Now().Add(3 * time.Second); time.Now().Before(late); time.Sleep(50 * time.Millisecond) {
		c.Lock()
		seen := s.Seen
		c.Unlock()
		if seen >= version {
			return true
		}
	}
	return false
}

func (c *Cluster) list(ctx context.Context, s *CachingServer, resource, from string, what Trouble) (*http.Response, error) {
	version, _ := strconv.Atoi(from)
	if !c.fresh(s, version) {
		return Respond(TooLarge), nil
	}
	c.Lock()
	defer c.Unlock()
	as, ended := s.Seen, s.ended
	if from == "" {
		as = c.Version
	}
	items := []any{}
	for _, o := range sorted(Objects(c.Log, resource, as)) {
		items = append(items, o.Object)
	}
	c.Unlock()
	goesOn := true
	for range items {
		goesOn = goesOn && c.paced(ctx, ended)
	}
	if c.Lock(); !goesOn {
		return nil, io.EOF
	}
	meta := c.resources[resource]
	r := respond(http.StatusOK, map[string]any{"apiVersion": meta.APIVersion, "kind": meta.Kind + "List", "items": items,
		"metadata": map[string]any{"resourceVersion": fmt.Sprint(as)}})
	switch what {
	case Broken:
		r.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, 50), iotest.ErrReader(io.ErrUnexpectedEOF)))
	case Garbled:
		r.Body = io.NopCloser(strings.NewReader(`{"kind": "`))
	case Lasting:
		out, in := io.Pipe()
		r.Body = out
		c.Open++
		go c.hang(ctx, ended, in)
	}
	return r, nil
}

// paced waits as long as an object of a list takes. It returns false if the answer ends meanwhile.
func (c *Cluster) paced(ctx context.Context, ended chan struct{}) bool {
	c.Lock()
	var pace time.Duration
	if c.Pace != nil {
		pace = c.Pace()
	}
	c.Unlock()
	select {
	case <-time.After(pace):
		return true
	case <-ended:
	case <-ctx.Done():
	}
	return false
}

// hang sends nothing for some seconds, and then breaks off the answer.
func (c *Cluster) hang(ctx context.Context, ended chan struct{}, in *io.PipeWriter) {
	select {
	case <-ctx.Done():
	case <-ended:
	case <-time.After(20 * time.Second):
	}
	_ = in.CloseWithError(io.ErrUnexpectedEOF)
	c.Lock()
	defer c.Unlock()
	c.Open--
}

func event(kind watch.EventType, object any) map[string]any {
	return map[string]any{"type": kind, "object": object}
}

// watching is the answer to a watch.
type watching struct {
	*CachingServer
	resource string
	initial  bool // It begins with all there is.
	after    int  // the version after which events come
	ended    chan struct{}
	limit    int // how many events come before the answer breaks off, while there is trouble
	what     Trouble
	random   *rand.Rand
	to       *json.Encoder
}

func (c *Cluster) watch(ctx context.Context, s *CachingServer, a Request, from string, what Trouble, random *rand.Rand) *http.Response {
	c.Lock()
	defer c.Unlock()
	w := &watching{CachingServer: s, random: random, resource: a.Resource, initial: a.Verb == "watchtrue", ended: s.ended, limit: math.MaxInt, what: what}
	w.after, _ = strconv.Atoi(from)
	switch {
	case a.Verb != "watch" && s.Streams == Unknown:
		return Respond(invalid)
	case w.initial && s.Streams == Lacking:
		return RespondEvent(InternalError)
	case w.initial:
		w.after = c.Version
		c.Unlock()
		isFresh := c.fresh(s, w.after)
		if c.Lock(); !isFresh {
			return RespondEvent(TooLarge)
		}
	case a.Verb == "watchfalse":
		w.after = c.Version
	case w.after < s.Oldest && random.IntN(2) == 0:
		return Respond(Expired)
	case w.after < s.Oldest: // as most often: the answer begins well
		return RespondEvent(Expired)
	}
	if what != None {
		w.limit = random.IntN(4)
	}
	out, in := io.Pipe()
	w.to = json.NewEncoder(in)
	c.Open++
	go c.serve(ctx, w, in)
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: out}
}

func (c *Cluster) serve(ctx context.Context, w *watching, in *io.PipeWriter) {
	defer context.AfterFunc(ctx, func() { _ = in.CloseWithError(ctx.Err()) })()
	if !w.initial || c.sendFirst(ctx, w) {
		c.sendChanges(ctx, w)
	}
	switch w.what {
	case Garbled:
		_, _ = io.WriteString(in, "{{\n")
	case Broken:
		_ = in.CloseWithError(io.ErrUnexpectedEOF)
	case Lasting:
		select {
		case <-ctx.Done():
		case <-w.ended:
		case <-time.After(20 * time.Second):
		}
	}
	_ = in.Close()
	c.Lock()
	defer c.Unlock()
	c.Open--
}

// send sends an event, and reports whether that was possible.
func (c *Cluster) send(w *watching, kind watch.EventType, object any) bool {
	c.Lock()
	breaks := w.limit == 0 && (len(c.Troubles) > 0 || w.Ill != None)
	c.Unlock()
	if breaks {
		return false
	}
	w.limit = max(w.limit, 1) - 1
	return w.to.Encode(event(kind, object)) == nil
}

// bookmark returns the object of a bookmark.
func (c *Cluster) bookmark(resource string, version int, annotations map[string]string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: c.resources[resource],
		ObjectMeta: metav1.ObjectMeta{ResourceVersion: fmt.Sprint(version), Annotations: annotations}}
}

// sendFirst sends all there is, and reports whether that was possible.
func (c *Cluster) sendFirst(ctx context.Context, w *watching) bool {
	c.Lock()
	w.after = w.Seen
	all, streams := Objects(c.Log, w.resource, w.after), w.Streams
	c.Unlock()
	for _, o := range sorted(all) {
		if !c.paced(ctx, w.ended) || !c.send(w, watch.Added, o.Object) {
			return false
		}
	}
	return streams == Endless || c.send(w, watch.Bookmark,
		c.bookmark(w.resource, w.after, map[string]string{metav1.InitialEventsAnnotationKey: "true"}))
}

// sendChanges sends changes until the watch ends.
func (c *Cluster) sendChanges(ctx context.Context, w *watching) {
	for bookmark := time.After(time.Minute); ; {
		c.Lock()
		select {
		case <-w.ended:
			c.Unlock()
			return
		default:
		}
		var more []Change
		for _, o := range c.Log {
			if o.Resource == w.resource && o.Version > w.after && o.Version <= w.Seen && (c.Lose == nil || !c.Lose(o)) {
				if more = append(more, o); w.random.IntN(20) == 0 {
					more = append(more, o) // twice
				}
			}
		}
		behind := w.Seen < w.after
		w.after = max(w.after, w.Seen)
		news := w.news
		c.Unlock()
		for _, o := range more {
			if !c.send(w, o.Kind, o.Object) {
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
			if !behind && !c.send(w, watch.Bookmark, c.bookmark(w.resource, w.after, nil)) {
				return
			}
		}
	}
}
