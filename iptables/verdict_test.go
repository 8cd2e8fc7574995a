package iptables_test

import (
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/iptables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
	"nodeproxy/plan/plantest"
)

// packetsPerPlan is how many packets are sent through the rules of each random plan and family.
const packetsPerPlan = 30

// drawOptions draws options among which are those that make every form of rules.
func drawOptions(t *rapid.T) iptables.Options {
	return iptables.Options{
		MasqueradeBit: rapid.IntRange(0, 31).Draw(t, "masquerade bit"),
		RandomFully:   rapid.Bool().Draw(t, "random fully"),
		TCPLiberal:    rapid.Bool().Draw(t, "TCP liberal"),
		CompactAbove:  rapid.SampledFrom([]int{0, 1, 20}).Draw(t, "compact above"),
		KeepCounters:  rapid.Bool().Draw(t, "keep counters"),
	}
}

// drawn is a random plan with its world, rendered for a family.
type drawn struct {
	*plantest.Cluster
	evaluator *plan.Evaluator
	options   iptables.Options
	family    plan.Family
	rules     *packetsim.Machine
}

func (d drawn) node() packetsim.Node { return packetsim.Node{Local: d.Local} }

// eachPacket sends packets through the rules of random plans, which text makes.
func eachPacket(t *testing.T, packets int, text func(*plan.Plan, plan.Family, iptables.Options) string,
	check func(t *rapid.T, d drawn, pkt plan.Packet)) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d := drawn{Cluster: plantest.Clusters().Draw(t, "cluster"), options: drawOptions(t)}
		d.evaluator = plan.NewEvaluator(d.Plan)
		for _, d.family = range plan.Families {
			d.rules = parse(t, d.family, text(d.Plan, d.family, d.options))
			for range packets {
				check(t, d, d.Packets(d.family).Draw(t, "packet"))
			}
		}
	})
}

// agrees holds the rules to the plan's own verdict.
func agrees(t *rapid.T, d drawn, pkt plan.Packet) {
	require.NoError(t, packetsim.Compare(d.evaluator, d.rules, pkt, d.node()))
}

// TestRenderVerdicts holds the rules to the plan's own verdict: whatever the plan and whatever the packet, they must do
// with it what the plan says, and choose among endpoints with equal probability.
func TestRenderVerdicts(t *testing.T) { eachPacket(t, packetsPerPlan, iptables.Render, agrees) }

// TestRenderAllVerdicts holds the text with the rules of both families to the same.
func TestRenderAllVerdicts(t *testing.T) {
	text := func(p *plan.Plan, _ plan.Family, o iptables.Options) string { return iptables.RenderAll(p, o) }
	eachPacket(t, packetsPerPlan/3, text, agrees)
}

// TestRenderPassesMasqueraded makes sure that a node whose policy for forwarding is to drop still forwards what is
// masqueraded on its way to an endpoint.
func TestRenderPassesMasqueraded(t *testing.T) {
	forwarded := 0
	text := func(p *plan.Plan, f plan.Family, o iptables.Options) string {
		return iptables.Render(p, f, o) + "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
	}
	eachPacket(t, packetsPerPlan/3, text, func(t *rapid.T, d drawn, pkt plan.Packet) {
		masquerade := map[netip.AddrPort]bool{}
		for _, target := range d.evaluator.Verdict(pkt).Targets {
			masquerade[target.Addr] = target.Masquerade
		}
		for _, o := range trace(t, d.rules, pkt, d.node()) {
			if pkt.Output || o.Delivered || !masquerade[o.Dst] {
				continue
			}
			forwarded++
			if o.Action != packetsim.Accept {
				t.Fatalf("%s: %s by\n%s", pkt, o, strings.Join(o.Rules(), "\n"))
			}
		}
	})
	if forwarded == 0 {
		t.Error("no packet was forwarded and masqueraded")
	}
}

// recentSet finds the list that a client gets into on its way to an endpoint.
var recentSet = regexp.MustCompile(`--set --name (\S+)`)

// TestRenderAffinity makes sure that a client goes to the endpoint in whose list it is, and nowhere else, and that a
// client gets into a list exactly where the Service asks for affinity.
func TestRenderAffinity(t *testing.T) {
	kept := 0
	eachPacket(t, packetsPerPlan/3, iptables.Render, func(t *rapid.T, d drawn, pkt plan.Packet) {
		v := d.evaluator.Verdict(pkt)
		if v.Action != plan.Forward {
			return
		}
		o := rapid.SampledFrom(trace(t, d.rules, pkt, d.node())).Draw(t, "endpoint")
		list := recentSet.FindStringSubmatch(strings.Join(o.Rules(), "\n"))
		if asked := d.Plan.Services[v.ServicePort].Affinity > 0; asked != (list != nil) {
			t.Fatalf("%s: affinity is %t, and its list is %q", pkt, asked, list)
		}
		if list == nil {
			return
		}
		node := d.node()
		node.Recent = func(name string, a netip.Addr) bool { return name == list[1] && a == pkt.Src }
		if again := trace(t, d.rules, pkt, node); len(again) != 1 || again[0].Dst != o.Dst {
			t.Fatalf("%s: a client that was sent to %s is sent to %v", pkt, o.Dst, again)
		}
		kept++
	})
	if kept == 0 {
		t.Error("no client met a Service with affinity")
	}
}

// parse reads rules, each of which the simulator must know.
func parse(t *rapid.T, f plan.Family, text string) *packetsim.Machine {
	rules, err := restore.Parse(f, text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return rules
}

func trace(t *rapid.T, rules *packetsim.Machine, pkt plan.Packet, node packetsim.Node) []packetsim.Outcome {
	outcomes, err := rules.Trace(pkt, node)
	require.NoError(t, err)
	return outcomes
}
