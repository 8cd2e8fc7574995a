package tracer

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Attributes of trace messages, and families, which golang.org/x/sys has too; groups, which it has not.
const (
	groupTrace = 9 // NFNLGRP_NFTRACE
	headerLen  = 4 // of struct nfgenmsg, which begins with the family
)

// message is what the kernel tells of one packet in one rule, or at the end of a chain.
type message struct {
	id           uint32
	family       byte // of the table
	table, chain string
	kind         uint32 // NFT_TRACETYPE_...
	handle       uint64
	verdict      string
	in, out      uint32 // indexes of interfaces
	// src and dst are invalid where the message has no headers: only the first of each base chain has.
	src, dst netip.AddrPort
	// reset says that it resets a connection, if it is of TCP.
	reset bool
}

func parseMessage(h netlink.Header, body []byte) (m message, ok bool) {
	if h.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE || len(body) < headerLen {
		return m, false
	}
	attrs := netlink.ByType(body[headerLen:])
	number := func(kind uint16) uint32 { return uint32(netlink.BigEndian(attrs[kind])) }
	m = message{
		family: body[0], id: number(unix.NFTA_TRACE_ID),
		table: netlink.Text(attrs[unix.NFTA_TRACE_TABLE]), chain: netlink.Text(attrs[unix.NFTA_TRACE_CHAIN]),
		kind: number(unix.NFTA_TRACE_TYPE), handle: netlink.BigEndian(attrs[unix.NFTA_TRACE_RULE_HANDLE]),
		in: number(unix.NFTA_TRACE_IIF), out: number(unix.NFTA_TRACE_OIF),
	}
	if v := attrs[unix.NFTA_TRACE_VERDICT]; v != nil {
		m.verdict = verdictName(uint32(netlink.BigEndian(netlink.Attribute(v, unix.NFTA_VERDICT_CODE))),
			netlink.Text(netlink.Attribute(v, unix.NFTA_VERDICT_CHAIN)))
	} else if attrs[unix.NFTA_TRACE_POLICY] != nil {
		m.verdict = verdictName(number(unix.NFTA_TRACE_POLICY), "")
	}
	m.parseHeaders(attrs[unix.NFTA_TRACE_NETWORK_HEADER], attrs[unix.NFTA_TRACE_TRANSPORT_HEADER])
	return m, m.id != 0 && m.table != ""
}

// parseHeaders reads the addresses of a packet, of which only the beginnings of the headers are known.
func (m *message) parseHeaders(network, transport []byte) {
	const v4, v6, ports = 20, 40, 4
	const flagsAt, rst = 13, 0x04
	if len(network) == 0 || len(transport) < ports {
		return
	}
	var src, dst netip.Addr
	switch {
	case network[0]>>4 == 4 && len(network) >= v4:
		src, _ = netlink.Addr(network[12:], plan.IPv4)
		dst, _ = netlink.Addr(network[16:], plan.IPv4)
	case network[0]>>4 == 6 && len(network) >= v6:
		src, _ = netlink.Addr(network[8:], plan.IPv6)
		dst, _ = netlink.Addr(network[24:], plan.IPv6)
	default:
		return
	}
	m.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(transport))
	m.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(transport[2:]))
	m.reset = len(transport) > flagsAt && transport[flagsAt]&rst != 0
}

// verdictName names a verdict as nft does.
func verdictName(code uint32, chain string) string {
	const drop, accept, stolen, queue, stop, mask = 0, 1, 2, 3, 5, 0xff
	const next, brk, jump, goTo, back = -1, -2, -3, -4, -5
	switch int32(code) {
	case next, brk:
		return "continue"
	case jump:
		return "jump " + chain
	case goTo:
		return "goto " + chain
	case back:
		return "return"
	}
	switch code & mask { // The rest is an error number or a queue.
	case drop:
		return Drop
	case accept, stop:
		return Accept
	case stolen:
		return "stolen"
	case queue:
		return "queue"
	}
	return "unknown"
}
