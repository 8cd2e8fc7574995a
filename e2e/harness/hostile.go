package harness

import (
	"fmt"
	"slices"
	"strings"

	"nodeproxy/internal/nstest"
)

// With hostile settings (nstest.Hostile), every node is one of an administrator who has hardened it, and nodeproxy has to work
// there. What such a node cannot do without the administrator's or the network plugin's help is in firewall.

// hostileSysctls are settings of a hardened node. Strict reverse path filtering and strict ARP are common; interfaces that come
// up later have no IPv6 unless somebody turns it on; conntrack forgets soon, accounts, and does not take up connections midway.
var hostileSysctls = map[string]string{
	"net/ipv4/conf/all/rp_filter":         "1",
	"net/ipv4/conf/default/rp_filter":     "1",
	"net/ipv4/conf/all/arp_ignore":        "1",
	"net/ipv4/conf/default/arp_ignore":    "1",
	"net/ipv4/conf/all/arp_announce":      "2",
	"net/ipv4/conf/default/arp_announce":  "2",
	"net/ipv6/conf/default/disable_ipv6":  "1",
	"net/bridge/bridge-nf-call-iptables":  "1",
	"net/bridge/bridge-nf-call-ip6tables": "1",
	"net/bridge/bridge-nf-call-arptables": "1",

	"net/netfilter/nf_conntrack_acct":                    "1",
	"net/netfilter/nf_conntrack_timestamp":               "1",
	"net/netfilter/nf_conntrack_tcp_be_liberal":          "1",
	"net/netfilter/nf_conntrack_tcp_loose":               "0",
	"net/netfilter/nf_conntrack_tcp_timeout_established": "600",
	"net/netfilter/nf_conntrack_udp_timeout":             "20",
	"net/netfilter/nf_conntrack_udp_timeout_stream":      "30",
}

// firewall makes a node forward and accept nothing by default. What it forwards is what network plugins accept, packets from and
// to pods; what it accepts is what Kubernetes asks administrators to let in: pods, nodes, node ports, and ICMP. In mode ipvs,
// packets to Services come by INPUT, so that their addresses are among it.
func (w *World) firewall(n *Node, v Variant) error {
	for _, family := range []struct {
		tool, icmp string
		pods, node string
		services   []string
	}{
		{"iptables", "icmp", ClusterCIDR4.String(), nodeNet4.String() + "," + secondNet4.String(),
			[]string{ServiceCIDR4.String(), VIPRange4.String(), ExternalIPs4.String()}},
		{"ip6tables", "ipv6-icmp", ClusterCIDR6.String(), nodeNet6.String() + "," + secondNet6.String(),
			[]string{ServiceCIDR6.String(), VIPRange6.String(), ExternalIPs6.String()}},
	} {
		rules := []string{"*filter", ":FORWARD DROP", ":INPUT DROP",
			"-A FORWARD -s " + family.pods + " -j ACCEPT", "-A FORWARD -d " + family.pods + " -j ACCEPT",
			"-A INPUT -i lo -j ACCEPT", "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
			"-A INPUT -p " + family.icmp + " -j ACCEPT",
			"-A INPUT -s " + family.pods + "," + family.node + " -j ACCEPT",
		}
		for _, protocol := range []string{"tcp", "udp", "sctp"} {
			rules = append(rules, fmt.Sprintf("-A INPUT -p %s -m %[1]s --dport 30000:32767 -j ACCEPT", protocol))
		}
		if ModeUnderTest() == IPVS {
			rules = append(rules, "-A INPUT -d "+strings.Join(family.services, ",")+" -j ACCEPT")
		}
		rules = append(rules, "COMMIT\n")
		if _, err := n.OutputWithInput(strings.Join(rules, "\n"), v.Tool(family.tool)+"-restore", "--noflush"); err != nil {
			return err
		}
	}
	return nil
}

// hostile gives the nodes a firewall in this variant of iptables, once. Where the daemon is to choose a variant, it would choose by
// these rules.
func (w *World) hostile(v Variant) error {
	if !nstest.Hostile() || w.opts.OwnFirewall || w.hardened[v] || !slices.Contains(Variants, v) {
		return nil
	}
	for _, n := range w.Nodes {
		if err := w.firewall(n, v); err != nil {
			return err
		}
	}
	if w.hardened == nil {
		w.hardened = map[Variant]bool{}
	}
	w.hardened[v] = true
	return nil
}
