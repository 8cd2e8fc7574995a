package flows

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// states lists the entries of a test by what is to become of them.
type states struct {
	stay, goes []entry
}

func (s states) all() []entry { return slices.Concat(s.stay, s.goes) }

// run puts the flows into the kernel's table, does a pass, and checks which are left.
func (s states) run(t testing.TB, r *Reconciler) {
	t.Helper()
	conntracktest.Inject(t, s.all()...)
	mustPass(t, r)
	var want []string
	for _, e := range s.stay {
		want = append(want, e.Src)
	}
	wantPresent(t, s.all(), want...)
}

// fromPort makes entries of a protocol, and numbers their sources, so that each is another flow, and those of masqueraded ones likewise.
func fromPort(protocol uint8, host string, entries []entry, first int) []entry {
	out := slices.Clone(entries)
	for i := range out {
		out[i].Protocol = protocol
		out[i].Src = fmt.Sprintf("%s:%d", host, first+i)
		if out[i].To != "" {
			out[i].To = fmt.Sprintf("%s:%d", out[i].To, first+i)
		}
	}
	return out
}

// addressesOf are the values that differ between the families.
type addressesOf struct {
	client, node, other, clusterIP, unused, lb, external, one, two, three, masquerade, loopback, service string
}

var byFamily = map[plan.Family]addressesOf{
	plan.IPv4: {client: "10.244.1.9", node: "192.168.0.1", other: "203.0.113.5", clusterIP: "10.96.0.10", unused: "10.96.7.7",
		lb: "198.51.100.1", external: "192.0.2.1", one: "10.244.1.1", two: "10.244.2.2", three: "10.244.3.3",
		masquerade: "192.168.0.1", loopback: "127.0.0.1", service: "10.96.0.0/16"},
	plan.IPv6: {client: "[fd00:244:1::9]", node: "[fd00:77::1]", other: "[2001:db8::5]", clusterIP: "[fd00:96::10]",
		unused: "[fd00:96::77]", lb: "[fd00:198::1]", external: "[fd00:192::1]", one: "[fd00:244:1::1]", two: "[fd00:244:2::2]",
		three: "[fd00:244:3::3]", masquerade: "[fd00:77::1]", loopback: "[::1]", service: "fd00:96::/112"},
}

// serviceCIDRs configures the range of cluster IPs.
func serviceCIDRs(a addressesOf) func(*Config) {
	return func(c *Config) { c.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix(a.service)} }
}

func parseAddr(s string) netip.Addr { return netip.MustParseAddrPort(s + ":1").Addr() }

// full is a ServicePort with every kind of frontend, one endpoint in use, one terminating one that serves, one whose node
// hints name another node, one that has stopped, and one that is not ready.
func full(name string, protocol plan.Protocol, a addressesOf) *plan.ServicePort {
	sp := withNodePort(service(name, protocol, a.clusterIP+":53", a.one+":5353"), 30053)
	for kind, addr := range map[plan.FrontendKind]string{plan.LoadBalancerIP: a.lb, plan.ExternalIP: a.external} {
		sp.Frontends = append(sp.Frontends,
			plan.Frontend{Kind: kind, Addr: parseAddr(addr), Protocol: protocol, Port: 53})
	}
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.HealthCheckNodePort, Protocol: plan.TCP, Port: 30099})
	for port, reason := range map[int]plan.Reason{
		6001: plan.Terminating, 6002: plan.NotForThisNode, 6003: plan.NotForThisZone, 6004: plan.NotLocal,
		7001: plan.TerminatingStopped, 7002: plan.NotReady,
	} {
		sp.Excluded = append(sp.Excluded,
			plan.Exclusion{Addr: netip.MustParseAddrPort(fmt.Sprintf("%s:%d", a.two, port)), Reason: reason})
	}
	// Left out by both policies, and not serving.
	sp.Excluded = append(sp.Excluded,
		plan.Exclusion{Addr: netip.MustParseAddrPort(a.three + ":7003"), Policy: plan.Cluster, Reason: plan.NotReady},
		plan.Exclusion{Addr: netip.MustParseAddrPort(a.three + ":7003"), Policy: plan.Local, Reason: plan.NotLocal})
	return sp
}

