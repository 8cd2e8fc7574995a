package nftables

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// trace follows the first packet of a connection.
func (r *ruleset) trace(pkt plan.Packet, local func(netip.Addr) bool) []packetsim.Outcome {
	outcomes, err := r.machine().Trace(pkt, packetsim.Node{Local: local})
	if err != nil {
		panic(err)
	}
	return outcomes
}

// packetsPerPlan is how many packets are sent through the rules of each random plan and family.
const packetsPerPlan = 40

func drawCluster(t *rapid.T) *plantest.Cluster {
	c := plantest.Clusters().Draw(t, "cluster")
	c.Plan.Settings.LocalhostNodePorts = false // as the configuration has it in this mode
	giveWeights(c.Plan, rapid.Uint32().Draw(t, "weights"))
	return c
}

func drawOptions(t *rapid.T) Options {
	return Options{MasqueradeBit: rapid.IntRange(0, 31).Draw(t, "masquerade bit"), TCPLiberal: rapid.Bool().Draw(t, "TCP liberal")}
}

// giveWeights gives each endpoint a weight.
func giveWeights(p *plan.Plan, seed uint32) {
	for _, sp := range p.Services {
		with := *sp
		for _, list := range []*[]plan.Endpoint{&with.Endpoints.Cluster, &with.Endpoints.Local} {
			*list = slices.Clone(*list)
			for i := range *list {
				(*list)[i].Weight = uint16(jhash([]byte(endpointValue((*list)[i].Addr)), seed) % 6)
			}
		}
		p.Set(&with)
	}
}

// agree is like packetsim.Agree, but with the shares that weights give to endpoints, and with the one that a hash chooses.
func agree(p *plan.Plan, v plan.Verdict, pkt plan.Packet, outcomes []packetsim.Outcome) error {
	sp := p.Services[v.ServicePort]
	if v.Action != plan.Forward || len(outcomes) == 0 {
		return packetsim.Agree(v, pkt, outcomes)
	}
	if scheduleOf(sp) == bySource {
		v.Targets = slices.DeleteFunc(slices.Clone(v.Targets), func(x plan.Target) bool { return x.Addr != outcomes[0].Dst })
		return packetsim.Agree(v, pkt, outcomes)
	}
	if scheduleOf(sp) == bySourcePort { // A table gives shares that are close to the weights.
		return packetsim.Tolerance{AnyShare: true}.Agree(v, pkt, outcomes)
	}
	weights, sum := map[netip.AddrPort]float64{}, 0.0
	for _, target := range v.Targets {
		i := slices.IndexFunc(sp.All(), func(ep plan.Endpoint) bool { return ep.Addr == target.Addr })
		weights[target.Addr] = float64(weightOf(sp.All()[i], sp.Scheduler))
		sum += weights[target.Addr]
	}
	for _, o := range outcomes {
		if want := weights[o.Dst] / sum; math.Abs(o.Probability-want) > 1e-6 {
			return fmt.Errorf("%s must have probability %.6f: %s", o.Dst, want, o)
		}
	}
	return packetsim.Tolerance{AnyShare: true}.Agree(v, pkt, outcomes)
}

