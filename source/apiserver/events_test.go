package apiserver

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"

	"nodeproxy/source/apiserver/apiservertest"
)

// eventServer takes events, and answers as a test says.
type eventServer struct {
	mu       sync.Mutex
	requests []string // method and path
	created  []eventsv1.Event
	patches  []string
	answers  []int // HTTP status of the next answers; then all is well
}

func (s *eventServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	s.requests = append(s.requests, r.Method+" "+r.URL.Path)
	body, _ := io.ReadAll(r.Body)
	if len(s.answers) > 0 {
		status := s.answers[0]
		s.answers = s.answers[1:]
		if status != 0 {
			apiservertest.Refuse(w, status)
			return
		}
	}
	if r.Method == http.MethodPatch {
		s.patches = append(s.patches, r.Header.Get("Content-Type")+" "+string(body))
		fmt.Fprint(w, `{"kind":"Event","apiVersion":"events.k8s.io/v1"}`)
		return
	}
	var e eventsv1.Event
	if err := json.Unmarshal(body, &e); err != nil {
		apiservertest.Refuse(w, http.StatusBadRequest)
		return
	}
	s.created = append(s.created, e)
	_, _ = w.Write(body)
}

// startEvents runs an Events that retries at once, until the test ends.
func startEvents(t *testing.T, answers ...int) (*Events, *eventServer) {
	s := &eventServer{answers: answers}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	e := NewEvents(clientOf(t, server.URL), "n1", "nodeproxy", slog.New(slog.DiscardHandler))
	e.retry = time.Millisecond
	return e, s
}

func (s *eventServer) sees(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for begun := time.Now(); time.Since(begun) < time.Minute; time.Sleep(2 * time.Millisecond) {
		s.mu.Lock()
		ok := condition()
		s.mu.Unlock()
		if ok {
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t.Fatalf("%s: not within a minute; %q, patches %q", what, s.requests, s.patches)
}

// TestEventsOfANode: an event is an object by which kubectl finds it, and equal ones become a series of it.
func TestEventsOfANode(t *testing.T) {
	t.Parallel()
	e, s := startEvents(t)
	e.Normal("Starting", "StartNodeproxy", "version %s", "1") // before it runs
	go e.Run(t.Context())
	s.sees(t, "an event", func() bool { return len(s.created) == 1 })
	got := s.created[0]
	if got.Namespace != "default" || !strings.HasPrefix(got.Name, "n1.") || got.Regarding.Kind != "Node" || got.Regarding.Name != "n1" ||
		got.Regarding.UID != "n1" || got.Reason != "Starting" || got.Action != "StartNodeproxy" || got.Note != "version 1" ||
		got.Type != "Normal" || got.ReportingController != "nodeproxy" || got.ReportingInstance == "" || got.EventTime.IsZero() || got.Series != nil {
		t.Errorf("%+v", got)
	}
	for range 2 {
		e.Normal("Starting", "StartNodeproxy", "version 1")
	}
	s.sees(t, "a series", func() bool { return len(s.patches) == 2 })
	if !strings.HasPrefix(s.patches[1], `application/merge-patch+json {"series":{"count":3,"lastObservedTime":"`) ||
		s.requests[2] != "PATCH /apis/events.k8s.io/v1/namespaces/default/events/"+got.Name {
		t.Errorf("%q: %q", s.requests, s.patches)
	}
	e.Warning("Starting", "StartNodeproxy", "version 1")
	s.sees(t, "another kind of event", func() bool { return len(s.created) == 2 && s.created[1].Type == "Warning" })
}

// TestEventsThatAreNotTaken: what got no answer is tried again, what was refused is not, and a series of an object that is
// gone begins anew.
func TestEventsThatAreNotTaken(t *testing.T) {
	t.Parallel()
	e, s := startEvents(t, http.StatusServiceUnavailable, http.StatusServiceUnavailable, 0, http.StatusForbidden, http.StatusNotFound)
	go e.Run(t.Context())
	e.Normal("A", "Do", "")
	s.sees(t, "the event after two failures", func() bool { return len(s.created) == 1 && len(s.requests) == 3 })
	e.Normal("B", "Do", "")
	e.Normal("A", "Do", "")
	s.sees(t, "the event anew", func() bool { return len(s.created) == 2 })
	s.mu.Lock()
	defer s.mu.Unlock()
	var methods []string
	for _, r := range s.requests {
		method, _, _ := strings.Cut(r, " ")
		methods = append(methods, method)
	}
	if !slices.Equal(methods, []string{"POST", "POST", "POST", "POST", "PATCH", "POST"}) || s.created[1].Reason != "A" {
		t.Errorf("%q, last %+v", s.requests, s.created[1])
	}
}

// TestEventsAreLimited: more than the limit are dropped, and nobody waits.
func TestEventsAreLimited(t *testing.T) {
	t.Parallel()
	e, s := startEvents(t)
	for i := range 3 * eventBurst {
		e.Normal("A", "Do", "%d", i)
	}
	go e.Run(t.Context())
	s.sees(t, "the first", func() bool { return len(s.created) == eventBurst })
	time.Sleep(50 * time.Millisecond) // Another event is not to come, and there is no sign of that.
	s.sees(t, "no more", func() bool { return len(s.created) == eventBurst })
	long := shortened(strings.Repeat("é", maxNote))
	if len(long) > maxNote || len(long) < maxNote-5 || !strings.HasSuffix(long, "é…") {
		t.Errorf("%d bytes, ending in %q", len(long), long[len(long)-6:])
	}
}
