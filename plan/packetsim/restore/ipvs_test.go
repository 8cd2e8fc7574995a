package restore_test

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// beside adds what is beside rules, each on a line: a virtual server by its mark or address, as "PROTOCOL/ADDRESS:PORT SCHEDULER
// REALSERVER=WEIGHT…", "local RANGE", and "diverted ADDRESS:PORT" for TCP.
func beside(m *packetsim.Machine, text string) {
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch words[0] {
		case "local":
			m.Added[netip.MustParsePrefix(words[1])] = true
			continue
		case "diverted":
			at := netip.MustParseAddrPort(words[1])
			m.Diverted[plan.Address{Addr: at.Addr(), Protocol: plan.TCP, Port: at.Port()}] = true
			continue
		}
		var key packetsim.ServerKey
		if mark, err := strconv.ParseUint(words[0], 0, 32); err == nil {
			key.Mark = uint32(mark)
		} else {
			protocol, at, _ := strings.Cut(words[0], "/")
			key.Protocol, key.Addr = protocol, netip.MustParseAddrPort(at)
		}
		s := &packetsim.Server{Scheduler: words[1]}
		for _, r := range words[2:] {
			at, weight, _ := strings.Cut(r, "=")
			n, _ := strconv.Atoi(weight)
			s.RealServers = append(s.RealServers, packetsim.RealServer{Addr: netip.MustParseAddrPort(at), Weight: n})
		}
		m.Servers[key] = s
	}
}

const (
	vipHere      = "local 10.96.0.1/32\n"
	divertedPort = "diverted 10.96.0.1:80\n"
	oneServer    = "tcp/10.96.0.1:80 rr 10.0.0.1:8080=1\n"
)

