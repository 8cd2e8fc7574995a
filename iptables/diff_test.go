package iptables

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/iptables/common"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// patched applies differences to what tables hold, as a person would who reads them.
func patched(t *rapid.T, actual map[names.Table]xtables.Content, hunks []drift.Hunk) map[names.Table]xtables.Content {
	out := map[names.Table]xtables.Content{}
	for tbl, content := range actual {
		out[tbl] = maps.Clone(content)
	}
	for _, h := range hunks {
		table, chain, _ := strings.Cut(strings.TrimPrefix(h.Object, "*"), " ")
		content := out[names.Table(table)]
		rules := func(lines []string) (list []string) {
			for _, line := range lines {
				if rest, is := strings.CutPrefix(line, "-A "+chain+" "); is {
					list = append(list, rest)
				}
			}
			return list
		}
		switch {
		case h.Kind == drift.Rule:
			for _, r := range rules(h.Have) {
				i := slices.Index(content[chain], r)
				if i < 0 {
					t.Fatalf("%s has no rule %s", h.Object, r)
				}
				content[chain] = slices.Delete(slices.Clone(content[chain]), i, i+1)
			}
			for _, r := range rules(h.Want) {
				content[chain] = slices.Insert(slices.Clone(content[chain]), 0, r)
			}
		case len(h.Want) == 0:
			delete(content, chain)
		default:
			if have := rules(h.Have); !slices.Equal(have, content[chain]) {
				t.Fatalf("%s holds %q, and not %q", h.Object, content[chain], have)
			}
			content[chain] = rules(h.Want)
		}
	}
	return out
}

// TestDiff: what Hunks shows between the kernel and a plan is what a sync changes, and after the sync there is nothing to show.
func TestDiff(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f)
		for i, p := range rapid.SliceOfN(plantest.Plans(), 2, 3).Draw(t, "plans") {
			list := func() []drift.Hunk {
				d := WithGuard(Desired(p, f, e.options), p, f, k.Tables)
				hunks := xtables.Hunks(f, d, k.Tables)
				common.Label(hunks, d.Content(), k.Tables)
				return hunks
			}
			hunks := list()
			want := patched(t, k.Tables, hunks)
			program(t, e, p, plan.Everything())
			before := textOfKernel(k)
			k.Tables = want
			if after := textOfKernel(k); after != before {
				t.Fatalf("step %d: the sync made of the tables\n%s", i, diffLines(after, before))
			}
			if left := list(); len(left) > 0 {
				t.Fatalf("step %d: after the sync, this differs: %q", i, left)
			}
			for _, h := range hunks {
				_, chain, _ := strings.Cut(h.Object, " ")
				if strings.HasPrefix(chain, names.PrefixEndpoint) && len(h.Services) != 1 {
					t.Fatalf("%s belongs to %q", h.Object, h.Services)
				}
			}
		}
	})
}
