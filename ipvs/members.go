package ipvs

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/kernel/ipset"
)

// memberChanges are the changes of set entries, by when they are due.
type memberChanges struct {
	guards     []member // to add before packets are sent on: they masquerade, admit, refuse
	leads      []member // to add when the virtual servers are there that marks lead to
	misleading []member // to remove while the virtual servers are still there that marks led to
	spent      []member // to remove when nothing is sent on any more that needs them
}

// leads reports whether the entries of a set say which virtual server a packet is for, or have what is led nowhere dropped.
func (id setID) leads() bool { return setKinds[id].marks || id == setNoLocalEndpoints }

// misleads reports whether an entry of a set keeps packets from a virtual server that is there by now.
func (id setID) misleads() bool { return id.leads() || id == setNoEndpoints }

// members are the set entries to add or change, and to remove.
func (e *engine) members(t *touched, bind, unlist []netip.Addr) memberChanges {
	var out memberChanges
	for m := range t.members {
		want := e.desired.members[m]
		have, is := e.held.members[m]
		switch {
		case want == nil && is && m.set.misleads():
			out.misleading = append(out.misleading, m)
		case want == nil && is:
			out.spent = append(out.spent, m)
		case want != nil && (!is || have.mark != want.mark || have.mask != want.mask):
			m.entry.Mark, m.entry.Mask = want.mark, want.mask
			if m.set.leads() {
				out.leads = append(out.leads, m)
			} else {
				out.guards = append(out.guards, m)
			}
		}
	}
	for _, a := range bind {
		if _, is := e.held.members[vipMember(a)]; !is {
			out.guards = append(out.guards, vipMember(a))
		}
	}
	for _, a := range unlist {
		if _, is := e.held.members[vipMember(a)]; is {
			out.spent = append(out.spent, vipMember(a))
		}
	}
	return out
}

// addGuards has what admits come before what limits.
func (e *engine) addGuards(list []member) error { return e.addMembers(list, true) }

// addLeads has marks come before what is dropped without one.
func (e *engine) addLeads(list []member) error { return e.addMembers(list, false) }

// removeMisleading has what is dropped without a mark end before the marks do.
func (e *engine) removeMisleading(list []member) error { return e.removeMembers(list, true) }

// removeSpent has what limits go before what admits.
func (e *engine) removeSpent(list []member) error { return e.removeMembers(list, false) }

func (e *engine) addMembers(list []member, backwards bool) error {
	add := func(id setID, entries []ipset.Entry) error {
		err := e.machine.sets.Add(setOf(id, e.family), entries)
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
			e.held.members[m.key()] = shared{mark: entry.Mark, mask: entry.Mask}
		}
		return nil
	}
	return bySet(list, backwards, add)
}

func (e *engine) removeMembers(list []member, backwards bool) error {
	return bySet(list, backwards, func(id setID, entries []ipset.Entry) error {
		if err := e.machine.sets.Remove(setOf(id, e.family), entries); err != nil {
			return err
		}
		for _, entry := range entries {
			delete(e.held.members, member{id, entry}.key())
		}
		return nil
	})
}

// bySet hands entries to do, those of a set together. Sets come in the order of their numbers, or with backwards in the reverse one.
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
