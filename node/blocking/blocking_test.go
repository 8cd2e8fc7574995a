package blocking

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// web is a ServicePort with a cluster IP, a node port and an endpoint.
var web = &plan.ServicePort{
	Key: plan.Key{Service: plan.Service{Namespace: "default", Name: "web"}, Protocol: plan.TCP, Family: plan.IPv4},
	Frontends: []plan.Frontend{
		{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.96.0.10"), Protocol: plan.TCP, Port: 80},
		{Kind: plan.NodePort, Protocol: plan.TCP, Port: 30080},
	},
	Endpoints: plan.Endpoints{Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.1.5:8080")}}, Any: true},
}

// TestFind: which rules of other programs are found, and of which it is certain that they drop.
func TestFind(t *testing.T) {
	t.Parallel()
	const (
		raw     = "add table ip raw; add chain ip raw prerouting { type filter hook prerouting priority -300; }; "
		forward = "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; }; "
	)
	for _, tc := range []struct{ name, nft, iptables, want string }{
		{name: "none"},
		{name: "an address", nft: raw + "add rule ip raw prerouting ip daddr 10.96.0.10 drop",
			want: "certain: ip daddr 10.96.0.10 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "a range", nft: raw + "add rule ip raw prerouting ip daddr 10.96.0.0/12 tcp dport 80 counter drop",
			want: "certain: ip daddr 10.96.0.0/12 tcp dport 80 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "other ranges, ports and protocols", nft: raw + "add rule ip raw prerouting ip daddr 10.97.0.0/16 drop; " +
			"add rule ip raw prerouting tcp dport 81 drop; add rule ip raw prerouting udp dport 80 drop; add rule ip raw prerouting tcp dport 81-90 drop"},
		{name: "some sources", nft: raw + "add rule ip raw prerouting ip saddr 192.0.2.0/24 tcp dport 30080 drop",
			want: "may: … tcp dport 30080 drop: the node port 30080/TCP from pods and other hosts"},
		{name: "some sources, and nothing of the Service", nft: raw + "add rule ip raw prerouting ip saddr 192.0.2.0/24 drop"},
		{name: "invalid packets", nft: forward + "add rule inet fw forward ct state invalid drop"},
		{name: "a set of ports", nft: forward + "add rule inet fw forward ct state established,related accept; add rule inet fw forward tcp dport { 443, 8080 } reject",
			want: "certain: tcp dport @__set0 reject: endpoint 10.244.1.5:8080"},
		{name: "a set of other ports", nft: forward + "add rule inet fw forward tcp dport { 443, 8000-8079 } drop"},
		{name: "a policy", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward ct state established accept; add rule inet fw forward tcp dport 22 accept",
			want: "certain: policy drop: endpoint 10.244.1.5:8080"},
		{name: "a policy, behind what may accept", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward iifname cni0 accept"},
		{name: "a policy, behind a map of verdicts", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward tcp dport vmap { 8080 : accept, 22 : accept }"},
		{name: "a set of addresses and ports", nft: forward + "add rule inet fw forward ip daddr . tcp dport != { 10.244.1.5 . 8080 } drop",
			want: "may: meta l4proto tcp … drop: endpoint 10.244.1.5:8080"},
		{name: "a dormant table", nft: "add table inet fw { flags dormant; }; add chain inet fw forward { type filter hook forward priority 0; policy drop; }"},
		{name: "beside a rule that can't be read", nft: "add table ip other; add chain ip other a { type filter hook forward priority -5; }; " +
			"add rule ip other a ct original ip daddr 10.9.9.9 counter; " + forward + "add rule inet fw forward tcp dport 8080 drop",
			want: "certain: tcp dport 8080 drop: endpoint 10.244.1.5:8080"},
		{name: "behind an accept", nft: forward + "add rule inet fw forward tcp dport 8080 accept; add rule inet fw forward drop"},
		{name: "in a chain of its own", nft: forward + "add chain inet fw ports; add rule inet fw ports drop; " +
			"add rule inet fw forward tcp dport 8080 iifname eth0 jump ports",
			want: "may: drop: endpoint 10.244.1.5:8080"},
		{name: "IPv6", nft: "add table ip6 raw; add chain ip6 raw prerouting { type filter hook prerouting priority -300; }; add rule ip6 raw prerouting drop"},
		{name: "iptables", iptables: "-t raw -A PREROUTING -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j DROP",
			want: "certain: ip daddr 10.96.0.10 tcp dport 80 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "iptables, for established connections", iptables: "-A FORWARD -p tcp --dport 8080 -m conntrack --ctstate ESTABLISHED -j DROP"},
		{name: "iptables, for new ones", iptables: "-A FORWARD -p tcp --dport 8080 -m conntrack --ctstate NEW -j REJECT",
			want: "certain: tcp dport 8080 reject: endpoint 10.244.1.5:8080"},
		{name: "iptables, of some sources", iptables: "-A FORWARD -s 192.0.2.0/24 -p tcp --dport 8080 -j DROP",
			want: "may: … tcp dport 8080 drop: endpoint 10.244.1.5:8080"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			nstest.Enter(t)
			if tc.nft != "" {
				nstest.Exec(t, "nft", tc.nft)
			}
			if tc.iptables != "" {
				nstest.Exec(t, "iptables-nft", strings.Fields(tc.iptables)...)
			}
			found, err := Find(t.Context(), []*plan.ServicePort{web}, func(netip.Addr) bool { return false })
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, r := range found {
				how := "may"
				if r.Certain {
					how = "certain"
				}
				got = append(got, fmt.Sprintf("%s: %s: %s", how, r.Text, r.What))
			}
			if text := strings.Join(got, "\n"); text != tc.want {
				t.Errorf("found %s\nwant  %s", text, tc.want)
			}
		})
	}
}

// TestFindLimits: rules of other programs may be many, with large sets and very many ways through chains. A set is read once, however many
// rules ask for it, and nothing goes on for long after the context has ended.
func TestFindLimits(t *testing.T) {
	nstest.Enter(t)
	load := func(text string) {
		t.Helper()
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("nft: %v: %s", err, out)
		}
	}
	var in strings.Builder
	in.WriteString("table ip big {\nset s { type ipv4_addr; elements = { 10.244.1.5")
	for i := range 20000 {
		fmt.Fprintf(&in, ", 11.0.%d.%d", i/250, i%250)
	}
	in.WriteString(" }\n}\nchain f {\ntype filter hook forward priority 0;\n" + strings.Repeat("ip daddr @s ct mark 1 accept\n", 300) + "ip daddr @s drop\n}\n}\n")
	load(in.String())
	ports, local := []*plan.ServicePort{web}, func(netip.Addr) bool { return false }
	if list, err := Find(t.Context(), ports, local); err != nil || len(list) != 1 || list[0].Certain {
		t.Errorf("behind rules that may accept: %+v, %v", list, err)
	}
	rules, err := nft.ReadRuleset()
	if err != nil {
		t.Fatal(err)
	}
	defer rules.Close()
	has := func() {
		t.Helper()
		if is, known := rules.Contains(nft.ChainID{Family: "ip", Table: "big", Chain: "f"}, "s", []byte{10, 244, 1, 5}); !is || !known {
			t.Errorf("the set has the endpoint: %t, known %t", is, known)
		}
	}
	has()
	load("flush set ip big s")
	has() // as it was when it was read

	in.Reset()
	in.WriteString("delete table ip big\ntable ip deep {\n")
	for d := 14; d >= 0; d-- {
		fmt.Fprintf(&in, "chain c%d {\n", d)
		if d < 14 {
			in.WriteString(strings.Repeat(fmt.Sprintf("iifname eth0 jump c%d\n", d+1), 8))
		}
		in.WriteString("}\n")
	}
	in.WriteString("}\n")
	load(in.String())
	load("add chain ip deep f { type filter hook forward priority 0; }; add rule ip deep f jump c7")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := Find(ctx, ports, local); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("two million ways took %s: %v", time.Since(begin), err)
	}
}
