package main

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// emptyCluster is an API server without objects, which keeps the events that it is sent.
type emptyCluster struct {
	*httptest.Server
	hold  chan struct{} // if not nil, lists wait until it is closed
	ended chan struct{} // closed when requests are to end
	end   func()        // closes its address and all connections

	mu     sync.Mutex
	asked  map[string]int // lists, by resource
	events []eventsv1.Event
}

// newEmptyCluster starts an API server at an address in the network namespace of this thread.
func newEmptyCluster(t *testing.T, address string, hold chan struct{}) *emptyCluster {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	c := &emptyCluster{hold: hold, ended: make(chan struct{}), asked: map[string]int{}}
	c.Server = &httptest.Server{Listener: listener, Config: &http.Server{Handler: c}}
	c.Start()
	c.end = sync.OnceFunc(func() {
		close(c.ended) // A client may connect again while connections are closed, and Close waits for its request.
		c.CloseClientConnections()
		c.Close()
	})
	t.Cleanup(c.end)
	return c
}

// kinds are the kinds of the lists, by resource.
var kinds = map[string][2]string{
	"services": {"v1", "ServiceList"}, "nodes": {"v1", "NodeList"}, "endpointslices": {"discovery.k8s.io/v1", "EndpointSliceList"},
	"servicecidrs": {"networking.k8s.io/v1", "ServiceCIDRList"},
}

func (c *emptyCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	resource := path.Base(r.URL.Path)
	kind, known := kinds[resource]
	switch query := r.URL.Query(); {
	case r.Method == http.MethodPost:
		var event eventsv1.Event
		if err := json.NewDecoder(r.Body).Decode(&event); err == nil {
			c.mu.Lock()
			c.events = append(c.events, event)
			c.mu.Unlock()
		}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(event)
	case !known:
		answerError(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	case query.Get("sendInitialEvents") != "": // As before there were streamed lists.
		answerError(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case query.Get("watch") != "":
		w.(http.Flusher).Flush()
		select {
		case <-c.ended:
		case <-r.Context().Done():
		}
	default:
		c.mu.Lock()
		c.asked[resource]++
		c.mu.Unlock()
		if c.hold != nil {
			select {
			case <-c.hold:
			case <-c.ended:
				return
			case <-r.Context().Done():
				return
			}
		}
		_ = json.NewEncoder(w).Encode(map[string]any{
			"apiVersion": kind[0], "kind": kind[1], "metadata": map[string]any{"resourceVersion": "10"}, "items": []any{},
		})
	}
}

func answerError(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: metav1.StatusFailure, Code: int32(code), Reason: reason})
}

// lists returns how often a resource has been asked for.
func (c *emptyCluster) lists(resource string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked[resource]
}

// notes returns the texts of the events of a reason.
func (c *emptyCluster) notes(reason string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, e := range c.events {
		if e.Reason == reason {
			out = append(out, e.Note)
		}
	}
	return out
}

// kubeconfig writes a file that leads to the API server at a URL.
func kubeconfig(t *testing.T, url string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	writeFile(t, file, `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": [{"name": "c", "cluster": {"server": "`+url+`"}}], "users": [{"name": "u", "user": {}}],
		"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}`)
	return file
}

// writeFile writes a file as a whole.
func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name+".new", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		t.Fatal(err)
	}
}

// process is a nodeproxy that runs in the network namespace of the test.
type process struct {
	*exec.Cmd
	log   *logged
	ended chan struct{} // is closed when it has ended
}

// logged is what a process writes.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// startProcess starts a nodeproxy of node n1, which the end of the test ends.
func startProcess(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := &process{log: &logged{}, ended: make(chan struct{})}
	p.Cmd = exec.Command("nodeproxy", append([]string{"run", "--node-name=n1", "--oom-score-adj=0"}, args...)...)
	p.Env = append(append(os.Environ(), "GORACE=atexit_sleep_ms=0"), env...) // Under -race, it would take a second more to end.
	p.Stdout, p.Stderr = p.log, p.log
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.Wait() // Its ProcessState says how it ended.
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("log of %v:\n%s", args, p.log)
		}
	})
	return p
}

// eventually waits until a condition holds, for at most 30 seconds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 30s: %s", what)
		}
	}
}
