package iptables_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/iptables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// TestMachine: what is rendered for one packet leads it where all that is rendered does, by the same rules.
func TestMachine(t *testing.T) {
	eachPacket(t, packetsPerPlan/3, iptables.Render, func(t *rapid.T, d drawn, pkt plan.Packet) {
		m, err := iptables.Machine(d.Plan, d.Plan.Near(pkt), d.family, d.options)
		require.NoError(t, err)
		if want, got := plantest.Ways(trace(t, d.rules, pkt, d.node())), plantest.Ways(trace(t, m, pkt, d.node())); got != want {
			t.Fatalf("%s goes\n%swant\n%s", pkt, got, want)
		}
	})
}

// BenchmarkMachine is what a packet meets in a plan of 10,000 Services.
func BenchmarkMachine(b *testing.B) {
	p := plantest.Large(10000, 3)
	pkt := plan.Packet{Src: plantest.LargeService(7, 21, 3).All()[0].Addr.Addr(), Dst: plantest.LargeService(7, 21, 3).Frontends[0].Addr,
		Protocol: plan.TCP, DstPort: 80, InInterface: "eth0"}
	for b.Loop() {
		m, err := iptables.Machine(p, p.Near(pkt), plan.IPv4, iptables.Options{CompactAbove: iptables.DefaultCompactAbove})
		require.NoError(b, err)
		if _, err := m.Trace(pkt, packetsim.Node{Local: func(a netip.Addr) bool { return a == p.Node.IP(plan.IPv4) }}); err != nil {
			b.Fatal(err)
		}
	}
}
