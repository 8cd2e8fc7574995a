package ipvs

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
)

// memberChanges are the changes of set entries, by when they are made.
type memberChanges struct {
	addBefore    []member // before packets are sent on: entries that masquerade, admit or refuse
	addAfter     []member // after the virtual servers exist that marks select
	removeBefore []member // while the virtual servers still exist that marks selected
	removeAfter  []member // after no packet that needs them is sent on
}

// selects reports whether the entries of a set select the virtual server for a packet, or drop packets for which none is selected.
func (id setID) selects() bool { return setKinds[id].marks || id == setNoLocalEndpoints }

// withholds reports whether an entry of a set that is not desired keeps packets from a virtual server.
func (id setID) withholds() bool { return id.selects() || id == setNoEndpoints }

// members returns the set entries to add or change, and to remove.
func (e *engine) members(t *touched, bind, unlist []netip.Addr) memberChanges {
	var out memberChanges
	for m := range t.members {
		want := e.desired.members[m]
		have, is := e.actual.members[m]
		switch {
		case want == nil && is && m.set.withholds():
			out.removeBefore = append(out.removeBefore, m)
		case want == nil && is:
			out.removeAfter = append(out.removeAfter, m)
		case want != nil && (!is || have.mark != want.mark || have.mask != want.mask):
			m.entry.Mark, m.entry.Mask = want.mark, want.mask
			if m.set.selects() {
				out.addAfter = append(out.addAfter, m)
			} else {
				out.addBefore = append(out.addBefore, m)
			}
		}
	}
	for _, a := range bind {
		if _, is := e.actual.members[vipMember(a)]; !is {
			out.addBefore = append(out.addBefore, vipMember(a))
		}
	}
	for _, a := range unlist {
		if _, is := e.actual.members[vipMember(a)]; is {
			out.removeAfter = append(out.removeAfter, vipMember(a))
		}
	}
	return out
}

func (e *engine) addMembers(list []member, backwards bool) error {
	add := func(id setID, entries []ipset.Entry) error {
		err := e.machine.sets.Add(setOf(id, e.family), entries)
		e.Wrote(drift.SetElement, len(entries))
		refused, ok := map[ipset.Entry]error(nil), true
		if err != nil {
			if refused, ok = refusedEntries(err, len(entries)); !ok {
				return err
			}
		}
		for _, entry := range entries {
			m := member{id, entry}
			if err := refused[entry]; err != nil {
				e.refuseMember(m, err)
				continue
			}
			delete(e.refusedMembers, m.key())
			e.actual.members[m.key()] = shared{mark: entry.Mark, mask: entry.Mask}
		}
		return nil
	}
	return bySet(list, backwards, add)
}

func (e *engine) removeMembers(list []member, backwards bool) error {
	return bySet(list, backwards, func(id setID, entries []ipset.Entry) error {
		e.Wrote(drift.SetElement, len(entries))
		if err := e.machine.sets.Remove(setOf(id, e.family), entries); err != nil {
			return err
		}
		for _, entry := range entries {
			delete(e.actual.members, member{id, entry}.key())
		}
		return nil
	})
}

// bySet calls do with the entries of each set. Sets come in the order of their numbers, or in the reverse order if backwards.
func bySet(list []member, backwards bool, do func(setID, []ipset.Entry) error) error {
	entries := map[setID][]ipset.Entry{}
	for _, m := range list {
		entries[m.set] = append(entries[m.set], m.entry)
	}
	ids := slices.Sorted(maps.Keys(entries))
	if backwards {
		slices.Reverse(ids)
	}
	var errs []error
	for _, id := range ids {
		errs = append(errs, do(id, entries[id]))
	}
	return errors.Join(errs...)
}
