package plantest_test

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestPlansAreValid holds random plans to what every plan obeys.
func TestPlansAreValid(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := plantest.Plans().Draw(t, "plan")
		type claim struct {
			family plan.Family
			plan.Frontend
		}
		owners := map[claim]plan.Key{}
		claimOf := func(sp *plan.ServicePort, f plan.Frontend) claim {
			f.Kind = 0
			return claim{sp.Key.Family, f}
		}
		for key, sp := range p.Services {
			if key != sp.Key {
				t.Errorf("%s is kept as %s", sp.Key, key)
			}
			if !slices.IsSortedFunc(sp.Frontends, plan.Frontend.Compare) {
				t.Errorf("%s: frontends are out of order: %v", key, sp.Frontends)
			}
			if canonical := plan.Canonical(slices.Clone(sp.SourceRanges)); !slices.Equal(sp.SourceRanges, canonical) {
				t.Errorf("%s: source ranges %s are not %s", key, sp.SourceRanges, canonical)
			}
			for _, f := range sp.Frontends {
				c := claimOf(sp, f)
				if other, taken := owners[c]; taken {
					t.Errorf("%s and %s both own %s", key, other, f)
				}
				owners[c] = key
				if f.Addr.IsValid() != (f.Kind < plan.NodePort) {
					t.Errorf("%s: %s has an address it should not, or none", key, f)
				}
				if f.Addr.IsValid() && plan.FamilyOf(f.Addr) != key.Family {
					t.Errorf("%s: %s is of another family", key, f)
				}
			}
			if (len(sp.Endpoints.Cluster) > 0 || len(sp.Endpoints.Local) > 0) && !sp.Any {
				t.Errorf("%s has endpoints and has none", key)
			}
			if sp.HasExternal() && sp.Any && len(sp.Endpoints.Cluster) == 0 {
				t.Errorf("%s has no endpoint for its own node's traffic", key)
			}
			for _, ep := range sp.Endpoints.Local {
				if !ep.Local {
					t.Errorf("%s: %s is not local", key, ep.Addr)
				}
			}
		}
		for _, sp := range p.Services {
			for _, s := range sp.Shadowed {
				if owner, taken := owners[claimOf(sp, s.Frontend)]; !taken || owner != s.Owner || owner == sp.Key {
					t.Errorf("%s: %s is shadowed by %s, but its owner is %s", sp.Key, s.Frontend, s.Owner, owner)
				}
			}
		}
	})
}

// TestPacketsReachEverything makes sure that what is tested with random packets really occurs: every action for every
// kind of frontend that can have it, and packets for nothing, in both families.
func TestPacketsReachEverything(t *testing.T) {
	t.Parallel()
	const plans, packets = 400, 40
	seen := map[string]int{}
	for i := range plans {
		c := plantest.Clusters().Example(i)
		e := plan.NewEvaluator(c.Plan)
		for _, f := range plan.Families {
			g := c.Packets(f)
			for n := range packets {
				pkt := g.Example(i*packets + n)
				if plan.FamilyOf(pkt.Src) != f || plan.FamilyOf(pkt.Dst) != f {
					t.Fatalf("a packet of %s is %s", f, pkt)
				}
				if pkt.SrcLocal != c.Local(pkt.Src) || pkt.DstLocal != c.Local(pkt.Dst) || pkt.Output && !pkt.SrcLocal {
					t.Fatalf("a packet is described wrongly: %s", pkt)
				}
				v := e.Verdict(pkt)
				what := "nothing"
				if v.ServicePort != (plan.Key{}) {
					what = v.Frontend.Kind.String()
				}
				seen[fmt.Sprintf("%s %s, %s", f, v.Action, what)]++
				for _, target := range v.Targets {
					seen[fmt.Sprintf("%s masquerade %t, %s", f, target.Masquerade, what)]++
				}
			}
		}
	}
	for _, f := range plan.Families {
		want := []string{"pass, nothing", "pass, health check node port"}
		for _, kind := range []plan.FrontendKind{plan.ClusterIP, plan.LoadBalancerIP, plan.ExternalIP, plan.NodePort} {
			for _, what := range []string{"forward", "reject", "drop", "masquerade true", "masquerade false"} {
				want = append(want, fmt.Sprintf("%s, %s", what, kind))
			}
		}
		for _, w := range want {
			if seen[f.String()+" "+w] == 0 {
				t.Errorf("%s %s never occurs; what does: %v", f, w, slices.Sorted(maps.Keys(seen)))
			}
		}
	}
}

func TestLarge(t *testing.T) {
	t.Parallel()
	const services, endpoints = 2000, 3
	p := plantest.Large(services, endpoints)
	if again := plantest.Large(services, endpoints); !reflect.DeepEqual(p, again) {
		t.Error("two calls give two plans")
	}
	if len(p.Services) != services {
		t.Errorf("there are %d Services, want %d", len(p.Services), services)
	}
	clusterIPs := map[netip.Addr]bool{}
	addrs := map[netip.AddrPort]bool{}
	local := 0
	for key, sp := range p.Services {
		clusterIPs[sp.Frontends[0].Addr] = true
		if !sp.Any || len(sp.Endpoints.Cluster) != endpoints {
			t.Errorf("%s has endpoints %v, want %d", key, sp.Endpoints.Cluster, endpoints)
		}
		for _, ep := range sp.Endpoints.Cluster {
			addrs[ep.Addr] = true
			if ep.Local {
				local++
			}
		}
	}
	if len(clusterIPs) != services || len(addrs) != services*endpoints || local != services*endpoints/100 {
		t.Errorf("there are %d cluster IPs, %d endpoints, %d of them local; want %d, %d, %d", len(clusterIPs),
			len(addrs), local,
			services, services*endpoints, services*endpoints/100)
	}
	before, after := plantest.LargeService(7, 21, endpoints), plantest.LargeService(7, 6000, endpoints)
	if !before.Equal(p.Services[before.Key]) || before.Equal(after) || before.Key != after.Key {
		t.Error("a Service with other endpoints is not that Service with other endpoints")
	}
}
