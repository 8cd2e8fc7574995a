package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/harness"
)

// withoutPrograms makes a command that sees none of the programs that change rules. It has the same process id as the command itself.
func withoutPrograms(path string, args ...string) *exec.Cmd {
	const script = `mount -t tmpfs tmpfs /usr/sbin && [ -z "$(ls /sbin)" ] && export PATH=/nonexistent && exec "$@"`
	return exec.Command("unshare", append([]string{"--mount", "sh", "-c", script, "sh", path}, args...)...)
}

// TestNFTablesWithoutPrograms: mode nftables needs none of iptables, nft, ipset, conntrack, modprobe and ip: not to start, to follow, to repair,
// nor to clean up. Rules of another mode, which only iptables can remove, it warns of.
func TestNFTablesWithoutPrograms(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
	w.Launch = withoutPrograms
	binary, err := harness.Binary()
	require.NoError(t, err)
	run := func(args ...string) string {
		t.Helper()
		cmd := withoutPrograms(binary, args...)
		out, err := w.Node1().Output(cmd.Path, cmd.Args[1:]...)
		require.NoError(t, err)
		return out
	}
	run("run", "--init-only", "--mode=nftables")
	d := w.Run(t, harness.NFT, "--mode=nftables", clusterCIDR)
	serve := func(pods ...string) {
		t.Helper()
		for _, family := range families {
			for _, to := range []netip.AddrPort{clusterIP(1, family), nodePort(w.Node1().IP(family), 1), vip(1, family)} {
				eventually(t, "change", func() error { return serversOf(w.Client, "tcp", to, pods...) })
			}
		}
	}
	serve("n1a")
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n2a")...)...)
	serve("n2a")
	line := len(d.Log())
	output(t, w, "nft delete table ip nodeproxy")
	require.NoError(t, d.WaitForAfter(line, harness.Limit, "it has been repaired"))
	serve("n2a")
	require.NoError(t, d.Stop())
	for _, line := range d.Log() {
		if strings.Contains(line, "level=ERROR") || strings.Contains(line, "level=WARN") && !strings.Contains(line, "it has been repaired") {
			t.Error(line)
		}
	}
	output(t, w, "iptables-nft -t nat -N KUBE-SERVICES")
	const stays = "chains of variant nft stay"
	d = w.Run(t, harness.NFT, "--mode=nftables", clusterCIDR)
	require.NoError(t, d.WaitFor(harness.Limit, "level=WARN", stays))
	require.NoError(t, d.Stop())
	output(t, w, "iptables-nft -t nat -X KUBE-SERVICES")
	if out := run("cleanup"); !strings.Contains(out, "nftables table ip nodeproxy\n") {
		t.Errorf("cleanup says %q", out)
	}
	if left := nftTablesOn(t, w.Node1()); left != "" {
		t.Errorf("cleanup leaves %s", left)
	}
}

