package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// pods are servers on addresses of the namespace, from 10.244.0.1 on, and the plan's Service for them is at 10.96.0.10, UDP port 80.
type pods struct {
	servers []net.PacketConn
	port    int // of the client that asked last
}

func startPods(t testing.TB, n int) *pods {
	t.Helper()
	nstest.Exec(t, "ip", "route", "add", "10.96.0.0/12", "dev", "lo", "src", "127.0.0.1")
	p := &pods{port: 10000}
	for i := range n {
		a := podAddress(i)
		nstest.Exec(t, "ip", "addr", "add", a.Addr().String()+"/32", "dev", "lo")
		c, err := net.ListenPacket("udp4", a.String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		p.servers = append(p.servers, c)
	}
	return p
}

func podAddress(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(i + 1)}), 8080)
}

// service is the Service, with some of the pods as endpoints.
func (p *pods) service(list ...int) *plan.ServicePort {
	sp := plantest.LargeService(0, 0, 1)
	sp.Key.Protocol, sp.Frontends[0].Protocol = plan.UDP, plan.UDP
	sp.Endpoints.Cluster = nil
	for _, i := range list {
		sp.Endpoints.Cluster = append(sp.Endpoints.Cluster, plan.Endpoint{Addr: podAddress(i)})
	}
	return sp
}

// goes sends the first packet of a connection from a client, whose address the namespace must have, and returns the pod that gets it.
func (p *pods) goes(t testing.TB, from net.IP) int {
	return p.goesTo(t, from, netip.AddrFrom4([4]byte{10, 96, 0, 10}))
}

// goesTo does the same for another cluster IP than that of the Service.
func (p *pods) goesTo(t testing.TB, from net.IP, to netip.Addr) int {
	t.Helper()
	p.port++ // never one that connection tracking knows
	c, err := net.DialUDP("udp4", &net.UDPAddr{IP: from, Port: p.port}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 80)))
	require.NoError(t, err)
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); {
		for i, s := range p.servers {
			_ = s.SetReadDeadline(time.Now().Add(3 * time.Millisecond))
			if _, _, err := s.ReadFrom(make([]byte, 10)); err == nil {
				return i
			}
		}
	}
	t.Fatalf("nobody has it:\n%s", nstest.Exec(t, "nft", "list", "ruleset"))
	return -1
}

// TestClientsOfTheKernel: the kernel remembers clients as TestAffinity has it of the rules: for the time of the affinity since their
// last connection, and for another endpoint once theirs is gone.
func TestClientsOfTheKernel(t *testing.T) {
	nstest.Enter(t)
	world := startPods(t, 4)
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
	e, _ := testEngine(t, plan.IPv4)
	keep := time.Hour // Nobody is away for that long.
	key := world.service().Key
	sync := func(c plan.Change, list ...int) {
		t.Helper()
		p, sp := plantest.Large(0, 0), world.service(list...)
		sp.Affinity = keep
		p.Set(sp)
		synced(t, e, p, c)
	}
	var last time.Time // when the client has begun to ask last
	goes := func() int {
		t.Helper()
		last = time.Now()
		return world.goes(t, net.IPv4(192, 0, 2, 1))
	}
	stays := func(at int) {
		t.Helper()
		for range 10 {
			if got := goes(); got != at {
				t.Fatalf("the client of %d goes to %d", at, got)
			}
		}
	}
	for range 5 {
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
	}

	keep = 2 * time.Second
	sync(plan.Everything(), 0, 1, 2, 3)
	first := goes()
	// Each pause is shorter than the time for which the client is known, and all of them are longer. A busy machine may keep the
	// client away for longer than that: then it is another one.
	for pauses, tries := 0, 0; pauses < 3; pauses++ {
		time.Sleep(keep * 6 / 10) // It is time that an affinity ends with.
		begin := last
		if got := goes(); got == first {
			continue
		} else if away := time.Since(begin); away < keep {
			t.Fatalf("the client of %d goes to %d after %v", first, got, away)
		} else if tries++; tries == 20 {
			t.Fatal("the machine is too busy to ask in time")
		} else {
			first, pauses = got, -1
		}
	}
	time.Sleep(keep + 200*time.Millisecond) // It is time that an affinity ends with.
	if out := listShares(t); strings.Contains(out, "10.96.0.10") {
		t.Errorf("a client that was long away is still known:\n%s", out)
	}
}

