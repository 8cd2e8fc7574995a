package health

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// addLink makes a link that is up, of the pair that every kernel has; the other end is up too.
func addLink(t *testing.T, name string) netlink.Link {
	t.Helper()
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer-" + name}
	require.NoError(t, netlink.LinkAdd(link))
	for _, end := range []string{"peer-" + name, name} {
		l, err := netlink.LinkByName(end)
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		require.NoError(t, err)
	}
	return link
}

func address(t *testing.T, text string) *netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(text)
	require.NoError(t, err)
	return a
}

func add(t *testing.T, link netlink.Link, text string) {
	t.Helper()
	require.NoError(t, netlink.AddrAdd(link, address(t, text)), "%s", text)
}

func del(t *testing.T, link netlink.Link, text string) {
	t.Helper()
	require.NoError(t, netlink.AddrDel(link, address(t, text)), "%s", text)
}

// TestAddressesComeAndGo: with ranges, sockets follow the host's addresses of both families, among them one that the kernel
// checks for a double first.
func TestAddressesComeAndGo(t *testing.T) {
	if !nstest.Process(t) {
		return
	}
	eth := addLink(t, "eth0")
	add(t, eth, "192.168.1.10/24")
	settings := plan.Settings{NodePortAddresses: plan.NodePortAddresses{CIDRs: []netip.Prefix{
		netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("fd00::/8")}}}
	b, number := newLive(t, settings), uint16(32000)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"), servicePort(svcA, "", plan.IPv6, number, "[fd00::1]:80+"))
	b.eventually("192.168.1.10", number, "200 1")
	b.eventually("127.0.0.1", number, "no answer")

	add(t, eth, "192.168.2.10/24")
	add(t, eth, "10.9.9.9/24")
	b.eventually("192.168.2.10", number, "200 1")
	b.eventually("10.9.9.9", number, "no answer")
	add(t, eth, "fd00::10/64")
	b.eventually("fd00::10", number, "200 1")

	del(t, eth, "192.168.2.10/24")
	eventually(t, "its socket is closed", func() bool { return !slices.Contains(listening(t), "192.168.2.10:32000") })
	add(t, eth, "192.168.2.10/24")
	b.eventually("192.168.2.10", number, "200 1")
	b.eventually("192.168.1.10", number, "200 1")
	if got := b.reported(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestPrimaryAddressChanges: with addresses "primary", sockets follow those in the node's status, once the host has them.
func TestPrimaryAddressChanges(t *testing.T) {
	if !nstest.Process(t) {
		return
	}
	eth := addLink(t, "eth0")
	add(t, eth, "192.168.1.10/24")
	b, number := newLive(t, plan.Settings{NodePortAddresses: plan.NodePortAddresses{Primary: true}}), uint16(32000)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"))
	b.plan.Node.IPs = []netip.Addr{netip.MustParseAddr("192.168.1.10")}
	b.Update(b.plan, plan.Everything())
	b.eventually("192.168.1.10", number, "200 1")
	b.plan.Node.IPs = []netip.Addr{netip.MustParseAddr("192.168.1.11")}
	b.Update(b.plan, plan.Everything())
	b.eventually("192.168.1.10", number, "no answer")
	add(t, eth, "192.168.1.11/24")
	b.eventually("192.168.1.11", number, "200 1")
}

// TestEveryAddress: without ranges one socket answers on every address of both families, those that come later too.
func TestEveryAddress(t *testing.T) {
	if !nstest.Process(t) {
		return
	}
	b, number := newLive(t, plan.Settings{}), uint16(32000)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"))
	b.eventually("127.0.0.1", number, "200 1")
	eth := addLink(t, "eth0")
	add(t, eth, "192.168.1.10/24")
	add(t, eth, "fd00::10/64")
	b.eventually("192.168.1.10", number, "200 1")
	b.eventually("fd00::10", number, "200 1")
	if got := listening(t); len(got) != 1 {
		t.Errorf("listening at %q", got)
	}
}

// TestServerAtEveryAddress: 0.0.0.0 means both families.
func TestServerAtEveryAddress(t *testing.T) {
	if !nstest.Process(t) {
		return
	}
	serve(t, Serving{Addrs: []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:10256")}, Log: slog.New(slog.DiscardHandler),
		Handler: http.HandlerFunc(pong)})
	for _, host := range []string{"127.0.0.1", "[::1]"} {
		eventually(t, host+" answers", func() bool {
			_, _, body, err := get("http://" + host + ":10256/")
			return err == nil && body == "ok"
		})
	}
}

// TestAddressesOfServices do not count as the node's.
func TestAddressesOfServices(t *testing.T) {
	if !nstest.Process(t) {
		return
	}
	add(t, addLink(t, "eth0"), "192.168.1.10/24")
	add(t, addLink(t, "kube-ipvs0"), "192.168.9.9/32")
	for _, tc := range []struct {
		not  []string
		want string
	}{{nil, "[127.0.0.1 192.168.1.10 192.168.9.9]"}, {[]string{"kube-ipvs0", "none"}, "[127.0.0.1 192.168.1.10]"}} {
		all, err := newKernelAddresses(tc.not).list()
		require.NoError(t, err)
		var v4 []netip.Addr
		for _, a := range all {
			if a.Is4() {
				v4 = append(v4, a)
			}
		}
		if fmt.Sprint(v4) != tc.want {
			t.Errorf("without %q: %s, want %s", tc.not, v4, tc.want)
		}
	}
}

// TestManyAddresses: one address that counts among thousands that do not is found soon.
func TestManyAddresses(t *testing.T) {
	if !nstest.Process(t) {
		return
	}
	eth := addLink(t, "eth0")
	settings := plan.Settings{NodePortAddresses: plan.NodePortAddresses{CIDRs: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")}}}
	b, number := newLive(t, settings), uint16(32000)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"))
	for i := range 5000 {
		add(t, eth, fmt.Sprintf("10.1.%d.%d/32", i/250, i%250+1))
	}
	start := time.Now()
	add(t, eth, "192.168.1.10/24")
	b.eventually("192.168.1.10", number, "200 1")
	t.Logf("listened at after %s", time.Since(start))
}

// listening lists the addresses of this namespace at which the test's port is listened at.
func listening(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, family := range []uint8{syscall.AF_INET, syscall.AF_INET6} {
		sockets, err := netlink.SocketDiagTCP(family)
		require.NoError(t, err)
		for _, s := range sockets {
			const listen = 10 // TCP_LISTEN
			if s.State == listen && s.ID.SourcePort == 32000 {
				ip, _ := netip.AddrFromSlice(s.ID.Source)
				out = append(out, netip.AddrPortFrom(ip, s.ID.SourcePort).String())
			}
		}
	}
	return out
}
