package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// refusedAlone holds that a sync succeeds, and refuses one ServicePort alone.
func refusedAlone(t *testing.T, e *engine, err error, key plan.Key, kept bool) {
	t.Helper()
	if err != nil || e.current == nil {
		t.Errorf("one ServicePort that is refused makes the sync fail: %v", err)
	}
	if r := e.refused[key]; len(e.refused) != 1 || r == nil || r.Kept != kept || r.Err == nil {
		t.Errorf("refused are %v, want %s, kept: %v", e.refused, key, kept)
	}
}

// mended holds that once the kernel refuses nothing any more, it gets to hold a plan.
func mended(t *testing.T, e *engine, k *xtablestest.Kernel, p *plan.Plan) {
	t.Helper()
	k.Refuse = ""
	makeDue(e)
	if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || len(e.refused) > 0 {
		t.Errorf("no longer refused: %v, refused %v", err, e.refused)
	}
	same(t, "no longer refused", textOfKernel(k), wantOf(p, e))
}

// wantOf is what an engine is to make of a plan.
func wantOf(p *plan.Plan, e *engine) string { return textOf(desired(p, e.family, e.options)) }

// without is a plan without a ServicePort.
func without(p *plan.Plan, key plan.Key) *plan.Plan {
	out := plan.New(p.Node, p.Settings)
	for _, sp := range p.Services {
		if sp.Key != key {
			out.Set(sp)
		}
	}
	return out
}

// makeDue lets what is refused be tried again at the next comparison.
func makeDue(e *engine) {
	for _, r := range e.refused {
		r.again = time.Time{}
	}
}

// TestRefusedServiceDoesNotStopOthers: rules that the kernel does not take cost the one ServicePort that they are for.
func TestRefusedServiceDoesNotStopOthers(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	p := plantest.Large(50, 3) // With fewer endpoints it would have no chain, at whose name it is refused.
	bad := p.Sorted(plan.IPv4)[23]
	k.Refuse = ":" + serviceChain(names.PrefixCluster, bad.Key) + " "
	err := e.Sync(context.Background(), p, plan.Everything())
	refusedAlone(t, e, err, bad.Key, false)
	same(t, "the others are not as without it", textOfKernel(k), wantOf(without(p, bad.Key), e))
	mended(t, e, k, p)
}

// TestRefusedServiceKeepsWhatItHas: a ServicePort whose new rules the kernel does not take keeps those that it has, whole; all
// else is as it should be, and what is stale goes.
func TestRefusedServiceKeepsWhatItHas(t *testing.T) {
	for _, compactAbove := range []int{0, 12} {
		e, k := fakeEngine(plan.IPv4)
		e.options.CompactAbove = compactAbove
		p := plantest.Large(50, 3)
		program(t, e, p, plan.Everything())
		bad := plantest.LargeService(17, 5000, 3)
		k.Refuse = ":" + serviceChain(names.PrefixCluster, bad.Key) + " "
		p.Set(plantest.LargeService(18, 6000, 2))
		want := wantOf(p, e)
		p.Set(bad)
		err := e.Sync(t.Context(), p, plan.Everything())
		refusedAlone(t, e, err, bad.Key, true)
		same(t, "refused", textOfKernel(k), want)
		// A comparison finds all as it is, and does not search again.
		k.Restores = nil
		if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || len(k.Restores) > 0 || !e.Compared || len(e.Found) > 0 {
			t.Errorf("a comparison: %v, writes %q, finds %v", err, k.Restores, e.Found)
		}
		mended(t, e, k, p)
	}
}

// TestNothingIsTaken: where iptables-restore does nothing at all, no ServicePort is blamed, and it is not tried with each.
func TestNothingIsTaken(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	p := plantest.Large(50, 2)
	program(t, e, p, plan.Everything())
	for i := range 50 {
		p.Set(plantest.LargeService(i, 5000+2*i, 2))
	}
	k.Refuse, k.Restores = "COMMIT", nil
	if err := e.Sync(t.Context(), p, plan.Everything()); err == nil || strings.Contains(err.Error(), "Service") || len(k.Restores) > 4 {
		t.Errorf("after %d tries: %v", len(k.Restores), err)
	}
}

