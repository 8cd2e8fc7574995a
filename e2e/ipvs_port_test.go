package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// TestIPVSOneSourcePort: when a client has two connections from one source port, to two Services with the same endpoint,
// both work in mode iptables, where the source port is translated. IPVS, which tells them apart by client and endpoint on the
// way back, sends the answers for both to the second. This is a limit of IPVS: the test is to show when it has gone.
func TestIPVSOneSourcePort(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		for _, m := range []harness.Mode{harness.IPTables, harness.IPVS} {
			w := harness.New(t, harness.Options{})
			w.Write(t, "nodes.yaml", w.NodeObjects()...)
			w.Write(t, "one.yaml", harness.Objects(harness.Service("one", 1), w.Ready("n2a")...)...)
			w.Write(t, "two.yaml", harness.Objects(harness.Service("two", 2), w.Ready("n2a")...)...)
			w.Run(t, variant, "--mode="+string(m), clusterCIDR)
			for _, family := range families {
				for _, client := range []*harness.Host{w.Client, w.Pod("n1c").Host} {
					conns, err := client.SamePort(clusterIP(1, family), clusterIP(2, family))
					require.NoError(t, err)
					for i, c := range conns {
						got, want := echoes(c), harness.Answered
						if m == harness.IPVS && i == 0 {
							want = harness.TimedOut
						}
						if got != want {
							t.Errorf("mode %s, %s over IPv%d, connection %d: %s, want %s", m, client.Name, family, i+1, got, want)
						}
						defer c.Close()
					}
				}
			}
		}
	})
}

// echoes says whether what is sent over a connection comes back. The greeting may have come before there was another.
func echoes(c net.Conn) harness.Outcome {
	in := bufio.NewReader(c)
	if err := c.SetDeadline(time.Now().Add(harness.Brief)); err != nil {
		return harness.Failed
	}
	if _, err := fmt.Fprintln(c, "line"); err != nil {
		return harness.Failed
	}
	for {
		line, err := in.ReadString('\n')
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return harness.TimedOut
		case err != nil:
			return harness.Failed
		case line == "line\n":
			return harness.Answered
		}
	}
}
