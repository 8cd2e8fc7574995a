// Package conntracktest makes flows for tests: in the kernel's table, and in one that fails on purpose.
package conntracktest

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// What vishvananda/netlink lacks of linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h.
const (
	attrFilter      = 25
	attrStatusMask  = 26
	statusReplied   = 1 << 1
	statusConfirmed = 1 << 3
	statusDstNAT    = 1 << 5
)

const subsystem = unix.NFNL_SUBSYS_CTNETLINK << 8

// Entry describes a flow.
type Entry struct {
	Protocol uint8
	Src, Dst string // of the original direction
	From, To string // source and destination of the replies; where empty, those of a flow that is not translated
	Zone     uint16
	Replied  bool
	State    byte // of TCP
}

func (e Entry) tuples() (src, dst, from, to netip.AddrPort) {
	src, dst = netip.MustParseAddrPort(e.Src), netip.MustParseAddrPort(e.Dst)
	from, to = dst, src
	if e.From != "" {
		from = netip.MustParseAddrPort(e.From)
	}
	if e.To != "" {
		to = netip.MustParseAddrPort(e.To)
	}
	return src, dst, from, to
}

// Tuple appends one direction of a flow.
func Tuple(b netlink.Buffer, kind uint16, protocol uint8, src, dst netip.AddrPort) netlink.Buffer {
	srcKind, dstKind := uint16(nl.CTA_IP_V6_SRC), uint16(nl.CTA_IP_V6_DST)
	if src.Addr().Is4() {
		srcKind, dstKind = nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	}
	return b.Nest(kind, func(b netlink.Buffer) netlink.Buffer {
		b = b.Nest(nl.CTA_TUPLE_IP, func(b netlink.Buffer) netlink.Buffer {
			return b.Addr(srcKind, src.Addr()).Addr(dstKind, dst.Addr())
		})
		return b.Nest(nl.CTA_TUPLE_PROTO, func(b netlink.Buffer) netlink.Buffer {
			return b.Bytes(nl.CTA_PROTO_NUM, protocol).BigEndian16(nl.CTA_PROTO_SRC_PORT, src.Port()).
				BigEndian16(nl.CTA_PROTO_DST_PORT, dst.Port())
		})
	})
}

// Header begins the body of a message about a flow.
func Header(f plan.Family) netlink.Buffer { return netlink.Buffer{netlink.Family(f), 0, 0, 0} }

// Create is a request that puts a flow into the kernel's table for ten minutes.
func (e Entry) Create() netlink.Message {
	src, dst, from, to := e.tuples()
	b := Header(plan.FamilyOf(src.Addr()))
	b = Tuple(b, nl.CTA_TUPLE_ORIG, e.Protocol, src, dst)
	b = Tuple(b, nl.CTA_TUPLE_REPLY, e.Protocol, from, to)
	b = b.BigEndian32(nl.CTA_TIMEOUT, 600)
	if e.Zone != 0 {
		b = b.BigEndian16(nl.CTA_ZONE, e.Zone)
	}
	if e.Replied {
		b = b.BigEndian32(nl.CTA_STATUS, statusReplied|statusConfirmed)
	}
	if e.State != 0 {
		b = b.Nest(nl.CTA_PROTOINFO, func(b netlink.Buffer) netlink.Buffer {
			return b.Nest(nl.CTA_PROTOINFO_TCP, func(b netlink.Buffer) netlink.Buffer {
				return b.Bytes(nl.CTA_PROTOINFO_TCP_STATE, e.State)
			})
		})
	}
	return netlink.Message{Type: subsystem | nl.IPCTNL_MSG_CT_NEW, Flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL, Body: b}
}

// Inject puts flows into the kernel's table of this thread's network namespace.
func Inject(t testing.TB, entries ...Entry) {
	t.Helper()
	c, err := conntrack.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var requests []netlink.Message
	for _, e := range entries {
		requests = append(requests, e.Create())
	}
	for i, err := range c.Do(requests...) {
		if err != nil {
			t.Fatalf("making the flow %+v: %v (net.netfilter.nf_conntrack_max may be too low)", entries[i], err)
		}
	}
}

// Present returns the sources of the flows in the table of this thread's network namespace that one of the entries describes.
func Present(t testing.TB, entries []Entry) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for e := range Which(t, entries) {
		out[e.Src] = true
	}
	return out
}

// Which returns those of the entries that describe a flow in the table of this thread's network namespace. It asks for their families and
// protocols alone: for each question the kernel goes through the whole table, which is one for all namespaces.
func Which(t testing.TB, entries []Entry) map[Entry]bool {
	t.Helper()
	out := map[Entry]bool{}
	table := conntrack.Table{Unfiltered: true}
	s, err := table.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	filters := map[conntrack.Filter]bool{}
	for _, e := range entries {
		src, _, _, _ := e.tuples()
		filters[conntrack.Filter{Family: plan.FamilyOf(src.Addr()), Protocol: e.Protocol}] = true
	}
	for filter := range filters {
		_, _, failed := s.RemoveIf(t.Context(), filter, func(fl *conntrack.Flow) bool {
			for _, e := range entries {
				src, dst, from, _ := e.tuples()
				if src == fl.Src && dst == fl.Dst && from == fl.From && e.Protocol == fl.Protocol {
					out[e] = true
				}
			}
			return false
		})
		err = errors.Join(err, failed)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}
