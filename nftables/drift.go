package nftables

import (
	"fmt"
	"maps"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// differs records a difference that the name of its object describes completely.
func (e *engine) differs(k drift.Kind, state drift.State, format string, args ...any) {
	e.Found = append(e.Found, drift.Difference{Kind: k, State: state, Object: fmt.Sprintf(format, args...)})
}

// differences records how the kernel's content differs from what the last sync wrote.
func (s *fullSync) differences() {
	before := s.before
	if s.content == nil {
		s.differs(drift.Table, drift.Missing, "%s %s of nftables", nft.FamilyName(s.family), names.NFTables)
		return
	}
	if s.content.Dormant {
		s.differs(drift.Table, drift.Changed, "%s %s of nftables", nft.FamilyName(s.family), names.NFTables)
	}
	s.Found = append(s.Found, structure(before, s.kinds, s.sets, s.content)...)
	s.Found = append(s.Found, intrudersIn(s.content, s.sets, s.ours).differences(s.family)...)
	if s.rebuild {
		return
	}
	for _, i := range slices.SortedFunc(maps.Keys(s.foreign), compareIDs) {
		have := s.foreign[i]
		s.Found = append(s.Found, s.difference(i, nil, &have))
	}
	met := 0
	compare := func(list map[id]value) {
		for _, i := range slices.SortedFunc(maps.Keys(list), compareIDs) {
			want := list[i]
			have, is := s.have[i]
			switch {
			case !is:
				s.Found = append(s.Found, s.difference(i, &want, nil))
				continue
			case have != want:
				s.Found = append(s.Found, s.difference(i, &want, &have))
			}
			met++
		}
	}
	expected := fixed(s.kinds)
	for a := range s.users {
		expected[id{set: clusterIPs, key: string(a.AsSlice())}] = value{}
	}
	maps.Copy(expected, s.spareKinds)
	for _, r := range s.refused {
		maps.Copy(expected, r.kept)
	}
	compare(expected)
	for _, w := range s.current {
		mine := map[id]value{}
		before.fill(w, mine, map[kind]bool{})
		maps.DeleteFunc(mine, func(i id, _ value) bool { return i.set == clusterIPs })
		compare(mine)
		if met < len(s.have) {
			for i := range mine {
				expected[i] = value{}
			}
		}
	}
	if met == len(s.have) || s.plan.Partial || before.partial { // Other elements may belong to Services that were not known.
		return
	}
	for _, i := range slices.SortedFunc(maps.Keys(s.have), compareIDs) {
		if _, is := expected[i]; !is {
			have := s.have[i]
			s.Found = append(s.Found, s.difference(i, nil, &have))
		}
	}
}

// structure returns which chains and sets of a table are not as they were written.
func structure(l *layout, used map[kind]bool, sets []nft.Set, is *nft.Content) (found drift.Found) {
	of := ofTable(l.family)
	for _, c := range append(l.chains(), l.kindChains(used)...) {
		have, there := is.Chains[c.Name]
		switch {
		case !there:
			found = append(found, drift.Difference{Kind: drift.Chain, State: drift.Missing, Object: c.Name + of})
		case !have.Holds(c):
			found = append(found, drift.Difference{Kind: drift.Chain, State: drift.Changed, Object: c.Name + of})
		}
	}
	for _, set := range sets {
		if is, there := is.Sets[set.Name]; !there || !is {
			found = append(found, drift.Difference{Kind: drift.SetElement, State: drift.Missing, Object: "all of set " + set.Name + of})
		}
	}
	return found
}

func ofTable(f plan.Family) string {
	return fmt.Sprintf(" of nftables table %s %s", nft.FamilyName(f), names.NFTables)
}

// difference names an element that is not as it was written.
func (e *engine) difference(i id, want, have *value) drift.Difference {
	d := drift.Difference{Kind: drift.SetElement, State: drift.Changed,
		Object: fmt.Sprintf("%s of set %s", i.text(e.family), e.sets[i.set].Name) + ofTable(e.family)}
	switch {
	case have == nil:
		d.State = drift.Missing
	case want == nil:
		d.State = drift.Unexpected
	default:
		d.Want, d.Have = want.text(e.sets[i.set]), have.text(e.sets[i.set])
	}
	return d
}
