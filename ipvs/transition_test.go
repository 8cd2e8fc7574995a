package ipvs

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// inSteps lets an engine change ServicePorts a few addresses at a time, or only those that are really large.
func inSteps(t *rapid.T, e *engine) {
	e.mostAtOnce = rapid.SampledFrom([]int{mostAtOnce, 100, 1}).Draw(t, "most at once")
}

// TestTransitions: while a change of policies, endpoints, source ranges or affinity is being made, whoever got to an endpoint
// before it and gets to one after it gets to one of these all the while.
func TestTransitions(t *testing.T) {
	t.Parallel()
	seen, steps := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		// Many states in between are looked at: large plans are left to other tests.
		c := plantest.Clusters().Filter(func(c *plantest.Cluster) bool { return len(c.Plan.Services) <= 40 }).Draw(t, "cluster")
		c.Plan.Settings.LocalhostNodePorts = false
		next := c.Edited(t)
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f, testOptions)
		for _, a := range c.LocalAddrs {
			k.HostAddrs.Insert(a)
		}
		require.NoError(t, e.Sync(context.Background(), c.Plan, plan.Everything()))
		packets := c.Transits(t, f, next)
		change := plan.Only(plantest.Differing(c.Plan, next))
		if rapid.Bool().Draw(t, "everything is compared") {
			change = plan.Everything()
		}
		k.Calls = nil
		inSteps(t, e)
		every, at := rapid.IntRange(1, 5).Draw(t, "looks at one state in"), 0
		k.Before = func() {
			if at++; at%every != 0 {
				return // To look takes long, and there are many.
			}
			rs, err := simulationOf(k)
			require.NoError(t, err)
			for _, p := range packets {
				if rs.IsAdded(p.Packet.Src) && !p.Packet.Output || slices.ContainsFunc(
					slices.Concat(p.Before.Targets, p.After.Targets), func(t plan.Target) bool { return rs.IsAdded(t.Addr.Addr()) }) {
					continue // Addresses of Services that are somebody's own too: see TestRenderVerdicts.
				}
				outcomes, err := rs.Trace(p.Packet, packetsim.Node{Local: c.Local})
				if err == nil {
					err = packetsim.AgreeBetween(p.Before, p.After, p.Endpoints, p.Packet, outcomes)
				}
				if err != nil {
					t.Fatalf("packet %s: after %q, %v\nbefore: %s\nafter: %s\n%s", p.Packet, k.Calls[:len(k.Calls)-1], err, p.Before,
						p.After, k.Text())
				}
				seen++
			}
		}
		require.NoError(t, e.Sync(context.Background(), next, change))
		for ; e.rest != nil; steps++ {
			require.NoError(t, e.Sync(context.Background(), next, plan.Only(nil)))
		}
	})
	if seen == 0 || steps == 0 && !testing.Short() { // Of few examples, none may need a further sync.
		t.Errorf("%d packets were sent, and %d further syncs were made", seen, steps)
	}
}
