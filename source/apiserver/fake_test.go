package apiserver

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"nodeproxy/source"
)

// fakeAPI is an API server of before the time of streamed lists. What it answers, a test says.
type fakeAPI struct {
	*httptest.Server

	mu      sync.Mutex
	lists   map[string]runtime.Object // by resource
	fail    map[string]int            // HTTP status with which lists of a resource fail
	held    map[string]chan struct{}  // lists of a resource wait until the channel is closed
	events  map[string]chan watch.Event
	watches map[string]int // number of watches begun
	asked   map[string]int // number of lists asked for
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{
		lists: map[string]runtime.Object{
			services:       &v1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}},
			endpointSlices: &discovery.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}},
			nodes:          &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}},
			serviceCIDRs:   &networking.ServiceCIDRList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}},
		},
		fail: map[string]int{}, held: map[string]chan struct{}{}, watches: map[string]int{}, asked: map[string]int{},
		events: map[string]chan watch.Event{},
	}
	for resource := range f.lists {
		f.events[resource] = make(chan watch.Event)
	}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	t.Cleanup(f.CloseClientConnections)
	return f
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := path.Base(r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("watch") != "" {
		if r.URL.Query().Get("sendInitialEvents") != "" {
			refuse(w, http.StatusUnprocessableEntity)
			return
		}
		f.serveWatch(w, r, resource)
		return
	}
	f.mu.Lock()
	f.asked[resource]++
	held, status, list := f.held[resource], f.fail[resource], f.lists[resource]
	f.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-r.Context().Done():
			return
		}
	}
	if status != 0 {
		refuse(w, status)
		return
	}
	_ = json.NewEncoder(w).Encode(list)
}

// reasons are those that clients go by, rather than by the status.
var reasons = map[int]metav1.StatusReason{
	http.StatusNotFound: metav1.StatusReasonNotFound, http.StatusForbidden: metav1.StatusReasonForbidden,
	http.StatusUnprocessableEntity: metav1.StatusReasonInvalid,
}

func refuse(w http.ResponseWriter, status int) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(&metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: metav1.StatusFailure, Code: int32(status), Reason: reasons[status], Message: "the test wants it so"})
}

func (f *fakeAPI) serveWatch(w http.ResponseWriter, r *http.Request, resource string) {
	f.mu.Lock()
	f.watches[resource]++
	events := f.events[resource]
	f.mu.Unlock()
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-events:
			_ = json.NewEncoder(w).Encode(map[string]any{"type": e.Type, "object": e.Object})
			w.(http.Flusher).Flush()
			if e.Type == watch.Error {
				return
			}
		}
	}
}

// set changes what is answered.
func (f *fakeAPI) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeAPI) watched(resource string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.watches[resource]
}

// expire ends a watch as a server does that no longer knows the version from which on it goes.
func (f *fakeAPI) expire(resource string) {
	f.events[resource] <- watch.Event{Type: watch.Error, Object: &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
		Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: "too old"}}
}

// recorder is a Sink that remembers.
type recorder struct {
	t  *testing.T
	mu sync.Mutex
	// batches in order, and what follows from them
	batches  []source.Batch
	synced   int
	services map[types.NamespacedName]*v1.Service
}

func (r *recorder) Apply(b source.Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches = append(r.batches, b)
	if b.Synced {
		r.synced++
	}
	for name, svc := range b.Services {
		if svc == nil {
			delete(r.services, name)
		} else {
			r.services[name] = svc
		}
	}
}

// sees waits until a condition holds of what was recorded.
func (r *recorder) sees(what string, condition func() bool) {
	r.t.Helper()
	for begun := time.Now(); time.Since(begun) < 10*time.Second; time.Sleep(2 * time.Millisecond) {
		r.mu.Lock()
		ok := condition()
		r.mu.Unlock()
		if ok {
			return
		}
	}
	r.t.Fatalf("%s: not within 10s; %d batches, %d Services, synced %d times", what, len(r.batches), len(r.services), r.synced)
}

// start runs a Source against the fake until the test ends.
func start(t *testing.T, f *fakeAPI, change func(*Config)) (*Source, *recorder) {
	client, err := NewClient(ClientConfig{Master: f.URL, ContentType: "application/json", AcceptContentTypes: "application/json", QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Client: client, NodeName: "n1", Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg)
	}
	s, sink := New(cfg), &recorder{t: t, services: map[types.NamespacedName]*v1.Service{}}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context(), sink) }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(5 * time.Second):
			t.Error("Run goes on after its context has ended")
		}
	})
	return s, sink
}

func serviceAt(version int, name string) *v1.Service {
	return &v1.Service{
		TypeMeta:   metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, ResourceVersion: fmt.Sprint(version)},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.7"},
	}
}

func serviceList(version int, items ...*v1.Service) *v1.ServiceList {
	out := &v1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(version)}}
	for _, s := range items {
		out.Items = append(out.Items, *s)
	}
	return out
}

func serviceCIDRList(cidrs ...string) *networking.ServiceCIDRList {
	out := &networking.ServiceCIDRList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
	out.Items = append(out.Items, networking.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", ResourceVersion: "3"},
		Spec: networking.ServiceCIDRSpec{CIDRs: cidrs}})
	return out
}

func nodeList(names ...string) *v1.NodeList {
	out := &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
	for _, name := range names {
		out.Items = append(out.Items, v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "3"}})
	}
	return out
}
