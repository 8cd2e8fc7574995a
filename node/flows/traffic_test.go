package flows

import (
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// oneHost makes this thread's namespace a host with two endpoints' addresses, which tracks flows and sends everything else
// nowhere.
func oneHost(t testing.TB) {
	t.Helper()
	sh(t, "ip addr add 10.0.0.1/32 dev lo; ip addr add 10.0.0.2/32 dev lo; ip addr add 192.168.0.1/32 dev lo;"+
		"ip route add default dev lo src 192.168.0.1; iptables-nft -w -A OUTPUT -m conntrack --ctstate INVALID -j DROP")
}

// translate makes an endpoint the one of a frontend.
func translate(t testing.TB, protocol, addr string, port int, endpoint string) {
	t.Helper()
	sh(t, fmt.Sprintf("iptables-nft -w -t nat -F OUTPUT; iptables-nft -w -t nat -A OUTPUT -p %s -d %s --dport %d "+
		"-j DNAT --to-destination %s", protocol, addr, port, endpoint))
}

// udpServer answers each packet at an address of this thread's namespace with its name, until the test ends.
func udpServer(t testing.TB, name, at string) {
	t.Helper()
	c, err := net.ListenPacket("udp", at)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo([]byte(name), from)
		}
	}()
}

// unanswered is how long to wait for an answer that is not to come.
const unanswered = 300 * time.Millisecond

// ask sends a packet from a connected socket and returns the answer within a time, or the error as text.
func ask(c net.Conn, within time.Duration) string {
	if _, err := c.Write([]byte("?")); err != nil {
		return err.Error()
	}
	_ = c.SetReadDeadline(time.Now().Add(within))
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	if err != nil {
		return err.Error()
	}
	return string(buf[:n])
}

// TestRealFlow: a UDP client that keeps its port is stuck with an endpoint that is gone, and with no endpoint where it
// began before there was one; a pass frees it.
func TestRealFlow(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		oneHost(t)
		udpServer(t, "one", "10.0.0.1:5353")
		udpServer(t, "two", "10.0.0.2:5353")
		c, err := (&net.Dialer{LocalAddr: &net.UDPAddr{Port: 40000}}).DialContext(t.Context(), "udp", "10.96.0.10:53")
		require.NoError(t, err)
		defer c.Close()
		if got := ask(c, unanswered); got == "one" || got == "two" {
			t.Fatalf("without rules: %s", got)
		}
		r := newReconciler(nil)
		p := plan.New(plan.Node{}, plan.Settings{})
		before := "" // who has answered last
		for _, step := range []struct{ endpoint, name string }{
			{"10.0.0.1:5353", "one"}, {"10.0.0.2:5353", "two"}, {"10.0.0.1:5353", "one"},
		} {
			translate(t, "udp", "10.96.0.10", 53, step.endpoint)
			within := 20 * time.Second
			if before == "" {
				within = unanswered
			}
			if got := ask(c, within); got == step.name || before != "" && got != before {
				t.Errorf("the flow goes to %q before anything was removed, want %q: the kernel does not do what this test is about", got, before)
			}
			before = step.name
			set(r, p, service("dns", plan.UDP, "10.96.0.10:53", step.endpoint))
			mustPass(t, r)
			if got := ask(c, 20*time.Second); got != step.name {
				t.Errorf("with endpoint %s: %q, want %q", step.endpoint, got, step.name)
			}
			mustPass(t, r)
			if got := ask(c, 20*time.Second); got != step.name {
				t.Errorf("with endpoint %s, second pass: %q, want %q", step.endpoint, got, step.name)
			}
		}
	})
}

// echoServer echoes what comes over TCP at an address of this thread's namespace, until the test ends.
func echoServer(t testing.TB, at string) {
	t.Helper()
	l, err := net.Listen("tcp", at)
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
}

// TestRealReset: a TCP connection to an endpoint that is gone goes on without ResetTCP; with it, its next packet resets it,
// since another endpoint gets that.
func TestRealReset(t *testing.T) {
	t.Parallel()
	for _, reset := range []bool{false, true} {
		nstest.Run(t, func() {
			oneHost(t)
			r := newReconciler(func(c *Config) { c.ResetTCP = func(*plan.ServicePort) bool { return reset } })
			p := plan.New(plan.Node{}, plan.Settings{})
			use := func(endpoint string) {
				translate(t, "tcp", "10.96.0.10", 80, endpoint)
				p.Set(service("web", plan.TCP, "10.96.0.10:80", endpoint))
				r.Update(p, plan.Everything())
				mustPass(t, r)
			}
			echoServer(t, "10.0.0.1:8080")
			echoServer(t, "10.0.0.2:8080")
			use("10.0.0.1:8080")
			c, err := net.DialTimeout("tcp", "10.96.0.10:80", 20*time.Second)
			require.NoError(t, err)
			defer c.Close()
			if got := ask(c, 20*time.Second); got != "?" {
				t.Fatalf("before: %s", got)
			}
			use("10.0.0.2:8080")
			want := "?"
			if reset {
				want = syscall.ECONNRESET.Error()
			}
			if got := ask(c, 20*time.Second); !strings.HasSuffix(got, want) {
				t.Errorf("reset %v: %q, want %q", reset, got, want)
			}
		})
	}
}
