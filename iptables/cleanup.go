package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Cleanup removes all rules that this program or kube-proxy keeps, in any mode, in these variants and both families; what they
// share with the kubelet stays, and so does everything of anybody else's. It returns a line for each thing that it removes, or would
// remove if dry is set. A variant without programs, or without tables in the kernel, holds nothing.
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
			t, err := newTool(v, f)
			if err != nil {
				continue
			}
			x := &FixedTables{tool: t, kernel: t}
			if v == NFT {
				x.batch = maxNames
			}
			list, err := x.cleanup(ctx, tables, dry)
			for _, what := range list {
				out = append(out, fmt.Sprintf("%s, %s", what, t.describe()))
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", t.describe(), err))
			}
		}
	}
	return out, errors.Join(errs...)
}

// presentTables are those that the kernel has. A legacy program that is asked for another one makes it, and an nft program fails
// where the kernel has no nf_tables.
func presentTables(v Variant, f plan.Family) ([]names.Table, error) {
	var present []string
	var err error
	if v == NFT {
		present, err = nftTables(f)
	} else {
		present = legacyTables(f)
	}
	return slices.DeleteFunc(slices.Clone(fixedTables), func(t names.Table) bool { return !slices.Contains(present, string(t)) }), err
}

func legacyTables(f plan.Family) []string {
	name := "/proc/net/ip_tables_names"
	if f == plan.IPv6 {
		name = "/proc/net/ip6_tables_names"
	}
	raw, _ := os.ReadFile(name) // Where it can't be read, there are none.
	return strings.Fields(string(raw))
}

func nftTables(f plan.Family) ([]string, error) {
	var list []*nftables.Table
	c, err := nftables.New()
	if err == nil {
		list, err = c.ListTablesOfFamily(nftables.TableFamily(nfProtocol(f)))
	}
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return nil, nil // The kernel has no netfilter sockets, or nothing behind them that knows of tables.
	}
	if err != nil {
		return nil, fmt.Errorf("listing the tables of nf_tables for %s: %w", f, err)
	}
	var names []string
	for _, t := range list {
		names = append(names, t.Name)
	}
	return names, nil
}

// cleanup lists what is ours in tables and, unless dry is set, removes it.
func (x *FixedTables) cleanup(ctx context.Context, tables []names.Table, dry bool) ([]string, error) {
	var out []string
	var errs []error
	for _, t := range tables {
		held, err := x.kernel.save(ctx, t)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(held)) {
			for _, r := range held[name] {
				if names.Builtin(name) && names.IsOurs(t, jumpTarget(r)) {
					out = append(out, fmt.Sprintf("rule in %s of table %s that leads to %s", name, t, jumpTarget(r)))
				}
			}
		}
		stale := obsolete(t, held, nil)
		for _, name := range stale {
			out = append(out, fmt.Sprintf("chain %s of table %s", name, t))
		}
		if dry {
			continue
		}
		if block, n := fixedBlock(t, held, &Fixed{}); n > 0 {
			errs = append(errs, x.kernel.restore(block))
		}
		err = removeChains(x.kernel.restore, t, stale, x.batch)
		if errRefused(err) {
			err = x.removeOthers(ctx, t, err)
		}
		errs = append(errs, err)
	}
	return out, errors.Join(errs...)
}

// removeOthers removes what can be removed of the chains that are still held after the kernel has refused to. One that somebody
// else's rule leads to stays, empty, and is named in the error.
func (x *FixedTables) removeOthers(ctx context.Context, t names.Table, refused error) error {
	held, err := x.kernel.save(ctx, t)
	if err != nil {
		return errors.Join(refused, err)
	}
	if x.kernel.restore(text([]block{{table: t}})) != nil {
		return refused // Nothing at all is taken, so there is no use in a search for what is not.
	}
	var errs []error
	err = x.removeByHalves(ctx, t, obsolete(t, held, nil), func(name string, err error) {
		why := ""
		if from := leadingTo(held, name); len(from) > 0 {
			why = ", since rules in " + strings.Join(from, ", ") + " lead to it"
		}
		errs = append(errs, fmt.Errorf("chain %s of table %s stays%s: %w", name, t, why, err))
	})
	return errors.Join(append(errs, err)...)
}

// removeByHalves removes empty chains all together, and if that is refused, either half of them. It calls stays for each that the
// kernel does not remove. What else fails ends it.
func (x *FixedTables) removeByHalves(ctx context.Context, t names.Table, names []string, stays func(name string, err error)) error {
	if err := ctx.Err(); err != nil || len(names) == 0 {
		return err
	}
	if x.batch == 0 || len(names) <= x.batch {
		err := x.kernel.restore(text([]block{{table: t, removes: names}}))
		if !errRefused(err) {
			return err
		}
		if len(names) == 1 {
			stays(names[0], err)
			return nil
		}
	}
	half := len(names) / 2
	if err := x.removeByHalves(ctx, t, names[:half], stays); err != nil {
		return err
	}
	return x.removeByHalves(ctx, t, names[half:], stays)
}

// leadingTo lists the chains with rules that lead to another one.
func leadingTo(held kernelTable, to string) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if slices.ContainsFunc(held[name], func(r string) bool { return jumpTarget(r) == to }) {
			out = append(out, name)
		}
	}
	return out
}
