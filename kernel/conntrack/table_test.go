package conntrack_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

type (
	entry = conntracktest.Entry
	end   = conntrack.End
)

const (
	protoUDP  = unix.IPPROTO_UDP
	protoSCTP = unix.IPPROTO_SCTP
)

// TestFilters: the kernel hands over all flows that a filter is for. It may hand over more.
func TestFilters(t *testing.T) {
	t.Parallel()
	for f, a := range map[plan.Family]struct{ client, clusterIP, one, two string }{
		plan.IPv4: {"10.244.1.9", "10.96.0.10", "10.244.1.1", "10.244.2.2"},
		plan.IPv6: {"fd00:244:1::9", "fd00:96::10", "fd00:244:1::1", "fd00:244:2::2"},
	} {
		nstest.Run(t, func() {
			at := func(addr string, port uint16) string {
				return netip.AddrPortFrom(netip.MustParseAddr(addr), port).String()
			}
			wanted := entry{Protocol: protoUDP, Src: at(a.client, 4001), Dst: at(a.clusterIP, 53)}
			conntracktest.Inject(t, wanted,
				entry{Protocol: protoUDP, Src: at(a.one, 4002), Dst: at(a.clusterIP, 54)},
				entry{Protocol: protoUDP, Src: at(a.client, 4003), Dst: at(a.two, 53)},
				entry{Protocol: protoSCTP, Src: at(a.client, 4004), Dst: at(a.clusterIP, 53)})
			client, clusterIP := netip.MustParseAddr(a.client), netip.MustParseAddr(a.clusterIP)
			for _, want := range []conntrack.Filter{
				{}, {Dst: end{clusterIP, 53}}, {Dst: end{clusterIP, 0}}, {Dst: end{Port: 53}},
				{Src: end{client, 4001}}, {Src: end{client, 0}}, {Src: end{Port: 4001}},
				{Src: end{client, 4001}, Dst: end{clusterIP, 53}},
			} {
				want.Family, want.Protocol = f, protoUDP
				found := false
				var table conntrack.Table
				session, err := table.Open()
				require.NoError(t, err)
				_, _, err = session.RemoveIf(t.Context(), want, func(fl *conntrack.Flow) bool {
					found = found || fl.Src.String() == wanted.Src
					return false
				})
				session.Close()
				if err != nil || !found || table.Unfiltered {
					t.Errorf("%+v: found %v, without a filter %v, %v", want, found, table.Unfiltered, err)
				}
			}
		})
	}
}

// TestDeletesThatEntryOnly: a flow that was made anew since it was read, with the same addresses and ports, is not
// deleted in the place of the one that was read.
func TestDeletesThatEntryOnly(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		flows := []entry{{Protocol: protoUDP, Src: "10.244.1.9:1", Dst: "10.96.0.10:53"}}
		conntracktest.Inject(t, flows...)
		var table conntrack.Table
		remove := func(change func(*conntrack.Flow)) (read, deleted int) {
			session, err := table.Open()
			require.NoError(t, err)
			defer session.Close()
			filter := conntrack.Filter{Family: plan.IPv4, Protocol: protoUDP}
			read, deleted, err = session.RemoveIf(t.Context(), filter, func(fl *conntrack.Flow) bool {
				if len(fl.ID) == 0 {
					t.Error("the kernel gives no id")
				}
				change(fl)
				return true
			})
			assert.NoError(t, err)
			return read, deleted
		}
		present := func(want bool) {
			t.Helper()
			if got := conntracktest.Present(t, flows); got[flows[0].Src] != want {
				t.Errorf("the flow is there: %t, want %t", !want, want)
			}
		}
		other := func(fl *conntrack.Flow) { fl.ID = []byte{fl.ID[0] ^ 1, fl.ID[1], fl.ID[2], fl.ID[3]} }
		if read, deleted := remove(other); read != 1 || deleted != 0 {
			t.Errorf("with another id: read %d, deleted %d", read, deleted)
		}
		present(true)
		if read, deleted := remove(func(*conntrack.Flow) {}); read != 1 || deleted != 1 {
			t.Errorf("with its id: read %d, deleted %d", read, deleted)
		}
		present(false)
	})
}

// TestEnded: a TCP connection that is over, though the kernel still tracks it, is told from one that is open.
func TestEnded(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		const last = 8 // CLOSE
		var flows []entry
		for state := range uint8(last) {
			flows = append(flows, entry{Protocol: unix.IPPROTO_TCP, Src: netip.AddrPortFrom(netip.MustParseAddr("10.244.1.9"), uint16(state)+1).String(), Dst: "10.96.0.10:80", State: state + 1})
		}
		conntracktest.Inject(t, flows...)
		var table conntrack.Table
		session, err := table.Open()
		if err != nil {
			t.Error(err)
			return
		}
		defer session.Close()
		ended := map[uint16]bool{}
		err = session.Each(t.Context(), conntrack.Filter{Family: plan.IPv4, Protocol: unix.IPPROTO_TCP}, func(f *conntrack.Flow) { ended[f.Src.Port()] = f.Ended })
		if err != nil || len(ended) != len(flows) {
			t.Errorf("%d of %d flows are read: %v", len(ended), len(flows), err)
		}
		for state, is := range ended {
			if want := state == 7 || state == 8; is != want { // TIME_WAIT and CLOSE
				t.Errorf("in state %d, the connection has ended: %t", state, is)
			}
		}
	})
}

// FuzzFlow: no message makes the parser fail, and what it makes of one is whole.
func FuzzFlow(f *testing.F) {
	for _, e := range []entry{{Protocol: protoUDP, Src: "10.0.0.1:1", Dst: "10.0.0.2:2"},
		{Protocol: protoSCTP, Src: "[fd00::1]:1", Dst: "[fd00::2]:2", From: "[fd00::3]:3", Zone: 9}} {
		f.Add(e.Create().Append(nil, 1))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = netlink.Messages(b, func(_ netlink.Header, body []byte) {
			var fl conntrack.Flow
			if fl.Parse(body) && (!fl.Dst.IsValid() || !fl.From.IsValid() || !fl.HasKey()) {
				t.Errorf("%+v", fl)
			}
		})
	})
}

// TestZones: a flow of another conntrack zone is distinguished from others, wherever the kernel names the zone.
func TestZones(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		zone, tupleZone uint16
		want            bool
	}{{0, 0, false}, {7, 0, true}, {0, 7, true}, {256, 0, true}} {
		client, dst := netip.MustParseAddrPort("10.244.1.9:1"), netip.MustParseAddrPort("10.96.0.10:53")
		b := conntracktest.Tuple(conntracktest.Header(plan.IPv4), nl.CTA_TUPLE_ORIG, protoUDP, client, dst)
		b = b.Nest(nl.CTA_TUPLE_REPLY, func(b netlink.Buffer) netlink.Buffer {
			const attributeHeader, tupleZone = 4, 3
			reply := conntracktest.Tuple(nil, nl.CTA_TUPLE_REPLY, protoUDP, dst, client)
			return append(b, reply[attributeHeader:]...).BigEndian16(tupleZone, c.tupleZone)
		})
		var fl conntrack.Flow
		if !fl.Parse(b.BigEndian16(nl.CTA_ZONE, c.zone)) {
			t.Fatal("not read")
		}
		if fl.Zoned != c.want {
			t.Errorf("zone %d, of the tuple %d: zoned %v, want %v", c.zone, c.tupleZone, fl.Zoned, c.want)
		}
	}
}
