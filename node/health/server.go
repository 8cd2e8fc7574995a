package health

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// rebindAfter is the pause before another attempt to bind an address. It is short: a probe should get an answer soon after another
// proxy, or this program's former process, has released the address.
const rebindAfter = time.Second

// Serving says where a Server listens and what it answers.
type Serving struct {
	// Addrs are the addresses to listen on. 0.0.0.0 means every address of both families, as with kube-proxy, and so does ::. The
	// zero AddrPort is ignored.
	Addrs   []netip.AddrPort
	Handler http.Handler
	Log     *slog.Logger
}

// Server serves HTTP. Its addresses and its handler can be replaced while it serves: connections stay open, and an address that
// remains is listened on all the while. Its methods are not safe for concurrent use.
type Server struct {
	name    string
	http    *http.Server
	serving atomic.Pointer[Serving]
	places  map[netip.AddrPort]*place
	// prepared are listeners that Prepare has opened and Serve has not taken yet.
	prepared map[netip.AddrPort]net.Listener

	mu      sync.Mutex
	failing map[netip.AddrPort]string
}

// Name is the name of the server in messages.
func (s *Server) Name() string { return s.name }

// Failing returns why the server does not listen at addresses at which it should. It may be called at any time.
func (s *Server) Failing() map[netip.AddrPort]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.failing)
}

// setFailing notes why an address is not listened at, "" if it is, and reports whether that is new.
func (s *Server) setFailing(addr netip.AddrPort, why string) (differs bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	differs = s.failing[addr] != why
	if s.failing[addr] = why; why == "" {
		delete(s.failing, addr)
	}
	return differs
}

// place is an address that is served, or retried until it can be.
type place struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// NewServer returns a server that does not listen yet. Messages use its name, such as healthz. program, with its version, such as
// nodeproxy/1.0, is the header Server of each answer; "" for none.
func NewServer(name, program string) *Server {
	s := &Server{name: name, places: map[netip.AddrPort]*place{}, prepared: map[netip.AddrPort]net.Listener{}, failing: map[netip.AddrPort]string{}}
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serving.Load().Handler.ServeHTTP(w, r) })
	s.http = newHTTPServer(answer, newConnections(mostConnections), program, func() *slog.Logger { return s.serving.Load().Log })
	return s
}

// Prepare opens an address that is to be served, unless it is open already. Connections are not answered before Serve; Discard closes
// the listener again. Without Prepare, or where it fails, Serve goes on trying.
func (s *Server) Prepare(addr netip.AddrPort) error {
	if !addr.IsValid() || s.places[addr] != nil || s.prepared[addr] != nil || s.overlaps(addr) {
		return nil
	}
	listener, err := net.Listen("tcp", addr.String())
	if err != nil {
		return fmt.Errorf("%s server at %s: can't listen on the address: %w", s.name, addr, err)
	}
	s.prepared[addr] = listener
	return nil
}

// overlaps reports whether an address can't be opened while the server itself listens on others.
func (s *Server) overlaps(addr netip.AddrPort) bool {
	for other := range s.places {
		if other.Port() == addr.Port() && (other.Addr().IsUnspecified() || addr.Addr().IsUnspecified()) {
			return true
		}
	}
	return false
}

// Discard closes what Prepare has opened.
func (s *Server) Discard() {
	for _, listener := range s.prepared {
		_ = listener.Close() // No connection was answered.
	}
	clear(s.prepared)
}

// Serve makes the server serve next, at its addresses and no others.
func (s *Server) Serve(next Serving) {
	s.serving.Store(&next)
	for addr, p := range maps.Clone(s.places) {
		if !slices.Contains(next.Addrs, addr) {
			delete(s.places, addr)
			p.close()
		}
	}
	for _, addr := range next.Addrs {
		if !addr.IsValid() || s.places[addr] != nil {
			continue
		}
		ctx, cancel := context.WithCancel(context.Background())
		p := &place{cancel, make(chan struct{})}
		s.places[addr] = p
		listener := s.prepared[addr]
		delete(s.prepared, addr)
		go func() {
			defer close(p.done)
			s.serve(ctx, addr, listener)
		}()
	}
	s.Discard()
}

func (p *place) close() {
	p.cancel()
	<-p.done
}

// Close closes all listeners and connections.
func (s *Server) Close() {
	s.Discard()
	for _, p := range s.places {
		p.cancel()
	}
	_ = s.http.Close() // Some sockets may be closed already.
	for _, p := range s.places {
		<-p.done
	}
	clear(s.places)
}

// serve listens on one address until ctx ends. listener is the first listener, if it is open already.
func (s *Server) serve(ctx context.Context, addr netip.AddrPort, listener net.Listener) {
	defer s.setFailing(addr, "")
	for {
		var err error
		if listener == nil {
			listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", addr.String())
		}
		if err == nil {
			if s.setFailing(addr, "") {
				s.serving.Load().Log.Info("listening on the address now", "server", s.name, "address", addr)
			}
			err = s.answer(ctx, listener)
			listener = nil
		}
		if ctx.Err() != nil {
			return
		}
		if s.setFailing(addr, err.Error()) {
			s.serving.Load().Log.Error("can't listen on an address; requests to it are not answered, and it is retried",
				"server", s.name, "address", addr, "every", rebindAfter, "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(rebindAfter):
		}
	}
}

// answer serves at a listener until the listener or ctx ends.
func (s *Server) answer(ctx context.Context, listener net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	return s.http.Serve(listener)
}

// A request and its answer have a few hundred bytes each, so these limits are generous.
const (
	requestTimeout = 10 * time.Second
	answerTimeout  = 30 * time.Second
	idleTimeout    = 2 * time.Minute
	headerBytes    = 16 << 10
	// mostConnections is the maximum number of connections of a server.
	mostConnections = 256
)

// newHTTPServer returns a server that clients can't block by sending or reading slowly, nor by many connections. It names the program in
// each answer, as either may answer where two proxies share a port. Its messages about clients go to the log.
func newHTTPServer(h http.Handler, c *connections, program string, logger func() *slog.Logger) *http.Server {
	return &http.Server{
		Handler: onlyAnswers(h, program), ReadTimeout: requestTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: headerBytes,
		ConnState: c.changed, ErrorLog: log.New(debugWriter(logger), "", 0),
	}
}

// debugWriter logs what is written to it, at level debug.
type debugWriter func() *slog.Logger

func (w debugWriter) Write(p []byte) (int, error) {
	w().Debug(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}

// onlyAnswers accepts GET and HEAD only, and reads no request's body. The client must read the answer within answerTimeout, except
// for profiles, which take as long as the request asks for.
func onlyAnswers(h http.Handler, program string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if program != "" {
			w.Header().Set("Server", program)
		}
		conn := http.NewResponseController(w)
		deadline := time.Now().Add(answerTimeout)
		if strings.HasPrefix(r.URL.Path, profiles) {
			deadline = time.Time{}
		}
		_ = conn.SetWriteDeadline(deadline) // A recorder in a test has none.
		if r.ContentLength != 0 {           // There is a body, or there may be one.
			w.Header().Set("Connection", "close")
			_ = conn.SetReadDeadline(time.Now()) // The server does not wait for the rest of the body.
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET and HEAD are supported", http.StatusMethodNotAllowed)
			return
		}
		h.ServeHTTP(w, r)
	})
}
