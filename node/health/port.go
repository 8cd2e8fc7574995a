package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// port is the health check node port of one Service. Only Services.Run uses its sockets.
type port struct {
	service plan.Service
	number  uint16
	cfg     ServicesConfig
	server  *http.Server
	count   atomic.Pointer[localEndpoints]

	open     map[listenAt]*socket
	failing  time.Time              // since when a socket could not be opened; zero if all are open
	reported atomic.Pointer[string] // what was last reported; nil if all is well since
}

// socket is a listening socket of a port.
type socket struct {
	net.Listener
	err   error         // why it no longer serves
	ended chan struct{} // closed when it no longer serves, and the kernel has closed it
}

// localEndpoints is the number of ready endpoints of a Service on this node, for each family of which it has a cluster IP.
type localEndpoints map[plan.Family]int

func (l localEndpoints) families() []plan.Family { return slices.Sorted(maps.Keys(l)) }

// over returns the number for a request over f.
func (l localEndpoints) over(f plan.Family) int {
	if n, ok := l[f]; ok {
		return n
	}
	for _, n := range l { // the other family's
		return n
	}
	return 0
}

// readPort returns the health check node port of a Service, 0 if it has none, and its ready endpoints on this node. Two ports of
// one endpoint count once, and terminating endpoints do not count. Endpoints on this node are found under policy Local, which a
// Service with such a port has; for ports without it, since nothing outside reaches them yet, under Cluster.
func readPort(p *plan.Plan, svc plan.Service) (number uint16, count localEndpoints) {
	keys := p.KeysOf(svc)
	for _, key := range keys {
		for _, f := range p.Services[key].Frontends {
			if f.Kind == plan.HealthCheckNodePort {
				number = f.Port
			}
		}
	}
	if number == 0 {
		return 0, count
	}
	count = localEndpoints{}
	seen := map[netip.Addr]bool{}
	for _, key := range keys {
		count[key.Family] += 0
		sp := p.Services[key]
		for _, list := range [][]plan.Endpoint{sp.Endpoints.Local, sp.Endpoints.Cluster} {
			for _, ep := range list {
				if addr := ep.Addr.Addr(); ep.Local && !ep.Terminating && !seen[addr] {
					seen[addr] = true
					count[key.Family]++
				}
			}
		}
	}
	return number, count
}

func newPort(svc plan.Service, number uint16, cfg ServicesConfig, c *connections) *port {
	p := &port{service: svc, number: number, cfg: cfg, open: map[listenAt]*socket{}}
	p.server = newHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.answer(w, familyOf(r), cfg.Healthy())
	}), c, cfg.Program, slog.Default)
	return p
}

// familyOf returns the family over which a request has come.
func familyOf(r *http.Request) plan.Family {
	if addr, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
		return plan.FamilyOf(addr.AddrPort().Addr())
	}
	return plan.IPv4
}

// answerFormat is the body of an answer, byte for byte kube-proxy's.
const answerFormat = `{
	"service": {
		"namespace": %q,
		"name": %q
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": %t
}`

// answer answers as kube-proxy does, at any path. The weight is for load balancers that distribute by the number of endpoints of
// each node.
func (p *port) answer(w http.ResponseWriter, f plan.Family, healthy bool) {
	n := p.count.Load().over(f)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(n))
	if n == 0 || !healthy {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = fmt.Fprintf(w, answerFormat, p.service.Namespace, p.service.Name, n, healthy)
}

// places returns those of some addresses at which the Service's families are reached.
func (p *port) places(all []listenAt) []listenAt {
	families := *p.count.Load()
	return slices.DeleteFunc(slices.Clone(all), func(l listenAt) bool {
		_, has := families[plan.FamilyOf(l.addr)]
		return !has && l != wildcard
	})
}

// close closes all sockets and connections.
func (p *port) close() {
	p.closeExcept(nil)
	_ = p.server.Close() // Its sockets are closed already.
}

// closeExcept closes the sockets that are not at one of these addresses, and forgets those that have ended by themselves.
func (p *port) closeExcept(at []listenAt) {
	for where, s := range p.open {
		select {
		case <-s.ended:
			slog.Warn("a health check node port stopped listening; it is retried", "service", p.service, "port", p.number,
				"error", s.err)
		default:
			if slices.Contains(at, where) {
				continue
			}
		}
		delete(p.open, where)
		_ = s.Close() // It may be closed already.
		<-s.ended     // Now its address can be bound again.
	}
}

// listen opens the sockets that are missing, and wakes Run when one ends. It returns false if one could not be opened.
func (p *port) listen(at []listenAt, wake chan struct{}) bool {
	var failed error
	for _, where := range at {
		if p.open[where] != nil {
			continue
		}
		address := netip.AddrPortFrom(where.addr, p.number).String()
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), where.network, address)
		if where.addr.IsUnspecified() && errors.Is(err, unix.EAFNOSUPPORT) {
			continue // The kernel lacks the family, so no request can come over it.
		}
		if err != nil {
			if failed == nil {
				failed = fmt.Errorf("can't listen on port %d at %s: %w", p.number, where, cause(err))
			}
			continue
		}
		s := &socket{Listener: listener, ended: make(chan struct{})}
		p.open[where] = s
		go func() {
			s.err = p.server.Serve(s)
			close(s.ended)
			notify(wake)
		}()
	}
	if failed == nil {
		p.failing = time.Time{}
		p.reported.Store(nil)
		return true
	}
	if p.failing.IsZero() {
		p.failing = time.Now()
	}
	text, before := failed.Error(), p.reported.Load()
	if (before == nil || *before != text) && time.Since(p.failing) >= stillHeld {
		p.reported.Store(&text)
		p.cfg.Report(source.Finding{
			Severity: source.Problem, Object: "Service " + p.service.String(), Field: "spec.healthCheckNodePort", Detail: text,
			Effect: "load balancers that ask there take this node for one without endpoints; listening is retried until it works",
		})
	}
	return false
}

// cause returns the reason of an error without the address, which the message names already.
func cause(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Err
	}
	return err
}
