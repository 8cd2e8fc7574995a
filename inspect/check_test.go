package inspect

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/inspect/reality"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// noRules is what is said where no rule of other programs matters.
const noRules = "rules of other programs: ok: none that drops what is for the Service or its answers, or keeps it from being tracked, was found in nftables or iptables; tc, eBPF and ebtables are not looked at"

// What follows returns functions of Reality that find out one thing.

func rules(list ...reality.Blocking) func(context.Context, []*plan.ServicePort) ([]reality.Blocking, bool, error) {
	return func(context.Context, []*plan.ServicePort) ([]reality.Blocking, bool, error) { return list, true, nil }
}

func listeners(list ...reality.Listening) func(context.Context, []*plan.ServicePort) ([]reality.Listening, error) {
	return func(context.Context, []*plan.ServicePort) ([]reality.Listening, error) {
		return slices.Clone(list), nil
	}
}

func ways(w reality.Ways) func(context.Context, reality.Places) (*reality.Ways, error) {
	return func(context.Context, reality.Places) (*reality.Ways, error) { return &w, nil }
}

func reverse(r reality.Reverse) func(context.Context, []netip.Addr) (*reality.Reverse, error) {
	return func(context.Context, []netip.Addr) (*reality.Reverse, error) { return &r, nil }
}

func flows(to map[netip.AddrPort]Flows) func(context.Context, []*plan.ServicePort) (map[netip.AddrPort]Flows, error) {
	return func(context.Context, []*plan.ServicePort) (map[netip.AddrPort]Flows, error) { return to, nil }
}

func tracked(f TrackedFlows) func() (TrackedFlows, error) {
	return func() (TrackedFlows, error) { return f, nil }
}

func kernel(things int, err error, differ ...string) func(context.Context, plan.Service) (int, []string, error) {
	return func(context.Context, plan.Service) (int, []string, error) { return things, differ, err }
}

// at returns addresses with what is known of each.
func at(pairs ...string) map[netip.Addr]string {
	out := map[netip.Addr]string{}
	for pair := range slices.Chunk(pairs, 2) {
		out[netip.MustParseAddr(pair[0])] = pair[1]
	}
	return out
}

