package restore_test

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

var (
	nodeIP = netip.MustParseAddr("192.168.1.10")
	client = netip.MustParseAddr("203.0.113.1")
	vip    = netip.MustParseAddr("10.96.0.1")
)

func local(a netip.Addr) bool { return a == nodeIP || a.IsLoopback() }

// to is a packet from the client, which comes in by eth0.
func to(dst netip.Addr, port uint16) plan.Packet {
	return plan.Packet{Src: client, Dst: dst, Protocol: plan.TCP, DstPort: port, InInterface: "eth0"}
}

// sent is a packet that the node sends.
func sent(dst netip.Addr, port uint16) plan.Packet {
	return plan.Packet{Src: nodeIP, Dst: dst, Protocol: plan.TCP, DstPort: port, Output: true}
}

// table wraps lines as a table's content. Lines that are names only are declared as chains.
func table(name string, lines ...string) string {
	var b strings.Builder
	b.WriteString("*" + name + "\n")
	for _, l := range lines {
		if !strings.Contains(l, " ") {
			l = ":" + l + " - [0:0]"
		}
		b.WriteString(l + "\n")
	}
	return b.String() + "COMMIT\n"
}

// brief writes outcomes as "action [destination] [masquerade] [local] probability".
func brief(outcomes []packetsim.Outcome) []string {
	var out []string
	for _, o := range outcomes {
		s := string(o.Action)
		if o.DNAT {
			s += " " + o.Dst.String()
		}
		if o.Masquerade {
			s += " masquerade"
		}
		if o.Delivered {
			s += " local"
		}
		out = append(out, fmt.Sprintf("%s %.4g", s, o.Probability))
	}
	return out
}

// traceCase is rules with what is beside them, a packet, and what becomes of it.
type traceCase struct {
	name   string
	beside string // as beside reads it
	rules  string
	packet plan.Packet
	node   packetsim.Node
	want   []string // in the form of brief
}

