package endpoints

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/inspect/reality"
	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// ip runs commands of ip, a line each.
func ip(t *testing.T, lines ...string) {
	t.Helper()
	for _, line := range lines {
		nstest.Exec(t, "ip", strings.Fields(line)...)
	}
}

// write writes a setting below a directory, such as /proc/sys/net.
func write(t *testing.T, dir, setting, value string) {
	t.Helper()
	path := filepath.Join(dir, setting)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(value), 0o644))
}

// lookOut returns the ways to places by what See sees.
func lookOut(t *testing.T, sysctls string, to reality.Places, from ...reality.Origin) *reality.Ways {
	t.Helper()
	found, err := See(sysctls).LookOut(t.Context(), to, from)
	require.NoError(t, err)
	return found
}

func addrs(list ...string) (out []netip.Addr) {
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

// TestLookOut: what the kernel has no route to, and whether it forwards.
func TestLookOut(t *testing.T) {
	nstest.Enter(t)
	ip(t,
		"link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0",
		"addr add 2001:db8::1/64 dev eth0 nodad", "route add 10.244.1.0/24 via 192.0.2.9", "route add blackhole 10.244.2.0/24",
		"route add unreachable 10.244.3.0/24", "route add prohibit 10.244.4.0/24",
	)
	type result struct {
		unreached    map[netip.Addr]string
		notForwarded []plan.Family
	}
	look := func(list ...string) result {
		t.Helper()
		found := lookOut(t, "/proc/sys", reality.Places{Endpoints: addrs(list...)})
		return result{found.Unreached, found.NotForwarded}
	}
	forward := func(setting, value string) { write(t, "/proc/sys/net", setting, value) }
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
	if got, want := look("10.244.1.5", "2001:db8::5"), (result{nil, []plan.Family{plan.IPv4, plan.IPv6}}); !reflect.DeepEqual(got, want) {
		t.Errorf("without forwarding: %+v, want %+v", got, want)
	}
	for { // The kernel takes an address for its own a moment after it has been added.
		if r, err := host.RouteTo(at("2001:db8::1"), host.Way{}); err == nil && r.Local {
			break
		}
		time.Sleep(time.Millisecond) // a poll interval
	}
	if got := look("192.0.2.1", "2001:db8::1"); len(got.notForwarded) > 0 {
		t.Errorf("to the node itself, nothing is forwarded: %+v", got)
	}
	forward("ipv4/conf/eth0/forwarding", "1")
	if got := look("10.244.1.5"); len(got.notForwarded) > 0 {
		t.Errorf("from one interface: %+v", got)
	}
}

// TestPodsHere: the range of this node's Pods and the interface by which they come, where a bridge has it or each Pod a route; and the addresses of this node
// at which others may look for node ports, though its interface is one end of a pair.
func TestPodsHere(t *testing.T) {
	nstest.Enter(t)
	all, elsewhere := netip.MustParsePrefix("10.244.0.0/16"), fmt.Sprint(nstest.Elsewhere(t))
	see := func(want string, known ...string) {
		t.Helper()
		if pods, by := See("/proc/sys").PodsHere(all, addrs(known...)); fmt.Sprintf("%s by %q", pods, by) != want {
			t.Errorf("%s by %q, want %s", pods, by, want)
		}
	}
	ip(t, "link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0",
		"addr add 198.51.100.1/24 dev eth0", "route add default via 192.0.2.9", "route add 10.244.2.0/24 via 192.0.2.9",
		"link add docker0 type bridge", "link set docker0 up", "addr add 10.244.9.1/24 dev docker0",
		"link add cni0 type bridge", "link set cni0 up", "addr add 10.244.1.1/24 dev cni0")
	see(`invalid Prefix by ""`) // A bridge without Pods may be left over.
	ip(t, "link add veth1 type veth peer name eth0 netns "+elsewhere, "link set veth1 master cni0 up")
	see(`10.244.1.0/24 by "cni0"`)
	see(`10.244.1.0/24 by "cni0"`, "10.244.1.7")
	ip(t, "link add cali1 type veth peer name eth1 netns "+elsewhere, "link set cali1 up", "route add 10.244.3.7 dev cali1")
	see(`10.244.0.0/16 by ""`)
	ip(t, "link del cni0")
	see(`10.244.0.0/16 by ""`, "10.244.3.7")
	if got, err := See("/proc/sys").Outward(func(netip.Addr) bool { return true }); err != nil || len(got) != 2 {
		t.Errorf("others may use %v, %v", got, err)
	}
	if a := netip.MustParseAddr("192.0.2.99"); !Near(a) {
		t.Errorf("%s is not near", a)
	}
	ip(t, "neigh add proxy 192.0.2.99 dev eth0")
	if a := netip.MustParseAddr("192.0.2.99"); Near(a) {
		t.Errorf("%s is near, though this node answers for it", a)
	}
}

// TestTunnels: the interfaces by which packets for endpoints leave in packets of another protocol.
func TestTunnels(t *testing.T) {
	nstest.Enter(t)
	ip(t,
		"link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0",
		"link add flannel.1 type vxlan id 1 dev eth0 dstport 8472", "link set flannel.1 up", "route add 10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink",
		"neigh add 10.244.2.0 dev flannel.1 lladdr 02:00:00:00:00:02 nud permanent",
	)
	nstest.Exec(t, "bridge", "fdb", "add", "02:00:00:00:00:02", "dev", "flannel.1", "dst", "192.0.2.9")
	sp := &plan.ServicePort{}
	for _, a := range []string{"192.0.2.1:80", "192.0.2.2:80", "10.244.2.5:80", "10.244.2.6:80", "198.51.100.1:80"} {
		sp.Endpoints.Cluster = append(sp.Endpoints.Cluster, plan.Endpoint{Addr: netip.MustParseAddrPort(a)})
	}
	got := See("/proc/sys").Tunnels([]*plan.ServicePort{sp})
	if want := []reality.Tunnel{{Name: "flannel.1", Protocol: unix.IPPROTO_UDP, Port: 8472, By: "eth0", Peer: netip.MustParseAddr("192.0.2.9")}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestLookOutNeighbours: next hops that do not answer, bridges whose packets pass no rule, cluster IPs that this node can't send to, and external IPs that
// nobody may have.
func TestLookOutNeighbours(t *testing.T) {
	nstest.Enter(t)
	ip(t,
		"link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0",
		"link add cni0 type bridge", "link set cni0 up", "addr add 10.244.1.1/24 dev cni0", "route add 10.244.2.0/24 via 192.0.2.9", "route add 10.244.3.0/24 via 192.0.2.8",
		"link add veth5 type veth peer name pod5", "link set veth5 master cni0 up", "link add veth6 type veth peer name pod6", "link set veth6 master cni0 up", "link set veth6 type bridge_slave hairpin on",
		"neigh add 10.244.1.5 dev cni0 lladdr 02:00:00:00:00:05 nud reachable", "neigh add 10.244.1.6 dev cni0 lladdr 02:00:00:00:00:06 nud reachable",
		"neigh add 192.0.2.9 dev eth0 nud failed", "neigh add 192.0.2.8 dev eth0 lladdr 02:00:00:00:00:01 nud reachable", "neigh add 10.244.1.23 dev cni0 nud incomplete",
	)
	nstest.Exec(t, "bridge", "fdb", "add", "02:00:00:00:00:05", "dev", "veth5", "master", "static")
	nstest.Exec(t, "bridge", "fdb", "add", "02:00:00:00:00:06", "dev", "veth6", "master", "static")
	at := netip.MustParseAddr
	look := func(sysctls string) *reality.Ways {
		t.Helper()
		return lookOut(t, sysctls, reality.Places{Endpoints: addrs("10.244.1.5", "10.244.1.6", "10.244.1.23", "10.244.2.5", "10.244.3.5"),
			ClusterIPs: addrs("10.96.0.10"), ExternalIPs: addrs("192.0.2.240", "192.0.2.1", "203.0.113.1")})
	}
	sysctls := t.TempDir()
	want := &reality.Ways{Near: map[netip.Addr]string{at("10.244.1.23"): "cni0"}, Cut: map[netip.Addr]string{at("10.96.0.10"): "network is unreachable"},
		Silent:    map[netip.Addr]string{at("10.244.1.23"): "10.244.1.23 at cni0", at("10.244.2.5"): "192.0.2.9 at eth0"},
		Bridged:   map[netip.Addr]string{at("10.244.1.5"): "cni0", at("10.244.1.6"): "cni0", at("10.244.1.23"): "cni0"},
		Unclaimed: map[netip.Addr]string{at("192.0.2.240"): "eth0"},
	}
	if got := look(sysctls); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	write(t, sysctls, "net/bridge/bridge-nf-call-iptables", "1\n")
	nstest.Exec(t, "ip", "route", "add", "default", "via", "192.0.2.8")
	want.Uplink, want.ByDefault = "eth0", map[netip.Addr]string{at("10.244.3.5"): "192.0.2.8 by eth0"}
	want.Bridged, want.Cut, want.NoHairpin = nil, nil, map[netip.Addr]string{at("10.244.1.5"): "veth5"}
	if got := look(sysctls); !reflect.DeepEqual(got, want) {
		t.Errorf("with br_netfilter and a default route: %+v, want %+v", got, want)
	}
	for _, off := range []string{"eth0", "cni0"} {
		for _, of := range []string{"eth0", "cni0"} {
			write(t, sysctls, "net/ipv4/conf/"+of+"/forwarding", map[bool]string{true: "0\n", false: "1\n"}[of == off])
		}
		want.NotForwardedBy = []string{off}
		if got := look(sysctls); !reflect.DeepEqual(got, want) {
			t.Errorf("where packets that come by %s are not forwarded: %+v, want %+v", off, got, want)
		}
	}
	if name := See("/proc/sys").Uplink; name != "eth0" {
		t.Errorf("packets from outside come by %q", name)
	}
}

// TestLookOutElsewhere: packets and answers that take another way than they should, or none: by entries and rules that somebody has made, by the default
// route, and by IPsec.
func TestLookOutElsewhere(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	ip(t, "link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0", "route add default via 192.0.2.8",
		"link add cni0 type bridge", "link set cni0 up", "addr add 10.244.1.1/24 dev cni0", "route add 10.244.2.0/24 via 192.0.2.9",
		"link add out type veth peer name out-peer", "link set out up", "link set out-peer up", "addr add 203.0.113.1/24 dev out")
	write(t, "/proc/sys/net", "ipv4/ip_forward", "1")
	at := netip.MustParseAddr
	here, elsewhere, strange := at("10.244.1.5"), at("10.244.2.5"), at("10.244.3.5")
	type result struct {
		fixed, byDefault, astray, shut map[netip.Addr]string
		marked                         bool
	}
	want := result{byDefault: map[netip.Addr]string{strange: "192.0.2.8 by eth0"}}
	look := func(when string) {
		t.Helper()
		w := lookOut(t, "/proc/sys", reality.Places{Endpoints: []netip.Addr{here, elsewhere, strange}})
		if got := (result{w.Fixed, w.ByDefault, w.Astray, w.Shut, w.Marked}); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
	}
	look("as it should be")
	ip(t, "neigh add 192.0.2.9 dev eth0 lladdr 02:00:00:00:00:09 nud permanent")
	want.fixed = map[netip.Addr]string{elsewhere: "192.0.2.9 at eth0 (lladdr 02:00:00:00:00:09)"}
	look("with an entry that somebody has made")
	ip(t, "route add default via 203.0.113.9 table 100", "rule add from 10.244.0.0/16 table 100")
	want.astray = map[netip.Addr]string{here: "out", elsewhere: "out", strange: "out"}
	look("with a rule for what comes from Pods")
	ip(t, "route replace local default dev lo table 100")
	want.astray = map[netip.Addr]string{here: "lo", elsewhere: "lo", strange: "lo"}
	look("with a rule by which this node keeps what comes from Pods, as one for a transparent proxy that lacks its mark")
	ip(t, "route flush table 100", "route add default via 203.0.113.9 table 100")
	want.astray = map[netip.Addr]string{here: "out", elsewhere: "out", strange: "out"}
	ip(t, "rule add fwmark 7 table main")
	want.marked = true
	look("with a rule for marks")
	ip(t, "link add pod type veth peer name eth0 netns "+fmt.Sprint(nstest.Elsewhere(t)), "link set eth0 mtu 1400", "link set pod master cni0")
	w := lookOut(t, "/proc/sys", reality.Places{Endpoints: []netip.Addr{here}})
	if w.Narrow != "eth0" || w.PodMTU != 1500 || w.NarrowMTU != 1400 {
		t.Errorf("with a narrow uplink: %+v", w)
	}
	ip(t, "link add flannel.1 type vxlan id 1 dstport 8472 local 192.0.2.1 dev eth0", "link set flannel.1 up", "route add 10.244.7.0/24 via 10.244.7.0 dev flannel.1 onlink",
		"neigh add 10.244.7.0 dev flannel.1 lladdr 02:00:00:00:00:07 nud permanent", "addr add 192.0.2.129/25 dev cni0")
	nstest.Exec(t, "bridge", "fdb", "add", "02:00:00:00:00:07", "dev", "flannel.1", "dst", "192.0.2.1", "self")
	w = lookOut(t, "/proc/sys", reality.Places{Endpoints: []netip.Addr{at("10.244.7.5")}})
	if w.Looped[at("10.244.7.5")] != "flannel.1 to 192.0.2.1" || !slices.Equal(w.Overlaps, []string{"192.0.2.128/25 of cni0 and 192.0.2.0/24 of eth0"}) || len(w.Fixed) > 0 {
		t.Errorf("with a tunnel to this node: %+v", w)
	}
	nstest.Exec(t, "bridge", "fdb", "del", "02:00:00:00:00:07", "dev", "flannel.1", "dst", "192.0.2.1", "self")
	w = lookOut(t, "/proc/sys", reality.Places{Endpoints: []netip.Addr{at("10.244.7.5")}, ClusterIPs: []netip.Addr{at("10.244.1.200"), at("10.96.0.10")}})
	if w.Lost[at("10.244.7.5")] != "10.244.7.0 at flannel.1" || len(w.Captive) != 1 || w.Captive[at("10.244.1.200")] != "cni0" {
		t.Errorf("with a tunnel that knows no host, and a cluster IP among Pods: %+v", w)
	}
	ip(t, "link del flannel.1", "addr del 192.0.2.129/25 dev cni0")
	ip(t, "xfrm policy add dir out src 0.0.0.0/0 dst 10.244.2.0/24 action block", "xfrm policy add dir fwd src 10.244.3.0/24 dst 0.0.0.0/0 action block",
		"xfrm policy add dir in src 0.0.0.0/0 dst 10.244.1.0/24 action block", "xfrm policy add dir out src 0.0.0.0/0 dst 0.0.0.0/0 action block priority 10",
		"xfrm policy add dir out src 0.0.0.0/0 dst 10.244.1.0/24 action allow priority 5")
	want.shut = map[netip.Addr]string{elsewhere: "0.0.0.0/0 to 10.244.2.0/24: action block", strange: "10.244.3.0/24 to 0.0.0.0/0: action block"}
	look("with policies of IPsec")
}

// TestUnrouted: rules for routing have no way for what comes from elsewhere, while this node itself has one.
func TestUnrouted(t *testing.T) {
	nstest.Enter(t)
	ip(t,
		"link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0",
		"link add pod1 type veth peer name pod", "link set pod1 up", "link set pod up", "route add 10.244.1.5/32 dev pod1", "route add default via 192.0.2.254",
		"route add 10.244.2.0/24 via 192.0.2.2", "route add 10.244.3.0/24 via 192.0.2.3",
		"rule add iif pod1 to 10.244.2.0/24 blackhole", "rule add iif eth0 lookup 200", "route add 10.244.4.0/24 via 192.0.2.4", "rule add fwmark 0x4000/0x4000 to 10.244.4.0/24 prohibit", "route add unreachable 10.244.3.0/24 table 200",
	)
	write(t, "/proc/sys/net", "ipv4/ip_forward", "1")
	outside, known := See("/proc/sys").Outside()
	if !known || outside.By != "eth0" {
		t.Fatalf("%+v, %t", outside, known)
	}
	at := netip.MustParseAddr
	pod := reality.Origin{Name: "Pods", By: "pod1", Addr: at("10.244.1.5")}
	masqueraded := outside
	masqueraded.Mark = 0x4000
	found := lookOut(t, "/proc/sys", reality.Places{Endpoints: addrs("10.244.1.5", "10.244.2.5", "10.244.3.5", "10.244.4.5")}, outside, masqueraded, pod)
	want := []reality.Unrouted{{Addr: at("10.244.2.5"), From: pod, Why: "its route is of type blackhole"}, {Addr: at("10.244.3.5"), From: outside, Why: "its route is of type unreachable"}, {Addr: at("10.244.4.5"), From: masqueraded, Why: "its route is of type prohibit"}}
	if !reflect.DeepEqual(found.Unrouted, want) || len(found.Unreached) > 0 {
		t.Errorf("%+v and %+v, want %+v", found.Unrouted, found.Unreached, want)
	}
	for _, setting := range []string{"conf/pod1/forwarding", "ip_forward"} {
		write(t, "/proc/sys/net/ipv4", setting, "0")
		found := lookOut(t, "/proc/sys", reality.Places{Endpoints: addrs("10.244.2.5")}, outside, pod)
		if len(found.Unrouted) > 0 || len(found.NotForwarded)+len(found.NotForwardedBy) == 0 {
			t.Errorf("%s is 0: of what is not forwarded, nothing else is said: %+v", setting, found)
		}
	}
}

// TestDetour: policy routing sends the packets of some clients another way.
func TestDetour(t *testing.T) {
	nstest.Enter(t)
	ip(t,
		"link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up", "addr add 192.0.2.1/24 dev eth0",
		"link add pod1 type veth peer name pod", "link set pod1 up", "link set pod up", "route add 10.244.1.5/32 dev pod1", "route add 10.244.1.6/32 dev pod1",
		"route add 10.244.2.0/24 via 192.0.2.2", "rule add from 10.244.1.5 lookup 200", "route add default via 192.0.2.254 table 200",
		"rule add from 10.244.1.7 lookup 201", "route add 10.244.1.7/32 dev pod1", "route add throw default table 201",
	)
	write(t, "/proc/sys/net", "ipv4/ip_forward", "1")
	for from, want := range map[string]string{
		"10.244.1.5": "what comes from 10.244.1.5 goes by eth0 via 192.0.2.254, and what this node sends there by eth0 via 192.0.2.2 (ip rule)",
		"10.244.1.6": "", "192.0.2.1": "", "10.244.1.7": "",
	} {
		if got := See("/proc/sys").Detour(netip.MustParseAddr(from), netip.MustParseAddr("10.244.2.5")); got != want {
			t.Errorf("from %s: %q, want %q", from, got, want)
		}
	}
	before := See("/proc/sys")
	ip(t, "link add pod2 type veth peer name other", "link set pod2 up", "link set other up", "route add 10.244.1.8/32 dev pod2")
	for _, way := range [][]netip.Addr{addrs("192.0.2.7", "10.244.1.8"), addrs("10.244.1.8", "192.0.2.7")} {
		if got := before.Detour(way[0], way[1]); got != "" {
			t.Errorf("to or from a Pod that came later: %q", got)
		}
	}
}
