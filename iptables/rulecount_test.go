package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// told gathers what an engine tells of its rules.
type told struct {
	failed         []bool // whether partial, for each
	total, written map[string]int
}

func (o *told) RestoreFailed(_ plan.Family, partial bool) { o.failed = append(o.failed, partial) }

func (o *told) IPTablesRules(_ plan.Family, table string, total, written int) {
	o.total[table], o.written[table] = total, written
}

func observe(e *engine) *told {
	o := &told{total: map[string]int{}, written: map[string]int{}}
	e.counts = newRuleCounts(o)
	return o
}

// ruleTotals counts the rules in chains of ours.
func ruleTotals(k *xtablestest.Kernel) map[string]int {
	out := map[string]int{}
	for _, t := range []names.Table{names.Filter, names.NAT} {
		out[string(t)] = 0
		for name, rules := range k.Tables[t] {
			if !names.Builtin(name) {
				out[string(t)] += len(rules)
			}
		}
	}
	return out
}

// TestRuleCounts: what is told of a change is what it writes, and of a sync that finds everything in place, nothing.
func TestRuleCounts(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	e.options.CompactAbove = 0
	o := observe(e)
	p := plantest.Large(400, 2)
	check := func(what string, change plan.Change, nat, filter int) {
		t.Helper()
		program(t, e, p, change)
		if want := ruleTotals(k); fmt.Sprint(o.total) != fmt.Sprint(want) {
			t.Errorf("%s: told of %v rules, the kernel holds %v", what, o.total, want)
		}
		if nat >= 0 && (o.written["nat"] != nat || o.written["filter"] != filter) {
			t.Errorf("%s: told of %v rules written, want %d and %d", what, o.written, nat, filter)
		}
	}
	check("at first", plan.Everything(), -1, 0)
	if o.written["nat"] < o.total["nat"] {
		t.Errorf("at first: told of %v rules written, of %v in all", o.written, o.total)
	}
	check("all in place", plan.Everything(), 0, 0)
	check("no change", plan.Only(nil), 0, 0)
	other := plantest.LargeService(17, 5000, 2)
	p.Set(other)
	// The chain of two endpoints with its masquerading, and a chain of two rules for each.
	check("two endpoints in place of two", plan.Only(plan.Keys{other.Key: {}}), 3+2*2, 0)
	p.Delete(other.Key)
	check("one Service less", plan.Only(plan.Keys{other.Key: {}}), -1, 0)
	if len(o.failed) > 0 {
		t.Errorf("told of failures: %v", o.failed)
	}
}

// TestRestoreFailuresAreTold, each once, and whether it was a change; the rules of what the kernel does not take are not counted.
func TestRestoreFailuresAreTold(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	o := observe(e)
	p := plantest.Large(8, 3) // With fewer endpoints it would have no chain, at whose name it is refused.
	bad := p.Sorted(plan.IPv4)[3]
	k.Refuse = ":" + serviceChain(names.PrefixCluster, bad.Key) + " "
	refusedAlone(t, e, e.Sync(context.Background(), p, plan.Everything()), bad.Key, false)
	refused := 0
	for _, text := range k.Restores {
		if strings.Contains(text, k.Refuse) {
			refused++
		}
	}
	if want := slices.Repeat([]bool{false}, refused); refused == 0 || !slices.Equal(o.failed, want) {
		t.Errorf("told of failures %v, want %v", o.failed, want)
	}
	if want := ruleTotals(k); fmt.Sprint(o.total) != fmt.Sprint(want) {
		t.Errorf("told of %v rules, the kernel holds %v", o.total, want)
	}
	k.Refuse = ""
	makeDue(e)
	program(t, e, p, plan.Everything())
	o.failed = nil
	k.Refuse = "COMMIT"
	p.Set(plantest.LargeService(3, 5000, 2))
	if err := e.Sync(context.Background(), p, plan.Only(plan.Keys{bad.Key: {}})); err == nil {
		t.Fatal("a refused change is no error")
	}
	if len(o.failed) < 2 || !o.failed[0] || slices.Contains(o.failed[1:], true) {
		t.Errorf("failures %v, want one of a change, and then of a sync of everything", o.failed)
	}
}

// TestFixedRestoreFailure: a refused run is told of there too.
func TestFixedRestoreFailure(t *testing.T) {
	failed := 0
	k := xtablestest.New()
	k.Refuse = "COMMIT"
	x := &xtables.Tables{Family: plan.IPv6, Writer: &xtables.Writer{Kernel: k, Ran: func(_ xtables.Input, err error) {
		if err != nil {
			failed++
		}
	}}}
	if _, err := x.Sync(context.Background(), testFixed()); err == nil || failed != 1 {
		t.Errorf("%v; %d failures were reported", err, failed)
	}
	k.Refuse = ""
	if _, err := x.Sync(context.Background(), testFixed()); err != nil || failed != 1 {
		t.Errorf("%v; %d failures were reported", err, failed)
	}
}

// TestFailedJumpIsTold: a run that was to lead a built-in chain to one of ours is told of when it fails, and tried once more when
// another program held the lock, as any other.
func TestFailedJumpIsTold(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	o := observe(e)
	p := plantest.Large(8, 2)
	k.Locked = "-I FORWARD 1 "
	if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || !slices.Equal(o.failed, []bool{false}) {
		t.Errorf("while the lock is held: %v; told of failures %v", err, o.failed)
	}
	same(t, "after the second try", textOfKernel(k), wantText(p, plan.IPv4))
	e, k = fakeEngine(plan.IPv4)
	o = observe(e)
	k.Refuse = "-I FORWARD 1 "
	err := e.Sync(t.Context(), p, plan.Everything())
	if err == nil || !strings.Contains(err.Error(), "leading chain FORWARD of table filter to ") ||
		!slices.Equal(o.failed, []bool{false}) {
		t.Errorf("refused: %v; told of failures %v", err, o.failed)
	}
}