// TestRefusedEntry: rules in a dispatcher that the kernel does not take cost the one ServicePort that they are for, whether they
// lead to its chains or do without.
func TestRefusedEntry(t *testing.T) {
	for _, endpoints := range []int{2, 3} {
		e, k := fakeEngine(plan.IPv4)
		p := plantest.Large(50, endpoints)
		bad := p.Sorted(plan.IPv4)[23]
		k.Refuse = "-d " + bad.Frontends[0].Addr.String() + "/32 "
		err := e.Sync(t.Context(), p, plan.Everything())
		refusedAlone(t, e, err, bad.Key, false)
		same(t, "the others are not as without it", textOfKernel(k), wantOf(without(p, bad.Key), e))
		mended(t, e, k, p)
	}
}

// TestRefusedWhereReached: what the kernel refuses only in rules that packets can get to costs the one ServicePort that it is of,
// on an empty node and beside others, be it one that is written ahead of all others.
func TestRefusedWhereReached(t *testing.T) {
	for _, critical := range []bool{false, true} {
		for _, endpoints := range []int{2, 3} {
			e, k := fakeEngine(plan.IPv4)
			p := plantest.Large(50, endpoints)
			some := *p.Sorted(plan.IPv4)[23]
			some.Critical = critical
			bad := &some
			p.Set(bad)
			k.RefuseReached = "-d " + bad.Frontends[0].Addr.String() + "/32 "
			for _, on := range []string{"an empty node", "the others"} {
				err := e.Sync(t.Context(), p, plan.Everything())
				refusedAlone(t, e, err, bad.Key, false)
				same(t, fmt.Sprintf("on %s: the others are not as without it", on), textOfKernel(k), wantOf(without(p, bad.Key), e))
			}
		}
	}
}

// TestRefusedChange: a change that the kernel refuses of one ServicePort leaves the sync in order, and so do the changes of others
// that follow, none of which costs a search; those of the refused one wait until it may be tried again.
func TestRefusedChange(t *testing.T) {
	for _, compactAbove := range []int{0, 12} {
		e, k := fakeEngine(plan.IPv4)
		e.options.CompactAbove = compactAbove
		var told [][]plan.Refusal
		e.onRefused = func(_ plan.Family, list []plan.Refusal) { told = append(told, list) }
		p := plantest.Large(50, 3)
		change := func(sp *plan.ServicePort) {
			t.Helper()
			p.Set(sp)
			k.Restores = nil
			program(t, e, p, plan.Only(plan.Keys{sp.Key: {}}))
		}
		program(t, e, p, plan.Everything())
		bad := plantest.LargeService(17, 5000, 3)
		k.Refuse = ":" + serviceChain(names.PrefixCluster, bad.Key) + " "
		change(bad)
		refusedAlone(t, e, nil, bad.Key, true)
		for i := range 3 {
			if change(plantest.LargeService(20+i, 6000+10*i, 3)); len(k.Restores) != 1 {
				t.Errorf("a change of another one takes %d writes", len(k.Restores))
			}
			if change(plantest.LargeService(17, 5100+10*i, 3)); len(k.Restores) != 0 {
				t.Errorf("one that was refused just now takes %d writes", len(k.Restores))
			}
		}
		if len(told) != 1 || len(told[0]) != 1 || told[0][0].Key != bad.Key || !told[0][0].Kept {
			t.Errorf("told of %v", told)
		}
		// When the kernel takes it, its next change, or the next comparison, has it in force.
		k.Refuse = ""
		makeDue(e)
		change(plantest.LargeService(17, 5200, 3))
		if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || !e.Compared || len(e.Found) > 0 || len(e.refused) > 0 {
			t.Errorf("%v, found %v, refused %v", err, e.Found, e.refused)
		}
		if len(told) != 2 || len(told[1]) != 0 {
			t.Errorf("told of %v", told)
		}
		same(t, "at the end", textOfKernel(k), wantOf(p, e))
	}
}