// TestConnectionsAreCounted: the kernel counts connections, and their sum does not fall when an element is replaced. nft prints the counters.
func TestConnectionsAreCounted(t *testing.T) {
	nstest.Enter(t)
	world := startPods(t, 2)
	e, _ := testEngine(t, plan.IPv4)
	b := &Backend{}
	b.Engines = []*engine{e}
	r := b.Traffic()
	counted := func(want int64) {
		t.Helper()
		for traffic, err := range r.Traffic(context.Background()) {
			if err != nil || traffic.Connections != want || traffic.PacketsIn != plan.NotCounted {
				t.Errorf("traffic is %+v, %v; want %d connections", traffic, err, want)
			}
		}
	}
	p := plantest.Large(0, 0)
	sent := int64(0)
	for i, list := range [][]int{{0}, {0, 1}, {1}} {
		p.Set(world.service(list...))
		change := plan.Only(plan.Keys{world.service().Key: {}})
		if i == 0 {
			change = plan.Everything()
		}
		synced(t, e, p, change)
		r.Update(p, change)
		counted(sent)
		for n := range 3 {
			world.goes(t, net.IPv4(127, 0, 0, 1))
			if sent++; n == 1 && i < 2 { // The third is counted after the next change, which replaces the element.
				counted(sent)
			}
		}
		syncFindsNothing(t, e, p)
	}
	if out := nstest.Exec(t, "nft", "list", "map", "ip", names.NFTables, names.NFTServices); !strings.Contains(out, "counter packets 3 ") {
		t.Errorf("nft lists\n%s", out)
	}
	p.Delete(world.service().Key)
	r.Update(p, plan.Only(plan.Keys{world.service().Key: {}}))
	for traffic, err := range r.Traffic(context.Background()) {
		t.Errorf("a Service that is gone has %+v, %v", traffic, err)
	}
}

// cpuTime is the time that the processor has spent on this thread, in which the kernel carries out rules for what it sends.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_THREAD, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkConnections is the first packet of a connection to a Service, with counters and without, in turn.
func BenchmarkConnections(b *testing.B) {
	nstest.Enter(b)
	world := startPods(b, 1)
	nstest.Exec(b, "sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=1")
	sp := world.service(0)
	p := plantest.Large(1000, 2)
	p.Delete(plantest.LargeService(0, 0, 1).Key)
	p.Set(sp)
	var all [2][]float64
	for range b.N {
		for i, count := range []bool{false, true} {
			_ = Cleanup()
			e, _ := testEngine(b, plan.IPv4)
			e.options.Count = count
			e.sets = e.options.sets(plan.IPv4)
			synced(b, e, p, plan.Everything())
			const each = 1000
			begin := cpuTime(b)
			for range each {
				c, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(10, 96, 0, 10), Port: 80})
				require.NoError(b, err)
				if _, err := c.Write([]byte("x")); err != nil {
					b.Fatal(err)
				}
				_ = c.Close()
			}
			all[i] = append(all[i], float64(cpuTime(b)-begin)/each)
			_ = e.kernel.Close()
			e.kernel = nil
		}
	}
	for i, name := range []string{"plain", "counted"} {
		slices.Sort(all[i])
		b.ReportMetric(all[i][len(all[i])/2], name+"-median-ns")
		b.ReportMetric(all[i][0], name+"-best-ns")
	}
}

// TestBegunBefore: a client whose first packet found no rules is not refused when it sends the next one, before the flow that is tracked has been
// removed. Other clients are refused at ports that no Service has.
func TestBegunBefore(t *testing.T) {
	nstest.Enter(t)
	nstest.Exec(t, "ip", "link", "add", "out", "type", "veth", "peer", "name", "away")
	for _, args := range []string{"link set out arp off up", "link set away up", "addr add 192.0.2.1/32 dev out", "route add default dev out src 192.0.2.1"} {
		nstest.Exec(t, "ip", strings.Fields(args)...)
	}
	e, _ := testEngine(t, plan.IPv4)
	sync := func(services int) {
		t.Helper()
		synced(t, e, plantest.Large(services, 1), plan.Everything())
	}
	sync(0)
	to := plantest.LargeService(0, 0, 1).Frontends[0]
	dial := func(port uint16) net.Conn {
		t.Helper()
		c, err := net.Dial("udp4", netip.AddrPortFrom(to.Addr, port).String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	refused := func(c net.Conn) bool {
		t.Helper()
		_, err := c.Write([]byte("x"))
		if err != nil && !errors.Is(err, unix.EPERM) { // as the kernel answers where a rule refuses a packet on its way out
			t.Fatal(err)
		}
		return err != nil
	}
	early := dial(to.Port)
	if refused(early) {
		t.Fatal("a client is refused where there is no Service")
	}
	sync(1)
	if refused(early) {
		t.Error("a client that began before is refused")
	}
	if !refused(dial(to.Port + 1)) {
		t.Error("a client is not refused at a port that no Service has")
	}
}

// TestNoDestination: node ports do not answer at 0.0.0.0, which they have as their address in maps. A neighbour may send to it.
func TestNoDestination(t *testing.T) {
	nstest.Enter(t)
	nstest.Exec(t, "ip", "link", "add", "in", "type", "veth", "peer", "name", "neighbour")
	for _, args := range []string{"link set in up", "link set neighbour up", "addr add 192.0.2.1/24 dev in"} {
		nstest.Exec(t, "ip", strings.Fields(args)...)
	}
	nstest.Exec(t, "nft", fmt.Sprintf(counting, "30000"))
	sp := (&pods{}).service(0)
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: plan.UDP, Port: 30000})
	p := plantest.Large(0, 0)
	p.Set(sp)
	e, _ := testEngine(t, plan.IPv4)
	synced(t, e, p, plan.Everything())
	link, err := net.InterfaceByName("in")
	require.NoError(t, err)
	neighbour, err := net.InterfaceByName("neighbour")
	require.NoError(t, err)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	to := &unix.SockaddrLinklayer{Protocol: 0x0008, Ifindex: neighbour.Index, Halen: 6} // ETH_P_IP, as on the wire
	copy(to.Addr[:], link.HardwareAddr)
	for _, tc := range []struct {
		to                       string
		translated, untranslated int
	}{{"0.0.0.0", 0, 1}, {"192.0.2.1", 1, 0}} {
		was, wasNot := behind(t)
		require.NoError(t, unix.Sendto(fd, datagram("192.0.2.9", tc.to, 30000), 0, to))
		yes, no := was, wasNot
		for end := time.Now().Add(3 * time.Minute); yes+no == was+wasNot && time.Now().Before(end); {
			yes, no = behind(t)
		}
		if yes-was != tc.translated || no-wasNot != tc.untranslated {
			t.Errorf("of packets to node port 30000 at %s, %d were translated and %d were not", tc.to, yes-was, no-wasNot)
		}
	}
}

