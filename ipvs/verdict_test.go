package ipvs_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/set"
	"nodeproxy/iptables"
	"nodeproxy/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
	"nodeproxy/plan/plantest"
)

// packetsPerPlan is how many packets are sent through what is rendered of each random plan and family.
const packetsPerPlan = 30

// clusterCIDRs are what random plans' cluster IPs are from.
var clusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

// drawCluster draws a plan as mode ipvs gets it: without localhost node ports, which it does not have, and with the
// ranges of cluster IPs known or not.
func drawCluster(t *rapid.T) *plantest.Cluster {
	c := plantest.Clusters().Draw(t, "cluster")
	c.Plan.Settings.LocalhostNodePorts = false
	if rapid.Bool().Draw(t, "service CIDRs are known") {
		c.Plan.Settings.ServiceCIDRs = clusterCIDRs
	}
	return c
}

func drawOptions(t *rapid.T, c *plantest.Cluster) ipvs.Options {
	o := ipvs.Options{
		MasqueradeBit: rapid.IntRange(0, 31).Draw(t, "masquerade bit"),
		RandomFully:   rapid.Bool().Draw(t, "random fully"),
		TCPLiberal:    rapid.Bool().Draw(t, "TCP liberal"),
		Scheduler:     rapid.SampledFrom([]string{"", "wrr", "lc"}).Draw(t, "scheduler"),
		VIPs:          rapid.SampledFrom([]ipvs.VIPs{"", ipvs.Addresses, ipvs.Routes}).Draw(t, "VIPs"),
		Host:          set.Set[netip.Addr]{},
	}
	for _, a := range c.LocalAddrs {
		o.Host.Insert(a)
	}
	return o
}

// machineOf returns what packets meet.
func machineOf(t *rapid.T, p *plan.Plan, f plan.Family, o ipvs.Options) *packetsim.Machine {
	rs, err := ipvs.Machine(p, f, o)
	if err != nil {
		t.Fatalf("%v\n%s", err, ipvs.Render(p, f, o))
	}
	return rs
}

// isMartian reports whether a packet came in with an address of a Service as its source. The kernel drops such a packet
// before any rule where that address is the machine's own, as it is in this mode.
func isMartian(rs *packetsim.Machine, pkt plan.Packet) bool {
	return !pkt.Output && rs.IsAdded(pkt.Src)
}

// isTaken reports whether a packet is for an endpoint whose address is also a load balancer IP of some Service. In this mode such an
// address is the machine's own, so no packet from this machine reaches the endpoint.
func isTaken(rs *packetsim.Machine, v plan.Verdict) bool {
	return slices.ContainsFunc(v.Targets, func(t plan.Target) bool { return rs.IsAdded(t.Addr.Addr()) })
}

// onlyWhole restricts a Tolerance for ports that no Service has to addresses that are the machine's own. Other ports of external IPs are
// not this machine's.
func onlyWhole(t packetsim.Tolerance, rs *packetsim.Machine) packetsim.Tolerance {
	all := t.RejectPass
	t.RejectPass = func(a netip.Addr) bool { return rs.IsAdded(a) && all(a) }
	return t
}

// TestRenderVerdicts holds what is rendered to the plan's own verdict: whatever the plan and whatever the packet, IPVS and
// the rules beside it must do with it what the plan says, but for the differences that packetsim.IPVSTolerance lists.
func TestRenderVerdicts(t *testing.T) {
	t.Parallel()
	met := map[plan.Action]int{}
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t, c)
		evaluator, tolerance := plan.NewEvaluator(c.Plan), packetsim.IPVSTolerance(c.Plan)
		for _, f := range plan.Families {
			rs := machineOf(t, c.Plan, f, options)
			for range packetsPerPlan {
				pkt := c.Packets(f).Draw(t, "packet")
				v := evaluator.Verdict(pkt)
				if isMartian(rs, pkt) || isTaken(rs, v) {
					continue
				}
				require.NoError(t, onlyWhole(tolerance, rs).Compare(evaluator, rs, pkt, packetsim.Node{Local: c.Local}))
				met[v.Action]++
			}
		}
	})
	for _, a := range []plan.Action{plan.Pass, plan.Forward, plan.Reject, plan.Drop} {
		if met[a] == 0 {
			t.Errorf("no packet's verdict was to %s", a)
		}
	}
}

