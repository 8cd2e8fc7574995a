// Package apiservertest is an API server for tests: it answers with the objects, the errors and the delays that a test wants.
package apiservertest

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// Server is an API server from before there were streamed lists. It has empty lists of Services, EndpointSlices, Nodes and
// ServiceCIDRs, and knows no other resource. It answers in JSON alone.
type Server struct {
	URL   string
	t     testing.TB
	ended chan struct{} // closed when requests are to end
	end   func()

	mu        sync.Mutex
	resources map[string]*resource // by name in the plural
	objects   map[string]any       // by path
	events    []eventsv1.Event
}

// resource is what a test wants to be done with requests for a resource.
type resource struct {
	list   runtime.Object
	status int             // HTTP status with which lists fail, or 0
	hold   <-chan struct{} // if not nil, lists wait until it is closed
	events chan watch.Event
	newer  chan struct{} // closed when another watch begins
	// How often it was listed, and how many watches have begun.
	lists, watches int
}

// New starts a server on a port of the loopback.
func New(t testing.TB) *Server {
	t.Helper()
	return At(t, "127.0.0.1:0")
}

// At starts a server at an address in the network namespace of the calling thread. It ends with the test.
func At(t testing.TB, address string) *Server {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	meta := metav1.ListMeta{ResourceVersion: "10"}
	typed := func(apiVersion, kind string) metav1.TypeMeta {
		return metav1.TypeMeta{APIVersion: apiVersion, Kind: kind}
	}
	s := &Server{t: t, ended: make(chan struct{}), resources: map[string]*resource{}}
	for name, list := range map[string]runtime.Object{
		"services":       &v1.ServiceList{TypeMeta: typed("v1", "ServiceList"), ListMeta: meta},
		"nodes":          &v1.NodeList{TypeMeta: typed("v1", "NodeList"), ListMeta: meta},
		"endpointslices": &discovery.EndpointSliceList{TypeMeta: typed("discovery.k8s.io/v1", "EndpointSliceList"), ListMeta: meta},
		"servicecidrs":   &networking.ServiceCIDRList{TypeMeta: typed("networking.k8s.io/v1", "ServiceCIDRList"), ListMeta: meta},
	} {
		s.resources[name] = &resource{list: list, events: make(chan watch.Event), newer: make(chan struct{})}
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: s}}
	server.Start()
	s.URL = server.URL
	s.end = sync.OnceFunc(func() {
		close(s.ended) // A client may connect again while connections are closed, and Close waits for its request.
		server.CloseClientConnections()
		server.Close()
	})
	t.Cleanup(s.end)
	return s
}

// End closes the server's address and all connections.
func (s *Server) End() { s.end() }

// Serve makes lists of a resource answer with this one.
func (s *Server) Serve(name string, list runtime.Object) {
	s.with(name, func(r *resource) { r.list = list })
}

// ServeObject makes requests for one object answer with it, or with an HTTP status if it is an int; nil for none. A path is such as
// /api/v1/nodes/n1.
func (s *Server) ServeObject(path string, object any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects == nil {
		s.objects = map[string]any{}
	}
	s.objects[path] = object
}

// Fail makes lists of a resource fail with an HTTP status, until that is 0.
func (s *Server) Fail(name string, status int) {
	s.with(name, func(r *resource) { r.status = status })
}

// Hold makes lists of these resources wait until a channel is closed.
func (s *Server) Hold(until <-chan struct{}, names ...string) {
	for _, name := range names {
		s.with(name, func(r *resource) { r.hold = until })
	}
}

// Send delivers an event by the latest watch of a resource, for which it waits.
func (s *Server) Send(name string, kind watch.EventType, object runtime.Object) {
	s.t.Helper()
	var events chan watch.Event
	s.with(name, func(r *resource) { events = r.events })
	select {
	case events <- watch.Event{Type: kind, Object: object}:
	case <-time.After(time.Minute):
		s.t.Errorf("nobody has watched %s for a minute", name)
	}
}

