package ui

import (
	"bufio"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/inspect"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// TestAccess: by default only clients on the node get the page, and only by names that nobody elsewhere can give it.
func TestAccess(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		access     Access
		peer, host string
		want       int
	}{
		{FromNode, "127.0.0.1:4711", "localhost:10249", 200},
		{FromNode, "127.0.0.1:4711", "127.0.0.1:10249", 200},
		{FromNode, "127.8.0.1:4711", "127.0.0.1", 200},
		{FromNode, "[::1]:4711", "[::1]:10249", 200},
		{FromNode, "[::ffff:127.0.0.1]:4711", "127.0.0.1:10249", 200},
		{FromNode, "192.168.0.5:4711", "192.168.0.1:10249", 403},
		{FromNode, "[fe80::1%eth0]:4711", "192.168.0.1:10249", 403},
		{FromNode, "127.0.0.1:4711", "rebound.example:10249", 403},
		{FromNode, "", "localhost", 403},
		{Anybody, "192.168.0.5:4711", "node1.example:10249", 200},
	} {
		r := httptest.NewRequest("GET", Path, nil)
		r.RemoteAddr, r.Host = tt.peer, tt.host
		w := httptest.NewRecorder()
		Handler(func() *inspect.Node { return nil }, tt.access).ServeHTTP(w, r)
		if w.Code != tt.want {
			t.Errorf("%s, from %s to %s: %d, want %d", tt.access, tt.peer, tt.host, w.Code, tt.want)
		}
	}
}

// TestReadOnly: nothing but the page and what it asks for is served, only to be read, and with headers that keep other pages' scripts away.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	h := Handler(func() *inspect.Node { return nil }, Anybody)
	for request, want := range map[string]int{
		"GET /ui/": 200, "GET /ui/app.js": 200, "GET /ui/style.css": 200, "GET /ui/nothing": 404,
		"GET /ui/v1/services": 503, "GET /ui/v1/findings": 503, "GET /ui/v1/explain": 503, "GET /ui/v1/history": 503, // There is no daemon behind it.
		"GET /ui/v1/other": 404, "GET /v1/services": 404, "POST /ui/v1/services": 405, "DELETE /ui/": 405,
	} {
		method, path, _ := strings.Cut(request, " ")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
		if w.Code != want {
			t.Errorf("%s: %d, want %d", request, w.Code, want)
		}
		if policy := w.Header().Get("Content-Security-Policy"); !strings.HasPrefix(policy, "default-src 'none'; script-src 'self';") || strings.Contains(policy, "unsafe") {
			t.Errorf("%s: Content-Security-Policy %q", request, policy)
		}
	}
}

// pipes is a listener whose connections hold nothing back: what is written waits until it is read.
type pipes struct {
	accepted chan net.Conn
}

func (p pipes) Addr() net.Addr { return &net.UnixAddr{} }

func (p pipes) Close() error { return nil }

func (p pipes) Accept() (net.Conn, error) {
	c, open := <-p.accepted
	if !open {
		return nil, net.ErrClosed
	}
	return c, nil
}

// ask sends a request, and reads no answer yet.
func (p pipes) ask(t *testing.T, path string) net.Conn {
	t.Helper()
	client, server := net.Pipe()
	t.Cleanup(func() { client.Close() })
	p.accepted <- server
	require.NoError(t, client.SetDeadline(time.Now().Add(time.Minute)))
	if _, err := client.Write([]byte("GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	return client
}

// TestStalledClients: clients that don't read their answers lose their places to those that do.
func TestStalledClients(t *testing.T) {
	t.Parallel()
	state := proxier.NewState("n1", plan.Settings{}, plan.Families[:], nil)
	long := make([]source.Finding, 2*piece/1000)
	for i := range long {
		long[i] = source.Finding{Object: string(rune('a' + i%26)), Detail: strings.Repeat("x", 1000)}
	}
	waiting := make(chan struct{}, 100)
	n := &inspect.Node{View: func(read func(*proxier.State)) { read(state) }, Findings: func() []source.Finding {
		waiting <- struct{}{}
		return long
	}}
	l := pipes{accepted: make(chan net.Conn)}
	server := &http.Server{Handler: Handler(func() *inspect.Node { return n }, Anybody)}
	ended := make(chan struct{})
	go func() { _ = server.Serve(l); close(ended) }()
	defer func() { close(l.accepted); <-ended; server.Close() }()
	for range mostAtOnce {
		l.ask(t, "/ui/v1/findings")
		select {
		case <-waiting: // It has a place.
		case <-time.After(time.Minute):
			t.Fatal("a client gets no place")
		}
	}
	for begin := time.Now(); ; { // On a busy machine, a client that reads may be slow too.
		answer, err := http.ReadResponse(bufio.NewReader(l.ask(t, "/ui/v1/findings")), nil)
		if err == nil && answer.StatusCode == http.StatusOK {
			break
		}
		if time.Since(begin) > time.Minute {
			t.Fatalf("a client beside those that do not read: %+v, %v", answer, err)
		}
	}
}
