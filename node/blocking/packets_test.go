package blocking

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/inspect/reality"
	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// TestRealPackets: of random rules, what is certain to be dropped is dropped by the kernel, and what is said to pass passes. A packet from
// the node to the cluster IP goes to an endpoint on the node itself, which answers. Of answers, only what is certain is held to that: rules ask
// for the port that they go to, which is not known.
func TestRealPackets(t *testing.T) {
	nstest.Enter(t)
	for _, line := range []string{"link set lo up", "addr add 10.244.1.5/32 dev lo", "route add 10.96.0.0/16 dev lo"} {
		nstest.Exec(t, "ip", strings.Fields(line)...)
	}
	listen := func(addr string) *net.UDPConn {
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr)))
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	endpoint := listen("10.244.1.5:8080")
	marker, err := net.Listen("tcp4", "10.244.1.5:9999")
	require.NoError(t, err)
	defer marker.Close()
	sp := &plan.ServicePort{
		Key:       plan.Key{Service: plan.Service{Namespace: "default", Name: "web"}, Protocol: plan.UDP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.96.0.10"), Protocol: plan.UDP, Port: 80}},
		Endpoints: plan.Endpoints{Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.1.5:8080")}}, Any: true},
	}
	nstest.Exec(t, "nft", "add table ip nodeproxy; add chain ip nodeproxy out { type nat hook output priority -100; }; "+
		"add rule ip nodeproxy out ip daddr 10.96.0.10 udp dport 80 dnat to 10.244.1.5:8080")
	n := Node{Local: func(a netip.Addr) bool { return a == netip.MustParseAddr("10.244.1.5") }}
	random := rand.New(rand.NewPCG(1, 0))
	hasLegacy := true
	results := map[string]int{}
	for i := range 100 {
		text, legacy := randomRules(random), ""
		load(t, "table inet other\ndelete table inet other\n"+text)
		if hasLegacy && i%3 < 2 {
			if legacy = noLegacy; i%3 == 0 {
				legacy = randomLegacy(random)
			}
			cmd := exec.Command("iptables-legacy-restore")
			cmd.Stdin = strings.NewReader(legacy)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Logf("without tables of the legacy variant, as this machine has none: %v: %s", err, out)
				hasLegacy, legacy = false, ""
			}
		}
		found, err := Find(t.Context(), []*plan.ServicePort{sp}, n)
		found = slices.DeleteFunc(found, func(r reality.Blocking) bool { return r.ICMP })
		if err != nil {
			t.Fatalf("%v, with\n%s%s", err, text, legacy)
		}
		said, answer := "passes", "may come"
		for _, r := range found {
			if r.Answers {
				if r.Certain {
					answer = "is dropped"
				}
				continue
			}
			if r.Certain {
				said = "dropped"
				break
			}
			said = "may be dropped"
		}
		got := "dropped"
		request, answered := arrives(t, endpoint, marker)
		if request {
			got = "passes"
			results["answer "+answer]++
		}
		if answered && answer == "is dropped" {
			t.Errorf("an answer comes: %+v, with\n%s%s", found, text, legacy)
		}
		results[said+", "+got]++
		if said != got && said != "may be dropped" {
			t.Errorf("packets are said to be %s and are %s: %+v, with\n%s%s", said, got, found, text, legacy)
		}
	}
	t.Logf("%v", results)
	for want, least := range map[string]int{"passes, passes": 10, "dropped, dropped": 10, "answer is dropped": 3} {
		if results[want] < least {
			t.Errorf("few are %s: %v", want, results)
		}
	}
}

// arrives sends a packet to the cluster IP, and then connects to the marker by TCP, which no rule concerns. It reports whether the endpoint
// has received the packet then, and whether its answer comes.
func arrives(t *testing.T, endpoint *net.UDPConn, marker net.Listener) (request, answer bool) {
	t.Helper()
	sent := func(_ int, err error) {
		t.Helper()
		if err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	send := func(to string) *net.UDPConn {
		c, err := net.Dial("udp4", to) // From another port each time: the packet begins a connection.
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		sent(c.Write([]byte{1}))
		return c.(*net.UDPConn)
	}
	received := func(c *net.UDPConn, within time.Duration) (from netip.AddrPort, is bool) {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(within)))
		_, from, err := c.ReadFromUDPAddrPort(make([]byte, 1))
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
		return from, err == nil
	}
	client := send("10.96.0.10:80")
	reaches := func() {
		t.Helper()
		c, err := net.DialTimeout("tcp4", marker.Addr().String(), time.Minute)
		require.NoError(t, err, "what no rule concerns does not arrive")
		c.Close()
		if c, err = marker.Accept(); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	reaches()
	from, request := received(endpoint, 20*time.Millisecond)
	if request {
		sent(endpoint.WriteToUDPAddrPort([]byte{1}, from))
		reaches()
		_, answer = received(client, 20*time.Millisecond)
	}
	return request, answer
}

