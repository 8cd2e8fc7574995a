package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// packetsPerPlan is how many packets are sent through the rules of each random plan and family.
const packetsPerPlan = 40

func drawCluster(t *rapid.T) *plantest.Cluster {
	c := plantest.Clusters().Draw(t, "cluster")
	c.Plan.Settings.LocalhostNodePorts = false // as the configuration has it in this mode
	return c
}

func drawOptions(t *rapid.T) Options {
	return Options{MasqueradeBit: rapid.IntRange(0, 31).Draw(t, "masquerade bit"), TCPLiberal: rapid.Bool().Draw(t, "TCP liberal")}
}

// TestVerdicts holds the rules to the plan's own verdict: whatever the plan and whatever the packet, they must do with it what the plan
// says, and choose among endpoints with equal probability. What only this mode does, it must do too: it rejects what is for a port that
// no Service has at a cluster IP that is in use, and drops what is for one that is not, if neither is an address of the node.
func TestVerdicts(t *testing.T) {
	t.Parallel()
	seen := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		evaluator := plan.NewEvaluator(c.Plan)
		for _, f := range plan.Families {
			r := rulesetOf(c.Plan, f, drawOptions(t), c.Local)
			for range packetsPerPlan {
				pkt := c.Packets(f).Draw(t, "packet")
				v := evaluator.Verdict(pkt)
				outcomes := r.trace(pkt)
				if only := onlyHere(c.Plan, pkt, v); only != "" {
					seen[string(only)]++
					if len(outcomes) != 1 || outcomes[0].Action != only || outcomes[0].DNAT {
						t.Fatalf("packet: %s\nwant it to be %sed\n%s", pkt, only, text(outcomes))
					}
					continue
				}
				seen[v.Action.String()]++
				if err := packetsim.Agree(v, pkt, outcomes); err != nil {
					t.Fatalf("packet: %s\nplan: %s\n  %s\n%s%v", pkt, v, strings.Join(v.Reasons(), "\n  "), text(outcomes), err)
				}
			}
		}
	})
	for _, what := range []string{"pass", "forward", "reject", "drop"} {
		if seen[what] == 0 {
			t.Errorf("no packet was to %s: %v", what, seen)
		}
	}
}

// onlyHere is what this mode does with a packet that is for no Service; empty if that is nothing.
func onlyHere(p *plan.Plan, pkt plan.Packet, v plan.Verdict) packetsim.Action {
	if v.Action != plan.Pass || pkt.DstLocal {
		return ""
	}
	for _, sp := range p.Services {
		for _, fe := range sp.Frontends {
			if fe.Kind == plan.ClusterIP && fe.Addr == pkt.Dst {
				return packetsim.Reject
			}
		}
	}
	if slices.ContainsFunc(p.Settings.ServiceCIDRs, func(r netip.Prefix) bool { return r.Contains(pkt.Dst) }) {
		return packetsim.Drop
	}
	return ""
}

func text(outcomes []packetsim.Outcome) string {
	var out string
	for _, o := range outcomes {
		out += fmt.Sprintf("  %s\n    %s\n", o, strings.Join(o.Rules, "\n    "))
	}
	return out
}

// TestAffinity: a client that is remembered for an endpoint goes there and nowhere else, as long as the endpoint is one; when it is none
// any more, the client gets another one and is remembered for that.
func TestAffinity(t *testing.T) {
	t.Parallel()
	kept, moved := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		next := c.Edited(t)
		evaluator, after := plan.NewEvaluator(c.Plan), plan.NewEvaluator(next)
		for _, f := range plan.Families {
			r := rulesetOf(c.Plan, f, Options{}, c.Local)
			edited := rulesetOf(next, f, Options{}, c.Local)
			for range packetsPerPlan / 2 {
				pkt := c.Packets(f).Draw(t, "packet")
				v, w := evaluator.Verdict(pkt), after.Verdict(pkt)
				if v.Action != plan.Forward || c.Plan.Services[v.ServicePort].Affinity == 0 {
					continue
				}
				clear(r.elements[names.NFTAffinity])
				first := rapid.SampledFrom(r.trace(pkt)).Draw(t, "choice")
				clients := first.State.(state).clients
				if len(clients) != 1 {
					t.Fatalf("%s: %d clients are remembered", pkt, len(clients))
				}
				r.elements[names.NFTAffinity] = clients
				if again := r.trace(pkt); len(again) != 1 || again[0].Dst != first.Dst {
					t.Fatalf("%s: a client that was sent to %s is sent to %v", pkt, first.Dst, again)
				}
				kept++
				if w.Action != plan.Forward || next.Services[w.ServicePort].Affinity == 0 {
					continue
				}
				edited.elements[names.NFTAffinity] = clients
				still := slices.ContainsFunc(w.Targets, func(x plan.Target) bool { return x.Addr == first.Dst })
				later := edited.trace(pkt)
				if still && (len(later) != 1 || later[0].Dst != first.Dst) {
					t.Fatalf("%s: a client of %s is sent to %v, though its endpoint is still there", pkt, first.Dst, later)
				}
				if still {
					continue
				}
				moved++
				if err := packetsim.Agree(w, pkt, later); err != nil {
					t.Fatalf("%s: its endpoint %s is gone: %v", pkt, first.Dst, err)
				}
				edited.elements[names.NFTAffinity] = later[0].State.(state).clients
				if again := edited.trace(pkt); len(again) != 1 || again[0].Dst != later[0].Dst {
					t.Fatalf("%s: a client that was sent to %s, in place of one that is gone, is sent to %v", pkt, later[0].Dst, again)
				}
			}
		}
	})
	if kept == 0 || moved == 0 && !testing.Short() {
		t.Errorf("%d clients were remembered, and for %d the endpoint went away", kept, moved)
	}
}

// TestKinds: the number of each kind is its own, and what a chain is called too.
func TestKinds(t *testing.T) {
	t.Parallel()
	numbers, chains := map[uint32]kind{}, map[string]kind{}
	for _, a := range actions[1:] {
		for _, count := range []int{0, 1, 2, 64, 4095, maxSticky, maxSticky + 1, maxCount} {
			for _, seconds := range []uint64{0, 1, 2, 59, 4095, 4096, 10800, 86400, 1 << 40} {
				k := a
				if a.treatment > drop {
					if k.count, k.affinity = count, roundAffinity(seconds); k.affinity > 0 {
						k.count = min(count, maxSticky)
					}
				}
				if other, taken := numbers[k.number()]; taken && other != k {
					t.Errorf("%+v and %+v have the number %#x", k, other, k.number())
				}
				if other, taken := chains[k.chain()]; taken && other != k {
					t.Errorf("%+v and %+v have the chain %s", k, other, k.chain())
				}
				numbers[k.number()], chains[k.chain()] = k, k
			}
		}
	}
	for _, d := range []time.Duration{time.Second, 4095 * time.Second, 3 * time.Hour, 24 * time.Hour} {
		if got := roundAffinity(uint64(d.Seconds())); got != uint32(d.Seconds()) {
			t.Errorf("affinity of %v becomes %d s", d, got)
		}
	}
}
