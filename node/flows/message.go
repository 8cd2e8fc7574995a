package flows

import (
	"encoding/binary"
	"net/netip"
	"syscall"

	"nodeproxy/plan"
)

// Message types and attributes of ctnetlink, as in linux/netfilter/nfnetlink.h and nfnetlink_conntrack.h.
const (
	subsystem = 1 << 8 // NFNL_SUBSYS_CTNETLINK

	msgNew    = subsystem // IPCTNL_MSG_CT_NEW; each flow of a dump is one, too
	msgGet    = subsystem | 1
	msgDelete = subsystem | 2
	msgStats  = subsystem | 5 // IPCTNL_MSG_CT_GET_STATS

	attrOrig       = 1  // CTA_TUPLE_ORIG
	attrReply      = 2  // CTA_TUPLE_REPLY
	attrStatus     = 3  // CTA_STATUS
	attrProtoInfo  = 4  // CTA_PROTOINFO
	attrID         = 12 // CTA_ID
	attrZone       = 18 // CTA_ZONE
	attrFilter     = 25 // CTA_FILTER
	attrStatusMask = 26 // CTA_STATUS_MASK

	attrProtoInfoTCP = 1 // CTA_PROTOINFO_TCP
	attrTCPState     = 1 // CTA_PROTOINFO_TCP_STATE

	attrFilterOrig  = 1 // CTA_FILTER_ORIG_FLAGS
	attrFilterReply = 2 // CTA_FILTER_REPLY_FLAGS

	attrTupleIP    = 1 // CTA_TUPLE_IP
	attrTupleProto = 2 // CTA_TUPLE_PROTO
	attrTupleZone  = 3 // CTA_TUPLE_ZONE

	attrIPv4Src = 1
	attrIPv4Dst = 2
	attrIPv6Src = 3
	attrIPv6Dst = 4

	attrProtoNum = 1
	attrSrcPort  = 2
	attrDstPort  = 3

	nested   = 1 << 15 // NLA_F_NESTED
	typeMask = 1<<14 - 1

	statusReplied = 1 << 1 // IPS_SEEN_REPLY, as in linux/netfilter/nf_conntrack_common.h
	statusDstNAT  = 1 << 5 // IPS_DST_NAT; IPVS does not set it

	tcpSynSent = 1 // TCP_CONNTRACK_SYN_SENT, as in linux/netfilter/nf_conntrack_tcp.h
)

// Which parts of a tuple the kernel is to compare, as in its nf_conntrack_netlink.c.
const (
	compareSrc     = 1 << 0
	compareDst     = 1 << 1
	compareProto   = 1 << 3
	compareSrcPort = 1 << 4
	compareDstPort = 1 << 5
)

const (
	headerLen   = syscall.NLMSG_HDRLEN
	nfgenmsgLen = 4 // the address family, and a version and a resource that are zero here
	attrHeader  = 4
)

// message is a netlink message in the making.
type message []byte

// newMessage starts a message of ctnetlink.
func newMessage(typ uint16, flags uint16, seq uint32, f plan.Family) message {
	return message(nil).start(typ, flags, seq, f)
}

// start appends the beginning of a message of ctnetlink; finish gives it its length.
func (m message) start(typ uint16, flags uint16, seq uint32, f plan.Family) message {
	m = binary.NativeEndian.AppendUint32(m, 0)
	m = binary.NativeEndian.AppendUint16(m, typ)
	m = binary.NativeEndian.AppendUint16(m, flags)
	m = binary.NativeEndian.AppendUint32(m, seq)
	m = binary.NativeEndian.AppendUint32(m, 0)
	return append(m, addressFamily(f), 0, 0, 0)
}

// finish ends the message that starts at this offset.
func (m message) finish(start int) {
	binary.NativeEndian.PutUint32(m[start:], uint32(len(m)-start))
}

func addressFamily(f plan.Family) byte {
	if f == plan.IPv4 {
		return syscall.AF_INET
	}
	return syscall.AF_INET6
}

// attr appends an attribute.
func (m message) attr(typ uint16, payload ...byte) message {
	m = binary.NativeEndian.AppendUint16(m, uint16(attrHeader+len(payload)))
	m = binary.NativeEndian.AppendUint16(m, typ)
	m = append(m, payload...)
	return append(m, make([]byte, align(len(payload))-len(payload))...)
}

