package harness

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
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
