package ipvs

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
)

// memberChanges are the changes of set entries, by when they are made.
type memberChanges struct {
	addBefore    []memberKey // before packets are sent on: entries that masquerade, admit or refuse
	addAfter     []memberKey // after the virtual servers exist that marks select
	removeBefore []memberKey // while the virtual servers still exist that marks selected
	removeAfter  []memberKey // after no packet that needs them is sent on
}

// selects reports whether the entries of a set select the virtual server for a packet, or drop packets for which none is selected.
func (id setID) selects() bool { return setKinds[id].marks || id == setNoLocalEndpoints }

// withholds reports whether an entry of a set that is not desired keeps packets from a virtual server.
func (id setID) withholds() bool { return id.selects() || id == setNoEndpoints }

// members returns the set entries to add or change, and to remove.
func (e *engine) members(t *touched, bind, unlist []netip.Addr) memberChanges {
	var out memberChanges
	for m := range t.members {
		want, wanted := e.desired.members[m]
		have, is := e.actual.members[m]
		switch {
		case !wanted && is && m.set.withholds():
			out.removeBefore = append(out.removeBefore, m)
		case !wanted && is:
			out.removeAfter = append(out.removeAfter, m)
		case wanted && (!is || have != want.marked):
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

func (e *engine) addMembers(list []memberKey, backwards bool) error {
	return bySet(list, backwards, func(id setID, list []memberKey) error {
		entries := make([]ipset.Entry, len(list))
		for i, m := range list {
			entries[i] = m.entry(e.desired.members[m].marked)
		}
		e.Wrote(drift.SetElement, len(entries))
		refused, ok := map[ipset.Entry]error(nil), true
		if err := e.machine.sets.Add(setOf(id, e.family), entries); err != nil {
			if refused, ok = refusedEntries(err, len(entries)); !ok {
				return err
			}
		}
		refusedHere := map[memberKey]error{}
		for i, m := range list {
			if err := refused[entries[i]]; err != nil {
				refusedHere[m] = err
				continue
			}
			delete(e.refusedMembers, m)
			e.actual.members[m] = e.desired.members[m].marked
		}
		e.refuseMembers(refusedHere)
		return nil
	})
}

func (e *engine) removeMembers(list []memberKey, backwards bool) error {
	return bySet(list, backwards, func(id setID, list []memberKey) error {
		entries := make([]ipset.Entry, len(list))
		for i, m := range list {
			entries[i] = m.entry(marked{})
		}
		e.Wrote(drift.SetElement, len(entries))
		if err := e.machine.sets.Remove(setOf(id, e.family), entries); err != nil {
			return err
		}
		for _, m := range list {
			delete(e.actual.members, m)
		}
		return nil
	})
}

// bySet calls do with the entries of each set. Sets come in the order of their numbers, or in the reverse order if backwards.
func bySet(list []memberKey, backwards bool, do func(setID, []memberKey) error) error {
	slices.SortFunc(list, func(a, b memberKey) int {
		if backwards {
			a, b = b, a
		}
		return cmp.Compare(a.set, b.set)
	})
	var errs []error
	for len(list) > 0 {
		id := list[0].set
		n := slices.IndexFunc(list, func(m memberKey) bool { return m.set != id })
		if n < 0 {
			n = len(list)
		}
		errs = append(errs, do(id, list[:n]))
		list = list[n:]
	}
	return errors.Join(errs...)
}