// TestMendedByItsOwner: a ServicePort that is refused is tried with a change of its own at once, unless only its endpoints have
// changed.
func TestMendedByItsOwner(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	p := plantest.Large(50, 3)
	good := plantest.LargeService(17, 5000, 3)
	bad := *good
	bad.Affinity = time.Hour
	p.Set(&bad)
	k.Refuse = "-m recent "
	err := e.Sync(t.Context(), p, plan.Everything())
	refusedAlone(t, e, err, bad.Key, false)
	changed := plan.Keys{}
	changed.Add(bad.Key)

	more := *plantest.LargeService(17, 6000, 4)
	more.Affinity = time.Hour
	p.Set(&more)
	k.Restores = nil
	if err := e.Sync(t.Context(), p, plan.Only(changed)); err != nil || len(k.Restores) > 0 {
		t.Errorf("other endpoints: %v, writes %q", err, k.Restores)
	}
	p.Set(good)
	program(t, e, p, plan.Only(changed))
	same(t, "without what the kernel does not take", textOfKernel(k), wantText(p, plan.IPv4))
}

// TestEmptiedWhileWritten: where another program empties the tables while a sync writes them, at whichever point, no ServicePort is
// taken for one that the kernel refuses, and the next sync writes all.
func TestEmptiedWhileWritten(t *testing.T) {
	for _, other := range []struct {
		name string
		does func(k *xtablestest.Kernel)
	}{
		{"removes all chains", func(k *xtablestest.Kernel) { k.Tables = xtablestest.New().Tables }},
		{"removes all rules", func(k *xtablestest.Kernel) {
			for _, held := range k.Tables {
				for name := range held {
					held[name] = nil
				}
			}
		}},
		{"removes the chains of one Service", func(k *xtablestest.Kernel) {
			gone := serviceChain(names.PrefixCluster, plantest.LargeService(7, 0, 3).Key)
			for name, rules := range k.Tables[names.NAT] {
				k.Tables[names.NAT][name] = slices.DeleteFunc(rules, func(r string) bool { return xtables.Target(r) == gone })
			}
			delete(k.Tables[names.NAT], gone)
		}},
	} {
		for _, compactAbove := range []int{0, 12} {
			for _, before := range []int{0, 30} {
				t.Run(fmt.Sprintf("%s, of %d, compact above %d", other.name, before, compactAbove), func(t *testing.T) {
					for n, last := 1, false; !last; n++ {
						last = emptiedAfter(t, n, before, compactAbove, other.does)
					}
				})
			}
		}
	}
}

// emptiedAfter has another program do something after the n-th change of a table by a sync of 40 ServicePorts, of which the kernel
// holds some already. It reports whether there were fewer changes.
func emptiedAfter(t *testing.T, n, before, compactAbove int, does func(*xtablestest.Kernel)) bool {
	t.Helper()
	e, k := fakeEngine(plan.IPv4)
	e.options.CompactAbove = compactAbove
	program(t, e, plantest.Large(before, 3), plan.Everything())
	changes := 0
	k.Changed = func() {
		if changes++; changes == n {
			does(k)
		}
	}
	p := plantest.Large(40, 3)
	err := e.Sync(t.Context(), p, plan.Everything())
	if len(e.refused) > 0 {
		t.Errorf("after %d changes: %d ServicePorts are taken for refused", n, len(e.refused))
	}
	if err != nil && strings.Contains(err.Error(), "Service ") {
		t.Errorf("after %d changes, the error blames a Service: %v", n, err)
	}
	k.Changed = nil
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()), "after %d changes: the next sync", n)
	same(t, fmt.Sprintf("after %d changes", n), textOfKernel(k), wantOf(p, e))
	return changes < n
}