// Expire ends the watch of a resource as a server does that no longer knows the version from which on it goes.
func (s *Server) Expire(name string) {
	s.Send(name, watch.Error, &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
		Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: "too old"})
}

// Lists returns how often a resource was listed.
func (s *Server) Lists(name string) (n int) {
	s.with(name, func(r *resource) { n = r.lists })
	return n
}

// Watches returns how many watches of a resource have begun.
func (s *Server) Watches(name string) (n int) {
	s.with(name, func(r *resource) { n = r.watches })
	return n
}

// Created returns how many events clients have created.
func (s *Server) Created() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.events)
}

// Notes returns the texts of the events of a reason that clients have created.
func (s *Server) Notes(reason string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, e := range s.events {
		if e.Reason == reason {
			out = append(out, e.Note)
		}
	}
	return out
}

func (s *Server) with(name string, f func(*resource)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.resources[name])
}

// ServeHTTP answers a request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	known, query := s.resources[path.Base(r.URL.Path)], r.URL.Query()
	s.mu.Lock()
	object := s.objects[r.URL.Path]
	s.mu.Unlock()
	status, refused := object.(int)
	switch {
	case r.Method == http.MethodPost:
		s.create(w, r)
	case refused:
		Refuse(w, status)
	case object != nil:
		_ = json.NewEncoder(w).Encode(object)
	case known == nil:
		Refuse(w, http.StatusNotFound)
	case query.Get("sendInitialEvents") != "":
		Refuse(w, http.StatusUnprocessableEntity)
	case query.Get("watch") != "":
		s.watch(w, r, known)
	default:
		s.list(w, r, known)
	}
}

// create takes an event.
func (s *Server) create(w http.ResponseWriter, r *http.Request) {
	var event eventsv1.Event
	if err := json.NewDecoder(r.Body).Decode(&event); err == nil {
		s.mu.Lock()
		s.events = append(s.events, event)
		s.mu.Unlock()
	}
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(event)
}

func (s *Server) list(w http.ResponseWriter, r *http.Request, known *resource) {
	s.mu.Lock()
	known.lists++
	hold, status, list := known.hold, known.status, known.list
	s.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-s.ended:
			return
		case <-r.Context().Done():
			return
		}
	}
	if status != 0 {
		Refuse(w, status)
		return
	}
	_ = json.NewEncoder(w).Encode(list)
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, known *resource) {
	s.mu.Lock()
	known.watches++
	close(known.newer) // The client of an older watch may be gone, though its connection does not say so yet.
	newer := make(chan struct{})
	known.newer = newer
	s.mu.Unlock()
	w.(http.Flusher).Flush()
	for {
		select {
		case <-s.ended:
			return
		case <-r.Context().Done():
			return
		case e := <-known.events:
			select {
			case <-newer:
				go func() { // for that one
					select {
					case known.events <- e:
					case <-s.ended:
					}
				}()
				continue
			default:
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"type": e.Type, "object": e.Object})
			w.(http.Flusher).Flush()
			if e.Type == watch.Error {
				return
			}
		}
	}
}

// reasons are those that clients go by, rather than by the status.
var reasons = map[int]metav1.StatusReason{
	http.StatusNotFound: metav1.StatusReasonNotFound, http.StatusForbidden: metav1.StatusReasonForbidden,
	http.StatusUnprocessableEntity: metav1.StatusReasonInvalid,
}

// Refuse answers a request with an error.
func Refuse(w http.ResponseWriter, status int) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(&metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: metav1.StatusFailure, Code: int32(status), Reason: reasons[status], Message: "the test wants it so"})
}

// Kubeconfig writes a kubeconfig for the API server at a URL, and returns its path.
func Kubeconfig(t testing.TB, url string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	err := os.WriteFile(file, []byte(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": [{"name": "c", "cluster": {"server": "`+url+`"}}], "users": [{"name": "u", "user": {}}],
		"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}`), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	return file
}
