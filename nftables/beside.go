package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Compare compares everything with the kernel, and repairs elements that differ. It may run beside Sync, which waits for it for some
// milliseconds at most. It reports whether a sync of everything has to follow: to repair more than that, or because nothing is known.
//
// Families are compared one after the other. Both at once would end sooner only where both have many elements, and take a second processor from
// changes and from everything else on the node for work that nobody waits for, and that is limited to a small part of the time anyway.
func (b *Backend) Compare(ctx context.Context) (again bool) {
	begin := time.Now()
	var found drift.Found
	var failed error
	for _, e := range b.Engines {
		some, more, err := e.compareBeside(ctx)
		if ctx.Err() != nil {
			return false
		}
		found, again = append(found, some...), again || more || err != nil
		if err != nil {
			e.log.Debug("comparing beside syncs", "family", e.family, "error", err)
			failed = err
		}
	}
	// Otherwise the sync that follows reports.
	if b.Compared != nil && (len(found) > 0 || !again) {
		b.Compared(drift.Report{Found: found, Took: time.Since(begin), Err: failed})
	}
	return again
}

// mostBeside is how many elements are repaired beside syncs.
const mostBeside = 200

// spareKindsMost is how many kinds may have a chain that no Service uses any more before a sync of everything removes them.
const spareKindsMost = 64

// snapshot is what the kernel should hold at one time.
type snapshot struct {
	layout  *layout
	full    int
	current map[plan.Key]written
	kinds   map[kind]bool
	others  map[id]value // of no ServicePort that is written
	// leftover are chains that no kind uses any more.
	leftover map[string]bool
	cluster  []*plan.ServicePort
}

// snapshot begins a comparison; nil if it is not known what the kernel should hold.
func (e *engine) snapshot() *snapshot {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current == nil || e.kernel == nil {
		return nil
	}
	s := &snapshot{layout: e.layout, full: e.full, current: maps.Clone(e.current), kinds: maps.Clone(e.kinds), others: fixed(e.kinds),
		leftover: maps.Clone(e.leftover)}
	maps.Copy(s.others, e.spareKinds)
	for _, r := range e.refused {
		if !time.Now().Before(r.again) {
			return nil // It has to be tried again.
		}
		maps.Copy(s.others, r.kept)
		s.cluster = append(s.cluster, r.sp)
	}
	e.touched = map[id]bool{}
	return s
}

// compareBeside is Compare for one family. The kernel lists a set in parts, between which it may change; so a listing only shows where to
// look. What seems to differ is read once more by its key, and what syncs have written meanwhile is left to the next comparison.
func (e *engine) compareBeside(ctx context.Context) (found drift.Found, again bool, err error) {
	s := e.snapshot()
	if s == nil {
		return nil, true, nil
	}
	defer func() {
		e.mu.Lock()
		e.touched = nil
		e.mu.Unlock()
		if fault := recover(); fault != nil { // What is in the table is not only of this program's making.
			again, err = true, e.panicked(fault)
		}
	}()
	k, err := e.reader()
	if err != nil {
		return nil, true, err
	}
	defer k.Close()
	chains := append(s.layout.chains(), s.layout.kindChains(s.kinds)...)
	content, err := k.Read(e.family, names.NFTables, e.sets, chains)
	if err != nil {
		return nil, true, err
	}
	if content == nil || content.Dormant || len(structure(s.layout, s.kinds, e.sets, content)) > 0 {
		return nil, true, nil
	}
	e.noteClients(content.Counts)
	in := intrudersIn(content, e.sets, namesOf(chains, s.leftover))
	if again, err := e.expel(s, &in, intruders.disarm); again || err != nil {
		return nil, true, err
	}
	chainsOnly := intruders{chains: in.chains}
	in.chains = nil
	found = in.differences(e.family)
	more, again, err := e.compareElements(ctx, k, s)
	if found = append(found, more...); again || err != nil {
		return found, again, err
	}
	if again, err := e.expel(s, &chainsOnly, intruders.remove); again || err != nil { // An element that is gone now may have led to one.
		return found, true, err
	}
	return append(found, chainsOnly.differences(e.family)...), false, nil
}

