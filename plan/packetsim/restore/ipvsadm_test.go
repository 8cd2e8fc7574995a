package restore_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// sections joins what is for each program; empty ones are left out.
func sections(sets, servers, addresses, rules string) string {
	return "# ipset restore\n" + sets + "\n# ipvsadm --restore\n" + servers + "\n# ip -batch\n" + addresses +
		"\n# iptables-restore\n" + rules
}

// lines joins lines.
func lines(l ...string) string { return strings.Join(l, "\n") + "\n" }

const (
	vipHere   = "address add 10.96.0.1/32 dev kube-ipvs0\n"
	oneServer = "-A -t 10.96.0.1:80 -s rr\n-a -t 10.96.0.1:80 -r 10.0.0.1:8080 -m -w 1\n"
)

// TestTraceIPVS follows packets through virtual servers and the rules beside them.
func TestTraceIPVS(t *testing.T) {
	t.Parallel()
	allForwarded := table("filter", "-A FORWARD -j DROP")
	masquerade := table("nat", "-A POSTROUTING -d 10.0.0.1/32 -p tcp -m tcp --dport 8080 -j MASQUERADE")
	host := to(nodeIP, 80)
	fromVIP := sent(vip, 80)
	fromVIP.Src = vip
	loopback := sent(vip, 80)
	loopback.Src = netip.MustParseAddr("127.0.0.1")
	udp := to(vip, 80)
	udp.Protocol = plan.UDP
	for _, tc := range []struct {
		name                               string
		sets, servers, addresses, iptables string
		packet                             plan.Packet
		want                               []string
	}{{
		name: "in, and out by OUTPUT rather than FORWARD", servers: oneServer, addresses: vipHere,
		iptables: allForwarded + masquerade, packet: to(vip, 80), want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "of the node", servers: oneServer, addresses: vipHere, iptables: masquerade, packet: sent(vip, 80),
		want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "of another protocol", servers: oneServer, addresses: vipHere, packet: udp, want: []string{"accept local 1"},
	}, {
		name: "without the address it is forwarded past IPVS", servers: oneServer, packet: to(vip, 80),
		iptables: allForwarded, want: []string{"drop 1"},
	}, {
		name: "but what the node sends meets IPVS at any address", servers: oneServer, packet: sent(vip, 80),
		want: []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "a route is as good as an address", servers: oneServer, packet: to(vip, 80),
		addresses: "route add local 10.96.0.0/16 dev kube-ipvs0 table local src 192.168.1.10\n",
		want:      []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "refused in INPUT before IPVS", servers: oneServer, addresses: vipHere, packet: to(vip, 80),
		iptables: table("filter", "-A INPUT -d 10.96.0.1/32 -j REJECT"), want: []string{"reject local 1"},
	}, {
		name: "table nat at INPUT comes behind IPVS, and at POSTROUTING may still decide", servers: oneServer,
		addresses: vipHere, packet: to(vip, 80),
		// Were INPUT walked, DNAT there would be an error.
		iptables: table("nat", "-A INPUT -j DNAT --to-destination 10.9.9.9", "-A POSTROUTING -j MASQUERADE"),
		want:     []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "filter OUTPUT sees the new destination only", servers: oneServer, addresses: vipHere, packet: sent(vip, 80),
		iptables: table("filter", "-A OUTPUT -d 10.96.0.1/32 -j REJECT", "-A OUTPUT -d 10.0.0.1/32 -j DROP"),
		want:     []string{"drop 10.0.0.1:8080 1"},
	}, {
		name: "mangle OUTPUT is passed again, raw too, nat is not", servers: oneServer, addresses: vipHere,
		packet: sent(vip, 80),
		iptables: table("mangle", "-A OUTPUT -d 10.0.0.1/32 -m ipvs --ipvs -j MARK --or-mark 0x1") +
			table("nat", "-A OUTPUT -d 10.0.0.1/32 -j DNAT --to-destination 10.9.9.9",
				"-A POSTROUTING -m mark --mark 0x1 -j MASQUERADE"),
		want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "the connection's state knows nothing of it", servers: oneServer, addresses: vipHere, packet: to(vip, 80),
		iptables: table("nat", "-A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE"),
		want:     []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "each with weight", addresses: vipHere, packet: to(vip, 80),
		servers: lines("-A -t 10.96.0.1:80 -s rr", "-a -t 10.96.0.1:80 -r 10.0.0.1:8080 -m -w 1",
			"-a -t 10.96.0.1:80 -r 10.0.0.2:8080 -m -w 0", "-a -t 10.96.0.1:80 -r 10.0.0.3:80 -m -w 3"),
		want: []string{"accept 10.0.0.1:8080 0.5", "accept 10.0.0.3:80 0.5"},
	}, {
		name: "each by its weight", addresses: vipHere, packet: to(vip, 80),
		servers: lines("-A -t 10.96.0.1:80 -s wrr -p 10800", "-a -t 10.96.0.1:80 -r 10.0.0.1:8080 -m -w 1",
			"-a -t 10.96.0.1:80 -r 10.0.0.3:80 -m -w 3"),
		want: []string{"accept 10.0.0.1:8080 0.25", "accept 10.0.0.3:80 0.75"},
	}, {
		name: "without destinations", servers: "-A -t 10.96.0.1:80 -s rr\n", addresses: vipHere, packet: to(vip, 80),
		want: []string{"reject local 1"},
	}, {
		name: "with draining ones only", addresses: vipHere, packet: sent(vip, 80),
		servers: "-A -t 10.96.0.1:80 -s rr\n-a -t 10.96.0.1:80 -r 10.0.0.1:8080 -m -w 0\n",
		want:    []string{"reject local 1"},
	}, {
		name: "an endpoint of the node's own", addresses: vipHere, packet: to(vip, 80),
		servers:  "-A -t 10.96.0.1:80 -s rr\n-a -t 10.96.0.1:80 -r 192.168.1.10:8080 -m -w 1\n",
		iptables: table("filter", "-A OUTPUT -j DROP", "-A INPUT -d 192.168.1.10/32 -j DROP"),
		want:     []string{"accept 192.168.1.10:8080 local 1"},
	}, {
		name:      "an endpoint of the node's own, sent by the node, comes in again and meets no server twice",
		addresses: vipHere, packet: sent(vip, 80),
		servers: lines("-A -t 10.96.0.1:80 -s rr", "-a -t 10.96.0.1:80 -r 192.168.1.10:8080 -m -w 1",
			"-A -t 192.168.1.10:8080 -s rr", "-a -t 192.168.1.10:8080 -r 10.0.0.1:1 -m -w 1"),
		iptables: table("nat", "-A POSTROUTING -d 192.168.1.10/32 -j MASQUERADE"),
		want:     []string{"accept 192.168.1.10:8080 masquerade local 1"},
	}, {
		name: "sent to an address without a server: INPUT is where it is refused", addresses: vipHere,
		packet: sent(vip, 81), servers: oneServer,
		iptables: table("filter", "-A INPUT -i lo -d 10.96.0.1/32 -m conntrack --ctstate NEW -j REJECT"),
		want:     []string{"reject local 1"},
	}, {
		name: "marked only when it comes in again, it goes out with the source that OUTPUT left it", addresses: vipHere,
		packet: sent(vip, 81), servers: "-A -f 7 -s rr\n-a -f 7 -r 10.0.0.1:8080 -m -w 1\n",
		iptables: table("mangle", "-A INPUT -i lo -j MARK --set-mark 7") + masquerade,
		want:     []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "its new destination is what counts behind it", servers: oneServer, addresses: vipHere,
		packet: sent(vip, 80), iptables: table("nat", "-A OUTPUT -j DNAT --to-destination 10.0.0.7"),
		want: []string{"accept 10.0.0.7:80 1"},
	}, {
		name: "from the address itself", servers: oneServer, addresses: vipHere, packet: fromVIP,
		iptables: table("nat", "-A POSTROUTING -m addrtype --src-type LOCAL -s 10.96.0.1/32 -j MASQUERADE"),
		want:     []string{"accept 10.0.0.1:8080 masquerade 1"},
	}, {
		name: "from a loopback address, which does not leave", servers: oneServer, addresses: vipHere, packet: loopback,
		want: []string{"drop local 1"},
	}, {
		name: "to a loopback address from outside", addresses: vipHere, packet: to(vip, 80),
		servers: "-A -t 10.96.0.1:80 -s rr\n-a -t 10.96.0.1:80 -r 127.0.0.1:80 -m -w 1\n",
		want:    []string{"drop local 1"},
	}, {
		name: "no port stands for every port", addresses: vipHere, packet: to(vip, 4711),
		servers: "-A -t 10.96.0.1:0 -s rr -p 60\n-a -t 10.96.0.1:0 -r 10.0.0.1 -m -w 1\n",
		want:    []string{"accept 10.0.0.1:4711 1"},
	}, {
		name: "the node's own address has servers too", packet: host,
		servers: "-A -t 192.168.1.10:80 -s rr\n-a -t 192.168.1.10:80 -r 10.0.0.1:8080 -m -w 1\n",
		want:    []string{"accept 10.0.0.1:8080 1"},
	}, {
		name: "match ipvs", servers: oneServer, addresses: vipHere, packet: to(vip, 80),
		iptables: table("filter", "-A INPUT -m ipvs --ipvs -j DROP", "-A INPUT -m ipvs ! --vport 81 -j DROP",
			"-A OUTPUT -m ipvs ! --ipvs -j DROP", "-A OUTPUT -m ipvs --vaddr 10.96.0.2 -j DROP",
			"-A OUTPUT -m ipvs --vport 8080 -j DROP", "-A OUTPUT -m ipvs --vproto 17 -j DROP",
			"-A OUTPUT -m ipvs --vdir REPLY -j DROP") +
			table("nat", "-A POSTROUTING -m ipvs --vaddr 10.96.0.1/32 --vport 80 --vproto 6 --vdir ORIGINAL -j MASQUERADE"),
		want: []string{"accept 10.0.0.1:8080 masquerade 1"},
	}} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			checkSections(t, plan.IPv4, sections(tc.sets, tc.servers, tc.addresses, tc.iptables), tc.packet, tc.want)
		})
	}
}

