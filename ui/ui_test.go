package ui

import (
	"net/http/httptest"
	"strings"
	"testing"

	"nodeproxy/inspect"
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
