package blocking

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/inspect/reality"
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
		raw         = "add table ip raw; add chain ip raw prerouting { type filter hook prerouting priority -300; }; "
		dropping    = "add table ip filter; add chain ip filter KUBE-FORWARD; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; add rule ip filter FORWARD ct state established accept; "
		services    = "add table ip nat; add chain ip nat KUBE-SERVICES; add chain ip nat PREROUTING { type nat hook prerouting priority -100; }; add rule ip nat PREROUTING jump KUBE-SERVICES"
		masquerades = "add table ip nat; add chain ip nat KUBE-POSTROUTING; add chain ip nat POSTROUTING { type nat hook postrouting priority 100; }; add rule ip nat POSTROUTING jump KUBE-POSTROUTING"
		policies    = "add table ip filter; add chain ip filter cali-tw; add chain ip filter cali-pi-a; add chain ip filter FORWARD { type filter hook forward priority 0; }; " +
			"add rule ip filter cali-tw ct state established accept; add rule ip filter cali-tw meta mark set meta mark & 0xfffcffff; " +
			"add rule ip filter cali-tw meta mark & 0x20000 == 0 jump cali-pi-a; add rule ip filter cali-tw meta mark & 0x10000 == 0x10000 return; " +
			"add rule ip filter cali-tw meta mark & 0x20000 == 0 drop; add rule ip filter FORWARD ip daddr 10.244.1.5 jump cali-tw; add rule ip filter FORWARD meta mark & 0x10000 == 0x10000 accept"
		forward = "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; }; "
	)
	for _, tc := range []struct {
		name, nft, iptables, want  string
		ipvs, uplink, pods, tunnel bool
	}{
		{name: "none"},
		{name: "an address", nft: raw + "add rule ip raw prerouting ip daddr 10.96.0.10 drop",
			want: "certain: ip daddr 10.96.0.10 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "a range", nft: raw + "add rule ip raw prerouting ip daddr 10.96.0.0/12 tcp dport 80 counter drop",
			want: "certain: ip daddr 10.96.0.0/12 tcp dport 80 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "other ranges, ports and protocols", nft: raw + "add rule ip raw prerouting ip daddr 10.97.0.0/16 drop; " +
			"add rule ip raw prerouting tcp dport 81 drop; add rule ip raw prerouting udp dport 80 drop; add rule ip raw prerouting tcp dport 81-90 drop"},
		{name: "some sources", nft: raw + "add rule ip raw prerouting ip saddr 192.0.2.0/24 tcp dport 30080 drop",
			want: "may: ip saddr 192.0.2.0/24 tcp dport 30080 drop: the node port 30080/TCP from pods and other hosts"},
		{name: "some sources, and nothing of the Service", nft: raw + "add rule ip raw prerouting ip saddr 192.0.2.0/24 drop"},
		{name: "invalid packets", nft: forward + "add rule inet fw forward ct state invalid drop"},
		{name: "a set of ports", nft: forward + "add rule inet fw forward ct state established,related accept; add rule inet fw forward tcp dport { 443, 8080 } reject",
			want: "certain: tcp dport @__set0 reject: endpoint 10.244.1.5:8080"},
		{name: "a set of other ports", nft: forward + "add rule inet fw forward tcp dport { 443, 8000-8079 } drop"},
		{name: "a policy", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward ct state established accept; add rule inet fw forward tcp dport 22 accept",
			want: "certain: policy drop: endpoint 10.244.1.5:8080"},
		{name: "a policy, behind what may accept", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward iifname cni0 accept",
			want: "may: policy drop: endpoint 10.244.1.5:8080"},
		{name: "a policy, behind a map of verdicts", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward tcp dport vmap { 8080 : accept, 22 : accept }", want: "may: policy drop: answers of endpoint 10.244.1.5:8080"},
		{name: "a set of other addresses and ports", nft: forward + "add rule inet fw forward ip daddr . tcp dport != { 10.244.1.5 . 8080 } drop"},
		{name: "a set of addresses and ports", nft: forward + "add rule inet fw forward ip daddr . tcp dport { 10.244.1.5 . 8080, 10.244.1.6 . 80 } drop",
			want: "certain: meta l4proto tcp ip daddr . tcp dport @__set0 drop: endpoint 10.244.1.5:8080"},
		{name: "a map of verdicts that drops", nft: forward + "add rule inet fw forward tcp dport vmap { 22 : accept, 8080 : drop }",
			want: "certain: tcp dport vmap @__map0 drop: endpoint 10.244.1.5:8080"},
		{name: "a map of verdicts for ranges", nft: forward + "add rule inet fw forward tcp dport vmap { 0-1023 : accept, 8000-8100 : drop, 8101-9000: accept }",
			want: "certain: tcp dport vmap @__map0 drop: endpoint 10.244.1.5:8080"},
		{name: "a map of verdicts that leads to a chain", nft: forward + "add chain inet fw ports; add rule inet fw ports reject; " +
			"add rule inet fw forward ip daddr . tcp dport vmap { 10.244.1.5 . 8080 : goto ports }",
			want: "certain: reject: endpoint 10.244.1.5:8080"},
		{name: "a map of verdicts for some sources", nft: forward + "add rule inet fw forward ip saddr . tcp dport vmap { 192.0.2.1 . 8080 : drop, 192.0.2.2 . 8080 : accept }",
			want: "may: meta l4proto tcp … drop: endpoint 10.244.1.5:8080"},
		{name: "a map of verdicts for interfaces", nft: forward + "add rule inet fw forward iifname vmap { eth0 : drop, cni0 : accept }"},
		{name: "a map of verdicts for others", nft: forward + "add rule inet fw forward tcp dport vmap { 22 : drop, 23 : drop }"},
		{name: "what is translated", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 10; policy drop; }; " +
			"add rule inet fw forward ct status dnat accept"},
		{name: "what is not translated", nft: forward + "add rule inet fw forward ct status dnat tcp dport 8080 reject",
			want: "certain: tcp dport 8080 reject: endpoint 10.244.1.5:8080"},
		{name: "local addresses", nft: raw + "add rule ip raw prerouting fib daddr type local tcp dport 30080 drop",
			want: "certain: fib daddr type local tcp dport 30080 drop: the node port 30080/TCP from pods and other hosts"},
		{name: "IPVS forwards nothing", ipvs: true, nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }"},
		{name: "IPVS takes what comes in", ipvs: true, nft: "add table inet fw; add chain inet fw in { type filter hook input priority 0; }; " +
			"add rule inet fw in ip daddr 10.96.0.10 drop",
			want: "certain: ip daddr 10.96.0.10 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "answers of the endpoint", nft: forward + "add rule inet fw forward tcp sport 8080 drop",
			want: "certain: tcp sport 8080 drop: answers of endpoint 10.244.1.5:8080"},
		{name: "answers by their address", nft: raw + "add rule ip raw prerouting ip saddr 10.244.0.0/16 tcp sport { 80, 8080 } drop",
			want: "certain: ip saddr 10.244.0.0/16 tcp sport @__set0 drop: answers of endpoint 10.244.1.5:8080"},
		{name: "answers of others", nft: forward + "add rule inet fw forward tcp sport 8081 drop; add rule inet fw forward ip saddr 10.245.0.0/16 drop"},
		{name: "a policy that drops only answers", nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward ct state new accept", want: "certain: policy drop: answers of endpoint 10.244.1.5:8080"},
		{name: "answers, before their source is translated back", nft: "add table inet fw; add chain inet fw post { type filter hook postrouting priority 50; }; " +
			"add rule inet fw post ip saddr 10.244.1.5 drop", want: "certain: ip saddr 10.244.1.5 drop: answers of endpoint 10.244.1.5:8080"},
		{name: "iptables, answers", iptables: "-A FORWARD -p tcp --sport 8080 -j DROP", want: "certain: tcp sport 8080 drop: answers of endpoint 10.244.1.5:8080"},
		{name: "iptables, answers of a range", iptables: "-A FORWARD -s 10.244.0.0/16 -p tcp -m multiport --sports 80,8080 -j DROP",
			want: "certain: ip saddr 10.244.0.0/16 tcp sport { 80, 8080 } drop: answers of endpoint 10.244.1.5:8080"},
		{name: "what endpoints may not send elsewhere", nft: forward + "add rule inet fw forward ip saddr 10.0.0.0/8 iifname eth0 drop; " +
			"add rule inet fw forward ip saddr 10.244.0.0/16 ip daddr 169.254.169.254 drop; add rule inet fw forward ip saddr != 192.168.0.0/16 tcp dport 22 drop"},
		{name: "iptables, what endpoints may not begin", iptables: "-A FORWARD -s 10.244.0.0/16 -p tcp --syn -j DROP"},
		{name: "iptables, where endpoints may not go", iptables: "-A INPUT -s 10.244.0.0/16 -p tcp -m multiport --dports 22,10250 -j REJECT"},
		{name: "iptables, a policy behind KUBE-FORWARD", nft: "add table ip filter; add chain ip filter KUBE-FORWARD; " +
			"add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; add rule ip filter FORWARD jump KUBE-FORWARD; " +
			"add rule ip filter FORWARD ip daddr 10.244.0.0/16 accept"},
		{name: "iptables, answers to this node", iptables: "-A INPUT -p tcp --sport 8080 -j REJECT",
			want: "certain: tcp sport 8080 reject: answers of endpoint 10.244.1.5:8080 to this node"},
		{name: "a dormant table", nft: "add table inet fw { flags dormant; }; add chain inet fw forward { type filter hook forward priority 0; policy drop; }"},
		{name: "beside a rule that can't be read", nft: "add table ip other; add chain ip other a { type filter hook forward priority -5; }; " +
			"add rule ip other a ct original ip daddr 10.9.9.9 counter; " + forward + "add rule inet fw forward tcp dport 8080 drop",
			want: "certain: tcp dport 8080 drop: endpoint 10.244.1.5:8080"},
		{name: "behind an accept", nft: forward + "add rule inet fw forward tcp dport 8080 accept; add rule inet fw forward drop",
			want: "may: drop: answers of endpoint 10.244.1.5:8080"},
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
			want: "may: ip saddr 192.0.2.0/24 tcp dport 8080 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, ports", iptables: "-A FORWARD -p tcp -m multiport --dports 443,8000:8100 -j DROP",
			want: "certain: tcp dport { 443, 8000-8100 } drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, other ports", iptables: "-A FORWARD -p tcp -m multiport --dports 443,8000:8079 -j DROP"},
		{name: "iptables, but for some ports", iptables: "-A FORWARD -p tcp -m multiport ! --dports 443,8000:8079 -j DROP",
			want: "certain: tcp dport != { 443, 8000-8079 } drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, sources' ports", iptables: "-A FORWARD -p tcp -m multiport --ports 8080 -j DROP"},
		{name: "iptables, what went to a node port", iptables: "-A FORWARD -p tcp -m conntrack --ctorigdstport 30080 -j DROP",
			want: "may: meta l4proto tcp ct original proto-dst 30080 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, what went to another port", iptables: "-A FORWARD -p tcp -m conntrack --ctorigdstport 81:89 -j DROP"},
		{name: "iptables, what went to an address", iptables: "-A FORWARD -p tcp -m conntrack --ctorigdst 10.96.0.10 -j DROP",
			want: "may: meta l4proto tcp ct original daddr 10.96.0.10/32 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, before that", iptables: "-t mangle -A PREROUTING -p tcp -m conntrack --ctorigdst 10.96.0.10 --ctorigdstport 80 -j DROP",
			want: "certain: meta l4proto tcp ct original daddr 10.96.0.10/32 ct original proto-dst 80 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "iptables, local addresses", iptables: "-t raw -A PREROUTING -p tcp --dport 30080 -m addrtype --dst-type LOCAL -j DROP",
			want: "certain: tcp dport 30080 fib daddr type local drop: the node port 30080/TCP from pods and other hosts"},
		{name: "not tracked", nft: raw + "add rule ip raw prerouting ip daddr 10.96.0.0/16 notrack",
			want: "certain: ip daddr 10.96.0.0/16 notrack: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "not tracked, too late", nft: forward + "add rule inet fw forward ip daddr 10.244.0.0/16 notrack"},
		{name: "not tracked, for IPVS", ipvs: true, nft: raw + "add rule ip raw prerouting ip daddr 10.96.0.0/16 notrack",
			want: "may: ip daddr 10.96.0.0/16 notrack: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "states before there are any", nft: raw + "add rule ip raw prerouting ct state new drop; add rule ip raw prerouting ct state invalid tcp dport 30080 drop",
			want: "certain: tcp dport 30080 drop: the node port 30080/TCP from pods and other hosts"},
		{name: "iptables, not tracked", iptables: "-t raw -A PREROUTING -p tcp --dport 30080 -j CT --notrack",
			want: "certain: tcp dport 30080 notrack: the node port 30080/TCP from pods and other hosts"},
		{name: "iptables, tracked in a zone", iptables: "-t raw -A PREROUTING -p tcp --dport 30080 -j CT --zone 3"},
		{name: "a policy for an interface", uplink: true, nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward ct state established accept; add rule inet fw forward iifname lxc* accept; add rule inet fw forward tcp dport 30000-32767 accept",
			want: "certain: policy drop: endpoint 10.244.1.5:8080 from outside (by eth0)"},
		{name: "iptables, a policy for an interface", uplink: true, iptables: "-A FORWARD -i eth+ -o cni1 -j ACCEPT", nft: "add table ip filter; " +
			"add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; add rule ip filter FORWARD ct state established accept; add rule ip filter FORWARD iifname vethX accept",
			want: "certain: policy drop: endpoint 10.244.1.5:8080 from outside (by eth0)"},
		{name: "a policy that admits what comes by interfaces", uplink: true, nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward ct state established accept; add rule inet fw forward oifname { cni0, cni1 } accept"},
		{name: "an interface, and nothing of the Service", uplink: true, nft: forward + "add rule inet fw forward iifname != eth0 oifname cni0 drop"},
		{name: "a port at an interface", uplink: true, nft: raw + "add rule ip raw prerouting iifname eth0 tcp dport 30080 drop",
			want: "certain: iifname eth0 tcp dport 30080 drop: the node port 30080/TCP from outside (by eth0)"},
		{name: "iptables, before masquerading", uplink: true, nft: masquerades, iptables: "-t nat -I POSTROUTING -d 10.0.0.0/8 -j ACCEPT",
			want: "certain: ip daddr 10.0.0.0/8 accept: endpoint 10.244.1.5:8080 from outside"},
		{name: "iptables, behind masquerading", uplink: true, nft: masquerades, iptables: "-t nat -A POSTROUTING -d 10.0.0.0/8 -j ACCEPT"},
		{name: "iptables, sources before masquerading", uplink: true, nft: masquerades, iptables: "-t nat -I POSTROUTING -s 10.244.0.0/16 -d 10.244.0.0/16 -j RETURN"},
		{name: "iptables, the policy of Docker", uplink: true, pods: true, nft: dropping + "add rule ip filter FORWARD jump KUBE-FORWARD; add rule ip filter FORWARD iifname docker0 oifname != docker0 accept",
			want: "certain: policy drop: endpoint 10.244.1.5:8080 from Pods of this node"},
		{name: "iptables, a policy that admits Pods", uplink: true, pods: true, nft: dropping + "add rule ip filter FORWARD jump KUBE-FORWARD; add rule ip filter FORWARD ip saddr 10.244.0.0/16 accept"},
		{name: "a policy for Pods and for others", uplink: true, pods: true, nft: "add table inet fw; add chain inet fw forward { type filter hook forward priority 0; policy drop; }; " +
			"add rule inet fw forward ct state established accept; add rule inet fw forward ip saddr 192.0.2.0/24 iifname eth1 accept",
			want: "certain: policy drop: endpoint 10.244.1.5:8080 from Pods of this node and from outside (by eth0)"},
		{name: "iptables, an accept without masquerading", uplink: true, iptables: "-t nat -I POSTROUTING -d 10.0.0.0/8 -j ACCEPT"},
		{name: "iptables, redirected first", uplink: true, nft: services, iptables: "-t nat -I PREROUTING -p tcp --dport 30080 -j REDIRECT --to-ports 9999",
			want: "certain: tcp dport 30080 REDIRECT: the node port 30080/TCP from pods and other hosts"},
		{name: "iptables, redirected at an interface of Pods", uplink: true, pods: true, nft: services, iptables: "-t nat -I PREROUTING -i cni0 -p tcp --dport 80 -j REDIRECT --to-ports 3128",
			want: "certain: iifname cni0 tcp dport 80 REDIRECT: the cluster IP 10.96.0.10:80/TCP from Pods of this node (by cni0)"},
		{name: "iptables, dropped at an interface of Pods", uplink: true, pods: true, iptables: "-t raw -A PREROUTING -i cni0 -p tcp --dport 80 -j DROP",
			want: "certain: iifname cni0 tcp dport 80 drop: the cluster IP 10.96.0.10:80/TCP from Pods of this node (by cni0)"},
		{name: "iptables, first packets", iptables: "-A FORWARD -p tcp --syn -j DROP", want: "certain: meta l4proto tcp tcp flags & 0x17 == 0x2 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, all but first packets", iptables: "-A FORWARD -p tcp ! --syn -m conntrack --ctstate NEW -j DROP"},
		{name: "iptables, first packets to a port", iptables: "-A FORWARD -p tcp --dport 8080 --tcp-flags SYN,ACK SYN -j REJECT", want: "certain: tcp flags & 0x12 == 0x2 tcp dport 8080 reject: endpoint 10.244.1.5:8080"},
		{name: "first packets", nft: forward + "add rule inet fw forward tcp flags syn drop", want: "certain: meta l4proto tcp tcp flags & 0x2 != 0x0 drop: endpoint 10.244.1.5:8080"},
		{name: "other packets", nft: forward + "add rule inet fw forward tcp flags & (fin|rst) != 0 drop; add rule inet fw forward tcp flags & (fin|syn|rst|ack) == syn|ack drop"},
		{name: "iptables, exempted first", nft: services, iptables: "-t nat -I PREROUTING -d 10.96.0.0/16 -j ACCEPT",
			want: "certain: ip daddr 10.96.0.0/16 accept: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "iptables, redirected later", nft: services, iptables: "-t nat -A PREROUTING -p tcp --dport 30080 -j REDIRECT --to-ports 9999"},
		{name: "translated before", nft: "add table inet other; add chain inet other pre { type nat hook prerouting priority -105; }; add rule inet other pre tcp dport 30080 dnat ip to 10.9.9.9:80",
			want: "certain: tcp dport 30080 dnat to 10.9.9.9: the node port 30080/TCP from pods and other hosts"},
		{name: "accepted in a chain of its own", nft: "add table inet other; add chain inet other pre { type nat hook prerouting priority -105; }; add rule inet other pre tcp dport 30080 accept"},
		{name: "translated behind", nft: "add table inet other; add chain inet other pre { type nat hook prerouting priority -95; }; add rule inet other pre tcp dport 30080 dnat ip to 10.9.9.9:80"},
		{name: "network policies of kube-router", nft: forward + "add chain inet fw KUBE-ROUTER-FORWARD; add chain inet fw KUBE-POD-FW-X; add rule inet fw forward jump KUBE-ROUTER-FORWARD; " +
			"add rule inet fw KUBE-ROUTER-FORWARD ip daddr 10.244.1.5 jump KUBE-POD-FW-X; add rule inet fw KUBE-POD-FW-X reject",
			want: "certain: reject: endpoint 10.244.1.5:8080"},
		{name: "iptables, a comment that looks like an option", iptables: "-A FORWARD -d 10.244.1.5/32 -m comment --comment -p -j DROP",
			want: "certain: ip daddr 10.244.1.5 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, masqueraded by others", uplink: true, nft: masquerades, iptables: "-t nat -I POSTROUTING -d 10.0.0.0/8 -j MASQUERADE"},
		{name: "iptables, a mark by the port", iptables: "-t mangle -A PREROUTING -p tcp --dport 80 -j MARK --set-mark 7", nft: forward + "add rule inet fw forward meta mark 7 drop",
			want: "may: meta mark 0x7 drop: endpoint 10.244.1.5:8080"},
		{name: "a mark by the port, in the same hook", nft: forward + "add rule inet fw forward tcp dport 8080 meta mark set meta mark | 0x10; add rule inet fw forward meta mark & 0x30 == 0x10 drop",
			want: "certain: meta mark & 0x30 == 0x10 drop: endpoint 10.244.1.5:8080"},
		{name: "a mark of others", nft: forward + "add rule inet fw forward tcp dport 8081 meta mark set 7; add rule inet fw forward meta mark 7 drop"},
		{name: "a mark for masquerading", nft: forward + "add rule inet fw forward meta mark & 0x4000 == 0x4000 drop"},
		{name: "a mark and more", nft: forward + "add rule inet fw forward meta mark & 0x30 == 0x10 drop; add rule inet fw forward tcp dport 8080 meta mark & 0xffff == 0x10 drop"},
		{name: "no mark", nft: forward + "add rule inet fw forward ct state new meta mark & 0x30 == 0 drop", want: "certain: meta mark & 0x30 == 0x0 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, a policy that allows another port", nft: policies, iptables: "-A cali-pi-a -p tcp --dport 8081 -j MARK --set-xmark 0x10000/0x10000",
			want: "certain: meta mark & 0x20000 == 0x0 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, a policy that allows the port", nft: policies, iptables: "-A cali-pi-a -p tcp --dport 8080 -j MARK --set-xmark 0x10000/0x10000"},
		{name: "iptables, a policy that allows the port to some", nft: policies, iptables: "-A cali-pi-a -s 10.244.2.0/24 -p tcp --dport 8080 -j MARK --set-xmark 0x10000/0x10000",
			want: "may: meta mark & 0x20000 == 0x0 drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, the connection's mark", iptables: "-A FORWARD -m mark --mark 0 -j DROP", nft: "add table ip filter; " +
			"add chain ip filter FORWARD { type filter hook forward priority 0; }; add rule ip filter FORWARD meta mark set ct mark"},
		{name: "at a device", uplink: true, nft: "add table netdev guard; add chain netdev guard in { type filter hook ingress device lo priority 0; }; add chain netdev guard up " +
			"{ type filter hook ingress device eth0 priority 0; }; add rule netdev guard in tcp dport 30080 drop; add rule netdev guard up ip protocol tcp tcp dport 30080 drop; " +
			"add rule netdev guard up ip daddr 10.96.0.10 drop",
			want: "certain: tcp dport 30080 drop: the node port 30080/TCP from outside (by eth0)"},
		{name: "at a device, answers", uplink: true, nft: "add table inet guard; add chain inet guard in { type filter hook ingress device cni0 priority 0; }; " +
			"add rule inet guard in ip6 saddr ::/0 drop; add rule inet guard in ip saddr 10.244.1.5 drop",
			want: "certain: ip saddr 10.244.1.5 drop: answers of endpoint 10.244.1.5:8080 (by cni0)"},
		{name: "a policy for what comes in a tunnel", uplink: true, tunnel: true, nft: "add table inet fw; add chain inet fw in { type filter hook input priority 0; policy drop; }; " +
			"add rule inet fw in ct state established accept; add rule inet fw in tcp dport { 22, 10250 } accept; add rule inet fw in iifname lo accept",
			want: "certain: policy drop: the tunnel flannel.1 (port 8472/UDP), by which other nodes answer"},
		{name: "a policy that admits a tunnel", uplink: true, tunnel: true, nft: "add table inet fw; add chain inet fw in { type filter hook input priority 0; policy drop; }; " +
			"add rule inet fw in ct state established accept; add rule inet fw in iifname eth0 udp dport { 8472 } accept"},
		{name: "a policy that admits the peers of a tunnel", uplink: true, tunnel: true, nft: "add table inet fw; add chain inet fw in { type filter hook input priority 0; policy drop; }; add set inet fw nodes { type ipv4_addr; elements = { 192.0.2.8, 192.0.2.9 }; }; " +
			"add rule inet fw in ct state established accept; add rule inet fw in iif lo accept; add rule inet fw in ip saddr @nodes udp dport 8472 accept"},
		{name: "a policy for what comes in a tunnel, and indexes of interfaces", uplink: true, tunnel: true, nft: "add table inet fw; add chain inet fw in { type filter hook input priority 0; policy drop; }; " +
			"add rule inet fw in iif lo accept; add rule inet fw in iif != eth0 accept",
			want: "certain: policy drop: the tunnel flannel.1 (port 8472/UDP), by which other nodes answer"},
		{name: "a policy that admits an index", uplink: true, tunnel: true, nft: "add table inet fw; add chain inet fw in { type filter hook input priority 0; policy drop; }; add rule inet fw in ct state established accept; add rule inet fw in iif eth0 accept"},
		{name: "what the kubelet drops, of a tunnel", uplink: true, tunnel: true, nft: "add table ip f; add chain ip f in { type filter hook input priority 0; }; add rule ip f in ip saddr != 127.0.0.0/8 ip daddr 127.0.0.0/8 drop"},
		{name: "iptables, a tunnel at other ports", uplink: true, tunnel: true, iptables: "-A INPUT -p udp --dport 4789 -j DROP"},
		{name: "a bridge, what Pods ask for", uplink: true, pods: true, nft: "add table bridge b; add chain bridge b in { type filter hook prerouting priority -300; }; add rule bridge b in ip daddr 10.96.0.10 tcp dport 80 drop",
			want: "certain: ip daddr 10.96.0.10 tcp dport 80 drop: the cluster IP 10.96.0.10:80/TCP from Pods of this node (by cni0)"},
		{name: "a bridge, to endpoints", uplink: true, nft: "add table bridge b; add chain bridge b out { type filter hook output priority 0; }; add rule bridge b out ether type ip tcp dport 8080 drop",
			want: "certain: tcp dport 8080 drop: endpoint 10.244.1.5:8080 (by cni0)"},
		{name: "a bridge, answers", uplink: true, nft: "add table bridge b; add chain bridge b in { type filter hook input priority 0; }; add rule bridge b in ip saddr 10.244.1.5 tcp sport 8080 drop",
			want: "certain: ip saddr 10.244.1.5 tcp sport 8080 drop: answers of endpoint 10.244.1.5:8080 (by cni0)"},
		{name: "a bridge, other packets", uplink: true, nft: "add table bridge b; add chain bridge b out { type filter hook output priority 0; }; add rule bridge b out ip6 daddr fd00::5 drop; add rule bridge b out tcp dport 22 drop"},
		{name: "no bridge", nft: "add table bridge b; add chain bridge b out { type filter hook output priority 0; }; add rule bridge b out tcp dport 8080 drop"},
		{name: "iptables, a mark set in place of another", uplink: true, iptables: "-t mangle -A FORWARD -p tcp --dport 8080 -j MARK --set-mark 0x10",
			want: "certain: tcp dport 8080 meta mark set: unmarked: endpoint 10.244.1.5:8080 from outside (by eth0)"},
		{name: "iptables, a mark set beside another", uplink: true, iptables: "-t mangle -A FORWARD -p tcp --dport 8080 -j MARK --set-mark 0x10/0xff"},
		{name: "a mark set in place of another", uplink: true, nft: "add table ip qos; add chain ip qos f { type filter hook postrouting priority -150; }; add rule ip qos f meta mark set 0x10",
			want: "certain: meta mark set: unmarked: endpoint 10.244.1.5:8080 from outside (by eth0)"},
		{name: "a mark set beside another, by nft", uplink: true, nft: "add table ip qos; add chain ip qos f { type filter hook postrouting priority -150; }; add rule ip qos f meta mark set meta mark or 0x10"},
		{name: "iptables, a mark restored", uplink: true, iptables: "-t mangle -A POSTROUTING -j CONNMARK --restore-mark",
			want: "may: meta mark set ct mark: unmarked: endpoint 10.244.1.5:8080 from outside (by eth0)"},
		{name: "iptables, some of a mark restored", uplink: true, iptables: "-t mangle -A POSTROUTING -j CONNMARK --restore-mark --nfmask 0xff --ctmask 0xff"},
		{name: "iptables, a source that the node lacks", pods: true, nft: masquerades, iptables: "-t nat -A POSTROUTING -s 10.244.0.0/24 ! -d 10.244.0.0/24 -j SNAT --to-source 192.0.2.99",
			want: "certain: ip saddr 10.244.0.0/24 ip daddr != 10.244.0.0/24 SNAT to 192.0.2.99: missing: endpoint 10.244.1.5:8080 from Pods of this node"},
		{name: "a source that the node lacks", pods: true, nft: "add table ip n; add chain ip n p { type nat hook postrouting priority 100; }; add rule ip n p ip saddr 10.244.0.0/16 snat to 198.51.100.99",
			want: "may: ip saddr 10.244.0.0/16 snat to 198.51.100.99: missing: endpoint 10.244.1.5:8080 from Pods of this node"},
		{name: "a source that the node has", pods: true, nft: "add table ip n; add chain ip n p { type nat hook postrouting priority 100; }; add rule ip n p ip saddr 10.244.0.0/16 snat to 192.0.2.1"},
		{name: "iptables, too many at once", iptables: "-A FORWARD -p tcp --syn -m limit --limit 5/second -j DROP",
			want: "may: meta l4proto tcp tcp flags & 0x17 == 0x2 limit rate drop: endpoint 10.244.1.5:8080"},
		{name: "too many at once", nft: forward + "add rule inet fw forward ct state new limit rate over 5/second drop",
			want: "may: limit rate drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, too many connections", iptables: "-A FORWARD -p tcp --dport 8080 -m connlimit --connlimit-above 3 -j DROP", want: "may: tcp dport 8080 connlimit drop: endpoint 10.244.1.5:8080"},
		{name: "too many connections", nft: forward + "add set inet fw conns { type ipv4_addr; flags dynamic; }; add rule inet fw forward ct state new add @conns { ip saddr ct count over 3 } drop",
			want: "may: limit rate drop: endpoint 10.244.1.5:8080"},
		{name: "errors of the path MTU", nft: "add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o icmp type destination-unreachable drop",
			want: "certain: meta l4proto icmp icmp type 3 drop: ICMP errors of this node"},
		{name: "errors of the path MTU, which are related", nft: "add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o ct state related accept; add rule ip f o ip protocol icmp drop"},
		{name: "errors of the path MTU, to the uplink alone", uplink: true, pods: true, nft: "add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o oifname eth0 icmp type destination-unreachable drop"},
		{name: "errors of the path MTU, which none needs", nft: "add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o ip protocol icmp drop; " +
			"add chain ip f c { type filter hook forward priority -150; }; add rule ip f c tcp flags syn tcp option maxseg size set rt mtu"},
		{name: "iptables, errors of the path MTU, which none needs", nft: "add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o ip protocol icmp drop",
			iptables: "-t mangle -A FORWARD -p tcp --syn -j TCPMSS --clamp-mss-to-pmtu"},
		{name: "a policy, and all Pods of this node admitted", pods: true, nft: "add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }; add rule inet fw f ip saddr 10.244.0.0/24 accept",
			want: "may: policy drop: endpoint 10.244.1.5:8080\ncertain: policy drop: answers of endpoint 10.244.1.5:8080"},
		{name: "a policy, and one Pod admitted", pods: true, nft: "add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }; add rule inet fw f ip saddr 10.244.0.9 accept; add rule inet fw f ct state established accept",
			want: "may: policy drop: endpoint 10.244.1.5:8080"},
		{name: "a policy, and one Pod admitted by a map", pods: true, nft: "add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }; add rule inet fw f ip saddr vmap { 10.244.0.9 : accept }; add rule inet fw f ct state established accept",
			want: "may: policy drop: endpoint 10.244.1.5:8080"},
		{name: "iptables, sources that no Pod of this node has", pods: true, iptables: "-t raw -A PREROUTING -i cni0 ! -s 10.244.0.0/24 -j DROP"},
		{name: "iptables, some of the Pods' sources", pods: true, iptables: "-t raw -A PREROUTING -i cni0 -s 10.244.0.128/25 -d 10.96.0.10 -j DROP",
			want: "may: iifname cni0 ip saddr 10.244.0.128/25 ip daddr 10.96.0.10 drop: the cluster IP 10.96.0.10:80/TCP from pods and other hosts"},
		{name: "errors of the path MTU, and segments of this node's own clamped", nft: "add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o tcp flags syn tcp option maxseg size set rt mtu; add rule ip f o ip protocol icmp drop",
			want: "certain: ip protocol icmp drop: ICMP errors of this node"},
		{name: "a policy that admits a range of Pods", uplink: true, pods: true, nft: "add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }; add rule inet fw f ct state established accept; " +
			"add rule inet fw f ip saddr 10.0.0.0-10.255.255.255 accept; add rule inet fw f iifname eth0 accept"},
		{name: "a policy that admits other Pods", uplink: true, pods: true, nft: "add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }; add rule inet fw f ct state established accept; " +
			"add rule inet fw f ip saddr 10.9.0.0-10.10.255.255 accept; add rule inet fw f iifname eth0 accept",
			want: "certain: policy drop: endpoint 10.244.1.5:8080 from Pods of this node"},
		{name: "other ICMP", nft: "add table ip f; add chain ip f o { type filter hook output priority 0; }; add rule ip f o icmp type echo-reply drop"},
		{name: "iptables, a policy for what this node sends", uplink: true, nft: "add table ip filter; add chain ip filter OUTPUT { type filter hook output priority 0; policy drop; }",
			iptables: "-A OUTPUT -o lo -j ACCEPT", want: "certain: policy drop: endpoint 10.244.1.5:8080 from this node\nmay: policy drop: ICMP errors of this node"},
		{name: "iptables, no local addresses", iptables: "-A FORWARD -p tcp --dport 8080 -m addrtype --dst-type LOCAL -j DROP"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			nstest.Enter(t)
			if strings.Contains(tc.nft, " device ") || strings.Contains(tc.nft, " iif ") {
				nstest.Exec(t, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "cni0")
			}
			if tc.nft != "" {
				nstest.Exec(t, "nft", tc.nft)
			}
			if tc.iptables != "" {
				nstest.Exec(t, "iptables-nft", strings.Fields(tc.iptables)...)
			}
			n := Node{Local: func(a netip.Addr) bool { return a == netip.MustParseAddr("192.0.2.1") }, Near: netip.MustParsePrefix("192.0.2.0/24").Contains, IPVS: tc.ipvs, Mark: 0x4000}
			if tc.uplink {
				n.Uplink, n.By = "eth0", func(netip.Addr) string { return "cni0" }
			}
			n.Bridges = map[string]bool{"cni0": true}
			if tc.tunnel {
				n.Tunnels = []reality.Tunnel{{Name: "flannel.1", Protocol: unix.IPPROTO_UDP, Port: 8472, By: "eth0", Peer: netip.MustParseAddr("192.0.2.9")}}
			}
			if tc.pods {
				n.Pods, n.PodsBy = map[plan.Family]netip.Prefix{plan.IPv4: netip.MustParsePrefix("10.244.0.0/24")}, "cni0"
			}
			found, err := Find(t.Context(), []*plan.ServicePort{web}, n)
			require.NoError(t, err)
			var got []string
			for _, r := range found {
				how := "may"
				if r.Certain {
					how = "certain"
				}
				what := r.What
				if r.Answers {
					what = "answers of " + what
				}
				if r.Unmarked {
					what = "unmarked: " + what
				}
				if r.Missing {
					what = "missing: " + what
				}
				got = append(got, fmt.Sprintf("%s: %s: %s", how, r.Rule, what))
			}
			if text := strings.Join(got, "\n"); text != tc.want {
				t.Errorf("found %s\nwant  %s", text, tc.want)
			}
		})
	}
}

// TestFindInside: what rules in the network namespace of an endpoint do with what comes there.
func TestFindInside(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for _, tc := range []struct{ rule, want string }{
		{"iptables-nft -t nat %s PREROUTING -p tcp -j REDIRECT --to-ports 15006", "meta l4proto tcp REDIRECT, certain true, diverted true to 15006, answers false"},
		{"iptables-legacy -t nat %s PREROUTING -p tcp -j REDIRECT --to-ports 15006", "meta l4proto tcp REDIRECT, certain true, diverted true to 15006, answers false"},
		{"iptables-nft %s INPUT -p tcp --dport 8080 -j DROP", "tcp dport 8080 drop, certain true, diverted false to 0, answers false"},
		{"iptables-nft %s OUTPUT -p tcp --sport 8080 -j REJECT", "tcp sport 8080 reject, certain true, diverted false to 0, answers true"},
		{"iptables-legacy %s INPUT -s 192.0.2.0/24 -p tcp --dport 8080 -j DROP", "ip saddr 192.0.2.0/24 tcp dport 8080 drop, certain false, diverted false to 0, answers false"},
		{"iptables-nft %s INPUT -p tcp --dport 22 -j DROP", ""},
		{"iptables-nft %s INPUT ! -i lo -j DROP", "iifname != lo drop, certain true, diverted false to 0, answers false"},
		{"iptables-legacy %s INPUT -p tcp -m connlimit --connlimit-above 3 --connlimit-mask 24 -j DROP", "meta l4proto tcp connlimit drop, certain false, diverted false to 0, answers false"},
		{"iptables-nft -t nat %s POSTROUTING -j MASQUERADE", ""},
	} {
		change := func(what string) {
			f := strings.Fields(fmt.Sprintf(tc.rule, what))
			nstest.Exec(t, f[0], f[1:]...)
		}
		change("-A")
		got := ""
		found, err := Find(t.Context(), []*plan.ServicePort{web}, Node{Inside: true, Local: func(netip.Addr) bool { return true }})
		for _, r := range found {
			got += fmt.Sprintf("%s, certain %t, diverted %t to %d, answers %t", r.Rule, r.Certain, r.Diverted, r.To, r.Answers)
		}
		if err != nil || got != tc.want {
			t.Errorf("%s: found %s, %v, want %s", tc.rule, got, err, tc.want)
		}
		change("-D")
	}
	nstest.Exec(t, "nft", "add table ip n; add chain ip n p { type nat hook prerouting priority -100; }; add rule ip n p tcp dport 8080 redirect to :9999")
	if found, err := Find(t.Context(), []*plan.ServicePort{web}, Node{Inside: true, Local: func(netip.Addr) bool { return true }}); err != nil || len(found) != 1 || found[0].To != 9999 {
		t.Errorf("%+v, %v", found, err)
	}
}

// TestFindSets: what ipsets have decides about rules that ask them.
func TestFindSets(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for _, line := range []string{"a hash:ip", "p hash:ip,port", "n hash:net", "pp bitmap:port range 0-65535", "l list:set"} {
		nstest.Exec(t, "ipset", strings.Fields("create "+line)...)
	}
	for _, entry := range []string{"a 10.244.1.5", "p 10.244.1.5,tcp:8080", "n 10.244.0.0/16", "pp 8080", "l a"} {
		nstest.Exec(t, "ipset", strings.Fields("add "+entry)...)
	}
	for rule, want := range map[string]string{
		"-m set --match-set a dst":                          "true",
		"-m set ! --match-set a dst":                        "",
		"-m set --match-set a src":                          "true (answer)",
		"-m set --match-set p dst,dst":                      "true",
		"-m set --match-set p dst,src":                      "false",
		"-m set --match-set n dst -p tcp":                   "true",
		"-m set --match-set pp dst":                         "true",
		"-m set --match-set l dst":                          "false",
		"-m set --match-set n dst --packets-gt 5":           "false",
		"-m set --match-set n dst -m set --match-set a src": "false",
	} {
		foundInEach(t, "FORWARD "+rule, func(variant string, found []reality.Blocking) {
			got := ""
			for _, r := range found {
				got = fmt.Sprint(r.Certain)
				if r.Answers {
					got += " (answer)"
				}
				shown := strings.ReplaceAll(strings.ReplaceAll(rule, "! --match-set", "match-set !="), "--match-set", "match-set")
				if what := strings.Join(strings.Fields(shown)[2:5], " "); !strings.Contains(r.Rule, what) {
					t.Errorf("%s %s: it is shown as %s, without %s", variant, rule, r.Rule, what)
				}
			}
			if len(found) > 1 || got != want {
				t.Errorf("%s %s: found %+v, want %q", variant, rule, found, want)
			}
		})
	}
}

// foundInEach passes to see what is found while a rule that drops, behind its chain, is there, in each variant of iptables.
func foundInEach(t *testing.T, rule string, see func(variant string, found []reality.Blocking)) {
	t.Helper()
	for _, variant := range []string{"iptables-nft", "iptables-legacy"} {
		change := func(what string) { nstest.Exec(t, variant, strings.Fields(what+" "+rule+" -j DROP")...) }
		change("-A")
		found, err := Find(t.Context(), []*plan.ServicePort{web}, noLocal)
		require.NoError(t, err)
		see(variant, found)
		change("-D")
	}
}

// TestFindAdmitted: a policy is not named where all who are known to send are admitted, by each port of an endpoint; but to an endpoint on this node, Pods of
// others send, too.
func TestFindAdmitted(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	nstest.Exec(t, "nft", "add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }; add rule inet fw f ct state established accept; "+
		"add rule inet fw f iifname { cni0, eth0 } accept")
	n := noLocal
	n.Uplink, n.PodsBy, n.Pods = "eth0", "cni0", map[plan.Family]netip.Prefix{plan.IPv4: netip.MustParsePrefix("10.244.0.0/24")}
	second, here := *web, *web
	second.Key.Port = "second"
	here.Endpoints.Cluster = []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.0.5:8080"), Local: true}}
	if found, err := Find(t.Context(), []*plan.ServicePort{web, &second}, n); err != nil || len(found) > 0 {
		t.Errorf("found %+v, %v", found, err)
	}
	if found, err := Find(t.Context(), []*plan.ServicePort{&here}, n); err != nil || len(found) != 1 || found[0].Certain || found[0].Rule != "policy drop" {
		t.Errorf("of an endpoint on this node, found %+v, %v", found, err)
	}
	n.NoNodePorts = map[plan.Family]bool{plan.IPv4: true}
	nstest.Exec(t, "nft", "flush ruleset; add table ip raw; add chain ip raw p { type filter hook prerouting priority -300; }; add rule ip raw p iifname eth0 tcp dport 30080 drop")
	if found, err := Find(t.Context(), []*plan.ServicePort{web}, n); err != nil || len(found) != 1 || found[0].Certain {
		t.Errorf("where node ports do not answer, found %+v, %v", found, err)
	}
}

// TestFindAlike: both variants of iptables ask for the flags of TCP, and for types of ICMP, in the same words.
func TestFindAlike(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for rule, want := range map[string]string{
		"FORWARD -p tcp --syn":                               "meta l4proto tcp tcp flags & 0x17 == 0x2 drop",
		"FORWARD -p tcp ! --tcp-flags ALL SYN":               "",
		`FORWARD -p tcp --syn -m comment --comment !`:        "meta l4proto tcp tcp flags & 0x17 == 0x2 drop",
		"FORWARD -p tcp ! --tcp-flags FIN,ACK FIN":           "meta l4proto tcp tcp flags & 0x11 != 0x1 drop",
		"FORWARD -p tcp -d 10.244.1.5 --tcp-flags URG URG":   "",
		"OUTPUT -p icmp --icmp-type destination-unreachable": "meta l4proto icmp icmp type 3 drop",
		"OUTPUT -p icmp --icmp-type fragmentation-needed":    "meta l4proto icmp icmp type 3 code 4 drop",
		"OUTPUT -p icmp --icmp-type port-unreachable":        "",
		"OUTPUT -p icmp ! --icmp-type echo-reply":            "meta l4proto icmp icmp type != 0 drop",
		"OUTPUT -p icmp --icmp-type any":                     "meta l4proto icmp drop",
	} {
		foundInEach(t, rule, func(variant string, found []reality.Blocking) {
			got := ""
			for _, r := range found {
				if got = r.Rule; !r.Certain || r.Answers || r.ICMP != strings.HasPrefix(rule, "OUTPUT") {
					t.Errorf("%s %s: %+v", variant, rule, r)
				}
			}
			if got != want {
				t.Errorf("%s %s: %q, want %q", variant, rule, got, want)
			}
		})
	}
}

// TestFindOtherVariant: what a kube-proxy has left in the variant of iptables that is not used may decide first.
func TestFindOtherVariant(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for _, line := range []string{"-N KUBE-SERVICES", "-N KUBE-SEP-A", "-A PREROUTING -j KUBE-SERVICES", "-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp --dport 80 -j KUBE-SEP-A",
		"-A KUBE-SEP-A -p tcp -j DNAT --to-destination 10.244.1.99:8080"} {
		nstest.Exec(t, "iptables-legacy", append([]string{"-t", "nat"}, strings.Fields(line)...)...)
	}
	n := noLocal
	for variant, want := range map[string]string{"": "", "legacy": "", "nft": "meta l4proto tcp DNAT to 10.244.1.99 in chain KUBE-SEP-A of table ip nat, of iptables-legacy: the cluster IP 10.96.0.10:80/TCP from pods and other hosts (certain: false)"} {
		n.Variant = variant
		found, err := Find(t.Context(), []*plan.ServicePort{web}, n)
		require.NoError(t, err)
		got := ""
		for _, r := range found {
			got += fmt.Sprintf("%s in %s: %s (certain: %t)", r.Rule, r.Place, r.What, r.Certain)
		}
		if got != want {
			t.Errorf("variant %q: %s, want %s", variant, got, want)
		}
	}
}

// TestFindHealthCheck: what drops what asks for the health of a Service is found, and this program's own rules are known to accept it.
func TestFindHealthCheck(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	checked := *web
	checked.Frontends = append(checked.Frontends[:2:2], plan.Frontend{Kind: plan.HealthCheckNodePort, Protocol: plan.TCP, Port: 31999})
	find := func() string {
		t.Helper()
		found, err := Find(t.Context(), []*plan.ServicePort{&checked}, noLocal)
		if err != nil || len(found) > 1 {
			t.Fatalf("%+v, %v", found, err)
		}
		for _, r := range found {
			return fmt.Sprintf("%s: %s (certain: %t)", r.Rule, r.What, r.Certain)
		}
		return ""
	}
	const chain = "add table inet fw; add chain inet fw in { type filter hook input priority 0; policy drop; }; add rule inet fw in ct state established accept; "
	nstest.Exec(t, "nft", chain+"add rule inet fw in tcp dport { 22, 10250, 10256 } accept")
	if got, want := find(), "policy drop: the health check node port 31999/TCP from outside (certain: true)"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	nstest.Exec(t, "nft", "delete table inet fw; "+chain+"add rule inet fw in tcp dport 31999 accept")
	if got := find(); got != "" {
		t.Errorf("behind an accept: %s", got)
	}
	nstest.Exec(t, "nft", "delete table inet fw; add table ip filter; add chain ip filter KUBE-NODEPORTS; add chain ip filter INPUT { type filter hook input priority 0; policy drop; }; "+
		"add rule ip filter INPUT ct state established accept; add rule ip filter INPUT jump KUBE-NODEPORTS")
	if got := find(); got != "" {
		t.Errorf("behind KUBE-NODEPORTS: %s", got)
	}
}

// noLocal is a node that has no address.
var noLocal = Node{Local: func(netip.Addr) bool { return false }}

// load loads rules by nft -f.
func load(t *testing.T, text string) {
	t.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
}

// TestFindLimits: rules of other programs may be many, with large sets and very many ways through chains. A set is read once, however many
// rules ask for it, and not at all if they ask it for what is not known, as for the
// connection's mark. A chain is followed a few times, however many ways lead there, and nothing goes on after the context has ended.
func TestFindLimits(t *testing.T) {
	nstest.Enter(t)
	var in strings.Builder
	in.WriteString("table ip big {\nset s { type ipv4_addr; elements = { 10.244.1.5")
	for i := range 20000 {
		fmt.Fprintf(&in, ", 11.0.%d.%d", i/250, i%250)
	}
	in.WriteString(" }\n}\nchain f {\ntype filter hook forward priority 0;\n" + strings.Repeat("ip daddr @s ct mark 1 accept\n", 300) + "ip daddr @s drop\n}\n}\n")
	load(t, in.String())
	look := func(ctx context.Context) (*search, *nft.Ruleset, error) {
		t.Helper()
		rules, err := nft.ReadRuleset()
		require.NoError(t, err)
		defer rules.Close()
		s := &search{ctx: ctx, ports: []*plan.ServicePort{web}, node: noLocal}
		return s, rules, s.look(readNFT(rules, newSets()))
	}
	s, rules, err := look(t.Context())
	if err != nil || len(s.found) != 1 || s.found[0].Certain {
		t.Errorf("behind rules that may accept: %+v, %v", s.found, err)
	}
	if rules.Asked != 2 || s.judged != 602 {
		t.Errorf("the kernel was asked %d times, and %d rules were judged: want 2 for a chain and a set, and 301 for each direction", rules.Asked, s.judged)
	}

	load(t, "flush chain ip big f; add set ip big m { type mark; elements = { 1, 2 }; }; add rule ip big f ct mark @m drop")
	if s, rules, err = look(t.Context()); err != nil || len(s.found) > 0 || rules.Asked != 1 {
		t.Errorf("of a set of marks: %+v, %v; the kernel was asked %d times, want once for the chain", s.found, err, rules.Asked)
	}

	in.Reset()
	in.WriteString("delete table ip big\ntable ip deep {\n")
	const levels, ways = 15, 8
	for d := levels - 1; d >= 0; d-- {
		fmt.Fprintf(&in, "chain c%d {\n", d)
		if d < levels-1 {
			in.WriteString(strings.Repeat(fmt.Sprintf("iifname eth0 jump c%d\n", d+1), ways))
		}
		in.WriteString("}\n")
	}
	in.WriteString("}\n")
	load(t, in.String())
	load(t, "add chain ip deep f { type filter hook forward priority 0; }; add rule ip deep f jump c7") // The kernel allows no more ways.
	s, _, err = look(t.Context())
	if most := 4 * levels * ways; err != nil || s.judged > most {
		t.Errorf("two million ways: %d rules were judged, want %d at most; %v", s.judged, most, err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if s, _, err = look(gone); !errors.Is(err, context.Canceled) || s.judged > 0 {
		t.Errorf("for nobody: %v, %d rules were judged", err, s.judged)
	}
}
