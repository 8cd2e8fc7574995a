package packetsim

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// Set is an ipset.
type Set struct {
	Name       string
	Dimensions []string    // ip, net or port
	Family     plan.Family // 0 for a bitmap of ports, which has no addresses
	Entries    map[Element]Entry
}

// Element is what identifies an entry: a field for each dimension.
type Element [3]Field

// Field is an address or a range of them (dimensions ip and net), or a port. A port in a bitmap has no protocol.
type Field struct {
	Prefix   netip.Prefix
	Protocol string
	Port     uint16
}

// Entry is what an element carries.
type Entry struct {
	Mark, Mask uint32 // skbmark
	Text       string // the element, as "ipset save" shows it behind the set's name
}

// String is the entry in the form of "ipset save", with the whole mask.
func (e Entry) String() string {
	if e.Mask == 0 {
		return e.Text
	}
	return fmt.Sprintf("%s skbmark %#x/%#x", e.Text, e.Mark, e.Mask)
}

// Find returns the entry that matches a packet. A flag says for each dimension whether the packet's source is compared, rather than its
// destination. As in the kernel, the longest prefix wins, and nothing is found for a packet of the other family or with fewer flags
// than the set has dimensions.
func (s *Set) Find(p *Packet, flags []bool) (e Entry, found bool, err error) {
	if len(flags) < len(s.Dimensions) || s.Family != 0 && s.Family != plan.FamilyOf(p.Dst) {
		return Entry{}, false, nil
	}
	var el Element
	for i, d := range s.Dimensions {
		switch {
		case d == "port" && flags[i]:
			return Entry{}, false, errors.New("a packet's source port is not known")
		case d == "port" && s.Family == 0:
			if p.Protocol == "sctp" {
				return Entry{}, false, nil // The kernel looks for the ports of TCP and UDP only.
			}
			el[i].Port = p.Port
		case d == "port":
			el[i].Protocol, el[i].Port = p.Protocol, p.Port
		case flags[i]:
			el[i].Prefix = netip.PrefixFrom(p.Src, p.Src.BitLen())
		default:
			el[i].Prefix = netip.PrefixFrom(p.Dst, p.Dst.BitLen())
		}
	}
	e, found = s.lookup(el, 0)
	return e, found, nil
}

// lookup finds the entry for an element, whose nets it widens from dimension i on.
func (s *Set) lookup(el Element, i int) (Entry, bool) {
	if i == len(s.Dimensions) {
		e, found := s.Entries[el]
		return e, found
	}
	if s.Dimensions[i] != "net" {
		return s.lookup(el, i+1)
	}
	for _, bits := range s.lengths(i) {
		wider := el
		wider[i].Prefix = netip.PrefixFrom(el[i].Prefix.Addr(), bits).Masked()
		if e, found := s.lookup(wider, i+1); found {
			return e, true
		}
	}
	return Entry{}, false
}

// lengths are those of the nets in a dimension, the longest first.
func (s *Set) lengths(i int) []int {
	seen := map[int]bool{}
	for el := range s.Entries {
		seen[el[i].Prefix.Bits()] = true
	}
	out := slices.Sorted(maps.Keys(seen))
	slices.Reverse(out)
	return out
}
