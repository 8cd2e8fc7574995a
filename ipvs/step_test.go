package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// TestStepsLeadToEndpoints: while the policies, endpoints and source ranges of a ServicePort change address by address, every packet to each of its
// frontends gets to an endpoint, and is masqueraded as before or as after. While its last endpoints go or its first ones come, no packet gets to
// the node.
func TestStepsLeadToEndpoints(t *testing.T) {
	t.Parallel()
	for i, name := range []string{"TCP", "UDP", "TCP and a node port", "UDP and a node port"} {
		protocol, nodePort := []plan.Protocol{plan.TCP, plan.UDP}[i%2], i > 1
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := netip.MustParseAddr("192.168.1.10")
			local := func(a netip.Addr) bool { return a == node || a.IsLoopback() }
			p := plantest.Large(2, 1)
			p.Node.IPs, p.Settings.ServiceCIDRs = []netip.Addr{node}, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
			version := func(external plan.Policy, first int, ranges ...netip.Prefix) *plan.ServicePort {
				sp := *plantest.LargeService(50, first, 3)
				sp.Key.Protocol, sp.ExternalPolicy, sp.SourceRanges, sp.Any = protocol, external, ranges, true
				sp.Frontends[0].Protocol = protocol
				for n := range 4 {
					for kind, of := range map[plan.FrontendKind]string{plan.ExternalIP: "203.0.113.0", plan.LoadBalancerIP: "198.51.100.0"} {
						a := netip.MustParseAddr(of).As4()
						a[3] = byte(n)
						sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: kind, Addr: netip.AddrFrom4(a), Protocol: protocol, Port: 80})
					}
				}
				if nodePort {
					sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: protocol, Port: 30080})
				}
				slices.SortFunc(sp.Frontends, plan.Frontend.Compare)
				sp.Endpoints.Local = sp.Endpoints.Cluster[:1]
				return &sp
			}
			elsewhere, none := version(plan.Local, 8), version(plan.Local, 8)
			elsewhere.Endpoints.Local = nil
			none.Endpoints.Cluster, none.Endpoints.Local, none.Any = nil, nil, false
			client := netip.MustParsePrefix("192.0.2.0/24")
			sp := version(plan.Cluster, 7)
			p.Set(sp)
			e, k := fakeEngine(plan.IPv4, testOptions)
			k.HostAddrs.Insert(node)
			require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
			e.mostAtOnce = 1
			looked, refused, steps, pod := 0, 0, 0, sp.Endpoints.Cluster[1].Addr.Addr()
			for i, next := range []*plan.ServicePort{
				version(plan.Local, 7), version(plan.Local, 8), elsewhere, none, elsewhere, version(plan.Cluster, 8, client), version(plan.Local, 20, client), version(plan.Cluster, 21),
			} {
				was := plan.New(p.Node, p.Settings)
				was.Set(sp)
				p.Set(next)
				before, after := plan.NewEvaluator(was), plan.NewEvaluator(p)
				k.Before = func() {
					rs, err := simulationOf(k)
					require.NoError(t, err)
					for _, fe := range next.Frontends {
						for _, src := range []netip.Addr{client.Addr().Next(), pod} {
							pkt := plan.Packet{Src: src, Dst: fe.Addr, Protocol: protocol, DstPort: fe.Port, InInterface: "eth0"}
							if !fe.Addr.IsValid() {
								pkt.Dst, pkt.DstLocal = node, true
							}
							v, w := before.Verdict(pkt), after.Verdict(pkt)
							outcomes, err := rs.Trace(pkt, packetsim.Node{Local: local})
							switch {
							case err != nil:
							case v.Action != plan.Forward || w.Action != plan.Forward:
								refused++
								if slices.ContainsFunc(outcomes, func(o packetsim.Outcome) bool { return o.Action == packetsim.Accept && !o.DNAT }) {
									err = errors.New("it is neither sent to an endpoint nor refused")
								}
							default:
								looked++
								err = packetsim.AgreeBetween(v, w, slices.Concat(sp.All(), next.All()), pkt, outcomes)
							}
							if err != nil {
								t.Fatalf("version %d, step %d, %s: %v\nbefore: %s\nafter: %s\n%s", i, steps, pkt, err, v, w, k.Text())
							}
						}
					}
				}
				require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys{next.Key: {}})))
				for ; e.rest != nil; steps++ {
					require.NoError(t, e.Sync(context.Background(), p, plan.Only(nil)))
				}
				k.Before = func() {}
				require.NoError(t, e.drain(time.Now()))
				fresh, want := fakeEngine(plan.IPv4, testOptions)
				want.HostAddrs.Insert(node)
				require.NoError(t, fresh.Sync(context.Background(), p, plan.Everything()))
				if k.Text() != want.Text() {
					t.Errorf("version %d: the kernel holds\n%s\ninstead of\n%s", i, k.Text(), want.Text())
				}
				sp = next
			}
			if looked == 0 || refused == 0 || steps < 20 {
				t.Errorf("%d packets were sent that had an endpoint, %d others, and %d further syncs were made", looked, refused, steps)
			}
		})
	}
}

