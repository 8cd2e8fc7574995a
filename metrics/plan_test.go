package metrics

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed"
	"nodeproxy/plan"
)

var anEndpoint = plan.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:80")}

func TestPlanned(t *testing.T) {
	t.Parallel()
	s := New(Config{Mode: iptables, Families: plan.Families[:]})
	p := plan.New(plan.Node{}, plan.Settings{})
	lb := []plan.Frontend{{Kind: plan.LoadBalancerIP}}
	p.Set(&plan.ServicePort{Key: testKey("a", plan.IPv4), Frontends: lb, ExternalPolicy: plan.Local,
		Shadowed: make([]plan.Shadowed, 2),
		Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{anEndpoint, anEndpoint}, Excluded: []plan.Exclusion{
			{Policy: plan.Local, Reason: plan.NotLocal}, {Policy: plan.Local, Reason: plan.NotLocal},
			{Policy: plan.Cluster, Reason: plan.NotReady}, {Policy: plan.Cluster, Reason: "something new"},
		}}})
	p.Set(&plan.ServicePort{Key: testKey("b", plan.IPv4), InternalPolicy: plan.Local, ExternalPolicy: plan.Local,
		Endpoints: plan.Endpoints{Any: true}})
	p.Set(&plan.ServicePort{Key: testKey("c", plan.IPv4), InternalPolicy: plan.Local, Frontends: lb, ExternalPolicy: plan.Local})
	p.Set(&plan.ServicePort{Key: testKey("d", plan.IPv4), InternalPolicy: plan.Local, Frontends: lb, ExternalPolicy: plan.Local,
		Endpoints: plan.Endpoints{Any: true, Local: []plan.Endpoint{anEndpoint}}})
	p.Set(&plan.ServicePort{Key: testKey("a", plan.IPv6)})
	s.Planned(p, plan.Everything())
	holds(t, s, map[string]float64{
		"nodeproxy_service_ports ip_family=IPv4":                                                     4,
		"nodeproxy_service_ports ip_family=IPv6":                                                     1,
		"nodeproxy_shadowed_frontends ip_family=IPv4":                                                2,
		"nodeproxy_endpoints ip_family=IPv4 policy=Cluster":                                          2,
		"nodeproxy_endpoints ip_family=IPv4 policy=Local":                                            1,
		"nodeproxy_excluded_endpoints ip_family=IPv4 policy=Local reason=not_local":                  2,
		"nodeproxy_excluded_endpoints ip_family=IPv4 policy=Cluster reason=not_ready":                1,
		"nodeproxy_excluded_endpoints ip_family=IPv4 policy=Cluster reason=other":                    1,
		"nodeproxy_excluded_endpoints ip_family=IPv6 policy=Cluster reason=not_ready":                0,
		"kubeproxy_sync_proxy_rules_no_local_endpoints_total ip_family=IPv4 traffic_policy=external": 1,
		"kubeproxy_sync_proxy_rules_no_local_endpoints_total ip_family=IPv4 traffic_policy=internal": 1,
		"kubeproxy_sync_proxy_rules_no_local_endpoints_total ip_family=IPv6 traffic_policy=internal": 0,
	})
}

// TestPlannedByChanges: counting what changed gives what counting everything gives.
func TestPlannedByChanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := New(Config{Mode: ipvs})
		p := plan.New(plan.Node{}, plan.Settings{})
		s.Planned(p, plan.Everything())
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			changed := plan.Keys{}
			for range rapid.IntRange(0, 3).Draw(t, "changes") {
				key := testKey(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name"), rapid.SampledFrom(plan.Families[:]).Draw(t, "family"))
				changed.Add(key)
				if rapid.IntRange(0, 3).Draw(t, "gone") == 0 {
					p.Delete(key)
					continue
				}
				p.Set(drawServicePort(t, key))
			}
			s.Planned(p, plan.Only(changed))
			whole := New(Config{Mode: ipvs})
			whole.Planned(p, plan.Everything())
			for _, f := range plan.Families {
				if *s.plan.total[f] != *whole.plan.total[f] {
					t.Fatalf("%s: by changes %+v, at once %+v", f, *s.plan.total[f], *whole.plan.total[f])
				}
			}
			counted := maps.Collect(func(yield func(plan.Key, *plan.ServicePort) bool) {
				for sp := range s.plan.known.All() {
					yield(sp.Key, sp)
				}
			})
			if !maps.Equal(counted, p.Services) {
				t.Fatalf("counted are %v, and there are %v", counted, p.Services)
			}
		}
	})
}

func drawServicePort(t *rapid.T, key plan.Key) *plan.ServicePort {
	policy := rapid.SampledFrom(policies[:])
	sp := &plan.ServicePort{Key: key, InternalPolicy: policy.Draw(t, "internal"), ExternalPolicy: policy.Draw(t, "external")}
	if rapid.Bool().Draw(t, "external too") {
		sp.Frontends = []plan.Frontend{{Kind: plan.NodePort}}
	}
	sp.Any = rapid.Bool().Draw(t, "any")
	sp.Endpoints.Cluster = make([]plan.Endpoint, rapid.IntRange(0, 3).Draw(t, "endpoints"))
	sp.Endpoints.Local = make([]plan.Endpoint, rapid.IntRange(0, 2).Draw(t, "local endpoints"))
	for range rapid.IntRange(0, 3).Draw(t, "excluded") {
		sp.Excluded = append(sp.Excluded, plan.Exclusion{Policy: policy.Draw(t, "policy"),
			Reason: reasons[rapid.IntRange(0, len(reasons)-1).Draw(t, "reason")].reason})
	}
	return sp
}

// TestEveryReasonHasALabel reads the reasons from the source of package plan.
func TestEveryReasonHasALabel(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "../plan/plan.go", nil, 0)
	require.NoError(t, err)
	n := 0
	ast.Inspect(file, func(node ast.Node) bool {
		spec, ok := node.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := spec.Type.(*ast.Ident); !ok || kind.Name != "Reason" {
			return true
		}
		reason, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		require.NoError(t, err)
		n++
		if reasonIndex(plan.Reason(reason)) == len(reasons)-1 {
			t.Errorf("%s (%q) has no label", spec.Names[0], reason)
		}
		return true
	})
	if n != len(reasons)-1 {
		t.Errorf("there are %d reasons, and labels for %d", n, len(reasons)-1)
	}
}

// BenchmarkPlanned is one ServicePort of 10,000 that has changed.
func BenchmarkPlanned(b *testing.B) {
	s := New(Config{Mode: iptables, Families: plan.Families[:]})
	p := plan.New(plan.Node{}, plan.Settings{})
	for i := range 10_000 {
		p.Set(&plan.ServicePort{Key: testKey(fmt.Sprint("s", i), plan.IPv4),
			Endpoints: plan.Endpoints{Cluster: []plan.Endpoint{anEndpoint, anEndpoint}, Excluded: []plan.Exclusion{{Reason: plan.NotReady}}}})
	}
	s.Planned(p, plan.Everything())
	changed := plan.Keys{testKey("s5000", plan.IPv4): {}}
	for b.Loop() {
		s.Planned(p, plan.Only(changed))
	}
}

// BenchmarkSync is all that is counted about a sync.
func BenchmarkSync(b *testing.B) {
	s := New(Config{Mode: iptables, Families: plan.Families[:]})
	for b.Loop() {
		s.Queued(0, 1)
		s.Taken()
		s.Synced(Sync{Stages: map[Stage]time.Duration{Apply: time.Microsecond, Plan: time.Microsecond, Backend: time.Millisecond},
			Triggers: []Trigger{{plan.IPv4, time.Now()}}})
	}
}
