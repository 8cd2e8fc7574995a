package iptables

import (
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
	"nodeproxy/plan/plantest"
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
func led(k *xtablestest.Kernel) string {
	used := &xtablestest.Kernel{Tables: maps.Clone(k.Tables)}
	for more := true; more; {
		more = false
		nat := xtables.Content{}
		targets := map[string]bool{}
		for _, rules := range used.Tables[names.NAT] {
			for _, r := range rules {
				targets[xtables.Target(r)] = true
			}
		}
		for name, rules := range used.Tables[names.NAT] {
			if names.OfService(name) && !targets[name] {
				more = true
			} else {
				nat[name] = rules
			}
		}
		used.Tables[names.NAT] = nat
	}
	return textOfKernel(used)
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
		program(t, first, c.Plan, plan.Everything())
		before := led(k)
		e, _ := fakeEngine(f)
		e.Kernel, e.MaxNames = k, 0
		e.options.CompactAbove = first.options.CompactAbove
		if rapid.Bool().Draw(t, "another form") {
			e.options.CompactAbove = compact.Draw(t, "compact above, then")
		}
		packets := rapid.SliceOfN(c.Packets(f), 20, 20).Draw(t, "packets")
		evaluator := plan.NewEvaluator(c.Plan)
		check := func() {
			text := saved(k)
			rs, err := restore.Parse(f, text)
			require.NoError(t, err)
			for _, pkt := range packets {
				if err := packetsim.Compare(evaluator, rs, pkt, packetsim.Node{Local: c.Local}); err != nil {
					t.Fatalf("%v\n%s", err, text)
				}
				seen++
			}
		}
		k.Changed = check
		some := partial(t, c.Plan)
		unknown += len(c.Plan.Services) - len(some.Services)
		program(t, e, some, plan.Everything())
		check()
		a, b := newRules(c.Plan, f, first.options), newRules(some, f, e.options)
		if a.compact == b.compact && fmt.Sprint(a.ranges) == fmt.Sprint(b.ranges) && led(k) != before {
			t.Fatalf("the kernel holds something else than before:\n%s", diffLines(before, led(k)))
		}
		k.Restores = nil
		program(t, e, some, plan.Everything())
		if len(k.Restores) > 0 || !e.Compared || len(e.Found) > 0 {
			t.Fatalf("a second comparison found %+v and wrote %q", e.Found, k.Restores)
		}
		k.Changed = nil
		more := plan.New(some.Node, some.Settings)
		more.Partial = true
		changed := plan.Keys{}
		for key, sp := range c.Plan.Services {
			more.Set(sp)
			if some.Services[key] == nil {
				changed.Add(key)
			}
		}
		program(t, e, more, plan.Only(changed))
		check()
		more.Partial = false
		program(t, e, more, plan.Everything())
		same(t, "when all is known", textOfKernel(k), wantOf(more, e))
	})
	if seen == 0 || unknown == 0 {
		t.Error("nothing was tried")
	}
}

// TestRefusedBesideUnknown: a start that does not know all Services, on a kernel that refuses one of those that it knows, leaves both
// the refused and the unknown ones what they had; comparisons find no difference and write nothing; once all are known, and again
// once nothing is refused, the kernel holds what it should.
func TestRefusedBesideUnknown(t *testing.T) {
	for _, compactAbove := range []int{0, 12} {
		for _, keeps := range []bool{true, false} {
			const services, refused, unknown = 50, 17, 23
			all := plantest.Large(services, 3)
			first, k := fakeEngine(plan.IPv4)
			first.options.CompactAbove = compactAbove
			key := plantest.LargeService(refused, 0, 3).Key
			if !keeps { // The kernel has never taken it.
				all.Delete(key)
			}
			program(t, first, all, plan.Everything())
			before := textOfKernel(k)
			all.Set(plantest.LargeService(refused, 5000, 3))
			some := without(all, plantest.LargeService(unknown, 0, 3).Key)
			some.Partial = true
			e, _ := fakeEngine(plan.IPv4)
			e.Kernel, e.options.CompactAbove = k, compactAbove
			k.Refuse = ":" + serviceChain(names.PrefixCluster, key) + " "
			held := func(when string, p *plan.Plan, want string) {
				t.Helper()
				for comparison := range 2 {
					k.Restores = nil
					err := e.Sync(t.Context(), p, plan.Everything())
					refusedAlone(t, e, err, key, keeps)
					same(t, fmt.Sprintf("%s, kept %v", when, keeps), textOfKernel(k), want)
					if comparison > 0 && (len(k.Restores) > 0 || !e.Compared || len(e.Found) > 0) {
						t.Errorf("%s, kept %v: a comparison writes %q, finds %v", when, keeps, k.Restores, e.Found)
					}
				}
			}
			held("not all is known", some, before)
			// What is known changes beside both.
			other := plantest.LargeService(30, 6000, 2)
			all.Set(other)
			some.Set(other)
			program(t, e, some, plan.Only(plan.Keys{other.Key: {}}))
			served := without(all, key)
			if keeps {
				served.Set(plantest.LargeService(refused, 3*refused, 3))
			}
			want := wantOf(served, e)
			held("another one has changed", some, want)
			held("all is known", all, want)
			mended(t, e, k, all)
		}
	}
}

// TestRefusedOnceKnown: a Service that a start does not know keeps what it had when it becomes known and the kernel refuses what it
// is by then.
func TestRefusedOnceKnown(t *testing.T) {
	const number = 17
	all := plantest.Large(50, 3)
	first, k := fakeEngine(plan.IPv4)
	program(t, first, all, plan.Everything())
	before := textOfKernel(k)
	late := plantest.LargeService(number, 5000, 3)
	plans := [2]*plan.Plan{without(all, late.Key), without(all, late.Key)}
	plans[0].Partial, plans[1].Partial = true, true
	plans[1].Set(late)
	e, _ := fakeEngine(plan.IPv4)
	e.Kernel = k
	k.Refuse = ":" + serviceChain(names.PrefixCluster, late.Key) + " "
	if err := e.Sync(t.Context(), plans[0], plan.Everything()); err != nil || len(e.refused) > 0 || textOfKernel(k) != before {
		t.Fatalf("not known: %v, refused %v\n%s", err, e.refused, diffLines(before, textOfKernel(k)))
	}
	for _, change := range []plan.Change{plan.Only(plan.Keys{late.Key: {}}), plan.Everything(), plan.Everything()} {
		err := e.Sync(t.Context(), plans[1], change)
		refusedAlone(t, e, err, late.Key, true)
		same(t, "known and refused", textOfKernel(k), before)
	}
	if !e.Compared || len(e.Found) > 0 {
		t.Errorf("a comparison finds %v", e.Found)
	}
	mended(t, e, k, plans[1])
}
