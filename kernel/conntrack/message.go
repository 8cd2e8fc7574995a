package conntrack

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Message types and attributes of ctnetlink, as in linux/netfilter/nfnetlink.h and nfnetlink_conntrack.h.
const (
	subsystem = unix.NFNL_SUBSYS_CTNETLINK << 8

	msgNew    = subsystem // IPCTNL_MSG_CT_NEW, as which the flows of a dump come
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

	statusReplied = 1 << 1 // IPS_SEEN_REPLY, as in linux/netfilter/nf_conntrack_common.h
	statusDstNAT  = 1 << 5 // IPS_DST_NAT; IPVS does not set it

	tcpSynSent  = 1 // TCP_CONNTRACK_SYN_SENT, as in linux/netfilter/nf_conntrack_tcp.h
	tcpTimeWait = 7
	tcpClose    = 8
)

// Which parts of a tuple the kernel is to compare, as in its nf_conntrack_netlink.c.
const (
	compareSrc     = 1 << 0
	compareDst     = 1 << 1
	compareProto   = 1 << 3
	compareSrcPort = 1 << 4
	compareDstPort = 1 << 5
)

// nfgenmsgLen is the length of the header of nfnetlink: the address family, and a version and a resource that are zero here.
const nfgenmsgLen = 4

func appendHeader(b netlink.Buffer, f plan.Family) netlink.Buffer {
	return append(b, netlink.Family(f), 0, 0, 0)
}

// Filter selects flows by the source and destination of their first packet. A zero address or port matches any.
type Filter struct {
	Family   plan.Family
	Protocol uint8
	Src, Dst End
	// Early excludes flows that have been answered, and those that rules have translated.
	Early bool
}

// End is one end of a flow in a Filter.
type End struct {
	Addr netip.Addr
	Port uint16
}

// Narrowest returns the narrowest End that matches all of these.
func Narrowest(ends []End) End {
	out := ends[0]
	for _, e := range ends {
		if e.Addr != out.Addr {
			out.Addr = netip.Addr{}
		}
		if e.Port != out.Port {
			out.Port = 0
		}
	}
	return out
}

// dumpRequest asks for all flows of the filter's family, and leaves the rest of the filter to the kernel if inKernel is set. A
// kernel before 5.8 ignores that attribute. Kernels up to at least 6.18 return the flows with other IPv6 addresses than asked for
// (ctnetlink_filter_match_tuple takes ipv6_addr_cmp for a predicate), so the kernel does not compare these.
func dumpRequest(f Filter, inKernel bool) netlink.Message {
	b := appendHeader(nil, f.Family)
	if inKernel {
		compare := uint32(compareProto)
		b = b.Nest(attrOrig, func(b netlink.Buffer) netlink.Buffer {
			if f.Family == plan.IPv4 && (f.Src.Addr.IsValid() || f.Dst.Addr.IsValid()) {
				b = b.Nest(attrTupleIP, func(b netlink.Buffer) netlink.Buffer {
					b = compareAddr(b, attrIPv4Src, f.Src.Addr, compareSrc, &compare)
					return compareAddr(b, attrIPv4Dst, f.Dst.Addr, compareDst, &compare)
				})
			}
			return b.Nest(attrTupleProto, func(b netlink.Buffer) netlink.Buffer {
				b = b.Bytes(attrProtoNum, f.Protocol)
				b = comparePort(b, attrSrcPort, f.Src.Port, compareSrcPort, &compare)
				return comparePort(b, attrDstPort, f.Dst.Port, compareDstPort, &compare)
			})
		})
		b = b.Nest(attrFilter, func(b netlink.Buffer) netlink.Buffer {
			return b.Uint32(attrFilterOrig, compare).Uint32(attrFilterReply, 0)
		})
		if f.Early { // Linux 5.17 or later compares these bits; others pass over it.
			b = b.BigEndian32(attrStatus, 0).BigEndian32(attrStatusMask, statusReplied|statusDstNAT)
		}
	}
	return netlink.Message{Type: msgGet, Body: b}
}

// compareAddr appends an address and has the kernel compare it, unless any will do.
func compareAddr(b netlink.Buffer, kind uint16, a netip.Addr, flag uint32, compare *uint32) netlink.Buffer {
	if !a.IsValid() {
		return b
	}
	*compare |= flag
	return b.Addr(kind, a)
}

// comparePort appends a port and has the kernel compare it, unless any will do.
func comparePort(b netlink.Buffer, kind, port uint16, flag uint32, compare *uint32) netlink.Buffer {
	if port == 0 {
		return b
	}
	*compare |= flag
	return b.BigEndian16(kind, port)
}