func checkSections(t *testing.T, f plan.Family, text string, pkt plan.Packet, want []string) {
	t.Helper()
	m, err := restore.ParseSections(f, text)
	if err != nil {
		t.Fatal(err)
	}
	outcomes, err := m.Trace(pkt, packetsim.Node{Local: local})
	if err != nil {
		t.Fatal(err)
	}
	if got := brief(outcomes); !slices.Equal(got, want) {
		t.Errorf("outcomes are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		for _, o := range outcomes {
			t.Log(o.Dst, strings.Join(o.Rules(), "\n"))
		}
	}
}

// TestTraceMarks follows packets to virtual servers of firewall marks.
func TestTraceMarks(t *testing.T) {
	t.Parallel()
	servers := lines("-A -f 16 -s rr", "-a -f 16 -r 10.0.0.16:8080 -m -w 1", "-A -f 17 -s rr",
		"-a -f 17 -r 10.0.0.17 -m -w 1", "-A -t 192.168.1.10:80 -s rr", "-a -t 192.168.1.10:80 -r 10.0.0.80:8080 -m -w 1")
	sets := lines("create NP hash:net,port family inet hashsize 1024 maxelem 65536 skbinfo",
		"add NP 0.0.0.0/1,tcp:80 skbmark 0xdead/0xffff",
		"add NP 128.0.0.0/1,tcp:80 skbmark 0x10/0xfffffff0",
		"add NP 128.0.0.0/1,tcp:81 skbmark 0x10",
		"add NP 128.0.0.0/1,tcp:82")
	mapMark := "-j SET --map-set NP dst,dst --map-mark"
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
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			checkSections(t, plan.IPv4, sections(sets, servers, "", tc.rules), tc.packet, []string{tc.want})
		})
	}
}

