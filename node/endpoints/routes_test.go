package endpoints

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// TestLookOut: what the kernel has no route to, and whether it forwards.
func TestLookOut(t *testing.T) {
	nstest.Enter(t)
	for _, line := range []string{
		"link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0",
		"addr add 2001:db8::1/64 dev eth0 nodad", "route add 10.244.1.0/24 via 192.0.2.9", "route add blackhole 10.244.2.0/24",
		"route add unreachable 10.244.3.0/24", "route add prohibit 10.244.4.0/24",
	} {
		nstest.Exec(t, "ip", strings.Fields(line)...)
	}
	type result struct {
		unreached    map[netip.Addr]string
		notForwarded []plan.Family
	}
	look := func(list ...string) result {
		t.Helper()
		var addrs []netip.Addr
		for _, a := range list {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		unreached, notForwarded, err := LookOut(t.Context(), "/proc/sys", addrs)
		if err != nil {
			t.Fatal(err)
		}
		return result{unreached, notForwarded}
	}
	forward := func(setting, value string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join("/proc/sys/net", setting), []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	forward("ipv4/ip_forward", "1")
	forward("ipv6/conf/all/forwarding", "1")
	at := netip.MustParseAddr
	want := result{unreached: map[netip.Addr]string{
		at("10.244.2.5"): "its route is of type blackhole", at("10.244.3.5"): "its route is of type unreachable",
		at("10.244.4.5"): "its route is of type prohibit", at("10.244.5.5"): "network is unreachable",
	}}
	got := look("192.0.2.1", "10.244.1.5", "10.244.2.5", "10.244.3.5", "10.244.4.5", "10.244.5.5", "2001:db8::5")
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}

	forward("ipv4/ip_forward", "0")
	forward("ipv6/conf/all/forwarding", "0")
	if got, want := look("10.244.1.5", "2001:db8::5"), (result{map[netip.Addr]string{}, []plan.Family{plan.IPv4, plan.IPv6}}); !reflect.DeepEqual(got, want) {
		t.Errorf("without forwarding: %+v, want %+v", got, want)
	}
	if got := look("192.0.2.1", "2001:db8::1"); len(got.notForwarded) > 0 {
		t.Errorf("to the node itself, nothing is forwarded: %+v", got)
	}
	forward("ipv4/conf/eth0/forwarding", "1")
	if got := look("10.244.1.5"); len(got.notForwarded) > 0 {
		t.Errorf("from one interface: %+v", got)
	}
}
