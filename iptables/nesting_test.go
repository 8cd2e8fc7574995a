package iptables

import (
	"fmt"
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
)

// rendered are the tables that a plan is rendered as.
func rendered(t rapid.TB, p *plan.Plan, f plan.Family, o Options) map[names.Table]xtables.Content {
	out := map[names.Table]xtables.Content{}
	for _, part := range strings.Split(Render(p, f, o), "COMMIT\n") {
		head, body, _ := strings.Cut(part, "\n")
		if head == "" {
			continue
		}
		held := xtables.Content{}
		require.NoError(t, xtables.EachLine(strings.NewReader(body), held.Add))
		out[names.Table(head[1:])] = held
	}
	return out
}

func checkNesting(t rapid.TB, p *plan.Plan, f plan.Family, o Options) {
	for tbl, held := range rendered(t, p, f, o) {
		if way := xtablestest.Deepest(held); len(way)-1 > xtables.MaxNesting {
			t.Errorf("in table %s rules lead %d chains deep: %s", tbl, len(way)-1, strings.Join(way, " > "))
		}
	}
}

// TestNesting: whatever frontends there are, rules lead no deeper than nf_tables takes, in no table.
func TestNesting(t *testing.T) {
	t.Parallel()
	for _, f := range plan.Families {
		for name, p := range map[string]*plan.Plan{"pools": plantest.Pools(f), "crossed": plantest.Crossed(f)} {
			t.Run(fmt.Sprintf("%s %s", name, f), func(t *testing.T) { checkNesting(t, p, f, Options{MasqueradeBit: 14}) })
		}
		t.Run("random "+f.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				p := plantest.Nested(f).Draw(t, "plan")
				checkNesting(t, p, f, Options{MasqueradeBit: 14, CompactAbove: rapid.SampledFrom([]int{0, 12}).Draw(t, "compact above")})
			})
		})
	}
}

// TestNestingWidens: that rules lead no deeper than they may hardly makes more of them to pass.
func TestNestingWidens(t *testing.T) {
	t.Parallel()
	for _, f := range plan.Families {
		rapid.Check(t, func(t *rapid.T) {
			p := plantest.Nested(f).Draw(t, "plan")
			r := newRules(p, f, Options{})
			for _, sp := range p.Sorted(f) {
				r.enter(sp)
			}
			d := r.dispatcher(natServices, &r.tries)
			bounded := mostPassed(d)
			d.place.depth = -100
			if free := mostPassed(d); bounded > 2*free {
				t.Errorf("of %d entries, a packet passes up to %d rules, and would pass %d if rules could lead as deep as they like",
					d.root.count, bounded, free)
			}
		})
	}
}

// mostPassed is how many rules of a dispatcher's tree a packet passes at most.
func mostPassed(d *dispatch) int {
	var from func(level []subtree) int
	from = func(level []subtree) int {
		most := 0
		for _, n := range level {
			most = max(most, len(d.rules(n))+from(n.below()))
		}
		return most
	}
	return from(d.top())
}

// TestNestingWhileWriting: an address to which many ports come in the same sync in which many others come lies deep in the rules
// that are there, and leads deep in those that are to be.
func TestNestingWhileWriting(t *testing.T) {
	t.Parallel()
	crossed := plantest.Crossed(plan.IPv4)
	with := func(ports int) *plan.Plan { // at the address in the middle of all others
		p := plan.New(crossed.Node, crossed.Settings)
		for i, sp := range crossed.Sorted(plan.IPv4) {
			some := *sp
			some.Frontends = slices.DeleteFunc(slices.Clone(sp.Frontends), func(f plan.Frontend) bool {
				switch f.Addr.String() {
				case "198.51.100.1":
					return i >= ports
				case "198.51.100.4":
					return true
				}
				return f.Kind == plan.ExternalIP && i >= 40
			})
			some.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} // One chain more to pass.
			for i := range some.Frontends {
				if some.Frontends[i].Kind == plan.ExternalIP {
					some.Frontends[i].Kind = plan.LoadBalancerIP
				}
			}
			p.Set(&some)
		}
		return p
	}
	few, many := with(20), with(1000)
	e, k := fakeEngine(plan.IPv4)
	e.options.CompactAbove = 0
	e.MaxNames = 5
	for _, p := range []*plan.Plan{few, many, few} {
		program(t, e, p, plan.Everything())
		same(t, "the kernel holds something else", textOfKernel(k), textOf(desired(p, plan.IPv4, e.options)))
	}
}

// TestNestedPrograms: plans with the deepest nesting are programmed by the kernel, on an empty node and as changes.
func TestNestedPrograms(t *testing.T) {
	t.Parallel()
	for name, planOf := range map[string]func(plan.Family) *plan.Plan{"pools": plantest.Pools, "crossed": plantest.Crossed} {
		t.Run(name, func(t *testing.T) {
			inAll(t, func(t *testing.T, v xtables.Variant, f plan.Family) {
				p, e := planOf(f), realEngine(t, v, f)
				e.options = Options{MasqueradeBit: 14, RandomFully: true}
				if err := e.Sync(t.Context(), p, plan.Everything()); err != nil {
					t.Fatalf("%.800v", err)
				}
				check := func(after string, p *plan.Plan) {
					t.Helper()
					same(t, fmt.Sprintf("after %s the kernel holds something else", after), ours(t, e.Kernel), textOf(desired(p, f, e.options)))
				}
				check("the first sync", p)
				fewer := plan.New(p.Node, p.Settings)
				gone := plan.Keys{}
				for i, sp := range p.Sorted(f) {
					if i%3 == 0 {
						fewer.Set(sp)
					} else {
						gone.Add(sp.Key)
					}
				}
				if err := e.Sync(t.Context(), fewer, plan.Only(gone)); err != nil {
					t.Fatalf("%.800v", err)
				}
				check("most have gone", fewer)
				if err := e.Sync(t.Context(), p, plan.Only(gone)); err != nil {
					t.Fatalf("%.800v", err)
				}
				check("they are back", p)
			})
		})
	}
}
