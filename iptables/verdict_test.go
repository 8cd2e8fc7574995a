package iptables_test

import (
	"net/netip"
	"regexp"
	"strings"
	"testing"

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

// TestRenderVerdicts holds the rules to the plan's own verdict: whatever the plan and whatever the packet, they must do
// with it what the plan says, and choose among endpoints with equal probability.
func TestRenderVerdicts(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := plantest.Clusters().Draw(t, "cluster")
		options := drawOptions(t)
		evaluator := plan.NewEvaluator(c.Plan)
		for _, f := range plan.Families {
			rules := parse(t, f, iptables.Render(c.Plan, f, options))
			for range packetsPerPlan {
				pkt := c.Packets(f).Draw(t, "packet")
				if err := packetsim.Compare(evaluator, rules, pkt, packetsim.Node{Local: c.Local}); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// TestRenderAllVerdicts holds the text with the rules of both families to the same.
func TestRenderAllVerdicts(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := plantest.Clusters().Draw(t, "cluster")
		evaluator := plan.NewEvaluator(c.Plan)
		text := iptables.RenderAll(c.Plan, drawOptions(t))
		for _, f := range plan.Families {
			rules := parse(t, f, text)
			for range packetsPerPlan / 3 {
				pkt := c.Packets(f).Draw(t, "packet")
				if err := packetsim.Compare(evaluator, rules, pkt, packetsim.Node{Local: c.Local}); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// TestRenderPassesMasqueraded makes sure that a node whose policy for forwarding is to drop still forwards what is
// masqueraded on its way to an endpoint.
func TestRenderPassesMasqueraded(t *testing.T) {
	t.Parallel()
	forwarded := 0
	rapid.Check(t, func(t *rapid.T) {
		c := plantest.Clusters().Draw(t, "cluster")
		options := drawOptions(t)
		for _, f := range plan.Families {
			rules := parse(t, f, iptables.Render(c.Plan, f, options))
			if err := restore.IPTables(rules, "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"); err != nil {
				t.Fatal(err)
			}
			for range packetsPerPlan / 3 {
				pkt := c.Packets(f).Draw(t, "packet")
				masquerade := map[netip.AddrPort]bool{}
				for _, target := range c.Plan.Verdict(pkt).Targets {
					masquerade[target.Addr] = target.Masquerade
				}
				for _, o := range trace(t, rules, pkt, packetsim.Node{Local: c.Local}) {
					if pkt.Output || o.Delivered || !masquerade[o.Dst] {
						continue
					}
					forwarded++
					if o.Action != packetsim.Accept {
						t.Fatalf("%s: %s by\n%s", pkt, o, strings.Join(o.Rules(), "\n"))
					}
				}
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
	t.Parallel()
	kept := 0
	rapid.Check(t, func(t *rapid.T) {
		c := plantest.Clusters().Draw(t, "cluster")
		options := drawOptions(t)
		for _, f := range plan.Families {
			rules := parse(t, f, iptables.Render(c.Plan, f, options))
			for range packetsPerPlan / 3 {
				pkt := c.Packets(f).Draw(t, "packet")
				v := c.Plan.Verdict(pkt)
				if v.Action != plan.Forward {
					continue
				}
				node := packetsim.Node{Local: c.Local}
				o := rapid.SampledFrom(trace(t, rules, pkt, node)).Draw(t, "endpoint")
				list := recentSet.FindStringSubmatch(strings.Join(o.Rules(), "\n"))
				if asked := c.Plan.Services[v.ServicePort].Affinity > 0; asked != (list != nil) {
					t.Fatalf("%s: affinity is %t, and its list is %q", pkt, asked, list)
				}
				if list == nil {
					continue
				}
				node.Recent = func(name string, a netip.Addr) bool { return name == list[1] && a == pkt.Src }
				if again := trace(t, rules, pkt, node); len(again) != 1 || again[0].Dst != o.Dst {
					t.Fatalf("%s: a client that was sent to %s is sent to %v", pkt, o.Dst, again)
				}
				kept++
			}
		}
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
	if err != nil {
		t.Fatal(err)
	}
	return outcomes
}
