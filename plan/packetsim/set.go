package packetsim

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// set is an ipset. Rules hold it by pointer, as the kernel does: it can't be destroyed while one does.
type set struct {
	name       string
	dimensions []string    // ip, net or port
	family     plan.Family // 0 where the type has no addresses
	first      uint16      // the least and the greatest port, of type bitmap:port
	last       uint16
	maxElem    int
	skbInfo    bool
	options    string // as it was created, for -exist
	entries    map[element]entry
}

// element is what identifies an entry: a field for each dimension.
type element [3]field

// field is an address or a range of them (dimensions ip and net), or a port. A port in a bitmap has no protocol.
type field struct {
	prefix   netip.Prefix
	protocol string
	port     uint16
}

// entry is what an element carries.
type entry struct {
	mark, mask uint32 // skbmark
	noMatch    bool
}

// maxSetDimensions is how many dimensions the kernel's types have at most.
const maxSetDimensions = 3

// find returns the entry that a packet is in. As in the kernel, the smallest net that has it decides, and a packet of
// the other family, or flags fewer than the set's dimensions, find nothing. The flags say of each dimension whether it is
// compared with the packet's source rather than its destination.
func (s *set) find(p *packet, flags []bool) (entry, bool, error) {
	if len(flags) < len(s.dimensions) || s.family != 0 && s.family != plan.FamilyOf(p.dst) {
		return entry{}, false, nil
	}
	var el element
	for i, d := range s.dimensions {
		switch {
		case d == "port" && flags[i]:
			return entry{}, false, errors.New("a packet's source port is not known")
		case d == "port" && s.family == 0:
			if p.protocol == "sctp" {
				return entry{}, false, nil // The kernel looks for the ports of TCP and UDP only.
			}
			el[i].port = p.port
		case d == "port":
			el[i].protocol, el[i].port = p.protocol, p.port
		case flags[i]:
			el[i].prefix = netip.PrefixFrom(p.src, p.src.BitLen())
		default:
			el[i].prefix = netip.PrefixFrom(p.dst, p.dst.BitLen())
		}
	}
	e, found := s.lookup(el, 0)
	return e, found && !e.noMatch, nil
}

// lookup finds the entry for an element, whose nets it widens from dimension i on.
func (s *set) lookup(el element, i int) (entry, bool) {
	if i == len(s.dimensions) {
		e, found := s.entries[el]
		return e, found
	}
	if s.dimensions[i] != "net" {
		return s.lookup(el, i+1)
	}
	for _, bits := range s.lengths(i) {
		wider := el
		wider[i].prefix = netip.PrefixFrom(el[i].prefix.Addr(), bits).Masked()
		if e, found := s.lookup(wider, i+1); found {
			return e, true
		}
	}
	return entry{}, false
}

// lengths are those of the nets in a dimension, the longest first.
func (s *set) lengths(i int) []int {
	seen := map[int]bool{}
	for el := range s.entries {
		seen[el[i].prefix.Bits()] = true
	}
	out := slices.Sorted(maps.Keys(seen))
	slices.Reverse(out)
	return out
}
