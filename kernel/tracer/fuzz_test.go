package tracer

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// FuzzTrace: whatever the kernel tells of packets and counters, reading it ends, and no more is kept than is asked for.
func FuzzTrace(f *testing.F) {
	of := func(table, chain string, kind uint32, network, transport []byte) []byte {
		b := netlink.Buffer{unix.NFPROTO_IPV4, 0, 0, 0}.BigEndian32(unix.NFTA_TRACE_ID, 7).Text(unix.NFTA_TRACE_TABLE, table).
			Text(unix.NFTA_TRACE_CHAIN, chain).BigEndian32(unix.NFTA_TRACE_TYPE, kind).BigEndian32(unix.NFTA_TRACE_RULE_HANDLE, 3).
			Nest(unix.NFTA_TRACE_VERDICT, func(b netlink.Buffer) netlink.Buffer {
				return b.BigEndian32(unix.NFTA_VERDICT_CODE, 0xfffffffd).Text(unix.NFTA_VERDICT_CHAIN, "next")
			}).BigEndian32(unix.NFTA_TRACE_POLICY, 1).BigEndian32(unix.NFTA_TRACE_MARK, 0x4000)
		if network != nil {
			b = b.Bytes(unix.NFTA_TRACE_NETWORK_HEADER, network...).Bytes(unix.NFTA_TRACE_TRANSPORT_HEADER, transport...)
		}
		return netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_TRACE, Body: b}.Append(nil, 0)
	}
	v4 := append(append([]byte{0x45, 11: 0}, 10, 0, 0, 1), 10, 96, 0, 1)
	v6 := append([]byte{0x60}, make([]byte, 39)...)
	first := of(names.Trace, chainMark, unix.NFT_TRACETYPE_RULE, v4, []byte{0, 80, 0, 90})
	f.Add(slices.Concat(first, of("nat", "PREROUTING", unix.NFT_TRACETYPE_RULE, nil, nil), of("nat", "PREROUTING", unix.NFT_TRACETYPE_POLICY, nil, nil),
		of(names.Trace, chainPost, unix.NFT_TRACETYPE_POLICY, v4, []byte{0, 80})))
	f.Add(of(names.Trace, chainMark, unix.NFT_TRACETYPE_RULE, v6, []byte{0, 80, 0, 90}))
	f.Add([]byte(netlink.Buffer(nil).Nest(unix.NFTA_RULE_EXPRESSIONS, func(b netlink.Buffer) netlink.Buffer {
		return b.Nest(1, func(b netlink.Buffer) netlink.Buffer {
			return b.Text(unix.NFTA_EXPR_NAME, "counter").Nest(unix.NFTA_EXPR_DATA, func(b netlink.Buffer) netlink.Buffer {
				return b.Bytes(unix.NFTA_COUNTER_PACKETS, 0, 0, 0, 0, 0, 0, 0, 5)
			})
		})
	})))
	f.Fuzz(func(t *testing.T, b []byte) {
		const most = 2
		tr := &Tracer{flow: Flow{Protocol: plan.TCP, Dst: netip.MustParseAddrPort("10.96.0.1:80")}, packets: map[uint32]*Packet{}, interfaces: map[uint32]string{}}
		_ = netlink.Messages(b, func(h netlink.Header, body []byte) {
			if m, ok := parseMessage(h, body); ok {
				m.in, m.out = 0, 0 // Their names are asked for.
				tr.add(m, most)
			}
		})
		if len(tr.list) > most {
			t.Errorf("%d packets are kept", len(tr.list))
		}
		for _, p := range tr.list {
			if len(p.Steps) > mostSteps {
				t.Errorf("%d steps of a packet are kept", len(p.Steps))
			}
		}
		_ = countedBy(b)
	})
}
