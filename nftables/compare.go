package nftables

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/backend"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// snapshot is what the kernel should hold at one time.
type snapshot struct {
	version
	layout   *layout
	current  *contents
	refused  []*plan.ServicePort // have their cluster IPs
	kinds    map[kind]bool
	others   map[id]value    // of no ServicePort that is written, beside cluster IPs
	leftover map[string]bool // chains that no kind uses any more
}

// known returns what the kernel should hold, which it shares with the engine; nil if that is not known.
func (e *engine) known() *snapshot {
	if e.current == nil {
		return nil
	}
	s := &snapshot{version: version{full: e.full}, layout: e.layout, current: e.current, kinds: e.kinds, others: fixed(e.kinds), leftover: e.leftover}
	maps.Copy(s.others, e.spareKinds)
	for _, r := range e.refused {
		maps.Copy(s.others, r.kept)
		s.refused = append(s.refused, r.sp)
	}
	return s
}

// expected yields the elements that should be in the kernel, and puts the kinds of ServicePorts into used.
func (s *snapshot) expected(used map[kind]bool) iter.Seq[element] {
	return func(yield func(element) bool) {
		for i, v := range s.others {
			if !yield(element{i, v}) {
				return
			}
		}
		users := make(map[netip.Addr]int, s.current.len())
		for _, sp := range s.refused {
			count(sp, users, 1)
		}
		for _, w := range s.current.all() {
			count(w.sp, users, 1)
		}
		for a := range users {
			if !yield(element{id: id{set: clusterIPs, key: string(a.AsSlice())}}) {
				return
			}
		}
		var list []element // for one after the other
		for _, w := range s.current.all() {
			list = s.layout.appendElements(list[:0], w, used)
			for _, el := range list {
				if el.set != clusterIPs && !yield(el) {
					return
				}
			}
		}
	}
}

// chains are those that should be in the kernel.
func (s *snapshot) chains() []nft.Chain {
	return append(s.layout.chains(), s.layout.kindChains(s.kinds)...)
}

// structure returns how a table, which may be nil, differs from that in what leads to elements.
func (s *snapshot) structure(is *nft.Content, sets []nft.Set) (found drift.Found) {
	differs := func(k drift.Kind, state drift.State, object string) {
		found = append(found, drift.Difference{Kind: k, State: state, Object: object})
	}
	table := tableName(s.layout.family)
	if is == nil {
		differs(drift.Table, drift.Missing, table)
		return found
	}
	if is.Dormant {
		differs(drift.Table, drift.Changed, table)
	}
	of := ofTable(s.layout.family)
	for _, c := range s.chains() {
		if have, there := is.Chains[c.Name]; !there {
			differs(drift.Chain, drift.Missing, c.Name+of)
		} else if !have.Holds(c) {
			differs(drift.Chain, drift.Changed, c.Name+of)
		}
	}
	for _, set := range sets {
		if !is.Sets[set.Name] {
			differs(drift.SetElement, drift.Missing, "all of set "+set.Name+of)
		}
	}
	return found
}

func tableName(f plan.Family) string {
	return nft.FamilyName(f) + " " + names.NFTables + " of nftables"
}

func ofTable(f plan.Family) string {
	return fmt.Sprintf(" of nftables table %s %s", nft.FamilyName(f), names.NFTables)
}

