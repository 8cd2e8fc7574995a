package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
	"nodeproxy/internal/nstest"
)

// hostPort is where a process of node1 listens at all of its addresses.
const hostPort = 7070

// TestIPVSAddressesAreServicesOnly: though addresses of Services are the node's own in mode ipvs, what the node itself
// listens to is not to be reached there, nor are node ports; and they answer to ping. Of an external IP, only ports are.
func TestIPVSAddressesAreServicesOnly(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{OwnFirewall: true}) // ports of the node are asked for from outside
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		local := harness.Service("local", 2, harness.Policies("Local", "Local"))
		w.Write(t, "local.yaml", harness.Objects(local, w.Ready("n1a", "n2a")...)...)
		w.Write(t, "none.yaml", harness.Objects(harness.Service("none", 3))...)
		node := w.Node1()
		require.NoError(t, w.ServeTCP(node.Netns, "host", netip.AddrPortFrom(netip.IPv6Unspecified(), hostPort)))
		require.NoError(t, w.ServeUDP(node.Netns, "host", netip.AddrPortFrom(netip.IPv6Unspecified(), hostPort)))
		w.Run(t, variant, clusterCIDR)
		for _, client := range []*harness.Host{w.Client, w.Pod("n1c").Host, w.Nodes[1].Host, node.Host} {
			for _, family := range families {
				wantServers(t, client, netip.AddrPortFrom(node.IP(family), hostPort), "host")
				var checks []func()
				for number := 1; number <= 3; number++ {
					a := harness.AddressesOf(number)
					external := a.ExternalIP(family) // is another host's, as far as it can be known, and here nobody's
					checks = append(checks,
						func() { wantNobody(t, client, netip.AddrPortFrom(external, hostPort)) },
						func() { wantNobody(t, client, netip.AddrPortFrom(external, a.NodePort)) })
					for _, addr := range []netip.Addr{a.ClusterIP(family), a.VIP(family)} {
						checks = append(checks,
							func() { wantOutcome(t, client, netip.AddrPortFrom(addr, hostPort), harness.Refused) },
							func() { wantOutcome(t, client, netip.AddrPortFrom(addr, a.NodePort), harness.Refused) },
							func() { wantOutcome(t, client, netip.AddrPortFrom(addr, 81), harness.Refused) },
							func() {
								if ok, err := client.Ping(addr, harness.Patient); !ok || err != nil {
									t.Errorf("ping from %s to %s: %v, %v", client.Name, addr, ok, err)
								}
							})
					}
				}
				together(checks...)
			}
		}
	})
}

// TestIPVSDevice: what is on kube-ipvs0, with routes for ranges and with an address for each Service; and that no change of
// addresses takes the routes away.
func TestIPVSDevice(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		w.Write(t, "internal.yaml", harness.Objects(harness.Service("internal", 2, harness.ClusterOnly), w.Ready("n1a")...)...)
		w.Run(t, variant, clusterCIDR)
		a, b := harness.AddressesOf(1), harness.AddressesOf(2)
		want := func(when string, addresses ...netip.Addr) {
			t.Helper()
			// How ip prints routes differs between families and versions: what counts is where they lead, and their source.
			got := device(t, w)
			for _, addr := range addresses {
				if !strings.Contains(got, fmt.Sprintf("%s/%d\n", addr, addr.BitLen())) {
					t.Errorf("%s: %s is not on the device:\n%s", when, addr, got)
				}
			}
			if n := strings.Count(got, "/32\n") + strings.Count(got, "/128\n"); n != len(addresses) {
				t.Errorf("%s: %d addresses on the device, want %d:\n%s", when, n, len(addresses), got)
			}
			routed := strings.Contains(got, "local 10.96.0.0/16 ") && strings.Contains(got, " src "+w.Node1().IP4.String()) &&
				strings.Contains(got, "local fd00:10:96::/112 ") && strings.Contains(got, " src "+w.Node1().IP6.String())
			if want := harness.VIPsWith(variant) == harness.VIPRoutes; routed != want {
				t.Errorf("%s: routes for the ranges: %v, want %v:\n%s", when, routed, want, got)
			}
		}
		external := []netip.Addr{a.VIP4, a.VIP6, a.ExternalIP4}    // the latter for the source of ICMP errors
		internal := []netip.Addr{netip.MustParseAddr("10.96.0.0")} // it keeps the routes of IPv4
		if harness.VIPsWith(variant) == harness.VIPAddresses {
			internal = []netip.Addr{a.ClusterIP4, a.ClusterIP6, b.ClusterIP4, b.ClusterIP6}
		}
		want("at first", append(external, internal...)...)
		// Without the last address, a device loses its routes.
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1, harness.ClusterOnly), w.Ready("n1a", "n2a")...)...)
		for _, family := range families {
			eventually(t, "no load balancer IP", ends(w.Client, vip(1, family), harness.TimedOut))
			wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a")
			wantServers(t, w.Pod("n1c").Host, clusterIP(2, family), "n1a")
		}
		want("without external addresses", internal...)
	})
}

