package flows

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/plan"
)

// States of TCP connections, as in linux/netfilter/nf_conntrack_tcp.h.
const (
	tcpSynSent     = 1
	tcpSynRecv     = 2
	tcpEstablished = 3
	tcpTimeWait    = 7
)

// earlyFlows are connections, most of them to a frontend with endpoints that was not there when they began.
func earlyFlows(a addressesOf) states {
	const sent, established = tcpSynSent, tcpEstablished
	var s states
	for _, dst := range []string{a.clusterIP + ":80", a.lb + ":80", a.external + ":80", a.node + ":30080"} {
		s.goes = append(s.goes, entry{Dst: dst, State: sent}, entry{Dst: dst, State: sent, To: a.masquerade})
		s.stay = append(s.stay,
			entry{Dst: dst, State: sent, From: a.one + ":5353"},                       // translated, and not answered yet
			entry{Dst: dst, State: sent, From: a.one + ":5353", To: a.masquerade},     // the same, masqueraded
			entry{Dst: dst, State: tcpSynRecv, Replied: true},                         // answered
			entry{Dst: dst, State: established, Replied: true},                        // open
			entry{Dst: dst, State: established},                                       // the kernel saw one direction of it only
			entry{Dst: dst, State: tcpTimeWait, Replied: true},                        // over
			entry{Dst: dst, State: established, From: a.one + ":5353", Replied: true}, // to an endpoint
			entry{Dst: dst, State: sent, Zone: 7},                                     // another zone's
		)
	}
	s.stay = append(s.stay,
		entry{Dst: a.clusterIP + ":81", State: sent},   // another port
		entry{Dst: a.unused + ":80", State: sent},      // another address
		entry{Dst: a.other + ":30080", State: sent},    // a host elsewhere, at the number of a node port
		entry{Dst: a.loopback + ":30080", State: sent}, // no node port answers there
		entry{Dst: a.two + ":8443", State: sent},       // a frontend without endpoints
	)
	return states{fromPort(protoTCP, a.client, s.stay, 2000), fromPort(protoTCP, a.client, s.goes, 1000)}
}

func webService(a addressesOf, endpoints ...string) *plan.ServicePort {
	sp := withNodePort(service("web", plan.TCP, a.clusterIP+":80", endpoints...), 30080)
	for kind, addr := range map[plan.FrontendKind]string{plan.LoadBalancerIP: a.lb, plan.ExternalIP: a.external} {
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: kind, Addr: parseAddr(addr), Protocol: plan.TCP, Port: 80})
	}
	return sp
}

// TestEarlyConnections: of the connections to a Service, those are removed that wait for their first answer and were not
// translated, once the Service is there and has endpoints; no others.
func TestEarlyConnections(t *testing.T) {
	t.Parallel()
	for f, a := range byFamily {
		for what, begin := range map[string]func(*Reconciler, *plan.Plan){
			"a new Service": func(r *Reconciler, p *plan.Plan) {
				r.Update(p, plan.Everything())
				set(r, p, webService(a, a.one+":5353"))
			},
			"first endpoint": func(r *Reconciler, p *plan.Plan) {
				p.Set(webService(a))
				r.Update(p, plan.Everything())
				set(r, p, webService(a, a.one+":5353"))
			},
			"a start": func(r *Reconciler, p *plan.Plan) {
				p.Set(webService(a, a.one+":5353"))
				r.Update(p, plan.Everything())
			},
			"a comparison of everything": func(r *Reconciler, p *plan.Plan) {
				p.Set(webService(a, a.one+":5353"))
				r.Update(p, plan.Everything())
				if _, err := r.pass(t.Context()); err != nil {
					t.Error(err)
				}
				r.Update(p, plan.Everything())
			},
		} {
			t.Run(fmt.Sprintf("%s %s", what, f), func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func() {
					nodeAddresses(t)
					p := plan.New(plan.Node{}, plan.Settings{})
					p.Set(service("none", plan.TCP, a.two+":8443"))
					r := newReconciler(nil)
					begin(r, p)
					earlyFlows(a).run(t, r)
				})
			})
		}
	}
}

