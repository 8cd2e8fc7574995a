package tracer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// host is a network namespace of its own, beside that of the test, which is the node.
type host struct {
	do   chan func()
	done chan struct{}
}

// startHost makes a host that a pair of interfaces connects with the node: it has the second address of each prefix, and the node the first.
func startHost(t *testing.T, name string, prefixes ...string) *host {
	t.Helper()
	h := &host{make(chan func()), make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		nstest.Run(t, func() {
			for f := range h.do {
				f()
				h.done <- struct{}{}
			}
		})
	}()
	t.Cleanup(func() { close(h.do); <-ended })
	var file *os.File
	h.run(func() { file, _ = os.Open("/proc/thread-self/ns/net") })
	if file == nil {
		t.Fatal("no namespace")
	}
	defer file.Close()
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "eth0", PeerNamespace: netlink.NsFd(file.Fd())}
	require.NoError(t, netlink.LinkAdd(pair))
	nstest.Exec(t, "ip", "link", "set", name, "up")
	for _, p := range prefixes {
		prefix := netip.MustParsePrefix(p)
		node := prefix.Addr().Next()
		own := node.Next()
		add := func(a netip.Addr, dev string) {
			args := []string{"addr", "add", fmt.Sprintf("%s/%d", a, prefix.Bits()), "dev", dev}
			if a.Is6() {
				args = append(args, "nodad")
			}
			nstest.Exec(t, "ip", args...)
		}
		add(node, name)
		h.run(func() {
			nstest.Exec(t, "ip", "link", "set", "eth0", "up")
			add(own, "eth0")
			nstest.Exec(t, "ip", "route", "add", "default", "via", node.String())
		})
	}
	return h
}

// run runs f in the host's namespace.
func (h *host) run(f func()) {
	h.do <- f
	<-h.done
}

// network is a client, a server that answers at port 8080, and the node between them.
type network struct{ client, server *host }

var (
	serviceAddrs = map[plan.Family]string{plan.IPv4: "10.96.0.10", plan.IPv6: "fd00:96::10"}
	endpoints    = map[plan.Family]string{plan.IPv4: "10.244.0.2:8080", plan.IPv6: "[fd00:244::2]:8080"}
	clients      = map[plan.Family]string{plan.IPv4: "192.0.2.2", plan.IPv6: "2001:db8:1::2"}
	nodes        = map[plan.Family]string{plan.IPv4: "10.244.0.1", plan.IPv6: "fd00:244::1"} // as the server sees them
)

func startNetwork(t *testing.T) network {
	nstest.Enter(t)
	for _, f := range []string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"} {
		require.NoError(t, os.WriteFile(f, []byte("1"), 0o644))
	}
	n := network{startHost(t, "to-client", "192.0.2.0/24", "2001:db8:1::/64"), startHost(t, "to-server", "10.244.0.0/24", "fd00:244::/64")}
	for _, e := range endpoints {
		var l net.Listener
		var u net.PacketConn
		var err, err2 error
		n.server.run(func() {
			l, err = net.Listen("tcp", e)
			u, err2 = net.ListenPacket("udp", e)
		})
		require.NoError(t, errors.Join(err, err2))
		t.Cleanup(func() { l.Close(); u.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
		go func() {
			b := make([]byte, 10)
			for {
				n, from, err := u.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = u.WriteTo(b[:n], from)
			}
		}()
		// Until the links are up and the neighbours known, packets are dropped, and sent again a second later.
		for begin := time.Now(); ; {
			if err = n.connect(e, time.Second); err == nil {
				break
			}
			if time.Since(begin) > 3*time.Minute {
				t.Fatal(err)
			}
		}
	}
	return n
}

// unanswered is how long a client tries that is not to be answered.
const unanswered = time.Second

// connect opens a connection from the client, and reports whether it was answered within a time.
func (n network) connect(to string, within time.Duration) (err error) {
	n.client.run(func() {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", to, within); err == nil {
			c.Close()
		}
	})
	return err
}

func runNFT(t *testing.T, script string) {
	t.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
}

// iptables runs iptables-nft for a family, with a line of arguments.
func iptables(t *testing.T, f plan.Family, line string) {
	t.Helper()
	name := "iptables-nft"
	if f == plan.IPv6 {
		name = "ip6tables-nft"
	}
	nstest.Exec(t, name, strings.Fields(line)...)
}

func flowOf(f plan.Family, p plan.Protocol) Flow {
	return Flow{Protocol: p, Dst: netip.AddrPortFrom(netip.MustParseAddr(serviceAddrs[f]), 80)}
}

