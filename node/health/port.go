package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// port is the health check node port of one Service. Only Services.Run uses its fields, except count.
type port struct {
	service plan.Service
	number  uint16
	count   atomic.Pointer[localEndpoints]

	server   *http.Server
	open     map[listenAt]*socket
	report   source.Report
	reported string // what was last reported; empty if all is well since
	retry    time.Duration
	retryAt  time.Time
}

// socket is a listening socket of a port.
type socket struct {
	net.Listener
	closed atomic.Bool   // it was closed here
	ended  chan struct{} // closed when it no longer serves
}

// close returns when the kernel has closed the socket too, so that its address can be bound again.
func (s *socket) close() {
	s.closed.Store(true)
	_ = s.Close() // It may be closed already.
	<-s.ended
}

// over reports whether the socket no longer serves.
func (s *socket) over() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// localEndpoints is the number of ready endpoints of a Service on this node, by family.
type localEndpoints struct {
	number [2]int  // of IPv4, IPv6
	has    [2]bool // whether the Service has a cluster IP of the family
}

func familyIndex(f plan.Family) int {
	if f == plan.IPv6 {
		return 1
	}
	return 0
}

// families returns those that the Service has.
func (l *localEndpoints) families() []plan.Family {
	return slices.DeleteFunc(slices.Clone(plan.Families[:]), func(f plan.Family) bool { return !l.has[familyIndex(f)] })
}

// over returns the number for a request over f.
func (l *localEndpoints) over(f plan.Family) int {
	i := familyIndex(f)
	if !l.has[i] {
		i = 1 - i
	}
	return l.number[i]
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
	var here [2][]netip.Addr
	for _, key := range keys {
		i := familyIndex(key.Family)
		count.has[i] = true
		sp := p.Services[key]
		for _, list := range [][]plan.Endpoint{sp.Endpoints.Local, sp.Endpoints.Cluster} {
			for _, ep := range list {
				if ep.Local && !ep.Terminating {
					here[i] = append(here[i], ep.Addr.Addr())
				}
			}
		}
	}
	for i := range here {
		slices.SortFunc(here[i], netip.Addr.Compare)
		count.number[i] = len(slices.Compact(here[i]))
	}
	return number, count
}

// equalAddresses reports whether node ports answer at the same addresses.
func equalAddresses(a, b plan.NodePortAddresses) bool {
	return a.Primary == b.Primary && slices.Equal(a.CIDRs, b.CIDRs)
}

func newPort(svc plan.Service, number uint16, cfg ServicesConfig, c *connections) *port {
	p := &port{service: svc, number: number, open: map[listenAt]*socket{}, report: cfg.Report}
	p.server = newHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.answer(w, familyOf(r), cfg.Healthy())
	}), c, func() *slog.Logger { return cfg.Log })
	p.server.Handler = named(func() string { return cfg.Program }, p.server.Handler)
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

// close closes all sockets and connections.
func (p *port) close() {
	p.closeExcept(nil)
	_ = p.server.Close() // Its sockets are closed already.
}

// closeExcept closes the sockets that are not at one of these addresses, and forgets those that have ended. It reports whether there
// were any.
func (p *port) closeExcept(at []listenAt) (closed bool) {
	for where, s := range p.open {
		if s.over() || !slices.Contains(at, where) {
			delete(p.open, where)
			s.close()
			closed = true
		}
	}
	return closed
}

// listen opens the sockets that are missing. It returns false if one could not be opened, and then sets the time of the next
// attempt. It calls lost when a socket ends without being closed here. Until a time, it tries again where the address is in use.
func (p *port) listen(at []listenAt, until time.Time, lost func(*port, error)) bool {
	var failed error
	for _, where := range at {
		if p.open[where] != nil {
			continue
		}
		address := netip.AddrPortFrom(where.addr, p.number).String()
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), where.network, address)
		for errors.Is(err, unix.EADDRINUSE) && time.Now().Before(until) {
			time.Sleep(time.Millisecond)
			listener, err = (&net.ListenConfig{}).Listen(context.Background(), where.network, address)
		}
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
			err := p.server.Serve(s)
			if close(s.ended); !s.closed.Load() {
				lost(p, err)
			}
		}()
	}
	if failed == nil {
		p.reported, p.retry = "", 0
		return true
	}
	p.putOff(time.Now())
	if text := failed.Error(); p.reported != text {
		p.reported = text
		p.report(source.Finding{
			Severity: source.Problem, Object: "Service " + p.service.String(), Field: "spec.healthCheckNodePort", Detail: text,
			Effect: "load balancers that ask there take this node for one without endpoints; listening is retried until it works",
		})
	}
	return false
}

// putOff sets the time of the next attempt.
func (p *port) putOff(now time.Time) {
	p.retry = min(max(2*p.retry, firstRetry), lastRetry)
	p.retryAt = now.Add(p.retry)
}

// cause returns the reason of an error without the address, which the message names already.
func cause(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Err
	}
	return err
}