// TestTraceIPVS follows packets through virtual servers and the rules beside them.
func TestTraceIPVS(t *testing.T) {
	allForwarded := table("filter", "-A FORWARD -j DROP")
	masquerade := table("nat", "-A POSTROUTING -d 10.0.0.1/32 -p tcp -m tcp --dport 8080 -j MASQUERADE")
	from := func(p plan.Packet, src string) plan.Packet {
		p.Src = netip.MustParseAddr(src)
		return p
	}
	udp := to(vip, 80)
	udp.Protocol = plan.UDP
	dns := plan.Packet{Src: netip.MustParseAddr("fd00:6::1"), Dst: netip.MustParseAddr("fd00:96::1"), Protocol: plan.UDP, DstPort: 53, InInterface: "eth0"}
	const ipv6 = "local fd00:96::1/128\n2415982576 rr [fd00::2]:53=1\nudp/[fd00:96::1]:53 rr [fd00::1]:5353=1\n"
	testTraces(t, []traceCase{{
		name: "in, and out by OUTPUT rather than FORWARD", beside: oneServer + vipHere,
		rules: allForwarded + masquerade, packet: to(vip, 80), want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "of the node", beside: oneServer + vipHere, rules: masquerade, packet: sent(vip, 80),
		want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "of another protocol", beside: oneServer + vipHere, packet: udp, want: []string{"accept local 1"},
	}, {
		name: "without the address it is forwarded past IPVS", beside: oneServer, packet: to(vip, 80),
		rules: allForwarded, want: []string{"drop 1"},
	}, {
		name: "but what the node sends meets IPVS at any address", beside: oneServer, packet: sent(vip, 80),
		want: []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "a range is as good as an address", beside: oneServer + "local 10.96.0.0/16\n", packet: to(vip, 80),
		want: []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "refused in INPUT before IPVS", beside: oneServer + vipHere, packet: to(vip, 80),
		rules: table("filter", "-A INPUT -d 10.96.0.1/32 -j REJECT"), want: []string{"reject local 1"},
	}, {
		name:   "table nat at INPUT comes behind IPVS, and at POSTROUTING may still decide",
		beside: oneServer + vipHere, packet: to(vip, 80),
		// Were INPUT walked, DNAT there would be an error.
		rules: table("nat", "-A INPUT -j DNAT --to-destination 10.9.9.9", "-A POSTROUTING -j MASQUERADE"),
		want:  []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "filter OUTPUT sees the new destination only", beside: oneServer + vipHere, packet: sent(vip, 80),
		rules: table("filter", "-A OUTPUT -d 10.96.0.1/32 -j REJECT", "-A OUTPUT -d 10.0.0.1/32 -j DROP"),
		want:  []string{"drop 10.0.0.1:8080 1"},
	}, {
		name:   "mangle OUTPUT is passed again, raw too, nat is not",
		beside: oneServer + vipHere, packet: sent(vip, 80),
		rules: table("mangle", "-A OUTPUT -d 10.0.0.1/32 -m ipvs --ipvs -j MARK --set-xmark 0x1/0x1") +
			table("nat", "-A OUTPUT -d 10.0.0.1/32 -j DNAT --to-destination 10.9.9.9",
				"-A POSTROUTING -m mark --mark 0x1 -j MASQUERADE"),
		want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "the connection's state knows nothing of it", beside: oneServer + vipHere, packet: to(vip, 80),
		rules: table("nat", "-A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE"),
		want:  []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "each with weight", packet: to(vip, 80), beside: vipHere + "tcp/10.96.0.1:80 rr 10.0.0.1:8080=1 10.0.0.2:8080=0 10.0.0.3:80=3\n",
		want: []string{"accept 10.0.0.1:8080 0.5", "accept 10.0.0.3:80 0.5"},
	}, {
		name: "each by its weight", packet: to(vip, 80), beside: vipHere + "tcp/10.96.0.1:80 wrr 10.0.0.1:8080=1 10.0.0.3:80=3\n",
		want: []string{"accept 10.0.0.1:8080 0.25", "accept 10.0.0.3:80 0.75"},
	}, {
		name: "without destinations", beside: vipHere + "tcp/10.96.0.1:80 rr\n", packet: to(vip, 80),
		want: []string{"reject local 1"},
	}, {
		name: "with draining ones only", packet: sent(vip, 80), beside: vipHere + "tcp/10.96.0.1:80 rr 10.0.0.1:8080=0\n",
		want: []string{"reject local 1"},
	}, {
		name: "an endpoint of the node's own", packet: to(vip, 80), beside: vipHere + "tcp/10.96.0.1:80 rr 192.168.1.10:8080=1\n",
		rules: table("filter", "-A OUTPUT -j DROP", "-A INPUT -d 192.168.1.10/32 -j DROP"),
		want:  []string{"accept 192.168.1.10:8080 local 1"},
	}, {
		name:   "an endpoint of the node's own, sent by the node, comes in again and meets no server twice",
		packet: sent(vip, 80), beside: vipHere + "tcp/10.96.0.1:80 rr 192.168.1.10:8080=1\ntcp/192.168.1.10:8080 rr 10.0.0.1:1=1\n",
		rules: table("nat", "-A POSTROUTING -d 192.168.1.10/32 -j MASQUERADE"),
		want:  []string{"accept 192.168.1.10:8080 masquerade local 1"},
	}, {
		name: "sent to an address without a server: INPUT is where it is refused", packet: sent(vip, 81), beside: oneServer + vipHere,
		rules: table("filter", "-A INPUT -i lo -d 10.96.0.1/32 -m conntrack --ctstate NEW -j REJECT"),
		want:  []string{"reject local 1"},
	}, {
		name:   "marked only when it comes in again, it goes out with the source that OUTPUT left it",
		packet: sent(vip, 81), beside: vipHere + "7 rr 10.0.0.1:8080=1\n",
		rules: table("mangle", "-A INPUT -i lo -j MARK --set-mark 7") + masquerade,
		want:  []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "its new destination is what counts behind it", beside: oneServer + vipHere,
		packet: sent(vip, 80), rules: table("nat", "-A OUTPUT -j DNAT --to-destination 10.0.0.7"),
		want: []string{"accept 10.0.0.7:80 1"},
	}, {
		name: "from the address itself", beside: oneServer + vipHere, packet: from(sent(vip, 80), "10.96.0.1"),
		rules: table("nat", "-A POSTROUTING -m addrtype --src-type LOCAL -s 10.96.0.1/32 -j MASQUERADE"),
		want:  []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "from a loopback address, which does not leave", beside: oneServer + vipHere, packet: from(sent(vip, 80), "127.0.0.1"),
		want: []string{"drop local 1"},
	}, {
		name: "to a loopback address from outside", packet: to(vip, 80), beside: vipHere + "tcp/10.96.0.1:80 rr 127.0.0.1:80=1\n",
		want: []string{"drop local 1"},
	}, {
		name: "no port stands for every port", packet: to(vip, 4711), beside: vipHere + "tcp/10.96.0.1:0 rr 10.0.0.1:0=1\n",
		want: []string{"accept 10.0.0.1:4711 1"},
	}, {
		name: "the node's own address has servers too", packet: to(nodeIP, 80), beside: "tcp/192.168.1.10:80 rr 10.0.0.1:8080=1\n",
		want: []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "match ipvs", beside: oneServer + vipHere, packet: to(vip, 80),
		rules: table("filter", "-A INPUT -m ipvs --ipvs -j DROP", "-A OUTPUT -m ipvs ! --ipvs -j DROP") +
			table("nat", "-A POSTROUTING -m ipvs --ipvs -j MASQUERADE"),
		want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "a mark of IPv6", beside: ipv6, packet: from(dns, "fd00:5::1"), want: []string{"accept [fd00::2]:53 1"},
		rules: table("mangle", "-A INPUT -s fd00:5::/64 -j MARK --set-xmark 0x9000f7f0/0xffffffff"),
	}, {
		name: "an address of IPv6", beside: ipv6, packet: dns, want: []string{"accept [fd00::1]:5353 1"},
		rules: table("mangle", "-A INPUT -s fd00:5::/64 -j MARK --set-xmark 0x9000f7f0/0xffffffff"),
	}, {
		name: "a port that is diverted", beside: oneServer + divertedPort, packet: to(vip, 80), rules: allForwarded, want: []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "another port there is forwarded", beside: oneServer + divertedPort, packet: to(vip, 81), rules: allForwarded, want: []string{"drop 1"},
	}, {
		name: "and another protocol", beside: oneServer + divertedPort, packet: udp, rules: allForwarded, want: []string{"drop 1"},
	}})
}

