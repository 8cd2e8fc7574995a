package flows

import (
	"encoding/binary"
	"net/netip"
	"syscall"

	"nodeproxy/plan"
)

// flow is what matters of an entry of the kernel's table.
type flow struct {
	family   plan.Family
	protocol uint8 // as in IP headers
	// src is where the first packet came from, and dst where it was sent to; from is who is to answer, and to is where
	// answers are sent.
	src, dst, from, to netip.AddrPort
	replied            bool // whether there was an answer
	synSent            bool // of TCP: whether it is in state SYN_SENT
	zone               bool // whether the flow is in a zone other than the default one
	// id tells the entry from a later one of the same addresses and ports. orig is the tuple by which the kernel finds it,
	// in its own form; it is valid as long as the buffer that the flow was read from.
	id, orig []byte
}

// translated reports whether another address or port answers than the one that the client sent to.
func (f *flow) translated() bool { return f.dst != f.from }

// oneWay reports whether a flow has packets of one direction only, and goes from where it seems to come from to where it was
// sent. To take such a flow away changes nothing for its packets.
func (f *flow) oneWay() bool { return !f.replied && !f.translated() && f.src == f.to }

// parse reads a flow from the payload of a message of the kernel's, and reports whether it is a whole one with ports.
func (f *flow) parse(b []byte) bool {
	*f = flow{}
	if len(b) < nfgenmsgLen {
		return false
	}
	switch b[0] {
	case syscall.AF_INET:
		f.family = plan.IPv4
	case syscall.AF_INET6:
		f.family = plan.IPv6
	default:
		return false
	}
	var orig, reply tuple
	whole := attributes(b[nfgenmsgLen:], func(typ uint16, payload []byte) {
		switch typ {
		case attrOrig:
			f.orig = payload
			orig.parse(payload)
		case attrReply:
			reply.parse(payload)
		case attrStatus:
			f.replied = len(payload) == 4 && binary.BigEndian.Uint32(payload)&statusReplied != 0
		case attrProtoInfo:
			f.synSent = tcpState(payload) == tcpSynSent
		case attrID:
			f.id = payload
		case attrZone:
			f.zone = f.zone || nonZero(payload)
		}
	})
	f.zone = f.zone || orig.zone || reply.zone
	f.protocol = orig.protocol
	f.src, f.dst, f.from, f.to = orig.src(), orig.dst(), reply.src(), reply.dst()
	return whole && orig.protocol == reply.protocol && f.dst.IsValid() && f.from.IsValid() &&
		plan.FamilyOf(f.dst.Addr()) == f.family && plan.FamilyOf(f.from.Addr()) == f.family
}

// tcpState is the state of a TCP connection; 0 if there is none.
func tcpState(protoInfo []byte) (state byte) {
	attributes(protoInfo, func(typ uint16, payload []byte) {
		if typ != attrProtoInfoTCP {
			return
		}
		attributes(payload, func(typ uint16, payload []byte) {
			if typ == attrTCPState && len(payload) == 1 {
				state = payload[0]
			}
		})
	})
	return state
}

// tuple is one direction of a flow.
type tuple struct {
	srcAddr, dstAddr netip.Addr
	srcPort, dstPort uint16
	protocol         uint8
	zone             bool
}

func (t *tuple) src() netip.AddrPort { return netip.AddrPortFrom(t.srcAddr, t.srcPort) }
func (t *tuple) dst() netip.AddrPort { return netip.AddrPortFrom(t.dstAddr, t.dstPort) }

func (t *tuple) parse(b []byte) {
	attributes(b, func(typ uint16, payload []byte) {
		switch typ {
		case attrTupleIP:
			attributes(payload, func(typ uint16, payload []byte) {
				switch typ {
				case attrIPv4Src, attrIPv6Src:
					t.srcAddr, _ = netip.AddrFromSlice(payload)
				case attrIPv4Dst, attrIPv6Dst:
					t.dstAddr, _ = netip.AddrFromSlice(payload)
				}
			})
		case attrTupleProto:
			attributes(payload, t.parseProtocol)
		case attrTupleZone:
			t.zone = nonZero(payload)
		}
	})
}

func (t *tuple) parseProtocol(typ uint16, payload []byte) {
	switch {
	case typ == attrProtoNum && len(payload) == 1:
		t.protocol = payload[0]
	case typ == attrSrcPort && len(payload) == 2:
		t.srcPort = binary.BigEndian.Uint16(payload)
	case typ == attrDstPort && len(payload) == 2:
		t.dstPort = binary.BigEndian.Uint16(payload)
	}
}

func nonZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return true
		}
	}
	return false
}

// deleteRequest appends a message that deletes this very entry, and not a later one in its place.
func (f *flow) deleteRequest(m message, flags uint16, seq uint32) message {
	start := len(m)
	m = m.start(msgDelete, flags, seq, f.family)
	m = m.attr(attrOrig|nested, f.orig...)
	if len(f.id) > 0 {
		m = m.attr(attrID, f.id...)
	}
	m.finish(start)
	return m
}
