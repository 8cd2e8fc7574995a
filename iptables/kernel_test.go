package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
)

func realEngine(t rapid.TB, v Variant, f plan.Family) *engine {
	tool, err := newTool(v, f)
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{tool: tool, family: f, options: testOptions, log: slog.New(slog.DiscardHandler)}
	if v == NFT {
		e.batch = maxNames
	}
	return e
}

// testOptions make compact rules of most random plans and of all large ones.
var testOptions = Options{MasqueradeBit: DefaultMasqueradeBit, RandomFully: true, CompactAbove: 12}

// ours is the part of the kernel's tables that belongs to this package, as text in a stable order.
func ours(t rapid.TB, k kernel) string {
	var out strings.Builder
	for _, tbl := range []table{tableFilter, tableNAT} {
		held, err := k.save(context.Background(), tbl)
		if err != nil {
			t.Fatal(err)
		}
		writeTable(&out, tbl, held)
	}
	return out.String()
}

func writeTable(out *strings.Builder, tbl table, held kernelTable) {
	fmt.Fprintf(out, "*%s\n", tbl)
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if builtin(name) && len(held[name]) == 0 {
			continue // some variants show built-in chains that nobody uses
		}
		if name == chainFirewall {
			continue // shared with the kubelet, so it is never taken back; TestGuard is about it
		}
		fmt.Fprintf(out, ":%s\n", name)
		for _, r := range held[name] {
			if r == newRule().jump(chainFirewall) {
				continue
			}
			fmt.Fprintf(out, "%s\n", r)
		}
	}
}

// wantText is what ours is to be for a plan.
func wantText(p *plan.Plan, f plan.Family) string {
	var out strings.Builder
	tables := desired(p, f, testOptions)
	for _, tbl := range []table{tableFilter, tableNAT} {
		held := kernelTable{}
		for _, c := range tables[tbl] {
			held[c.name] = c.rules
		}
		writeTable(&out, tbl, held)
	}
	return out.String()
}

// TestKernelShowsWhatWasWritten holds the premise of comparing rules as text: what iptables-save prints of a rule is what
// the rule was written as.
func TestKernelShowsWhatWasWritten(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		for _, f := range plan.Families {
			t.Run(fmt.Sprintf("%s %s", v, f), func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func() {
					rapid.Check(t, func(t *rapid.T) {
						p := plantest.Plans().Draw(t, "plan")
						e := realEngine(t, v, f)
						if err := e.sync(context.Background(), p, nil); err != nil {
							t.Fatal(err)
						}
						if got, want := ours(t, e.tool), wantText(p, f); got != want {
							t.Fatalf("the kernel holds something else than was written:\n%s", diffLines(want, got))
						}
						if e.current == nil {
							t.Fatal("the engine does not know what the kernel holds")
						}
					})
				})
			})
		}
	}
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