// TestNFTablesServiceCIDRs: in mode nftables, new connections to an address of a ServiceCIDR that no Service has are dropped, as soon as
// the ServiceCIDR is there and until it goes; those to an unused port of a cluster IP are refused. Both are so for clients outside, for
// pods and for the node. Open connections go on, and the node's own addresses answer.
func TestNFTablesServiceCIDRs(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)

	// Somebody has addresses that become those of a ServiceCIDR: another host, by way of the node, and the node itself.
	further := map[int]netip.Prefix{4: netip.MustParsePrefix("10.97.0.0/16"), 6: netip.MustParsePrefix("fd00:10:97::/112")}
	free := map[int]netip.AddrPort{4: netip.MustParseAddrPort("10.97.0.5:80"), 6: netip.MustParseAddrPort("[fd00:10:97::5]:80")}
	own := map[int]netip.AddrPort{4: netip.MustParseAddrPort("10.97.0.9:80"), 6: netip.MustParseAddrPort("[fd00:10:97::9]:80")}
	node, host := w.Node1(), w.Nodes[1]
	for _, family := range families {
		for at, n := range map[netip.AddrPort]*harness.Node{free[family]: host, own[family]: node} {
			require.NoError(t, n.Netlink().AddrAdd(loLink(t, n), &netlink.Addr{IPNet: netlink.NewIPNet(at.Addr().AsSlice()), Flags: unix.IFA_F_NODAD}))
			require.NoError(t, w.ServeTCP(n.Netns, n.Name, at))
			require.NoError(t, w.ServeUDP(n.Netns, n.Name, at))
		}
		via(t, node.Netns, further[family], host.IP(family))
		via(t, w.Client.Netns, further[family], node.IP(family))
		via(t, host.Netns, netip.PrefixFrom(w.Client.IP(family), w.Client.IP(family).BitLen()), node.IP(family))
	}
	eachClient := func(check func(c *harness.Host, family int)) {
		var all []func()
		for _, family := range families {
			for _, c := range []*harness.Host{w.Client, w.Pod("n1c").Host, node.Host} {
				all = append(all, func() { check(c, family) })
			}
		}
		together(all...)
	}
	d := w.Run(t, harness.NFT, "--mode=nftables", clusterCIDR)

	var open []*harness.Conversation
	var mu sync.Mutex
	eachClient(func(c *harness.Host, family int) {
		wantServers(t, c, free[family], host.Name)
		wantServers(t, c, own[family], node.Name)
		wantOutcome(t, c, netip.AddrPortFrom(clusterIP(1, family).Addr(), 4444), harness.Refused)
		conversation, err := c.Converse(free[family])
		if err != nil {
			t.Errorf("%s from %s: %v", free[family], c.Name, err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		open = append(open, conversation)
	})
	add := func() {
		w.Write(t, "cidr.yaml", &networking.ServiceCIDR{
			TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"},
			ObjectMeta: metav1.ObjectMeta{Name: "further"},
			Spec:       networking.ServiceCIDRSpec{CIDRs: []string{further[4].String(), further[6].String()}},
		})
	}
	for range 2 {
		line := len(d.Log())
		begin := time.Now()
		add()
		require.NoError(t, d.WaitForAfter(line, harness.Limit, "msg=syncing"))
		eventually(t, "the ServiceCIDR is there", ends(w.Client, free[4], harness.TimedOut))
		t.Logf("dropped %v after the ServiceCIDR was there, of which a request takes %v", time.Since(begin).Round(time.Millisecond), harness.Brief)
		eachClient(func(c *harness.Host, family int) {
			wantOutcome(t, c, free[family], harness.TimedOut)
			wantServers(t, c, own[family], node.Name)
			wantServers(t, c, clusterIP(1, family), "n1a", "n2a")
		})
		for i, c := range open {
			assert.NoError(t, c.Echo(fmt.Sprint("still ", i)))
		}
		w.Remove(t, "cidr.yaml")
		eventually(t, "the ServiceCIDR is gone", answers(w.Client, free[4], host.Name))
		eachClient(func(c *harness.Host, family int) { wantServers(t, c, free[family], host.Name) })
	}
	// A Service may get such an address.
	add()
	eventually(t, "the ServiceCIDR is there", ends(w.Client, free[4], harness.TimedOut))
	s := harness.Service("new", 2)
	s.Spec.ClusterIP, s.Spec.ClusterIPs = free[4].Addr().String(), []string{free[4].Addr().String(), free[6].Addr().String()}
	w.Write(t, "new.yaml", harness.Objects(s, w.Ready("n1b")...)...)
	for _, family := range families {
		eventually(t, "the new Service", answers(w.Client, netip.AddrPortFrom(free[family].Addr(), harness.ServicePort), "n1b"))
	}
	eachClient(func(c *harness.Host, family int) {
		wantServers(t, c, netip.AddrPortFrom(free[family].Addr(), harness.ServicePort), "n1b")
		wantOutcome(t, c, netip.AddrPortFrom(free[family].Addr(), 4444), harness.Refused)
	})
}

// via leads a range by way of a neighbour.
func via(t *testing.T, n *harness.Netns, to netip.Prefix, gateway netip.Addr) {
	t.Helper()
	routes, err := n.Netlink().RouteGet(gateway.AsSlice())
	if err != nil || len(routes) != 1 {
		t.Fatalf("the route to %s: %v, %v", gateway, routes, err)
	}
	_, dst, err := net.ParseCIDR(to.String())
	require.NoError(t, err)
	require.NoError(t, n.Netlink().RouteReplace(&netlink.Route{LinkIndex: routes[0].LinkIndex, Dst: dst, Gw: gateway.AsSlice()}))
}

func loLink(t *testing.T, n *harness.Node) netlink.Link {
	t.Helper()
	l, err := n.Netlink().LinkByName("lo")
	require.NoError(t, err)
	return l
}