// port appends an attribute with a number in network order, as ports are.
func (m message) port(typ, port uint16) message { return m.attr(typ, byte(port>>8), byte(port)) }

// nest appends an attribute that consists of those that inside appends.
func (m message) nest(typ uint16, inside func(message) message) message {
	start := len(m)
	m = inside(m.attr(typ | nested))
	binary.NativeEndian.PutUint16(m[start:], uint16(len(m)-start))
	return m
}

func align(n int) int { return (n + 3) &^ 3 }

// attributes walks over the attributes in b, whose headers are all within b, and reports whether b holds nothing else.
func attributes(b []byte, visit func(typ uint16, payload []byte)) bool {
	for len(b) >= attrHeader {
		length := int(binary.NativeEndian.Uint16(b))
		if length < attrHeader || length > len(b) {
			return false
		}
		visit(binary.NativeEndian.Uint16(b[2:])&typeMask, b[attrHeader:length])
		b = b[min(align(length), len(b)):]
	}
	return len(b) == 0
}

// filter says which flows a dump is for, by where their first packet came from and went to. An address or port that is zero
// stands for any.
type filter struct {
	family   plan.Family
	protocol uint8
	src, dst part
	// early leaves out flows that have been answered, and those that rules have translated.
	early bool
}

// part is what a filter says of one end of a flow.
type part struct {
	addr netip.Addr
	port uint16
}

// narrowest returns the part that lets all of these through, and as little else as can be.
func narrowest(ends []part) part {
	out := ends[0]
	for _, e := range ends {
		if e.addr != out.addr {
			out.addr = netip.Addr{}
		}
		if e.port != out.port {
			out.port = 0
		}
	}
	return out
}

// dumpRequest asks for all flows of the filter's family, and leaves the rest of the filter to the kernel if inKernel is
// set. A kernel before 5.8 does not know that attribute, and passes over it. Of IPv6 addresses, kernels up to 6.18 at least
// return the flows that have others (ctnetlink_filter_match_tuple takes ipv6_addr_cmp for a predicate), so they are not
// among what the kernel is to compare.
func dumpRequest(f filter, inKernel bool, seq uint32) message {
	m := newMessage(msgGet, syscall.NLM_F_REQUEST|syscall.NLM_F_DUMP, seq, f.family)
	if inKernel {
		compare := uint32(compareProto)
		m = m.nest(attrOrig, func(m message) message {
			if f.family == plan.IPv4 && (f.src.addr.IsValid() || f.dst.addr.IsValid()) {
				m = m.nest(attrTupleIP, func(m message) message {
					m = m.compareAddr(attrIPv4Src, f.src.addr, compareSrc, &compare)
					return m.compareAddr(attrIPv4Dst, f.dst.addr, compareDst, &compare)
				})
			}
			return m.nest(attrTupleProto, func(m message) message {
				m = m.attr(attrProtoNum, f.protocol)
				m = m.comparePort(attrSrcPort, f.src.port, compareSrcPort, &compare)
				return m.comparePort(attrDstPort, f.dst.port, compareDstPort, &compare)
			})
		})
		m = m.nest(attrFilter, func(m message) message {
			m = m.attr(attrFilterOrig, binary.NativeEndian.AppendUint32(nil, compare)...)
			return m.attr(attrFilterReply, 0, 0, 0, 0)
		})
		if f.early { // Linux 5.17 or later compares these bits; others pass over it.
			m = m.attr(attrStatus, 0, 0, 0, 0).attr(attrStatusMask, 0, 0, 0, statusReplied|statusDstNAT)
		}
	}
	m.finish(0)
	return m
}

// compareAddr appends an address and has the kernel compare it, unless any will do.
func (m message) compareAddr(typ uint16, a netip.Addr, flag uint32, compare *uint32) message {
	if !a.IsValid() {
		return m
	}
	*compare |= flag
	return m.attr(typ, a.AsSlice()...)
}

// comparePort appends a port and has the kernel compare it, unless any will do.
func (m message) comparePort(typ, port uint16, flag uint32, compare *uint32) message {
	if port == 0 {
		return m
	}
	*compare |= flag
	return m.port(typ, port)
}
