package ipvs

import (
	"net/netip"
	"testing"
	"time"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// FuzzServers: whatever the kernel says of virtual servers and real servers, reading it ends, and an address is of its family.
func FuzzServers(f *testing.F) {
	for _, addr := range []string{"10.96.0.1", "fd00::1"} {
		a := netip.MustParseAddr(addr)
		for _, id := range []ServerID{{Family: plan.FamilyOf(a), Protocol: plan.UDP, Addr: a, Port: 53}, {Family: plan.FamilyOf(a), Mark: 7}} {
			s := Server{ID: id, Scheduler: "sh", Ports: true, Persistence: time.Minute}
			f.Add([]byte(genl(commandNewService).Nest(attrService, func(b netlink.Buffer) netlink.Buffer {
				return appendService(b, s).Nest(serviceStats, func(b netlink.Buffer) netlink.Buffer { return b.Uint32(statsConnections, 5) })
			})))
		}
		d := RealServer{Addr: netip.AddrPortFrom(a, 80), Weight: 1}
		f.Add([]byte(genl(commandNewService).Nest(attrDest, func(b netlink.Buffer) netlink.Buffer { return appendRealServer(b, d) })))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if s, _, err := parseService(body); err == nil {
			_ = s.ID.String()
			if s.ID.Mark == 0 && s.ID.Addr.BitLen() != s.ID.Family.Bits() {
				t.Errorf("the virtual server %s is of %s", s.ID, s.ID.Family)
			}
		}
		for _, family := range plan.Families {
			if d, _, err := parseRealServer(body, family); err == nil && !d.Addr.IsValid() {
				t.Errorf("a real server is at %s", d.Addr)
			}
		}
	})
}
