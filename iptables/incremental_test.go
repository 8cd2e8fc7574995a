package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
	"nodeproxy/proxier/portion"
)

// textOfKernel is what a fake kernel holds.
func textOfKernel(k *xtablestest.Kernel) string {
	var out strings.Builder
	for _, tbl := range []names.Table{names.Filter, names.NAT} {
		writeTable(&out, tbl, k.Tables[tbl])
	}
	return out.String()
}

func fakeEngine(f plan.Family) (*engine, *xtablestest.Kernel) {
	k := xtablestest.New()
	// This machine's settings are not the fake kernel's.
	e := &engine{Writer: &xtables.Writer{Kernel: k, MaxNames: 40}, family: f, options: testOptions, log: slog.New(slog.DiscardHandler),
		sysctlDir: "/nonexistent", writing: unwatched}
	e.Ran = e.ran
	return e, k
}

// TestRewritesInSteps: where many ServicePorts have other endpoints, and nothing changes in what leads to them, no run of iptables-restore
// has more chains than it should.
func TestRewritesInSteps(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4)
	program(t, e, plantest.Large(200, 3), plan.Everything())
	k.Restores = nil
	p := plantest.Large(200, 4)
	program(t, e, p, plan.Everything())
	same(t, "the kernel holds something else", textOfKernel(k), textOf(desired(p, plan.IPv4, e.options)))
	for _, text := range k.Restores {
		if n := strings.Count(text, "\n:"); n > e.MaxNames {
			t.Errorf("a run writes %d chains, of at most %d names", n, e.MaxNames)
		}
	}
}

// subset is a large plan of which each ServicePort is there or not, with more or fewer endpoints.
func subset(t *rapid.T, label string) *plan.Plan {
	p := plan.New(plan.Node{Name: "node-1"}, plan.Settings{LocalhostNodePorts: true})
	for i := range 120 {
		switch n := rapid.IntRange(0, 3).Draw(t, fmt.Sprintf("%s %d", label, i)); n {
		case 0:
		default:
			p.Set(plantest.LargeService(i, 40*i, n-1))
		}
	}
	return p
}

func checkSteps(t *rapid.T, f plan.Family, plans []*plan.Plan) {
	e, k := fakeEngine(f)
	o := observe(e)
	for i, p := range plans {
		var change plan.Change
		if i > 0 {
			change = plan.Only(plantest.Differing(plans[i-1], p))
		}
		require.NoError(t, e.Sync(context.Background(), p, change), "step %d", i)
		same(t, fmt.Sprintf("after step %d the kernel holds something else than a full render says", i), textOfKernel(k), wantText(p, f))
		if want := ruleTotals(k); fmt.Sprint(o.total) != fmt.Sprint(want) {
			t.Fatalf("after step %d: told of %v rules, the kernel holds %v", i, o.total, want)
		}
	}
}

// TestIncrementalEqualsFull: whatever way led to a plan, the kernel holds what a full sync of it would write.
func TestIncrementalEqualsFull(t *testing.T) {
	for _, f := range plan.Families {
		t.Run(f.String()+" random", func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				plans := rapid.SliceOfN(plantest.Plans(), 2, 5).Draw(t, "plans")
				for _, p := range plans {
					p.Settings, p.Node = plans[0].Settings, plans[0].Node
				}
				checkSteps(t, f, plans)
			})
		})
		t.Run(f.String()+" large", func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				checkSteps(t, f, []*plan.Plan{subset(t, "a"), subset(t, "b"), subset(t, "c")})
			})
		})
		t.Run(f.String()+" nested", func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				checkSteps(t, f, rapid.SliceOfN(plantest.Nested(f), 2, 2).Draw(t, "plans"))
			})
		})
	}
}

// TestPortionsEqualFull: after each portion of changes, some of which come while others are being written, the kernel holds what a
// full sync of the plan as of then would write; with the last one, that is the plan that is asked for.
func TestPortionsEqualFull(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f)
		queue := portion.New(rapid.IntRange(1, 20).Draw(t, "most"))
		program := func(desired *plan.Plan, change plan.Change) {
			p, change := queue.Next(desired, change)
			program(t, e, p, change)
			same(t, "the kernel holds something else than a full render says", textOfKernel(k), wantText(p, f))
		}
		plans := rapid.SliceOfN(plantest.Plans(), 2, 4).Draw(t, "plans")
		for i, p := range plans {
			p.Settings, p.Node = plans[0].Settings, plans[0].Node
			var change plan.Change
			if i > 0 && !chance(t, "everything is compared") {
				change = plan.Only(plantest.Differing(plans[i-1], p))
			}
			program(p, change)
			for range rapid.IntRange(0, 3).Draw(t, "portions before the next change") {
				program(p, plan.Only(nil))
			}
		}
		last := plans[len(plans)-1]
		for queue.Waiting() > 0 {
			program(last, plan.Only(nil))
		}
		same(t, "in the end the kernel holds something else", textOfKernel(k), wantText(last, f))
	})
}

// chance is true once in about eight times.
func chance(t *rapid.T, what string) bool { return rapid.IntRange(0, 7).Draw(t, what) == 7 }

// TestFullFromAnything: a full sync comes to the same rules from whatever another plan, with other settings, left behind,
// and writes nothing where they are right already.
func TestFullFromAnything(t *testing.T) {
	t.Run("random", func(t *testing.T) { fullFromAnything(t, plantest.Plans()) })
	t.Run("nested", func(t *testing.T) { fullFromAnything(t, plantest.Nested(plan.IPv4)) })
}

