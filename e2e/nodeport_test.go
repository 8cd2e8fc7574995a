package e2e

import (
	"fmt"
	"net/http"
	"net/netip"
	"testing"

	"nodeproxy/e2e/harness"
)

// TestNodePortAddresses: at which of the node's addresses node ports answer. In mode ipvs, loopback is never among them.
func TestNodePortAddresses(t *testing.T) {
	t.Parallel()
	const healthCheck = 32100
	cases := []struct {
		name, flag         string
		primary4, primary6 bool // where node ports answer
		second4, second6   bool
		localhost          bool // of IPv4
	}{
		{"default", "", true, true, true, true, true},
		{"all", "--nodeport-addresses=0.0.0.0/0,::/0", true, true, true, true, true},
		{"primary", "--nodeport-addresses=primary", true, true, false, false, false},
		{"second", "--nodeport-addresses=192.168.78.0/24,fd00:78::/64", false, false, true, true, false},
		{"second-and-localhost", "--nodeport-addresses=127.0.0.0/8,192.168.78.0/24,fd00:78::/64", false, false, true, true, true},
		{"second-of-IPv4", "--nodeport-addresses=192.168.78.0/24", false, true, true, true, false},
		{"second-of-IPv6", "--nodeport-addresses=fd00:78::/64", true, false, true, true, true},
		{"no-localhost", "--iptables-localhost-nodeports=false", true, true, true, true, false},
	}
	for _, c := range cases {
		if mode == harness.NFTables && (c.flag == "" || c.name == "no-localhost") { // as with --nodeport-addresses=primary
			c.second4, c.second6 = false, false
		}
		for _, variant := range harness.Variants {
			t.Run(c.name+"/"+string(variant), func(t *testing.T) {
				t.Parallel()
				w := harness.New(t, harness.Options{SecondAddress: true})
				w.Write(t, "nodes.yaml", w.NodeObjects()...)
				w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
				local := harness.Service("local", 2, harness.Policies("Cluster", "Local"))
				local.Spec.HealthCheckNodePort = healthCheck
				w.Write(t, "local.yaml", harness.Objects(local, w.Ready("n1b")...)...)
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
				// Health check node ports answer where node ports do.
				healthy := func(addr netip.Addr, open bool) {
					t.Helper()
					at := netip.AddrPortFrom(addr, healthCheck)
					eventually(t, "health check node port", func() error {
						code, _, err := w.Client.Get(at, "/")
						if answered := err == nil && code == http.StatusOK; answered != open {
							return fmt.Errorf("%s answers %d (%v), want an answer: %v", at, code, err, open)
						}
						return nil
					})
				}
				node := w.Node1()
				for _, client := range []*harness.Host{w.Client, w.Pod("n1c").Host, node.Host, w.Nodes[1].Host} {
					check(client, node.IP4, c.primary4)
					check(client, node.IP6, c.primary6)
					check(client, node.Second4, c.second4)
					check(client, node.Second6, c.second6)
				}
				healthy(node.IP4, c.primary4)
				healthy(node.IP6, c.primary6)
				healthy(node.Second4, c.second4)
				healthy(node.Second6, c.second6)
				localhost := c.localhost && mode == harness.IPTables
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