// compare compares the elements in the kernel with those that should be there, and returns what differs, and the kinds of ServicePorts.
// Elements of large sets are asked for by their keys; such a set is listed only where the kernel has another number of them.
//
// settled says that no sync is under way. Then what it returns is certain, and sets of endpoints are not listed for what nothing leads to, as a
// change would have to wait for that.
func (r *reading) compare(ctx context.Context, s *snapshot, settled bool) (out []write, used map[kind]bool, err error) {
	var asked [setCount]bool
	var listed []setID
	for set := range setCount {
		if asked[set] = !set.remembers() && r.counted(set) > r.mostListed; !asked[set] {
			listed = append(listed, set)
		}
	}
	have, err := r.digest(ctx, settled, listed)
	if err != nil {
		return nil, nil, err
	}
	used = map[kind]bool{}
	var found [setCount]int
	meet := func(want element, has value, is bool) error {
		if want.key == "" { // It is for all keys that no other element has.
			return r.noteFound(want, has, is)
		}
		if is {
			found[want.set]++
		}
		if w, differs := want.unlike(has, is); differs {
			out = append(out, w)
		}
		return nil
	}
	err = r.find(ctx, r.from, func(yield func(element) bool) {
		for set := range setCount {
			if asked[set] && !yield(element{id: id{set: set}}) {
				return
			}
		}
		for want := range s.expected(used) {
			if asked[want.set] {
				if !yield(want) {
					return
				}
				continue
			}
			is, same := have.take(want)
			if !is {
				_ = meet(want, value{}, false)
			} else if !same && !yield(want) {
				return
			}
		}
	}, meet)
	if err != nil {
		return nil, nil, err
	}
	if s.layout.partial { // What is left may belong to a ServicePort that is not known yet.
		clear(have)
	}
	if err := r.identify(ctx, settled, have, listed); err != nil {
		return nil, nil, err
	}
	listed = nil
	for set := range setCount {
		if !asked[set] || found[set] == r.counted(set) {
			continue
		}
		if settled && set.ofEndpoints() {
			r.unread[set] = true
		} else {
			listed = append(listed, set)
		}
	}
	if len(listed) > 0 {
		if have, err = r.digest(ctx, settled, listed); err != nil {
			return nil, nil, err
		}
		for want := range s.expected(map[kind]bool{}) {
			have.take(want)
		}
		if s.layout.partial {
			clear(have)
		}
		if err := r.identify(ctx, settled, have, listed); err != nil {
			return nil, nil, err
		}
	}
	maps.Copy(r.have, r.foreign)
	return append(out, removals(r.have, func(id) bool { return true })...), used, nil
}

// unlike returns the change of an element that is not as it should be.
func (want element) unlike(has value, is bool) (w write, differs bool) {
	if is && has == want.value {
		return write{}, false
	}
	v := want.value
	w = write{id: want.id, want: &v}
	if is {
		had := has
		w.had = &had
	}
	return w, true
}

// differences names elements that are not as they should be, in order.
func (e *engine) differences(unlike []write) (found drift.Found) {
	slices.SortFunc(unlike, func(a, b write) int { return compareIDs(a.id, b.id) })
	for _, w := range unlike {
		set := e.sets[w.set]
		d := drift.Difference{Kind: drift.SetElement, State: drift.Changed, Object: w.text(e.family) + " of set " + set.Name + ofTable(e.family)}
		switch {
		case w.had == nil:
			d.State = drift.Missing
		case w.want == nil:
			d.State = drift.Unexpected
		default:
			d.Want, d.Have = w.want.text(set), w.had.text(set)
		}
		found = append(found, d)
	}
	return found
}

// Verify compares what was written of a Service with the kernel, and the chains that lead there. It may run beside Sync and Compare,
// which wait for it for a moment at most.
func (b *Backend) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	return backend.Verify(ctx, b.Engines, svc)
}

// Verify implements backend.Verifier.
func (e *engine) Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error) {
	var s *snapshot
	err = backend.Known(ctx, &e.mu, func() bool {
		s = &snapshot{layout: e.layout, current: newContents(), kinds: maps.Clone(e.kinds)}
		if e.current == nil {
			return false
		}
		for k, w := range e.current.all() {
			if k.Service == svc {
				s.current.put(k, w)
			}
		}
		return true
	})
	if err != nil {
		return 0, nil, err
	}
	k, err := e.reader()
	if err != nil {
		return 0, nil, err
	}
	defer k.Close()
	content, err := k.Read(e.family, names.NFTables, e.sets, s.layout.chains())
	if err != nil {
		return 0, nil, err
	}
	want := slices.Collect(s.expected(map[kind]bool{}))
	things, found = len(s.chains())+len(e.sets)+len(want), s.structure(content, e.sets)
	if content == nil {
		return things, found, nil
	}
	var unlike []write
	err = e.find(ctx, k, slices.Values(want), func(want element, has value, is bool) error {
		if w, differs := want.unlike(has, is); differs {
			unlike = append(unlike, w)
		}
		return nil
	})
	return things, append(found, e.differences(unlike)...), err
}
