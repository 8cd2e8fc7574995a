package nftables

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// many is a ServicePort with external IPs, beside its cluster IP.
func many(i, addresses, endpoints, first int) *plan.ServicePort {
	sp := *plantest.LargeService(i, first, endpoints)
	for n := range addresses {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: netip.AddrFrom4([4]byte{203, byte(i), byte(n >> 8), byte(n)}),
			Protocol: sp.Key.Protocol, Port: 80})
	}
	slices.SortFunc(sp.Frontends, plan.Frontend.Compare)
	return &sp
}

// TestStepsAreSmall: whatever changes of a ServicePort with many frontends, no sync writes more than a little of it, others change
// meanwhile, and in the end all of it is in force.
func TestStepsAreSmall(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, k := testEngine(t, plan.IPv4)
	e.mostAtOnce = 300
	p := plantest.Large(20, 3)
	synced(t, e, p, plan.Everything())
	small := plantest.LargeService(3, 9, 3)
	n := 0
	sync := func(what string, keys plan.Keys, atLeast int) {
		t.Helper()
		for syncs := 1; ; syncs++ {
			n++
			other := *small
			other.Endpoints.Cluster = plantest.LargeService(3, 5000+n*3, 3).Endpoints.Cluster
			p.Set(&other)
			keys.Add(other.Key)
			k.most = 0
			require.NoError(t, e.Sync(ctx, p, plan.Only(keys)), "%s", what)
			keys = plan.Keys{}
			if k.most > e.mostAtOnce+200 {
				t.Errorf("%s: a transaction had %d elements", what, k.most)
			}
			mine, have := map[id]value{}, e.remembered()
			e.layout.fill(place(e.current.of(other.Key), &other), mine, map[kind]bool{})
			for i, want := range mine {
				if have[i] != want {
					t.Fatalf("%s: another's change waits", what)
				}
			}
			isRemembered(t, e)
			if len(e.unfinished) > 0 {
				continue
			}
			if syncs < atLeast {
				t.Errorf("%s took %d syncs, want %d or more", what, syncs, atLeast)
			}
			holds(t, e, p)
			return
		}
	}
	one, two := many(50, 40, 30, 0), many(51, 40, 30, 9000)
	p.Set(one)
	sync("new", plan.Keys{one.Key: {}}, 3)
	p.Set(two)
	p.Set(many(50, 40, 30, 3000))
	sync("new, and all endpoints of another", plan.Keys{one.Key: {}, two.Key: {}}, 8)
	p.Set(many(50, 50, 29, 3000))
	sync("fewer endpoints, and more frontends", plan.Keys{one.Key: {}}, 6)
	p.Set(many(50, 20, 29, 3000))
	sync("fewer frontends", plan.Keys{one.Key: {}}, 4)
	p.Delete(one.Key)
	p.Delete(two.Key)
	sync("gone", plan.Keys{one.Key: {}, two.Key: {}}, 4)
	if e.users[one.Frontends[0].Addr] != 0 || e.current.len() != 20 {
		t.Errorf("%d ServicePorts are left", e.current.len())
	}
}

// TestStepsTakeTurns: a ServicePort that changes all the time does not keep another one from being finished, nor the rest of its own frontends.
func TestStepsTakeTurns(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	e.mostAtOnce = 300
	p := plantest.Large(2, 1)
	synced(t, e, p, plan.Everything())
	restless, other := many(50, 40, 20, 0), many(51, 40, 20, 9000)
	p.Set(restless)
	p.Set(other)
	changed := plan.Keys{restless.Key: {}, other.Key: {}}
	for n := 0; e.current.of(other.Key).sp == nil || e.current.of(other.Key).others != nil; n++ {
		if n > 200 {
			t.Fatal("the other one is not finished after 200 syncs")
		}
		synced(t, e, p, plan.Only(changed))
		p.Set(many(50, 40, 20, 100*(n+1)))
		changed = plan.Keys{restless.Key: {}}
	}
	for range 20 {
		p.Set(many(50, 40, 20, 50_000))
		synced(t, e, p, plan.Only(changed))
	}
	for fe, v := range e.current.of(restless.Key).frontends() {
		if v.endpoints(false)[0].Addr() != plantest.LargeService(50, 50_000, 20).Endpoints.Cluster[0].Addr.Addr() && !slices.Contains(v.sp.Endpoints.Cluster, plantest.LargeService(50, 50_000, 20).Endpoints.Cluster[0]) {
			t.Fatalf("%s has endpoints of long ago", fe)
		}
	}
	require.NoError(t, syncWhole(e, p, plan.Only(nil)))
	holds(t, e, p)
}

