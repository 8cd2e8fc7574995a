package iptables

import (
	"context"
	"fmt"
	"maps"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/iptables/tracer"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
)

// partial is a plan of which some Services are not known.
func partial(t *rapid.T, p *plan.Plan) *plan.Plan {
	out := plan.New(p.Node, p.Settings)
	out.Partial = true
	known := map[plan.Service]bool{}
	for _, f := range plan.Families {
		for _, sp := range p.Sorted(f) {
			if _, drawn := known[sp.Key.Service]; !drawn {
				known[sp.Key.Service] = rapid.Bool().Draw(t, fmt.Sprint("known ", sp.Key.Service))
			}
			if known[sp.Key.Service] {
				out.Set(sp)
			}
		}
	}
	return out
}

// led is what the kernel holds, without chains of Services that nothing leads to.
func (k *fakeKernel) led() string {
	used := &fakeKernel{tables: maps.Clone(k.tables)}
	for more := true; more; {
		more = false
		nat := kernelTable{}
		targets := map[string]bool{}
		for _, rules := range used.tables[tableNAT] {
			for _, r := range rules {
				targets[jumpTarget(r)] = true
			}
		}
		for name, rules := range used.tables[tableNAT] {
			if mayBeStale(name) && !targets[name] {
				more = true
			} else {
				nat[name] = rules
			}
		}
		used.tables[tableNAT] = nat
	}
	return used.text()
}

// TestPartialPlan: a start that does not know all Services whose rules are in the kernel leaves every packet what it had, while
// rules are being written and afterwards, be it in another form; it finds nothing to repair later; a change of what is known
// takes effect; and once all are known the kernel holds what it would have held.
func TestPartialPlan(t *testing.T) {
	t.Parallel()
	seen, unknown := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		c := plantest.Clusters().Filter(func(c *plantest.Cluster) bool { return len(c.Plan.Services) <= 40 }).Draw(t, "cluster")
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		compact := rapid.SampledFrom([]int{0, 1, 10, 40})
		first, k := fakeEngine(f)
		first.options.CompactAbove = compact.Draw(t, "compact above")
		if err := first.sync(context.Background(), c.Plan, nil); err != nil {
			t.Fatal(err)
		}
		before := k.led()
		e, _ := fakeEngine(f)
		e.tool, e.batch = k, 0
		e.options.CompactAbove = first.options.CompactAbove
		if rapid.Bool().Draw(t, "another form") {
			e.options.CompactAbove = compact.Draw(t, "compact above, then")
		}
		packets := rapid.SliceOfN(c.Packets(f), 20, 20).Draw(t, "packets")
		evaluator := plan.NewEvaluator(c.Plan)
		check := func() {
			text := k.saved()
			rs, err := tracer.Parse(f, text)
			if err != nil {
				t.Fatal(err)
			}
			for _, pkt := range packets {
				if err := tracer.Compare(evaluator, rs, pkt, tracer.Node{Local: c.Local}); err != nil {
					t.Fatalf("%v\n%s", err, text)
				}
				seen++
			}
		}
		k.changed = check
		some := partial(t, c.Plan)
		unknown += len(c.Plan.Services) - len(some.Services)
		if err := e.sync(context.Background(), some, nil); err != nil {
			t.Fatal(err)
		}
		check()
		a, b := newRules(c.Plan, f, first.options), newRules(some, f, e.options)
		if a.compact == b.compact && fmt.Sprint(a.ranges) == fmt.Sprint(b.ranges) && k.led() != before {
			t.Fatalf("the kernel holds something else than before:\n%s", diffLines(before, k.led()))
		}
		k.restores = nil
		if err := e.sync(context.Background(), some, nil); err != nil {
			t.Fatal(err)
		}
		if len(k.restores) > 0 || e.found == nil || len(e.found.Counts) > 0 {
			t.Fatalf("a second comparison found %+v and wrote %q", e.found, k.restores)
		}
		k.changed = nil
		more := plan.New(some.Node, some.Settings)
		more.Partial = true
		changed := plan.Keys{}
		for key, sp := range c.Plan.Services {
			more.Set(sp)
			if some.Services[key] == nil {
				changed.Add(key)
			}
		}
		if err := e.sync(context.Background(), more, changed); err != nil {
			t.Fatal(err)
		}
		check()
		more.Partial = false
		if err := e.sync(context.Background(), more, nil); err != nil {
			t.Fatal(err)
		}
		fresh, want := fakeEngine(f)
		fresh.options = e.options
		if err := fresh.sync(context.Background(), more, nil); err != nil {
			t.Fatal(err)
		}
		if k.text() != want.text() {
			t.Fatalf("when all is known:\n%s", diffLines(want.text(), k.text()))
		}
	})
	if seen == 0 || unknown == 0 {
		t.Error("nothing was tried")
	}
}
