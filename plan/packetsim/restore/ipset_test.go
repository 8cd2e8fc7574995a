package restore_test

import (
	"net/netip"
	"strings"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// TestMatchSet asks sets of each type for packets from 203.0.113.1 to 10.96.0.1.
func TestMatchSet(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		kind, entries string // entries are separated by |
		match         string
		protocol      plan.Protocol
		port          uint16
		want          bool
	}{
		{"hash:ip", "10.96.0.1", "--match-set S dst", plan.TCP, 80, true},
		{"hash:ip", "10.96.0.1", "--match-set S src", plan.TCP, 80, false},
		{"hash:ip", "203.0.113.1", "--match-set S src", plan.TCP, 80, true},
		{"hash:ip", "10.96.0.1", "! --match-set S dst", plan.TCP, 80, false},
		{"hash:ip", "10.96.0.2|10.96.0.3", "! --match-set S dst", plan.TCP, 80, true},
		{"hash:ip", "", "--match-set S dst", plan.TCP, 80, false},
		{"hash:ip,port", "10.96.0.1,tcp:80", "--match-set S dst,dst", plan.TCP, 80, true},
		{"hash:ip,port", "10.96.0.1,80", "--match-set S dst,dst", plan.TCP, 80, true},
		{"hash:ip,port", "10.96.0.1,tcp:80", "--match-set S dst,dst", plan.UDP, 80, false},
		{"hash:ip,port", "10.96.0.1,sctp:80", "--match-set S dst,dst", plan.SCTP, 80, true},
		{"hash:ip,port", "10.96.0.1,tcp:70-79", "--match-set S dst,dst", plan.TCP, 80, false},
		{"hash:ip,port", "10.96.0.1,tcp:70-90", "--match-set S dst,dst", plan.TCP, 80, true},
		{"hash:ip,port", "10.96.0.1,tcp:80", "--match-set S src,dst", plan.TCP, 80, false},
		{"hash:ip,port", "10.96.0.1,tcp:80", "--match-set S dst", plan.TCP, 80, false},        // too few flags
		{"hash:ip,port", "10.96.0.1,tcp:80", "! --match-set S dst", plan.TCP, 80, true},       // here too
		{"hash:ip,port", "10.96.0.1,tcp:80", "--match-set S dst,dst,src", plan.TCP, 80, true}, // more do no harm
		{"hash:ip,port,ip", "10.96.0.1,tcp:80,203.0.113.1", "--match-set S dst,dst,src", plan.TCP, 80, true},
		{"hash:ip,port,ip", "10.96.0.1,tcp:80,10.96.0.1", "--match-set S dst,dst,src", plan.TCP, 80, false},
		{"hash:ip,port,net", "10.96.0.1,tcp:80,203.0.113.0/24", "--match-set S dst,dst,src", plan.TCP, 80, true},
		{"hash:ip,port,net", "10.96.0.1,tcp:80,203.0.0.0/8", "--match-set S dst,dst,src", plan.TCP, 80, true},
		{"hash:ip,port,net", "10.96.0.1,tcp:80,203.0.114.0/24", "--match-set S dst,dst,src", plan.TCP, 80, false},
		{"hash:ip,port,net", "10.96.0.1,tcp:80,203.0.0.0/8|10.96.0.1,tcp:80,203.0.113.0/24 nomatch",
			"--match-set S dst,dst,src", plan.TCP, 80, false},
		{"hash:net", "0.0.0.0/1", "--match-set S dst", plan.TCP, 80, true},
		{"hash:net", "10.96.0.1", "--match-set S dst", plan.TCP, 80, true},
		{"hash:net,port", "0.0.0.0/1,tcp:80", "--match-set S dst,dst", plan.TCP, 80, true},
		{"hash:net,port", "128.0.0.0/1,tcp:80", "--match-set S dst,dst", plan.TCP, 80, false},
		{"bitmap:port", "80", "--match-set S dst", plan.TCP, 80, true},
		{"bitmap:port", "80", "--match-set S dst", plan.UDP, 80, true},
		{"bitmap:port", "80", "--match-set S dst", plan.SCTP, 80, false},
		{"bitmap:port", "70-90", "--match-set S dst", plan.TCP, 91, false},
	} {
		name := tc.kind + " " + tc.entries + " " + tc.match + " " + string(tc.protocol)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			options := " family inet hashsize 1024 maxelem 65536"
			if tc.kind == "bitmap:port" {
				options = " range 0-65535"
			}
			sets := "create S " + tc.kind + options + "\n"
			for _, e := range strings.Split(tc.entries, "|") {
				if e != "" {
					sets += "add S " + e + "\n"
				}
			}
			rules := table("filter", "-A FORWARD -m set "+tc.match+" -j DROP")
			pkt := to(vip, tc.port)
			pkt.Protocol = tc.protocol
			want := "accept 1"
			if tc.want {
				want = "drop 1"
			}
			checkSections(t, plan.IPv4, sections(sets, "", "", rules), pkt, []string{want})
		})
	}
}

