package ipvs_test

import (
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// TestMachine: the objects of ServicePorts near a packet lead it where all objects do, by the same rules, sets and servers.
func TestMachine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t, c)
		for _, f := range plan.Families {
			all := parse(t, f, ipvs.Render(c.Plan, f, options))
			for range packetsPerPlan / 3 {
				pkt := c.Packets(f).Draw(t, "packet")
				near, err := ipvs.Machine(c.Plan.Near(pkt), f, options)
				if err != nil {
					t.Fatal(err)
				}
				node := packetsim.Node{Local: c.Local}
				want, err := all.Trace(pkt, node)
				if err != nil {
					t.Fatal(err)
				}
				got, err := near.Trace(pkt, node)
				if err != nil {
					t.Fatal(err)
				}
				if plantest.Ways(got) != plantest.Ways(want) {
					t.Fatalf("%s goes\n%swant\n%s", pkt, plantest.Ways(got), plantest.Ways(want))
				}
			}
		}
	})
}
