package health

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
)

// logBuffer is a log that can be read while it is written.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// eventually fails the test if ok does not come true within a minute.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func get(url string) (int, http.Header, string, error) {
	client := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get(url)
	if err != nil {
		return 0, nil, "", err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	return r.StatusCode, r.Header, string(body), err
}

// taken returns an address on loopback at which somebody listens.
func taken(t *testing.T) (net.Listener, netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	return l, netip.MustParseAddrPort(l.Addr().String())
}

// serve runs a server until the test ends.
func serve(t *testing.T, serving Serving) *Server {
	t.Helper()
	s := NewServer("healthz", "")
	s.Serve(serving)
	t.Cleanup(s.Close)
	return s
}

func TestServerTakesAnAddressOnceItIsFree(t *testing.T) {
	t.Parallel()
	other, addr := taken(t)
	log := &logBuffer{}
	freeAddr := freeAddress(t)
	serving := Serving{Addrs: []netip.AddrPort{addr, {}, freeAddr}, Handler: http.HandlerFunc(pong),
		Log: slog.New(slog.NewTextHandler(log, nil))}
	s := serve(t, serving)
	answers := func(at netip.AddrPort) func() bool {
		return func() bool {
			code, _, body, err := get(fmt.Sprintf("http://%s/", at))
			return err == nil && code == 200 && body == "ok"
		}
	}
	eventually(t, "the address that is free answers", answers(freeAddr))
	eventually(t, "a message", func() bool { return strings.Contains(log.String(), addr.String()) })
	time.Sleep(rebindAfter + 100*time.Millisecond) // It tries once more, and is to say nothing.
	if n := strings.Count(log.String(), "level=ERROR"); n != 1 {
		t.Errorf("%d messages:\n%s", n, log)
	}
	other.Close()
	eventually(t, "the other address answers", answers(addr))
	s.Close()
	for _, a := range []netip.AddrPort{addr, freeAddr} {
		if _, _, _, err := get(fmt.Sprintf("http://%s/", a)); err == nil {
			t.Errorf("%s answers after the end", a)
		}
	}
}

func TestPrepareFails(t *testing.T) {
	t.Parallel()
	_, addr := taken(t)
	err := NewServer("metrics", "").Prepare(addr)
	want := "metrics server at " + addr.String() + ": can't listen on the address: "
	if err == nil || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("error is %v, want %s…", err, want)
	}
}

func TestDebug(t *testing.T) {
	t.Parallel()
	d := Debug{Mode: "iptables", Config: struct {
		Kind string `json:"kind"`
	}{"KubeProxyConfiguration"}, Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeText(w, "m 1") }),
		SLIs: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeText(w, "s 1") })}
	const text, js = "text/plain; charset=utf-8", "application/json"
	for _, tc := range []struct {
		path      string
		profiling bool
		code      int
		kind      string
		body      string
	}{
		{"/healthz", false, 200, text, "ok"},
		{"/healthz/ping", false, 200, text, "ok"},
		{"/healthz?verbose", false, 200, text, "[+]ping ok\nhealthz check passed\n"},
		{"/proxyMode", false, 200, text, "iptables"},
		{"/metrics", false, 200, text, "m 1"},
		{"/metrics/slis", false, 200, text, "s 1"},
		{"/configz", false, 200, js, `{"kubeproxy.config.k8s.io":{"kind":"KubeProxyConfiguration"}}`},
		{"/debug/pprof/", false, 404, "", ""},
		{"/debug/pprof/cmdline", false, 404, "", ""},
		{"/debug/pprof/heap", true, 200, "application/octet-stream", ""},
		{"/debug/pprof/cmdline", true, 200, text, ""},
		{"/other", true, 404, "", ""},
	} {
		d.Profiling = tc.profiling
		w := httptest.NewRecorder()
		d.Handler().ServeHTTP(w, httptest.NewRequest("GET", tc.path, nil))
		if w.Code != tc.code || tc.kind != "" && w.Header().Get("Content-Type") != tc.kind ||
			tc.body != "" && w.Body.String() != tc.body {
			t.Errorf("%s: %d %s %q; want %d %s %q", tc.path, w.Code, w.Header().Get("Content-Type"), w.Body, tc.code, tc.kind, tc.body)
		}
		if tc.code == 200 && !tc.profiling && tc.path != "/metrics" && w.Header().Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: X-Content-Type-Options is missing", tc.path)
		}
	}
	w := httptest.NewRecorder()
	if (Debug{}).Handler().ServeHTTP(w, httptest.NewRequest("GET", "/configz", nil)); w.Body.String() != "{}" {
		t.Errorf("without a configuration: %s", w.Body)
	}
	w = httptest.NewRecorder()
	bad := Debug{Config: func() {}}
	if bad.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/configz", nil)); w.Code != 500 {
		t.Errorf("with a configuration that is none: %d %s", w.Code, w.Body)
	}
}

// TestAnswersNameProgram: every answer names the program, even a refusal and that of a health check node port.
func TestAnswersNameProgram(t *testing.T) {
	t.Parallel()
	const program = "nodeproxy/1.2"
	addr := freeAddress(t)
	s := NewServer("healthz", program)
	t.Cleanup(s.Close)
	node := NewNode(NodeConfig{Program: program})
	s.Serve(Serving{Addrs: []netip.AddrPort{addr}, Handler: node.Handler(), Log: slog.New(slog.DiscardHandler)})
	eventually(t, "it answers", func() bool { _, _, _, err := get("http://" + addr.String()); return err == nil })
	for path, code := range map[string]int{"/healthz": 503, "/livez": 200, "/readyz": 503, "/elsewhere": 404} {
		c, header, body, err := get("http://" + addr.String() + path)
		if err != nil || c != code || header.Get("Server") != program {
			t.Errorf("%s: %v, %d, header %v", path, err, c, header)
		}
		if code != 404 && !strings.Contains(body, `"program":"`+program+`"`) {
			t.Errorf("%s: %s", path, body)
		}
	}
	resp, err := http.Post("http://"+addr.String()+"/healthz", "", nil)
	require.NoError(t, err)
	resp.Body.Close()
	if resp.StatusCode != 405 || resp.Header.Get("Server") != program {
		t.Errorf("POST: %s, header %v", resp.Status, resp.Header)
	}

	p := newPort(plan.Service{Namespace: "ns", Name: "s"}, 1, ServicesConfig{Program: program, Healthy: node.Healthy}, newConnections(1))
	p.count.Store(&localEndpoints{})
	w := httptest.NewRecorder()
	p.server.Handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	if got := w.Header().Get("Server"); got != program {
		t.Errorf("a health check node port: Server is %q", got)
	}
}
