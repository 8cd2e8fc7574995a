package packetsim

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
)

// Node answers what rules may ask about the machine.
type Node struct {
	// Local reports whether an address is one of the machine's own, as in its routing table "local" without Machine.Added. It also
	// decides whether a packet is delivered or forwarded. It must not be nil.
	Local func(netip.Addr) bool
	// OutInterface names the interface by which packets to an address leave. If it is nil, a rule that asks can't be traced.
	OutInterface func(netip.Addr) string
	// Recent reports whether an address is in a list of clients that rules have remembered. If nil, all lists are empty.
	Recent func(list string, addr netip.Addr) bool
}

// Hook is a place in the network stack at which the kernel calls base chains.
type Hook string

// The hooks.
const (
	PreRouting  Hook = "PREROUTING"
	Input       Hook = "INPUT"
	Forward     Hook = "FORWARD"
	Output      Hook = "OUTPUT"
	PostRouting Hook = "POSTROUTING"
)

// Packet is a packet on its way, as rules see it.
type Packet struct {
	Src, Dst   netip.Addr
	Protocol   string // in lower case
	Port       uint16 // of the destination
	In         string // the interface by which it came
	Mark       uint32
	DNAT       bool // A rule changed the destination. What IPVS changes is not part of the connection's state.
	Masquerade bool // A rule changed the source.
	Hook       Hook
	Original   netip.Addr // the destination before any change
	// Virtual is the destination that the packet had when IPVS took it; zero if IPVS did not.
	Virtual netip.AddrPort
	// State is what a front end keeps with the packet from rule to rule. It must not change a value that it has put there.
	State any

	node    *Node
	machine *Machine
}

// Local reports whether an address is the machine's: its own, or one that was added for Services.
func (p *Packet) Local(a netip.Addr) bool { return p.node.Local(a) || p.machine.IsAdded(a) }

// OutInterface names the interface by which the packet leaves. It is an error if that is not known.
func (p *Packet) OutInterface() (string, error) {
	if p.node.OutInterface == nil {
		return "", errors.New("by which interface the packet leaves is not known")
	}
	return p.node.OutInterface(p.Dst), nil
}

// Recent reports whether an address is in a list of clients.
func (p *Packet) Recent(list string, a netip.Addr) bool {
	return p.node.Recent != nil && p.node.Recent(list, a)
}

// Translate changes the destination. Port 0 keeps the port.
func (p *Packet) Translate(to netip.AddrPort) {
	p.Dst = to.Addr()
	if to.Port() != 0 {
		p.Port = to.Port()
	}
}

// delivered reports whether the machine takes a packet for its own. IPVS sends on only packets to such addresses.
func (p *Packet) delivered() bool {
	if p.Local(p.Dst) || p.Virtual.IsValid() {
		return p.Local(p.Dst)
	}
	return p.machine.Diverted[plan.Address{Addr: p.Dst, Protocol: plan.Protocol(strings.ToUpper(p.Protocol)), Port: p.Port}]
}

// protocolNumbers are those of the IP header.
var protocolNumbers = map[string]byte{"tcp": 6, "udp": 17, "sctp": 132}

// Header returns the packet's IP header without options, and the ports behind it. What the simulator does not know of a packet,
// its source port among it, is 0.
func (p *Packet) Header() []byte {
	var h []byte
	if p.Dst.Is4() {
		h = make([]byte, 12, 24)
		h[0], h[8], h[9] = 0x45, 64, protocolNumbers[p.Protocol]
	} else {
		h = make([]byte, 8, 44)
		h[0], h[6], h[7] = 0x60, protocolNumbers[p.Protocol], 64
	}
	h = slices.Concat(h, p.Src.AsSlice(), p.Dst.AsSlice())
	return binary.BigEndian.AppendUint16(append(h, 0, 0), p.Port)
}