// TestStepsGiveWay: others change in each sync while a large ServicePort changes, and none of two large ones waits for the other.
func TestStepsGiveWay(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	e.mostAtOnce = 500
	p := plantest.Large(20, 2)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	large := func(i, first int) *plan.ServicePort {
		sp := *plantest.LargeService(100+i, first, 10)
		for n := range 100 {
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: netip.AddrFrom4([4]byte{203, 0, byte(i), byte(n)}),
				Protocol: plan.TCP, Port: 80})
		}
		return &sp
	}
	p.Set(large(0, 100))
	p.Set(large(1, 200))
	change := plan.Keys{large(0, 0).Key: {}, large(1, 0).Key: {}}
	for n := 0; ; n++ {
		small := plantest.LargeService(3, 1000+2*n, 2)
		p.Set(small)
		change.Add(small.Key)

		require.NoError(t, e.Sync(context.Background(), p, plan.Only(change)))
		for _, ep := range small.Endpoints.Cluster {
			if v := e.actual.servers.Get(serversOf(small)[0]); v == nil || v.weights()[ep.Addr] == 0 {
				t.Fatalf("sync %d: %s waits", n, ep.Addr)
			}
		}
		change = plan.Keys{}
		if e.rest == nil {
			break
		}
		if n > 100 {
			t.Fatal("no end after 100 syncs")
		}
		if other := large(1, 200); n > 3 && !e.has(other, len(other.Frontends)) { // One of them changes all the time.
			p.Set(large(0, 300+10*n))
			change.Add(large(0, 0).Key)
		} else if n == 4 {
			t.Error("all of it is there after 4 syncs")
		}
	}
	fresh, want := fakeEngine(plan.IPv4, testOptions)
	require.NoError(t, fresh.Sync(context.Background(), p, plan.Everything()))
	require.NoError(t, e.drain(time.Now()))
	if k.Text() != want.Text() {
		t.Errorf("the kernel holds\n%s\ninstead of\n%s", k.Text(), want.Text())
	}
}

// serversOf are the virtual servers of a ServicePort's frontends.
func serversOf(sp *plan.ServicePort) (out []ipvs.ServerID) {
	for _, fe := range sp.Frontends {
		out = append(out, ipvs.ServerID{Family: sp.Key.Family, Addr: fe.Addr, Protocol: fe.Protocol, Port: fe.Port})
	}
	return out
}

// has reports whether so many of a ServicePort's virtual servers have all real servers.
func (e *engine) has(sp *plan.ServicePort, n int) bool {
	for _, id := range serversOf(sp) {
		if v := e.actual.servers.Get(id); v != nil && len(v.realServers) == len(sp.All()) {
			n--
		}
	}
	return n <= 0
}

// spread is a ServicePort with external IPs and a node port, of which the external policy is Local.
func spread(i, addresses, first int) *plan.ServicePort {
	sp := *plantest.LargeService(100+i, first, 10)
	sp.ExternalPolicy = plan.Local
	sp.Endpoints.Local = sp.Endpoints.Cluster[:1]
	for n := range addresses {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: netip.AddrFrom4([4]byte{203, 0, byte(i), byte(n)}),
			Protocol: plan.TCP, Port: 80})
	}
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: uint16(30_000 + i)})
	return &sp
}

// TestStepsAreVerified: what a part of a change has left to later ones is no difference.
func TestStepsAreVerified(t *testing.T) {
	t.Parallel()
	e, _ := fakeEngine(plan.IPv4, testOptions)
	e.mostAtOnce = 100
	p := plantest.Large(2, 2)
	p.Set(spread(0, 20, 100))
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	for _, next := range []*plan.ServicePort{spread(0, 20, 200), spread(0, 30, 200), spread(0, 10, 300)} {
		p.Set(next)
		for change := (plan.Keys{next.Key: {}}); change != nil || e.rest != nil; change = nil {
			require.NoError(t, e.Sync(context.Background(), p, plan.Only(change)))
			if things, found, err := e.Verify(context.Background(), next.Key.Service); err != nil || len(found) > 0 || things == 0 {
				t.Fatalf("of %d things, %d differ: %s, %v", things, len(found), found.Words(2), err)
			}
		}
	}
}