// TestCheck: each thing that is found on the node is a line of what was checked, and a sentence where something is wrong.
func TestCheck(t *testing.T) {
	t.Parallel()
	endpoint, gone := netip.MustParseAddrPort("10.244.0.8:8080"), netip.MustParseAddrPort("10.244.9.9:8080")
	early := time.Now()
	open := func(all, unanswered int) map[netip.AddrPort]Flows {
		return map[netip.AddrPort]Flows{endpoint: {Open: all, Unanswered: unanswered, Clients: []netip.Addr{netip.MustParseAddr("192.0.2.50")}}}
	}
	web := plan.Service{Namespace: "default", Name: "s-7"}
	key := plan.Key{Service: web, Protocol: plan.TCP, Family: plan.IPv4}
	for name, tc := range map[string]struct {
		reality     Reality
		check, what string
		do          string // of the first diagnosis; empty if that does not matter
		problem     bool
	}{
		"all is well": {reality: Reality{Kernel: kernel(12, nil)},
			check: "rules in the kernel: ok: all 12 are as written"},
		"a flushed table": {reality: Reality{Kernel: kernel(12, nil, "table ip nodeproxy of nftables: missing")},
			check:   "rules in the kernel: problem: 1 of 12 are not as written: table ip nodeproxy of nftables: missing",
			what:    "The kernel does not hold what was programmed: another program has changed it (table ip nodeproxy of nftables: missing).",
			problem: true},
		"a fault in a check": {reality: Reality{Blocking: func(context.Context, []*plan.ServicePort) ([]reality.Blocking, bool, error) {
			panic("an expression of another program")
		}}, check: "checks: unknown: one of them failed: an expression of another program"},
		"nothing is known": {reality: Reality{Kernel: kernel(0, errors.New("IPv4: a sync was running all the time"))}, check: "rules in the kernel: unknown: IPv4: a sync was running all the time"},
		"repaired": {reality: Reality{Changed: func() []Changed {
			return []Changed{{When: early.Add(-3 * time.Hour), What: "3 rules, such as x", Repaired: true}}
		}},
			check: "changes by other programs: note: 3h ago: 3 rules, such as x",
			what:  "Another program changed what nodeproxy had programmed, 3h ago, and nodeproxy has written it again: 3 rules, such as x."},
		"again and again": {reality: Reality{Changed: func() []Changed {
			c := Changed{When: early.Add(-3 * time.Hour), What: "1 rule, such as x", Repaired: true}
			return []Changed{c, c, c}
		}},
			check: "changes by other programs: problem: 3h ago, the last of 3 times within 3h: 1 rule, such as x",
			what: "Another program changed what nodeproxy had programmed, 3h ago, the last of 3 times within 3h, and nodeproxy has written it " +
				"again: 1 rule, such as x.", problem: true},
		"traffic": {reality: Reality{Traffic: func(context.Context) (map[plan.Key]plan.Traffic, error) {
			return map[plan.Key]plan.Traffic{key: {Key: key, Connections: 1, PacketsIn: 3, PacketsOut: 2}}, nil
		}},
			check: "traffic: ok: 1 connection, 3 packets in, 2 packets out since the rules were written"},
		"stale connections": {reality: Reality{Flows: flows(map[netip.AddrPort]Flows{endpoint: {Open: 2}, gone: {Open: 1}})},
			check: "connections: note: 3 tracked: 2 to 10.244.0.8:8080, 1 to 10.244.9.9:8080, which is no endpoint",
			what:  "1 connection of the Service still goes to what is no longer an endpoint: 10.244.9.9:8080."},
		"stale connections of IPv6": {reality: Reality{Flows: flows(map[netip.AddrPort]Flows{netip.MustParseAddrPort("[fd00::9]:8080"): {Open: 2}})},
			check: "connections: note: 2 tracked: 2 to [fd00::9]:8080, which is no endpoint",
			what:  "2 connections of the Service still go to what is no longer an endpoint: [fd00::9]:8080.",
			do:    "if clients hang, let them connect anew, or delete what is tracked: conntrack -D -f ipv6 --reply-src fd00::9"},
		"connections without an answer": {reality: Reality{Flows: flows(open(4, 4)),
			Detour: func(from, to netip.Addr) string { return "what comes from " + from.String() + " goes by eth1" }},
			check: "connections: problem: 4 tracked: 4 to 10.244.0.8:8080 (4 without an answer)",
			what:  "4 of the 4 tracked connections to 10.244.0.8:8080 are without an answer, from 192.0.2.50; what comes from 192.0.2.50 goes by eth1.",
			do:    "see whether the packets get there, and whether the answers come back to this node: tcpdump -ni any host 10.244.0.8; such entries stay for two minutes after their cause is gone", problem: true},
		"some connections without an answer": {reality: Reality{Flows: flows(open(4, 1))},
			check: "connections: note: 4 tracked: 4 to 10.244.0.8:8080 (1 without an answer)",
			what:  "1 of the 4 tracked connections to 10.244.0.8:8080 is without an answer, from 192.0.2.50."},
		"a busy endpoint": {reality: Reality{Flows: flows(open(100, 1))},
			check: "connections: ok: 100 tracked: 100 to 10.244.0.8:8080 (1 without an answer)"},
		"a next hop that does not answer": {reality: Reality{Ways: ways(reality.Ways{Silent: at("10.244.0.8", "192.0.2.9 at eth0")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\nnext hops: problem: that of 1 of the 2 endpoints in use does not answer",
			what: "Nobody in the network of this node answers for the next hop to 1 of the 2 endpoints in use (ARP or neighbour discovery), and connections that go there fail: " +
				"10.244.0.8 (by 192.0.2.9 at eth0).", problem: true},
		"an endpoint elsewhere in a network of this node": {reality: Reality{Ways: ways(reality.Ways{Silent: at("10.245.0.8", "10.245.0.8 at br-5c"), Near: at("10.245.0.8", "br-5c")}),
			Flows: flows(open(4, 4))},
			check: "connections: problem: 4 tracked: 4 to 10.244.0.8:8080 (4 without an answer)\nroutes to endpoints: ok: there is one to each of the 2 endpoints in use\n" +
				"next hops: problem: 10.245.0.8 does not answer at br-5c",
			what: "Endpoint 10.245.0.8 is on another node, but this node looks for it in the network of its own interface br-5c, where nobody answers for it, and connections that go " +
				"there fail.",
			do: "if endpoints of other nodes are not to be reached by br-5c, give it another range, or remove it: ip addr show dev br-5c; ip route get 10.245.0.8", problem: true},
		"a cluster IP without a route": {reality: Reality{Ways: ways(reality.Ways{Cut: at("10.96.0.8", "network is unreachable")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\nroute to the cluster IP: problem: none: 10.96.0.8 (network is unreachable)",
			what: "What this node itself sends to the cluster IP fails before it meets any rule, since the kernel has no route there: 10.96.0.8 (network is unreachable). " +
				"Pods have routes of their own.", problem: true},
		"a bridge": {reality: Reality{Ways: ways(reality.Ways{Bridged: at("10.244.0.8", "cni0", "10.245.0.8", "cni0")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\nbridges: problem: net.bridge.bridge-nf-call-iptables is 0 or missing",
			what: "What goes from Pod to Pod within a bridge passes no rule (net.bridge.bridge-nf-call-iptables is 0, or the module br_netfilter is not loaded): a Pod that connects to the " +
				"cluster IP, and gets an endpoint at its own bridge, gets answers from an address that it did not ask. Endpoints at a bridge: 10.244.0.8 (cni0).", problem: true},
		"a Pod that can't reach itself": {reality: Reality{Ways: ways(reality.Ways{NoHairpin: at("10.244.0.8", "veth5")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use",
			what: "A Pod can't reach itself by this Service, since hairpin mode is off at its bridge's port: 10.244.0.8 (port veth5). Connections of its own that are sent to it hang; " +
				"those of others do not.",
			do: "set hairpinMode in the configuration of the network plugin (bridge); at once: ip link set veth5 type bridge_slave hairpin on"},
		"an external IP that nobody may have": {reality: Reality{Ways: ways(reality.Ways{Unclaimed: at("192.0.2.240", "eth0")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use",
			what: "External IP in the network of an interface, but no address of this node: 192.0.2.240 (eth0). nodeproxy announces none, so that clients of that network get there only " +
				"if another node or program answers for it."},
		"a rule before masquerading": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "ip daddr 10.0.0.0/8 accept", Place: "chain POSTROUTING of table ip nat", What: "endpoint 10.244.1.5:8080 from outside", Certain: true, Unmasqueraded: true})},
			check: "rules of other programs: problem: chain POSTROUTING of table ip nat: ip daddr 10.0.0.0/8 accept",
			what: `A rule of another program ends the chain before what is for endpoint 10.244.1.5:8080 from outside can be masqueraded: "ip daddr 10.0.0.0/8 accept" in chain POSTROUTING ` +
				"of table ip nat. Endpoints on other nodes answer past this node, and those connections hang.", problem: true},
		"a rule that decides first": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "tcp dport 30080 translate", Place: "chain PREROUTING of table ip nat", What: "the node port 30080/TCP from pods and other hosts", Certain: true, Diverted: true})},
			check: "rules of other programs: problem: chain PREROUTING of table ip nat: tcp dport 30080 translate",
			what: `A rule of another program decides first about the node port 30080/TCP from pods and other hosts, so that it does not get to the endpoints: "tcp dport 30080 translate" ` +
				"in chain PREROUTING of table ip nat.", problem: true},
		"an interface whose packets are not forwarded": {reality: Reality{Ways: ways(reality.Ways{NotForwardedBy: []string{"eth0"}})},
			check: "forwarding: problem: net.ipv4.conf.eth0.forwarding is 0",
			what: "This node does not forward what comes by eth0 (net.ipv4.conf.eth0.forwarding is 0): connections from there to endpoints elsewhere or in Pods fail, and so do others " +
				"whose endpoints answer from there.", problem: true},
		"room for connections": {reality: Reality{Tracked: tracked(TrackedFlows{Flows: 899, Most: 1000})},
			check: "connection tracking: ok: 899 of at most 1000 flows of all programs"},
		"connections that are forgotten": {reality: Reality{Tracked: tracked(TrackedFlows{Flows: 1, Most: 1000, Forgets: 30})},
			check: "connection tracking: ok: 1 of at most 1000 flows of all programs\nconnection tracking: problem: established connections are forgotten after 30 s",
			what: "The kernel forgets connections of TCP that are silent for 30 s (net.netfilter.nf_conntrack_tcp_timeout_established), which is less than nodeproxy had set: what comes " +
				"later on them is reset or lost.", problem: true},
		"little room for connections": {reality: Reality{Tracked: tracked(TrackedFlows{Flows: 900, Most: 1000})},
			check: "connection tracking: note: the kernel tracks 900 flows, and no more than 1000",
			what:  "The kernel has little room for new connections: it tracks 900 flows, and no more than 1000."},
		"no room for connections": {reality: Reality{Tracked: tracked(TrackedFlows{Flows: 1000, Most: 1000})},
			check: "connection tracking: problem: the kernel tracks 1000 flows, and no more than 1000",
			what:  "The kernel may drop new connections of any kind: it tracks 1000 flows, and no more than 1000.", problem: true},
		"a rule that drops": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "ip daddr 10.96.0.8 drop", Place: "chain prerouting of table ip raw", What: "cluster IP 10.96.0.8:80/TCP", Certain: true})},
			check: "rules of other programs: problem: chain prerouting of table ip raw: ip daddr 10.96.0.8 drop",
			what: `A rule of another program drops what is for cluster IP 10.96.0.8:80/TCP: "ip daddr 10.96.0.8 drop" in chain prerouting of ` +
				"table ip raw.", problem: true},
		"a rule that drops answers": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "tcp sport 8080 drop", Place: "chain forward of table inet fw", What: "endpoint 10.244.1.5:8080", Answers: true, Certain: true})},
			check: "rules of other programs: problem: chain forward of table inet fw: tcp sport 8080 drop",
			what: `A rule of another program drops the answers of endpoint 10.244.1.5:8080: "tcp sport 8080 drop" in chain forward of table ` +
				"inet fw.", problem: true},
		"Pods' packets that are too long, and nobody is told": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "meta l4proto 1 drop", Place: "chain out of table ip fw", Certain: true, ICMP: true}),
			Ways: ways(reality.Ways{Narrow: "eth0", PodMTU: 1500, NarrowMTU: 1400})},
			check: noRules + "\nroutes to endpoints: ok: there is one to each of the 2 endpoints in use",
			what: `A rule of another program drops the errors by which this node tells others that a packet was too long: "meta l4proto 1 drop" in chain out of table ip fw. So these go on ` +
				"to send such packets, which get lost.\nPods send packets of up to 1500 bytes, and eth0 takes 1400: what is longer gets through only if its sender learns that by ICMP errors.", problem: true},
		"nobody is told of packets that are too long, and there are none": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "meta l4proto 1 drop", Place: "chain out of table ip fw", Certain: true, ICMP: true})}, check: noRules},
		"a rule that changes the mark": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "meta mark set", Place: "chain FORWARD of table ip mangle", What: "endpoint 10.244.1.5:8080 from outside (by eth0)", Certain: true, Unmarked: true})},
			check: "rules of other programs: problem: chain FORWARD of table ip mangle: meta mark set",
			what: `A rule of another program changes the mark by which what is for endpoint 10.244.1.5:8080 from outside (by eth0) is to be masqueraded: "meta mark set" in chain FORWARD of ` +
				"table ip mangle. Endpoints on other nodes answer past this node, and those connections hang.", problem: true},
		"a source that the node lacks": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "SNAT to 192.0.2.99", Place: "chain POSTROUTING of table ip nat", What: "endpoint 10.244.1.5:8080 from Pods of this node", Certain: true, Missing: true})},
			check: "rules of other programs: problem: chain POSTROUTING of table ip nat: SNAT to 192.0.2.99",
			what: `A rule of another program gives what is for endpoint 10.244.1.5:8080 from Pods of this node a source address that this node does not have, so that answers go elsewhere: ` +
				`"SNAT to 192.0.2.99" in chain POSTROUTING of table ip nat.`, problem: true},
		"an endpoint that listens by the other family": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, OtherFamily: true})},
			check: "listeners at endpoints: problem: nothing listens at 1 of 1 that are known on this node",
			what:  "Endpoint 10.244.0.8:8080 gets traffic, but refuses it: what listens at port 8080/TCP in its Pod does so by IPv6 alone.", problem: true},
		"a rule in a Pod": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "REDIRECT", Place: "chain PREROUTING of table ip nat", What: "endpoint 10.244.1.5:8080", Diverted: true, Certain: true, Inside: true, To: 15006})},
			check: "rules of other programs: problem: chain PREROUTING of table ip nat, in the network namespace of its Pod: REDIRECT",
			what: `A rule in the Pod sends what comes for endpoint 10.244.1.5:8080 to port 15006, where nothing listens: "REDIRECT" in chain PREROUTING of table ip nat, ` +
				"in the network namespace of its Pod.", problem: true},
		"no rules": {reality: Reality{Blocking: func(context.Context, []*plan.ServicePort) ([]reality.Blocking, bool, error) { return nil, false, nil }},
			check: "rules of other programs: ok: none that drops what is for the Service or its answers, or keeps it from being tracked, was found in nftables or iptables; " +
				"tc, eBPF, ebtables and the rules in Pods are not looked at"},
		"an address that two Pods have": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Several: true})},
			check: "listeners at endpoints: problem: several Pods have the address 10.244.0.8",
			what:  "More than one Pod on this node has the address of endpoint 10.244.0.8:8080, and connections go to one or the other.", problem: true},
		"a wrong neighbour": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Wrong: "02:00:00:00:00:01"}})},
			check: "listeners at endpoints: problem: 10.244.0.8 is not at 02:00:00:00:00:01",
			what: "This node sends what is for endpoint 10.244.0.8:8080 to 02:00:00:00:00:01, by an entry of its neighbours that is permanent, but no interface of the Pod has that " +
				"address, and connections that go there fail.", problem: true},
		"an interface that is down": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Link: "veth5", Bridge: "cni0", Down: true}})},
			check: "listeners at endpoints: problem: veth5 or its bridge cni0 is down",
			what:  "Endpoint 10.244.0.8:8080 is in a Pod whose interface on this node is down (veth5 or its bridge cni0), and connections that go there fail.", problem: true},
		"an interface that is no port": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Link: "veth5", Bridge: "cni0", Loose: true}})},
			check: "listeners at endpoints: problem: veth5 is not a port of cni0",
			what:  "Endpoint 10.244.0.8:8080 is in a Pod whose interface on this node, veth5, is not a port of cni0, by which packets for it leave, and connections that go there fail.",
			do:    "ip link set veth5 master cni0, and see what has taken it out; or delete the Pod, so that another takes its place", problem: true},
		"a Pod without a route": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Link: "veth5", Bridge: "cni0", NoRoute: "network is unreachable"}})},
			check: "listeners at endpoints: problem: answers of the Pod of 10.244.0.8 do not get here",
			what:  "Endpoint 10.244.0.8:8080 is in a Pod whose answers do not get to this node (network is unreachable), and connections from here, the node's own and masqueraded ones, fail.", problem: true},
		"a Pod for which packets leave by a tunnel": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Link: "veth5", By: "tailscale0"}})},
			check: "listeners at endpoints: problem: 10.244.0.8 is at veth5, and not at tailscale0",
			what:  "Endpoint 10.244.0.8:8080 is in a Pod of this node, at veth5, but packets for it leave by tailscale0, and connections that go there fail.", problem: true},
		"a Pod without a default route": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Link: "veth5", NoDefault: "network is unreachable"}})},
			check: "listeners at endpoints: note: the Pod of 10.244.0.8 has no route to other hosts",
			what: "Endpoint 10.244.0.8:8080 is in a Pod that has no route to other hosts (network is unreachable): what reaches it without being masqueraded, as with externalTrafficPolicy " +
				"Local, is not answered."},
		"a program at another address": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, At: []netip.Addr{netip.MustParseAddr("10.0.2.15")}})},
			check: "listeners at endpoints: problem: nothing listens at 1 of 1 that are known on this node",
			what:  "Endpoint 10.244.0.8:8080 gets traffic, but refuses it: what listens at port 8080/TCP on this node does so at 10.0.2.15 alone.", problem: true},
		"ends with different MTUs": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Link: "veth5", Bridge: "cni0", MTU: 1400, OwnMTU: 1500}})},
			check: "listeners at endpoints: problem: veth5 has an MTU of 1400, and its other end 1500",
			what: "Endpoint 10.244.0.8:8080 is in a Pod whose interface has an MTU of 1500 bytes, while its other end on this node, veth5, has 1400: packets longer than the smaller are lost " +
				"without a word, so that connections begin and then hang.", problem: true},
		"a detached Pod, whose next hop does not answer": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Attachment: reality.Attachment{Link: "veth5", Bridge: "cni0", Loose: true}}),
			Ways: ways(reality.Ways{Silent: at("10.244.0.8", "10.244.0.8 at cni0")})},
			check: "listeners at endpoints: problem: veth5 is not a port of cni0\nroutes to endpoints: ok: there is one to each of the 2 endpoints in use\n" +
				"next hops: problem: that of 1 of the 2 endpoints in use does not answer",
			what: "Endpoint 10.244.0.8:8080 is in a Pod whose interface on this node, veth5, is not a port of cni0, by which packets for it leave, and connections that go there fail.", problem: true},
		"rules that a kube-proxy left, and connections to where they lead": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "meta l4proto tcp DNAT to 10.244.9.9", Place: "chain KUBE-SEP-A of table ip nat", What: "the cluster IP 10.96.0.8:80/TCP from this node", Diverted: true, Toward: gone.Addr()}),
			Flows: flows(map[netip.AddrPort]Flows{gone: {Open: 2}})},
			check: "connections: note: 2 tracked: 2 to 10.244.9.9:8080, which is no endpoint\nrules of other programs: note: chain KUBE-SEP-A of table ip nat: meta l4proto tcp DNAT to 10.244.9.9",
			what: `A rule of a kube-proxy may decide first, as it has the same priority, about the cluster IP 10.96.0.8:80/TCP from this node, so that it does not get to the endpoints: ` +
				`"meta l4proto tcp DNAT to 10.244.9.9" in chain KUBE-SEP-A of table ip nat. Connections to that address show that it does.`, problem: true},
		"a fixed next hop, and no answers": {reality: Reality{Ways: ways(reality.Ways{Fixed: at("10.245.0.8", "192.0.2.9 at eth0 (lladdr 02:00:00:00:00:01)")}),
			Flows: flows(open(3, 3))},
			check: "connections: problem: 3 tracked: 3 to 10.244.0.8:8080 (3 without an answer)\nroutes to endpoints: ok: there is one to each of the 2 endpoints in use",
			what: "3 of the 3 tracked connections to 10.244.0.8:8080 are without an answer, from 192.0.2.50.\n" +
				"Somebody has made an entry of this node's neighbours (permanent) for the next hop to endpoints, so that the kernel asks nobody where it is; if that is not right any " +
				"more, connections that go there fail: 10.245.0.8 (by 192.0.2.9 at eth0 (lladdr 02:00:00:00:00:01)).", problem: true},
		"a fixed next hop that is answered": {reality: Reality{Ways: ways(reality.Ways{Fixed: at("10.245.0.8", "192.0.2.9 at eth0 (lladdr 02:00:00:00:00:01)")})}, check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use"},
		"answers astray, and none": {reality: Reality{Ways: ways(reality.Ways{ByDefault: at("10.244.0.8", "192.0.2.9 by eth0")}),
			Flows: flows(open(3, 3))},
			check: "connections: problem: 3 tracked: 3 to 10.244.0.8:8080 (3 without an answer)\nroutes to endpoints: ok: there is one to each of the 2 endpoints in use\n" +
				"default route: note: it leads to 1 endpoint of this node",
			what: "Endpoints are Pods of this node, but the node has no route to them but the default one, by which packets leave it; unless something there sends them back, connections fail: " +
				"10.244.0.8 (via 192.0.2.9 by eth0).", problem: true},
		"a Pod of this node beyond the default route": {reality: Reality{Ways: ways(reality.Ways{ByDefault: at("10.244.0.8", "192.0.2.9 by eth0", "10.245.0.8", "192.0.2.9 by eth0")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\ndefault route: note: it leads to 1 endpoint of this node",
			what: "Endpoints are Pods of this node, but the node has no route to them but the default one, by which packets leave it; unless something there sends them back, connections fail: " +
				"10.244.0.8 (via 192.0.2.9 by eth0)."},
		"a tunnel to itself": {reality: Reality{Ways: ways(reality.Ways{Looped: at("10.244.0.8", "flannel.1 to 10.0.2.15")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\ntunnels: problem: one sends packets for 1 endpoint to this node itself",
			what:  "A tunnel sends packets for endpoints on other nodes to an address of this node, and connections that go there fail: 10.244.0.8 (flannel.1 to 10.0.2.15).", problem: true},
		"a tunnel that knows no host": {reality: Reality{Ways: ways(reality.Ways{Lost: at("10.245.0.8", "10.244.2.0 at flannel.1")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\ntunnels: problem: one knows no host for 1 endpoint",
			what:  "A tunnel has no entry for the next hop to endpoints on other nodes, and connections that go there fail: 10.245.0.8 (10.244.2.0 at flannel.1).", problem: true},
		"a cluster IP among Pods": {reality: Reality{Ways: ways(reality.Ways{Captive: at("10.96.0.8", "cni0")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\nnetworks of this node: problem: one has the cluster IP: 10.96.0.8 (cni0)",
			what:  "The cluster IP is in the network of a bridge, so that Pods there look for it among themselves, and their connections fail: 10.96.0.8 (cni0).", problem: true},
		"errors that a rule may drop": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "limit rate drop", Place: "chain o of table ip f", What: "ICMP errors of this node", ICMP: true}),
			Ways: ways(reality.Ways{Narrow: "flannel.1", PodMTU: 1500, NarrowMTU: 1450})},
			check: "rules of other programs: ok: none that drops what is for the Service or its answers, or keeps it from being tracked, was found in nftables or iptables; tc, eBPF and ebtables are not looked at\n" +
				"routes to endpoints: ok: there is one to each of the 2 endpoints in use",
			what: "Pods send packets of up to 1500 bytes, and flannel.1 takes 1450: what is longer gets through only if its sender learns that by ICMP errors."},
		"networks that overlap": {reality: Reality{Ways: ways(reality.Ways{Overlaps: []string{"192.168.1.128/25 of cni0 and 192.168.1.0/24 of eth0"}})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\nnetworks of this node: note: some overlap: 192.168.1.128/25 of cni0 and 192.168.1.0/24 of eth0",
			what:  "Networks of this node overlap, so that it looks for some hosts in the wrong one, and those can't reach the Service: 192.168.1.128/25 of cni0 and 192.168.1.0/24 of eth0."},
		"IPsec without keys": {reality: Reality{Ways: ways(reality.Ways{Shut: at("10.244.0.8", "0.0.0.0/0 to 10.244.0.0/24: action block")})},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\npolicies of IPsec: problem: packets of 1 endpoint are dropped",
			what:  "A policy of IPsec has the kernel drop packets for endpoints, or their answers, and those connections fail: 10.244.0.8 (0.0.0.0/0 to 10.244.0.0/24: action block).", problem: true},
		"a policy that may drop": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "policy drop", Place: "chain FORWARD of table ip filter", What: "endpoint 10.244.1.5:8080", Policy: true})},
			check: "rules of other programs: note: chain FORWARD of table ip filter: policy drop",
			what: "The policy of chain FORWARD of table ip filter may drop what is for endpoint 10.244.1.5:8080: it drops what no rule accepts, " +
				"and none certainly accepts this, whoever sends it."},
		"an endpoint at which nothing listens": {reality: Reality{Endpoints: func(context.Context, []*plan.ServicePort) ([]reality.Listening, error) {
			l := reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Others: []uint16{80}}
			second := l
			second.Addr = gone
			return []reality.Listening{l, second, {Addr: endpoint, Protocol: plan.UDP, Listens: true}}, nil
		}},
			check: "listeners at endpoints: problem: nothing listens at 2 of 3 that are known on this node",
			what:  "Endpoints 10.244.0.8:8080, 10.244.9.9:8080 get traffic, but refuse it: nothing listens at port 8080/TCP in their Pods; the only port at which anything does is 80.",
			do:    "set spec.ports[].targetPort to the port at which the program listens, or have it listen at this one", problem: true},
		"endpoints that refuse at different ports": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, OtherFamily: true},
			reality.Listening{Addr: netip.MustParseAddrPort("10.244.0.8:81"), Protocol: plan.TCP, OtherFamily: true})},
			check: "listeners at endpoints: problem: nothing listens at 2 of 2 that are known on this node",
			what: "Endpoint 10.244.0.8:8080 gets traffic, but refuses it: what listens at port 8080/TCP on this node does so by IPv6 alone.\n" +
				"Endpoint 10.244.0.8:81 gets traffic, but refuses it: what listens at port 81/TCP on this node does so by IPv6 alone.", problem: true},
		"an endpoint that differs from others": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true}, reality.Listening{Addr: gone, Protocol: plan.TCP, Pod: true, Listens: true})},
			check: "listeners at endpoints: problem: nothing listens at 1 of 2 that are known on this node",
			what:  "Endpoint 10.244.0.8:8080 gets traffic, but refuses it: nothing listens at port 8080/TCP in its Pod.",
			do:    "have its program listen at this port, as those of other endpoints do, or, if it is another app's Pod, have spec.selector leave it out", problem: true},
		"an endpoint that listens by another protocol": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Other: plan.UDP})},
			check: "listeners at endpoints: problem: nothing listens at 1 of 1 that are known on this node",
			what:  "Endpoint 10.244.0.8:8080 gets traffic, but refuses it: nothing listens at port 8080/TCP in its Pod, but something does at 8080/UDP.",
			do:    "set spec.ports[].protocol to UDP, and that of the container port", problem: true},
		"an endpoint that listens at a loopback address": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Loopback: true})},
			check: "listeners at endpoints: problem: nothing listens at 1 of 1 that are known on this node",
			what:  "Endpoint 10.244.0.8:8080 gets traffic, but refuses it: what listens at port 8080/TCP in its Pod does so at a loopback address alone.", problem: true},
		"an endpoint that may have a proxy before it": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Loopback: true, Others: []uint16{15006}})},
			check: "listeners at endpoints: note: nothing listens at 1 of 1 that are known on this node",
			what: "Endpoint 10.244.0.8:8080 gets traffic, but refuses it, unless another program there passes it on: what listens at port 8080/TCP in its Pod " +
				"does so at a loopback address alone."},
		"an endpoint that does not accept": {reality: Reality{Endpoints: listeners(reality.Listening{Addr: endpoint, Protocol: plan.TCP, Pod: true, Listens: true, Waiting: 5}, reality.Listening{Addr: gone, Protocol: plan.TCP, Pod: true, Listens: true})},
			check: "listeners at endpoints: problem: at 1 of 2 that are known on this node, what listens does not accept",
			what: "Endpoint 10.244.0.8:8080 gets traffic, but the program that listens at port 8080/TCP in its Pod does not take it now, and clients wait. Its queue had 5 connections, " +
				"and no less a moment later.", problem: true},
		"no route for what comes from Pods": {reality: Reality{Ways: func(_ context.Context, to reality.Places) (*reality.Ways, error) {
			from := reality.Origin{Name: "Pods of this node", By: "cni0", Addr: netip.MustParseAddr("10.244.0.5")}
			outside := reality.Origin{Name: "outside", By: "eth0", Addr: netip.MustParseAddr("198.51.100.7"), Outside: true}
			return &reality.Ways{Unrouted: []reality.Unrouted{{Addr: to.Endpoints[0], From: from, Why: "its route is of type prohibit"},
				{Addr: to.Endpoints[1], From: from, Why: "its route is of type prohibit"},
				{Addr: to.Endpoints[0], From: outside, Why: "network is unreachable"}}}, nil
		}},
			check: "routes to endpoints: ok: there is one to each of the 2 endpoints in use\nroutes for others: problem: none for what comes from Pods of this node by cni0",
			what: "This node has a route to the endpoints, but for what comes from Pods of this node by cni0 there is none that leads there (its route is of type prohibit), as a rule for routing has it, " +
				"and those connections hang: 10.244.0.8, 10.245.0.8.",
			do: "see the rules for routing: ip rule; ip route get 10.244.0.8 from 10.244.0.5 iif cni0", problem: true},
		"what a kube-proxy has left in the other variant": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "meta l4proto tcp translate", Place: "chain KUBE-SEP-A of table ip nat, of iptables-legacy", What: "the cluster IP 10.96.0.8:80/TCP from this node", Diverted: true})},
			check: "rules of other programs: note: chain KUBE-SEP-A of table ip nat, of iptables-legacy: meta l4proto tcp translate",
			what: "A rule of a kube-proxy may decide first, as it has the same priority, about the cluster IP 10.96.0.8:80/TCP from this node, so that it does not get to the endpoints: " +
				`"meta l4proto tcp translate" in chain KUBE-SEP-A of table ip nat, of iptables-legacy.`,
			do: "stop the kube-proxy that writes them, or remove what one has left, and what restores it at each start"},
		"a rule of a known program": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "meta mark & 0x20000 == 0x0 drop", Place: "chain cali-tw-x of table ip filter", What: "endpoint 10.244.1.5:8080", Certain: true})},
			check: "rules of other programs: problem: chain cali-tw-x of table ip filter: meta mark & 0x20000 == 0x0 drop",
			what:  `A rule of Calico drops what is for endpoint 10.244.1.5:8080: "meta mark & 0x20000 == 0x0 drop" in chain cali-tw-x of table ip filter.`,
			do:    "see which NetworkPolicies select the Pods, and have one admit this traffic", problem: true},
		"a rule of a program with a table": {reality: Reality{Blocking: rules(reality.Blocking{Rule: "reject", Place: "chain filter_FORWARD of table inet firewalld", What: "endpoint 10.244.1.5:8080", Certain: true})},
			check: "rules of other programs: problem: chain filter_FORWARD of table inet firewalld: reject",
			what:  `A rule of firewalld rejects what is for endpoint 10.244.1.5:8080: "reject" in chain filter_FORWARD of table inet firewalld.`,
			do:    "admit it by firewall-cmd, and put the interfaces of Pods into the zone trusted", problem: true},
		"endpoints of which nothing is known": {reality: Reality{Endpoints: func(context.Context, []*plan.ServicePort) ([]reality.Listening, error) { return nil, nil },
			Tracked: tracked(TrackedFlows{Flows: 1, Most: 1000})},
			check: "connection tracking: ok: 1 of at most 1000 flows of all programs"},
		"answers that rp_filter drops": {reality: Reality{Reverse: reverse(reality.Reverse{Strict: []string{"eth0", "eth1"}, Filtered: []reality.Filtered{{Addr: endpoint.Addr(), By: "eth1", Back: "eth0"}}, Drops: 7, Known: true})},
			check: "reverse path filter: problem: strict at eth0, eth1, by which the routes back to 1 of the endpoints do not lead; 7 packets dropped by it on this node",
			what: "The kernel drops the answers of endpoint 10.244.0.8: packets to it leave by eth1, where rp_filter is strict, but by the routes that hold for its " +
				"answers they should come by eth0.",
			do: "have the same routes hold for answers (ip rule), or set net.ipv4.conf.eth1.rp_filter to 2, which is loose", problem: true},
		"unanswered, and rp_filter drops": {reality: Reality{Reverse: reverse(reality.Reverse{Strict: []string{"eth0"}, Drops: 7, Known: true}),
			Flows: flows(open(3, 3))},
			check: "connections: problem: 3 tracked: 3 to 10.244.0.8:8080 (3 without an answer)\n" +
				"reverse path filter: note: strict at eth0, by which the routes back to the endpoints lead; 7 packets dropped by it on this node",
			what: "3 of the 3 tracked connections to 10.244.0.8:8080 are without an answer, from 192.0.2.50.\n" +
				"The kernel has dropped 7 packets on this node since rp_filter is strict at eth0: answers that come there although the route back to their source leads elsewhere are dropped.", problem: true},
		"strict rp_filter where clients may come": {reality: Reality{Reverse: reverse(reality.Reverse{Anywhere: []string{"eth1"}, Drops: 4, Known: true})}},
		"strict rp_filter": {reality: Reality{Reverse: reverse(reality.Reverse{Strict: []string{"eth0"}, Known: true})},
			check: "reverse path filter: ok: strict at eth0, by which the routes back to the endpoints lead; 0 packets dropped by it on this node"},
		"an API server that has been away for ten minutes": {reality: Reality{Watches: func() []source.Watch {
			return []source.Watch{{Resource: "services", Age: 10 * time.Minute, Failure: "dial tcp 192.0.2.1:6443: connection refused"}, {Resource: "nodes", Age: time.Second}}
		}},
			check: "API server: problem: silent for 10m about services: dial tcp 192.0.2.1:6443: connection refused",
			what: "The API server has sent nothing about services for 10m, so what this node knows may be out of date: dial tcp " +
				"192.0.2.1:6443: connection refused.", problem: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, _ := manyServices(t, 10)
			n.Reality = &tc.reality
			e, err := n.Explain(web)
			require.NoError(t, err)
			n.Check(t.Context(), e)
			var checks, what []string
			for _, c := range e.Checks {
				checks = append(checks, c.Name+": "+c.Result+": "+c.Detail)
			}
			for _, d := range e.Diagnoses {
				what = append(what, d.What)
			}
			if got := strings.Join(checks, "\n"); got != tc.check {
				t.Errorf("checked %s\nwant    %s", got, tc.check)
			}
			if tc.do != "" && (len(e.Diagnoses) == 0 || e.Diagnoses[0].Do != tc.do) {
				t.Errorf("diagnoses %+v, want to do %s", e.Diagnoses, tc.do)
			}
			if got := strings.Join(what, "\n"); got != tc.what || e.Problem() != tc.problem {
				t.Errorf("problem %t: %s\nwant    %t: %s", e.Problem(), got, tc.problem, tc.what)
			}
		})
	}
}

