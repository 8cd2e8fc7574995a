package xtables

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"time"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
)

// A Reading reads a table that may change meanwhile.
type Reading struct {
	// Names are the chains that the table had when the reading began.
	Names []string
	// Chains returns some chains, each as it was at one moment since then. Those that are not there any more are left out. Chains that are
	// as in known share their rules with it.
	Chains func(ctx context.Context, names []string, known ...Content) (Content, error)
	// Digests returns a number for each of some chains, in their order, as nft.Digests does. It costs a small part of what it costs to read
	// them. It is nil where there are no such numbers.
	Digests func(names []string) ([]uint64, error)
	// End is to be called when all chains have been read but those that are as they were when they were read the last time.
	End func()
}

// ReadingOf returns a Reading of a table that has been read as a whole.
func ReadingOf(content Content) *Reading {
	return &Reading{
		Names: slices.Collect(maps.Keys(content)),
		Chains: func(_ context.Context, list []string, _ ...Content) (Content, error) {
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
// read between two of them. Before version 1.8.7, a program reads all tables whatever it is to list: to read some chains takes longer
// than to read all.
func (t *Program) Read(ctx context.Context, tbl names.Table) (*Reading, error) {
	switch {
	case t.Variant == Legacy:
		return t.readHashes(ctx, tbl)
	case slices.Compare(t.version.number[:], []int{1, 8, 7}) < 0:
		content, err := t.Save(ctx, tbl)
		if err != nil {
			return nil, err
		}
		return ReadingOf(content), nil
	}
	r, err := t.chainReader(tbl, nil)
	if err != nil {
		return nil, err
	}
	digests := func(names []string) ([]uint64, error) { return nft.Digests(t.Family, string(tbl), names) }
	return &Reading{Names: r.names, Chains: r.read, Digests: digests, End: r.end}, nil
}

// hashReader is a Reading of a table that is listed as a whole. Of the rules in chains of ours, it keeps a hash for each chain until they
// turn out to be others than the caller knows: the rules themselves would take megabytes, where nearly always all are as known.
type hashReader struct {
	*Program
	table  names.Table
	hashes map[string]uint64 // by chains of ours; 0 for one without rules
	others Content           // chains that are not ours
	again  Content           // the whole table, once it was needed
}

func (t *Program) readHashes(ctx context.Context, tbl names.Table) (*Reading, error) {
	h := &hashReader{Program: t, table: tbl, hashes: map[string]uint64{}, others: Content{}}
	from := reader{content: h.others, hashes: h.hashes, asText: func(chain string) bool { return !names.IsOurs(tbl, chain) }}
	whole, _, err := t.saveInto(ctx, &from, tbl) // It is never late.
	if err == nil && !whole {
		err = t.notPrinted(tbl)
	}
	if err != nil {
		return nil, err
	}
	list := slices.AppendSeq(slices.Collect(maps.Keys(h.others)), maps.Keys(h.hashes))
	return &Reading{Names: list, Chains: h.chains, End: func() {}}, nil
}

// chains implements Reading.Chains.
func (h *hashReader) chains(ctx context.Context, list []string, known ...Content) (Content, error) {
	out := make(Content, len(list))
	for _, name := range list {
		hash, ours := h.hashes[name]
		rules, there := h.others[name]
		if ours {
			rules = rulesOf(name, known)
			if there = hashOf(rules) == hash; !there && h.again == nil {
				var err error
				if h.again, err = h.Save(ctx, h.table, known...); err != nil {
					return nil, err
				}
			}
			if !there {
				rules, there = h.again[name]
			}
		}
		if there {
			out[name] = rules
		}
	}
	return out, nil
}

// rulesOf returns the rules of a chain as known by the first Content that has any.
func rulesOf(chain string, known []Content) []string {
	for _, k := range known {
		if rules := k[chain]; len(rules) > 0 {
			return rules
		}
	}
	return nil
}

var hashSeed = maphash.MakeSeed()

// hashOf returns a hash of rules; 0 for none.
func hashOf(rules []string) (hash uint64) {
	for _, r := range rules {
		hash = hashed(hash, maphash.String(hashSeed, r))
	}
	return hash
}

// hashed returns a hash of rules, given one of all but the last, and one of that. It depends on their order.
func hashed(hash, last uint64) uint64 { return hash*0x9e3779b97f4a7c15 + last }

// chainReader reads chains of a table of the nft variant.
type chainReader struct {
	*Program
	table    names.Table
	counters func(line string) // as in listByChain
	names    []string          // of the chains that there were at first
	there    map[string]bool   // those that there were at last
	most     int               // how many are read at a time
	limit    time.Duration     // how long that may take while others change something
	native   []string          // those with native rules, of what has been read, and as last reported of what has not
}

func (t *Program) chainReader(tbl names.Table, counters func(line string)) (*chainReader, error) {
	r := &chainReader{Program: t, table: tbl, counters: counters, most: partChains, limit: partTime}
	if err := r.list(); err != nil {
		return nil, fmt.Errorf("listing chains of table %s (%s): %w", tbl, t.Family, err)
	}
	r.names = slices.Collect(maps.Keys(r.there))
	t.nativeMu.Lock()
	defer t.nativeMu.Unlock()
	r.native = slices.DeleteFunc(slices.Clone(t.native[tbl]), func(name string) bool { return !r.there[name] })
	return r, nil
}

func (r *chainReader) list() error {
	list, err := nftChains(r.Family, r.table)
	if err != nil {
		return err
	}
	r.there = make(map[string]bool, len(list))
	for _, name := range list {
		r.there[name] = true
	}
	return nil
}

// partChains is how many chains are read at a time. If that takes longer than partTime, since others change something meanwhile, it is
// tried with half as many, for twice as long: where any run takes that long, the parts are not to become as small as can be. One chain
// alone is read for SaveTime.
const (
	partChains = 500
	partTime   = time.Second
)

// read lists chains.
func (r *chainReader) read(ctx context.Context, wanted []string, known ...Content) (Content, error) {
	out := Content{}
	for len(wanted) > 0 {
		some := wanted[:min(r.most, len(wanted))]
		limit := r.limit
		if len(some) == 1 {
			limit = r.SaveTime
		}
		var content Content
		late, err := inTime(ctx, limit, func(ctx context.Context) (err error) {
			content, err = r.some(ctx, some, known)
			return err
		})
		switch {
		case err == nil:
			maps.Copy(out, content)
			wanted = wanted[len(some):]
		case late && len(some) > 1:
			r.most, r.limit = len(some)/2, 2*r.limit
		default:
			return nil, fmt.Errorf("listing chains of table %s %s one by one: %w", nft.FamilyName(r.Family), r.table, err)
		}
	}
	return out, nil
}

// some lists chains in one go. If that fails, some may have gone.
func (r *chainReader) some(ctx context.Context, wanted []string, known []Content) (Content, error) {
	var failed error
	for range listTries {
		there := slices.DeleteFunc(slices.Clone(wanted), func(name string) bool { return !r.there[name] })
		content, native, err := r.listByChain(ctx, r.table, there, known, r.counters)
		if err == nil {
			read := func(name string) bool { return slices.Contains(wanted, name) }
			r.native = append(slices.DeleteFunc(r.native, read), native...)
			return content, nil
		}
		if failed = err; ctx.Err() != nil {
			break
		}
		if err := r.list(); err != nil {
			return nil, err
		}
	}
	return nil, failed
}

// end reports native rules.
func (r *chainReader) end() {
	slices.Sort(r.native)
	r.reportNative(r.table, slices.Compact(r.native))
}