const hashIP = "create S hash:ip family inet hashsize 1024 maxelem 2 comment\n"

// TestSectionErrors lists what the programs or the kernel would refuse, and what the simulator does not read.
func TestSectionErrors(t *testing.T) {
	t.Parallel()
	const tcp = "-A -t 10.96.0.1:80 -s rr\n"
	markSet := "create M hash:ip family inet skbinfo\n"
	for _, tc := range []struct{ name, sets, servers, addresses, rules, want string }{
		{"set twice", hashIP + "create S hash:ip", "", "", "", "IPv4 sets, line 3: the set exists"},
		{"set of what", "create S", "", "", "", "needs a type"},
		{"set type", "create S hash:mac", "", "", "", "does not know set type hash:mac"},
		{"set option", "create S hash:ip timeout 5", "", "", "", "does not know option timeout"},
		{"set family", "create S hash:ip family inet6", "", "", "", "set of IPv6 addresses"},
		{"long set", "create S2345678901234567890123456789012 hash:ip", "", "", "", "at most 31"},
		{"bitmap without range", "create S bitmap:port", "", "", "", "has a range"},
		{"no set", "add S 10.0.0.1", "", "", "", "there is no set S"},
		{"set command", hashIP + "swap S S", "", "", "", "command swap is not known"},
		{"entry twice", hashIP + "add S 10.0.0.1\nadd S 10.0.0.1", "", "", "", "in the set already"},
		{"no entry", hashIP + "del S 10.0.0.1", "", "", "", "no such entry"},
		{"full", hashIP + "add S 10.0.0.1\nadd S 10.0.0.2\nadd S 10.0.0.3", "", "", "", "full, with 2"},
		{"parts", hashIP + "add S 10.0.0.1,tcp:80", "", "", "", "has 1 parts"},
		{"entry's family", hashIP + "add S fd00::1", "", "", "", "fd00::1 is not an IPv4 address"},
		{"range in hash:ip", hashIP + "add S 10.0.0.0/24", "", "", "", "single addresses only"},
		{"all nets", "create S hash:net\nadd S 0.0.0.0/0", "", "", "", "no net of length 0"},
		{"port", "create S hash:ip,port\nadd S 10.0.0.1,tcp:http", "", "", "", "is no port"},
		{"protocol", "create S hash:ip,port\nadd S 10.0.0.1,gre:1", "", "", "", "no protocol with ports"},
		{"protocol in a bitmap", "create S bitmap:port range 0-100\nadd S tcp:1", "", "", "", "has no protocol"},
		{"beyond the bitmap", "create S bitmap:port range 0-100\nadd S 101", "", "", "", "from 0 to 100"},
		{"mark without skbinfo", hashIP + "add S 10.0.0.1 skbmark 1", "", "", "", "created without skbinfo"},
		{"entry's option", hashIP + "add S 10.0.0.1 timeout 1", "", "", "", "does not know option timeout"},
		{"rule's set", "", "", "", table("filter", "-A INPUT -m set --match-set S dst -j DROP"), "there is no set S"},
		{"rule's flags", hashIP, "", "", table("filter", "-A INPUT -m set --match-set S destination -j DROP"),
			"neither src nor dst"},
		{"rule without a set", hashIP, "", "", table("filter", "-A INPUT -m set -j DROP"), "needs --match-set"},
		{"map-set elsewhere", markSet, "", "", table("nat", "-A INPUT -j SET --map-set M dst --map-mark"),
			"belongs into table mangle"},
		{"map-set without what", markSet, "", "", table("mangle", "-A INPUT -j SET --map-set M dst"), "needs --map-mark"},
		{"map-set of no set", "", "", "", table("mangle", "-A INPUT -j SET --map-set M dst --map-mark"),
			"there is no set M"},

		{"server twice", "", tcp + tcp, "", "", "IPv4 virtual servers, line 5: the virtual server exists"},
		{"no server", "", "-a -t 10.96.0.1:80 -r 10.0.0.1:80 -m", "", "", "no such virtual server"},
		{"destination twice", "", oneServer + "-a -t 10.96.0.1:80 -r 10.0.0.1:8080 -m -w 2", "", "",
			"real server exists"},
		{"no real server", "", tcp + "-d -t 10.96.0.1:80 -r 10.0.0.1:80", "", "", "no such real server"},
		{"of another family", "", "-A -t [fd00::1]:80 -s rr", "", "", "not an IPv4 address"},
		{"mark of another family", "", "-A -f 1 -6 -s rr", "", "", "firewall mark of IPv6"},
		{"mark in hexadecimal", "", "-A -f 0x10 -s rr", "", "", "option -f"},
		{"mark 0", "", "-A -f 0 -s rr", "", "", "greater than 0"},
		{"mark and address", "", "-A -f 1 -t 10.0.0.1:80", "", "", "either an address or a firewall mark"},
		{"no port", "", "-A -t 10.0.0.1:0 -s rr", "", "", "must be persistent"},
		{"routing", "", tcp + "-a -t 10.96.0.1:80 -r 10.0.0.1:80 -g", "", "", "follows masquerading"},
		{"weight", "", tcp + "-a -t 10.96.0.1:80 -r 10.0.0.1:80 -m -w -1", "", "", "no value"},
		{"server's option", "", "-A -t 10.96.0.1:80 --pe sip", "", "", "does not know it"},
		{"no command", "", "-t 10.96.0.1:80 -s rr", "", "", "no command"},
		{"two commands", "", "-A -a -t 10.96.0.1:80 -s rr", "", "", "one command only"},
		{"add to no destination", "", tcp + "-a -t 10.96.0.1:80 -m", "", "", "need a real server"},

		{"address twice", "", "", vipHere + vipHere, "", "IPv4 addresses, line 7: it exists"},
		{"no address", "", "", "address del 10.96.0.1/32 dev kube-ipvs0", "", "nothing such to delete"},
		{"no device", "", "", "address add 10.96.0.1/32", "", "no device"},
		{"route of a kind", "", "", "route add blackhole 10.96.0.0/16", "", "routes of type blackhole"},
		{"route elsewhere", "", "", "route add local 10.96.0.0/16 dev kube-ipvs0 table main", "", "table local"},
		{"object", "", "", "neigh add 10.96.0.1 dev kube-ipvs0", "", "does not know object neigh"},
		{"rules after sections", "", "", "", "*nut\n", "IPv4 rules, line 8: there is no such table"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := restore.ParseSections(plan.IPv4, sections(tc.sets, tc.servers, tc.addresses, tc.rules))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
		})
	}
	if _, err := restore.ParseSections(plan.IPv4, "# a comment\n\n*filter\nCOMMIT\n"); err == nil ||
		!strings.Contains(err.Error(), "line 3 stands before any section") {
		t.Errorf("error for a text without sections is %v", err)
	}
	m, err := restore.ParseSections(plan.IPv4, sections(hashIP, "", "",
		table("mangle", "-A INPUT -j SET --add-set S src", "-A INPUT -m set --match-set S src --return-nomatch -j DROP")))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Unknown(); err == nil || !strings.Contains(err.Error(), "target SET --add-set S src") ||
		!strings.Contains(err.Error(), "option --return-nomatch") {
		t.Errorf("unknown is %v", err)
	}
}

