package packetsim

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
)

// Set is an ipset. Rules refer to it by pointer, as in the kernel, where a set can't be destroyed while a rule uses it.
type Set struct {
	Name       string
	Dimensions []string    // ip, net or port
	Family     plan.Family // 0 for a bitmap of ports, which has no addresses
	Entries    map[Element]Entry
	// The rest is what the kernel refuses entries by: ports outside the range of a bitmap, more entries than MaxElem, and marks
	// without extension skbinfo.
	Ports      plan.PortRange
	MaxElem    int
	Extensions []string // such as comment, sorted
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
	NoMatch    bool
}

// MaxSetDimensions is how many dimensions the kernel's types have at most.
const MaxSetDimensions = len(Element{})

// Find returns the entry that matches a packet. A flag says for each dimension whether the packet's source is compared, rather than its
// destination. As in the kernel, the longest prefix wins, and nothing is found for a packet of the other family or with fewer flags
// than the set has dimensions.
func (s *Set) Find(p *Packet, flags []bool) (Entry, bool, error) {
	_, e, found, err := s.find(p, flags)
	return e, found && !e.NoMatch, err
}

// ElementText returns the element that Find finds, with the name of the set, in the form of "ipset save"; false if it finds none.
func (s *Set) ElementText(p *Packet, flags []bool) (string, bool) {
	el, e, found, err := s.find(p, flags)
	if err != nil || !found || e.NoMatch {
		return "", false
	}
	var parts []string
	for i, d := range s.Dimensions {
		switch f := el[i]; {
		case d != "port" && f.Prefix.IsSingleIP():
			parts = append(parts, f.Prefix.Addr().String())
		case d != "port":
			parts = append(parts, f.Prefix.String())
		case f.Protocol != "":
			parts = append(parts, fmt.Sprintf("%s:%d", f.Protocol, f.Port))
		default:
			parts = append(parts, fmt.Sprint(f.Port))
		}
	}
	text := s.Name + " " + strings.Join(parts, ",")
	if e.Mask != 0 {
		text += fmt.Sprintf(" skbmark %#x/%#x", e.Mark, e.Mask)
	}
	return text, true
}

func (s *Set) find(p *Packet, flags []bool) (Element, Entry, bool, error) {
	var el Element
	if len(flags) < len(s.Dimensions) || s.Family != 0 && s.Family != plan.FamilyOf(p.Dst) {
		return el, Entry{}, false, nil
	}
	for i, d := range s.Dimensions {
		switch {
		case d == "port" && flags[i]:
			return el, Entry{}, false, errors.New("a packet's source port is not known")
		case d == "port" && s.Family == 0:
			if p.Protocol == "sctp" {
				return el, Entry{}, false, nil // The kernel looks for the ports of TCP and UDP only.
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
	el, e, found := s.lookup(el, 0)
	return el, e, found, nil
}

// lookup finds the entry for an element, whose nets it widens from dimension i on, with the element that it is for.
func (s *Set) lookup(el Element, i int) (Element, Entry, bool) {
	if i == len(s.Dimensions) {
		e, found := s.Entries[el]
		return el, e, found
	}
	if s.Dimensions[i] != "net" {
		return s.lookup(el, i+1)
	}
	for _, bits := range s.lengths(i) {
		wider := el
		wider[i].Prefix = netip.PrefixFrom(el[i].Prefix.Addr(), bits).Masked()
		if to, e, found := s.lookup(wider, i+1); found {
			return to, e, true
		}
	}
	return el, Entry{}, false
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