// follow follows a number of packets while send runs in a goroutine of its own.
func follow(t *testing.T, f Flow, most int, send func()) *Result {
	t.Helper()
	tr, err := Start(f)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	sent := make(chan struct{})
	go func() { defer close(sent); send() }()
	out, err := tr.Follow(ctx, most)
	require.NoError(t, err)
	<-sent
	assert.NoError(t, tr.Close())
	noTable(t)
	return out
}

// noTable fails if there is a table of this package.
func noTable(t *testing.T) {
	t.Helper()
	if left, err := nft.FamiliesWith(names.Trace); err != nil || len(left) > 0 {
		t.Errorf("tables left in %v, %v", left, err)
	}
}

// lines are the steps in short.
func lines(p Packet) []string {
	var out []string
	for _, s := range p.Steps {
		out = append(out, strings.Join([]string{s.Hook, s.Table, s.Chain, s.Rule, s.Verdict}, " | "))
	}
	return out
}

// TestIPTables: the way through chains of iptables, by the rules as iptables prints them, to the endpoint, masqueraded.
func TestIPTables(t *testing.T) {
	t.Parallel()
	n := startNetwork(t)
	for _, f := range plan.Families {
		mask := map[plan.Family]string{plan.IPv4: "/32", plan.IPv6: "/128"}[f]
		service := serviceAddrs[f] + mask
		for _, line := range []string{
			"-t nat -N KUBE-SERVICES", "-t nat -N KUBE-SVC-X", "-t nat -A PREROUTING -j KUBE-SERVICES",
			"-t nat -A KUBE-SERVICES -d 203.0.113.9 -j RETURN",
			"-t nat -A KUBE-SERVICES -d " + service + " -p tcp -m tcp --dport 80 -j KUBE-SVC-X",
			"-t nat -A KUBE-SVC-X -j MARK --set-xmark 0x4000/0x4000",
			"-t nat -A KUBE-SVC-X -p tcp -m tcp -j DNAT --to-destination " + endpoints[f],
			"-t nat -A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE",
		} {
			if f == plan.IPv6 {
				line = strings.Replace(line, "203.0.113.9", "2001:db8:9::9", 1)
			}
			iptables(t, f, line)
		}
		to := flowOf(f, plan.TCP)
		got := follow(t, to, 1, func() {
			assert.NoError(t, n.connect(to.Dst.String(), 20*time.Second))
		})
		if len(got.Packets) != 1 || got.Lost {
			t.Fatalf("%s: saw %+v", f, got)
		}
		p := got.Packets[0]
		table := nft.FamilyName(f) + " nat"
		want := []string{
			"prerouting | " + table + " | PREROUTING | -j KUBE-SERVICES | jump KUBE-SERVICES",
			"prerouting | " + table + " | KUBE-SERVICES | -d " + service + " -p tcp -m tcp --dport 80 -j KUBE-SVC-X | jump KUBE-SVC-X",
			"prerouting | " + table + " | KUBE-SVC-X | -j MARK --set-xmark 0x4000/0x4000 | continue",
			"prerouting | " + table + " | KUBE-SVC-X | -p tcp -m tcp -j DNAT --to-destination " + endpoints[f] + " | accept",
			"postrouting | " + table + " | POSTROUTING | -m mark --mark 0x4000/0x4000 -j MASQUERADE | accept",
		}
		if !slices.Equal(lines(p), want) {
			t.Errorf("%s: the way is\n%s\nwant\n%s", f, strings.Join(lines(p), "\n"), strings.Join(want, "\n"))
		}
		if p.End != Accept || p.Local || p.Src.Addr().String() != clients[f] || p.Dst != to.Dst || p.To.String() != endpoints[f] || p.From.Addr().String() != nodes[f] ||
			p.In != "to-client" || p.Out != "to-server" || !p.Tracked || p.TrackedTo.String() != endpoints[f] {
			t.Errorf("%s: the packet is %+v", f, p)
		}
		if a := p.Answer; a == nil || a.End != Accept || a.Src.String() != endpoints[f] || a.Dst.Addr().String() != nodes[f] || a.In != "to-server" || a.Out != "to-client" {
			t.Errorf("%s: the answer is %+v", f, a)
		}
	}
}

// services are the rules of a Service in each family.
const services = `table ip services {
		chain pre { type nat hook prerouting priority dstnat; ip daddr 10.96.0.10 tcp dport 80 dnat to 10.244.0.2:8080; }
	}
	table ip6 services {
		chain pre { type nat hook prerouting priority dstnat; ip6 daddr fd00:96::10 tcp dport 80 dnat to [fd00:244::2]:8080; }
	}`

