package health

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// serverAt starts a server that answers as serving says, at an address of its own, until the test ends.
func serverAt(t *testing.T, h http.Handler) (*Server, Serving) {
	t.Helper()
	return started(t, NewServer("test", ""), h)
}

func started(t *testing.T, s *Server, h http.Handler) (*Server, Serving) {
	t.Helper()
	serving := Serving{Handler: h, Log: slog.New(slog.DiscardHandler)}
	for try := 1; ; try++ { // Another test may take the address in between.
		addr := freeAddress(t)
		serving.Addrs = []netip.AddrPort{addr}
		if err := s.Prepare(addr); err == nil {
			break
		} else if try == 10 {
			t.Fatal(err)
		}
	}
	s.Serve(serving)
	t.Cleanup(s.Close)
	return s, serving
}

// say opens a connection, and says something on it.
func say(t *testing.T, addr netip.AddrPort, text string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr.String())
	if err == nil {
		_, err = io.WriteString(conn, text)
	}
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestRequestsThatAreNotAnswered: whatever asks for something else than an answer, or sends something with it, is told so at once,
// without a wait for what it has not sent.
func TestRequestsThatAreNotAnswered(t *testing.T) {
	t.Parallel()
	_, serving := serverAt(t, http.HandlerFunc(pong))
	const body = "Content-Length: 1000000\r\n\r\nx"
	for request, want := range map[string]int{
		"GET / HTTP/1.1\r\nHost: a\r\n\r\n":                                        200,
		"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n":                                       200,
		"GET / HTTP/1.1\r\nHost: a\r\n" + body:                                     200,
		"POST / HTTP/1.1\r\nHost: a\r\n" + body:                                    405,
		"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n":         405,
		"PUT / HTTP/1.1\r\nHost: a\r\n" + body:                                     405,
		"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n" + body:            405,
		"DELETE / HTTP/1.1\r\nHost: a\r\n\r\n":                                     405,
		"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 100<<10) + "\r\n": 431,
	} {
		conn := say(t, serving.Addrs[0], request)
		_ = conn.SetReadDeadline(time.Now().Add(requestTimeout / 2))
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Errorf("%.60q: %v", request, err)
			continue
		}
		if answer.StatusCode != want || want == 405 && answer.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%.60q: %s, want %d", request, answer.Status, want)
		}
		if strings.Contains(request, body) && !answer.Close {
			t.Errorf("%.60q: the connection is kept", request)
		}
	}
}

// TestClientsThatHoldConnections: however many there are, and whatever they leave unsaid, they keep nobody from an answer, and there
// are never more connections than the limit.
func TestClientsThatHoldConnections(t *testing.T) {
	t.Parallel()
	for name, unfinished := range map[string]string{
		"silent":        "",
		"slow header":   "GET / HTTP/1.1\r\nHost:",
		"slow body":     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n",
		"idle":          "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
		"does not read": strings.Repeat("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 20),
	} {
		t.Run(name, func(t *testing.T) {
			var open, most atomic.Int64
			s := NewServer("test", "")
			limit := s.http.ConnState
			s.http.ConnState = func(c net.Conn, state http.ConnState) {
				switch limit(c, state); state {
				case http.StateNew:
					most.Store(max(most.Load(), open.Add(1)))
				case http.StateClosed:
					open.Add(-1)
				}
			}
			_, serving := started(t, s, http.HandlerFunc(pong))
			var held []net.Conn
			for i := range 3 * mostConnections {
				held = append(held, say(t, serving.Addrs[0], unfinished))
				if len(held) > mostConnections+100 { // The server has given up the oldest. This program may have as few as 1024 files.
					held[0].Close()
					held = held[1:]
				}
				if i%100 == 0 {
					if code, _, body, err := get("http://" + serving.Addrs[0].String()); err != nil || code != 200 || body != "ok" {
						t.Errorf("beside %d of them: %d %q, %v", i, code, body, err)
					}
				}
			}
			eventually(t, "the connections that are too many are closed", func() bool { return open.Load() <= mostConnections })
			if n := most.Load(); n > 2*mostConnections { // A closed one is forgotten a moment later.
				t.Errorf("%d connections at once", n)
			}
		})
	}
}

// TestServerExchange: while a server comes to listen elsewhere and to answer otherwise, no request fails, over connections that
// stay or new ones; where it does not listen any more, nobody answers.
func TestServerExchange(t *testing.T) {
	t.Parallel()
	s, first := serverAt(t, http.HandlerFunc(pong))
	stays := first.Addrs[0]
	ctx, cancel := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	var asked, failed atomic.Int64
	for _, keep := range []bool{true, false} {
		asking.Go(func() {
			client := http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: !keep}}
			for ctx.Err() == nil {
				r, err := client.Get("http://" + stays.String())
				if asked.Add(1); err != nil || r.StatusCode != 200 {
					failed.Add(1)
					t.Error(err)
					continue
				}
				_, _ = io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
		})
	}
	for i := 0; i < 20 || asked.Load() < 100; i++ { // A busy machine asks slowly.
		other := freeAddress(t)
		said := fmt.Sprint("answer ", i)
		next := Serving{Addrs: []netip.AddrPort{stays, other}, Log: first.Log,
			Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeText(w, said) })}
		if err := s.Prepare(other); err != nil {
			continue // Another test has taken the address.
		}
		s.Serve(next)
		for _, addr := range next.Addrs {
			if _, _, body, err := get("http://" + addr.String()); err != nil || body != said {
				t.Errorf("%s: %q, %v; want %q", addr, body, err, said)
			}
		}
		_, busy := taken(t)
		if err := s.Prepare(busy); err == nil {
			t.Error("a busy address is no error")
		}
		next.Addrs = next.Addrs[:1]
		s.Serve(next)
		if _, _, _, err := get("http://" + other.String()); err == nil {
			t.Errorf("%s still answers", other)
		}
	}
	cancel()
	asking.Wait()
	if failed.Load() > 0 {
		t.Errorf("%d of %d requests failed", failed.Load(), asked.Load())
	}
}