// TestStepsGiveAddressesAway: an address that a small ServicePort gets from a large one leads there alone from the first sync on.
func TestStepsGiveAddressesAway(t *testing.T) {
	t.Parallel()
	e, _ := fakeEngine(plan.IPv4, testOptions)
	e.mostAtOnce = 100
	p := plantest.Large(2, 2)
	large := spread(0, 20, 100)
	p.Set(large)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	heir, fewer := *plantest.LargeService(1, 2, 2), *large
	passes := large.Frontends[20]
	heir.Frontends = append(slices.Clone(heir.Frontends), passes)
	fewer.Frontends = slices.Delete(slices.Clone(large.Frontends), 20, 21)
	p.Set(&heir)
	p.Set(&fewer)
	require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys{heir.Key: {}, large.Key: {}})))
	for m := range e.actual.members {
		if m.addr.addr() == passes.Addr && m.set != setVIPs && e.desired.members[m].count == 0 {
			t.Errorf("%s is left", m.name(e.family))
		}
	}
}

// TestStepsEnd: what a large ServicePort has beside its addresses goes, though another one changes all the time.
func TestStepsEnd(t *testing.T) {
	t.Parallel()
	e, _ := fakeEngine(plan.IPv4, testOptions)
	e.mostAtOnce = 500
	p := plantest.Large(2, 2)
	p.Set(spread(0, 20, 100))
	p.Set(spread(1, 50, 200))
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	gone := spread(0, 20, 100).Key
	p.Delete(gone)
	change := plan.Keys{gone: {}}
	for n := range 60 {
		next := spread(1, 50, 1000+10*n)
		p.Set(next)
		change.Add(next.Key)
		require.NoError(t, e.Sync(context.Background(), p, plan.Only(change)))
		change = plan.Keys{}
	}
	for m := range e.actual.members {
		if m.port == 30_000 {
			t.Errorf("%s is left", m.name(e.family))
		}
	}
	for v := range e.actual.servers.All() {
		if _, is := e.desired.servers[v.ID]; !is {
			t.Errorf("%s is left", v.ID)
		}
	}
}

// policies changes from Local to Cluster a ServicePort that has a connection and is large enough for steps, as far as one step goes.
func policies(t *testing.T) (e *engine, k *ipvstest.Kernel, p *plan.Plan, sp *plan.ServicePort) {
	e, k = fakeEngine(plan.IPv4, testOptions)
	e.mostAtOnce = 100
	p = plantest.Large(2, 2)
	was := spread(0, 20, 100)
	p.Set(was)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	for _, ep := range was.All() {
		k.Connections[ep.Addr] = 1
	}
	sp = spread(0, 10, 100)
	sp.ExternalPolicy = plan.Cluster
	p.Set(sp)
	require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys{sp.Key: {}})))
	if e.rest == nil || len(e.rest.replaced) == 0 {
		t.Fatal("no virtual server that is replaced waits")
	}
	return e, k, p, sp
}

// left are the virtual servers and set entries in the kernel that are not desired.
func (e *engine) left() (out []string) {
	for v := range e.actual.servers.All() {
		if _, is := e.desired.servers[v.ID]; !is {
			out = append(out, v.ID.String())
		}
	}
	for m := range e.actual.members {
		if m.set != setVIPs && e.desired.members[m].count == 0 {
			out = append(out, m.name(e.family))
		}
	}
	return out
}

// TestStepsOfDeleted: a virtual server that was to stay for its connections, as its ServicePort got another one, goes with the ServicePort.
func TestStepsOfDeleted(t *testing.T) {
	t.Parallel()
	e, _, p, sp := policies(t)
	p.Delete(sp.Key)
	for change := (plan.Keys{sp.Key: {}}); change != nil || e.rest != nil; change = nil {
		require.NoError(t, e.Sync(context.Background(), p, plan.Only(change)))
	}
	if left := e.left(); len(left) > 0 {
		t.Errorf("left: %s", left)
	}
}

// TestStepsWhilePartial: what waits for a step is removed by a sync of everything, too, while the source does not know all Services.
func TestStepsWhilePartial(t *testing.T) {
	t.Parallel()
	e, k, p, _ := policies(t)
	clear(k.Connections)
	p.Partial = true
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	require.NoError(t, e.drain(time.Now()))
	if left := e.left(); len(left) > 0 {
		t.Errorf("left: %s", left)
	}
}
