package harness

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"
)

// Outcome says how a request ended.
type Outcome string

// The outcomes of a request.
const (
	Answered    Outcome = "answered"
	Refused     Outcome = "refused"     // ICMP port unreachable or TCP reset in reply to the first packet
	TimedOut    Outcome = "timed out"   // no reply at all
	Unreachable Outcome = "unreachable" // ICMP host or network unreachable, or no route
	Failed      Outcome = "failed"      // anything else, such as a reset after the connection was made
)

// Answer is what a client got for one request.
type Answer struct {
	Outcome Outcome
	// Server, Port and Source are the name of the server that answered, its own port, and the client's address as the
	// server saw it.
	Server string
	Port   uint16
	Source netip.Addr
	// Err is the error of a request that was not answered.
	Err error
	// Begun is when the request began, Took the time until its end.
	Begun time.Time
	Took  time.Duration
}

func (a Answer) String() string {
	if a.Outcome == Answered {
		return fmt.Sprintf("%s:%d saw %s", a.Server, a.Port, a.Source)
	}
	return fmt.Sprintf("%s (%v)", a.Outcome, a.Err)
}

// The times to wait for an answer: Patient where one is due; Brief where silence is what is expected, still longer than
// the second after which a TCP socket tries again. A socket that is in the middle of connect when the error for its first
// packet arrives, as often happens between namespaces, takes note only of the second one.
const (
	Patient = 15 * time.Second
	Brief   = 1500 * time.Millisecond
)

// Ask makes one request over a new socket, from a port of its own. network is "tcp" or "udp".
func (n *Netns) Ask(network string, to netip.AddrPort, timeout time.Duration) Answer {
	return n.askFrom(netip.Addr{}, network, to, timeout)
}

// askFrom is Ask from an address of the host, or from the one that its kernel chooses if it is zero; network may also be "sctp".
func (n *Netns) askFrom(from netip.Addr, network string, to netip.AddrPort, timeout time.Duration) (a Answer) {
	start := time.Now()
	c, err := n.dial(network, from, to, start.Add(timeout))
	switch {
	case err != nil:
		a = failure(err, true)
	case network == "udp":
		a = askUDP(c, start.Add(timeout))
		c.Close()
	default:
		a = Greeting(bufio.NewReader(c))
		c.Close()
	}
	a.Begun, a.Took = start, time.Since(start)
	return a
}

