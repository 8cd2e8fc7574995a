package ipvs

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// TestTraffic holds a TCP connection, and has a UDP exchange, by way of a virtual server with persistence.
func TestTraffic(t *testing.T) {
	s := openServers(t)
	nstest.Exec(t, "ip", "addr", "add", "10.96.0.1/32", "dev", "lo")
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.7/32", "dev", "lo")
	listener, err := net.Listen("tcp", "192.0.2.7:8080")
	require.NoError(t, err)
	defer listener.Close()
	go func() { // It uses a socket that exists, so that it may run on a thread of another namespace.
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c) }()
		}
	}()

	v := Server{ID: id(plan.TCP, "10.96.0.1:80"), Scheduler: "rr", Persistence: time.Hour}
	to := RealServer{at("192.0.2.7:8080"), 1}
	idle := Server{ID: ServerID{Family: plan.IPv4, Mark: 7}, Scheduler: "rr"}
	require.NoError(t, errors.Join(s.Add(v), s.AddRealServer(v.ID, to), s.Add(idle)))
	conn, err := net.DialTimeout("tcp", "10.96.0.1:80", 20*time.Second)
	require.NoError(t, err)
	defer conn.Close()
	line := "a line of thirty-two characters\n"
	if _, err := conn.Write([]byte(line)); err != nil {
		t.Fatal(err)
	}
	if got, err := bufio.NewReader(conn).ReadString('\n'); got != line {
		t.Fatalf("answer %q, %v", got, err)
	}

	got, err := s.Get(v.ID)
	want := ActualRealServer{to, Connections{Active: 1, Persistent: 1}}
	if err != nil || got.RealServers[to.Addr] != want {
		t.Errorf("with a connection: %+v, %v; want %+v", got, err, want)
	}
	to.Weight = 0
	require.NoError(t, s.UpdateRealServer(v.ID, to))
	want.Weight = 0
	if got, err = s.Get(v.ID); err != nil || got.RealServers[to.Addr] != want {
		t.Errorf("with weight 0: %+v, %v; want %+v", got, err, want)
	}

	deadline := time.Now().Add(time.Minute) // The kernel sums up every two seconds.
	for ; ; time.Sleep(100 * time.Millisecond) {
		stats := map[ServerID]Traffic{}
		err := s.Stats(func(id ServerID, t Traffic) { stats[id] = t })
		if err != nil || len(stats) != 2 || stats[idle.ID] != (Traffic{}) {
			t.Fatalf("counters %v, %v; want none for %s", stats, err, idle.ID)
		}
		n := stats[v.ID]
		if n.Connections == 1 && n.PacketsIn >= 3 && n.PacketsOut >= 2 && n.BytesIn > 32+3*40 && n.BytesOut > 32+2*40 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("counters of %s are still %+v", v.ID, n)
		}
	}
}

// TestTrafficOf64Bits reads counters as kernels before and since 4.1 send them.
func TestTrafficOf64Bits(t *testing.T) {
	counters := func(wide bool, n uint64) func(netlink.Buffer) netlink.Buffer {
		return func(b netlink.Buffer) netlink.Buffer {
			for kind := uint16(statsConnections); kind <= statsBytesOut; kind++ {
				if wide || kind >= statsBytesIn {
					b = b.Bytes(kind, binary.NativeEndian.AppendUint64(nil, n)...)
				} else {
					b = b.Uint32(kind, uint32(n))
				}
				n++
			}
			return b
		}
	}
	for _, wide := range []bool{false, true} {
		body := genl(commandNewService).Nest(attrService, func(b netlink.Buffer) netlink.Buffer {
			b = appendService(b, Server{ID: id(plan.TCP, "10.96.0.1:80"), Scheduler: "rr"})
			b = b.Nest(serviceStats, counters(false, 1))
			if wide {
				b = b.Nest(serviceStats64, counters(true, 1<<32))
			}
			return b
		})
		want := Traffic{1, 2, 3, 4, 5}
		if wide {
			want = Traffic{1 << 32, 1<<32 + 1, 1<<32 + 2, 1<<32 + 3, 1<<32 + 4}
		}
		if h, got, err := parseService(body); err != nil || got != want || h.Foreign || h.Scheduler != "rr" {
			t.Errorf("%+v, %+v, %v; want %+v", h, got, err, want)
		}
	}
}