// TestForeignMarks has packets come along with a mark of somebody else's that is one of this mode's too. They must get to
// where the others get. The bit that asks for masquerading is left out: others may ask for that.
func TestForeignMarks(t *testing.T) {
	t.Parallel()
	marked := 0
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t, c)
		evaluator, tolerance := plan.NewEvaluator(c.Plan), packetsim.IPVSTolerance(c.Plan)
		for _, f := range plan.Families {
			rs := machineOf(t, c.Plan, f, options)
			var marks []uint32
			for at := range rs.Servers {
				if at.Mark != 0 {
					marks = append(marks, at.Mark)
				}
			}
			if marks == nil {
				continue
			}
			slices.Sort(marks)
			mark := rapid.SampledFrom(marks).Draw(t, "mark") &^ (1 << options.MasqueradeBit)
			foreign := fmt.Sprintf("*mangle\n-I PREROUTING ! -i lo -j MARK --set-mark %d\n"+
				"-I OUTPUT -m ipvs ! --ipvs -j MARK --set-mark %[1]d\nCOMMIT\n", mark)
			require.NoError(t, restore.IPTables(rs, foreign))
			for range packetsPerPlan / 3 {
				pkt := c.Packets(f).Draw(t, "packet")
				if isMartian(rs, pkt) || isTaken(rs, evaluator.Verdict(pkt)) {
					continue
				}
				require.NoError(t, onlyWhole(tolerance, rs).Compare(evaluator, rs, pkt, packetsim.Node{Local: c.Local}))
				marked++
			}
		}
	})
	if marked == 0 {
		t.Error("no packet had a mark")
	}
}

// TestHostClients sends from the node to addresses of Services, with the source that the kernel picks by default: that address itself.
// Such traffic reaches the same endpoints as the node's other traffic, and never leaves with that source, since each node has that
// address.
func TestHostClients(t *testing.T) {
	t.Parallel()
	left := 0
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		evaluator, tolerance := plan.NewEvaluator(c.Plan), packetsim.IPVSTolerance(c.Plan)
		options := drawOptions(t, c)
		options.VIPs = ipvs.Addresses
		for _, f := range plan.Families {
			rs := machineOf(t, c.Plan, f, options)
			source := plan.Packet{Output: true, SrcLocal: true}
			for _, pkt := range toFrontends(c, f, []plan.Packet{source}) {
				pkt.Src = pkt.Dst
				v := evaluator.Verdict(pkt)
				if !rs.IsAdded(pkt.Dst) || isTaken(rs, v) {
					continue
				}
				outcomes, err := rs.Trace(pkt, packetsim.Node{Local: c.Local})
				require.NoError(t, err)
				for i := range v.Targets {
					to := &v.Targets[i]
					at := slices.IndexFunc(outcomes, func(o packetsim.Outcome) bool { return o.Dst == to.Addr })
					to.Masquerade = at < 0 || !outcomes[at].Delivered || outcomes[at].Masquerade
					left++
				}
				if err := tolerance.Agree(v, pkt, outcomes); err != nil {
					t.Fatalf("packet %s: %v\nmode ipvs: %v\nplan: %s", pkt, err, outcomes, v)
				}
			}
		}
	})
	if left == 0 {
		t.Error("no packet left the node")
	}
}

// end is one thing that becomes of a packet, as far as both modes must have it in common.
type end struct {
	action     packetsim.Action
	dst        netip.AddrPort // zero unless it is forwarded to an endpoint
	masquerade bool
}

// ends are the outcomes of a packet. Whether one is masqueraded that came from elsewhere to an endpoint on the node's own
// network does not matter, since such a packet never leaves.
func ends(pkt plan.Packet, outcomes []packetsim.Outcome) map[end]bool {
	out := map[end]bool{}
	for _, o := range outcomes {
		e := end{action: o.Action}
		if o.DNAT {
			e.dst, e.masquerade = o.Dst, o.Masquerade && (pkt.Output || !o.Delivered)
		}
		out[e] = true
	}
	return out
}

