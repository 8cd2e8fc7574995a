package ipvs

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
)

// TestCounts: each virtual server of IPv4 is counted with its real servers, those of IPv6 are not.
func TestCounts(t *testing.T) {
	s := openServers(t)
	c, err := OpenCounts()
	require.NoError(t, err)
	defer c.Close()
	counted := func() map[ServerID]int {
		out := map[ServerID]int{}
		require.NoError(t, c.Read(func(id ServerID, n int) { out[id] = n }))
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

// BenchmarkCounts is what it costs to count the real servers of 10,000 virtual servers with two each.
func BenchmarkCounts(b *testing.B) {
	s := openServers(b)
	c, err := OpenCounts()
	require.NoError(b, err)
	defer c.Close()
	const n = 10_000
	var ops []Op
	for i := range n {
		v := Server{ID: ServerID{Family: plan.IPv4, Protocol: plan.TCP, Addr: at("10.96.0.1:80").Addr(), Port: uint16(i + 1)}, Scheduler: "rr"}
		ops = append(ops, Op{Kind: AddServer, Server: v})
		for j := range 2 {
			addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(200 + j), byte(i >> 8), byte(i)}), 8080)
			ops = append(ops, Op{Kind: AddRealServer, Server: v, RealServer: RealServer{Addr: addr, Weight: 1}})
		}
	}
	require.Empty(b, s.Apply(ops))
	b.Run("counts", func(b *testing.B) {
		for b.Loop() {
			sum := 0
			require.NoError(b, c.Read(func(_ ServerID, n int) { sum += n }))
			require.Equal(b, 2*n, sum)
		}
	})
	b.Run("fingerprint", func(b *testing.B) {
		for b.Loop() {
			_, err := ReadFingerprint(func(ServerID) bool { return false })
			require.NoError(b, err)
		}
	})
	b.Run("list", func(b *testing.B) {
		for b.Loop() {
			_, err := s.ListOnce(plan.IPv4)
			require.NoError(b, err)
		}
	})
}