// askUDP sends a packet, and again each second without an answer, as clients of a lossy protocol do: the kernel limits
// how many ICMP errors it sends.
func askUDP(c net.Conn, deadline time.Time) Answer {
	buf := make([]byte, 2048)
	for {
		// A rule that drops or rejects a packet on its way out makes the write itself fail with EPERM. What matters is
		// whether an ICMP error follows, and the read shows that.
		if _, err := c.Write([]byte("?\n")); err != nil && !errors.Is(err, syscall.EPERM) {
			return failure(err, true)
		}
		next := time.Now().Add(time.Second)
		if next.After(deadline) {
			next = deadline
		}
		if err := c.SetReadDeadline(next); err != nil {
			return failure(err, true)
		}
		n, err := c.Read(buf)
		if err == nil {
			return parse(string(buf[:n]))
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || !time.Now().Before(deadline) {
			return failure(err, true)
		}
	}
}

// Dial makes a connected socket inside the namespace. Reads and writes of the connection fail after the deadline; a
// caller that keeps it sets another.
func (n *Netns) Dial(network string, to netip.AddrPort, deadline time.Time) (net.Conn, error) {
	return n.dial(network, netip.Addr{}, to, deadline)
}

// dial connects from an address of the host, or from the one that its kernel chooses if it is zero.
func (n *Netns) dial(network string, from netip.Addr, to netip.AddrPort, deadline time.Time) (net.Conn, error) {
	dial := func() (net.Conn, error) {
		d := net.Dialer{Deadline: deadline, KeepAlive: -1}
		switch port := n.freshPort(); {
		case network == "sctp":
			return dialSCTP(from, to, deadline)
		case network == "udp":
			d.LocalAddr = &net.UDPAddr{IP: from.AsSlice(), Port: port}
		case ModeUnderTest() == IPVS: // see SamePort
			d.LocalAddr = &net.TCPAddr{IP: from.AsSlice(), Port: port}
		case from.IsValid():
			d.LocalAddr = &net.TCPAddr{IP: from.AsSlice()}
		}
		return d.Dial(network, to.String())
	}
	c, err := In(n, dial)
	for errors.Is(err, syscall.EADDRINUSE) { // by a server
		c, err = In(n, dial)
	}
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(deadline); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// SamePort opens TCP connections to several addresses from one source port, as a system may choose it by chance. IPVS takes
// two of them for one if they go to the same endpoint; see TestIPVSOneSourcePort.
func (n *Netns) SamePort(addrs ...netip.AddrPort) ([]net.Conn, error) {
	port := n.freshPort()
	var out []net.Conn
	for _, to := range addrs {
		d := net.Dialer{Timeout: Patient, LocalAddr: &net.TCPAddr{Port: port}, Control: shareAddress}
		c, err := In(n, func() (net.Conn, error) { return d.Dial("tcp", to.String()) })
		if err != nil {
			for _, c := range out {
				c.Close()
			}
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

// shareAddress lets a socket have an address that another one is bound to.
func shareAddress(_, _ string, c syscall.RawConn) error {
	var failed error
	if err := c.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	}); err != nil {
		return err
	}
	return failed
}

// freshPort is a source port that the namespace has not used yet, or not for the longest time. The kernel tracks a UDP flow
// for minutes after its socket is closed, and sends a new socket that happens to get the old one's port where the old
// one's packets went.
func (n *Netns) freshPort() int {
	const first, count = 10000, 50000
	return first + int(n.ports.Add(1)%count)
}

// Greeting reads the line with which a server opens a TCP connection.
func Greeting(r *bufio.Reader) Answer {
	line, err := r.ReadString('\n')
	if err != nil {
		return failure(err, false)
	}
	return parse(line)
}

// failure classifies an error; first is true while nothing has come back yet.
func failure(err error, first bool) Answer {
	a := Answer{Outcome: Failed, Err: err}
	var timeout net.Error
	switch {
	case first && errors.Is(err, syscall.ECONNREFUSED):
		a.Outcome = Refused
	case errors.As(err, &timeout) && timeout.Timeout():
		a.Outcome = TimedOut
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		a.Outcome = Unreachable
	case errors.Is(err, io.EOF):
		a.Err = errors.New("connection closed without a greeting")
	}
	return a
}

func parse(line string) Answer {
	var a Answer
	var source string
	if _, err := fmt.Sscanf(strings.TrimSpace(line), "%s %d %s", &a.Server, &a.Port, &source); err != nil {
		return Answer{Outcome: Failed, Err: fmt.Errorf("greeting %q: %w", line, err)}
	}
	ip, err := netip.ParseAddr(source)
	if err != nil {
		return Answer{Outcome: Failed, Err: fmt.Errorf("greeting %q: %w", line, err)}
	}
	a.Outcome, a.Source = Answered, ip
	return a
}

// Conversation is an open TCP connection to a server.
type Conversation struct {
	// With is what the server said at first.
	With Answer

	conn net.Conn
	in   *bufio.Reader
}

// Converse opens a TCP connection and keeps it open.
func (n *Netns) Converse(to netip.AddrPort) (*Conversation, error) {
	return n.ConverseFrom(netip.Addr{}, to)
}

// ConverseFrom opens a connection like Converse, from an address of the host; if it is zero, the host's kernel chooses.
func (n *Netns) ConverseFrom(from netip.Addr, to netip.AddrPort) (*Conversation, error) {
	c, err := n.dial("tcp", from, to, time.Now().Add(Patient))
	if err != nil {
		return nil, err
	}
	out := &Conversation{conn: c, in: bufio.NewReader(c)}
	if out.With = Greeting(out.in); out.With.Outcome != Answered {
		c.Close()
		return nil, out.With.Err
	}
	return out, nil
}

// Echo sends a line and waits for it to come back.
func (c *Conversation) Echo(line string) error {
	if err := c.conn.SetDeadline(time.Now().Add(Patient)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(c.conn, "%s\n", line); err != nil {
		return fmt.Errorf("connection to %s: %w", c.With.Server, err)
	}
	got, err := c.in.ReadString('\n')
	if err != nil {
		return fmt.Errorf("connection to %s: %w", c.With.Server, err)
	}
	if strings.TrimSpace(got) != line {
		return fmt.Errorf("connection to %s: echo %q for %q", c.With.Server, got, line)
	}
	return nil
}

// Close closes the connection.
func (c *Conversation) Close() { c.conn.Close() }

// Abort closes the connection with a reset.
func (c *Conversation) Abort() {
	_ = c.conn.(*net.TCPConn).SetLinger(0)
	c.conn.Close()
}