// TestDropped: a rule of another program that drops is the last step, named by table and chain, however nft or iptables write it.
func TestDropped(t *testing.T) {
	t.Parallel()
	n := startNetwork(t)
	runNFT(t, services+`
	table inet firewall {
		chain zones { meta l4proto tcp th dport { 22, 8080 } counter drop; }
		chain filter { type filter hook forward priority 10; tcp dport 8080 jump zones; }
	}`)
	for _, f := range plan.Families {
		to := flowOf(f, plan.TCP)
		got := follow(t, to, 1, func() { _ = n.connect(to.Dst.String(), unanswered) })
		if len(got.Packets) != 1 || got.Packets[0].End != Drop || got.Packets[0].To.String() != endpoints[f] {
			t.Fatalf("%s: saw %+v", f, got)
		}
		way := lines(got.Packets[0])
		if want := "forward | inet firewall | zones | tcp dport { 22, 8080 } counter drop | drop"; way[len(way)-1] != want {
			t.Errorf("%s: the way is\n%s\nand should end with\n%s", f, strings.Join(way, "\n"), want)
		}
	}
	runNFT(t, "flush table inet firewall\ntable inet firewall { chain filter { policy drop; }; }")
	got := follow(t, flowOf(plan.IPv4, plan.TCP), 1, func() { _ = n.connect("10.96.0.10:80", unanswered) })
	if way := lines(got.Packets[0]); way[len(way)-1] != "forward | inet firewall | filter | policy | drop" {
		t.Errorf("the way is\n%s", strings.Join(way, "\n"))
	}
	runNFT(t, "delete table inet firewall")
	iptables(t, plan.IPv4, "-t raw -A PREROUTING -d 10.96.0.10 -j DROP")
	got = follow(t, flowOf(plan.IPv4, plan.TCP), 1, func() { _ = n.connect("10.96.0.10:80", unanswered) })
	if way := lines(got.Packets[0]); way[len(way)-1] != "prerouting | ip raw | PREROUTING | -d 10.96.0.10/32 -j DROP | drop" {
		t.Errorf("the way is\n%s", strings.Join(way, "\n"))
	}
}

// TestAnswer: connection tracking has seen an answer that a rule drops behind it, and the way of that answer says so.
func TestAnswer(t *testing.T) {
	t.Parallel()
	n := startNetwork(t)
	runNFT(t, services+`
	table inet firewall {
		chain filter { type filter hook forward priority 10; tcp sport 8080 drop; }
	}`)
	for _, f := range plan.Families {
		to := flowOf(f, plan.TCP)
		got := follow(t, to, 1, func() { _ = n.connect(to.Dst.String(), unanswered) })
		if len(got.Packets) != 1 || got.Packets[0].End != Accept || !got.Packets[0].Replied {
			t.Fatalf("%s: saw %+v", f, got)
		}
		a := got.Packets[0].Answer
		if a == nil || a.End != Drop || a.Src.String() != endpoints[f] {
			t.Fatalf("%s: the answer is %+v", f, a)
		}
		way := lines(*a)
		if want := "forward | inet firewall | filter | tcp sport 8080 drop | drop"; way[len(way)-1] != want {
			t.Errorf("%s: the answer's way is\n%s\nand should end with\n%s", f, strings.Join(way, "\n"), want)
		}
	}
}

// TestRefused: an endpoint refuses a connection, which connection tracking forgets at once, and the client gets to know.
func TestRefused(t *testing.T) {
	t.Parallel()
	n := startNetwork(t)
	runNFT(t, strings.ReplaceAll(services, ":8080", ":8081"))
	for _, f := range plan.Families {
		to := flowOf(f, plan.TCP)
		got := follow(t, to, 1, func() { _ = n.connect(to.Dst.String(), unanswered) })
		if len(got.Packets) != 1 || got.Packets[0].End != Accept || !got.Packets[0].Replied {
			t.Fatalf("%s: saw %+v", f, got)
		}
		if a := got.Packets[0].Answer; a == nil || !a.Reset || a.End != Accept || a.Src != got.Packets[0].To || a.In != "to-server" {
			t.Errorf("%s: the answer is %+v", f, a)
		}
	}
}

// TestLost: a packet that no rule drops, and that gets nowhere.
func TestLost(t *testing.T) {
	t.Parallel()
	n := startNetwork(t)
	runNFT(t, "table ip other { chain pre { type filter hook prerouting priority 0; }; }")
	nstest.Exec(t, "ip", "route", "add", "blackhole", "10.96.0.0/12")
	got := follow(t, flowOf(plan.IPv4, plan.TCP), 1, func() { _ = n.connect("10.96.0.10:80", unanswered) })
	if p := got.Packets[0]; p.End != Lost || !slices.Equal(lines(p), []string{"prerouting | ip other | pre | policy | accept"}) {
		t.Errorf("saw %+v", p)
	}
}

