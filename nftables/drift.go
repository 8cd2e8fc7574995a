package nftables

import (
	"fmt"
	"maps"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
)

// differences finds out in what that which the kernel holds differs from what it was left with.
func (s *fullSync) differences(before *layout) {
	of := fmt.Sprintf("of table %s %s", nft.FamilyName(s.family), names.NFTables)
	if s.content == nil {
		s.found.Add(drift.Chain, drift.Missing, "all %s (nftables)", of)
		return
	}
	for _, c := range append(before.chains(), before.kindChains(s.kinds)...) {
		is, there := s.content.Chains[c.Name]
		switch {
		case !there:
			s.found.Add(drift.Chain, drift.Missing, "%s %s (nftables)", c.Name, of)
		case !is.Holds(c):
			s.found.Add(drift.Chain, drift.Changed, "%s %s (nftables)", c.Name, of)
		}
	}
	for _, set := range s.sets {
		if is, there := s.content.Sets[set.Name]; !there || !is {
			s.found.Add(drift.SetElement, drift.Missing, "all of set %s %s (nftables)", set.Name, of)
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
				s.found.Add(drift.SetElement, drift.Missing, "%s of set %s %s (nftables)", i.text(s.family), s.sets[i.set].Name, of)
				continue
			case have != list[i]:
				s.found.Add(drift.SetElement, drift.Changed, "%s of set %s %s (nftables)", i.text(s.family), s.sets[i.set].Name, of)
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
	if met == len(s.have) || s.plan.Partial {
		return
	}
	for _, i := range slices.SortedFunc(maps.Keys(s.have), compareIDs) {
		if _, is := expected[i]; !is {
			s.found.Add(drift.SetElement, drift.Unexpected, "%s of set %s %s (nftables)", i.text(s.family), s.sets[i.set].Name, of)
		}
	}
}
