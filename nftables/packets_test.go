package nftables

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestClientsOfTheKernel: the kernel remembers clients as TestAffinity has it of the rules: for the time of the affinity since their
// last connection, and for another endpoint once theirs is gone.
func TestClientsOfTheKernel(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	for _, args := range [][]string{{"addr", "add", "192.0.2.1/32", "dev", "lo"},
		{"route", "add", "10.96.0.0/12", "dev", "lo", "src", "192.0.2.1"}} {
		nstest.Exec(t, "ip", args...)
	}
	var servers []net.PacketConn
	for i := range 4 {
		a := netip.AddrFrom4([4]byte{10, 244, 0, byte(i + 1)})
		nstest.Exec(t, "ip", "addr", "add", a.String()+"/32", "dev", "lo")
		c, err := net.ListenPacket("udp4", netip.AddrPortFrom(a, 8080).String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		servers = append(servers, c)
	}
	e, _ := testEngine(t, plan.IPv4)
	const keep = 2 * time.Second
	with := func(list ...int) *plan.Plan {
		p := plantest.Large(0, 0)
		sp := *plantest.LargeService(0, 0, 1)
		sp.Key.Protocol, sp.Frontends[0].Protocol, sp.Affinity = plan.UDP, plan.UDP, keep
		sp.Endpoints.Cluster = nil
		for _, i := range list {
			sp.Endpoints.Cluster = append(sp.Endpoints.Cluster,
				plan.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i + 1)}), 8080)})
		}
		p.Set(&sp)
		return p
	}
	key := plantest.LargeService(0, 0, 1).Key
	key.Protocol = plan.UDP
	sync := func(c plan.Change, list ...int) {
		t.Helper()
		if err := e.sync(ctx, with(list...), c); err != nil {
			t.Fatal(err)
		}
	}
	port := 10000
	goes := func() int {
		t.Helper()
		port++ // never one that connection tracking knows
		c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1), Port: port}, &net.UDPAddr{IP: net.IPv4(10, 96, 0, 10), Port: 80})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			for i, s := range servers {
				_ = s.SetReadDeadline(time.Now().Add(3 * time.Millisecond))
				if _, _, err := s.ReadFrom(make([]byte, 10)); err == nil {
					return i
				}
			}
		}
		t.Fatalf("nobody has it:\n%s", nstest.Exec(t, "nft", "list", "ruleset"))
		return -1
	}
	stays := func(at int) {
		t.Helper()
		for range 10 {
			if got := goes(); got != at {
				t.Fatalf("the client of %d goes to %d", at, got)
			}
		}
	}
	for i := range 5 {
		sync(plan.Everything(), 0, 1, 2, 3)
		first := goes()
		stays(first)
		others := []int{}
		for i := range 4 {
			if i != first {
				others = append(others, i)
			}
		}
		sync(plan.Only(plan.Keys{key: {}}), others...)
		second := goes()
		stays(second)
		sync(plan.Only(plan.Keys{key: {}}), 0, 1, 2, 3)
		stays(second)
		sync(plan.Only(plan.Keys{key: {}}), first)
		stays(first)
		if i > 0 {
			continue
		}
		for range 3 {
			time.Sleep(keep * 6 / 10)
			stays(first)
		}
		time.Sleep(keep + 200*time.Millisecond)
		if out := nstest.Exec(t, "nft", "list", "map", "ip", names.NFTables, names.NFTAffinity); strings.Contains(out, "10.96.0.10") {
			t.Errorf("a client that was long away is still known:\n%s", out)
		}
	}
}