// datagram is an IPv4 packet with an empty UDP datagram, which has no checksum.
func datagram(from, to string, port uint16) []byte {
	out := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	for _, a := range []string{from, to} {
		out = append(out, netip.MustParseAddr(a).AsSlice()...)
	}
	sum := uint32(0)
	for i := 0; i < len(out); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(out[i:]))
	}
	binary.BigEndian.PutUint16(out[10:], ^uint16(sum+sum>>16))
	return binary.BigEndian.AppendUint64(out, 40000<<48|uint64(port)<<32|8<<16)
}

// listShares returns the maps of clients as nft prints them.
func listShares(t testing.TB) string {
	t.Helper()
	var out strings.Builder
	for share := range affinityShares {
		out.WriteString(nstest.Exec(t, "nft", "list", "map", "ip", names.NFTables, shareName(share)))
	}
	return out.String()
}

// shareOf returns the share of a cluster IP, as the kernel computes it.
func shareOf(f plan.Frontend) int {
	h := jhash([]byte(nameOf(plan.IPv4, f)), shareSeed)
	return int(uint64(h) * affinityShares >> 32)
}

// TestManyClients: a comparison tells how many clients a share remembers, and when it has no room for many more, once; the Services of other
// shares have room all the same.
func TestManyClients(t *testing.T) {
	nstest.Enter(t)
	world := startPods(t, 2)
	e, _ := testEngine(t, plan.IPv4)
	told := [affinityShares][]int{}
	var warned []string
	for share := range affinityShares {
		e.sets[int(affinity)+share].Size = 20
	}
	e.onClients = func(_ plan.Family, share, n int) { told[share] = append(told[share], n) }
	e.warn = func(text string) { warned = append(warned, text) }
	p, sp := plantest.Large(0, 0), world.service(0, 1)
	sp.Affinity = time.Hour
	p.Set(sp)
	full, other := shareOf(sp.Frontends[0]), world.service(0, 1)
	other.Affinity, other.Key.Service.Name = time.Hour, "other"
	for shareOf(other.Frontends[0]) == full {
		other.Frontends[0].Addr = other.Frontends[0].Addr.Next()
	}
	p.Set(other)
	synced(t, e, p, plan.Everything())
	b := &Backend{}
	b.Engines = []*engine{e}
	wants := []int{}
	for _, n := range []int{0, 18, 19, 20, 25} {
		for client := range n {
			world.goes(t, net.IPv4(127, 0, 0, byte(1+client)))
		}
		wants = append(wants, min(n, 20))
		if b.Compare(context.Background()) {
			t.Fatal("the comparison asks for another one")
		}
	}
	content, err := e.kernel.Read(plan.IPv4, names.NFTables, e.sets, nil)
	require.NoError(t, err)
	want := []string{"session affinity remembers 19 clients over IPv4 in map " + shareName(full) + ", and can remember 20 there; where there is no " +
		"room, new clients of the Services in that map, an eighth of all, get an endpoint for each connection"}
	wantAll := [affinityShares][]int{}
	for share := range wantAll {
		wantAll[share] = make([]int, len(wants))
	}
	wantAll[full] = wants
	if len(content.Counts) == 0 { // The kernel does not tell.
		wantAll, want = [affinityShares][]int{}, nil
	}
	if !reflect.DeepEqual(told, wantAll) || !slices.Equal(warned, want) {
		t.Errorf("told %d, want %d; warned %q, want %q", told, wantAll, warned, want)
	}

	late := net.IPv4(127, 0, 1, 1)
	for _, sp := range []*plan.ServicePort{sp, other} {
		fe := sp.Frontends[0]
		world.goesTo(t, late, fe.Addr)
		out := nstest.Exec(t, "nft", "list", "map", "ip", names.NFTables, shareName(shareOf(fe)))
		if got, want := strings.Contains(out, late.String()), sp == other; got != want {
			t.Errorf("the client of %s is remembered: %t, want %t:\n%s", fe.Addr, got, want, out)
		}
	}
}
