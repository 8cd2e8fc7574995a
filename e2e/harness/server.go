package harness

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
)

// ServeBoth serves TCP and UDP on a port, at both of the host's addresses, until the World is closed. A server greets
// each TCP connection, and answers each UDP packet, with one line: its name, the port, and the source address that it
// saw. A TCP connection then stays open and echoes lines.
func (w *World) ServeBoth(h *Host, name string, port uint16) error {
	for _, ip := range []netip.Addr{h.IP4, h.IP6} {
		at := netip.AddrPortFrom(ip, port)
		if err := w.ServeTCP(h.Netns, name, at); err != nil {
			return err
		}
		if err := w.ServeUDP(h.Netns, name, at); err != nil {
			return err
		}
	}
	return nil
}

// ServeTCP serves TCP at one address of a namespace; see ServeBoth.
func (w *World) ServeTCP(n *Netns, name string, at netip.AddrPort) error {
	l, err := In(n, func() (*net.TCPListener, error) { return net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at)) })
	if err != nil {
		return fmt.Errorf("TCP server %s: %w", name, err)
	}
	w.serve(l, func(*net.TCPConn) string { return name }, at.Port())
	return nil
}

// serve accepts connections until the listener is closed; name says what to call the server of one.
func (w *World) serve(l *net.TCPListener, name func(*net.TCPConn) string, port uint16) {
	w.AtEnd(func() { l.Close() })
	go func() {
		for {
			c, err := l.AcceptTCP()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				go converse(c, name(c), port)
			}
		}
	}()
}

func converse(c *net.TCPConn, name string, port uint16) {
	defer c.Close()
	client, _ := c.RemoteAddr().(*net.TCPAddr)
	if _, err := c.Write(greeting(name, port, client.AddrPort())); err != nil {
		return
	}
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		if _, err := fmt.Fprintf(c, "%s\n", lines.Bytes()); err != nil {
			return
		}
	}
}

// ServeUDP serves UDP at one address of a namespace; see ServeBoth.
func (w *World) ServeUDP(n *Netns, name string, at netip.AddrPort) error {
	c, err := In(n, func() (*net.UDPConn, error) { return net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)) })
	if err != nil {
		return fmt.Errorf("UDP server %s: %w", name, err)
	}
	w.AtEnd(func() { c.Close() })
	go func() {
		buf := make([]byte, 2048)
		for {
			_, from, err := c.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				// A client that has left is no concern of the server's.
				_, _ = c.WriteToUDPAddrPort(greeting(name, at.Port(), from), from)
			}
		}
	}()
	return nil
}

func greeting(name string, port uint16, from netip.AddrPort) []byte {
	return fmt.Appendf(nil, "%s %d %s\n", name, port, from.Addr().Unmap())
}

// Swarm is a pod that answers at every address of a range of each family, in place of as many pods. Its server's name is
// the address at which the client reached it.
type Swarm struct {
	*Pod
	Range4, Range6 netip.Prefix
}

// Addr returns the i-th address of a family, for i from 0 to 65533.
func (s *Swarm) Addr(family, i int) netip.Addr { return nth(pick(family, s.Range4, s.Range6), 1+i) }

// AddSwarm makes a Swarm on node1 that serves TCP on a port.
func (w *World) AddSwarm(t testing.TB, port uint16) *Swarm {
	t.Helper()
	p := w.AddPod(t, w.Node1(), "swarm", "10.250.255.254")
	s := &Swarm{Pod: p, Range4: netip.MustParsePrefix("10.251.0.0/16"), Range6: netip.MustParsePrefix("fd00:10:251::/112")}
	if err := errors.Join(p.Take(s.Range4), p.Take(s.Range6)); err != nil {
		t.Fatalf("harness: addresses of the swarm: %v", err)
	}
	l, err := In(p.Netns, func() (*net.TCPListener, error) { return net.ListenTCP("tcp", &net.TCPAddr{Port: int(port)}) })
	if err != nil {
		t.Fatalf("harness: server of the swarm: %v", err)
	}
	w.serve(l, func(c *net.TCPConn) string { return c.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().String() }, port)
	return s
}
