package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// realServer is the weight of a real server at a virtual server's address, in the form "-w 1"; "" if there is none.
func realServer(t *testing.T, w *harness.World, at netip.AddrPort, pod *harness.Pod) string {
	t.Helper()
	family := 4
	if at.Addr().Is6() {
		family = 6
	}
	start := fmt.Sprintf("-a -t %s -r %s ", at, netip.AddrPortFrom(pod.IP(family), 8080))
	for _, line := range strings.Split(virtualServers(t, w), "\n") {
		if rest, ok := strings.CutPrefix(line, start); ok {
			return rest[strings.Index(rest, "-w"):]
		}
	}
	return ""
}

// TestIPVSDrain: an endpoint that is taken out gets no new connection, and keeps those it has: until they end, if that is
// sooner; until the grace period has passed, if no EndpointSlice lists it any more; and as long as it lasts while one does.
// One that comes back gets new connections again, and the old ones go on.
func TestIPVSDrain(t *testing.T) {
	const grace = 4 * time.Second
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		set := func(endpoints []harness.Endpoint) { w.Write(t, "s.yaml", harness.Objects(s, endpoints...)...) }
		removed, kept := w.Pod("n2a"), w.Ready("n1a")
		set(w.Ready("n2a"))
		w.Run(t, variant, clusterCIDR, "--ipvs-graceful-period="+grace.String())
		type open struct {
			*harness.Conversation
			to netip.AddrPort
		}
		converse := func() []open {
			t.Helper()
			var out []open
			for _, family := range families {
				for _, to := range frontends(w, 1, family) {
					c, err := w.Client.Converse(to)
					require.NoError(t, err)
					t.Cleanup(c.Close)
					out = append(out, open{c, to})
				}
			}
			return out
		}
		goOn := func(all []open, when string) {
			t.Helper()
			for _, c := range all {
				assert.NoError(t, c.Echo("line"), "%s, %s", when, c.to)
			}
		}
		moved := func(what, pod string) {
			t.Helper()
			for _, family := range families {
				for _, to := range frontends(w, 1, family) {
					eventually(t, what, func() error { return serversOf(w.Client, "tcp", to, pod) })
				}
			}
		}
		at := clusterIP(1, 4)

		// Back again, and then out while an EndpointSlice still lists it.
		first := converse()
		set(kept)
		moved("taken out", "n1a")
		if got := realServer(t, w, at, removed); got != "-w 0" {
			t.Errorf("an endpoint that is taken out with a connection has %q, want weight 0", got)
		}
		set(w.Ready("n2a"))
		moved("back again", "n2a")
		goOn(first, "after the endpoint came back")
		set(append(w.Terminating("n2a"), kept...))
		moved("terminating", "n1a")
		time.Sleep(grace + 2*time.Second) // The connections are to go on after this time.
		goOn(first, "while an EndpointSlice lists the endpoint")

		// Its connections end. Those of other requests, which were closed in the usual way, are remembered for two minutes.
		set(kept)
		moved("gone", "n1a")
		goOn(first, "right after the endpoint's end")
		for _, c := range first {
			c.Abort()
		}
		// The deadline.
		gone := time.Now()
		eventually(t, "removal", func() error {
			if got := realServer(t, w, at, removed); got != "" {
				return fmt.Errorf("still there with %s", got)
			}
			return nil
		})
		t.Logf("the real server was removed after %v", time.Since(gone).Round(100*time.Millisecond))

		set(w.Ready("n2a"))
		moved("a new endpoint", "n2a")
		second := converse()
		set(kept)
		removal := time.Now()
		eventually(t, "taken out", func() error {
			if got := realServer(t, w, at, removed); got != "-w 0" {
				return fmt.Errorf("an endpoint that is taken out with a connection has %q, want weight 0", got)
			}
			return nil
		})
		goOn(second, "within the grace period")
		moved("taken out", "n1a")
		eventually(t, "the end of the connections", func() error {
			for _, c := range second {
				if c.Echo("line") == nil {
					return fmt.Errorf("%s goes on", c.to)
				}
			}
			return nil
		})
		if took := time.Since(removal); took < grace-time.Second {
			t.Errorf("connections ended %v after their endpoint was taken out, and the grace period is %v", took, grace)
		}
	})
}

// TestIPVSDrainEndsWithConnections: a real server goes soon after its last connection has ended, long before the grace
// period has.
func TestIPVSDrainEndsWithConnections(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n2a")...)...)
		d := w.Run(t, variant, clusterCIDR, "--ipvs-graceful-period=1h")
		c, err := w.Client.Converse(clusterIP(1, 4))
		require.NoError(t, err)
		defer c.Close()
		logged := len(d.Log())
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		require.NoError(t, d.WaitForAfter(logged, harness.Limit, harness.InSync))
		eventually(t, "no connections over IPv6", func() error {
			if got := realServer(t, w, clusterIP(1, 6), w.Pod("n2a")); got != "" {
				return fmt.Errorf("still there with %s", got)
			}
			return nil
		})
		time.Sleep(3 * time.Second) // What drains is looked at each second, and this is to stay.
		if got := realServer(t, w, clusterIP(1, 4), w.Pod("n2a")); got != "-w 0" {
			t.Fatalf("with a connection: %q, want weight 0", got)
		}
		c.Abort() // IPVS remembers it for ten seconds
		eventually(t, "removal", func() error {
			if got := realServer(t, w, clusterIP(1, 4), w.Pod("n2a")); got != "" {
				return fmt.Errorf("still there with %s", got)
			}
			return nil
		})
	})
}
