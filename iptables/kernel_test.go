package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// realEngine is an engine as New makes it, but for its options. The test must be in a namespace of its own.
func realEngine(t rapid.TB, v xtables.Variant, f plan.Family) *engine {
	t.Helper()
	nstest.Inside(t)
	tool, err := xtables.Find(v, f)
	require.NoError(t, err)
	e := newEngine(tool.Writer(nil), tool.Family, tool.RandomFully, Config{Log: slog.New(slog.DiscardHandler)})
	e.options = testOptions
	if ends, is := t.(interface{ Cleanup(func()) }); is {
		ends.Cleanup(tool.Close)
	}
	return e
}

// inVariants runs a test or benchmark by each variant of iptables, in a network namespace of its own.
func inVariants[T interface {
	testing.TB
	Run(name string, f func(T)) bool
}](t T, f func(t T, v xtables.Variant)) {
	t.Helper()
	in(t, variants, f)
}

var variants = []xtables.Variant{xtables.NFT, xtables.Legacy}

// in is inVariants for some of them.
func in[T interface {
	testing.TB
	Run(name string, f func(T)) bool
}](t T, some []xtables.Variant, f func(t T, v xtables.Variant)) {
	t.Helper()
	for _, v := range some {
		t.Run(string(v), func(t T) {
			if t, is := any(t).(*testing.T); is {
				t.Parallel()
			}
			nstest.Enter(t)
			f(t, v)
		})
	}
}

// inAll is inVariants for each family; with -short, for one variant of each.
func inAll(t *testing.T, test func(t *testing.T, v xtables.Variant, f plan.Family)) {
	t.Helper()
	for i, f := range plan.Families {
		some := variants
		if testing.Short() {
			some = variants[i : i+1]
		}
		t.Run(f.String(), func(t *testing.T) {
			in(t, some, func(t *testing.T, v xtables.Variant) { test(t, v, f) })
		})
	}
}

// program syncs, which is to succeed.
func program(t rapid.TB, e *engine, p *plan.Plan, change plan.Change) {
	t.Helper()
	require.NoError(t, e.Sync(context.Background(), p, change))
}

// same shows in what two texts differ, if they do.
func same(t rapid.TB, when, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n%s", when, diffLines(want, got))
	}
}

// testOptions make compact rules of most random plans and of all large ones.
var testOptions = Options{MasqueradeBit: 14, RandomFully: true, CompactAbove: 12}

// ours is the part of the kernel's tables that belongs to this package, as text in a stable order.
func ours(t rapid.TB, k xtables.Kernel) string {
	var out strings.Builder
	for _, tbl := range []names.Table{names.Filter, names.NAT} {
		held, err := k.Save(context.Background(), tbl)
		require.NoError(t, err)
		writeTable(&out, tbl, held)
	}
	return out.String()
}

func writeTable(out *strings.Builder, tbl names.Table, held xtables.Content) {
	fmt.Fprintf(out, "*%s\n", tbl)
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if names.Builtin(name) && len(held[name]) == 0 {
			continue // some variants show built-in chains that nobody uses
		}
		if name == names.KubeletFirewall {
			continue // shared with the kubelet, so it is never taken back; TestGuard is about it
		}
		fmt.Fprintf(out, ":%s\n", name)
		for _, r := range held[name] {
			if r == xtables.NewRule().Jump(names.KubeletFirewall) {
				continue
			}
			fmt.Fprintf(out, "%s\n", r)
		}
	}
}

// wantText is what ours is to be for a plan.
func wantText(p *plan.Plan, f plan.Family) string { return textOf(desired(p, f, testOptions)) }

func textOf(tables map[names.Table][]xtables.Chain) string {
	var out strings.Builder
	for _, tbl := range []names.Table{names.Filter, names.NAT} {
		held := xtables.Content{}
		for _, c := range tables[tbl] {
			held[c.Name] = c.Rules
		}
		writeTable(&out, tbl, held)
	}
	return out.String()
}

// TestKernelShowsWhatWasWritten holds the premise of comparing rules as text: what iptables-save prints of a rule is what
// the rule was written as.
func TestKernelShowsWhatWasWritten(t *testing.T) {
	inAll(t, func(t *testing.T, v xtables.Variant, f plan.Family) {
		rapid.Check(t, func(t *rapid.T) {
			p := plantest.Plans().Draw(t, "plan")
			e := realEngine(t, v, f)
			program(t, e, p, plan.Everything())
			same(t, "the kernel holds something else than was written", ours(t, e.Kernel), wantText(p, f))
			if e.current == nil {
				t.Fatal("the engine does not know what the kernel holds")
			}
			compareAgain(t, e, p)
		})
	})
}

