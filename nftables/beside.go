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
)

// mostBeside is how many elements are repaired beside syncs.
const mostBeside = 200

// spareKindsMost is how many kinds may have a chain that no Service uses any more before a comparison removes them.
const spareKindsMost = 64

// snapshot begins a comparison; nil if it is not known what the kernel should hold.
func (e *engine) snapshot() *snapshot {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.comparable() {
		return nil
	}
	s := e.known()
	s.current, s.kinds, s.leftover = s.current.clone(), maps.Clone(s.kinds), maps.Clone(s.leftover)
	e.touched = map[id]bool{}
	return s
}

// comparable reports whether it is known what the kernel should hold, and no refused ServicePort has to be tried again.
func (e *engine) comparable() bool {
	for _, r := range e.refused {
		if !time.Now().Before(r.again) {
			return false
		}
	}
	return e.current != nil && e.kernel != nil
}

// Unchanged is AllUnchanged by the number that the kernel gives each state of nf_tables.
func (b *Backend) Unchanged() bool { return b.AllUnchanged((*engine).unchanged) }

// unchanged is Unchanged for one family. The clients that rules remember are no part of what is numbered.
func (e *engine) unchanged() bool {
	if !e.comparable() {
		return false
	}
	k, err := e.reader()
	if err != nil {
		return false
	}
	defer k.Close()
	generation, err := k.Generation()
	if err != nil || e.verified != (version{generation, e.full}) {
		return false
	}
	content, err := k.Read(e.family, names.NFTables, e.sets, nil)
	if err != nil || content == nil {
		return false
	}
	e.noteClients(content.Counts)
	return true
}

// began begins a comparison, and reads what the table has beside elements. No sync should have changed any of it, nor how many elements there
// are, meanwhile.
func (e *engine) began(k kernel) (s *snapshot, content *nft.Content, err error) {
	for range mostReads {
		generation, err := k.Generation() // Whatever is written after the snapshot has another one.
		if err != nil {
			return nil, nil, err
		}
		if s = e.snapshot(); s == nil {
			return nil, nil, nil
		}
		s.generation = generation
		if content, err = k.Read(e.family, names.NFTables, e.sets, s.layout.chains()); err != nil {
			return nil, nil, err
		}
		e.mu.Lock()
		quiet := len(e.touched) == 0 && e.layout == s.layout
		e.mu.Unlock()
		if quiet {
			break
		}
	}
	return s, content, nil
}