// randomRules returns a table with chains in two hooks, before and behind the translation of destinations, and jumps to others. What asks
// for something unknown accepts, jumps and returns, or drops only with the port.
func randomRules(r *rand.Rand) string {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	conditions := func(port, other string) string {
		return pick("", "udp sport 8080", "udp dport "+port, "udp dport "+other, "udp dport { 53, "+port+" }", "udp dport { 1000-1010, 8000-8079 }", "udp dport != "+port,
			"ip daddr 10.0.0.0/8", "ip daddr 10.96.0.0/16", "ip daddr . udp dport { 10.244.1.5 . 8080, 10.96.0.10 . 80 }",
			"ct state established", "ct state new", "ct status dnat", "meta mark & 0x30 == 0x10", "meta mark & 0x20 == 0x0", "fib daddr type local", "meta l4proto udp")
	}
	var out strings.Builder
	out.WriteString("table inet other {\nchain drops { meta l4proto udp drop; }\nchain accepts { accept; }\nchain nothing { return; drop; }\n")
	if r.IntN(4) == 0 { // What is not tracked is not translated.
		fmt.Fprintf(&out, "chain raw {\ntype filter hook output priority -300\nmeta l4proto tcp accept\n%s %s\n%s notrack\n}\n",
			conditions("80", "8080"), pick("accept", "counter"), pick("udp sport 8080", "udp dport 80", "udp dport 53", "ip daddr 10.96.0.0/16", "meta mark 1 udp dport 80", "meta mark 0 udp dport 80"))
	}
	for _, c := range []struct{ name, hook, port, other string }{
		{"first", "type filter hook output priority -150", "80", "8080"}, {"out", "type filter hook output priority 0", "8080", "80"},
		{"in", "type filter hook input priority 0", "8080", "80"},
	} {
		fmt.Fprintf(&out, "chain %s {\n%s; policy %s;\nmeta l4proto tcp accept\n", c.name, c.hook, pick("accept", "accept", "accept", "accept", "accept", "drop"))
		for range r.IntN(4) {
			condition := conditions(c.port, c.other)
			if c.name == "first" && strings.HasPrefix(condition, "ct status") {
				condition = ""
			}
			switch r.IntN(10) {
			case 4:
				fmt.Fprintf(&out, "%s meta mark set %s %s\n", condition, pick("1", "0", "0x10", "meta mark | 0x10", "meta mark ^ 0x30", "meta mark & 0xffffffef"), pick("", "", "accept", "jump nothing"))
			case 0:
				fmt.Fprintf(&out, "udp dport vmap { %s : %s, 53 : accept }\n", pick(c.port, c.other), pick("drop", "accept", "jump drops", "goto accepts", "jump nothing"))
			case 1:
				fmt.Fprintf(&out, "%s %s\n", pick("meta mark 1", "ip saddr 192.0.2.1", "iifname eth7", "meta mark 0"), pick("accept", "return", "jump nothing", "jump accepts"))
			case 2:
				fmt.Fprintf(&out, "udp sport 8080 %s\n", pick("drop", "drop", "accept", "meta mark set 0x10"))
			case 3:
				fmt.Fprintf(&out, "udp dport %s %s drop\n", pick(c.port, c.other), pick("meta mark 1", "meta mark 0"))
			default:
				fmt.Fprintf(&out, "%s %s\n", condition, pick("drop", "accept", "accept", "accept", "counter", "counter", "jump drops", "jump accepts", "jump accepts", "jump nothing", "goto nothing"))
			}
		}
		out.WriteString("}\n")
	}
	return out.String() + "}\n"
}

// noLegacy empties the tables of randomLegacy.
const noLegacy = "*raw\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n*filter\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"

// randomLegacy returns rules for tables of the legacy variant.
func randomLegacy(r *rand.Rand) string {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	var out strings.Builder
	for _, table := range []string{"raw", "filter"} {
		port, chain := map[string]string{"raw": "80", "filter": "8080"}[table], "OUTPUT"
		fmt.Fprintf(&out, "*%s\n:OUTPUT %s [0:0]\n:more - [0:0]\n-A OUTPUT -p tcp -j ACCEPT\n-A more -p udp -m multiport --dports 53,%s -j DROP\n",
			table, pick("ACCEPT", "ACCEPT", "ACCEPT", "ACCEPT", "DROP"), port)
		verdicts := []string{"DROP", "ACCEPT", "ACCEPT", "ACCEPT", "RETURN", "RETURN", "more", "MARK --set-mark 1", "MARK --or-mark 0x10", "MARK --xor-mark 0x30"}
		if table == "raw" {
			verdicts = append(verdicts, "CT --notrack")
		}
		for range r.IntN(3) {
			condition := pick("", "-p tcp", "-p udp --dport "+port, "-p udp --dport 1:60", "-d 10.0.0.0/8", "! -d 10.0.0.0/8", "-p udp -m multiport --dports 1:60,"+port,
				"-p udp -m multiport ! --dports "+port, "-m mark --mark 0x1", "-m mark ! --mark 0x10/0x30", `-m comment --comment "a -j DROP b"`)
			if table == "filter" {
				condition = pick(condition, "-m conntrack --ctstate NEW", "-m conntrack --ctstate ESTABLISHED", "-m conntrack --ctorigdst 10.96.0.10 --ctorigdstport 80",
					"-m addrtype --dst-type LOCAL")
			}
			fmt.Fprintf(&out, "-A %s %s -j %s\n", chain, condition, pick(verdicts...))
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}
