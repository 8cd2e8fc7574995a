package ipvs

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

var testOptions = Options{MasqueradeBit: 14, RandomFully: true}

// TestIncrementalEqualsFull: whatever sequence of plans the kernel was brought through, change by change, it holds what it
// would hold had the last one been the first. What drains is removed before it is compared.
func TestIncrementalEqualsFull(t *testing.T) {
	t.Parallel()
	for _, f := range plan.Families {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(t *rapid.T) {
				plans := rapid.SliceOfN(plantest.Plans(), 2, 4).Draw(t, "plans")
				e, k := fakeEngine(f, testOptions)
				inSteps(t, e)
				for i, p := range plans {
					p.Node, p.Settings = plans[0].Node, plans[0].Settings
					var change plan.Change
					if i > 0 {
						change = plan.Only(plantest.Differing(plans[i-1], p))
					}
					require.NoError(t, e.Sync(context.Background(), p, change))
					if e.rest != nil && i < len(plans)-1 && rapid.Bool().Draw(t, "the next change comes before the end of this one") {
						continue
					}
					for n := 0; e.rest != nil; n++ {
						if err := e.Sync(context.Background(), p, plan.Only(nil)); err != nil || n > 10_000 {
							t.Fatalf("after %d further syncs: %v", n, err)
						}
					}
					require.NoError(t, e.drain(time.Now()))
					fresh, want := fakeEngine(f, testOptions)
					require.NoError(t, fresh.Sync(context.Background(), p, plan.Everything()))
					if k.Text() != want.Text() {
						t.Fatalf("after step %d the kernel holds\n%s\ninstead of\n%s", i, k.Text(), want.Text())
					}
				}
			})
		})
	}
}

// TestFullFromAnything: a start over whatever another plan has left makes the kernel what it should be, with no outside
// trace; and a second start writes nothing.
func TestFullFromAnything(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		before, after := plantest.Plans().Draw(t, "before"), plantest.Plans().Draw(t, "after")
		first, k := fakeEngine(f, testOptions)
		require.NoError(t, first.Sync(context.Background(), before, plan.Everything()))
		for range 2 {
			k.Calls = nil
			e := engineOver(k, testOptions)
			require.NoError(t, e.Sync(context.Background(), after, plan.Everything()))
			require.NoError(t, e.drain(time.Now()))
		}
		fresh, want := fakeEngine(f, testOptions)
		require.NoError(t, fresh.Sync(context.Background(), after, plan.Everything()))
		if k.Text() != want.Text() {
			t.Fatalf("the kernel holds\n%s\ninstead of\n%s", k.Text(), want.Text())
		}
		if calls := strings.Join(k.Calls, "\n"); calls != "list servers\nrules" {
			t.Fatalf("a start over what is right did\n%s", calls)
		}
	})
}

// large is a plan of n Services with two endpoints each.
func large(n int) *plan.Plan { return plantest.Large(n, 2) }

// replaced is a plan in which one ServicePort has another endpoint in place of its last.
func replaced(p *plan.Plan, key plan.Key, with string) (*plan.Plan, plan.Keys) {
	out := plan.New(p.Node, p.Settings)
	for _, sp := range p.Services {
		out.Set(sp)
	}
	sp := *out.Services[key]
	sp.Endpoints.Cluster = slices.Clone(sp.Endpoints.Cluster)
	sp.Endpoints.Cluster[len(sp.Endpoints.Cluster)-1] = plan.Endpoint{Addr: netip.MustParseAddrPort(with)}
	slices.SortFunc(sp.Endpoints.Cluster, func(a, b plan.Endpoint) int { return a.Addr.Compare(b.Addr) })
	out.Set(&sp)
	return out, plan.Keys{key: {}}
}