// TestSourcePort makes sure that a set that asks for a source port is an error, not a guess.
func TestSourcePort(t *testing.T) {
	t.Parallel()
	m, err := restore.ParseSections(plan.IPv4, sections("create S hash:ip,port\n", "", "",
		table("filter", "-A FORWARD -m set --match-set S dst,src -j DROP")))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Trace(to(vip, 80), packetsim.Node{Local: local}); err == nil ||
		!strings.Contains(err.Error(), "source port is not known") {
		t.Errorf("error is %v", err)
	}
}

// TestSectionsInSteps changes what is there by later texts.
func TestSectionsInSteps(t *testing.T) {
	t.Parallel()
	m := packetsim.New(plan.IPv4)
	other := netip.MustParseAddr("10.96.0.2")
	step := func(name string, change func(*packetsim.Machine, string) error, text string, pkt plan.Packet, want string) {
		t.Helper()
		if err := change(m, text); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		outcomes, err := m.Trace(pkt, packetsim.Node{Local: local})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := strings.Join(brief(outcomes), ", "); got != want {
			t.Fatalf("%s: outcomes are %s, want %s", name, got, want)
		}
	}
	pkt := to(vip, 80)
	step("set", restore.Sets, hashIP+"create -exist S hash:ip family inet hashsize 1024 maxelem 2 comment\n"+
		"add S 10.96.0.1 comment \"a b\"\nadd S 10.96.0.1 -exist", pkt, "accept 1")
	step("rule", restore.IPTables, table("filter", "-A FORWARD -m set --match-set S dst -j DROP"), pkt, "drop 1")
	if err := restore.Sets(m, "destroy S"); err == nil || !strings.Contains(err.Error(), "still in use by line 2") {
		t.Errorf("destroying a set in use: error is %v", err)
	}
	step("entry deleted", restore.Sets, "del S 10.96.0.1\ndel -exist S 10.96.0.1\nadd S 10.96.0.2", pkt, "accept 1")
	step("other entry", restore.Sets, "", to(other, 80), "drop 1")
	step("flushed", restore.Sets, "flush S", to(other, 80), "accept 1")
	step("rule gone", restore.IPTables, table("filter", "-F FORWARD"), pkt, "accept 1")
	step("set gone", restore.Sets, "destroy S", pkt, "accept 1")

	step("address", restore.Addresses, vipHere+"address add fd00::1/128 dev kube-ipvs0\n", pkt, "accept local 1")
	step("server", restore.Servers, oneServer, pkt, "accept 10.0.0.1:8080 1")
	step("second", restore.Servers, "-a -t 10.96.0.1:80 -r 10.0.0.2:80 -m", pkt,
		"accept 10.0.0.1:8080 0.5, accept 10.0.0.2:80 0.5")
	step("weight", restore.Servers, "-e -t 10.96.0.1:80 -r 10.0.0.1:8080 -m -w 3", pkt,
		"accept 10.0.0.1:8080 0.5, accept 10.0.0.2:80 0.5")
	step("scheduler", restore.Servers, "-E -t 10.96.0.1:80 -s sh -b sh-port,sh-fallback", pkt,
		"accept 10.0.0.1:8080 0.75, accept 10.0.0.2:80 0.25")
	step("drained", restore.Servers, "-e -t 10.96.0.1:80 -r 10.0.0.1:8080 -m -w 0", pkt, "accept 10.0.0.2:80 1")
	step("destination gone", restore.Servers, "-d -t 10.96.0.1:80 -r 10.0.0.2:80", pkt, "reject local 1")
	step("server gone", restore.Servers, "--delete-service --tcp-service 10.96.0.1:80", pkt, "accept local 1")
	step("another", restore.Servers, oneServer, pkt, "accept 10.0.0.1:8080 1")
	step("all gone", restore.Servers, "-C", pkt, "accept local 1")
	step("address gone", restore.Addresses, "address del 10.96.0.1/32 dev kube-ipvs0", pkt, "accept 1")
	step("route", restore.Addresses, "route add local 10.96.0.0/16 dev kube-ipvs0 table local", pkt, "accept local 1")
	if !m.IsAdded(vip) || !m.IsAdded(other) || m.IsAdded(nodeIP) {
		t.Error("what was added is not what is in the route")
	}
}