// TestModesAgree sends the same packets through modes iptables and ipvs, and expects the same of both: for each kind of
// source and each frontend of a random plan.
func TestModesAgree(t *testing.T) {
	t.Parallel()
	agreed := 0
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t, c)
		evaluator, tolerance, node := plan.NewEvaluator(c.Plan), packetsim.IPVSTolerance(c.Plan), packetsim.Node{Local: c.Local}
		for _, f := range plan.Families {
			rules, err := restore.Parse(f, iptables.Render(c.Plan, f, iptables.Options{MasqueradeBit: options.MasqueradeBit}))
			require.NoError(t, err)
			rs := machineOf(t, c.Plan, f, options)
			sources := rapid.SliceOfN(c.Packets(f), 6, 6).Draw(t, "sources")
			for _, pkt := range toFrontends(c, f, sources) {
				if isMartian(rs, pkt) || isTaken(rs, evaluator.Verdict(pkt)) {
					continue
				}
				by, err := rules.Trace(pkt, node)
				require.NoError(t, err)
				as, err := rs.Trace(pkt, node)
				require.NoError(t, err)
				if err := same(tolerance, pkt, by, as); err != "" {
					t.Fatalf("packet %s: %s\nmode iptables: %v\nmode ipvs: %v\nplan: %s", pkt, err, by, as,
						evaluator.Verdict(pkt))
				}
				agreed++
			}
		}
	})
	if agreed == 0 {
		t.Error("no packet was compared")
	}
}

// maxFrontends bounds how many frontends of a plan get packets in TestModesAgree; large plans have hundreds alike.
const maxFrontends = 40

// toFrontends are packets from each source to each frontend of a plan, node ports at an address of the node.
func toFrontends(c *plantest.Cluster, f plan.Family, sources []plan.Packet) []plan.Packet {
	var frontends []plan.Frontend
	for _, sp := range c.Plan.Sorted(f) {
		frontends = append(frontends, sp.Frontends...)
	}
	var out []plan.Packet
	for _, fe := range frontends[:min(len(frontends), maxFrontends)] {
		for _, pkt := range sources {
			if pkt.Dst, pkt.Protocol, pkt.DstPort = fe.Addr, fe.Protocol, fe.Port; !fe.Addr.IsValid() {
				i := slices.IndexFunc(c.LocalAddrs, func(a netip.Addr) bool { return plan.FamilyOf(a) == f })
				pkt.Dst = c.LocalAddrs[i]
			}
			pkt.DstLocal = c.Local(pkt.Dst)
			out = append(out, pkt)
		}
	}
	return out
}

// same says how mode ipvs does otherwise with a packet than mode iptables, where it must not; empty if it does not.
func same(t packetsim.Tolerance, pkt plan.Packet, by, as []packetsim.Outcome) string {
	want, got := ends(pkt, by), ends(pkt, as)
	if pkt.Src.IsLoopback() && got[end{action: packetsim.Drop}] {
		return "" // Nothing with a loopback source leaves by IPVS; TestRenderVerdicts looks at the shares.
	}
	for e := range got {
		kept := e
		kept.masquerade = true
		switch {
		case want[e]:
		case want[kept] && e.dst.Addr() == pkt.Src && t.KeepHairpin(pkt.Protocol, e.dst):
			want[e] = true
			delete(want, kept)
		case e.action == packetsim.Reject && want[end{action: packetsim.Accept}] && !pkt.DstLocal && t.RejectPass(pkt.Dst):
			want[e] = true
			delete(want, end{action: packetsim.Accept})
		default:
			return "only mode ipvs has it " + string(e.action) + " " + e.dst.String()
		}
	}
	for e := range want {
		if !got[e] {
			return "only mode iptables has it " + string(e.action) + " " + e.dst.String()
		}
	}
	return ""
}
