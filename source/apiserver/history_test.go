package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"nodeproxy/source"
)

// history is an API server for tests in simulated time, with a history of each resource. Objects have names and versions, and nothing else.
type history struct {
	mu        sync.Mutex
	resources map[string]*past
	// streams says that lists are streamed. refused fails each request, and so does a status other than 0 each list and each watch.
	streams bool
	refused error
	status  int
	pace    time.Duration                   // between the objects of a streamed list
	travel  func(what string) time.Duration // how long a request takes to the server, or the beginning of an answer back; nil for no time
	asked   []string                        // what was asked for
}

// past is the history of one resource.
type past struct {
	apiVersion, kind string
	version, oldest  int // the last one, and the oldest from which on a watch can go on
	objects          map[string]int
	log              []occurrence
	changed          chan struct{} // closed at the next change
	ended            chan struct{} // closed to end all watches
}

// occurrence is a change of an object.
type occurrence struct {
	version int
	kind    string
	name    string
}

func newHistory() *history {
	h := &history{streams: true, resources: map[string]*past{}}
	for name, kind := range map[string][2]string{services: {"v1", "Service"}, nodes: {"v1", "Node"},
		endpointSlices: {"discovery.k8s.io/v1", "EndpointSlice"}, serviceCIDRs: {"networking.k8s.io/v1", "ServiceCIDR"}} {
		h.resources[name] = &past{apiVersion: kind[0], kind: kind[1], version: 10, oldest: 10, objects: map[string]int{},
			changed: make(chan struct{}), ended: make(chan struct{})}
	}
	return h
}

// client returns a client of the server.
func (h *history) client(t *testing.T) *Client {
	c, err := newClient(&rest.Config{Host: "http://api.example", QPS: -1, Transport: roundTrip(h.answer)})
	require.NoError(t, err)
	return c
}

// change creates or changes a Service or, with gone, removes it.
func (h *history) change(name string, gone bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resources[services].change(name, gone)
}

func (p *past) change(name string, gone bool) {
	kind := kindOf(p.objects[name] != 0, gone)
	if kind == "" {
		return
	}
	p.version++
	if p.objects[name] = p.version; gone {
		delete(p.objects, name)
	}
	p.log = append(p.log, occurrence{p.version, kind, name})
	close(p.changed)
	p.changed = make(chan struct{})
}

// kindOf returns what a watch says of a change; "" where nothing changes.
func kindOf(had, gone bool) string {
	switch {
	case gone && !had:
		return ""
	case gone:
		return "DELETED"
	case !had:
		return "ADDED"
	}
	return "MODIFIED"
}

// end ends all watches, and forgets the history if the versions from which they would go on are to be too old. Services change at the same
// moment, before there can be another watch.
func (h *history) end(forget bool, change ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.resources {
		close(p.ended)
		p.ended = make(chan struct{})
		if forget {
			p.version++
			p.oldest = p.version
		}
	}
	for _, name := range change {
		h.resources[services].change(name, false)
	}
}

// set changes how requests are answered.
func (h *history) set(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
}

// count returns how often something was asked for.
func (h *history) count(what string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.asked {
		if strings.HasPrefix(a, what) {
			n++
		}
	}
	return n
}

func status(code int, reason metav1.StatusReason) map[string]any {
	return map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
}

func response(code int, body any) *http.Response {
	text, _ := json.Marshal(body)
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(text))}
}

// answer answers a request.
func (h *history) answer(r *http.Request) (*http.Response, error) {
	q := r.URL.Query()
	what := "list"
	if q.Get("watch") != "" {
		what = "watch" + q.Get("sendInitialEvents")
	}
	h.mu.Lock()
	travel := h.travel
	h.mu.Unlock()
	if travel != nil {
		time.Sleep(travel(what))       // in simulated time
		defer time.Sleep(travel(what)) // see above
	}
	return h.answerNow(r, what)
}

