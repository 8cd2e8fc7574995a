package e2e

import (
	"fmt"
	"net/netip"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"nodeproxy/e2e/harness"
)

// earlyPatience covers the times at which TCP sends its SYN again, up to 63 seconds after the first: a busy machine may take long to write
// rules.
const earlyPatience = 100 * time.Second

// An attempt is a TCP connection that a client tries to open.
type attempt struct {
	from   *harness.Host
	to     netip.AddrPort
	answer chan harness.Answer
}

func (a *attempt) String() string { return fmt.Sprintf("%s to %s", a.from.Name, a.to) }

// begin starts an attempt.
func begin(from *harness.Host, to netip.AddrPort) *attempt {
	a := &attempt{from, to, make(chan harness.Answer, 1)}
	go func() { a.answer <- from.Ask("tcp", to, earlyPatience) }()
	return a
}

// tracked waits until node1 tracks all of the attempts, and fails the test if one ends before.
func tracked(t *testing.T, w *harness.World, all []*attempt) {
	t.Helper()
	eventually(t, "the first packets", func() error {
		seen := map[string]bool{}
		for _, family := range families {
			flows, err := w.Node1().Netlink().ConntrackTableList(netlink.ConntrackTable, netlinkFamily(family))
			if err != nil {
				return err
			}
			for _, f := range flows {
				if f.Forward.Protocol == syscall.IPPROTO_TCP {
					seen[fmt.Sprintf("%s %s %d", f.Forward.SrcIP, f.Forward.DstIP, f.Forward.DstPort)] = true
				}
			}
		}
		for _, a := range all {
			family := 4
			if a.to.Addr().Is6() {
				family = 6
			}
			if !seen[fmt.Sprintf("%s %s %d", a.from.IP(family), a.to.Addr(), a.to.Port())] {
				return fmt.Errorf("node1 does not track %s", a)
			}
		}
		return nil
	})
	for _, a := range all {
		select {
		case got := <-a.answer:
			t.Fatalf("%s, before anything leads anywhere: %v", a, got)
		default:
		}
	}
}

// beginAll starts attempts to frontends of Service 1 from outside, from a pod and from the node itself, except to cluster IPs that
// are refused while there is no Service.
func beginAll(t *testing.T, w *harness.World, withClusterIPs bool) []*attempt {
	t.Helper()
	var out []*attempt
	for _, family := range families {
		for _, to := range frontends(w, 1, family) {
			if to == clusterIP(1, family) && !withClusterIPs {
				continue
			}
			for _, from := range []*harness.Host{w.Client, w.Pod("n1c").Host, w.Node1().Host} {
				if from == w.Node1().Host && from.IP(family) == to.Addr() && mode == harness.IPVS {
					continue // What keepSilent does there is not what any firewall does, and IPVS resets the connection.
				}
				out = append(out, begin(from, to))
			}
		}
	}
	tracked(t, w, out)
	return out
}

// succeed waits until all attempts have ended, and checks that one of the servers has answered each.
func succeed(t *testing.T, what string, all []*attempt, server string) {
	t.Helper()
	var slowest time.Duration
	for _, a := range all {
		got := <-a.answer
		if got.Outcome != harness.Answered || got.Server != server {
			t.Errorf("%s: %s, begun before: %v after %v", what, a, got, got.Took.Round(time.Millisecond))
		}
		slowest = max(slowest, got.Took)
	}
	t.Logf("%s: %d connections begun before, the last open after %v", what, len(all), slowest.Round(time.Millisecond))
}