// nodeAddresses gives this thread's namespace the node's addresses. The kernel makes the local route of an IPv6 address after it has
// acknowledged the address.
func nodeAddresses(t testing.TB) {
	t.Helper()
	sh(t, "ip addr add 192.168.0.1/32 dev lo; ip addr add fd00:77::1/128 dev lo nodad")
	sh(t, "timeout 180 sh -c 'until ip -6 route show table local | grep -q fd00:77::1; do sleep 0.01; done'")
}

// TestLiveFrontend: of the flows to a frontend that exists, those stay whose endpoint serves; flows to anything else are
// not touched.
func TestLiveFrontend(t *testing.T) {
	t.Parallel()
	for _, protocol := range []plan.Protocol{plan.UDP, plan.SCTP} {
		for f, a := range byFamily {
			t.Run(fmt.Sprintf("%s %s", protocol, f), func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func() {
					nodeAddresses(t)
					r, _ := reconciling(serviceCIDRs(a), full("dns", protocol, a))
					liveFlows(a, netlink.Protocol(protocol)).run(t, r)
				})
			})
		}
	}
}

func liveFlows(a addressesOf, protocol uint8) states {
	stay := []entry{
		{From: a.one + ":5353"}, {From: a.one + ":5353", To: a.masquerade},
		{From: a.two + ":6001"}, {From: a.two + ":6002"}, {From: a.two + ":6003"}, {From: a.two + ":6004"},
	}
	goes := []entry{
		{}, // it was not translated
		{From: a.two + ":5353"}, {From: a.one + ":5354"}, {From: a.two + ":5353", To: a.masquerade},
		{From: a.two + ":7001"}, {From: a.two + ":7002"}, {From: a.three + ":7003"},
	}
	var s states
	for _, dst := range []string{a.clusterIP + ":53", a.lb + ":53", a.external + ":53", a.node + ":30053"} {
		for _, e := range stay {
			e.Dst = dst
			s.stay = append(s.stay, e)
		}
		for _, e := range goes {
			e.Dst = dst
			s.goes = append(s.goes, e)
		}
	}
	s.stay = append(s.stay,
		entry{Dst: a.clusterIP + ":54"},                        // another port
		entry{Dst: a.other + ":30053"},                         // a host elsewhere, at the number of a node port (49881)
		entry{Dst: a.other + ":30053", From: a.two + ":5353"},  // translated by other rules
		entry{Dst: a.node + ":30099"},                          // the health check node port is for TCP
		entry{Dst: a.loopback + ":30053"},                      // no node port answers there
		entry{Dst: a.clusterIP + ":53", Zone: 7},               // another zone
		entry{Dst: a.other + ":53", From: a.other + ":53"},     // nothing of ours
		entry{Dst: a.unused + ":53"},                           // no frontend, and not translated
		entry{Dst: a.lb + ":54", From: a.two + ":5353"},        // never known
		entry{Dst: a.node + ":30054", From: a.two + ":5353"},   // never known
		entry{Dst: a.clusterIP + ":53", From: a.one + ":5353"}, // once more, among the others
	)
	// Translated, and to the ranges of Services: of one that was deleted before.
	s.goes = append(s.goes,
		entry{Dst: a.unused + ":53", From: a.two + ":5353"}, entry{Dst: a.clusterIP + ":54", From: a.two + ":5353"})
	return states{fromPort(protocol, a.client, s.stay, 10000), fromPort(protocol, a.client, s.goes, 20000)}
}

