package nftables

import (
	"fmt"
	"maps"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
)

// differs notes a thing that is not as it was left, and of which its name says everything.
func (e *engine) differs(k drift.Kind, state drift.State, format string, args ...any) {
	e.found = append(e.found, drift.Difference{Kind: k, State: state, Object: fmt.Sprintf(format, args...)})
}

// differences finds out in what that which the kernel holds differs from what it was left with.
func (s *fullSync) differences(before *layout) {
	of := fmt.Sprintf("of nftables table %s %s", nft.FamilyName(s.family), names.NFTables)
	if s.content == nil {
		s.differs(drift.Table, drift.Missing, "%s %s of nftables", nft.FamilyName(s.family), names.NFTables)
		return
	}
	if s.content.Dormant {
		s.differs(drift.Table, drift.Changed, "%s %s of nftables", nft.FamilyName(s.family), names.NFTables)
	}
	for _, c := range append(before.chains(), before.kindChains(s.kinds)...) {
		is, there := s.content.Chains[c.Name]
		switch {
		case !there:
			s.differs(drift.Chain, drift.Missing, "%s %s", c.Name, of)
		case !is.Holds(c):
			s.differs(drift.Chain, drift.Changed, "%s %s", c.Name, of)
		}
	}
	for _, set := range s.sets {
		if is, there := s.content.Sets[set.Name]; !there || !is {
			s.differs(drift.SetElement, drift.Missing, "all of set %s %s", set.Name, of)
		}
	}
	if s.rebuild {
		return
	}
	met := 0
	compare := func(list map[id]value) {
		for _, i := range slices.SortedFunc(maps.Keys(list), compareIDs) {
			have, is := s.have[i]
			switch {
			case !is:
				s.differs(drift.SetElement, drift.Missing, "%s of set %s %s", i.text(s.family), s.sets[i.set].Name, of)
				continue
			case have != list[i]:
				s.found = append(s.found, drift.Difference{Kind: drift.SetElement, State: drift.Changed,
					Object: fmt.Sprintf("%s of set %s %s", i.text(s.family), s.sets[i.set].Name, of),
					Want:   list[i].text(s.sets[i.set]), Have: have.text(s.sets[i.set])})
			}
			met++
		}
	}
	expected := fixed(s.kinds)
	for a := range s.users {
		expected[id{set: clusterIPs, key: string(a.AsSlice())}] = value{}
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
	if met == len(s.have) || s.plan.Partial || before.partial { // What was there may be of Services that were not known.
		return
	}
	for _, i := range slices.SortedFunc(maps.Keys(s.have), compareIDs) {
		if _, is := expected[i]; !is {
			s.differs(drift.SetElement, drift.Unexpected, "%s of set %s %s", i.text(s.family), s.sets[i.set].Name, of)
		}
	}
}
