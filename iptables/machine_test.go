package iptables_test

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/iptables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// TestMachine: what is rendered for one packet leads it where all that is rendered does, by the same rules.
func TestMachine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := plantest.Clusters().Draw(t, "cluster")
		options := drawOptions(t)
		for _, f := range plan.Families {
			all := parse(t, f, iptables.Render(c.Plan, f, options))
			for range packetsPerPlan / 3 {
				pkt := c.Packets(f).Draw(t, "packet")
				m, err := iptables.Machine(c.Plan, c.Plan.Near(pkt), f, options)
				if err != nil {
					t.Fatal(err)
				}
				node := packetsim.Node{Local: c.Local}
				if want, got := plantest.Ways(trace(t, all, pkt, node)), plantest.Ways(trace(t, m, pkt, node)); got != want {
					t.Fatalf("%s goes\n%swant\n%s", pkt, got, want)
				}
			}
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
		if err != nil {
			b.Fatal(err)
		}
		if _, err := m.Trace(pkt, packetsim.Node{Local: func(a netip.Addr) bool { return a == p.Node.IP(plan.IPv4) }}); err != nil {
			b.Fatal(err)
		}
	}
}