// markSet is a set of ports with marks.
func markSet() *packetsim.Set {
	entries := map[packetsim.Element]packetsim.Entry{}
	for at, e := range map[string]packetsim.Entry{
		"0.0.0.0:80": {Mark: 0xdead, Mask: 0xffff}, "128.0.0.0:80": {Mark: 0x10, Mask: 0xfffffff0}, "128.0.0.0:81": {Mark: 0x10, Mask: 0xffffffff}, "128.0.0.0:82": {},
	} {
		a := netip.MustParseAddrPort(at)
		e.Text = at
		entries[packetsim.Element{{Prefix: netip.PrefixFrom(a.Addr(), 1)}, {Protocol: "tcp", Port: a.Port()}}] = e
	}
	return &packetsim.Set{Name: "NP", Dimensions: []string{"net", "port"}, Family: plan.IPv4, Entries: entries}
}

// TestTraceMarks follows packets to virtual servers of firewall marks.
func TestTraceMarks(t *testing.T) {
	t.Parallel()
	const (
		servers = "16 rr 10.0.0.16:8080=1\n17 rr 10.0.0.17:0=1\ntcp/192.168.1.10:80 rr 10.0.0.80:8080=1\n"
		mapMark = "-j SET --map-set NP dst,dst --map-mark"
	)
	for _, tc := range []struct {
		name, rules string
		packet      plan.Packet
		want        string
	}{
		{"set in mangle at INPUT", table("mangle", "-A INPUT -j MARK --set-mark 16"), to(nodeIP, 1),
			"accept 10.0.0.16:8080 1"},
		{"a mark goes before the address", table("mangle", "-A INPUT -j MARK --set-mark 16"), to(nodeIP, 80),
			"accept 10.0.0.16:8080 1"},
		{"a destination without a port keeps the packet's", table("mangle", "-A PREROUTING -j MARK --set-mark 17"),
			to(nodeIP, 99), "accept 10.0.0.17:99 1"},
		{"in OUTPUT", table("mangle", "-A OUTPUT -j MARK --set-mark 16"), sent(nodeIP, 1), "accept 10.0.0.16:8080 1"},
		{"in nat OUTPUT, just in time", table("nat", "-A OUTPUT -j MARK --set-mark 16"), sent(nodeIP, 1),
			"accept 10.0.0.16:8080 1"},
		{"in filter OUTPUT, too late for OUTPUT, but it comes in again", table("filter", "-A OUTPUT -j MARK --set-mark 16",
			"-A FORWARD -j DROP", "-A INPUT ! -i lo -j DROP"), sent(nodeIP, 1), "accept 10.0.0.16:8080 1"},
		{"at PREROUTING, for what is forwarded", table("mangle", "-A PREROUTING -j MARK --set-mark 16"), to(vip, 1),
			"accept 1"},
		{"the whole mark counts", table("mangle", "-A INPUT -j MARK --set-xmark 0x4010/0xffffffff"), to(nodeIP, 80),
			"accept 10.0.0.80:8080 1"},
		{"by a set", table("mangle", "-A INPUT "+mapMark), to(nodeIP, 80), "accept 10.0.0.16:8080 1"},
		{"by a set, which leaves what is not in its mask",
			table("mangle", "-A INPUT -j MARK --set-mark 0xff1", "-A INPUT "+mapMark), to(nodeIP, 80),
			"accept 10.0.0.17:80 1"},
		{"by a set, the whole", table("mangle", "-A INPUT -j MARK --set-mark 0xff1", "-A INPUT "+mapMark), to(nodeIP, 81),
			"accept 10.0.0.16:8080 1"},
		{"an entry without a mark changes none", table("mangle", "-A INPUT -j MARK --set-mark 16", "-A INPUT "+mapMark),
			to(nodeIP, 82), "accept 10.0.0.16:8080 1"},
		{"what is in no set keeps its mark", table("mangle", "-A INPUT -j MARK --set-mark 16", "-A INPUT "+mapMark),
			to(nodeIP, 83), "accept 10.0.0.16:8080 1"},
		{"what follows is walked", table("mangle", "-A INPUT "+mapMark, "-A INPUT -m mark --mark 0x10 -j DROP"),
			to(nodeIP, 80), "drop local 1"},
		{"a mark stays for masquerading", table("mangle", "-A INPUT -j MARK --set-mark 16") +
			table("nat", "-A POSTROUTING -m mark --mark 0x10/0x10 -j MASQUERADE"), to(nodeIP, 1),
			"accept 10.0.0.16:8080 masquerade 1"},
		{"in a set", table("filter", "-A INPUT -m set ! --match-set NP dst,dst -j REJECT", "-A INPUT -m set --match-set NP dst,dst -j DROP"),
			to(nodeIP, 82), "drop local 1"},
		{"in no set", table("filter", "-A INPUT -m set --match-set NP dst,dst -j REJECT", "-A INPUT -m set ! --match-set NP dst,dst -j DROP"),
			to(nodeIP, 83), "drop local 1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			m := packetsim.New(plan.IPv4)
			m.Sets["NP"] = markSet()
			beside(m, servers)
			if got := brief(trace(t, m, tc.rules, tc.packet, packetsim.Node{Local: local})); !slices.Equal(got, []string{tc.want}) {
				t.Errorf("outcomes are %q, want %q", got, tc.want)
			}
		})
	}
}