// TestOneEndpoint costs the messages for one real server, however many Services there are.
func TestOneEndpoint(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(2000)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	key := p.Sorted(plan.IPv4)[1000].Key
	old := p.Services[key].Endpoints.Cluster[1].Addr
	k.Connections[old] = 1
	next, changed := replaced(p, key, "10.250.0.1:8080")
	k.Calls = nil
	require.NoError(t, e.Sync(context.Background(), next, plan.Only(changed)))
	var id ipvs.ServerID
	for _, f := range p.Services[key].Frontends {
		if f.Kind == plan.ClusterIP {
			id = ipvs.ServerID{Family: plan.IPv4, Protocol: f.Protocol, Addr: f.Addr, Port: f.Port}
		}
	}
	want := []string{
		"add real server " + id.String() + " 10.250.0.1:8080 1",
		"update real server " + id.String() + " " + old.String() + " 0",
	}
	if !slices.Equal(k.Calls, want) {
		t.Errorf("it took\n%s\nwant\n%s", strings.Join(k.Calls, "\n"), strings.Join(want, "\n"))
	}

	// Its connections end: it is removed, with nobody else being asked about.
	k.Calls = nil
	require.NoError(t, e.drain(time.Now()))
	if len(k.Calls) > 0 {
		t.Errorf("while it had connections: %s", k.Calls)
	}
	k.Connections[old] = 0
	require.NoError(t, e.drain(time.Now()))
	if want := []string{"delete real server " + id.String() + " " + old.String() + " 0"}; !slices.Equal(k.Calls, want) {
		t.Errorf("when they had ended: %s, want %s", k.Calls, want)
	}
}

// TestDrain: connections have until the deadline; an endpoint that comes back gets its weight; an endpoint that still exists
// has no deadline.
func TestDrain(t *testing.T) {
	t.Parallel()
	p := large(1)
	key := p.Sorted(plan.IPv4)[0].Key
	old := p.Services[key].Endpoints.Cluster[1].Addr
	gone, changed := replaced(p, key, "10.250.0.1:8080")
	terminating, _ := replaced(p, key, "10.250.0.1:8080")
	sp := *terminating.Services[key]
	sp.Excluded = []plan.Exclusion{{Addr: old, Reason: plan.Terminating}}
	terminating.Set(&sp)

	for _, tc := range []struct {
		name    string
		next    *plan.Plan
		after   time.Duration
		removed bool
	}{
		{"just gone", gone, 0, false},
		{"gone for long", gone, testGrace + time.Minute, true},
		{"still listed", terminating, 10 * testGrace, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			e, k := fakeEngine(plan.IPv4, testOptions)
			require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
			k.Connections[old] = 3
			require.NoError(t, e.Sync(context.Background(), tc.next, plan.Only(changed)))
			later := time.Now().Add(tc.after)
			require.NoError(t, e.drain(later))
			if removed := !strings.Contains(k.Text(), "  "+old.String()+" 0\n"); removed != tc.removed {
				t.Errorf("removed: %t, want %t:\n%s", removed, tc.removed, k.Text())
			}
			if tc.removed {
				return
			}
			k.Calls = nil
			require.NoError(t, e.Sync(context.Background(), p, plan.Only(changed)))
			require.NoError(t, e.drain(later))
			if !strings.Contains(k.Text(), "  "+old.String()+" 1\n") || slices.ContainsFunc(k.Calls, func(c string) bool {
				return strings.HasPrefix(c, "delete real server") && strings.Contains(c, old.String())
			}) {
				t.Errorf("it came back, and there were %q:\n%s", k.Calls, k.Text())
			}
		})
	}
}

