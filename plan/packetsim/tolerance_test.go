package packetsim_test

import (
	"net/netip"
	"strings"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// TestTolerance holds each allowance of mode ipvs to what it is for: the same without tolerance is a difference, and so is what
// is only alike.
func TestTolerance(t *testing.T) {
	t.Parallel()
	near, far := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.1.0.1:80")
	p := plan.New(plan.Node{Name: "n"}, plan.Settings{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.97.0.0/16")}})
	p.Set(&plan.ServicePort{
		Key:       plan.Key{Service: plan.Service{Namespace: "a", Name: "b"}, Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: vip, Protocol: plan.TCP, Port: 80}},
		Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: near, Local: true}, {Addr: far}}},
	})
	tolerance := packetsim.IPVSTolerance(p)
	forward := func(to netip.AddrPort) plan.Verdict {
		return plan.Verdict{Action: plan.Forward, Targets: []plan.Target{{Addr: to, Masquerade: true}}}
	}
	from := func(src netip.Addr) plan.Packet {
		pkt := to(vip, 80)
		pkt.Src = src
		return pkt
	}
	rejected := packetsim.Outcome{Action: packetsim.Reject, Probability: 1}
	plain := func(to netip.AddrPort) packetsim.Outcome {
		return packetsim.Outcome{Action: packetsim.Accept, Dst: to, DNAT: true, Probability: 1}
	}
	both := plan.Verdict{Action: plan.Forward, Targets: []plan.Target{{Addr: near}, {Addr: far}}}
	half, dropped := plain(near), packetsim.Outcome{Action: packetsim.Drop, Probability: 0.5}
	half.Probability = 0.5
	atHome := to(vip, 81)
	atHome.DstLocal = true
	loopback := netip.MustParseAddr("127.0.0.1")
	for _, tc := range []struct {
		name     string
		verdict  plan.Verdict
		packet   plan.Packet
		outcomes []packetsim.Outcome
		want     string // in the error despite the tolerance; empty for none
	}{
		{"closed port of a Service", plan.Verdict{}, to(vip, 81), []packetsim.Outcome{rejected}, ""},
		{"closed port in a range of Services", plan.Verdict{}, to(netip.MustParseAddr("10.97.9.9"), 81),
			[]packetsim.Outcome{rejected}, ""},
		{"closed port of no Service", plan.Verdict{}, to(client, 81), []packetsim.Outcome{rejected}, "must not be"},
		{"closed port of the node", plan.Verdict{}, atHome, []packetsim.Outcome{rejected}, "must not be"},
		{"far endpoint to itself", forward(far), from(far.Addr()), []packetsim.Outcome{plain(far)}, ""},
		{"near endpoint to itself", forward(near), from(near.Addr()), []packetsim.Outcome{plain(near)},
			"masquerading must be true"},
		{"to a far endpoint from another", forward(far), from(near.Addr()), []packetsim.Outcome{plain(far)},
			"masquerading must be true"},
		{"loopback source", both, from(loopback), []packetsim.Outcome{half, dropped}, ""},
		{"loopback source, dropped too often", both, from(loopback),
			[]packetsim.Outcome{half, {Action: packetsim.Drop, Probability: 0.6}}, "never reached"},
		{"another source dropped", both, from(client), []packetsim.Outcome{half, dropped}, "it must be forwarded"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			err := tolerance.Agree(tc.verdict, tc.packet, tc.outcomes)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
			if packetsim.Agree(tc.verdict, tc.packet, tc.outcomes) == nil {
				t.Error("without tolerance they agree too")
			}
		})
	}
	// No tolerance allows these.
	local := packetsim.Outcome{Action: packetsim.Accept, Delivered: true, Probability: 1}
	if err := tolerance.Agree(plan.Verdict{}, to(vip, 81), []packetsim.Outcome{local}); err == nil {
		t.Error("a packet to an address of Services may reach the node's own programs")
	}
	m := packetsim.New(plan.IPv4)
	m.Added[netip.PrefixFrom(vip, 32)], m.Added[netip.PrefixFrom(far.Addr(), 32)] = true, true
	m.Servers[packetsim.ServerKey{Protocol: "tcp", Addr: netip.AddrPortFrom(vip, 80)}] = &packetsim.Server{Scheduler: "rr",
		RealServers: []packetsim.RealServer{{Addr: near, Weight: 1}, {Addr: far, Weight: 1}}}
	err := tolerance.Compare(plan.NewEvaluator(p), m, to(vip, 80), packetsim.Node{Local: func(netip.Addr) bool { return false }})
	if err == nil || !strings.Contains(err.Error(), "10.1.0.1 is an address that was added to this machine") {
		t.Errorf("error for an endpoint whose address this machine took is %v", err)
	}
}