// TestOtherProtocols: flows of TCP are not touched, whatever happens.
func TestOtherProtocols(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		nodeAddresses(t)
		a := byFamily[plan.IPv4]
		tcp := full("web", plan.TCP, a)
		r, p := reconciling(serviceCIDRs(a), full("dns", plan.UDP, a), tcp)
		s := liveFlows(a, protoTCP)
		s.stay, s.goes = s.all(), nil
		s.run(t, r)
		p.Delete(tcp.Key)
		r.Update(p, plan.Everything())
		mustPass(t, r)
		wantPresent(t, s.stay, slices.Collect(maps.Keys(conntracktest.Present(t, s.stay)))...)
		if got := len(conntracktest.Present(t, s.stay)); got != len(s.stay) {
			t.Errorf("%d flows left of %d", got, len(s.stay))
		}
	})
}

// TestScaledToZero: without endpoints every flow to a Service goes (139628); a Service that never had any included.
func TestScaledToZero(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		nodeAddresses(t)
		a := byFamily[plan.IPv4]
		r, p := reconciling(nil, withNodePort(service("dns", plan.UDP, a.clusterIP+":53", a.one+":5353"), 30053))
		flows := fromPort(protoUDP, a.client, []entry{
			{Dst: a.clusterIP + ":53", From: a.one + ":5353"}, {Dst: a.node + ":30053", From: a.one + ":5353", To: a.masquerade},
		}, 1000)
		states{stay: flows}.run(t, r)
		set(r, p, withNodePort(service("dns", plan.UDP, a.clusterIP+":53"), 30053))
		mustPass(t, r)
		wantPresent(t, flows)
	})
}

// TestServiceDeleted: translated flows to a Service that is deleted go (141371), also those that appear shortly after, and
// no others; later, its addresses are free for others.
func TestServiceDeleted(t *testing.T) {
	t.Parallel()
	for f, a := range byFamily {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func() {
				nodeAddresses(t)
				sp := full("dns", plan.UDP, a)
				r, p := reconciling(nil, sp)
				mustPass(t, r)
				p.Delete(sp.Key)
				r.Update(p, plan.Only(plan.Keys{sp.Key: {}}))
				goes := []entry{
					{Dst: a.clusterIP + ":53", From: a.one + ":5353"}, {Dst: a.lb + ":53", From: a.one + ":5353"},
					{Dst: a.external + ":53", From: a.one + ":5353"}, {Dst: a.node + ":30053", From: a.one + ":5353"},
				}
				stays := []entry{{Dst: a.clusterIP + ":53"}, {Dst: a.other + ":30053", From: a.one + ":5353"},
					{Dst: a.unused + ":53", From: a.one + ":5353"}}
				states{stay: fromPort(protoUDP, a.client, stays, 1), goes: fromPort(protoUDP, a.client, goes, 100)}.run(t, r)
				for i := range passesAfterEnd {
					r.work.all = true
					states{goes: fromPort(protoUDP, a.client, goes, 200+10*i)}.run(t, r)
				}
				r.work.all = true
				states{stay: fromPort(protoUDP, a.client, goes, 300)}.run(t, r)
			})
		})
	}
}

// TestFrontendMoves: a frontend that goes from one ServicePort to another in one change is judged by the new one.
func TestFrontendMoves(t *testing.T) {
	a := byFamily[plan.IPv4]
	for range 20 { // the order within a set of keys is random
		r, p := reconciling(nil, service("a", plan.UDP, a.clusterIP+":53", a.one+":1"), service("b", plan.UDP, a.lb+":53", a.two+":2"))
		set(r, p, service("a", plan.UDP, a.lb+":53", a.one+":1"), service("b", plan.UDP, a.clusterIP+":53", a.two+":2"))
		if len(r.index.gone) != 0 || len(r.index.live) != 2 {
			t.Fatalf("live %v, gone %v", r.index.live, r.index.gone)
		}
		fl := conntrack.Flow{Family: plan.IPv4, Protocol: protoUDP, Dst: netip.MustParseAddrPort(a.clusterIP + ":53"),
			From: netip.MustParseAddrPort(a.two + ":2")}
		if r.index.stale(&fl, &host.Local{}, false) {
			t.Fatal("a flow to the new owner's endpoint is stale")
		}
		fl.From = netip.MustParseAddrPort(a.one + ":1")
		if !r.index.stale(&fl, &host.Local{}, false) {
			t.Fatal("a flow to the old owner's endpoint is not stale")
		}
	}
}

