package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// TestListening: the daemon listens where its flags say and nowhere else, and what they leave off is not served.
func TestListening(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1, harness.Policies("Cluster", "Local"), func(s *v1.Service) { s.Spec.HealthCheckNodePort = 32100 })
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		node := w.Node1().IP4
		everywhere := []string{"*:10256", "*:32100", "127.0.0.1:10249"}
		if mode == harness.NFTables { // in which health check node ports are by default at the primary addresses alone, as node ports are
			everywhere = []string{"*:10256", "127.0.0.1:10249", node.String() + ":32100", "[" + w.Node1().IP6.String() + "]:32100"}
		}
		for _, tc := range []struct {
			flags   []string
			want    []string
			metrics netip.AddrPort
			pprof   int
		}{
			{nil, everywhere, harness.MetricsAddr, 404},
			{[]string{"--metrics-bind-address=127.0.0.2:7001", "--healthz-bind-address=" + node.String() + ":7002", "--profiling",
				"--nodeport-addresses=192.168.77.0/24,fd00:99::/64"},
				[]string{"127.0.0.2:7001", node.String() + ":32100", node.String() + ":7002"}, netip.MustParseAddrPort("127.0.0.2:7001"), 200},
			{[]string{"--metrics-bind-address=", "--healthz-bind-address=", "--nodeport-addresses=127.0.0.0/8,192.168.77.0/24"},
				[]string{"*:32100", "127.0.0.1:32100", node.String() + ":32100"}, netip.AddrPort{}, 0},
		} {
			d := w.Run(t, variant, append(tc.flags, clusterCIDR)...)
			eventually(t, fmt.Sprint(tc.flags), func() error {
				if got := listening(t, w, d); !slices.Equal(got, tc.want) {
					return fmt.Errorf("it listens at %v, want %v", got, tc.want)
				}
				return nil
			})
			if tc.metrics.IsValid() {
				for _, path := range []string{"/debug/pprof/", "/debug/pprof/cmdline"} {
					if code, _, err := w.Node1().Get(tc.metrics, path); err != nil || code != tc.pprof {
						t.Errorf("%v: %s: %d, %v; want %d", tc.flags, path, code, err, tc.pprof)
					}
				}
			}
			require.NoError(t, d.Stop())
		}
	})
}

// listening lists the TCP sockets at which a daemon listens on node1. Where it does at all addresses, of either family or of
// both, that is "*".
func listening(t *testing.T, w *harness.World, d *harness.Daemon) []string {
	t.Helper()
	var out []string
	for line := range strings.Lines(output(t, w, "ss -Hltnp")) {
		if f := strings.Fields(line); strings.Contains(line, fmt.Sprintf("pid=%d,", d.PID())) {
			out = append(out, strings.NewReplacer("0.0.0.0", "*", "[::]", "*").Replace(f[3]))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