func fullFromAnything(t *testing.T, plans *rapid.Generator[*plan.Plan]) {
	rapid.Check(t, func(t *rapid.T) {
		e, k := fakeEngine(plan.IPv4)
		e.MaxNames = rapid.SampledFrom([]int{xtables.MaxNames, 40, 0}).Draw(t, "batch")
		for i, p := range rapid.SliceOfN(plans, 2, 3).Draw(t, "plans") {
			program(t, e, p, plan.Everything())
			same(t, fmt.Sprintf("after step %d", i), textOfKernel(k), wantText(p, plan.IPv4))
			k.Restores = nil
			program(t, e, p, plan.Everything())
			if len(k.Restores) > 0 {
				t.Fatalf("a second sync of the same plan wrote\n%s", strings.Join(k.Restores, "\n"))
			}
		}
	})
}

// TestOneChangeWritesOneService: an endpoint that comes to one of 400 ServicePorts costs its own chains, whatever else
// there is; a new ServicePort those and one leaf of the dispatch tree.
func TestOneChangeWritesOneService(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	e.options.CompactAbove = 0
	p := plantest.Large(400, 2)
	program(t, e, p, plan.Everything())
	sync := func(sp *plan.ServicePort) string {
		k.Restores = nil
		p.Set(sp)
		program(t, e, p, plan.Only(plan.Keys{sp.Key: {}}))
		return strings.Join(k.Restores, "")
	}
	if text := sync(plantest.LargeService(17, 5000, 2)); strings.Count(text, "\n:") != 5 {
		t.Errorf("two endpoints in place of two: want the chain that picks, two new chains, two that go; got\n%s", text)
	}
	text := sync(plantest.LargeService(100000, 6000, 2))
	if n := strings.Count(text, "\n:"); n > 3+2 {
		t.Errorf("a new ServicePort wrote %d chains:\n%s", n, text)
	}
}

// TestTrieIsCanonical: the trees of chains depend on what is in them, not on how it came there.
func TestTrieIsCanonical(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		keys := rapid.SliceOfNDistinct(rapid.SliceOfN(rapid.ByteRange(0, 3), 5, 5), 0, 60,
			func(b []byte) string { return string(b) }).Draw(t, "keys")
		var direct, detour *trie
		for _, k := range keys {
			direct = direct.with(key(k), fmt.Sprint(k))
		}
		perm := rapid.Permutation(keys).Draw(t, "order")
		extra := rapid.SliceOf(rapid.SliceOfN(rapid.ByteRange(0, 3), 5, 5)).Draw(t, "extra")
		for _, k := range slices.Concat(perm, extra) {
			detour = detour.with(key(k), fmt.Sprint(k))
		}
		for _, k := range extra {
			if !slices.ContainsFunc(keys, func(o []byte) bool { return slices.Equal(o, k) }) {
				detour = detour.without(key(k))
			}
		}
		if a, b := dumpTrie(direct), dumpTrie(detour); a != b {
			t.Fatalf("two ways, two trees:\n%s\n%s", a, b)
		}
	})
}

func dumpTrie(t *trie) string {
	if t == nil {
		return "-"
	}
	var kids []string
	for _, k := range t.kids {
		kids = append(kids, dumpTrie(k))
	}
	return fmt.Sprintf("%q %q %d [%s]", t.prefix, t.from, t.count, strings.Join(kids, " "))
}

// TestNamesFit: no chain name is longer than iptables takes, and no two chains of a table have the same.
func TestNamesFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := plantest.Plans().Draw(t, "plan")
		for _, f := range plan.Families {
			for tbl, chains := range desired(p, f, testOptions) {
				seen := map[string]bool{}
				for _, c := range chains {
					if len(c.Name) > names.MaxChainName || seen[c.Name] {
						t.Fatalf("chain %s of table %s is too long or there twice", c.Name, tbl)
					}
					seen[c.Name] = true
				}
			}
		}
	})
}

// TestWithoutBPF: a kernel that lacks xt_bpf gets the rules that do without it.
func TestWithoutBPF(t *testing.T) {
	e, k := fakeEngine(plan.IPv4)
	k.Refuse = "-m bpf"
	p := plantest.Large(20, 2)
	program(t, e, p, plan.Everything())
	if !strings.Contains(textOfKernel(k), names.PrefixEndpoint) {
		t.Error("no endpoint has a chain")
	}
	if strings.Contains(textOfKernel(k), "-m bpf") {
		t.Error("the refused rule is there")
	}
	if e.current == nil || e.current.compact {
		t.Error("the next change would be written in the form that the kernel refuses")
	}
}

// TestFrontendChangesHands: an external IP passes from a ServicePort that goes to one that gets its first endpoints in the same
// change, so that the one's rules are written before the other's are taken back.
func TestFrontendChangesHands(t *testing.T) {
	external := plan.Frontend{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("192.0.2.1"), Protocol: plan.TCP, Port: 80}
	node := plan.Node{Name: "node-1"}
	first, second := plan.New(node, plan.Settings{}), plan.New(node, plan.Settings{})
	loser, winner := *plantest.LargeService(1, 0, 2), *plantest.LargeService(2, 0, 0)
	loser.Frontends = append(slices.Clone(loser.Frontends), external)
	first.Set(&loser)
	first.Set(&winner)
	before := loser
	before.Frontends = loser.Frontends[:1]
	before.Endpoints = plan.Endpoints{} // it starts to be refused, so its rules go last
	after := *plantest.LargeService(2, 100, 2)
	after.Frontends = append(slices.Clone(after.Frontends), external)
	second.Set(&before)
	second.Set(&after)

	e, k := fakeEngine(plan.IPv4)
	for i, p := range []*plan.Plan{first, second} {
		change := plan.Only(plantest.Differing(first, second))
		if i == 0 {
			change = plan.Everything()
		}
		program(t, e, p, change)
	}
	same(t, "the kernel holds something else than a full render says", textOfKernel(k), wantText(second, plan.IPv4))
}
