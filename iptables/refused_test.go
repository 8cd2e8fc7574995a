package iptables

import (
	"context"
	"strings"
	"testing"

	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
)

// TestRefusedServiceDoesNotStopOthers: rules that the kernel does not take cost the one ServicePort that they are for.
func TestRefusedServiceDoesNotStopOthers(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	p := plantest.Large(50, 3) // With fewer endpoints it would have no chain, at whose name it is refused.
	bad := p.Sorted(plan.IPv4)[23]
	k.refuse = ":" + serviceChain(prefixCluster, bad.Key) + " "
	err := e.sync(context.Background(), p, nil)
	if err == nil || !strings.Contains(err.Error(), bad.Key.Service.String()) {
		t.Fatalf("want an error that names %s; got %v", bad.Key.Service, err)
	}
	p.Delete(bad.Key)
	if got, want := k.text(), wantText(p, plan.IPv4); got != want {
		t.Fatalf("the others are not as without it:\n%s", diffLines(want, got))
	}
	// When the kernel takes them, all is as it should be.
	k.refuse = ""
	p.Set(bad)
	if err := e.sync(context.Background(), p, nil); err != nil {
		t.Fatal(err)
	}
	if got, want := k.text(), wantText(p, plan.IPv4); got != want {
		t.Fatalf("after the retry:\n%s", diffLines(want, got))
	}
}

// TestRefusedServiceKeepsWhatItHas: a ServicePort whose new rules the kernel does not take keeps those that it has, whole; all
// else is as it should be, and what is stale goes.
func TestRefusedServiceKeepsWhatItHas(t *testing.T) {
	for _, compactAbove := range []int{0, 12} {
		sync := func(e *engine, p *plan.Plan) error {
			e.options.CompactAbove = compactAbove
			return e.sync(t.Context(), p, nil)
		}
		fresh := func(p *plan.Plan) string {
			e, k := fakeEngine(plan.IPv4)
			if err := sync(e, p); err != nil {
				t.Fatal(err)
			}
			return k.text()
		}
		e, k := fakeEngine(plan.IPv4)
		p := plantest.Large(50, 3)
		if err := sync(e, p); err != nil {
			t.Fatal(err)
		}
		bad := plantest.LargeService(17, 5000, 3)
		k.refuse = ":" + serviceChain(prefixCluster, bad.Key) + " "
		p.Set(plantest.LargeService(18, 6000, 2))
		want := fresh(p)
		p.Set(bad)
		err := sync(e, p)
		if err == nil || !strings.Contains(err.Error(), bad.Key.Service.String()) || !strings.Contains(err.Error(), "keeps the endpoints") {
			t.Errorf("want an error that names %s; got %v", bad.Key.Service, err)
		}
		if got := k.text(); got != want {
			t.Errorf("refused:\n%s", diffLines(want, got))
		}
		k.refuse = ""
		if err := sync(e, p); err != nil {
			t.Fatal(err)
		}
		if got, want := k.text(), fresh(p); got != want {
			t.Errorf("no longer refused:\n%s", diffLines(want, got))
		}
	}
}

// TestNothingIsTaken: where iptables-restore does nothing at all, no ServicePort is blamed, and it is not tried with each.
func TestNothingIsTaken(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	p := plantest.Large(50, 2)
	if err := e.sync(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		p.Set(plantest.LargeService(i, 5000+2*i, 2))
	}
	k.refuse, k.restores = "COMMIT", nil
	if err := e.sync(t.Context(), p, nil); err == nil || strings.Contains(err.Error(), "Service") || len(k.restores) > 4 {
		t.Errorf("after %d tries: %v", len(k.restores), err)
	}
}

// TestRefusedEntry: rules in a dispatcher that the kernel does not take cost the one ServicePort that they are for, whether they
// lead to its chains or do without.
func TestRefusedEntry(t *testing.T) {
	for _, endpoints := range []int{2, 3} {
		e, k := fakeEngine(plan.IPv4)
		p := plantest.Large(50, endpoints)
		bad := p.Sorted(plan.IPv4)[23]
		k.refuse = "-d " + bad.Frontends[0].Addr.String() + "/32 "
		err := e.sync(t.Context(), p, nil)
		if err == nil || !strings.Contains(err.Error(), bad.Key.Service.String()) || !strings.Contains(err.Error(), "not proxied") {
			t.Fatalf("want an error that names %s; got %v", bad.Key.Service, err)
		}
		p.Delete(bad.Key)
		if got, want := k.text(), wantText(p, plan.IPv4); got != want {
			t.Errorf("the others are not as without it:\n%s", diffLines(want, got))
		}
		k.refuse = ""
		p.Set(bad)
		if err := e.sync(t.Context(), p, nil); err != nil {
			t.Fatal(err)
		}
		if got, want := k.text(), wantText(p, plan.IPv4); got != want {
			t.Errorf("no longer refused:\n%s", diffLines(want, got))
		}
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
			k.refuseReached = "-d " + bad.Frontends[0].Addr.String() + "/32 "
			for _, on := range []string{"an empty node", "the others"} {
				err := e.sync(t.Context(), p, nil)
				if err == nil || !strings.Contains(err.Error(), bad.Key.Service.String()) || !strings.Contains(err.Error(), "not proxied") {
					t.Fatalf("on %s: want an error that names %s; got %.300v", on, bad.Key.Service, err)
				}
				without := plan.New(p.Node, p.Settings)
				for _, sp := range p.Sorted(plan.IPv4) {
					if sp != bad {
						without.Set(sp)
					}
				}
				if got, want := k.text(), wantText(without, plan.IPv4); got != want {
					t.Errorf("on %s: the others are not as without it:\n%s", on, diffLines(want, got))
				}
			}
		}
	}
}
