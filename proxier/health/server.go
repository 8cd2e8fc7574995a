package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// rebindAfter is the wait before an address that can't be bound is tried again. It is short: another proxy that leaves, or
// this program's former self, should not leave a probe without an answer.
const rebindAfter = time.Second

// Server serves HTTP at fixed addresses.
type Server struct {
	// Name is what the server is called in messages, such as healthz.
	Name string
	// Addrs are where it listens. 0.0.0.0 means every address of both families, as with kube-proxy, and so does ::. The zero
	// AddrPort is left out.
	Addrs   []netip.AddrPort
	Handler http.Handler
	// HardFail makes an address that can't be bound an error that Run returns. Otherwise it is logged and tried again.
	HardFail bool
	Log      *slog.Logger
}

// Run serves until ctx ends, and then returns nil. With HardFail, it returns an error when an address can't be bound, and
// serves at none.
func (s *Server) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	server := newServer(s.Handler, s.Log)
	var running sync.WaitGroup
	for _, addr := range s.Addrs {
		if !addr.IsValid() {
			continue
		}
		running.Go(func() {
			if err := s.serve(ctx, server, addr); err != nil {
				cancel(err)
			}
		})
	}
	<-ctx.Done()
	_ = server.Close() // Sockets that are closed already are no matter.
	running.Wait()
	if err := context.Cause(ctx); errors.Is(err, errBind) {
		return err
	}
	return nil
}

var errBind = errors.New("the address can't be listened at")

// serve listens at one address until ctx ends.
func (s *Server) serve(ctx context.Context, server *http.Server, addr netip.AddrPort) error {
	failing := ""
	for {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr.String())
		if err == nil {
			if failing != "" {
				s.Log.Info("the address can be listened at now", "server", s.Name, "address", addr)
			}
			failing = ""
			err = server.Serve(listener)
		}
		if ctx.Err() != nil {
			return nil
		}
		if s.HardFail {
			return fmt.Errorf("%s server at %s: %w: %w", s.Name, addr, errBind, err)
		}
		if failing != err.Error() {
			failing = err.Error()
			s.Log.Error("an address can't be listened at; nobody is answered there, and it is tried again", "server", s.Name,
				"address", addr, "every", rebindAfter, "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rebindAfter):
		}
	}
}

// Who asks sends a few hundred bytes and gets a few hundred back, so these limits are generous. What is answered may take
// longer: a profile takes as long as it is asked to.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	headerBytes   = 64 << 10
)

// newServer returns a server that nobody can hold up by sending slowly. What it has to say of its clients goes to log.
func newServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: headerBytes,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}