// TestZones: a flow of another conntrack zone is never stale.
func TestZones(t *testing.T) {
	r, _ := reconciling(nil, service("dns", plan.UDP, "10.96.0.10:53"))
	client, dst := netip.MustParseAddrPort("10.244.1.9:1"), netip.MustParseAddrPort("10.96.0.10:53")
	for _, zoned := range []bool{false, true} {
		fl := conntrack.Flow{Family: plan.IPv4, Protocol: protoUDP, Src: client, Dst: dst, From: dst, To: client, Zoned: zoned}
		if got := r.index.stale(&fl, &host.Local{}, false); got == zoned {
			t.Errorf("in another zone %v: stale %v", zoned, got)
		}
	}
}

// TestStart: a flow to a cluster IP that is no frontend is taken for one of a Service that is gone by the first pass only.
func TestStart(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		a := byFamily[plan.IPv4]
		flow := func(i int) []entry {
			return fromPort(protoSCTP, a.client, []entry{{Dst: a.unused + ":53", From: a.one + ":5353"}}, i)
		}
		r := newReconciler(serviceCIDRs(a))
		states{stay: flow(1)}.run(t, r) // nothing is known yet, so nothing is done
		p := plan.New(plan.Node{}, plan.Settings{})
		r.Update(p, plan.Everything())
		mustPass(t, r)
		wantPresent(t, flow(1))
		p.Set(service("other", plan.SCTP, a.clusterIP+":53")) // so that SCTP flows are read at all
		r.Update(p, plan.Everything())
		states{stay: flow(2)}.run(t, r)
		states{stay: flow(3)}.run(t, newReconciler(nil))
	})
}

// TestNodePortAddresses: what is not an address at which node ports answer, has no flows to node ports.
func TestNodePortAddresses(t *testing.T) {
	t.Parallel()
	a := byFamily[plan.IPv4]
	for _, c := range []struct {
		name     string
		settings plan.Settings
		goes     []string
	}{
		{"all", plan.Settings{}, []string{"192.168.0.1", "192.168.5.5", "172.31.0.9"}},
		{"localhost", plan.Settings{LocalhostNodePorts: true},
			[]string{"192.168.0.1", "192.168.5.5", "172.31.0.9", "127.0.0.1", "127.9.9.9"}},
		{"primary", plan.Settings{NodePortAddresses: plan.NodePortAddresses{Primary: true}}, []string{"192.168.0.1"}},
		{"range", plan.Settings{NodePortAddresses: plan.NodePortAddresses{
			CIDRs: []netip.Prefix{netip.MustParsePrefix("192.168.5.0/24")}}}, []string{"192.168.5.5"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func() {
				nodeAddresses(t)
				sh(t, "ip addr add 192.168.5.5/32 dev lo; ip route add local 172.31.0.0/24 dev lo;"+
					"ip route add local 10.9.0.0/16 dev lo table 99")
				p := plan.New(plan.Node{IPs: []netip.Addr{netip.MustParseAddr("192.168.0.1")}}, c.settings)
				p.Set(withNodePort(service("dns", plan.UDP, a.clusterIP+":53", a.one+":5353"), 30053))
				r := newReconciler(nil)
				r.Update(p, plan.Everything())
				var s states
				for i, addr := range []string{
					"192.168.0.1", "192.168.5.5", "172.31.0.9", "127.0.0.1", "127.9.9.9", "10.9.0.1", "203.0.113.5"} {
					e := entry{Protocol: protoUDP, Src: fmt.Sprintf("%s:%d", a.client, 100+i), Dst: addr + ":30053",
						From: a.two + ":5353"}
					if slices.Contains(c.goes, addr) {
						s.goes = append(s.goes, e)
					} else {
						s.stay = append(s.stay, e)
					}
				}
				s.run(t, r)
			})
		})
	}
}

