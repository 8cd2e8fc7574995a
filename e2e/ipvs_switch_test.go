package e2e

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// switching is a World whose daemon changes modes, with requests and connections all the while.
type switching struct {
	*harness.World
	variant harness.Variant
	daemon  *harness.Daemon
	loads   []*harness.Load
	open    map[string]*harness.Conversation
}

// start runs nodeproxy in a mode, after it has ended what runs.
func (s *switching) start(t *testing.T, m harness.Mode, flags ...string) {
	t.Helper()
	if s.daemon != nil {
		require.NoError(t, s.daemon.Stop())
	}
	s.daemon = s.Run(t, s.variant, append([]string{"--mode=" + string(m), clusterCIDR}, flags...)...)
}

// load starts requests from outside, a pod and the node, to every sort of frontend.
func (s *switching) load() {
	const loads = 18
	pause := loads * time.Second / time.Duration(harness.ConnectionRate(1800))
	for _, family := range families {
		node := s.Node1()
		s.loads = append(s.loads,
			s.Client.StartLoad("tcp", clusterIP(1, family), 1, pause),
			s.Client.StartLoad("udp", vip(4, family), 1, pause),
			s.Client.StartLoad("tcp", nodePort(node.IP(family), 3), 1, pause),
			s.Client.StartLoad("tcp", vip(3, family), 1, pause),
			s.Pod("n1c").StartLoad("tcp", clusterIP(5, family), 1, pause),
			s.Pod("n1c").StartLoad("tcp", nodePort(node.IP(family), 1), 1, pause),
			s.Pod("n1a").StartLoad("udp", clusterIP(1, family), 1, pause),
			node.StartLoad("tcp", clusterIP(1, family), 1, pause),
			node.StartLoad("tcp", externalIP(1, family), 1, pause))
	}
}

// converse opens connections that stay.
func (s *switching) converse(t *testing.T, phase string) {
	t.Helper()
	for i := range max(1, harness.OpenConnections(10)/10) {
		s.converseOnce(t, fmt.Sprintf("%s, %d", phase, i))
	}
}

// converseOnce opens ten of them.
func (s *switching) converseOnce(t *testing.T, phase string) {
	t.Helper()
	for _, family := range families {
		for _, c := range []struct {
			from *harness.Host
			to   netip.AddrPort
		}{
			{s.Client, clusterIP(1, family)}, {s.Client, nodePort(s.Node1().IP(family), 3)}, {s.Client, vip(1, family)},
			{s.Pod("n1c").Host, clusterIP(5, family)}, {s.Node1().Host, clusterIP(1, family)},
		} {
			talk, err := c.from.Converse(c.to)
			if err != nil {
				t.Errorf("%s: %s to %s: %v", phase, c.from.Name, c.to, err)
				continue
			}
			t.Cleanup(talk.Close)
			s.open[fmt.Sprintf("%s to %s, opened in %s", c.from.Name, c.to, phase)] = talk
		}
	}
}

func (s *switching) goOn(t *testing.T, when string) {
	t.Helper()
	for name, c := range s.open {
		assert.NoError(t, c.Echo("line"), "%s: %s", when, name)
	}
}

// left is what node1 holds of mode ipvs beside rules.
func (s *switching) left(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(ipSets(t, s.World) + virtualServers(t, s.World) + device(t, s.World))
}