// TestOrder: what masquerades and refuses is there before the virtual servers, and those before the addresses; where
// another mode serves, its rules go last, when the sets have no entries any more of an earlier time in this mode.
func TestOrder(t *testing.T) {
	t.Parallel()
	for _, otherMode := range []bool{false, true} {
		e, k := fakeEngine(plan.IPv4, testOptions)
		require.NoError(t, e.Sync(context.Background(), large(6), plan.Everything()))
		for _, sp := range large(3).Sorted(plan.IPv4) {
			for _, f := range sp.Frontends {
				k.Addresses.Delete(f.Addr)
			}
		}
		clear(k.Virtual)
		k.OtherMode, k.Calls = otherMode, nil
		require.NoError(t, engineOver(k, testOptions).Sync(context.Background(), large(3), plan.Everything()))
		var got []string
		for _, c := range k.Calls {
			kind := strings.Join(strings.Fields(c)[:1], " ")
			if len(got) == 0 || got[len(got)-1] != kind+" "+strings.Fields(c + " .")[1] {
				got = append(got, kind+" "+strings.Fields(c + " .")[1])
			}
		}
		rules, servers, addresses := slices.Index(got, "rules ."), slices.Index(got, "add server"), slices.Index(got, "add addresses")
		entries := slices.IndexFunc(got, func(c string) bool { return strings.HasPrefix(c, "remove ") && c != "remove addresses" })
		if otherMode && !(servers < addresses && addresses < entries && entries < rules) ||
			!otherMode && !(rules < servers && servers < addresses && addresses < entries) {
			t.Errorf("other mode %t: the order was %q", otherMode, got)
		}
	}
}

// TestOneFailureStopsNothingElse: a refusal of one Service is reported, and the others work.
func TestOneFailureStopsNothingElse(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(3)
	first := p.Sorted(plan.IPv4)[0].Frontends[0]
	k.Fail = "add server " + ipvs.ServerID{Family: plan.IPv4, Protocol: first.Protocol, Addr: first.Addr, Port: first.Port}.String()
	if err := e.Sync(context.Background(), p, plan.Everything()); err == nil || len(k.Virtual) != 2 {
		t.Errorf("%v; there are %d virtual servers", err, len(k.Virtual))
	}
	k.Fail = ""
	require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys{})))
	if len(k.Virtual) != 3 {
		t.Errorf("after the failure everything must be looked at again: there are %d virtual servers", len(k.Virtual))
	}
}

// TestRoutes: with known ranges, cluster IPs need no address of their own; an address of the host's is never touched.
func TestRoutes(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(3)
	p.Settings.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00::/112")}
	key := p.Sorted(plan.IPv4)[0].Key
	sp := *p.Services[key]
	own, other := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("192.0.2.8")
	for _, a := range []netip.Addr{own, other} {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: a, Protocol: plan.TCP, Port: 80})
	}
	p.Set(&sp)
	k.HostAddrs.Insert(own)
	k.Local[netip.MustParsePrefix("10.0.0.0/24")] = netip.Addr{}
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	check := func(when string, local int, addresses ...netip.Addr) {
		t.Helper()
		if len(k.Local) != 1 {
			t.Errorf("%s: routes %v", when, k.Local)
		}
		if _, ok := k.Local[netip.MustParsePrefix("10.96.0.0/12")]; !ok {
			t.Errorf("%s: the range has no route: %v", when, k.Local)
		}
		if got := slices.SortedFunc(maps.Keys(k.Addresses), netip.Addr.Compare); !slices.Equal(got, addresses) {
			t.Errorf("%s: addresses %v, want %v", when, got, addresses)
		}
		if n := len(k.Set["KUBE-IPVS-IPS"]); n != local {
			t.Errorf("%s: KUBE-IPVS-IPS has %d entries, want %d", when, n, local)
		}
	}
	// The first address of the range keeps the device from losing its last one, and all routes with it.
	anchor := netip.MustParseAddr("10.96.0.0")
	check("with an external IP", 1, anchor, other) // Of the latter, only a port is local.
	p.Set(large(3).Services[key])
	require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys{key: {}})))
	check("without", 1, anchor)
}

