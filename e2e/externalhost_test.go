package e2e

import (
	"bufio"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"nodeproxy/e2e/harness"
)

// TestExternalIPOfAnotherHost: an external IP that is another host's address takes no more than the ports of the Service from that
// host: for clients whose way there leads by this node, for pods and for the node itself. Of that host nothing is taken once the
// Service is gone.
func TestExternalIPOfAnotherHost(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		const other, own = 81, 85                               // ports of that host; the latter is the endpoint of a Service that has it as its frontend
		w := harness.New(t, harness.Options{OwnFirewall: true}) // It would let neither the other host nor its address pass.
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		host, node := w.Nodes[1], w.Node1()
		for _, port := range []uint16{harness.ServicePort, other, own} {
			at := netip.AddrPortFrom(netip.IPv6Unspecified(), port)
			require.NoError(t, w.ServeTCP(host.Netns, "host", at))
			require.NoError(t, w.ServeUDP(host.Netns, "host", at))
		}
		clients := []*harness.Host{w.Client, w.Pod("n1c").Host, node.Host}
		for _, family := range families {
			addr := host.IP(family)
			routes, err := w.Client.Netlink().RouteGet(harness.AddressesOf(1).VIP(family).AsSlice())
			if err != nil || len(routes) != 1 {
				t.Fatalf("the client's route to a Service: %v, %v", routes, err)
			}
			there := &netlink.Route{LinkIndex: routes[0].LinkIndex, Dst: netlink.NewIPNet(addr.AsSlice()), Gw: routes[0].Gw}
			require.NoError(t, w.Client.Netlink().RouteReplace(there))
			// What comes back goes the same way, or the node would see but half of each connection.
			if routes, err = host.Netlink().RouteGet(node.IP(family).AsSlice()); err != nil || len(routes) != 1 {
				t.Fatalf("the host's route to the node: %v, %v", routes, err)
			}
			back := &netlink.Route{LinkIndex: routes[0].LinkIndex, Dst: netlink.NewIPNet(w.Client.IP(family).AsSlice()),
				Gw: node.IP(family).AsSlice()}
			require.NoError(t, host.Netlink().RouteReplace(back))
		}
		service := func(number int, port int32, change func(*v1.Service)) *v1.Service {
			return harness.Service(fmt.Sprint("s", number), number, func(s *v1.Service) {
				s.Spec.ExternalIPs = []string{host.IP4.String(), host.IP6.String()}
				for i := range s.Spec.Ports {
					s.Spec.Ports[i].Port = port
				}
				change(s)
			})
		}
		w.Write(t, "cluster.yaml", harness.Objects(service(1, harness.ServicePort, func(*v1.Service) {}), w.Ready("n1a", "n2a")...)...)
		w.Write(t, "local.yaml", harness.Objects(service(2, 82, harness.Policies("Cluster", "Local")), w.Ready("n1b", "n2b")...)...)
		w.Write(t, "sticky.yaml", harness.Objects(service(3, 83, func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		}), w.Ready("n1a")...)...)
		w.Write(t, "none.yaml", harness.Objects(service(4, 84, func(*v1.Service) {}))...)
		w.Write(t, "own.yaml", harness.Objects(service(5, own, func(s *v1.Service) {
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].TargetPort = intstr.FromInt32(own)
			}
		}), harness.Endpoint{Pod: &harness.Pod{Host: host.Host, Node: host}, Conditions: w.Ready("n2a")[0].Conditions})...)
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(host.IP(family), port) }
			for _, client := range clients {
				local := []string{"n1b", "n2b"} // for pods and the node
				if client == w.Client {
					local = local[:1]
				}
				wantServers(t, client, at(harness.ServicePort), "n1a", "n2a")
				wantServers(t, client, at(82), local...)
				wantServers(t, client, at(83), "n1a")
				wantOutcome(t, client, at(84), harness.Refused)
				wantServers(t, client, at(other), "host")
				wantServers(t, client, at(own), "host")
				if ok, err := client.Ping(host.IP(family), harness.Patient); !ok || err != nil {
					t.Errorf("ping from %s to %s: %v, %v", client.Name, host.IP(family), ok, err)
				}
			}
		}
		for _, family := range families {
			// The way to the endpoint takes shorter packets than the client sends, and fragments of a datagram have no ports.
			pod := w.Pod("n1a")
			output(t, w, fmt.Sprintf("ip route replace %s", shorter(t, w, pod.IP(family))))
			for _, client := range clients {
				wantEcho(t, client, netip.AddrPortFrom(host.IP(family), 83), 20_000)
				// Of the node's own datagrams of IPv6, at any address of a Service, IPVS sends on those alone that fit the way to the endpoint.
				if mode == harness.IPVS && client == node.Host && family == 6 {
					continue
				}
				wantAnswer(t, client, netip.AddrPortFrom(host.IP(family), 83), 4_000, "n1a")
			}
		}
		w.Remove(t, "cluster.yaml")
		for _, family := range families {
			for _, client := range clients {
				for _, protocol := range []string{"tcp", "udp"} {
					eventually(t, "the host has its port", func() error {
						return serversOf(client, protocol, netip.AddrPortFrom(host.IP(family), harness.ServicePort), "host")
					})
				}
				wantServers(t, client, netip.AddrPortFrom(host.IP(family), 83), "n1a")
			}
		}
		if mode == harness.IPVS && strings.Contains(device(t, w), fmt.Sprintf("%s . tcp . 80\n", host.IP4)) {
			t.Errorf("a port is left:\n%s", device(t, w))
		}
	})
}

