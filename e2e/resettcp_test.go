package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// Mode ipvs drops what is for an endpoint that is gone, and has no such annotation.
func init() {
	onlyIPTables = append(onlyIPTables, "TestTCPReset", "TestTCPResetByFlag")
}

// A conversation is a TCP connection over which a client sends a line many times a second, each of which the server echoes.
type conversation struct {
	name, server string

	mu     sync.Mutex
	echoes int
	err    error // why it ended
	ended  time.Time
}

// conversationPause is the time from one line to the next.
const conversationPause = 20 * time.Millisecond

// converse starts a conversation that ends with the test.
func converse(t *testing.T, from *harness.Host, to netip.AddrPort) *conversation {
	t.Helper()
	conn, err := from.Dial("tcp", to, time.Now().Add(harness.Patient))
	require.NoError(t, err, "%s to %s", from.Name, to)
	in := bufio.NewReader(conn)
	hello, err := in.ReadString('\n')
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	require.NoError(t, err, "%s to %s", from.Name, to)
	c := &conversation{name: fmt.Sprintf("%s to %s", from.Name, to)}
	c.server, _, _ = strings.Cut(hello, " ")
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.hold(conn, in)
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return c
}

// hold goes on with a conversation until its connection ends. A client that waits for an answer without a limit would not notice a
// reset: the answer that was on its way when the flow was removed is lost, and nothing that it sends draws the reset.
func (c *conversation) hold(conn net.Conn, in *bufio.Reader) {
	for {
		_, err := conn.Write([]byte("a line\n"))
		echoes := 0
		if err == nil {
			_ = conn.SetReadDeadline(time.Now().Add(10 * conversationPause))
			if _, err = in.ReadString('\n'); err == nil {
				echoes = 1
			} else if errors.Is(err, os.ErrDeadlineExceeded) {
				err = nil
			}
		}
		c.mu.Lock()
		c.echoes += echoes
		if err != nil {
			c.err, c.ended = err, time.Now()
		}
		c.mu.Unlock()
		if err != nil {
			return
		}
		time.Sleep(conversationPause) // between two lines
	}
}

// reset returns a check that the connection was reset.
func (c *conversation) reset() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !errors.Is(c.err, syscall.ECONNRESET) && !errors.Is(c.err, syscall.EPIPE) {
		return fmt.Errorf("%s: %v after %d echoes, want a reset", c.name, c.err, c.echoes)
	}
	return nil
}

// goesOn returns a check that there are more echoes than now.
func (c *conversation) goesOn() func() error {
	c.mu.Lock()
	before := c.echoes
	c.mu.Unlock()
	return func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.err != nil || c.echoes < before+5 {
			return fmt.Errorf("%s: %d echoes after %d, %v; want it to go on", c.name, c.echoes, before, c.err)
		}
		return nil
	}
}

// conversations starts one to each frontend of a Service from the outside client and from a pod, and one from the node.
func conversations(t *testing.T, w *harness.World, number int) []*conversation {
	t.Helper()
	var out []*conversation
	for _, family := range families {
		for _, to := range frontends(w, number, family) {
			out = append(out, converse(t, w.Client, to), converse(t, w.Pod("n1c").Host, to))
		}
		out = append(out, converse(t, w.Node1().Host, clusterIP(number, family)))
	}
	return out
}

// resetSoon waits until all were reset, and logs how long the last one took.
func resetSoon(t *testing.T, what string, since time.Time, all []*conversation) {
	t.Helper()
	var longest time.Duration
	for _, c := range all {
		eventually(t, what, c.reset)
		c.mu.Lock()
		longest = max(longest, c.ended.Sub(since))
		c.mu.Unlock()
	}
	t.Logf("%s: all %d connections were reset within %v", what, len(all), longest.Round(time.Millisecond))
}

// goOn checks that all go on for a while.
func goOn(t *testing.T, what string, all []*conversation) {
	t.Helper()
	time.Sleep(500 * time.Millisecond) // A reset, which is not to come, may take as long as this.
	for _, c := range all {
		eventually(t, what, c.goesOn())
	}
}

// resetsTCP makes a Service say whether connections are to be reset.
func resetsTCP(value string) func(*v1.Service) {
	return func(s *v1.Service) { s.Annotations = map[string]string{"nodeproxy.io/reset-tcp": value} }
}

// needsLoose makes the one setting that resetting connections needs: conntrack takes up a connection that it has forgotten, which is
// what the kernel does by default.
func needsLoose(t *testing.T, w *harness.World) {
	t.Helper()
	require.NoError(t, w.Node1().Sysctl("net/netfilter/nf_conntrack_tcp_loose", "1"))
}

// TestTCPReset: connections to an endpoint that is gone, but still answers, are reset if the Service's annotation says so,
// be there another endpoint or none; those to one that terminates are not. Without the annotation, all go on.
func TestTCPReset(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		needsLoose(t, w)
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		s, plain := harness.Service("s", 1, resetsTCP("true")), harness.Service("plain", 2)
		set := func(endpoints ...harness.Endpoint) time.Time {
			w.Write(t, "s.yaml", harness.Objects(s, endpoints...)...)
			w.Write(t, "plain.yaml", harness.Objects(plain, endpoints...)...)
			return time.Now()
		}
		set(w.Ready("n2a")...)
		w.Run(t, variant, clusterCIDR)
		all, others := conversations(t, w, 1), conversations(t, w, 2)
		set(append(w.Terminating("n2a"), w.Ready("n3a")...)...)
		goOn(t, "terminating", all)
		since := set(w.Ready("n3a")...)
		resetSoon(t, "another endpoint", since, all)
		goOn(t, "another endpoint, without the annotation", others)

		all = conversations(t, w, 1)
		for _, c := range all {
			if c.server != "n3a" {
				t.Errorf("%s was answered by %s, want n3a", c.name, c.server)
			}
		}
		since = set()
		resetSoon(t, "no endpoint", since, all)
		goOn(t, "no endpoint, without the annotation", others)
		for _, family := range families {
			for _, to := range frontends(w, 1, family) {
				if a := w.Client.Ask("tcp", to, harness.Patient); a.Outcome != harness.Refused {
					t.Errorf("a new connection to %s: %v, want it refused", to, a)
				}
			}
		}
	})
}

// TestTCPResetByFlag: with --reset-tcp, connections are reset unless the annotation says otherwise.
func TestTCPResetByFlag(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		needsLoose(t, w)
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		s, not := harness.Service("s", 1), harness.Service("not", 2, resetsTCP("false"))
		set := func(pod string) time.Time {
			w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pod)...)...)
			w.Write(t, "not.yaml", harness.Objects(not, w.Ready(pod)...)...)
			return time.Now()
		}
		set("n2a")
		w.Run(t, variant, clusterCIDR, "--reset-tcp")
		all, others := conversations(t, w, 1), conversations(t, w, 2)
		since := set("n3a")
		resetSoon(t, "another endpoint", since, all)
		goOn(t, "another endpoint, with the annotation false", others)
	})
}
