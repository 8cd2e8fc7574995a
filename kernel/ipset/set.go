// Package ipset reads and changes ipsets. It makes no decisions.
//
// It talks netlink, on a socket that belongs to the network namespace of the thread that opened it, and stays in it. Several
// goroutines may use Sets at once; their requests wait for one another. Adding what exists changes it, and removing what is gone is
// no error, so whatever was interrupted can be done again.
package ipset

import (
	"fmt"
	"net/netip"

	"nodeproxy/plan"
)

// Set is an ipset.
type Set struct {
	Name string
	// Type is one of hash:ip, hash:net, hash:ip,port, hash:net,port, hash:ip,port,ip, hash:ip,port,net and bitmap:port.
	Type string
	// Family matters for all types but bitmap:port.
	Family plan.Family
	// Marks is true if entries carry a packet mark (ipset's extension "skbinfo").
	Marks bool
	// MaxElem is the initial maximum of entries of a hash; 0 means 65,536. The set grows when it is full.
	MaxElem uint32
}

// Entry is a member of a set. The set's type says which fields matter: Addr for an ip, Net for a net, Protocol and Port for a port
// (bitmap:port has no protocol), Addr2 for the second ip. The others must be zero.
type Entry struct {
	Addr     netip.Addr
	Net      netip.Prefix // masked, and not of length 0, which no set takes
	Protocol plan.Protocol
	Port     uint16
	Addr2    netip.Addr
	// Mark and Mask say how a rule with --map-mark changes a packet's mark: the bits in Mask become those of Mark.
	Mark, Mask uint32
}

// setType describes the entries of a type of set.
type setType struct {
	// revision is the oldest one with marks (Linux 3.18). Newer ones add features that are not used here, and hash seeds, which
	// would make equal sets look different.
	revision                uint8
	addr, net, port, second bool
	bitmap                  bool
}

var setTypes = map[string]setType{
	"hash:ip":          {revision: 4, addr: true},
	"hash:net":         {revision: 6, net: true},
	"hash:ip,port":     {revision: 5, addr: true, port: true},
	"hash:net,port":    {revision: 7, net: true, port: true},
	"hash:ip,port,ip":  {revision: 5, addr: true, port: true, second: true},
	"hash:ip,port,net": {revision: 7, addr: true, net: true, port: true},
	"bitmap:port":      {revision: 3, bitmap: true},
}

const defaultMaxElem = 65536

func (s Set) maxElem() uint32 {
	if s.MaxElem == 0 {
		return defaultMaxElem
	}
	return s.MaxElem
}

// CreateText is the line by which `ipset save` shows a new set, and `ipset restore` makes it.
func (s Set) CreateText() string {
	text := fmt.Sprintf("create %s %s ", s.Name, s.Type)
	if setTypes[s.Type].bitmap {
		text += "range 0-65535"
	} else {
		family := "inet"
		if s.Family == plan.IPv6 {
			family = "inet6"
		}
		text += fmt.Sprintf("family %s hashsize 1024 maxelem %d", family, s.maxElem())
	}
	if s.Marks {
		text += " skbinfo"
	}
	return text
}

// Text is an entry of a set as `ipset save` shows it after the set's name: "10.96.0.1,tcp:443 skbmark 0x1/0xff".
func (e Entry) Text(s Set) string {
	t := setTypes[s.Type]
	text := ""
	if t.addr {
		text = e.Addr.String()
	}
	if t.net && !t.addr {
		text = netText(e.Net)
	}
	if t.port {
		text += fmt.Sprintf(",%s:%d", e.Protocol.Lower(), e.Port)
	}
	if t.bitmap {
		text = fmt.Sprint(e.Port)
	}
	if t.second {
		text += "," + e.Addr2.String()
	}
	if t.net && t.addr {
		text += "," + netText(e.Net)
	}
	switch {
	case !s.Marks || e.Mark == 0 && e.Mask == 0:
	case e.Mask == 0xffffffff:
		text += fmt.Sprintf(" skbmark %#x", e.Mark)
	default:
		text += fmt.Sprintf(" skbmark %#x/%#x", e.Mark, e.Mask)
	}
	return text
}

// netText leaves the length of a range of one address out, as ipset does.
func netText(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}