// TestIPVSModeSwitch: from iptables to ipvs and back by restarts with another --mode. No request fails, connections go on,
// and what is left is what a node holds that never was in the other mode. What IPVS knows of connections stays until they
// end, or for the grace period.
func TestIPVSModeSwitch(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		s := &switching{World: w, variant: variant, open: map[string]*harness.Conversation{}}
		s.start(t, harness.IPTables)
		onlyIPTables := essence(rules(t, w, variant))
		if left := s.left(t); left != "" {
			t.Errorf("mode iptables makes what is of mode ipvs:\n%s", left)
		}
		s.load()
		s.converse(t, "mode iptables")
		more(t, aWhile, s.loads...)

		s.start(t, harness.IPVS)
		s.goOn(t, "in mode ipvs")
		s.converse(t, "mode ipvs")
		more(t, aWhile, s.loads...)
		never := harness.New(t, harness.Options{})
		never.Write(t, "nodes.yaml", never.NodeObjects()...)
		manyServices(t, never)
		never.Run(t, variant, "--mode=ipvs", clusterCIDR)
		fresh := &switching{World: never}
		if now, want := s.left(t), fresh.left(t); now != want {
			t.Errorf("not as on a node that was in mode ipvs from the start:\n%s", firstDifference(want, now))
		}
		if now, want := essence(rules(t, w, variant)), essence(rules(t, never, variant)); now != want {
			t.Errorf("rules not as on a node that was in mode ipvs from the start:\n%s", firstDifference(want, now))
		}

		if value, err := w.Node1().ReadSysctl("net/ipv4/conf/all/route_localnet"); err != nil ||
			value != "0" && !strings.Contains(rules(t, w, variant), "block incoming localnet connections") {
			t.Errorf("route_localnet is %q (%v), and nothing keeps others from what listens on 127.0.0.1", value, err)
		}

		s.start(t, harness.IPTables, "--ipvs-graceful-period=1h")
		s.goOn(t, "in mode iptables again")
		s.converse(t, "mode iptables again")
		more(t, aWhile, s.loads...)
		if !strings.Contains(virtualServers(t, w), "-a -t ") {
			t.Error("no virtual server was left for the connections that need one")
		}
		s.goOn(t, "before the grace period has passed")
		noFailures(t, s.loads...)
		for name, c := range s.open {
			// While it has them, the node takes the addresses of Services for its own source. A connection of its own ends with
			// them then, though it needs no IPVS.
			ownSource := strings.HasPrefix(name, "node1 ") && harness.VIPsWith(variant) == harness.VIPAddresses
			if strings.Contains(name, "opened in mode ipvs,") || ownSource {
				c.Close()
				delete(s.open, name)
			}
		}
		// IPVS remembers connections for two minutes after their end.
		s.start(t, harness.IPTables, "--ipvs-graceful-period=1s")
		eventually(t, "nothing of mode ipvs is left", func() error {
			if left := s.left(t); left != "" {
				return fmt.Errorf("%s", left)
			}
			return nil
		})
		if now := essence(rules(t, w, variant)); now != onlyIPTables {
			t.Errorf("rules are not those from before:\n%s", firstDifference(onlyIPTables, now))
		}
		s.goOn(t, "at the end")
		for _, family := range families {
			wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a", "n3a")
		}
	})
}

// TestIPVSLeavingEndsWithConnections: what mode ipvs has left goes soon after the last connection that needs it has ended,
// long before the grace period has. Until then, virtual servers take no new connections.
func TestIPVSLeavingEndsWithConnections(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		s := &switching{World: w, variant: variant}
		s.start(t, harness.IPVS)
		c, err := w.Client.Converse(clusterIP(1, 4))
		require.NoError(t, err)
		defer c.Close()
		s.start(t, harness.IPTables, "--ipvs-graceful-period=1h")
		time.Sleep(4 * time.Second) // What drains is looked at each second, and this is to stay.
		assert.NoError(t, c.Echo("line"), "after four seconds")
		left := virtualServers(t, w)
		assert.Regexp(t, "(?m)^-a -t "+regexp.QuoteMeta(clusterIP(1, 4).String())+" .* -w 0$", left, "the virtual server with a connection")
		assert.NotRegexp(t, "(?m)^-a .* -w [1-9]", left, "virtual servers that take new connections")
		c.Abort() // IPVS remembers it for ten seconds
		eventually(t, "nothing of mode ipvs is left", func() error {
			if left := s.left(t); left != "" {
				return fmt.Errorf("%s", left)
			}
			return nil
		})
	})
}
