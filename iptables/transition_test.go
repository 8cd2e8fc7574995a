package iptables

import (
	"context"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/iptables/tracer"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
)

// saved is what the kernel holds as iptables-save prints it.
func (k *fakeKernel) saved() string {
	var out strings.Builder
	for _, tbl := range []table{tableFilter, tableNAT} {
		out.WriteString("*" + string(tbl) + "\n")
		for name := range k.tables[tbl] {
			out.WriteString(":" + name + " - [0:0]\n")
		}
		for name, rules := range k.tables[tbl] {
			chain{name, rules}.appendTo(&out, "")
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}

// TestTransitions: while a change of policies, endpoints, source ranges or affinity is being made, or all rules take another form,
// whoever got to an endpoint before it and gets to one after it gets to one of these all the while.
func TestTransitions(t *testing.T) {
	t.Parallel()
	seen := 0
	rapid.Check(t, func(t *rapid.T) {
		// Every state in between is looked at: large plans are left to other tests.
		c := plantest.Clusters().Filter(func(c *plantest.Cluster) bool { return len(c.Plan.Services) <= 40 }).Draw(t, "cluster")
		next := c.Edited(t)
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f)
		e.batch = rapid.SampledFrom([]int{0, 1, 5, 20}).Draw(t, "batch") // less than a plan takes, but for 0
		compact := rapid.SampledFrom([]int{0, 1, 10, 40})
		e.options.CompactAbove = compact.Draw(t, "compact above")
		if err := e.sync(context.Background(), c.Plan, nil); err != nil {
			t.Fatal(err)
		}
		packets := c.Transits(t, f, next)
		changed := plantest.Differing(c.Plan, next)
		if rapid.Bool().Draw(t, "everything is compared") {
			changed = nil
			e.options.CompactAbove = compact.Draw(t, "compact above, then")
		}
		k.restores = nil
		k.changed = func() {
			text := k.saved()
			rs, err := tracer.Parse(f, text)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range packets {
				outcomes, err := rs.Trace(p.Packet, tracer.Node{Local: c.Local})
				if err == nil {
					err = tracer.AgreeBetween(p.Before, p.After, p.Endpoints, p.Packet, outcomes)
				}
				if err != nil {
					t.Fatalf("packet %s: after %q, %v\nbefore: %s\nafter: %s\n%s", p.Packet, k.restores, err, p.Before, p.After, text)
				}
				seen++
			}
		}
		if err := e.sync(context.Background(), next, changed); err != nil {
			t.Fatal(err)
		}
	})
	if seen == 0 {
		t.Error("no packet was sent")
	}
}
