package xtables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Nothing is desired where nothing of ours, of whatever mode, is to be left.
var Nothing = Desired{Stale: names.IsOurs, StaleJump: names.IsOurs}

// Cleanup removes all rules that this program or kube-proxy keeps, in any mode, in these variants and both families; what they
// share with the kubelet stays, and so does everything of anybody else's. It returns a line for each thing that it removes, or would
// remove if dry is set. A variant without tables in the kernel holds nothing. Without the programs of a variant nothing of it can be
// removed: that is an error for variant nft if anything is there, and for variant legacy can't be known.
func Cleanup(ctx context.Context, dry bool, variants ...Variant) ([]string, error) {
	var out []string
	var errs []error
	for _, v := range variants {
		for _, f := range plan.Families {
			tables, err := presentTables(v, f)
			if err != nil {
				errs = append(errs, err)
			}
			if len(tables) == 0 {
				continue
			}
			p, err := Find(v, f)
			if err != nil {
				if v == NFT && nftHolds(f, tables) {
					errs = append(errs, fmt.Errorf("chains of variant nft stay: %w", err))
				}
				continue
			}
			list, err := p.Writer(nil).Cleanup(ctx, tables, dry)
			for _, what := range list {
				out = append(out, fmt.Sprintf("%s, %s", what, p.Describe()))
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", p.Describe(), err))
			}
		}
	}
	return out, errors.Join(errs...)
}

// nftHolds reports whether tables of variant nft have chains that Cleanup removes.
func nftHolds(f plan.Family, tables []names.Table) bool {
	return slices.ContainsFunc(tables, func(t names.Table) bool {
		chains, _ := nftChains(f, t) // Cleanup's caller is told of the missing program; an error here adds nothing to that.
		return slices.ContainsFunc(chains, func(chain string) bool { return names.IsOurs(t, chain) })
	})
}

// Cleanup lists what is ours in tables and, unless dry is set, removes it.
func (w *Writer) Cleanup(ctx context.Context, tables []names.Table, dry bool) ([]string, error) {
	var out []string
	var errs []error
	for _, t := range tables {
		content, err := w.Kernel.Save(ctx, t)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		changes := Diff(t, Nothing, content)
		for _, c := range changes {
			switch c.Op {
			case Delete:
				out = append(out, fmt.Sprintf("rule in %s of table %s that leads to %s", c.Chain, t, Target(c.Rules[0])))
			case Empty, Leave, Remove:
				out = append(out, fmt.Sprintf("chain %s of table %s", c.Chain, t))
			}
		}
		if !dry {
			errs = append(errs, w.clean(ctx, t, content, changes)...)
		}
	}
	return out, errors.Join(errs...)
}

// clean makes changes that leave nothing of ours in a table but chains that others lead to, each of which is an error.
func (w *Writer) clean(ctx context.Context, t names.Table, content Content, changes []Change) (errs []error) {
	actual := map[names.Table]Content{t: content}
	stays := func(c Change, err error) {
		why := ""
		if from := leadingTo(content, c.Chain); len(from) > 0 {
			why = ", since rules in " + strings.Join(from, ", ") + " lead to it"
		}
		errs = append(errs, fmt.Errorf("chain %s of table %s stays%s: %w", c.Chain, t, why, err))
	}
	first := slices.IndexFunc(changes, func(c Change) bool { return c.Op >= Empty })
	if first < 0 {
		first = len(changes)
	}
	if err := w.Write(ctx, actual, changes[:first]); err != nil {
		return append(errs, err)
	}
	// What had to be emptied is to go if the kernel takes it: a rule that is there may have been read wrongly.
	for i := range changes {
		if op := changes[i].Op; op == Empty || op == Leave {
			changes[i].Op = Remove
		}
	}
	return append(errs, w.Prune(ctx, actual, changes[first:], stays))
}

// leadingTo lists the chains with rules that lead to another one.
func leadingTo(content Content, to string) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(content)) {
		if slices.ContainsFunc(content[name], func(r string) bool { return Target(r) == to }) {
			out = append(out, name)
		}
	}
	return out
}
