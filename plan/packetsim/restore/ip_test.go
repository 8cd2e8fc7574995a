package restore_test

import (
	"strings"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim/restore"
)

// TestDiversions: a packet to a diverted port is delivered if the table for its mark has a route to the address; other packets to that
// address are forwarded.
func TestDiversions(t *testing.T) {
	t.Parallel()
	const (
		text = "# nftables by netlink\n" +
			"\tip daddr . meta l4proto . th dport @ports meta priority set meta mark meta mark set 0x28030000\n" +
			"set ports type ipv4_addr . inet_proto . inet_service\n"
		element = "add element ip nodeproxy-ipvs-ports ports { 10.96.0.1 . tcp . 80 }\n"
		rule    = "ip -4 rule add pref 90 fwmark 0x28030000 lookup 2496\n"
		route   = "route add local 10.96.0.1/32 dev kube-ipvs0 table 2496\n"
	)
	rules := table("filter", "-A FORWARD -j DROP")
	udp := to(vip, 80)
	udp.Protocol = plan.UDP
	for _, tc := range []struct {
		name, text, route string
		packet            plan.Packet
		want              string
	}{
		{"diverted", text + element + rule, route, to(vip, 80), "accept 10.0.0.1:8080 1"},
		{"another port", text + element + rule, route, to(vip, 81), "drop 1"},
		{"another protocol", text + element + rule, route, udp, "drop 1"},
		{"no route", text + element + rule, "", to(vip, 80), "drop 1"},
		{"route in another table", text + element + rule, strings.Replace(route, "2496", "2497", 1), to(vip, 80), "drop 1"},
		{"no routing rule", text + element, route, to(vip, 80), "drop 1"},
		{"routing rule for another mark", text + element + strings.Replace(rule, "2803", "2804", 1), route, to(vip, 80), "drop 1"},
		{"no element", text + rule, route, to(vip, 80), "drop 1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			checkSections(t, plan.IPv4, tc.text+sections("", oneServer, tc.route, rules), tc.packet, []string{tc.want})
		})
	}
	for _, tc := range []struct{ text, want string }{
		{text + "add table ip nodeproxy-ipvs-ports\n", "IPv4 nftables, line 4: the simulator does not know this"},
		{text + strings.Replace(element, "80", "http", 1), "invalid syntax"},
		{text + strings.Replace(element, "10.96.0.1", "vip", 1), "unable to parse IP"},
		{text + strings.Replace(rule, "fwmark", "from", 1), "routing rules for one mark only"},
		{strings.Replace(text, "0x2803", "0y2803", 1), "invalid syntax"},
	} {
		if _, err := restore.ParseSections(plan.IPv4, tc.text); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("error is %v, want one with %q", err, tc.want)
		}
	}
}
