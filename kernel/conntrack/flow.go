package conntrack

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Flow is an entry of the table, as far as it is read. It is valid only during the call that it is passed to.
type Flow struct {
	Family   plan.Family
	Protocol uint8 // as in IP headers
	// Src and Dst are the source and destination of the first packet; From is the source of replies, and To their destination.
	Src, Dst, From, To netip.AddrPort
	Replied            bool // whether there was an answer
	SynSent            bool // of TCP: whether it is in state SYN_SENT
	Ended              bool // of TCP: whether it is in state TIME_WAIT or CLOSE; the kernel forgets it within two minutes
	Zoned              bool // whether the flow is in a zone other than the default one
	// ID distinguishes the entry from a later one with the same addresses and ports.
	ID []byte
	// orig is the tuple by which the kernel finds the entry, in its own form.
	orig []byte
}

// Translated reports whether replies come from another address or port than the client sent to.
func (f *Flow) Translated() bool { return f.Dst != f.From }

// OneWay reports whether a flow has packets in one direction only and is not translated. Removing such a flow changes nothing for
// its packets.
func (f *Flow) OneWay() bool { return !f.Replied && !f.Translated() && f.Src == f.To }

// parse reads a flow from the body of a message, and reports whether it is complete and has ports.
func (f *Flow) parse(b []byte) bool {
	*f = Flow{}
	if len(b) < nfgenmsgLen {
		return false
	}
	switch b[0] {
	case unix.AF_INET:
		f.Family = plan.IPv4
	case unix.AF_INET6:
		f.Family = plan.IPv6
	default:
		return false
	}
	var orig, reply tuple
	for kind, value := range netlink.Attributes(b[nfgenmsgLen:]) {
		switch kind {
		case attrOrig:
			f.orig = value
			orig.parse(value)
		case attrReply:
			reply.parse(value)
		case attrStatus:
			f.Replied = len(value) == 4 && binary.BigEndian.Uint32(value)&statusReplied != 0
		case attrProtoInfo:
			state := tcpState(value)
			f.SynSent, f.Ended = state == tcpSynSent, state == tcpTimeWait || state == tcpClose
		case attrID:
			f.ID = value
		case attrZone:
			f.Zoned = f.Zoned || netlink.BigEndian(value) != 0
		}
	}
	f.Zoned = f.Zoned || orig.zoned || reply.zoned
	f.Protocol = orig.protocol
	f.Src, f.Dst, f.From, f.To = orig.src(), orig.dst(), reply.src(), reply.dst()
	return netlink.Whole(b[nfgenmsgLen:]) && orig.protocol == reply.protocol && f.Dst.IsValid() && f.From.IsValid() &&
		plan.FamilyOf(f.Dst.Addr()) == f.Family && plan.FamilyOf(f.From.Addr()) == f.Family
}

// tcpState returns the state of a TCP connection; 0 if there is none.
func tcpState(protoInfo []byte) byte {
	state := netlink.Attribute(netlink.Attribute(protoInfo, attrProtoInfoTCP), attrTCPState)
	if len(state) != 1 {
		return 0
	}
	return state[0]
}

// tuple is one direction of a flow.
type tuple struct {
	srcAddr, dstAddr netip.Addr
	srcPort, dstPort uint16
	protocol         uint8
	zoned            bool
}

func (t *tuple) src() netip.AddrPort { return netip.AddrPortFrom(t.srcAddr, t.srcPort) }
func (t *tuple) dst() netip.AddrPort { return netip.AddrPortFrom(t.dstAddr, t.dstPort) }

func (t *tuple) parse(b []byte) {
	for kind, value := range netlink.Attributes(b) {
		switch kind {
		case attrTupleIP:
			t.parseAddrs(value)
		case attrTupleProto:
			t.parseProtocol(value)
		case attrTupleZone:
			t.zoned = netlink.BigEndian(value) != 0
		}
	}
}

func (t *tuple) parseAddrs(b []byte) {
	for kind, value := range netlink.Attributes(b) {
		switch kind {
		case attrIPv4Src, attrIPv6Src:
			t.srcAddr, _ = netip.AddrFromSlice(value)
		case attrIPv4Dst, attrIPv6Dst:
			t.dstAddr, _ = netip.AddrFromSlice(value)
		}
	}
}

func (t *tuple) parseProtocol(b []byte) {
	for kind, value := range netlink.Attributes(b) {
		switch {
		case kind == attrProtoNum && len(value) == 1:
			t.protocol = value[0]
		case kind == attrSrcPort && len(value) == 2:
			t.srcPort = binary.BigEndian.Uint16(value)
		case kind == attrDstPort && len(value) == 2:
			t.dstPort = binary.BigEndian.Uint16(value)
		}
	}
}

// appendDelete appends the body of a message that deletes exactly this entry, not a later one that replaced it.
func (f *Flow) appendDelete(b netlink.Buffer) netlink.Buffer {
	b = appendHeader(b, f.Family).Bytes(attrOrig|unix.NLA_F_NESTED, f.orig...)
	if len(f.ID) > 0 {
		b = b.Bytes(attrID, f.ID...)
	}
	return b
}
