package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// openConnections are connections that data goes through now and then.
type openConnections map[string]*harness.Conversation

// open opens a connection from outside, from a pod and from the node to each external frontend of Service 1.
func (o openConnections) open(t *testing.T, w *harness.World, phase string) {
	t.Helper()
	for _, family := range families {
		for _, from := range []*harness.Host{w.Client, w.Pod("n1c").Host, w.Node1().Host} {
			for _, to := range []netip.AddrPort{nodePort(w.Node1().IP(family), 1), vip(1, family), externalIP(1, family)} {
				c, err := from.Converse(to)
				require.NoError(t, err, "%s: %s to %s", phase, from.Name, to)
				t.Cleanup(c.Close)
				o[fmt.Sprintf("%s to %s, opened %s", from.Name, to, phase)] = c
			}
		}
	}
}

// goOn sends a line through each. Those that fail are told of once.
func (o openConnections) goOn(t *testing.T, when string) {
	t.Helper()
	for name, c := range o {
		if err := c.Echo("line"); err != nil {
			t.Errorf("%s: %s: %v", when, name, err)
			delete(o, name)
		}
	}
}

// TestPolicyChangeKeepsConnections: connections to endpoints that stay go on when the external policy changes, either way, and
// when nodeproxy is restarted over a change.
func TestPolicyChangeKeepsConnections(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		write := func(external string) {
			s := harness.Service("s", 1, harness.Policies("Cluster", external))
			w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a", "n2a")...)...)
		}
		write("Local")
		d := w.Run(t, variant, clusterCIDR)
		o := openConnections{}
		change := func(phase, external string, servers ...string) {
			t.Helper()
			o.open(t, w, phase)
			write(external)
			to := nodePort(w.Node1().IP(4), 1)
			eventually(t, "policy "+external, func() error {
				o.goOn(t, "while the policy becomes "+external)
				return serversOf(w.Client, "tcp", to, servers...)
			})
			for range 3 { // What drains is looked at each second.
				o.goOn(t, "under policy "+external)
				time.Sleep(700 * time.Millisecond) // It is to stay.
			}
		}
		change("under Local", "Cluster", "n1a", "n2a")
		change("under Cluster", "Local", "n1a")
		o.open(t, w, "before a restart")
		require.NoError(t, d.Stop())
		write("Cluster")
		w.Run(t, variant, clusterCIDR)
		o.goOn(t, "after a restart")
		time.Sleep(3 * time.Second) // What drains is looked at each second, and these are to stay.
		o.goOn(t, "later")
	})
}

// TestIPVSTakeoverKeepsNodePortConnections: connections through the virtual servers that kube-proxy has for each address of the
// node and each node port go on. New ones do not get there, and the servers go with their last connection.
func TestIPVSTakeoverKeepsNodePortConnections(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
		node := w.Node1()
		for _, setting := range []string{"net/ipv4/ip_forward", "net/ipv4/vs/conntrack"} {
			require.NoError(t, node.Sysctl(setting, "1"))
		}
		o := openConnections{}
		var servers []string
		for _, family := range families {
			// Any rules like these have the kernel track connections, as it does beside kube-proxy.
			xtables(t, w, variant, family, "restore", "*nat\n-A PREROUTING -i none -j RETURN\n"+
				"-A POSTROUTING -o none -j RETURN\nCOMMIT\n*filter\n-A INPUT -i none -m conntrack --ctstate NEW -j RETURN\nCOMMIT\n", "--noflush")
			to := nodePort(node.IP(family), 1)
			servers = append(servers, "-t "+to.String()+" ")
			output(t, w, fmt.Sprintf("ipvsadm -A -t %s -s rr", to))
			output(t, w, fmt.Sprintf("ipvsadm -a -t %s -r %s -m", to, netip.AddrPortFrom(w.Pod("n1a").IP(family), 8080)))
			c, err := w.Client.Converse(to)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			o[to.String()] = c
		}
		w.Run(t, variant, clusterCIDR)
		for range 4 {
			o.goOn(t, "after the take-over")
			time.Sleep(700 * time.Millisecond) // What drains is looked at each second, and these are to stay.
		}
		for _, family := range families {
			wantServers(t, w.Client, nodePort(node.IP(family), 1), "n1a")
		}
		for _, c := range o {
			c.Abort() // IPVS remembers it for ten seconds
		}
		eventually(t, "kube-proxy's virtual servers are gone", func() error {
			now := virtualServers(t, w)
			for _, s := range servers {
				if strings.Contains(now, s) {
					return fmt.Errorf("%s is still there:\n%s", s, now)
				}
			}
			return nil
		})
	})
}
