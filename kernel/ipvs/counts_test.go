package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"nodeproxy/plan"
)

// TestRealServersByCounts: a virtual server that is gone, or has another number of real servers, is not read.
func TestRealServersByCounts(t *testing.T) {
	s := openServers(t)
	v := Server{ID: id("TCP", "10.96.0.1:80"), Scheduler: "rr"}
	require.NoError(t, s.Add(v))
	for _, a := range []string{"10.244.0.1:80", "10.244.0.2:80"} {
		require.NoError(t, s.AddRealServer(v.ID, RealServer{Addr: at(a), Weight: 1}))
	}
	for n := range 4 {
		h := &ActualServer{Server: v, RealServers: map[netip.AddrPort]ActualRealServer{}}
		if got := s.counts.realServers(h, n); got != (n == 2) {
			t.Errorf("with %d of 2 real servers: %t", n, got)
		}
		if got, err := s.RealServers(v.ID, n); err != nil || len(got) != 2 || got[at("10.244.0.2:80")].Weight != 1 {
			t.Errorf("with %d of 2 real servers: %v, %v", n, got, err)
		}
	}
	require.NoError(t, s.Delete(v.ID))
	if s.counts.realServers(&ActualServer{Server: v}, 0) {
		t.Error("it is gone, and has been read")
	}
	if got, err := s.RealServers(v.ID, 2); got != nil || err != nil {
		t.Errorf("it is gone: %v, %v", got, err)
	}
}

// TestCounts: each virtual server of IPv4 is counted with its real servers, those of IPv6 are not.
func TestCounts(t *testing.T) {
	s := openServers(t)
	c, err := OpenCounts()
	require.NoError(t, err)
	defer c.Close()
	counted := func() map[ServerID]int {
		out := map[ServerID]int{}
		require.NoError(t, c.Read(func(id ServerID, n int) { out[id] = n }))
		if n, err := c.Servers(); n != len(out) || err != nil {
			t.Errorf("%d virtual servers, %v; want %d", n, err, len(out))
		}
		return out
	}
	require.Empty(t, counted())
	want := map[ServerID]int{
		id("TCP", "10.96.0.1:80"): 2, id("UDP", "10.96.0.1:53"): 0, id("SCTP", "10.96.0.2:9"): 1, {Family: plan.IPv4, Mark: 0x50000001}: 1,
	}
	for v, n := range want {
		require.NoError(t, s.Add(Server{ID: v, Scheduler: "rr"}))
		for i := range n {
			addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i + 1)}), 8080)
			require.NoError(t, s.AddRealServer(v, RealServer{Addr: addr, Weight: 1}))
		}
	}
	require.NoError(t, s.Add(Server{ID: id("TCP", "[fd00::1]:80"), Scheduler: "rr"}))
	for port := range uint16(200) { // They do not fit at first.
		v := id("TCP", "10.96.0.3:80")
		v.Port = port + 1
		require.NoError(t, s.Add(Server{ID: v, Scheduler: "rr"}))
		want[v] = 0
	}
	if got := counted(); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	require.NoError(t, s.Delete(id("UDP", "10.96.0.1:53")))
	delete(want, id("UDP", "10.96.0.1:53"))
	if got := counted(); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestFingerprint: what the kernel lists has the same fingerprint as what was written, and another one where anything differs. That of what was