// TestVerdicts holds the rules to the plan's own verdict: whatever the plan and whatever the packet, they must do with it what the plan
// says, and choose among endpoints with equal probability, by weight, or by a hash. What only this mode does, it must do too: it rejects what is for a port that
// no Service has at a cluster IP that is in use, and drops what is for one that is not, if neither is an address of the node.
func TestVerdicts(t *testing.T) {
	t.Parallel()
	seen := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		evaluator := plan.NewEvaluator(c.Plan)
		for _, f := range plan.Families {
			r := rulesetOf(c.Plan, f, drawOptions(t), nil)
			for range packetsPerPlan {
				pkt := c.Packets(f).Draw(t, "packet")
				v := evaluator.Verdict(pkt)
				outcomes := r.trace(pkt, c.Local)
				if only := onlyHere(c.Plan, pkt, v); only != "" {
					seen[string(only)]++
					if len(outcomes) != 1 || outcomes[0].Action != only || outcomes[0].DNAT {
						t.Fatalf("packet: %s\nwant it to be %sed\n%s", pkt, only, text(outcomes))
					}
					continue
				}
				seen[v.Action.String()]++
				if err := agree(c.Plan, v, pkt, outcomes); err != nil {
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
		out += fmt.Sprintf("  %s\n    %s\n", o, strings.Join(o.Rules(), "\n    "))
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
			r := rulesetOf(c.Plan, f, Options{}, nil)
			edited := rulesetOf(next, f, Options{}, nil)
			for range packetsPerPlan / 2 {
				pkt := c.Packets(f).Draw(t, "packet")
				v, w := evaluator.Verdict(pkt), after.Verdict(pkt)
				if v.Action != plan.Forward || c.Plan.Services[v.ServicePort].Affinity == 0 {
					continue
				}
				clear(r.clients)
				first := rapid.SampledFrom(r.trace(pkt, c.Local)).Draw(t, "choice")
				clients := first.State.(state).clients
				if len(clients) != 1 {
					t.Fatalf("%s: %d clients are remembered", pkt, len(clients))
				}
				r.clients = clients
				if again := r.trace(pkt, c.Local); len(again) != 1 || again[0].Dst != first.Dst {
					t.Fatalf("%s: a client that was sent to %s is sent to %v", pkt, first.Dst, again)
				}
				kept++
				if w.Action != plan.Forward || next.Services[w.ServicePort].Affinity == 0 {
					continue
				}
				edited.clients = clients
				still := slices.ContainsFunc(w.Targets, func(x plan.Target) bool { return x.Addr == first.Dst })
				later := edited.trace(pkt, c.Local)
				if still && (len(later) != 1 || later[0].Dst != first.Dst) {
					t.Fatalf("%s: a client of %s is sent to %v, though its endpoint is still there", pkt, first.Dst, later)
				}
				if still {
					continue
				}
				moved++
				require.NoError(t, agree(next, w, pkt, later), "%s: its endpoint %s is gone", pkt, first.Dst)
				edited.clients = later[0].State.(state).clients
				if again := edited.trace(pkt, c.Local); len(again) != 1 || again[0].Dst != later[0].Dst {
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
			for _, seconds := range []uint64{0, 1, 2, 59, 300, 301, 3600, 3601, 10800, 86400, 1 << 40} {
				k := a
				if a.treatment > drop {
					if k.count, k.affinity = count, roundAffinity(seconds); k.affinity > 0 {
						k.count = min(count, maxSticky)
					}
				}
				for _, k.schedule = range []schedule{random, bySource, bySourcePort} {
					if k.schedule > random && a.treatment <= drop || k.schedule == bySourcePort && k.affinity > 0 {
						continue
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
	}
	for _, d := range []time.Duration{time.Second, 299 * time.Second, 10 * time.Minute, 3 * time.Hour, 24 * time.Hour} {
		if got := roundAffinity(uint64(d.Seconds())); got != uint32(d.Seconds()) {
			t.Errorf("affinity of %v becomes %d s", d, got)
		}
	}
	terms := map[uint32]uint32{} // by code
	for s := uint32(1); s <= mostSeconds; s++ {
		got := roundAffinity(uint64(s))
		if got < s || got > s+s/20 {
			t.Fatalf("affinity of %d s becomes %d s", s, got)
		}
		code := affinityCode(got)
		if other, taken := terms[code]; taken && other != got || code >= 1<<12 {
			t.Fatalf("affinities of %d s and %d s have the code %d", other, got, code)
		}
		if terms[code] = got; s == 86400 && len(terms) >= 1000 {
			t.Errorf("there are %d terms up to a day", len(terms))
		}
	}
}
