package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

func sourceRanges(cidrs ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = cidrs }
}

// rule runs iptables and ip6tables with the same arguments on node1.
func rule(t *testing.T, w *harness.World, variant harness.Variant, args string) {
	t.Helper()
	for _, tool := range []string{"iptables", "ip6tables"} {
		if _, err := w.Node1().Output(variant.Tool(tool), strings.Fields("-w "+args)...); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSourceRanges: loadBalancerSourceRanges hold for the LoadBalancer IPs, and for nothing else.
func TestSourceRanges(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		const clients, pods, node1, all, local = 1, 2, 3, 4, 5
		for number, change := range map[int]func(*v1.Service){
			clients: sourceRanges("203.0.113.0/24", " 2001:db8:c::/64 "), // blanks are allowed
			pods:    sourceRanges("10.244.0.0/16", "fd00:10:244::/48"),
			node1:   sourceRanges("192.168.77.11/32", "fd00:77::b/128"),
			all:     sourceRanges("0.0.0.0/0", "::/0"),
			local: func(s *v1.Service) {
				harness.Policies("Cluster", "Local")(s)
				sourceRanges("203.0.113.7/32", "2001:db8:c::7/128")(s)
			},
		} {
			names := map[int]string{clients: "clients", pods: "pods", node1: "node1", all: "all", local: "local"}
			s := harness.Service(names[number], number, change)
			w.Write(t, s.Name+".yaml", harness.Objects(s, w.Ready("n1a")...)...)
		}
		w.Run(t, variant, clusterCIDR)
		outside, pod, node, other := w.Client, w.Pod("n1c").Host, w.Node1().Host, w.Nodes[1].Host
		allowed := map[int][]*harness.Host{
			clients: {outside}, pods: {pod}, node1: {node}, all: {outside, pod, node, other}, local: {outside}}
		var checks []func()
		for _, family := range families {
			for number, hosts := range allowed {
				for _, client := range []*harness.Host{outside, pod, node, other} {
					checks = append(checks, func() {
						if slices.Contains(hosts, client) {
							wantServers(t, client, vip(number, family), "n1a")
						} else {
							wantOutcome(t, client, vip(number, family), harness.TimedOut)
						}
						wantServers(t, client, clusterIP(number, family), "n1a")
						wantServers(t, client, externalIP(number, family), "n1a")
						wantServers(t, client, nodePort(node.IP(family), number), "n1a")
					})
				}
			}
			// The source is kept under policy Local also where ranges are checked.
			checks = append(checks, func() { wantSource(t, outside, vip(local, family), outside.IP(family)) })
		}
		together(checks...)
	})
}

// TestForwardPolicyDrop: traffic that nodeproxy masquerades passes a node that forwards nothing by default, replies
// included. Other traffic is not nodeproxy's to accept. In mode ipvs, none to Services is forwarded, only answers are.
func TestForwardPolicyDrop(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{OwnFirewall: true})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		rule(t, w, variant, "-P FORWARD DROP")
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			node := w.Node1().IP(family)
			for _, to := range frontends(w, 1, family) {
				wantServers(t, w.Client, to, "n1a", "n2a")
			}
			wantServers(t, w.Pod("n1c").Host, nodePort(node, 1), "n1a", "n2a")
			together(
				func() { wantOutcome(t, w.Client, netip.AddrPortFrom(w.Pod("n1a").IP(family), 8080), harness.TimedOut) },
				func() {
					if mode == harness.IPVS {
						wantServers(t, w.Pod("n1c").Host, clusterIP(1, family), "n1a", "n2a")
					} else {
						wantOutcome(t, w.Pod("n1c").Host, clusterIP(1, family), harness.TimedOut)
					}
				},
			)
		}
	})
}

