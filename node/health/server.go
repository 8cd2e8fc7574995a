package health

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// rebindAfter is the wait before an address that can't be bound is tried again. It is short: another proxy that leaves, or
// this program's former self, should not leave a probe without an answer.
const rebindAfter = time.Second

// Serving says where a Server listens, and what it answers.
type Serving struct {
	// Addrs are where it listens. 0.0.0.0 means every address of both families, as with kube-proxy, and so does ::. The zero
	// AddrPort is left out.
	Addrs   []netip.AddrPort
	Handler http.Handler
	// Program and its version, such as nodeproxy/1.0, are the header Server of each answer; "" for none.
	Program string
	// HardFail makes an address that can't be bound an error. Otherwise it is logged and tried again.
	HardFail bool
	Log      *slog.Logger
}

// Server serves HTTP. Where it listens and what it answers can be exchanged while it serves: connections stay open, and an
// address that remains is listened at all the while. Its methods are not safe for concurrent use.
type Server struct {
	name    string
	http    *http.Server
	serving atomic.Pointer[Serving]
	places  map[netip.AddrPort]*place
	// prepared are listeners that Prepare has opened and Serve has not taken yet.
	prepared map[netip.AddrPort]net.Listener
}

// place is an address that is served, or tried again until it can be.
type place struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// NewServer returns a server that listens nowhere. Its name is what it is called in messages, such as healthz.
func NewServer(name string) *Server {
	s := &Server{name: name, places: map[netip.AddrPort]*place{}, prepared: map[netip.AddrPort]net.Listener{}}
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serving.Load().Handler.ServeHTTP(w, r) })
	s.http = newHTTPServer(answer, newConnections(mostConnections), func() *slog.Logger { return s.serving.Load().Log })
	s.http.Handler = told(func() string { return s.serving.Load().Program }, s.http.Handler)
	return s
}

var errBind = errors.New("the address can't be listened at")

// Prepare opens the addresses of next that are not open yet. Nobody is answered there before Serve; Discard closes them again.
// With HardFail, an address that can't be opened is an error, and then nothing has changed.
func (s *Server) Prepare(next Serving) error {
	for _, addr := range next.Addrs {
		if !addr.IsValid() || s.places[addr] != nil || s.prepared[addr] != nil || s.overlaps(addr) {
			continue
		}
		listener, err := net.Listen("tcp", addr.String())
		if err == nil {
			s.prepared[addr] = listener
		} else if next.HardFail {
			s.Discard()
			return fmt.Errorf("%s server at %s: %w: %w", s.name, addr, errBind, err)
		}
	}
	return nil
}

// overlaps reports whether an address can't be opened as long as the server itself listens at others.
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
		_ = listener.Close() // Nobody has been answered there.
	}
	clear(s.prepared)
}

// Serve makes the server answer as next says, at its addresses and no others.
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

// Close ends all listening and all connections.
func (s *Server) Close() {
	s.Discard()
	for _, p := range s.places {
		p.cancel()
	}
	_ = s.http.Close() // Sockets that are closed already are no matter.
	for _, p := range s.places {
		<-p.done
	}
	clear(s.places)
}

// Run serves until ctx ends, and then returns nil. With HardFail, it returns an error when an address can't be bound, and
// serves at none.
func (s *Server) Run(ctx context.Context, serving Serving) error {
	defer s.Close()
	if err := s.Prepare(serving); err != nil {
		return err
	}
	s.Serve(serving)
	<-ctx.Done()
	return nil
}

// serve listens at one address until ctx ends. listener is the first one, if it is open already.
func (s *Server) serve(ctx context.Context, addr netip.AddrPort, listener net.Listener) {
	failing := ""
	for {
		var err error
		if listener == nil {
			listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", addr.String())
		}
		if err == nil {
			if failing != "" {
				s.serving.Load().Log.Info("the address can be listened at now", "server", s.name, "address", addr)
			}
			failing = ""
			err = s.answer(ctx, listener)
			listener = nil
		}
		if ctx.Err() != nil {
			return
		}
		if failing != err.Error() {
			failing = err.Error()
			s.serving.Load().Log.Error("an address can't be listened at; nobody is answered there, and it is tried again",
				"server", s.name, "address", addr, "every", rebindAfter, "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(rebindAfter):
		}
	}
}

// answer serves at a listener until it ends, or ctx does.
func (s *Server) answer(ctx context.Context, listener net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	return s.http.Serve(listener)
}

// Who asks sends a few hundred bytes and gets a few hundred back, so these limits are generous.
const (
	requestTimeout = 10 * time.Second
	answerTimeout  = 30 * time.Second
	idleTimeout    = 2 * time.Minute
	headerBytes    = 16 << 10
	// mostConnections is how many connections a server has at most.
	mostConnections = 256
)

// newHTTPServer returns a server that nobody can hold up by sending or reading slowly, nor by how many connections they make.
// What it has to say of its clients goes to log.
func newHTTPServer(h http.Handler, c *connections, logger func() *slog.Logger) *http.Server {
	return &http.Server{
		Handler: onlyAnswers(h), ReadTimeout: requestTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: headerBytes,
		ConnState: c.changed, ErrorLog: log.New(debugWriter(logger), "", 0),
	}
}

// told says in each answer of h whose it is: where two proxies have one port, it may be either's.
func told(program func() string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p := program(); p != "" {
			w.Header().Set("Server", p)
		}
		h.ServeHTTP(w, r)
	})
}

// debugWriter logs what is written to it, at level debug.
type debugWriter func() *slog.Logger

func (w debugWriter) Write(p []byte) (int, error) {
	w().Debug(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}

// onlyAnswers passes GET and HEAD on, refuses all else, and reads the body of no request. The answer has to be taken within
// answerTimeout, but for profiles, which take as long as they are asked to.
func onlyAnswers(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn := http.NewResponseController(w)
		deadline := time.Now().Add(answerTimeout)
		if strings.HasPrefix(r.URL.Path, profiles) {
			deadline = time.Time{}
		}
		_ = conn.SetWriteDeadline(deadline) // A recorder in a test has none.
		if r.ContentLength != 0 {           // It has one, or may have.
			w.Header().Set("Connection", "close")
			_ = conn.SetReadDeadline(time.Now()) // What has not come is not waited for.
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET and HEAD are answered here", http.StatusMethodNotAllowed)
			return
		}
		h.ServeHTTP(w, r)
	})
}