// CompareBeside is Compare for one family. The kernel lists a set in parts, between which it may change; so a listing only shows where to
// look. What seems to differ is read once more by its key, and what syncs have written meanwhile is left to the next comparison.
func (e *engine) CompareBeside(ctx context.Context) (found drift.Found, again bool, err error) {
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
	s, content, err := e.began(k)
	if s == nil || err != nil {
		return nil, true, err
	}
	if len(s.structure(content, e.sets)) > 0 {
		return nil, true, nil
	}
	e.noteClients(content.Counts)
	in := intrudersIn(content, e.sets, s.names())
	if again, err := e.expel(s, &in, intruders.disarm); again || err != nil {
		return nil, true, err
	}
	chainsOnly := intruders{chains: in.chains}
	in.chains = nil
	found = in.differences(e.family)
	more, again, err := e.reading(k, content).repairElements(ctx, s)
	if found = append(found, more...); again || err != nil {
		return found, again, err
	}
	// What was repaired, or left to the next comparison, has changed the generation.
	e.verified = s.version
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
	known := e.known().names()
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

// repairElements compares elements, and repairs those that differ. What should not be there may be any number.
func (r *reading) repairElements(ctx context.Context, s *snapshot) (found drift.Found, again bool, err error) {
	suspects, used, err := r.compare(ctx, s, false)
	if err != nil {
		return nil, true, err
	}
	if len(s.kinds) > len(used)+spareKindsMost {
		if err := r.removeSpareKinds(ctx, s, used); err != nil {
			return nil, true, err
		}
	}
	var wanted, unexpected []write
	differ := 0
	for _, w := range suspects {
		if err := ctx.Err(); err != nil {
			return nil, false, err
		}
		_, same, err := r.look(r.from, w.id, w.want)
		switch {
		case err != nil:
			return nil, true, err
		case same:
			continue
		case w.want == nil:
			unexpected = append(unexpected, w)
			continue
		case !r.isTouched(w.id):
			if differ++; differ > mostBeside {
				return nil, true, nil
			}
		}
		wanted = append(wanted, w)
	}
	for some := range slices.Chunk(append(wanted, unexpected...), mostBeside) {
		repaired, again, err := r.repair(ctx, s, some)
		if found = append(found, repaired...); again || err != nil {
			return found, again, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.full == s.full && !s.layout.partial { // What nothing leads to is gone.
		r.unread = [setCount]bool{}
	}
	if r.full == s.full && r.current != nil {
		err = r.removeLeftover()
	}
	return found, r.current == nil || err != nil, err
}

// removeLeftover tries again to remove the chains that no kind uses any more: what others had changed may have led to them. The lock must be held.
func (e *engine) removeLeftover() error {
	if len(e.leftover) == 0 || e.layout.partial || len(e.refused)+len(e.spareKinds) > 0 {
		return nil
	}
	needed := namesOf(e.layout.kindChains(e.kinds), nil)
	maps.DeleteFunc(e.leftover, func(name string, _ bool) bool { return needed[name] })
	if len(e.leftover) == 0 {
		return nil
	}
	return e.removeChains(slices.Sorted(maps.Keys(e.leftover)))
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

// repair writes what differs of some suspects, while syncs wait.
func (e *engine) repair(ctx context.Context, s *snapshot, some []write) (found drift.Found, again bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current == nil || e.full != s.full {
		return nil, e.current == nil, nil // A sync has compared everything, or failed.
	}
	var writes []write
	for _, w := range some {
		if e.touched[w.id] {
			continue
		}
		have, same, err := e.look(e.kernel, w.id, w.want)
		if err != nil {
			e.forget()
			return nil, true, err
		}
		if !same {
			writes = append(writes, write{w.id, have, w.want})
		}
	}
	if len(writes) == 0 {
		return nil, false, nil
	}
	found = e.differences(writes)
	t := &transactions{engine: e, ctx: ctx, layout: e.layout}
	if err := t.try(nil, writes); err != nil {
		e.forget()
		return found, true, err
	}
	return found, false, nil
}

// removeSpareKinds removes the chains of kinds that no ServicePort uses any more, and the elements that lead to them. used are the kinds in use
// when a comparison began. Chains that could not be removed before are tried again.
func (e *engine) removeSpareKinds(ctx context.Context, s *snapshot, used map[kind]bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current == nil || e.full != s.full || e.layout.partial || len(e.refused) > 0 {
		return nil
	}
	for k, w := range e.current.all() {
		if was := s.current.of(k); w.sp != was.sp || was.others != nil { // It goes on in steps.
			w.uses(used)
		}
	}
	left := maps.Clone(e.kinds)
	maps.DeleteFunc(left, func(k kind, _ bool) bool { return !used[k] })
	keep, all := fixed(left), fixed(e.kinds)
	maps.Copy(all, e.spareKinds) // of ServicePorts that are not refused any more
	t := &transactions{engine: e, ctx: ctx, layout: e.layout}
	err := t.try(nil, removals(all, func(i id) bool { _, is := keep[i]; return !is }))
	if err != nil {
		e.forget()
		return err
	}
	needed := namesOf(e.layout.kindChains(left), nil)
	old, spare := maps.Clone(e.leftover), namesOf(e.layout.kindChains(e.kinds), nil)
	maps.DeleteFunc(old, func(name string, _ bool) bool { return needed[name] })
	maps.DeleteFunc(spare, func(name string, _ bool) bool { return needed[name] || old[name] })
	e.kinds, e.spareKinds = left, nil
	for _, some := range []map[string]bool{old, spare} { // Those that are spare only now may seem to be in use for a while.
		if len(some) > 0 {
			if err := e.removeChains(slices.Sorted(maps.Keys(some))); err != nil {
				return err
			}
		}
	}
	return nil
}

// forget makes the next sync read everything, with another socket.
func (e *engine) forget() {
	e.current = nil
	if e.kernel != nil {
		_ = e.kernel.Close()
		e.kernel = nil
	}
}

// noteClients reports how many clients affinity remembers, and warns when a share has room for less than a tenth more, once until it has for
// a fifth again.
func (e *engine) noteClients(counts map[string]int) {
	for share := range affinityShares {
		set := e.sets[int(affinity)+share]
		n, told := counts[set.Name]
		if !told {
			return
		}
		e.onClients(e.family, share, n)
		most := int(set.Size)
		crowded := n > most-most/10 || e.crowded[share] && n > most-most/5
		if crowded && !e.crowded[share] {
			e.warn(fmt.Sprintf("session affinity remembers %d clients over %s in map %s, and can remember %d there; where there is no room, "+
				"new clients of the Services in that map, an eighth of all, get an endpoint for each connection", n, e.family, set.Name, most))
		}
		e.crowded[share] = crowded
	}
}