// TestRangeOfOneAddress: such a service CIDR gets no route; a Service there gets its address as outside of all ranges.
func TestRangeOfOneAddress(t *testing.T) {
	t.Parallel()
	for _, f := range plan.Families {
		e, k := fakeEngine(f, testOptions)
		p := plan.New(plan.Node{Name: "me"}, plan.Settings{})
		a := map[plan.Family]string{plan.IPv4: "10.96.15.160", plan.IPv6: "fd00::5"}[f]
		vip := netip.MustParseAddr(a)
		p.Settings.ServiceCIDRs = []netip.Prefix{netip.PrefixFrom(vip, f.Bits())}
		check := func(when string, want ...netip.Addr) {
			t.Helper()
			if len(k.Local) > 0 {
				t.Errorf("%s %s: routes %v", f, when, k.Local)
			}
			if got := slices.Collect(maps.Keys(k.Addresses)); !slices.Equal(got, want) {
				t.Errorf("%s %s: addresses %v, want %v", f, when, got, want)
			}
		}
		require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
		check("without a Service")
		key := plan.Key{Service: plan.Service{Namespace: "ns", Name: "web"}, Protocol: plan.TCP, Family: f}
		sp := &plan.ServicePort{Key: key, Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: vip, Protocol: plan.TCP, Port: 80}}}
		p.Set(sp)
		require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{key: {}})))
		check("with a Service", vip)
		require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
		check("compared", vip)
		p.Delete(key)
		require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{key: {}})))
		check("when it has gone")
	}
}

// webPlan has ns/web with a node port, under an external policy.
func webPlan(policy plan.Policy, protocol plan.Protocol) *plan.Plan {
	p := plan.New(plan.Node{Name: "me"}, plan.Settings{})
	ep := plan.Endpoint{Addr: netip.MustParseAddrPort("10.244.1.5:8080"), Local: true}
	sp := &plan.ServicePort{
		Key:            plan.Key{Service: plan.Service{Namespace: "ns", Name: "web"}, Protocol: protocol, Family: plan.IPv4},
		ExternalPolicy: policy,
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.96.0.1"), Protocol: protocol, Port: 80},
			{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("192.0.2.9"), Protocol: protocol, Port: 80},
			{Kind: plan.NodePort, Protocol: protocol, Port: 30080},
		},
	}
	sp.Any, sp.Endpoints.Cluster, sp.Endpoints.Local = true, []plan.Endpoint{ep}, []plan.Endpoint{ep}
	p.Set(sp)
	return p
}

// TestReplacedServers: a virtual server that another one replaces, as upon a change of policy or in place of kube-proxy's,
// gets no new connections and goes when its connections have ended. That of a Service that is deleted, or of UDP, goes at once.
func TestReplacedServers(t *testing.T) {
	t.Parallel()
	local, cluster := webPlan(plan.Local, plan.TCP), webPlan(plan.Cluster, plan.TCP)
	udp, udpCluster := webPlan(plan.Local, plan.UDP), webPlan(plan.Cluster, plan.UDP)
	noNodePort := webPlan(plan.Local, plan.TCP)
	noNodePortCluster := webPlan(plan.Cluster, plan.TCP)
	for _, p := range []*plan.Plan{noNodePort, noNodePortCluster} {
		for k, sp := range p.Services {
			without := *sp
			without.Frontends = without.Frontends[:2]
			p.Services[k] = &without
		}
	}
	none := plan.New(plan.Node{Name: "me"}, plan.Settings{})
	host := netip.MustParseAddr("192.0.2.1")
	for _, tc := range []struct {
		name         string
		before, next *plan.Plan
		replaced     int
	}{
		{"from Local to Cluster", local, cluster, 2}, // masqueraded traffic has the same one
		{"from Local to Cluster without a node port", noNodePort, noNodePortCluster, 2},
		{"from Cluster to Local", cluster, local, 0},
		{"of UDP", udp, udpCluster, 0},
		{"deleted", local, none, 0},
		{"kube-proxy's", none, cluster, 1},
		{"kube-proxy's of a Service that is gone", none, none, 0},
	} {
		for _, all := range []bool{false, true} {
			t.Run(tc.name+map[bool]string{true: ", after a restart", false: ""}[all], func(t *testing.T) {
				t.Parallel()
				e, k := fakeEngine(plan.IPv4, testOptions)
				k.HostAddrs.Insert(host)
				require.NoError(t, e.Sync(context.Background(), tc.before, plan.Everything()))
				k.Connections[netip.MustParseAddrPort("10.244.1.5:8080")] = 1
				change := plan.Only(plantest.Differing(tc.before, tc.next))
				if strings.HasPrefix(tc.name, "kube-proxy") {
					v := ipvs.Server{ID: ipvs.ServerID{Family: plan.IPv4, Protocol: plan.TCP, Addr: host, Port: 30080}, Scheduler: "rr"}
					dest := ipvs.RealServer{Addr: netip.MustParseAddrPort("10.244.1.5:8080"), Weight: 1}
					require.NoError(t, ipvstest.Servers{Kernel: k}.Do(ipvs.Op{Kind: ipvs.AddServer, Server: v}))
					require.NoError(t, ipvstest.Servers{Kernel: k}.Do(ipvs.Op{Kind: ipvs.AddRealServer, Server: v, RealServer: dest}))
					change = plan.Everything()
				}
				if all {
					e, change = engineOver(k, testOptions), plan.Everything()
				}
				require.NoError(t, e.Sync(context.Background(), tc.next, change))
				fresh, want := fakeEngine(plan.IPv4, testOptions)
				require.NoError(t, fresh.Sync(context.Background(), tc.next, plan.Everything()))
				left := 0
				for id, v := range k.Virtual {
					if want.Virtual[id] != nil {
						continue
					}
					left++
					for addr, d := range v.RealServers {
						if d.Weight != 0 {
							t.Errorf("%s still sends new connections to %s", id, addr)
						}
					}
				}
				if left != tc.replaced {
					t.Errorf("%d virtual servers are left with connections, want %d:\n%s", left, tc.replaced, k.Text())
				}
				clear(k.Connections)
				require.NoError(t, e.drain(time.Now()))
				if k.Text() != want.Text() {
					t.Errorf("when the connections had ended, the kernel held\n%s\nwant\n%s", k.Text(), want.Text())
				}
			})
		}
	}
}