// TestIPVSARP: on another interface, the node answers for addresses of Services, with routes for the rest of their range too, and with
// --ipvs-strict-arp for none.
func TestIPVSARP(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
		strict := nstest.Hostile()
		routes := harness.VIPsWith(variant) == harness.VIPRoutes
		for _, flags := range [][]string{{clusterCIDR}, {clusterCIDR, "--ipvs-strict-arp"}} {
			d := w.Run(t, variant, flags...)
			strict = strict || len(flags) > 1
			for addr, want := range map[netip.Addr]bool{
				w.Node1().IP4: true, harness.AddressesOf(1).ClusterIP4: !strict, harness.AddressesOf(200).ClusterIP4: routes && !strict,
			} {
				if got, err := arping(w.Nodes[1], addr); err != nil || got != want {
					t.Errorf("with %q, somebody answers for %s: %v, %v, want %v", flags, addr, got, err, want)
				}
			}
			require.NoError(t, d.Stop())
		}
	})
}

// arping has a node's kernel ask all on the network of its eth0 who has an address, and reports whether somebody answers.
func arping(from *harness.Node, target netip.Addr) (answered bool, err error) {
	nl := from.Netlink()
	link, err := nl.LinkByName("eth0")
	if err != nil {
		return false, fmt.Errorf("eth0 of %s: %w", from.Name, err)
	}
	index := link.Attrs().Index
	_ = nl.NeighDel(&netlink.Neigh{LinkIndex: index, IP: target.AsSlice()}) // What was known before; mostly nothing.
	route := &netlink.Route{
		LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: target.AsSlice(), Mask: net.CIDRMask(32, 32)},
	}
	if err := nl.RouteReplace(route); err != nil {
		return false, fmt.Errorf("route to %s: %w", target, err)
	}
	defer func() { err = errors.Join(err, nl.RouteDel(route)) }()
	err = from.Do(func() error { // The kernel has to find the neighbour before it can send this.
		c, err := net.Dial("udp", netip.AddrPortFrom(target, 9).String())
		if err == nil {
			_, err = c.Write([]byte{0})
			err = errors.Join(err, c.Close())
		}
		return err
	})
	for begun := time.Now(); err == nil; time.Sleep(50 * time.Millisecond) {
		known, failed := nl.NeighList(index, netlink.FAMILY_V4)
		if err = failed; err == nil && time.Since(begun) > harness.Limit {
			err = fmt.Errorf("the kernel does not say who has %s", target)
		}
		for _, n := range known {
			switch {
			case !n.IP.Equal(target.AsSlice()):
			case n.State == netlink.NUD_FAILED:
				return false, err
			case n.State&(netlink.NUD_REACHABLE|netlink.NUD_STALE|netlink.NUD_DELAY|netlink.NUD_PROBE) != 0:
				return true, err
			}
		}
	}
	return false, err
}

// TestIPVSOwnAddressIsLeftAlone: an external IP that is an address of the node stays where it is, before, during and after
// there is a Service for it; also if the node gets it while nodeproxy runs.
func TestIPVSOwnAddressIsLeftAlone(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{SecondAddress: true, OwnFirewall: true})
		node := w.Node1()
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		a := harness.AddressesOf(1)
		s := harness.Service("s", 1, func(s *v1.Service) {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, node.Second4.String(), node.Second6.String())
		})
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a", "n2a")...)...)
		require.NoError(t, w.ServeTCP(node.Netns, "host", netip.AddrPortFrom(netip.IPv6Unspecified(), hostPort)))
		w.Run(t, variant, clusterCIDR)
		second := map[int]netip.Addr{4: node.Second4, 6: node.Second6}
		onEth0 := func(when string) {
			t.Helper()
			got := output(t, w, "ip -o addr show dev eth0")
			for _, addr := range second {
				if !strings.Contains(got, " "+addr.String()+"/") || strings.Contains(device(t, w), addr.String()+"/") {
					t.Errorf("%s: %s is not only on eth0:\n%s\n%s", when, addr, got, device(t, w))
				}
			}
		}
		onEth0("with the Service")
		for _, family := range families {
			for _, client := range []*harness.Host{w.Client, w.Pod("n1c").Host, node.Host} {
				wantServers(t, client, netip.AddrPortFrom(second[family], harness.ServicePort), "n1a", "n2a")
				wantServers(t, client, nodePort(second[family], 1), "n1a", "n2a")
				assert.NoError(t, serversOf(client, "tcp", netip.AddrPortFrom(second[family], hostPort), "host"))
			}
		}
		lo, err := node.Netlink().LinkByName("lo")
		require.NoError(t, err)
		for _, family := range families {
			addr := a.VIP(family)
			require.NoError(t, node.Netlink().AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(addr.AsSlice())}))
			eventually(t, "the load balancer IP on lo", func() error {
				if got := device(t, w); strings.Contains(got, addr.String()+"/") {
					return fmt.Errorf("%s is still on the device:\n%s", addr, got)
				}
				return nil
			})
			wantServers(t, w.Client, vip(1, family), "n1a", "n2a")
		}
		w.Remove(t, "s.yaml")
		for _, family := range families {
			eventually(t, "no Service", ends(w.Client, netip.AddrPortFrom(second[family], harness.ServicePort), harness.Refused))
			if got := output(t, w, "ip -o addr show dev lo"); !strings.Contains(got, " "+a.VIP(family).String()+"/") {
				t.Errorf("%s is gone from lo:\n%s", a.VIP(family), got)
			}
		}
		onEth0("without the Service")
	})
}