// written is made without garbage.
func TestFingerprint(t *testing.T) {
	s := openServers(t)
	read := func(skip func(ServerID) bool) Fingerprint {
		f, err := ReadFingerprint(skip)
		require.NoError(t, err)
		return f
	}
	none := func(ServerID) bool { return false }
	var want Fingerprint
	require.Equal(t, want, read(none))
	for _, v := range []struct {
		Server
		real string
	}{
		{Server{ID: id("TCP", "10.96.0.1:80"), Scheduler: "rr"}, "10.244.0.1:8080"},
		{Server{ID: id("UDP", "10.96.0.171:65535"), Scheduler: "wrr"}, "10.244.200.1:1"},
		{Server{ID: id("SCTP", "[fd00:0:1234:abcd::1]:80"), Scheduler: "sh", Ports: true}, "[fd00:10:244::a]:53"},
		{Server{ID: ServerID{Family: plan.IPv4, Mark: 0x5000abcd}, Scheduler: "rr", Persistence: time.Minute}, "10.244.0.9:9"},
	} {
		require.NoError(t, s.Add(v.Server))
		want.Add(v.Server)
		require.Equal(t, want, read(none), "with %s", v.ID)
		d := RealServer{Addr: at(v.real), Weight: 7}
		require.NoError(t, s.AddRealServer(v.ID, d))
		require.NotEqual(t, want, read(none), "with a real server of %s", v.ID)
		want.AddRealServer(v.Server, d)
		require.Equal(t, want, read(none), "with a real server of %s", v.ID)
		var alone Fingerprint
		alone.Add(v.Server)
		alone.AddRealServer(v.Server, d)
		skipped := func(id ServerID) bool { return id.Mark == v.ID.Mark && (id.Mark != 0 || id == v.ID) } // Of a mark, no family is listed.
		require.Equal(t, want-alone, read(skipped), "without %s", v.ID)
		if allocated := testing.AllocsPerRun(10, func() { alone.Add(v.Server); alone.AddRealServer(v.Server, d) }); allocated > 0 {
			t.Errorf("%s: %v allocations", v.ID, allocated)
		}
	}
}

// BenchmarkCounts is what it costs to look at virtual servers with two real servers each, in the ways that there are.
func BenchmarkCounts(b *testing.B) {
	s := openServers(b)
	c, err := OpenCounts()
	require.NoError(b, err)
	defer c.Close()
	ns, err := netns.Get()
	require.NoError(b, err)
	defer ns.Close()
	there := 0
	for _, n := range []int{10_000, 20_000} {
		var ops []Op
		for i := there; i < n; i++ {
			addr := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
			v := Server{ID: ServerID{Family: plan.IPv4, Protocol: plan.TCP, Addr: addr, Port: 80}, Scheduler: "rr"}
			ops = append(ops, Op{Kind: AddServer, Server: v})
			for j := range 2 {
				addr := netip.AddrFrom4([4]byte{10, byte(200 + j), byte(i >> 8), byte(i)})
				ops = append(ops, Op{Kind: AddRealServer, Server: v, RealServer: RealServer{Addr: netip.AddrPortFrom(addr, 8080), Weight: 1}})
			}
		}
		require.Empty(b, s.Apply(ops))
		there = n
		b.Run(fmt.Sprint(n), func(b *testing.B) { benchmarkCounts(b, ns, s, c, n, ops[0].Server.ID) })
	}
}

func benchmarkCounts(b *testing.B, ns netns.NsHandle, s *Servers, c *Counts, n int, some ServerID) {
	counts := s.counts
	defer func() { s.counts = counts }()
	for _, way := range []struct {
		name string
		look func() (int, error)
	}{
		{"number of virtual servers", c.Servers},
		{"numbers of real servers", func() (int, error) {
			sum := 0
			err := c.Read(func(_ ServerID, n int) { sum += n })
			return sum / 2, err
		}},
		{"one of them", func() (int, error) {
			_, err := s.Get(some)
			return n, err
		}},
		{"list in proc", func() (int, error) {
			sum := 0
			_, err := ReadFingerprint(func(ServerID) bool { sum++; return false })
			return sum, err
		}},
		{"all by socket options", func() (int, error) {
			s.counts = counts
			sum := 0
			err := s.EachOnce(plan.IPv4, func(ServerID) int { return 2 }, func(*ActualServer) { sum++ })
			return sum, err
		}},
		{"all by netlink", func() (int, error) {
			s.counts = nil
			sum := 0
			err := s.EachOnce(plan.IPv4, nil, func(*ActualServer) { sum++ })
			return sum, err
		}},
	} {
		b.Run(way.name, func(b *testing.B) {
			runtime.LockOSThread() // It ends with this goroutine.
			require.NoError(b, netns.Set(ns))
			for b.Loop() {
				got, err := way.look()
				if err != nil || got != n {
					b.Fatal(got, err)
				}
			}
		})
	}
}