// TestRefusedSentence: a ServicePort that the kernel refuses is explained by the kernel's words and what follows.
func TestRefusedSentence(t *testing.T) {
	t.Parallel()
	n, _ := manyServices(t, 10)
	key := plan.Key{Service: plan.Service{Namespace: "default", Name: "s-7"}, Protocol: plan.TCP, Family: plan.IPv4}
	n.Programmed = func() *plan.Snapshot { return nil }
	n.Refused = func() []plan.Refusal { return []plan.Refusal{{Key: key, Err: errors.New("no space left on device")}} }
	e, err := n.Explain(key.Service)
	const want = `The kernel refuses port "" (IPv4) of Service default/s-7: no space left on device; it is not proxied on this node, and is ` +
		"retried from time to time."
	if err != nil || len(e.Diagnoses) != 1 || e.Ports[0].State != Refused || e.Diagnoses[0].What != want || !e.Problem() {
		t.Errorf("%v, %+v", err, e)
	}
}

// TestClientGone: nothing goes on looking at the node for a client that has gone.
func TestClientGone(t *testing.T) {
	t.Parallel()
	n, _ := manyServices(t, 10)
	asked, gone := make(chan struct{}), make(chan struct{})
	n.Reality = &Reality{Blocking: func(ctx context.Context, _ []*plan.ServicePort) ([]reality.Blocking, bool, error) {
		close(asked)
		<-ctx.Done()
		if errors.Is(ctx.Err(), context.Canceled) { // And not because time is up.
			close(gone)
		}
		return nil, false, ctx.Err()
	}}
	ctx, leave := context.WithCancel(t.Context())
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/v1/explain?namespace=default&name=s-7", nil)
		Handler(func() *Node { return n }).ServeHTTP(httptest.NewRecorder(), r)
	}()
	<-asked
	leave()
	<-answered
	select {
	case <-gone:
	default:
		t.Error("the check went on until its time was up")
	}
}

// TestUnknownNode: what is said of a Node of which nothing is known depends on whether there may be one.
func TestUnknownNode(t *testing.T) {
	t.Parallel()
	for unread, want := range map[string]string{
		"":             "no Node of the name n is known; " + nameNode,
		"ask somebody": "the Node n has not been read; ask somebody",
	} {
		why, do := (&diagnosis{d: &proxier.Description{NodeUnread: unread}}).unknownNode("n")
		if got := why + "; " + do; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