func (h *history) answerNow(r *http.Request, what string) (*http.Response, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	name, q := path.Base(r.URL.Path), r.URL.Query()
	p, from, initial := h.resources[name], q.Get("resourceVersion"), q.Get("sendInitialEvents")
	version, _ := strconv.Atoi(from)
	h.asked = append(h.asked, what+" "+name)
	switch {
	case h.refused != nil:
		return nil, h.refused
	case h.status != 0:
		return response(h.status, status(h.status, metav1.StatusReasonServiceUnavailable)), nil
	case what == "list":
		return response(http.StatusOK, p.list()), nil
	case initial != "" && !h.streams:
		return response(http.StatusUnprocessableEntity, status(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)), nil
	case initial == "" && version < p.oldest && version%2 == 0:
		return response(http.StatusGone, status(http.StatusGone, metav1.StatusReasonExpired)), nil
	case initial != "":
		version = p.version
	}
	var first []map[string]any
	if initial == "true" {
		for _, n := range slices.Sorted(maps.Keys(p.objects)) {
			first = append(first, p.event("ADDED", p.object(n, p.objects[n])))
		}
		end := p.object("", p.version)
		end["metadata"].(map[string]any)["annotations"] = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		first = append(first, p.event("BOOKMARK", end))
	} else if version < p.oldest { // As most often: the answer begins well.
		return response(http.StatusOK, p.event("ERROR", status(http.StatusGone, metav1.StatusReasonExpired))), nil
	}
	out, in := io.Pipe()
	go h.serve(r.Context(), p, p.ended, in, first, version)
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: out}, nil
}

func (p *past) event(kind string, object any) map[string]any {
	return map[string]any{"type": kind, "object": object}
}

func (p *past) object(name string, version int) map[string]any {
	return map[string]any{"apiVersion": p.apiVersion, "kind": p.kind,
		"metadata": map[string]any{"name": name, "resourceVersion": fmt.Sprint(version)}}
}

func (p *past) list() map[string]any {
	items := []any{}
	for n, version := range p.objects {
		items = append(items, p.object(n, version))
	}
	return map[string]any{"apiVersion": p.apiVersion, "kind": p.kind + "List", "items": items,
		"metadata": map[string]any{"resourceVersion": fmt.Sprint(p.version)}}
}

// serve sends what a watch is to bring, until it ends.
func (h *history) serve(ctx context.Context, p *past, ended chan struct{}, w *io.PipeWriter, first []map[string]any, version int) {
	defer w.Close()
	defer context.AfterFunc(ctx, func() { _ = w.CloseWithError(ctx.Err()) })()
	send := json.NewEncoder(w)
	for _, e := range first {
		h.mu.Lock()
		pace := h.pace
		h.mu.Unlock()
		time.Sleep(pace) // in simulated time, as a slow server does
		select {
		case <-ended:
			return
		default:
		}
		if send.Encode(e) != nil {
			return
		}
	}
	for bookmark := time.After(time.Minute); ; {
		h.mu.Lock()
		select {
		case <-ended: // Whatever has come since does not come by this watch.
			h.mu.Unlock()
			return
		default:
		}
		var more []map[string]any
		for _, c := range p.log {
			if c.version > version {
				more = append(more, p.event(c.kind, p.object(c.name, c.version)))
				version = c.version
			}
		}
		changed := p.changed
		h.mu.Unlock()
		for _, e := range more {
			if send.Encode(e) != nil {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ended:
			return
		case <-changed:
		case <-bookmark:
			if send.Encode(p.event("BOOKMARK", p.object("", version))) != nil {
				return
			}
			bookmark = time.After(time.Minute)
		}
	}
}

// sees are the Services that a sink has been told of, with their versions.
type sees struct {
	t        *testing.T
	mu       sync.Mutex
	services map[string]string
	came     map[string]time.Time // when each was last told of
	batches  int
}

func (s *sees) Apply(b source.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.batches++
	for name, svc := range b.Services {
		s.came[name.Name] = time.Now()
		if svc == nil {
			delete(s.services, name.Name)
			continue
		}
		if s.services[name.Name] == svc.ResourceVersion {
			s.t.Errorf("%s is told again as it was", name)
		}
		s.services[name.Name] = svc.ResourceVersion
	}
}

// told returns the version of a Service that the sink was told of, and when that came.
func (s *sees) told(name string) (version string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.services[name], s.came[name]
}

// check compares with what there is.
func (s *sees) check(h *history) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	want := map[string]string{}
	for name, version := range h.resources[services].objects {
		want[name] = fmt.Sprint(version)
	}
	if !maps.Equal(s.services, want) {
		s.t.Errorf("told of %v, want %v", s.services, want)
	}
}

// follow runs a Source of the server until the test ends.
func (h *history) follow(t *testing.T) *sees {
	s := &sees{t: t, services: map[string]string{}, came: map[string]time.Time{}}
	src := New(Config{Client: h.client(t), NodeName: "n1", Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		_ = src.Run(ctx, s)
		close(ended)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return s
}