// TestMangleOfOtherMode: the first sync removes what mode ipvs has left in table mangle where others have emptied the tables of this mode
// meanwhile, and makes no table mangle.
func TestMangleOfOtherMode(t *testing.T) {
	t.Parallel()
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		program(t, realEngine(t, v, plan.IPv4), &plan.Plan{}, plan.Everything())
		e := realEngine(t, v, plan.IPv4)
		exists, err := e.Kernel.Exists(names.Mangle)
		require.NoError(t, err)
		require.False(t, exists)
		require.NoError(t, e.Kernel.Restore(xtables.Text("*mangle\n:KUBE-IPVS-MARK - [0:0]\n:OTHERS - [0:0]\n-A INPUT -j KUBE-IPVS-MARK\n"+
			"-A INPUT -j OTHERS\n-A KUBE-IPVS-MARK -j DROP\nCOMMIT\n")))
		program(t, e, &plan.Plan{}, plan.Everything())
		held, err := e.Kernel.Save(t.Context(), names.Mangle)
		require.NoError(t, err)
		require.NotContains(t, held, "KUBE-IPVS-MARK")
		require.Contains(t, held, "OTHERS")
		require.Equal(t, []string{"-j OTHERS"}, held["INPUT"])
	})
}

// compareAgain compares everything once more, which is to find nothing and write nothing.
func compareAgain(t rapid.TB, e *engine, p *plan.Plan) {
	noted := &notedRestores{Kernel: e.Kernel}
	e.Kernel = noted
	defer func() { e.Kernel = noted.Kernel }()
	program(t, e, p, plan.Everything())
	if len(noted.texts) > 0 {
		t.Fatalf("a second comparison wrote\n%s", strings.Join(noted.texts, "\n"))
	}
	if !e.Compared || len(e.Found) > 0 {
		t.Fatalf("a second comparison found %+v", e.Found)
	}
}

// notedRestores is a kernel that notes down what is written.
type notedRestores struct {
	xtables.Kernel
	texts []string
}

func (n *notedRestores) Restore(input xtables.Input) error {
	n.texts = append(n.texts, input.String())
	return n.Kernel.Restore(input)
}

// diffLines shows the lines that only one of two texts has.
func diffLines(want, got string) string {
	count := map[string]int{}
	for _, l := range strings.Split(want, "\n") {
		count[l]++
	}
	for _, l := range strings.Split(got, "\n") {
		count[l]--
	}
	var out strings.Builder
	for _, l := range slices.Sorted(maps.Keys(count)) {
		switch {
		case count[l] > 0:
			fmt.Fprintf(&out, "- %s\n", l)
		case count[l] < 0:
			fmt.Fprintf(&out, "+ %s\n", l)
		}
	}
	return out.String()
}

// TestChainInUse: a chain that somebody else's rule leads to fails no sync when it is no longer wanted; it is emptied, and goes
// later than that rule.
func TestChainInUse(t *testing.T) {
	t.Parallel()
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		e := realEngine(t, v, plan.IPv4)
		p := plantest.Large(1, 3)
		sp := p.Sorted(plan.IPv4)[0]
		sync := func(change plan.Change) error { return e.Sync(t.Context(), p, change) }
		require.NoError(t, sync(plan.Everything()))
		name := ""
		for _, c := range newRules(p, plan.IPv4, testOptions).builder(sp).chains() {
			if strings.HasPrefix(c.Name, "KUBE-SVC-") {
				name = c.Name
			}
		}
		others := "*nat\n:OTHERS - [0:0]\n-A OTHERS -p tcp -j " + name + "\nCOMMIT\n"
		require.NoError(t, e.Kernel.Restore(xtables.Text(others)))
		p.Delete(sp.Key)
		_ = sync(plan.Only(plan.Keys{sp.Key: {}})) // It fails, and the next one compares everything.
		for range 2 {
			require.NoError(t, sync(plan.Everything()), "a sync with a chain in use")
			held, err := e.Kernel.Save(t.Context(), names.NAT)
			if rules, is := held[name]; err != nil || !is || len(rules) > 0 || len(held["OTHERS"]) != 1 {
				t.Errorf("the chain in use is there: %v, with rules %q; the other program's has %q; %v", is, rules, held["OTHERS"], err)
			}
		}
		compareAgain(t, e, p)
		require.NoError(t, e.Kernel.Restore(xtables.Text("*nat\n:OTHERS - [0:0]\n-X OTHERS\nCOMMIT\n")))
		require.NoError(t, sync(plan.Everything()))
		same(t, "in the end", ours(t, e.Kernel), wantText(p, plan.IPv4))
	})
}