// TestResetTCP: where asked for, translated TCP flows to endpoints that are no longer listed go, and no others.
func TestResetTCP(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		a := byFamily[plan.IPv4]
		sp := full("web", plan.TCP, a)
		r, p := reconciling(func(c *Config) {
			c.ResetTCP = func(sp *plan.ServicePort) bool { return sp.Key.Service.Name == "web" }
		}, sp)
		s := states{
			stay: fromPort(protoTCP, a.client, []entry{
				{Dst: a.clusterIP + ":53", From: a.one + ":5353"}, {Dst: a.clusterIP + ":53"},
				{Dst: a.clusterIP + ":53", From: a.two + ":7001"}, {Dst: a.clusterIP + ":53", From: a.two + ":7002"},
			}, 1),
			goes: fromPort(protoTCP, a.client, []entry{{Dst: a.clusterIP + ":53", From: a.three + ":5353"}}, 100),
		}
		s.run(t, r)
		// A connection to a Service that is deleted lives on.
		p.Delete(sp.Key)
		r.Update(p, plan.Only(plan.Keys{sp.Key: {}}))
		mustPass(t, r)
		if got := len(conntracktest.Present(t, s.stay)); got != len(s.stay) {
			t.Errorf("%d flows left of %d", got, len(s.stay))
		}
	})
}

// TestStrayAnswers: a flow that an answer began is removed when its endpoint is back, and by full passes after it left; only
// where that is asked for, and no flow that somebody answers or that is translated.
func TestStrayAnswers(t *testing.T) {
	t.Parallel()
	for f, a := range byFamily {
		for _, asked := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s %v", f, asked), func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func() { testStrayAnswers(t, a, asked) })
			})
		}
	}
}

func testStrayAnswers(t *testing.T, a addressesOf, asked bool) {
	r, p := reconciling(func(c *Config) { c.StrayAnswers = asked })
	use := func(endpoints ...string) {
		set(r, p, service("dns", plan.UDP, a.clusterIP+":53", endpoints...))
		mustPass(t, r)
	}
	one, two := a.one+":5353", a.two+":5353"
	use(one, two)
	mustPass(t, r)
	stray := entry{Protocol: protoUDP, Src: one, Dst: a.client + ":4001"}
	others := []entry{
		{Protocol: protoUDP, Src: one, Dst: a.client + ":4002", Replied: true},
		{Protocol: protoUDP, Src: one, Dst: a.client + ":4003", To: a.masquerade + ":4003"},
		{Protocol: protoUDP, Src: one, Dst: a.client + ":4004", From: a.two + ":4004"},
		{Protocol: protoSCTP, Src: one, Dst: a.client + ":4005"},
		{Protocol: protoUDP, Src: a.one + ":5354", Dst: a.client + ":4006"},
		{Protocol: protoUDP, Src: two, Dst: a.client + ":4007"},
	}
	conntracktest.Inject(t, append(others, stray)...)
	check := func(when string, stays bool) {
		t.Helper()
		there := conntracktest.Which(t, append(others[:len(others):len(others)], stray))
		if got := there[stray]; got != stays {
			t.Errorf("%s, the stray answer is there: %v, want %v", when, got, stays)
		}
		if !stays && !asked {
			t.Fatal("the test is wrong: nothing was asked for")
		}
		for _, e := range others {
			if !there[e] {
				t.Errorf("%s, %+v is gone", when, e)
			}
		}
	}
	use(one, two)
	check("while its endpoint serves", true)
	use(two)
	check("when its endpoint left", true) // more may follow
	use(one, two)
	check("when its endpoint is back", !asked)
	if !asked {
		return
	}
	conntracktest.Inject(t, stray)
	use(two)
	r.work.all = true
	mustPass(t, r)
	check("after a full pass", false)
	for range passesAfterEnd {
		r.work.all = true
		mustPass(t, r)
	}
	if len(r.index.left) > 0 {
		t.Errorf("%d full passes after: %v is still remembered", passesAfterEnd+1, r.index.left)
	}
	conntracktest.Inject(t, stray)
	use(one, two)
	check("when its endpoint is back after long", true)
}