func testTraces(t *testing.T, cases []traceCase) {
	t.Parallel()
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.node.Local = local
			m := packetsim.New(plan.FamilyOf(tc.packet.Dst))
			beside(m, tc.beside)
			if got := brief(trace(t, m, tc.rules, tc.packet, tc.node)); !slices.Equal(got, tc.want) {
				t.Errorf("outcomes are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

// trace adds rules to a machine and sends a packet through it.
func trace(t *testing.T, m *packetsim.Machine, rules string, pkt plan.Packet, node packetsim.Node) []packetsim.Outcome {
	t.Helper()
	require.NoError(t, restore.IPTables(m, rules))
	outcomes, err := m.Trace(pkt, node)
	require.NoError(t, err)
	return outcomes
}

func TestTraceFilter(t *testing.T) {
	testTraces(t, []traceCase{{
		name: "no rules", packet: to(vip, 80), want: []string{"accept 1"},
	}, {
		name: "delivered", packet: to(nodeIP, 80), want: []string{"accept local 1"},
		rules: table("filter", "-A FORWARD -j DROP"),
	}, {
		name: "policy", packet: to(vip, 80), want: []string{"drop 1"},
		rules: table("filter", ":FORWARD DROP [3:180]"),
	}, {
		name: "matches", packet: to(vip, 80), want: []string{"reject 1"},
		rules: table("filter",
			"-A FORWARD -s 203.0.113.0/25 -d 10.96.0.2/32 -j DROP",
			"-A FORWARD ! -s 203.0.113.0/25 -j DROP",
			"-A FORWARD -s 203.0.113.128/25 -j DROP",
			"-A FORWARD -p udp -m udp --dport 80 -j DROP",
			"-A FORWARD -p 17 -j DROP",
			"-A FORWARD ! -p tcp -j DROP",
			"-A FORWARD -p tcp --dport 81:90 -j DROP",
			"-A FORWARD -p tcp -m tcp ! --dport 80 -j DROP",
			"-A FORWARD -p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j DROP",
			"-A FORWARD -p tcp -m tcp --tcp-flags SYN,ACK SYN,ACK -j DROP",
			"-A FORWARD -p tcp -m tcp --tcp-flags ALL NONE -j DROP",
			"-A FORWARD -p tcp -m tcp --tcp-flags RST RST -j DROP",
			"-A FORWARD -i eth1 -j DROP",
			"-A FORWARD ! -i eth+ -j DROP",
			"-A FORWARD -m mark --mark 0x1/0x1 -j DROP",
			"-A FORWARD -m addrtype --src-type LOCAL -j DROP",
			"-A FORWARD -m addrtype ! --dst-type LOCAL --src-type LOCAL -j DROP",
			"-A FORWARD -m conntrack --ctstate INVALID,ESTABLISHED,RELATED,DNAT -j DROP",
			"-A FORWARD -m conntrack ! --ctstate NEW -j DROP",
			"-A FORWARD -m conntrack --ctorigdst 10.96.0.2/32 -j DROP",
			"-A FORWARD -m recent --rcheck --seconds 10 --reap --name x --mask 255.255.255.255 --rsource -j DROP",
			`-A FORWARD -m comment --comment "a \"quoted\" -j DROP"`,
			"-A FORWARD -p tcp -m tcp --dport 79:80 --tcp-flags ALL SYN -m addrtype ! --src-type LOCAL -m conntrack --ctstate NEW "+
				"-i eth+ -j REJECT --reject-with tcp-reset",
		),
	}, {
		name: "inverted and certain chances", packet: to(vip, 80), want: []string{"accept 0.75", "drop 0.25"},
		rules: table("filter",
			"-A FORWARD -m statistic --mode random --probability 0 -j DROP",
			"-A FORWARD -m statistic --mode random ! --probability 1 -j DROP",
			"-A FORWARD -m statistic --mode random ! --probability 0.75 -j DROP"),
	}, {
		name: "ways that meet again count once", packet: to(vip, 80), want: []string{"accept 1"},
		rules: table("filter", "A", "-A FORWARD -m statistic --mode random --probability 0.5 -j A", "-A A -j RETURN"),
	}, {
		name: "recent list", packet: to(vip, 80), want: []string{"drop 1"},
		node: packetsim.Node{Recent: func(list string, a netip.Addr) bool { return list == "mine" && a == client }},
		rules: table("filter", "-A FORWARD -m recent --rcheck --name other -j ACCEPT",
			"-A FORWARD -m recent --rcheck --name mine -j DROP"),
	}, {
		name: "outgoing interface", packet: to(vip, 80), want: []string{"drop 1"},
		node:  packetsim.Node{OutInterface: func(netip.Addr) string { return "eth1" }},
		rules: table("filter", "-A FORWARD -i eth0 -o eth1 -j DROP"),
	}, {
		name: "what is not known does not matter where the rest does not match", packet: to(vip, 80), want: []string{"drop 1"},
		rules: table("filter", "-A FORWARD -o eth0 -d 10.0.0.1/32 -j ACCEPT", "-A FORWARD -j DROP"),
	}, {
		name: "bytecode that reads protocol and port", packet: to(vip, 80), want: []string{"drop 1"},
		rules: table("filter",
			`-A FORWARD -m bpf --bytecode "4,48 0 0 9,21 0 1 17,6 0 0 1,6 0 0 0" -j ACCEPT`,
			`-A FORWARD -m bpf ! --bytecode "6,48 0 0 9,21 0 3 6,40 0 0 22,21 0 1 80,6 0 0 1,6 0 0 0" -j ACCEPT`,
			"-A FORWARD -j DROP"),
	}, {
		name: "tables in the kernel's order", packet: to(vip, 80), want: []string{"drop 1"},
		rules: table("mangle", "-A PREROUTING -j MARK --set-mark 1", "-A FORWARD -m mark --mark 1 -j DROP"),
	}, {
		name: "tables at OUTPUT in the kernel's order", packet: sent(vip, 80), want: []string{"drop 1"},
		rules: table("security", "-A OUTPUT -m mark --mark 4 -j DROP") +
			table("filter", "-A OUTPUT -m mark --mark 3 -j MARK --set-mark 4") +
			table("nat", "-A OUTPUT -m mark --mark 2 -j MARK --set-mark 3") +
			table("mangle", "-A OUTPUT -m mark --mark 1 -j MARK --set-mark 2") + table("raw", "-A OUTPUT -j MARK --set-mark 1"),
	}, {
		name: "tables at INPUT in the kernel's order", packet: to(nodeIP, 80), want: []string{"accept local 1"},
		rules: table("nat", "-A INPUT -m mark ! --mark 3 -j DNAT --to-destination 10.9.9.9") + // an error if it is met
			table("security", "-A INPUT -m mark --mark 2 -j MARK --set-mark 3") +
			table("filter", "-A INPUT -m mark --mark 1 -j MARK --set-mark 2") + table("mangle", "-A INPUT -j MARK --set-mark 1"),
	}})
}

func TestTraceNAT(t *testing.T) {
	masquerade := table("nat", "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully")
	testTraces(t, []traceCase{{
		name: "each equally likely", packet: to(vip, 80),
		want: []string{"accept 10.0.0.1:8080 0.3333", "accept 10.0.0.2:8080 0.3333", "accept 10.0.0.3:80 0.3333"},
		rules: table("nat", "SVC",
			"-A PREROUTING -d 10.96.0.1/32 -j SVC",
			"-A SVC -p tcp -m statistic --mode random --probability 0.33333333349 -j DNAT --to-destination 10.0.0.1:8080",
			"-A SVC -p tcp -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.0.0.2:8080",
			"-A SVC -j DNAT --to-destination 10.0.0.3"),
	}, {
		name: "masquerade by mark", packet: to(vip, 80), want: []string{"accept masquerade 1"},
		rules: table("nat", "-A PREROUTING -j MARK --set-xmark 0x4000/0x4000") + masquerade,
	}, {
		name: "mark arithmetic", packet: to(vip, 80), want: []string{"accept 1"},
		rules: table("nat", "BAD", "-A BAD -p tcp -j DNAT --to-destination 10.0.0.1:1",
			"-A PREROUTING -j MARK --set-xmark 0xff/0xffffffff",
			"-A PREROUTING -m mark ! --mark 0xff -j BAD",
			"-A PREROUTING -j MARK --set-xmark 0x1/0x0",
			"-A PREROUTING -m mark ! --mark 0xfe -j BAD",
			"-A PREROUTING -j MARK --set-mark 0x3/0x30",
			"-A PREROUTING -m mark ! --mark 0xcf -j BAD",
			"-A PREROUTING -j MARK --set-xmark 0xcd/0x0",
			"-A PREROUTING -m mark ! --mark 2/15 -j BAD"),
	}, {
		name: "nat ends at its first verdict, and only itself", packet: to(vip, 80), want: []string{"drop 10.0.0.1:80 1"},
		rules: table("nat", "-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.1",
			"-A PREROUTING -j DNAT --to-destination 10.0.0.2") +
			table("filter", "-A FORWARD -d 10.0.0.1/32 -m conntrack --ctstate DNAT -j DROP"),
	}, {
		name: "routed by the new destination", packet: to(vip, 80), want: []string{"accept 192.168.1.10:8080 local 1"},
		rules: table("nat", "-A PREROUTING -p tcp -j DNAT --to-destination 192.168.1.10:8080",
			"-A POSTROUTING -j MASQUERADE") + table("filter", "-A FORWARD -j DROP"),
	}, {
		name: "the original destination", packet: to(vip, 80), want: []string{"drop 10.0.0.1:80 1"},
		rules: table("nat", "-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.1") +
			table("filter", "-A FORWARD -m conntrack --ctstate DNAT --ctorigdst 10.0.0.1 -j REJECT",
				"-A FORWARD -m conntrack --ctstate DNAT --ctorigdst 10.96.0.0/16 -j DROP"),
	}, {
		name: "sent to elsewhere", packet: sent(vip, 80), want: []string{"accept 10.0.0.1:80 masquerade 1"},
		rules: table("nat", "-A PREROUTING -j DNAT --to-destination 10.0.0.9",
			"-A OUTPUT -j DNAT --to-destination 10.0.0.1",
			"-A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE") +
			table("filter", "-A FORWARD -j DROP", "-A INPUT -j DROP", "-A OUTPUT -i eth+ -j DROP"),
	}, {
		name: "sent to itself it comes in again", packet: sent(nodeIP, 80), want: []string{"reject local 1"},
		rules: table("nat", "-A PREROUTING -j DNAT --to-destination 10.0.0.9") +
			table("filter", "-A INPUT -i lo -m conntrack --ctstate NEW -j REJECT"),
	}, {
		name: "bytecode that compares source and destination", packet: plan.Packet{Src: client, Dst: vip,
			Protocol: plan.TCP, DstPort: 80},
		want: []string{"accept 10.0.0.1:80 0.5", "accept 203.0.113.1:80 masquerade 0.5"},
		rules: table("nat",
			"-A PREROUTING -p tcp -m statistic --mode random --probability 0.5 -j DNAT --to-destination 203.0.113.1:80",
			"-A PREROUTING -j DNAT --to-destination 10.0.0.1",
			`-A POSTROUTING -m bpf --bytecode "7,32 0 0 12,2 0 0 0,32 0 0 16,97 1 0 0,29 0 1 0,6 0 0 65535,6 0 0 0" -j MASQUERADE`),
	}})
}

// TestGoto holds jumps, gotos and returns to what the kernel does: a chain that was gone to returns to where the chain
// that went there would have returned to.
func TestGoto(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		lines []string
		want  string
	}{
		{"return from a jump", []string{"-A FORWARD -j A", "-A FORWARD -j DROP", "-A A -j RETURN", "-A A -j REJECT"},
			"drop"},
		{"end of a jump", []string{"-A FORWARD -j A", "-A FORWARD -j DROP"}, "drop"},
		{"return from a goto in a built-in chain", []string{"-A FORWARD -g A", "-A FORWARD -j DROP",
			"-A A -j RETURN"}, "accept"},
		{"the same by the policy", []string{":FORWARD DROP [0:0]", "-A FORWARD -g A", "-A FORWARD -j ACCEPT"}, "drop"},
		{"return from a goto in a chain",
			[]string{"-A FORWARD -j A", "-A FORWARD -j DROP", "-A A -g B", "-A A -j REJECT", "-A B -j RETURN"}, "drop"},
		{"end of two gotos", []string{"-A FORWARD -j A", "-A FORWARD -j DROP", "-A A -g B", "-A A -j REJECT",
			"-A B -g C", "-A B -j REJECT"},
			"drop"},
		{"jump below a goto", []string{"-A FORWARD -j A", "-A FORWARD -j DROP", "-A A -g B", "-A A -j ACCEPT",
			"-A B -j C", "-A B -j REJECT"},
			"reject"},
		{"accept below both", []string{"-A FORWARD -j A", "-A FORWARD -j DROP", "-A A -g B", "-A B -j ACCEPT"}, "accept"},
		{"return in a built-in chain", []string{"-A FORWARD -j RETURN", "-A FORWARD -j DROP"}, "accept"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			rules := table("filter", append([]string{"A", "B", "C"}, tc.lines...)...)
			outcomes := trace(t, packetsim.New(plan.IPv4), rules, to(vip, 80), packetsim.Node{Local: local})
			if len(outcomes) != 1 || string(outcomes[0].Action) != tc.want {
				t.Errorf("outcomes are %v, want %s", outcomes, tc.want)
			}
		})
	}
}

func TestTraceListsTheRulesOfEachWay(t *testing.T) {
	t.Parallel()
	outcomes := trace(t, packetsim.New(plan.IPv4), table("nat", "SVC",
		"-A PREROUTING -d 10.96.0.1/32 -j SVC",
		"-A SVC -d 10.96.0.2/32 -j RETURN",
		"-A SVC -m statistic --mode random --probability 0.25 -j DNAT --to-destination 10.0.0.1",
		"-A SVC -j DNAT --to-destination 10.0.0.2"), to(vip, 80), packetsim.Node{Local: local})
	want := [][]string{
		{"nat: line 3: -A PREROUTING -d 10.96.0.1/32 -j SVC",
			"nat: line 5: -A SVC -m statistic --mode random --probability 0.25 -j DNAT --to-destination 10.0.0.1"},
		{"nat: line 3: -A PREROUTING -d 10.96.0.1/32 -j SVC", "nat: line 6: -A SVC -j DNAT --to-destination 10.0.0.2"},
	}
	for i, o := range outcomes {
		if !slices.Equal(o.Rules(), want[i]) {
			t.Errorf("rules to %s are %q, want %q", o.Dst, o.Rules(), want[i])
		}
		if share := []float64{0.25, 0.75}[i]; math.Abs(o.Probability-share) > 1e-9 {
			t.Errorf("probability of %s is %v, want %v", o.Dst, o.Probability, share)
		}
	}
}

func TestTraceErrors(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ rules, want string }{
		"interface": {table("filter", "-A FORWARD -o eth0 -j DROP"), "by which interface the packet leaves is not known"},
		"place": {table("nat", "-A POSTROUTING -j DNAT --to-destination 10.0.0.1"),
			"DNAT is not possible at POSTROUTING"},
		"place too": {table("nat", "-A PREROUTING -j MASQUERADE"), "MASQUERADE is not possible at PREROUTING"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := restore.Parse(plan.IPv4, tc.rules)
			require.NoError(t, err)
			if _, err := m.Trace(to(vip, 80),
				packetsim.Node{Local: local}); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
		})
	}
	if _, err := packetsim.New(plan.IPv6).Trace(to(vip, 80), packetsim.Node{Local: local}); err == nil {
		t.Error("an IPv4 packet was traced through IPv6 rules")
	}
}