// TestTraceIPVS6 has a firewall mark, a set and an address of IPv6.
func TestTraceIPVS6(t *testing.T) {
	t.Parallel()
	text := lines("# ipset restore", "create S hash:ip,port family inet6 hashsize 1024 maxelem 65536",
		"add S fd00:96::1,udp:53", "# ipvsadm --restore", "-A -f 2415982576 -6 -s rr",
		"-a -f 2415982576 -6 -r [fd00::2]:53 -m -w 1", "-A -u [fd00:96::1]:53 -s rr",
		"-a -u [fd00:96::1]:53 -r [fd00::1]:5353 -m -w 1", "# ip -batch", "link add kube-ipvs0 type dummy",
		"address add fd00:96::1/128 dev kube-ipvs0 nodad", "# ip6tables-restore", "*mangle",
		"-A INPUT -s fd00:5::/64 -m set --match-set S dst,dst -j MARK --set-xmark 0x9000f7f0/0xffffffff", "COMMIT")
	pkt := plan.Packet{Dst: netip.MustParseAddr("fd00:96::1"), Protocol: plan.UDP, DstPort: 53, InInterface: "eth0"}
	pkt.Src = netip.MustParseAddr("fd00:5::1")
	checkSections(t, plan.IPv6, text, pkt, []string{"accept [fd00::2]:53 1"})
	pkt.Src = netip.MustParseAddr("fd00:6::1")
	checkSections(t, plan.IPv6, text, pkt, []string{"accept [fd00::1]:5353 1"})
}
