package nftables

import (
	"context"
	"net/netip"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// write is the change of one element. had is what the kernel has, and want what it is to have; nil for nothing.
type write struct {
	id
	had, want *value
}

// transactions gathers writes. Those of one group are made at once.
type transactions struct {
	engine *engine
	ctx    context.Context
	first  *nft.Batch // begins the first of them
	writes []write
	// unbounded has everything done in a single transaction.
	unbounded bool
}

// group adds writes to the transaction that is being gathered, or to the next one if that is full.
func (t *transactions) group(writes []write) error {
	if !t.unbounded && len(t.writes) > 0 && len(t.writes)+len(writes) > t.engine.most {
		if err := t.commit(); err != nil {
			return err
		}
	}
	t.writes = append(t.writes, writes...)
	return nil
}

// commit carries out what has been gathered.
func (t *transactions) commit() error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	b := t.first
	if b == nil {
		b = nft.NewBatch(t.engine.family, names.NFTables)
	}
	gone, fresh := map[setID][]nft.Element{}, map[setID][]nft.Element{}
	for _, w := range t.writes {
		if w.had != nil {
			gone[w.set] = append(gone[w.set], w.element(value{}))
		}
		if w.want != nil {
			fresh[w.set] = append(fresh[w.set], w.element(*w.want))
		}
	}
	for s := range setCount {
		b.DeleteElements(t.engine.sets[s], gone[s])
	}
	for s := range setCount {
		b.AddElements(t.engine.sets[s], fresh[s])
	}
	t.first, t.writes = nil, t.writes[:0]
	err := t.engine.kernel.Commit(b)
	if err != nil {
		t.engine.failed(t.engine.family, false)
	}
	return err
}

// rest makes the last writes: what leads packets to others, and the removal of what is not wanted, which begins with what leads to it.
func (t *transactions) rest(lead, gone []write) error {
	slices.SortFunc(gone, func(a, b write) int { return compareIDs(a.id, b.id) })
	for _, list := range [][]write{lead, gone} {
		for some := range slices.Chunk(list, max(t.engine.most, 1)) {
			if err := t.group(some); err != nil {
				return err
			}
		}
	}
	return t.commit()
}

// differing are the writes that make what is had what is wanted, in order. Elements that are only had are left.
func differing(had, want map[id]value) []write {
	var out []write
	for i, v := range want {
		if i.set == clusterIPs {
			continue // They are shared.
		}
		was, is := had[i]
		switch {
		case is && was == v:
			continue
		case is:
			out = append(out, write{i, &was, &v})
		default:
			out = append(out, write{i, nil, &v})
		}
	}
	slices.SortFunc(out, func(a, b write) int { return compareIDs(a.id, b.id) })
	return out
}

// ranges are the elements of source-ranges by frontend.
type ranges map[string][]id

func rangesByFrontend(f plan.Family, of map[id]value) ranges {
	out := ranges{}
	for i := range of {
		if i.set == sourceRanges {
			frontend := i.key[:4*nameRegisters(f)]
			out[frontend] = append(out[frontend], i)
		}
	}
	return out
}

// without are the writes that remove what is had of the frontends in want and is not wanted; it takes that out of had. The kernel takes
// no ranges that overlap, so what is there goes in the same transaction.
func (r ranges) without(want, had map[id]value) []write {
	if len(r) == 0 {
		return nil
	}
	var out []write
	for i := range want {
		if i.set != limited {
			continue
		}
		for _, old := range r[i.key] {
			v, is := had[old]
			if _, wanted := want[old]; is && !wanted {
				delete(had, old)
				out = append(out, write{id: old, had: &v})
			}
		}
	}
	return out
}

// count adds to how many frontends there are by cluster IP.
func count(sp *plan.ServicePort, users map[netip.Addr]int, by int) {
	if sp == nil {
		return
	}
	for _, fe := range sp.Frontends {
		if fe.Kind == plan.ClusterIP {
			users[fe.Addr] += by
		}
	}
}
