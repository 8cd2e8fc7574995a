package xtables

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
)

// A Reading reads a table that may change meanwhile.
type Reading struct {
	// Names are the chains that the table had when the reading began.
	Names []string
	// Chains returns some chains, each as it was at one moment since then. Those that are not there any more are left out.
	Chains func(ctx context.Context, names []string) (Content, error)
	// End is to be called when all chains have been read.
	End func()
}

// ReadingOf returns a Reading of a table that has been read as a whole.
func ReadingOf(content Content) *Reading {
	return &Reading{
		Names: slices.Collect(maps.Keys(content)),
		Chains: func(_ context.Context, list []string) (Content, error) {
			out := make(Content, len(list))
			for _, name := range list {
				if rules, exists := content[name]; exists {
					out[name] = rules
				}
			}
			return out, nil
		},
		End: func() {},
	}
}

// Read begins to read a table beside Restore. The legacy variant reads it at once, without the xtables lock. iptables-nft-save begins
// anew whenever anything in nf_tables has changed, and so does not end while changes come one after the other; a few hundred chains are
// read between two of them.
func (t *Program) Read(ctx context.Context, tbl names.Table) (*Reading, error) {
	if t.Variant == Legacy {
		content, err := t.Save(ctx, tbl)
		if err != nil {
			return nil, err
		}
		return ReadingOf(content), nil
	}
	list, err := nftChains(t.Family, tbl)
	if err != nil {
		return nil, fmt.Errorf("listing chains of table %s (%s): %w", tbl, t.Family, err)
	}
	r := &chainReader{Program: t, table: tbl}
	r.note(list)
	return &Reading{Names: list, Chains: r.read, End: func() {
		slices.Sort(r.native)
		t.reportNative(tbl, slices.Compact(r.native))
	}}, nil
}

// chainReader reads chains of a table of the nft variant.
type chainReader struct {
	*Program
	table  names.Table
	there  map[string]bool // the chains that there were at last
	native []string        // those with native rules, of what has been read
}

func (r *chainReader) note(list []string) {
	r.there = make(map[string]bool, len(list))
	for _, name := range list {
		r.there[name] = true
	}
}

// read lists chains. If that fails, some may have gone.
func (r *chainReader) read(ctx context.Context, wanted []string) (Content, error) {
	var failed error
	for range listTries {
		some := slices.DeleteFunc(slices.Clone(wanted), func(name string) bool { return !r.there[name] })
		content, native, err := r.listByChain(ctx, r.table, some, nil)
		if err == nil {
			r.native = append(r.native, native...)
			return content, nil
		}
		failed = err
		list, err := nftChains(r.Family, r.table)
		if err != nil {
			failed = err
			break
		}
		r.note(list)
	}
	return nil, fmt.Errorf("listing chains of table %s %s one by one: %w", nft.FamilyName(r.Family), r.table, failed)
}
