package e2e

import (
	"net/netip"
	"testing"

	"nodeproxy/e2e/harness"
)

// TestNodePortAddresses: at which of the node's addresses node ports answer. In mode ipvs, loopback is never among them.
func TestNodePortAddresses(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, flag                 string
		primary, second, localhost bool // where node ports answer
	}{
		{"default", "", true, true, true},
		{"all", "--nodeport-addresses=0.0.0.0/0,::/0", true, true, true},
		{"primary", "--nodeport-addresses=primary", true, false, false},
		{"second", "--nodeport-addresses=192.168.78.0/24,fd00:78::/64", false, true, false},
		{"second-and-localhost", "--nodeport-addresses=127.0.0.0/8,192.168.78.0/24,fd00:78::/64", false, true, true},
		{"no-localhost", "--iptables-localhost-nodeports=false", true, true, false},
	}
	for _, c := range cases {
		for _, variant := range harness.Variants {
			t.Run(c.name+"/"+string(variant), func(t *testing.T) {
				t.Parallel()
				w := harness.New(t, harness.Options{SecondAddress: true})
				w.Write(t, "nodes.yaml", w.NodeObjects()...)
				w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
				flags := []string{clusterCIDR}
				if c.flag != "" {
					flags = append(flags, c.flag)
				}
				w.Run(t, variant, flags...)
				check := func(client *harness.Host, addr netip.Addr, open bool) {
					t.Helper()
					if open {
						wantServers(t, client, nodePort(addr, 1), "n1a", "n2a")
					} else {
						wantOutcome(t, client, nodePort(addr, 1), harness.Refused)
					}
				}
				node := w.Node1()
				for _, client := range []*harness.Host{w.Client, w.Pod("n1c").Host, node.Host, w.Nodes[1].Host} {
					check(client, node.IP4, c.primary)
					check(client, node.IP6, c.primary)
					check(client, node.Second4, c.second)
					check(client, node.Second6, c.second)
				}
				localhost := byMode(c.localhost, false)
				check(node.Host, loopback(4), localhost)
				check(node.Host, loopback(6), false)
				want := "0"
				if localhost {
					want = "1"
				}
				if got, err := node.ReadSysctl("net/ipv4/conf/all/route_localnet"); err != nil || got != want {
					t.Errorf("route_localnet is %q (%v), want %s", got, err, want)
				}
			})
		}
	}
}