// TestUDP: the first packet of a flow is followed, the others are only counted; and sources are kept apart.
func TestUDP(t *testing.T) {
	t.Parallel()
	n := startNetwork(t)
	runNFT(t, `table ip services {
		chain pre { type nat hook prerouting priority dstnat; ip daddr 10.96.0.10 udp dport 80 dnat to 10.244.0.2:8080; }
	}`)
	talk := func(times int) {
		var c net.Conn
		var err error
		n.client.run(func() { c, err = net.Dial("udp", "10.96.0.10:80") })
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(3 * time.Minute))
		for range times {
			if _, err = c.Write([]byte("x")); err == nil {
				_, err = c.Read(make([]byte, 10))
			}
			assert.NoError(t, err)
		}
	}
	flow := flowOf(plan.IPv4, plan.UDP)
	flow.Sources = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("192.0.2.2/32")}
	got := follow(t, flow, 2, func() { talk(5); talk(1) })
	if len(got.Packets) != 2 || got.Passed != 6 {
		t.Fatalf("saw %+v", got)
	}
	for _, p := range got.Packets {
		if p.End != Accept || p.To.String() != endpoints[plan.IPv4] || !p.Replied || p.Answer == nil || p.Answer.End != Accept {
			t.Errorf("saw %+v", p)
		}
	}
	flow.Sources = flow.Sources[:1]
	tr, err := Start(flow)
	require.NoError(t, err)
	defer tr.Close()
	talk(2)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if got, err := tr.Follow(ctx, 1); err != nil || len(got.Packets) != 0 || got.Passed != 0 {
		t.Errorf("from elsewhere: %+v, %v", got, err)
	}
}

// TestOutput: what the node itself sends.
func TestOutput(t *testing.T) {
	t.Parallel()
	startNetwork(t)
	runNFT(t, `table ip services {
		chain pre { type nat hook output priority -100; ip daddr 10.96.0.10 tcp dport 80 dnat to 10.244.0.2:8080; }
	}`)
	nstest.Exec(t, "ip", "route", "add", "10.96.0.0/12", "dev", "to-server")
	flow := flowOf(plan.IPv4, plan.TCP)
	flow.Output = true
	tr, err := Start(flow)
	require.NoError(t, err)
	defer tr.Close()
	c, err := net.Dial("tcp", "10.96.0.10:80")
	require.NoError(t, err)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	got, err := tr.Follow(ctx, 1)
	if err != nil || len(got.Packets) != 1 {
		t.Fatalf("saw %+v, %v", got, err)
	}
	if p := got.Packets[0]; p.End != Accept || p.To.String() != endpoints[plan.IPv4] || !p.Replied || p.Out != "to-server" ||
		p.Answer == nil || p.Answer.End != Accept || !p.Answer.Local {
		t.Errorf("saw %+v", p)
	}
}

// TestBounded: a busy flow is followed at the rate that was asked for.
func TestBounded(t *testing.T) {
	t.Parallel()
	n := startNetwork(t)
	flow := flowOf(plan.IPv4, plan.UDP)
	flow.Rate = 1
	tr, err := Start(flow)
	require.NoError(t, err)
	defer tr.Close()
	begin := time.Now()
	const sent = 200
	n.client.run(func() {
		for range sent {
			c, err := net.Dial("udp", flow.Dst.String())
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = c.Write([]byte("x"))
			c.Close()
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	got, err := tr.Follow(ctx, sent)
	if err != nil || got.Passed != sent {
		t.Fatalf("%d of %d passed, %v", got.Passed, sent, err)
	}
	if n, most := len(got.Packets), burst+2+int(time.Since(begin).Seconds()); n == 0 || n > most {
		t.Errorf("%d packets were followed, at most %d should be", n, most)
	}
}

const holderVariable = "NODEPROXY_TEST_TRACE"

// TestKilled: nothing is left of a process that was killed, and another can't follow packets while it lives.
func TestKilled(t *testing.T) {
	if os.Getenv(holderVariable) != "" {
		if _, err := Start(flowOf(plan.IPv6, plan.TCP)); err != nil {
			t.Fatal(err)
		}
		fmt.Println("ready")
		select {}
	}
	nstest.Enter(t)
	nstest.Exec(t, "nft", "add", "table", "ip6", names.Trace) // as an old kernel leaves it
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestKilled$", "-test.timeout=4m")
	cmd.Env = append(os.Environ(), holderVariable+"=yes")
	nstest.EndWith(t, cmd)
	out := nstest.Output(t, cmd)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if _, err := Start(flowOf(plan.IPv6, plan.TCP)); !errors.Is(err, ErrBusy) {
		t.Errorf("a second one got %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left, err := nft.FamiliesWith(names.Trace)
		if err == nil && len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("tables left in %v, %v", left, err)
		}
	}
	tr, err := Start(flowOf(plan.IPv6, plan.TCP))
	require.NoError(t, err)
	assert.NoError(t, tr.Close())
	noTable(t)
}
