package host

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/internal/set"
	"nodeproxy/plan"
)

const deviceName = "kube-ipvs0"

func openDevice(t testing.TB) *Device {
	t.Helper()
	d, err := OpenDevice(deviceName)
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// addrs parses addresses.
func addrs(texts ...string) (out []netip.Addr) {
	for _, text := range texts {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

func addrSet(texts ...string) set.Set[netip.Addr] { return set.Of(addrs(texts...)...) }

func TestDevice(t *testing.T) {
	nstest.Enter(t)
	assert.NoError(t, RemoveDevice(deviceName), "removing what is not there")
	assert.NoError(t, CheckDevice(deviceName), "before it is made")
	before := DeviceExists(deviceName)
	openDevice(t)
	assert.NoError(t, CheckDevice(deviceName), "once it is there")
	if before || !DeviceExists(deviceName) {
		t.Errorf("the interface exists: before it is made %v, then %v", before, !before)
	}
	d := openDevice(t) // and again
	show := nstest.Exec(t, "ip", "-d", "link", "show", deviceName) + nstest.Exec(t, "ip", "addr", "show", deviceName)
	for _, part := range []string{"NOARP", ",UP", "dummy", "addrgenmode none"} {
		if !strings.Contains(show, part) {
			t.Errorf("no %q in: %s", part, show)
		}
	}
	if strings.Contains(show, "inet") {
		t.Errorf("it has an address: %s", show)
	}
	nstest.Exec(t, "ip", "addr", "add", "10.96.0.3/32", "dev", deviceName) // as kube-proxy has it
	all := addrs("10.96.0.1", "10.96.0.2", "10.96.0.3", "fd00::1", "fd00::2")
	require.NoError(t, d.AddAddresses(all))
	assert.NoError(t, d.AddAddresses(all), "again")
	compare := func(f plan.Family, want ...string) {
		t.Helper()
		if got, err := d.Addresses(f); err != nil || !maps.Equal(got, addrSet(want...)) {
			t.Errorf("%s: %v, %v; want %v", f, got, err, want)
		}
		if got, err := d.Routes(f); err != nil || len(got) != 0 {
			t.Errorf("routes of %s: %v, %v", f, got, err)
		}
	}
	compare(plan.IPv4, "10.96.0.1", "10.96.0.2", "10.96.0.3")
	compare(plan.IPv6, "fd00::1", "fd00::2")
	show = nstest.Exec(t, "ip", "addr", "show", deviceName)
	if strings.Count(show, " nodad") != 2 || !strings.Contains(show, "10.96.0.1/32 scope host") {
		t.Errorf("addresses are not as they should: %s", show)
	}
	for range 2 {
		require.NoError(t, d.RemoveAddresses([]netip.Addr{all[0], all[2], all[3]}))
	}
	compare(plan.IPv4, "10.96.0.2")
	compare(plan.IPv6, "fd00::2")

	// What is wrong with one must not concern the others.
	err := d.AddAddresses(addrs("10.96.0.8", "ff02::5", "fd00::8"))
	if err == nil || !strings.Contains(err.Error(), "adding address ff02::5 of interface kube-ipvs0") {
		t.Errorf("a multicast address: %v", err)
	}
	compare(plan.IPv4, "10.96.0.2", "10.96.0.8")
	compare(plan.IPv6, "fd00::2", "fd00::8")

	for range 2 {
		require.NoError(t, RemoveDevice(deviceName))
	}
	nstest.Exec(t, "ip", "link", "add", deviceName, "type", "bridge")
	if _, err := OpenDevice(deviceName); err == nil || !strings.Contains(err.Error(), "of type bridge") {
		t.Errorf("a bridge of that name: %v", err)
	}
}

// TestDeviceWithIPv6OffByDefault: the interface gets addresses of IPv6 on a node where new interfaces have IPv6 off, also after
// another program has removed it; and no other interface is changed.
func TestDeviceWithIPv6OffByDefault(t *testing.T) {
	nstest.Enter(t)
	const byDefault = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
	require.NoError(t, os.WriteFile(byDefault, []byte("1"), 0o644))
	d := openDevice(t)
	all := addrs("10.96.0.1", "fd00::1")
	if err := d.AddAddresses(all[1:]); err == nil {
		t.Error("an address was added with IPv6 off: this test shows nothing")
	}
	if err := d.EnableIPv6("/nonexistent"); err == nil || !strings.Contains(err.Error(), "disable_ipv6") {
		t.Errorf("a setting that can't be made: %v", err)
	}
	require.NoError(t, d.EnableIPv6("/proc/sys"))
	require.NoError(t, d.AddAddresses(all))
	nstest.Exec(t, "ip", "link", "delete", deviceName)
	if mended, err := d.Ensure(); err != nil || mended == "" {
		t.Fatalf("%q, %v", mended, err)
	}
	assert.NoError(t, d.AddAddresses(all), "after the interface was removed")
	nstest.Exec(t, "ip", "link", "delete", deviceName)
	d.sysctlDir = "/nonexistent"
	for i := range 2 {
		if _, err := d.Ensure(); err == nil {
			t.Errorf("attempt %d to make the interface again passes with IPv6 off", i+1)
		}
	}
	d.sysctlDir = "/proc/sys"
	if _, err := d.Ensure(); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, d.AddAddresses(all))
	if value, err := os.ReadFile(byDefault); err != nil || strings.TrimSpace(string(value)) != "1" {
		t.Errorf("the default is %s, %v", value, err)
	}
}

// TestAddressesAreLocal: when addresses have been added, packets to them are the node's, be it one or many.
func TestAddressesAreLocal(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	number := 0
	for _, count := range []int{1, 1, 1, 5, 60, 400} {
		var all []netip.Addr
		for range count {
			number++
			all = append(all, netip.MustParseAddr(fmt.Sprintf("10.96.%d.%d", number/250, number%250)), netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", number)))
		}
		require.NoError(t, d.AddAddresses(all))
		for _, a := range all {
			route, err := netlink.RouteGet(a.AsSlice())
			if err != nil || len(route) != 1 || route[0].Type != unix.RTN_LOCAL {
				t.Fatalf("%s, one of %d: %v, %v", a, count, route, err)
			}
		}
	}
}

// TestAddressesThatGo: an address that somebody removes before it is local is not waited for.
func TestAddressesThatGo(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	for _, count := range []int{1, 200} {
		var all []netip.Addr
		for i := range count {
			all = append(all, netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", i+1)))
		}
		require.NoError(t, d.AddAddresses(all))
		nstest.Exec(t, "ip", "-6", "address", "flush", "dev", deviceName)
		assert.NoError(t, d.waitLocal(all), "%d addresses that are gone are waited for", count)
	}
	require.NoError(t, RemoveDevice(deviceName))
	assert.NoError(t, d.waitLocal(addrs("fd00:96::1")), "addresses of an interface that is gone are waited for")
}

// TestSourceAddress sends to another network through an interface without an address: a VIP must not become the source.
func TestSourceAddress(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	require.NoError(t, d.AddAddresses(addrs("10.96.0.1", "fd00::1")))
	nstest.Exec(t, "ip", "link", "add", "out0", "type", "dummy")
	nstest.Exec(t, "ip", "link", "set", "out0", "up")
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.7/32", "dev", "lo")
	nstest.Exec(t, "ip", "addr", "add", "2001:db8::7/128", "dev", "lo", "nodad")
	nstest.Exec(t, "ip", "route", "add", "10.0.0.0/8", "dev", "out0")
	nstest.Exec(t, "ip", "route", "add", "fd00::/16", "dev", "out0")
	for to, from := range map[string]string{
		"10.97.0.1": "192.0.2.7", "fd00:1::1": "2001:db8::7",
		"10.96.0.1": "10.96.0.1", "fd00::1": "fd00::1", // and the node's own connections to a VIP come from the VIP
	} {
		if got := nstest.Exec(t, "ip", "route", "get", to); !strings.Contains(got, "src "+from+" ") {
			t.Errorf("to %s: %s; want source %s", to, got, from)
		}
	}
}

func TestRoutes(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	require.NoError(t, d.AddAddresses(addrs("192.0.2.1", "2001:db8::1")))
	compare := func(f plan.Family, want map[netip.Prefix]netip.Addr) {
		t.Helper()
		if got, err := d.Routes(f); err != nil || !maps.Equal(got, want) {
			t.Errorf("%s: %v, %v; want %v", f, got, err, want)
		}
	}
	for _, c := range []struct {
		f           plan.Family
		p           netip.Prefix
		inside, src string
	}{
		{plan.IPv4, netip.MustParsePrefix("10.96.0.0/12"), "10.100.1.1", "192.0.2.1"},
		{plan.IPv6, netip.MustParsePrefix("fd00::/108"), "fd00::1:2", "2001:db8::1"},
	} {
		for _, src := range []string{"", c.src, c.src} { // The third time changes nothing.
			var want netip.Addr
			if src != "" {
				want = netip.MustParseAddr(src)
			}
			require.NoError(t, d.AddRoute(c.p, want))
			compare(c.f, map[netip.Prefix]netip.Addr{c.p: want})
			got := nstest.Exec(t, "ip", "route", "get", c.inside)
			if !strings.HasPrefix(got, "local "+c.inside) || !strings.Contains(got, "src "+src) {
				t.Errorf("route to %s: %s", c.inside, got)
			}
		}
		for range 2 {
			require.NoError(t, d.RemoveRoute(c.p))
		}
		compare(c.f, map[netip.Prefix]netip.Addr{})
	}
	err := d.AddRoute(netip.MustParsePrefix("10.96.0.0/12"), netip.MustParseAddr("192.0.2.99"))
	if err == nil || !strings.Contains(err.Error(), "10.96.0.0/12") {
		t.Errorf("a source that is not the node's: %v", err)
	}
}

// hostAddresses are those of all interfaces but one.
func hostAddresses(f plan.Family) (set.Set[netip.Addr], error) {
	list, err := Filter{Except: []string{deviceName}}.Addresses(f)
	out := set.Set[netip.Addr]{}
	for _, a := range list {
		out.Insert(a.Addr)
	}
	return out, err
}

func TestHostAddresses(t *testing.T) {
	nstest.Enter(t)
	nstest.Exec(t, "ip", "link", "add", "eth0", "type", "dummy")
	nstest.Exec(t, "ip", "link", "set", "eth0", "addrgenmode", "none")
	nstest.Exec(t, "ip", "link", "set", "eth0", "up")
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "eth0")
	nstest.Exec(t, "ip", "addr", "add", "2001:db8::1/64", "dev", "eth0", "nodad")
	nstest.Exec(t, "ip", "addr", "add", "fe80::5/64", "dev", "eth0", "nodad")
	compare := func() {
		t.Helper()
		for f, want := range map[plan.Family][]string{plan.IPv4: {"127.0.0.1", "192.0.2.1"}, plan.IPv6: {"::1", "2001:db8::1"}} {
			if got, err := hostAddresses(f); err != nil || !maps.Equal(got, addrSet(want...)) {
				t.Errorf("%s: %v, %v; want %v", f, got, err, want)
			}
		}
	}
	compare()
	d := openDevice(t)
	require.NoError(t, d.AddAddresses(addrs("10.96.0.1", "fd00::1")))
	compare()
}

// quiet is how long a watch waits for more changes.
const quiet = 100 * time.Millisecond

func TestWatchAddresses(t *testing.T) {
	nstest.Enter(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	d := openDevice(t)
	calls := make(chan struct{}, 100)
	ended := make(chan error)
	ns, err := netns.Get()
	require.NoError(t, err)
	defer ns.Close()
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			ended <- err
			return
		}
		ended <- Filter{Except: []string{deviceName}}.Watch(ctx, quiet, func() { calls <- struct{}{} })
	}()
	none := func() int {
		n := 0
		for {
			select {
			case <-calls:
				n++
			case <-time.After(4 * quiet):
				return n
			}
		}
	}
	count := func() int { // of calls of which there must be one
		select {
		case <-calls:
			return 1 + none()
		case <-time.After(time.Minute):
			return 0
		}
	}
	if n := count(); n != 1 {
		t.Errorf("%d calls at the beginning, want 1", n)
	}
	require.NoError(t, d.AddAddresses(addrs("10.96.0.1", "fd00::1")))
	if n := none(); n != 0 {
		t.Errorf("%d calls for addresses of the interface that is left out", n)
	}
	nstest.Exec(t, "ip", "addr", "add", "fe80::5/64", "dev", "lo")
	nstest.Exec(t, "ip", "addr", "del", "fe80::5/64", "dev", "lo")
	if n := none(); n != 0 {
		t.Errorf("%d calls for a link-local address, as every interface of a pod has one", n)
	}
	for _, change := range []string{"add", "del"} {
		var flags []string
		if change == "add" { // Another notification would say, in its own time, that no other host has the address.
			flags = []string{"nodad"}
		}
		for _, a := range []string{"192.0.2.1/32", "2001:db8::1/128"} {
			nstest.Exec(t, "ip", append([]string{"addr", change, a, "dev", "lo"}, flags...)...)
			if n := count(); n != 1 {
				t.Errorf("%d calls for %s %s, want 1", n, change, a)
			}
		}
	}

	// More than the socket holds. The interface is not the one that is left out.
	other, err := OpenDevice("other")
	require.NoError(t, err)
	defer other.Close()
	var many []netip.Addr
	for i := range 2000 {
		many = append(many, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))
	}
	require.NoError(t, other.AddAddresses(many))
	if n := count(); n == 0 || n > len(many)/10 {
		t.Errorf("%d calls for %d addresses at once", n, len(many))
	}
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
	if n := count(); n != 1 {
		t.Errorf("%d calls for an address after that, want 1", n)
	}
	cancel()
	require.NoError(t, <-ended)
	nstest.Exec(t, "ip", "addr", "del", "192.0.2.1/32", "dev", "lo")
	if n := none(); n != 0 {
		t.Errorf("%d calls after the end", n)
	}
}

func BenchmarkAddresses(b *testing.B) {
	for _, n := range []int{1000, 5000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			nstest.Enter(b)
			d := openDevice(b)
			addrs := make([]netip.Addr, n)
			for i := range addrs {
				addrs[i] = netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
			}
			for b.Loop() {
				require.NoError(b, d.AddAddresses(addrs))
				b.StopTimer()
				require.NoError(b, d.RemoveAddresses(addrs))
				b.StartTimer()
			}
		})
	}
}
