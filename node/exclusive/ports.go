package exclusive

import (
	"bufio"
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
)

// answerTimeout is how long somebody who listens may take to answer. A proxy answers from memory.
const answerTimeout = time.Second

// listening looks for a proxy that listens at one of the ports.
func (g *Guard) listening() *Proxy {
	ports := g.ports()
	listening, err := listeningAt(ports)
	if err != nil {
		g.warn("another proxy is looked for only at the loopback addresses", err)
		for _, port := range ports {
			for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
				listening = append(listening, sockets.Socket{Addr: a, Port: port})
			}
		}
	}
	if len(listening) == 0 {
		return nil
	}
	return g.among(listening, sockets.Own())
}

// listeningBeside does the same for a program that listens there itself. Where its own sockets can't be told from those of others,
// there are no others.
func (g *Guard) listeningBeside() *Proxy {
	listening, err := listeningAt(g.ports())
	if err != nil {
		g.warn("a proxy that starts later is looked for only by its name", err)
		return nil
	}
	own := sockets.Own() // After the list, so that no socket of this program's is in that alone.
	if own == nil {
		return nil
	}
	return g.among(listening, own)
}

func (g *Guard) ports() []uint16 { return slices.Concat([]uint16{HealthzPort, MetricsPort}, g.Ports) }

// among returns the first proxy that one of these sockets belongs to, leaving out this program's own.
func (g *Guard) among(listening []sockets.Socket, own map[uint32]bool) *Proxy {
	for _, s := range listening {
		// A proxy is root's. Whoever is not may not keep one from working.
		if s.UID != 0 && int(s.UID) != os.Geteuid() || own[s.Inode] {
			continue
		}
		if p := g.ask(s); p != nil {
			return p
		}
	}
	return nil
}

// ask returns the proxy that a socket belongs to; nil if it belongs to none.
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
	p := &Proxy{At: netip.AddrPortFrom(s.Addr, s.Port)}
	if s.Inode != 0 {
		owner := sockets.Owners(map[uint32]bool{s.Inode: true})[s.Inode]
		p.PID, p.Name = owner.PID, owner.Name
	}
	hangs := kind == silent && (p.PID == 0 || p.Name == kubeProxyName || p.Name == "nodeproxy")
	if kind != proxy && !hangs && p.Name != kubeProxyName {
		p = nil
	}
	if s.Inode != 0 && kind != silent { // Who is silent is asked again: it may just be slow.
		if g.seen == nil {
			g.seen = map[uint32]*Proxy{}
		}
		g.seen[s.Inode] = p
	}
	return p
}

// answer is what somebody who listens turns out to be.
type answer int

const (
	gone    answer = iota // nobody listens any more
	proxy                 // a proxy that works
	waiting               // a nodeproxy that has written nothing yet: the claim decides whose turn it is
	silent                // somebody who takes connections, and says nothing
	another               // somebody else
)

// probe finds out what listens at an address.
func probe(at netip.AddrPort) answer {
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

// isHealth recognises what kube-proxy and nodeproxy answer at /healthz.
func isHealth(body []byte) bool {
	var health struct{ LastUpdated, CurrentTime *string }
	return json.Unmarshal(body, &health) == nil && health.LastUpdated != nil && health.CurrentTime != nil
}

// isWaiting recognises a nodeproxy that waits for another proxy by what it answers at /readyz, where kube-proxy has nothing.
func isWaiting(body []byte) bool {
	var ready struct {
		Missing []struct{ Condition string }
	}
	return json.Unmarshal(body, &ready) == nil && len(ready.Missing) > 0 && ready.Missing[0].Condition == "free"
}

// isMode recognises what they answer at /proxyMode of the metrics port.
func isMode(body string) bool {
	return slices.Contains([]string{"iptables", "ipvs", "nftables"}, body)
}

var errConnect = errors.New("nobody takes the connection")

// get asks for a path, whatever the status is. The connection is made by the caller's thread, in its network namespace.
func get(at netip.AddrPort, path string) ([]byte, error) {
	deadline := time.Now().Add(answerTimeout)
	conn, err := (&net.Dialer{Deadline: deadline, KeepAlive: -1}).Dial("tcp", at.String())
	if err != nil {
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", errConnect, err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	req, err := http.NewRequest(http.MethodGet, "http://"+at.String()+path, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	const most = 64 << 10
	return io.ReadAll(io.LimitReader(resp.Body, most))
}
