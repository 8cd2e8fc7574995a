package nftables

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

func readTable(t rapid.TB, e *engine) *Table {
	have, err := Read(nil, e.family, e.options)
	require.NoError(t, err)
	return have
}

// TestDiff: after a sync, the kernel does not differ from the plan, whatever it held before; and what it then differs in from the next plan is
// what that plan's sync writes, but for what leads nowhere. An engine that remembers what it wrote may number endpoints in another way: where
// a Service has other frontends, its endpoints keep their numbers, which the kernel alone does not tell.
func TestDiff(t *testing.T) {
	nstest.Enter(t)
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(rt, "family")
		_ = Cleanup()
		e, _ := testEngine(t, f)
		defer e.forget()
		plans := rapid.SliceOfN(plantest.Plans(), 2, 4).Draw(rt, "plans")
		for i, p := range plans {
			have := readTable(rt, e)
			want := Planned(p, f, e.options, have)
			predicted := Diff(f, have, want)
			if i == 0 && (have != nil || len(predicted) == 0 || predicted[0].Kind != drift.Table) {
				rt.Fatalf("without a table: %q", predicted)
			}
			change := plan.Everything()
			if i > 0 && rapid.Bool().Draw(rt, "only what changed") {
				change = plan.Only(plantest.Differing(plans[i-1], p))
			}
			restarted := i == 0 || change.All() && rapid.Bool().Draw(rt, "restarted")
			if restarted {
				e.forget()
			}
			synced(rt, e, p, change)
			now := readTable(rt, e)
			if left := Diff(f, now, want); len(left) > 0 && restarted {
				rt.Fatalf("the sync did otherwise than was predicted: %q", left)
			}
			if left := Diff(f, now, Planned(p, f, e.options, now)); len(left) > 0 {
				rt.Fatalf("after the sync, this differs: %q", left)
			}
			for _, h := range predicted {
				if strings.HasSuffix(h.Object, "endpoints") && len(h.Services) != 1 {
					rt.Fatalf("%s: belongs to %q", h.Object, h.Services)
				}
			}
		}
	})
}

// TestDiffOfDamage: what other programs change is shown by exactly the lines that are missing or too many.
func TestDiffOfDamage(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(3, 2)
	synced(t, e, p, plan.Everything())
	for _, tc := range []struct{ nft, repair, object, service, removed, added string }{
		{"add element ip nodeproxy cluster-ips { 192.0.2.1 }", "delete element ip nodeproxy cluster-ips { 192.0.2.1 }",
			"set cluster-ips", "", "192.0.2.1", ""},
		{"add element ip nodeproxy services { * : 1:1 }", "delete element ip nodeproxy services { * }", "map services", "", "* : 1:1", ""},
		{"add counter ip nodeproxy mine", "delete counter ip nodeproxy mine", "counter mine", "", "counter mine # of another program", ""},
		{"add set ip nodeproxy mine { type mark; }", "delete set ip nodeproxy mine", "set mine", "", "set mine # of another program", ""},
		{"add rule ip nodeproxy to-services drop", "", "chain to-services", "", "\t# a rule that nodeproxy would not write here", ""},
		{"add chain ip nodeproxy mine { drop; }", "", "chain mine", "", "chain mine {|\t# rules: 1|}", ""},
		{"add table ip nodeproxy { flags dormant; }", "", "table ip nodeproxy", "", "table ip nodeproxy # in another form, or dormant: it is created anew",
			"table ip nodeproxy"},
	} {
		if out, err := exec.Command("nft", tc.nft).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v: %s", tc.nft, err, out)
		}
		have := readTable(t, e)
		hunks := Diff(plan.IPv4, have, Planned(p, plan.IPv4, e.options, have))
		if len(hunks) == 0 || hunks[0].Kind != drift.Table && len(hunks) != 1 {
			t.Fatalf("after %q: %q", tc.nft, hunks)
		}
		var out strings.Builder
		require.NoError(t, (&drift.Unified{W: &out}).Print(hunks[0]))
		var removed, added []string
		for line := range strings.Lines(out.String()) {
			line = strings.TrimSuffix(line, "\n")
			if rest, is := strings.CutPrefix(line, "-"); is && !strings.HasPrefix(rest, "-- ") {
				removed = append(removed, rest)
			} else if rest, is := strings.CutPrefix(line, "+"); is && !strings.HasPrefix(rest, "++ ") {
				added = append(added, rest)
			}
		}
		if hunks[0].Object != tc.object || strings.Join(removed, "|") != tc.removed || strings.Join(added, "|") != tc.added {
			t.Errorf("after %q:\n%s", tc.nft, out.String())
		}
		if tc.repair != "" {
			if out, err := exec.Command("nft", tc.repair).CombinedOutput(); err != nil {
				t.Fatalf("nft %s: %v: %s", tc.repair, err, out)
			}
			continue
		}
		synced(t, e, p, plan.Everything())
	}
}