// shorter is node1's route to an address with a smaller MTU.
func shorter(t *testing.T, w *harness.World, to netip.Addr) string {
	t.Helper()
	routes, err := w.Node1().Netlink().RouteGet(to.AsSlice())
	if err != nil || len(routes) != 1 {
		t.Fatalf("node1's route to %s: %v, %v", to, routes, err)
	}
	link, err := w.Node1().Netlink().LinkByIndex(routes[0].LinkIndex)
	require.NoError(t, err)
	return fmt.Sprintf("%s dev %s mtu 1300", netip.PrefixFrom(to, to.BitLen()), link.Attrs().Name)
}

// wantEcho has a TCP server echo a line of many bytes.
func wantEcho(t *testing.T, client *harness.Host, to netip.AddrPort, size int) {
	t.Helper()
	c, err := client.Dial("tcp", to, time.Now().Add(harness.Patient))
	if err != nil {
		t.Errorf("%s to %s: %v", client.Name, to, err)
		return
	}
	defer c.Close()
	r := bufio.NewReader(c)
	if a := harness.Greeting(r); a.Err != nil {
		t.Errorf("%s to %s: greeting: %v", client.Name, to, a.Err)
		return
	}
	line := strings.Repeat("x", size) + "\n"
	if _, err := c.Write([]byte(line)); err != nil {
		t.Errorf("%s to %s: %v", client.Name, to, err)
		return
	}
	if got, err := r.ReadString('\n'); got != line {
		t.Errorf("%s to %s: of %d bytes %d came back: %v", client.Name, to, size, len(got), err)
	}
}

// wantAnswer has a UDP server answer a datagram that is sent in fragments.
func wantAnswer(t *testing.T, client *harness.Host, to netip.AddrPort, size int, server string) {
	t.Helper()
	c, err := client.Dial("udp", to, time.Now().Add(harness.Patient))
	if err != nil {
		t.Errorf("%s to %s: %v", client.Name, to, err)
		return
	}
	defer c.Close()
	// The first ones may be lost while the way's MTU becomes known.
	buffer := make([]byte, 100)
	eventually(t, fmt.Sprintf("an answer to %d bytes from %s to %s", size, client.Name, to), func() error {
		if _, err := c.Write(make([]byte, size)); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		n, err := c.Read(buffer)
		if err == nil && !strings.HasPrefix(string(buffer[:n]), server+" ") {
			err = fmt.Errorf("%q answers", buffer[:n])
		}
		return err
	})
}