// expel makes a transaction against what other programs have put into the table. It takes out of in what a sync has written since the
// snapshot. again says that a sync has to find out what the kernel holds.
func (e *engine) expel(s *snapshot, in *intruders, how func(intruders, *nft.Batch)) (again bool, err error) {
	if in.empty() {
		return false, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current == nil || e.full != s.full { // A sync has compared everything, or failed.
		*in = intruders{}
		return e.current == nil, nil
	}
	known := namesOf(append(e.layout.chains(), e.layout.kindChains(e.kinds)...), e.leftover)
	for _, list := range []*[]string{&in.bases, &in.chains} {
		*list = slices.DeleteFunc(*list, func(name string) bool { return known[name] })
	}
	b := nft.NewBatch(e.family, names.NFTables)
	how(*in, b)
	if err := e.kernel.Commit(b); err != nil {
		e.failed(e.family, false)
		if r := (*nft.RefusedError)(nil); !errors.As(err, &r) {
			e.forget()
		}
		return true, err
	}
	return false, nil
}

// compareElements compares elements, and repairs those that differ.
func (e *engine) compareElements(ctx context.Context, k kernel, s *snapshot) (found drift.Found, again bool, err error) {
	suspects, used, err := e.suspects(ctx, k, s)
	if err != nil {
		return nil, true, err
	}
	if len(s.kinds) > len(used)+spareKindsMost {
		return nil, true, nil
	}
	differ := 0
	for i, want := range suspects {
		if err := ctx.Err(); err != nil {
			return nil, false, err
		}
		_, same, err := e.look(k, i, want)
		if err != nil {
			return nil, true, err
		}
		if same {
			delete(suspects, i)
		} else if differ++; differ > mostBeside && !e.isTouched(i) {
			return nil, true, nil
		}
	}
	return e.repair(ctx, s, suspects)
}

// suspects returns the elements that differ in a listing, with what they should be; nil for those that should not be there. It also
// returns the kinds in use.
func (e *engine) suspects(ctx context.Context, k kernel, s *snapshot) (map[id]*value, map[kind]bool, error) {
	have, err := e.sample(ctx, k)
	if err != nil {
		return nil, nil, err
	}
	out, used := map[id]*value{}, map[kind]bool{}
	expected := s.others
	meet := func(list map[id]value) {
		for i, want := range list {
			if is, there := have[i]; !there || is != want {
				out[i] = &want
			}
			delete(have, i)
		}
	}
	mine := map[id]value{}
	for _, w := range s.current {
		clear(mine)
		s.layout.fill(w, mine, used)
		for i := range mine {
			if i.set == clusterIPs { // They are shared.
				expected[i] = value{}
				delete(mine, i)
			}
		}
		meet(mine)
	}
	for _, sp := range s.cluster {
		for _, fe := range sp.Frontends {
			if fe.Kind == plan.ClusterIP {
				expected[id{set: clusterIPs, key: string(fe.Addr.AsSlice())}] = value{}
			}
		}
	}
	meet(expected)
	forms := formsOf(e.sets)
	for i, v := range have {
		if !s.layout.partial || !forms[i.set].has(i, v) { // Else it may belong to a ServicePort that is not known yet.
			out[i] = nil
		}
	}
	return out, used, nil
}

// sample reads all elements, as each does.
func (e *engine) sample(ctx context.Context, k kernel) (map[id]value, error) {
	have := map[id]value{}
	err := e.each(k, func(i id, v value) error {
		have[i] = v
		return ctx.Err()
	})
	return have, err
}

// each calls visit with all elements but those that rules add, of which a catch-all element is none. Some that are there may be missing.
func (e *engine) each(k kernel, visit func(id, value) error) error {
	for i, set := range e.sets {
		note := func(el nft.Element) error { return visit(id{setID(i), el.Key, el.End}, valueOf(el)) }
		var err error
		if setID(i) != affinity {
			err = k.Sample(e.family, names.NFTables, set, note)
		} else if el, is, asked := k.Element(e.family, names.NFTables, set, nft.Element{}); is {
			err = note(el)
		} else {
			err = asked
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// look reads one element, and reports whether it is as it should be.
func (e *engine) look(k kernel, i id, want *value) (have *value, same bool, err error) {
	el, is, err := k.Element(e.family, names.NFTables, e.sets[i.set], i.element(value{}))
	if err != nil {
		return nil, false, err
	}
	if is {
		v := valueOf(el)
		have = &v
	}
	return have, is == (want != nil) && (!is || *have == *want), nil
}

func (e *engine) isTouched(i id) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.touched[i]
}

// repair writes what differs, while syncs wait.
func (e *engine) repair(ctx context.Context, s *snapshot, suspects map[id]*value) (found drift.Found, again bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current == nil || e.full != s.full {
		return nil, e.current == nil, nil // A sync has compared everything, or failed.
	}
	maps.DeleteFunc(suspects, func(i id, _ *value) bool { return e.touched[i] })
	if len(suspects) > mostBeside {
		return nil, true, nil
	}
	var writes []write
	for _, i := range slices.SortedFunc(maps.Keys(suspects), compareIDs) {
		have, same, err := e.look(e.kernel, i, suspects[i])
		if err != nil {
			e.forget()
			return nil, true, err
		}
		if !same {
			found = append(found, e.difference(i, suspects[i], have))
			writes = append(writes, write{i, have, suspects[i]})
		}
	}
	if len(writes) == 0 {
		return nil, false, nil
	}
	t := &transactions{engine: e, ctx: ctx, layout: e.layout}
	if err := t.try(nil, writes); err != nil {
		e.forget()
		return found, true, err
	}
	return found, false, nil
}

// forget makes the next sync read everything, with another socket.
func (e *engine) forget() {
	e.current = nil
	if e.kernel != nil {
		_ = e.kernel.Close()
		e.kernel = nil
	}
}

// noteClients reports how many clients affinity remembers, and warns when there is room for less than a tenth more, once until there is for
// a fifth again.
func (e *engine) noteClients(counts map[string]int) {
	n, told := counts[names.NFTAffinity]
	if !told {
		return
	}
	e.onClients(e.family, n)
	most := int(e.sets[affinity].Size)
	crowded := n > most-most/10 || e.crowded && n > most-most/5
	if crowded && !e.crowded {
		e.warn(fmt.Sprintf("session affinity remembers %d clients over %s, and can remember %d; where there is no room, new clients of all "+
			"Services get an endpoint for each connection", n, e.family, most))
	}
	e.crowded = crowded
}