// TestDrainHashed: sh and mh pass over a real server that drains. The scheduler dh can't, so it is not the virtual server's from before
// the weight is 0 until the real server is gone, or back.
func TestDrainHashed(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ scheduler, meanwhile string }{{"sh", "sh"}, {"mh", "mh"}, {"dh", "rr"}, {"lc", "lc"}} {
		t.Run(tc.scheduler, func(t *testing.T) {
			t.Parallel()
			p := large(1)
			key := p.Sorted(plan.IPv4)[0].Key
			sp := *p.Services[key]
			sp.Scheduler.Name = tc.scheduler
			p.Set(&sp)
			old := sp.Endpoints.Cluster[1].Addr
			gone, changed := replaced(p, key, "10.250.0.1:8080")
			e, k := fakeEngine(plan.IPv4, testOptions)
			has := func(when, scheduler string) {
				t.Helper()
				for id, v := range k.Virtual {
					if v.Scheduler != scheduler || v.Fallback != (scheduler == "sh" || scheduler == "mh") {
						t.Errorf("%s: virtual server %s has scheduler %s, fallback %t", when, id, v.Scheduler, v.Fallback)
					}
				}
			}
			require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
			has("at first", tc.scheduler)
			k.Connections[old] = 1
			k.Before = func() {
				if last := k.Calls[len(k.Calls)-1]; strings.HasPrefix(last, "update real server") && strings.HasSuffix(last, " 0") {
					has("before the weight is 0", tc.meanwhile)
				}
			}
			require.NoError(t, e.Sync(context.Background(), gone, plan.Only(changed)))
			k.Before = nil
			has("while one drains", tc.meanwhile)
			require.NoError(t, e.Sync(context.Background(), gone, plan.Everything()))
			has("after a comparison", tc.meanwhile)
			require.NoError(t, e.Sync(context.Background(), p, plan.Only(changed)))
			require.NoError(t, e.drain(time.Now()))
			has("when it is back", tc.scheduler)
			require.NoError(t, e.Sync(context.Background(), gone, plan.Only(changed)))
			k.Connections[old] = 0
			require.NoError(t, e.drain(time.Now()))
			has("when it is gone", tc.scheduler)
		})
	}
}
