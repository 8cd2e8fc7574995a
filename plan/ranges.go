package plan

import (
	"net/netip"
	"slices"
)

// Canonical returns the fewest ranges that hold the same addresses as the given ones, in order of address: none is within another, and
// no two of them make up a third. All are of one family, and masked. It uses the memory of ranges.
func Canonical(ranges []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ranges, netip.Prefix.Compare) // A range comes before those within it.
	out := ranges[:0]
	for _, r := range ranges {
		if n := len(out); n > 0 && out[n-1].Contains(r.Addr()) {
			continue
		}
		out = append(out, r)
		for len(out) > 1 {
			a, b := out[len(out)-2], out[len(out)-1]
			if a.Bits() != b.Bits() {
				break
			}
			both := netip.PrefixFrom(a.Addr(), a.Bits()-1).Masked()
			if !both.Contains(b.Addr()) {
				break
			}
			out = append(out[:len(out)-2], both)
		}
	}
	return out
}

// Within reports whether canonical ranges hold an address.
func Within(ranges []netip.Prefix, a netip.Addr) bool {
	i, found := slices.BinarySearchFunc(ranges, a, func(r netip.Prefix, a netip.Addr) int { return r.Addr().Compare(a) })
	return found || i > 0 && ranges[i-1].Contains(a)
}