// TestHealthCheckNodePort: the port is open on a node that accepts nothing by default, and only that port.
func TestHealthCheckNodePort(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		const port, another = 32100, 32101
		w := harness.New(t, harness.Options{OwnFirewall: true})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		s := harness.Service("s", 1, harness.Policies("Cluster", "Local"))
		s.Spec.HealthCheckNodePort = port
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		rule(t, w, variant, "-P INPUT DROP")
		node := w.Node1()
		neighbours := strings.Fields("-w -A INPUT -p ipv6-icmp -j ACCEPT")
		if _, err := node.Output(variant.Tool("ip6tables"), neighbours...); err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			for _, p := range []uint16{port, another} {
				at := netip.AddrPortFrom(node.IP(family), p)
				require.NoError(t, w.ServeTCP(node.Netns, "node1", at))
				assert.NoError(t, ends(w.Client, at, harness.TimedOut)(), "before nodeproxy runs")
			}
		}
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			assert.NoError(t, answersNow(w.Client, netip.AddrPortFrom(node.IP(family), port), "node1"))
			assert.NoError(t, ends(w.Client, netip.AddrPortFrom(node.IP(family), another), harness.TimedOut)())
		}
		// Without the field, the port is closed again.
		s.Spec.HealthCheckNodePort = 0
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		for _, family := range families {
			eventually(t, "health check port closed", ends(w.Client, netip.AddrPortFrom(node.IP(family), port), harness.TimedOut))
		}
	})
}

// TestInvalidPacketsDropped: what conntrack finds invalid is not forwarded, since it would pass without its address
// being translated back; unless the node is set to be liberal about it (nf_conntrack_tcp_be_liberal).
func TestInvalidPacketsDropped(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		for _, liberal := range []bool{false, true} {
			w := harness.New(t, harness.Options{})
			w.Write(t, "nodes.yaml", w.NodeObjects()...)
			w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
			value := map[bool]string{false: "0", true: "1"}[liberal]
			require.NoError(t, w.Node1().Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", value))
			w.Run(t, variant, clusterCIDR)
			for _, family := range families {
				pod := w.Pod("n1a")
				seen, err := pod.WatchTCP(family)
				require.NoError(t, err)
				const nobody = 4444 // a port without a server
				to := netip.AddrPortFrom(pod.IP(family), nobody)
				// No TCP packet may have both SYN and FIN.
				for _, packet := range []struct {
					port  uint16
					flags harness.TCPFlags
				}{{5001, harness.SYN | harness.FIN}, {5002, harness.SYN}} {
					from := netip.AddrPortFrom(w.Client.IP(family), packet.port)
					require.NoError(t, w.Client.SendTCP(from, to, packet.flags))
				}
				if !seen.Saw(5002, harness.Patient) {
					t.Errorf("IPv%d, liberal=%v: a valid packet was lost", family, liberal)
				}
				within := 200 * time.Millisecond // for what is not to come
				if liberal {
					within = harness.Patient
				}
				if got := seen.Saw(5001, within); got != liberal {
					t.Errorf("IPv%d, liberal=%v: invalid packet forwarded: %v", family, liberal, got)
				}
				seen.Close()
			}
		}
	})
}

// TestLocalhostNotReachableFromOutside: localhost node ports need route_localnet, and that must not let neighbours reach
// what listens on 127.0.0.1.
func TestLocalhostNotReachableFromOutside(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{OwnFirewall: true})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		if value, err := w.Node1().ReadSysctl("net/ipv4/conf/all/route_localnet"); err != nil || value != "1" {
			t.Fatalf("route_localnet is %q (%v), want 1: otherwise this test shows nothing", value, err)
		}
		node := w.Node1()
		server := netip.MustParseAddrPort("127.0.0.1:7777")
		received, err := node.CountUDP(server)
		require.NoError(t, err)
		defer received.Close()
		from := netip.AddrPortFrom(w.Client.IP4, 5555)
		send := func() {
			t.Helper()
			require.NoError(t, w.Client.SendUDPFrame(node.Host, from, server))
		}
		send()
		time.Sleep(200 * time.Millisecond) // for what is not to come
		if n := received.Count(); n > 0 {
			t.Errorf("%d packets from outside reached %s", n, server)
		}
		// Without the guard it gets through: the test would notice. So would the daemon, and repair it.
		require.NoError(t, d.Stop())
		if _, err := node.Output(variant.Tool("iptables"), "-w", "-F", "KUBE-FIREWALL"); err != nil {
			t.Fatal(err)
		}
		send()
		eventually(t, "without the guard, a packet gets through: else this test shows nothing", func() error {
			if n := received.Count(); n != 1 {
				return fmt.Errorf("%d packets reached %s, want 1", n, server)
			}
			return nil
		})
	})
}
