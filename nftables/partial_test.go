package nftables

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestWaysWithPartial: whatever the way, also by starts at which not all Services are known, no sync fails, and no comparison takes for
// another program's doing what this one has written or found at its start. Once all Services are known, the kernel holds what a full
// sync writes.
func TestWaysWithPartial(t *testing.T) {
	nstest.Enter(t)
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(rt, "family")
		_ = Cleanup()
		e, _ := testEngine(t, f)
		steps := rapid.SliceOfN(plantest.Plans(), 2, 6).Draw(rt, "plans")
		var before *plan.Plan
		for i, p := range steps {
			giveWeights(p, uint32(i%2))
			if p.Node = steps[0].Node; rapid.IntRange(0, 3).Draw(rt, "settings change") > 0 {
				p.Settings = steps[max(i-1, 0)].Settings
			}
			if before != nil && rapid.Bool().Draw(rt, "restart") {
				_ = e.kernel.Close()
				e.kernel = nil
				e, _ = testEngine(t, f)
				before = nil
			}
			readsByKey(rt, e)
			inSteps(rt, e)
			e.most = rapid.SampledFrom([]int{mostInTransaction, 20, 1}).Draw(rt, "most in a transaction")
			if p.Partial = i < len(steps)-1 && rapid.Bool().Draw(rt, "partial"); p.Partial {
				for _, sp := range p.Sorted(f) {
					if rapid.Bool().Draw(rt, "unknown") {
						p.Delete(sp.Key)
					}
				}
			}
			changed := plan.Everything()
			if before != nil {
				changed = plan.Only(plantest.Differing(before, p))
			}
			for _, c := range []plan.Change{changed, plan.Everything()} {
				if err := syncWhole(e, p, c); err != nil || len(e.Found) > 0 {
					rt.Fatalf("step %d, partial: %t: found %v, %v", i, p.Partial, e.Found, err)
				}
			}
			if !p.Partial {
				holds(rt, e, p)
			}
			before = p
		}
		_ = e.kernel.Close()
		e.kernel = nil
	})
}

// TestKindThatStayed: a kind whose chain has stayed, though no Service that is known has it, gets the rules of now, and not behind those
// of before, when a Service comes to have it.
func TestKindThatStayed(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(30, 2)
	synced(t, e, p, plan.Everything())
	again, _ := testEngine(t, plan.IPv4)
	some := plantest.Large(3, 1)
	some.Partial, some.Settings.MasqueradeAll = true, true
	synced(t, again, some, plan.Everything())
	two := plantest.LargeService(1, 2, 2)
	some.Set(two)
	synced(t, again, some, plan.Only(plan.Keys{two.Key: {}}))
	list := nstest.Exec(t, "nft", "list", "chain", "ip", "nodeproxy", "cluster-ip-2")
	if err := again.Sync(ctx, some, plan.Everything()); err != nil || len(again.Found) > 0 {
		t.Errorf("a comparison found %v, %v:\n%s", again.Found, err, list)
	}
}

// TestFrontendOfUnknown: a Service that is known may get a frontend that the kernel still has for one that is not.
func TestFrontendOfUnknown(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(2, 2)
	port := plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: 30000}
	with := func(sp *plan.ServicePort) *plan.ServicePort {
		sp.Frontends = append(sp.Frontends, port)
		return sp
	}
	p.Set(with(plantest.LargeService(1, 2, 2)))
	synced(t, e, p, plan.Everything())
	again, _ := testEngine(t, plan.IPv4)
	some := plantest.Large(1, 2)
	some.Partial = true
	synced(t, again, some, plan.Everything())
	more := with(plantest.LargeService(0, 50, 3))
	some.Set(more)
	assert.NoError(t, again.Sync(ctx, some, plan.Only(plan.Keys{more.Key: {}})))
}

// tight is a kernel that takes short transactions only, as in a user namespace.
type tight struct {
	kernel
	most, refused int
}

func (k *tight) Commit(b *nft.Batch) error {
	if b.Elements() > k.most {
		k.refused++
		return fmt.Errorf("netlink send: %w", unix.EMSGSIZE)
	}
	return k.kernel.Commit(b)
}

// TestShortTransactions: where the kernel does not take transactions as large as usual, they become smaller.
func TestShortTransactions(t *testing.T) {
	nstest.Enter(t)
	k := &tight{most: 1000}
	e, _ := testEngine(t, plan.IPv4)
	e.dial = func() (kernel, error) {
		c, err := nft.Dial()
		k.kernel = c
		return k, err
	}
	other := "add table ip nodeproxy; add set ip nodeproxy services { type ipv4_addr; }" // to be made anew
	for _, first := range []string{"list ruleset", other} {
		_ = Cleanup()
		nstest.Exec(t, "nft", first)
		e.most, e.tight, e.current, k.refused = mostInTransaction, false, nil, 0
		p := plantest.Large(3000, 2)
		for e.Sync(context.Background(), p, plan.Everything()) != nil && k.refused < 10 {
			continue
		}
		if k.refused == 0 || k.refused > 3 {
			t.Errorf("after %q, %d transactions were refused", first, k.refused)
		}
		holds(t, e, p)
	}
}

// TestTooLongAlone: a ServicePort that does not fit into a transaction of its own holds up no other.
func TestTooLongAlone(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	k := &tight{most: 1000}
	e, _ := testEngine(t, plan.IPv4)
	e.dial = func() (kernel, error) {
		c, err := nft.Dial()
		k.kernel = c
		return k, err
	}
	var reported []plan.Refusal
	e.onRefused = func(_ plan.Family, list []plan.Refusal) { reported = list }
	p, long := plantest.Large(20, 2), plantest.LargeService(30, 300, 100)
	long.Scheduler.Name = "mh"
	p.Set(long)
	for e.Sync(ctx, p, plan.Everything()) != nil && k.refused < 10 {
		continue
	}
	others := plantest.Large(20, 2)
	holdsBut(t, e, others, long)
	if len(reported) != 1 || reported[0].Key != long.Key || !errors.Is(reported[0].Err, unix.EMSGSIZE) {
		t.Errorf("reported %v", reported)
	}
	short := plantest.LargeService(30, 300, 5)
	p.Set(short)
	if err := e.Sync(ctx, p, plan.Only(plan.Keys{short.Key: {}})); err != nil || len(reported) > 0 {
		t.Errorf("reported %v, %v", reported, err)
	}
	holds(t, e, p)
	p.Set(long)
	if err := e.Sync(ctx, p, plan.Only(plan.Keys{long.Key: {}})); err != nil || len(reported) != 1 || !reported[0].Kept {
		t.Errorf("reported %v, %v", reported, err)
	}
	others.Set(short)
	holds(t, e, others)
}