// TestEarlyConnectionWhoseServiceGoes: what a Service no longer has is none of ours, whichever of two Services that swap an
// address comes first.
func TestEarlyConnectionWhoseServiceGoes(t *testing.T) {
	t.Parallel()
	x := newIndex(&Config{})
	one, two := service("one", plan.TCP, "10.96.0.10:80", "10.244.1.1:80"), service("two", plan.TCP, "10.96.0.10:80", "10.244.1.1:80")
	x.set(one.Key, one)
	f := conntrack.Flow{Family: plan.IPv4, Protocol: protoTCP, SynSent: true, Dst: netip.MustParseAddrPort("10.96.0.10:80"),
		From: netip.MustParseAddrPort("10.96.0.10:80")}
	if todo, _ := x.set(two.Key, two); len(todo.opened) != 1 {
		t.Errorf("a frontend changes hands: opened %v", todo.opened)
	}
	x.set(one.Key, nil)
	if x.live[frontendsOf(one)[0]] != two || !x.stale(&f, nil, false) {
		t.Error("the Service that has lost an address takes it from the one that has it")
	}
	x.set(two.Key, nil)
	if x.stale(&f, nil, false) || len(x.live) > 0 || x.ports.Len() > 0 {
		t.Errorf("%v is left of Services that are gone", x.live)
	}
}

// TestOwnAddressBeforeNodePort: where an external IP is an address of the node, and the port the number of a node port, its Service gets
// the packets, with and without endpoints; so it alone decides about their flows.
func TestOwnAddressBeforeNodePort(t *testing.T) {
	t.Parallel()
	for family, a := range byFamily {
		t.Run(family.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func() {
				nodeAddresses(t)
				web := webService(a, a.one+":5353")
				other := func(endpoints ...string) *plan.ServicePort {
					sp := service("other", plan.TCP, a.node+":30080", endpoints...)
					sp.Frontends[0].Kind = plan.ExternalIP
					return sp
				}
				r, p := reconciling(func(c *Config) {
					c.ResetTCP = func(sp *plan.ServicePort) bool { return sp.Key == web.Key }
				}, web, other(a.two+":80"))
				open := entry{Dst: a.node + ":30080", From: a.two + ":80", State: tcpEstablished, Replied: true}
				begun := entry{Dst: a.node + ":30080", State: tcpSynSent}
				states{
					stay: fromPort(protoTCP, a.client, []entry{open}, 1000),
					goes: fromPort(protoTCP, a.client, []entry{begun}, 2000),
				}.run(t, r)
				set(r, p, other())
				r.work.all = true
				states{stay: fromPort(protoTCP, a.client, []entry{open, begun}, 3000)}.run(t, r)
			})
		})
	}
}

// TestEarlyScale: 1,000 new Services at once cost one look through 100,000 tracked connections, of which the kernel hands over
// those only that may have to go.
func TestEarlyScale(t *testing.T) {
	nstest.Run(t, func() {
		most := readNumber(t, "nf_conntrack_max")
		n := min(100_000, most/4*3)
		fill(t, entry{Protocol: protoTCP, Dst: "203.0.113.5:443", State: tcpEstablished, Replied: true}, n)
		early := fromPort(protoTCP, "10.244.1.9", []entry{
			{Dst: "10.97.1.7:80", State: tcpSynSent}, {Dst: "10.97.3.230:80", State: tcpSynSent},
		}, 1)
		conntracktest.Inject(t, early...)
		var sweeps []Sweep
		r := newReconciler(func(c *Config) {
			c.Families = []plan.Family{plan.IPv4}
			c.Observe = func(s Sweep) { sweeps = append(sweeps, s) }
		})
		p := plan.New(plan.Node{}, plan.Settings{})
		r.Update(p, plan.Everything())
		mustPass(t, r)
		var list []*plan.ServicePort
		for i := range 1000 {
			list = append(list, service(fmt.Sprint("s", i), plan.TCP, fmt.Sprintf("10.97.%d.%d:80", i>>8, i&255), "10.244.1.1:80"))
		}
		begin := time.Now()
		set(r, p, list...)
		noted := time.Since(begin)
		mustPass(t, r)
		t.Logf("%d connections, 1,000 new Services: noted in %v, looked for in %v", count(t), noted, time.Since(begin)-noted)
		if len(sweeps) != 1 || sweeps[0].Deleted != 2 || sweeps[0].Read > 2 {
			t.Errorf("swept %+v, want one sweep that deletes 2", sweeps)
		}
		wantPresent(t, early)
		set(r, p, service("s7", plan.TCP, "10.97.0.7:80", "10.244.1.2:80"))
		if mustPass(t, r); len(sweeps) != 1 {
			t.Errorf("a change of endpoints: swept %+v", sweeps[1:])
		}
	})
}
