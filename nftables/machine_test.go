package nftables

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// TestMachine: the elements of ServicePorts near a packet lead it where all elements do, by the same rules and elements.
func TestMachine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t)
		for _, f := range plan.Families {
			all := rulesetOf(c.Plan, f, options, nil)
			for range packetsPerPlan / 8 {
				pkt := c.Packets(f).Draw(t, "packet")
				outcomes, err := Machine(c.Plan.Near(pkt), f, options).Trace(pkt, packetsim.Node{Local: c.Local})
				require.NoError(t, err)
				if got, want := plantest.Ways(outcomes), plantest.Ways(all.trace(pkt, c.Local)); got != want {
					t.Fatalf("%s goes\n%swant\n%s", pkt, got, want)
				}
			}
		}
	})
}
