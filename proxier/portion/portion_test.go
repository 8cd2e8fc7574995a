package portion

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestPortions: whatever changes come in whatever portions, each plan differs from the one before in what is said and no more, has
// one owner for each frontend, never takes one away that has an owner before and after, and the last one is what is desired.
func TestPortions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plans := rapid.SliceOfN(plantest.Plans(), 2, 5).Draw(t, "plans")
		x := New(rapid.IntRange(1, 40).Draw(t, "most"))
		held := plan.New(plans[0].Node, plans[0].Settings)
		owners := func(p *plan.Plan) map[frontend]plan.Key {
			out := map[frontend]plan.Key{}
			for k, sp := range p.Services {
				for _, f := range sp.Frontends {
					c := frontend{k.Family, plan.Address{Addr: f.Addr, Protocol: f.Protocol, Port: f.Port}}
					if other, taken := out[c]; taken && other != k {
						t.Fatalf("%s and %s have %s", k, other, f)
					}
					out[c] = k
				}
			}
			return out
		}
		desired := plans[0]
		p, _ := x.Next(desired, plan.Everything())
		held = copyOf(p)
		step := func(changed plan.Keys) {
			before := owners(held)
			p, change := x.Next(desired, plan.Only(changed))
			for k := range plantest.Differing(held, p) {
				if _, listed := change.Keys()[k]; !listed {
					t.Fatalf("%s differs, and is not listed", k)
				}
			}
			held = copyOf(p)
			now, then := owners(held), owners(desired)
			for c, k := range before {
				if _, has := now[c]; !has && then[c] != (plan.Key{}) {
					t.Fatalf("%v of %s is nobody's, and is to be %s's", c, k, then[c])
				}
			}
		}
		for _, next := range plans[1:] {
			changed := plantest.Differing(desired, next)
			desired = next
			step(changed)
			for range rapid.IntRange(0, 3).Draw(t, "portions before the next change") {
				step(plan.Keys{})
			}
		}
		for range 1000 {
			if x.Waiting() == 0 {
				break
			}
			step(plan.Keys{})
		}
		if left := plantest.Differing(held, desired); len(left) > 0 {
			t.Fatalf("in the end these differ: %v", left)
		}
	})
}

// TestPortionsKeepWhatThePlanSays: what is said of a plan as a whole is said of the one that the backend gets, too.
func TestPortionsKeepWhatThePlanSays(t *testing.T) {
	x := New(20)
	for _, partial := range []bool{true, false} {
		desired := plan.New(plan.Node{Name: "me"}, plan.Settings{ResetTCP: partial})
		desired.Partial = partial
		if p, _ := x.Next(desired, plan.Everything()); p.Partial != partial || p.Settings.ResetTCP != partial || p.Node.Name != "me" {
			t.Errorf("the backend gets a plan with Partial=%v, want %v", p.Partial, partial)
		}
	}
}

// TestOrder: what a node needs first is in the first portion, and each portion has as much for both families as it may.
func TestOrder(t *testing.T) {
	desired := plan.New(plan.Node{Name: "me"}, plan.Settings{})
	q := New(10)
	q.Next(desired, plan.Everything())
	changed := plan.Keys{}
	for i := range 30 {
		for _, f := range plan.Families {
			key := plan.Key{Service: plan.Service{Namespace: "ns", Name: fmt.Sprintf("s%02d", i)}, Protocol: plan.TCP, Family: f}
			desired.Set(&plan.ServicePort{Key: key, Critical: i == 29})
			changed.Add(key)
		}
	}
	for portion := range 3 {
		p, change := q.Next(desired, plan.Only(changed))
		if (p == desired) != (q.Waiting() == 0) {
			t.Errorf("portion %d leaves %d, and its plan is that of all: %v", portion, q.Waiting(), p == desired)
		}
		now := change.Keys()
		changed = plan.Keys{}
		for _, f := range plan.Families {
			if n := len(now.Sorted(f)); n != 10 {
				t.Errorf("portion %d has %d ServicePorts of %s, want 10", portion, n, f)
			}
		}
		critical := plan.Key{Service: plan.Service{Namespace: "ns", Name: "s29"}, Protocol: plan.TCP, Family: plan.IPv6}
		if _, is := now[critical]; is != (portion == 0) {
			t.Errorf("portion %d has the critical Service: %v", portion, is)
		}
	}
	if q.Waiting() > 0 {
		t.Errorf("%d are left", q.Waiting())
	}
}

func copyOf(p *plan.Plan) *plan.Plan {
	out := plan.New(p.Node, p.Settings)
	for _, sp := range p.Services {
		out.Set(sp)
	}
	return out
}