// TestStepsGiveFrontendsAway: a frontend that another ServicePort gets is that one's in the same sync, though the rest of its former owner
// changes later.
func TestStepsGiveFrontendsAway(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	e.mostAtOnce = 300
	p := plantest.Large(2, 1)
	large := many(50, 40, 20, 0)
	p.Set(large)
	synced(t, e, p, plan.Everything())
	for _, gone := range []bool{false, true} {
		heir := *plantest.LargeService(1, 1, 1)
		heir.Frontends = append(slices.Clone(heir.Frontends), large.Frontends[len(large.Frontends)-1])
		p.Set(&heir)
		if gone {
			p.Delete(large.Key)
		} else {
			p.Set(many(50, 39, 21, 7000))
		}
		synced(t, e, p, plan.Only(plan.Keys{large.Key: {}, heir.Key: {}}))
		if len(e.unfinished) != 1 {
			t.Errorf("%d are unfinished, want 1", len(e.unfinished))
		}
		isRemembered(t, e)
		if got := e.remembered()[id{set: services, key: nameOf(plan.IPv4, heir.Frontends[1])}].comment; got != heir.Key.PortName() {
			t.Errorf("the frontend is %q's", got)
		}
		require.NoError(t, syncWhole(e, p, plan.Only(nil)))
		holds(t, e, p)
		if !gone { // It comes back.
			p.Set(plantest.LargeService(1, 1, 1))
			p.Set(large)
			require.NoError(t, syncWhole(e, p, plan.Only(plan.Keys{large.Key: {}, heir.Key: {}})))
			holds(t, e, p)
		}
	}
}

// TestStepsMoveFrontends: a frontend that is in the plan before and after a change is in force all the while, as one version or the other has it:
// where its kind changes, and where a ServicePort that changes in steps gets it from another one.
func TestStepsMoveFrontends(t *testing.T) {
	large := many(50, 40, 20, 0)
	balanced := *large
	balanced.Frontends = slices.Clone(large.Frontends)
	for i := range balanced.Frontends[1:] {
		balanced.Frontends[1+i].Kind = plan.LoadBalancerIP
	}
	fewer := *large
	fewer.Frontends = large.Frontends[:len(large.Frontends)-1]
	owner := *plantest.LargeService(1, 1, 1)
	owner.Frontends = append(slices.Clone(owner.Frontends), large.Frontends[len(large.Frontends)-1])
	renamed := *large
	renamed.Key.Port = "renamed"
	for name, versions := range map[string][2][]*plan.ServicePort{
		"external IPs become load balancer IPs": {{large}, {&balanced}},
		"load balancer IPs become external IPs": {{&balanced}, {large}},
		"one comes from another ServicePort":    {{&fewer, &owner}, {large, plantest.LargeService(1, 1, 1)}},
		"all come from another ServicePort":     {{large}, {&renamed}},
	} {
		t.Run(name, func(t *testing.T) {
			nstest.Enter(t)
			e, _ := testEngine(t, plan.IPv4)
			e.mostAtOnce = 100
			p := plantest.Large(2, 1)
			changed := plan.Keys{}
			for _, sp := range versions[0] {
				p.Set(sp)
				changed.Add(sp.Key)
			}
			synced(t, e, p, plan.Everything())
			for key := range changed {
				p.Delete(key)
			}
			for _, sp := range versions[1] {
				p.Set(sp)
				changed.Add(sp.Key)
			}
			for first := true; first || len(e.unfinished) > 0; first = false {
				synced(t, e, p, plan.Only(changed))
				changed = nil
				isRemembered(t, e)
				have := elementsOf(t, e)
				for _, fe := range large.Frontends {
					for _, i := range []id{{set: services, key: nameOf(plan.IPv4, fe)}, {set: endpoints, key: indexed(nameOf(plan.IPv4, fe), 0)}} {
						if _, is := have[i]; !is {
							t.Fatalf("%s leads nowhere", fe)
						}
					}
				}
			}
			holds(t, e, p)
		})
	}
}

// TestStepsBehindClusterIP: the other frontends change too where the cluster IP alone has more elements than a sync changes, and changes in each.
func TestStepsBehindClusterIP(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	e.mostAtOnce = 30
	p := plantest.Large(2, 1)
	p.Set(many(50, 5, 40, 0))
	synced(t, e, p, plan.Everything())
	first := e.current.of(many(50, 5, 40, 0).Key).sp
	for n := range 12 {
		sp := many(50, 5, 40, 1000*(n+1))
		changeOf(t, e, p, sp)
	}
	for fe, v := range e.current.of(first.Key).frontends() {
		if v.sp == first {
			t.Errorf("%s has not changed in 12 syncs", fe)
		}
	}
}

// TestStepsUseKinds: a comparison does not remove kinds that have come into use since it began, where a ServicePort changed in steps meanwhile.
func TestStepsUseKinds(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, _ := testEngine(t, plan.IPv4)
	e.mostAtOnce = 1
	p := plantest.Large(2, 1)
	p.Set(many(50, 4, 20, 0))
	synced(t, e, p, plan.Everything())
	p.Set(many(50, 4, 25, 0))
	synced(t, e, p, plan.Only(plan.Keys{many(50, 4, 25, 0).Key: {}}))
	s, used := e.snapshot(), map[kind]bool{}
	_ = slices.Collect(s.expected(used))
	require.NoError(t, syncWhole(e, p, plan.Only(nil)))
	require.NoError(t, e.removeSpareKinds(ctx, s, used))
	holds(t, e, p)
}