// keepSilent keeps node1 from telling clients that nothing listens at the node port of Service 1, as a firewall may, and the network
// from telling them that it does not know a Service's address. The kernel's connection tracking does not see it either.
func keepSilent(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	for _, tool := range []string{"iptables", "ip6tables"} {
		if _, err := w.Node1().Output(variant.Tool(tool), "-w", "-t", "raw", "-A", "OUTPUT", "-p", "tcp",
			"--sport", strconv.Itoa(int(harness.AddressesOf(1).NodePort)), "--tcp-flags", "RST", "RST", "-j", "DROP"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Node1().Output(variant.Tool("ip6tables"), "-w", "-t", "raw", "-A", "PREROUTING", "-i", "eth0", "-p", "ipv6-icmp",
		"--icmpv6-type", "destination-unreachable", "-j", "DROP"); err != nil {
		t.Fatal(err)
	}
}

// TestEarlyConnections: a TCP connection whose first packet finds no rules for its Service, and so no answer, is open as soon
// as its client has sent another one after there are rules: of a Service that is new, on a node where nothing was
// programmed before, and after what somebody has taken away is back.
func TestEarlyConnections(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		keepSilent(t, w, variant)
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		s := harness.Service("s", 1)
		objects := harness.Objects(s, w.Ready("n2a")...)
		d := w.Run(t, variant, clusterCIDR)
		all := beginAll(t, w, mode == harness.IPTables || mode == harness.IPVS && freeClusterIP(variant) == harness.TimedOut)
		w.Write(t, "s.yaml", objects...)
		succeed(t, "a new Service", all, "n2a")

		// Nobody notices what has been taken away before the connections have begun.
		require.NoError(t, syscall.Kill(d.PID(), syscall.SIGSTOP))
		takeAway(t, w, variant)
		all = beginAll(t, w, true)
		require.NoError(t, syscall.Kill(d.PID(), syscall.SIGCONT))
		succeed(t, "a repair", all, "n2a")
	})
}

// takeAway removes what brings packets to Services on node1.
func takeAway(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	commands := [][]string{{variant.Tool("iptables"), "-w", "-t", "nat", "-F"}, {variant.Tool("ip6tables"), "-w", "-t", "nat", "-F"}}
	if mode == harness.IPVS {
		commands = [][]string{{"ipvsadm", "-C"}, {"ip", "link", "del", "kube-ipvs0"}}
	}
	for _, c := range commands {
		if _, err := w.Node1().Output(c[0], c[1:]...); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEarlyConnectionsAtStart: the same on a node on which nothing was programmed before.
func TestEarlyConnectionsAtStart(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		keepSilent(t, w, variant)
		// The kernel tracks connections in a namespace once a rule asks for it, as those of a network plugin do.
		for _, tool := range []string{"iptables", "ip6tables"} {
			if _, err := w.Node1().Output(variant.Tool(tool), "-w", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "NEW"); err != nil {
				t.Fatal(err)
			}
		}
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n2a")...)...)
		all := beginAll(t, w, true)
		w.Run(t, variant, clusterCIDR)
		succeed(t, "a start", all, "n2a")
	})
}

// TestIPVSOwnConnectionForgotten: a connection of the node itself goes on after the kernel's connection tracking has forgotten it,
// with the source that it has, which a connection has kept that began before there were rules.
func TestIPVSOwnConnectionForgotten(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n2a")...)...)
		if err := w.Run(t, variant, clusterCIDR).Kill(); err != nil { // so that nobody repairs the rules
			t.Fatal(err)
		}
		node := w.Node1()
		acceptAll := func(what string) {
			t.Helper()
			for _, tool := range []string{"iptables", "ip6tables"} {
				if _, err := node.Output(variant.Tool(tool), "-w", "-t", "nat", what, "OUTPUT", "-j", "ACCEPT"); err != nil {
					t.Fatal(err)
				}
			}
		}
		acceptAll("-I") // Nothing asks for masquerading.
		open := map[netip.AddrPort]*harness.Conversation{}
		for _, family := range families {
			for _, to := range []netip.AddrPort{clusterIP(1, family), externalIP(1, family), vip(1, family)} {
				c, err := node.ConverseFrom(node.IP(family), to)
				require.NoError(t, err, "from %s to %s", node.IP(family), to)
				t.Cleanup(c.Close)
				if c.With.Source != node.IP(family) {
					t.Fatalf("%s: the server sees %s, not %s", to, c.With.Source, node.IP(family))
				}
				open[to] = c
			}
		}
		acceptAll("-D")
		require.NoError(t, node.Netlink().ConntrackTableFlush(netlink.ConntrackTable))
		for to, c := range open {
			assert.NoError(t, c.Echo("line"), "to %s", to)
			// What begins now is masqueraded: the node uses the address of the Service, which the endpoint can't answer.
			if got := node.Ask("tcp", to, harness.Patient); got.Outcome != harness.Answered {
				t.Errorf("a new one to %s: %v", to, got)
			}
		}
	})
}
