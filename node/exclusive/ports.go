package exclusive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"time"

	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// answerTimeout is how long a probe waits for an answer. A proxy answers from memory. Tests have more time.
var answerTimeout = time.Second

// listening returns the first proxy that listens on one of the ports, leaving out this process; nil if there is none, or if that can't be
// found out.
func (g *Guard) listening() *Proxy {
	list, err := sockets.List(plan.TCP)
	if err != nil {
		g.warn("other proxies are looked for by process name only", err)
		return nil
	}
	own := sockets.Own() // After the list, so that no socket of this program's is in that alone.
	ports := append([]uint16{HealthzPort, MetricsPort}, g.Ports...)
	for _, s := range list {
		// A proxy runs as root. A process of another user must not keep a proxy from working.
		if !slices.Contains(ports, s.Port) || s.UID != 0 && int(s.UID) != os.Geteuid() || own[s.Inode] {
			continue
		}
		if p := g.ask(s); p != nil {
			return p
		}
	}
	return nil
}

// reach returns the addresses at which a socket may be reached from this host; the first that answers is used. A socket bound to
// all IPv6 addresses usually accepts IPv4 too, even where IPv6 is off.
func reach(s sockets.Socket) []netip.AddrPort {
	ipv4 := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), s.Port)
	switch {
	case !s.Everywhere():
		return []netip.AddrPort{netip.AddrPortFrom(s.Addr, s.Port)}
	case s.Addr.Is4():
		return []netip.AddrPort{ipv4}
	}
	return []netip.AddrPort{netip.AddrPortFrom(netip.IPv6Loopback(), s.Port), ipv4}
}

// ask returns the proxy that owns a socket; nil if the owner is not a proxy.
func (g *Guard) ask(s sockets.Socket) *Proxy {
	if p, known := g.seen[s.Inode]; known {
		return p
	}
	kind := gone
	for _, at := range reach(s) {
		if kind = probe(at); kind != gone {
			break
		}
	}
	if kind == gone || kind == waiting {
		return nil
	}
	owner := sockets.Owners(map[uint32]bool{s.Inode: true})[s.Inode]
	p := &Proxy{Name: owner.Name, PID: owner.PID, At: netip.AddrPortFrom(s.Addr, s.Port)}
	hangs := kind == silent && (p.PID == 0 || p.Name == kubeProxyName || p.Name == "nodeproxy")
	if kind != proxy && !hangs && p.Name != kubeProxyName {
		p = nil
	}
	if kind != silent { // A silent one is probed again: it may just be slow.
		if g.seen == nil {
			g.seen = map[uint32]*Proxy{}
		}
		g.seen[s.Inode] = p
	}
	return p
}

// found is the result of a probe.
type found int

const (
	gone    found = iota // nothing listens any more
	proxy                // a working proxy
	waiting              // a nodeproxy that has not written anything yet: the claim decides which one works
	silent               // a program that accepts connections and sends nothing
	another              // another program
)

// probe finds out which kind of program listens at an address.
func probe(at netip.AddrPort) found {
	health, err := get(at, "/healthz")
	var timeout net.Error
	switch {
	case isHealth(health):
		if ready, _ := get(at, "/readyz"); isWaiting(ready) {
			return waiting
		}
		return proxy
	case err == nil:
		if mode, _ := get(at, "/proxyMode"); isMode(string(mode)) {
			return proxy
		}
		return another
	case errors.As(err, &timeout) && timeout.Timeout():
		return silent
	case errors.Is(err, errConnect):
		return gone
	}
	return another
}

// isHealth reports whether a body is an answer of kube-proxy or nodeproxy to /healthz.
func isHealth(body []byte) bool {
	var health struct{ LastUpdated, CurrentTime *string }
	return json.Unmarshal(body, &health) == nil && health.LastUpdated != nil && health.CurrentTime != nil
}

// isWaiting reports whether a body is the answer to /readyz of a nodeproxy that waits for another proxy. kube-proxy has no /readyz.
func isWaiting(body []byte) bool {
	var ready struct {
		Missing []struct{ Condition string }
	}
	return json.Unmarshal(body, &ready) == nil && len(ready.Missing) > 0 && ready.Missing[0].Condition == "free"
}

// isMode reports whether a body is an answer to /proxyMode on the metrics port.
func isMode(body string) bool {
	return slices.Contains([]string{"iptables", "ipvs", "nftables"}, body)
}

var errConnect = errors.New("no program accepts the connection")

// get requests a path and returns the body whatever the status. The connection is made by the calling thread, in its network
// namespace.
func get(at netip.AddrPort, path string) ([]byte, error) {
	conn, err := net.DialTimeout("tcp", at.String(), answerTimeout)
	if err != nil {
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", errConnect, err)
	}
	defer conn.Close()
	client := http.Client{
		Timeout:       answerTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // That is an answer too.
		Transport: &http.Transport{
			DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil },
		},
	}
	resp, err := client.Get("http://" + at.String() + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	const most = 64 << 10
	return io.ReadAll(io.LimitReader(resp.Body, most))
}
