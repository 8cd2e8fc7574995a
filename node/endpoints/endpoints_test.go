package endpoints

import (
	"bufio"
	"cmp"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/inspect/reality"
	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// podVariable has the addresses at which a process of a Pod listens.
const podVariable = "NODEPROXY_TEST_POD"

// startPod starts a process in a network namespace of its own that has an address, by a pair of interfaces, and listens.
func startPod(t *testing.T, name, address string, listen ...string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestLook$", "-test.timeout=4m")
	cmd.Env = append(os.Environ(), podVariable+"="+strings.Join(listen, ","))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	nstest.EndWith(t, cmd)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out := bufio.NewReader(nstest.Output(t, cmd))
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	nstest.Exec(t, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(cmd.Process.Pid))
	nstest.Exec(t, "ip", "link", "set", name, "up")
	nstest.Exec(t, "ip", "route", "add", address, "dev", name)
	fmt.Fprintln(in, address)
	if line, err := out.ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
}

// runPod is the process of a Pod. It ends with the test that started it.
func runPod(t *testing.T, listen string) {
	var address string
	if _, err := fmt.Scanln(&address); err != nil {
		t.Fatal(err)
	}
	ip(t, "link set lo up", "link set eth0 up", "addr add "+address+"/32 dev eth0", "route add default dev eth0")
	for _, at := range strings.Split(listen, ",") {
		switch at {
		case "asks":
			ip(t, "route replace 169.254.1.1 dev eth0", "route replace default via 169.254.1.1 dev eth0")
			continue
		case "unrouted":
			ip(t, "route del default")
			continue
		case "machine":
			ip(t, "tuntap add tap0 mode tap")
			continue
		case "stack":
			if _, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, int(bits.ReverseBytes16(unix.ETH_P_IP))); err != nil {
				t.Fatal(err)
			}
			continue
		}
		l, err := net.Listen("tcp", at)
		require.NoError(t, err)
		defer l.Close()
	}
	fmt.Println("ready")
	select {}
}

// TestLook: what listens at endpoints of this node, in Pods and on the host's network; nothing is said of others.
func TestLook(t *testing.T) {
	if listen := os.Getenv(podVariable); listen != "" {
		runPod(t, listen)
	}
	t.Parallel()
	nstest.Enter(t)
	pid := os.Getpid() // Other tests may run that have the usual addresses.
	podAt := func(n int) string { return fmt.Sprintf("10.%d.%d.%d", 240+n, pid>>8&0xff, pid&0xff) }
	ip(t, "addr add 192.0.2.1/24 dev lo")
	startPod(t, "good", podAt(1), "0.0.0.0:8080", "127.0.0.1:9090")
	startPod(t, "inside", podAt(2), "127.0.0.1:8080", "[::]:15006")
	startPod(t, "other", podAt(3), ":80", ":443")
	startPod(t, "machine", podAt(5), ":22", "machine") // as KubeVirt has it
	startPod(t, "sandbox", podAt(6), "stack")          // as gVisor has it
	ip(t, "link add unseen type veth peer name peer", "link set unseen up")
	nstest.Exec(t, "ip", "route", "add", podAt(4), "dev", "unseen")
	l, err := net.Listen("tcp", "192.0.2.1:8081")
	require.NoError(t, err)
	defer l.Close()

	sp := &plan.ServicePort{Key: plan.Key{Protocol: plan.TCP, Family: plan.IPv4}}
	add := func(address string, port uint16) netip.AddrPort {
		a := netip.AddrPortFrom(netip.MustParseAddr(address), port)
		sp.Endpoints.Cluster = append(sp.Endpoints.Cluster, plan.Endpoint{Addr: a})
		return a
	}
	want := []reality.Listening{
		{Addr: add("192.0.2.1", 8080), Protocol: plan.TCP, Others: []uint16{8081}},
		{Addr: add("192.0.2.1", 8081), Protocol: plan.TCP, Listens: true},
		{Addr: add(podAt(5), 22), Protocol: plan.TCP, Pod: true, Listens: true},
		{Addr: add(podAt(1), 8080), Protocol: plan.TCP, Pod: true, Listens: true},
		{Addr: add(podAt(2), 8080), Protocol: plan.TCP, Pod: true, Loopback: true, Others: []uint16{15006}},
		{Addr: add(podAt(3), 8080), Protocol: plan.TCP, Pod: true, Others: []uint16{80, 443}},
	}
	add(podAt(5), 8080)
	add(podAt(6), 8080)
	add(podAt(4), 8080)       // Its namespace is not to be found.
	add("198.51.100.9", 8080) // There is no route to it.
	got, err := See("/proc/sys").Look(t.Context(), []*plan.ServicePort{sp})
	require.NoError(t, err)
	slices.SortFunc(got, func(a, b reality.Listening) int { return a.Addr.Compare(b.Addr) })
	slices.SortFunc(want, func(a, b reality.Listening) int { return a.Addr.Compare(b.Addr) })
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// TestStuck: of a program that listens and does not accept, it is said what waits; of others, nothing.
func TestStuck(t *testing.T) {
	nstest.Enter(t)
	ip(t, "link set lo up")
	listen := func() net.Listener {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { l.Close() })
		return l
	}
	stuck, quiet := listen(), listen()
	deaf, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	defer deaf.Close()
	for _, to := range []net.Addr{stuck.Addr(), stuck.Addr(), deaf.LocalAddr()} {
		c, err := net.Dial(to.Network(), to.String())
		require.NoError(t, err)
		defer c.Close()
		if _, err := c.Write(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	at := func(a net.Addr) plan.Endpoints {
		return plan.Endpoints{Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort(a.String())}}}
	}
	got, err := See("/proc/sys").Look(t.Context(), []*plan.ServicePort{
		{Key: plan.Key{Protocol: plan.TCP}, Endpoints: at(stuck.Addr())}, {Key: plan.Key{Protocol: plan.TCP}, Endpoints: at(quiet.Addr())},
		{Key: plan.Key{Protocol: plan.UDP}, Endpoints: at(deaf.LocalAddr())},
	})
	if other, err := See("/proc/sys").Look(t.Context(), []*plan.ServicePort{{Key: plan.Key{Protocol: plan.TCP}, Endpoints: at(deaf.LocalAddr())}}); err != nil || len(other) != 1 || other[0].Listens || other[0].Other != plan.UDP {
		t.Errorf("what listens by another protocol: %+v, %v", other, err)
	}
	if err != nil || len(got) != 3 || got[0].Waiting != 2 || got[1].Waiting != 0 || got[2].Waiting < 100 {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestPods: two Pods at one bridge that have the same address, an entry of a neighbour that is wrong, and what is looked at in Pods.
func TestPods(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	pid := os.Getpid()
	address := func(n int) string { return fmt.Sprintf("10.%d.%d.%d", 246+n, pid>>8&0xff, pid&0xff) }
	ip(t, "link add cni0 type bridge", "link set cni0 up", "link add kube-bridge up type bridge")
	sp := &plan.ServicePort{Key: plan.Key{Protocol: plan.TCP, Family: plan.IPv4}}
	start := func(name, address string, more ...string) {
		nstest.Exec(t, "ip", "route", "flush", address)
		startPod(t, name, address, append(more, ":8080")...)
		nstest.Exec(t, "ip", "route", "flush", address)
		nstest.Exec(t, "ip", "link", "set", name, "master", "cni0")
		nstest.Exec(t, "ip", "route", "add", address, "dev", "cni0")
		sp.Endpoints.Cluster = append(sp.Endpoints.Cluster, plan.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(address), 8080)})
	}
	start("first", address(1))
	start("alone", address(2))
	look := func(want ...reality.Listening) {
		t.Helper()
		for i, ep := range sp.Endpoints.Cluster {
			want[i].Addr, want[i].Protocol, want[i].Pod = ep.Addr, plan.TCP, true
		}
		got, err := See("/proc/sys").Look(t.Context(), []*plan.ServicePort{sp})
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v\nwant %+v", got, err, want)
		}
	}
	fine := reality.Listening{Listens: true}
	with := func(a reality.Attachment) reality.Listening {
		a.Link, a.Bridge = "alone", cmp.Or(a.Bridge, "cni0")
		return reality.Listening{Listens: true, Attachment: a}
	}
	look(fine, fine)
	for _, tc := range []struct {
		change, undo string
		want         reality.Attachment
	}{
		{"neigh replace " + address(2) + " dev cni0 lladdr 02:00:00:00:00:99 nud permanent", "neigh del " + address(2) + " dev cni0", reality.Attachment{Wrong: "02:00:00:00:00:99"}},
		{"link set alone nomaster", "link set alone master cni0", reality.Attachment{Loose: true}},
		{"link set alone master kube-bridge", "link set alone master cni0", reality.Attachment{Bridge: "kube-bridge", By: "cni0"}},
		{"link set alone mtu 1400", "link set alone mtu 1500", reality.Attachment{MTU: 1400, OwnMTU: 1500}},
		{"link set alone down", "link set alone up", reality.Attachment{Down: true}},
	} {
		ip(t, tc.change)
		look(fine, with(tc.want))
		ip(t, tc.undo)
	}
	ip(t, "addr add 192.0.2.1/24 dev lo")
	start("mute", address(4), "unrouted")
	look(fine, fine, reality.Listening{Listens: true, Attachment: reality.Attachment{Link: "mute", Bridge: "cni0", NoRoute: "network is unreachable", NoDefault: "network is unreachable"}})
	sp.Endpoints.Cluster = sp.Endpoints.Cluster[:2]
	startPod(t, "cali", address(3), "asks", ":8080")
	sp.Endpoints.Cluster = append(sp.Endpoints.Cluster, plan.Endpoint{Addr: netip.MustParseAddrPort(address(3) + ":8080")})
	proxy := func(value string) { write(t, "/proc/sys/net/ipv4", "conf/cali/proxy_arp", value) }
	proxy("0")
	look(fine, fine, reality.Listening{Listens: true, Attachment: reality.Attachment{Link: "cali", NoRoute: "their next hop 169.254.1.1 is no address of this node, and net.ipv4.conf.cali.proxy_arp is 0"}})
	proxy("1")
	look(fine, fine, fine)
	sp.Endpoints.Cluster = sp.Endpoints.Cluster[:2]
	start("second", address(1))
	sp.Endpoints.Cluster = sp.Endpoints.Cluster[:2]
	look(reality.Listening{Several: true}, fine)

	looked := 0
	for i := range sp.Endpoints.Cluster {
		sp.Endpoints.Cluster[i].Local = true
	}
	all, err := See("/proc/sys").Within(t.Context(), []*plan.ServicePort{sp}, func(its []*plan.ServicePort, listens func(plan.Protocol, uint16) bool) error {
		looked++
		if len(its) != 1 || len(its[0].All()) != 1 || its[0].All()[0].Addr.Addr().String() != address(2) || !listens(plan.TCP, 8080) || listens(plan.TCP, 15006) {
			t.Errorf("%+v", its)
		}
		links, err := host.Links()
		if len(links) != 2 { // lo and eth0
			t.Errorf("%+v", links)
		}
		return err
	})
	if err != nil || looked != 1 || all { // It is not known which of two is meant.
		t.Errorf("%d were looked at: %t, %v", looked, all, err)
	}
}

// TestBridgeDown: a bridge that is down has no routes, so that packets for its Pods leave by others.
func TestBridgeDown(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	address := fmt.Sprintf("10.251.%d.%d", os.Getpid()>>8&0xff, os.Getpid()&0xff)
	startPod(t, "pod", address, ":8080")
	ip(t, "link add cni0 type bridge", "link set pod master cni0", "route flush "+address, "route add "+address+" dev lo")
	sp := &plan.ServicePort{Key: plan.Key{Protocol: plan.TCP, Family: plan.IPv4}}
	sp.Endpoints.Cluster = []plan.Endpoint{{Addr: netip.AddrPortFrom(netip.MustParseAddr(address), 8080), Local: true}}
	got, err := See("/proc/sys").Look(t.Context(), []*plan.ServicePort{sp})
	if err != nil || len(got) != 1 || got[0].Attachment != (reality.Attachment{Link: "pod", Bridge: "cni0", Down: true}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestJudge: which sockets get what is for an endpoint.
func TestJudge(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		endpoint, socket string
		both             bool
		listens          bool
	}{
		{"10.244.1.5:80", "10.244.1.5:80", false, true},
		{"10.244.1.5:80", "10.244.1.6:80", false, false},
		{"10.244.1.5:80", "0.0.0.0:80", false, true},
		{"10.244.1.5:80", "0.0.0.0:81", false, false},
		{"10.244.1.5:80", "[::]:80", true, true},
		{"10.244.1.5:80", "[::]:80", false, false},
		{"[fd00::5]:80", "0.0.0.0:80", false, false},
		{"[fd00::5]:80", "[::]:80", false, true},
	} {
		s := netip.MustParseAddrPort(c.socket)
		l := judge(netip.MustParseAddrPort(c.endpoint), plan.TCP, []sockets.Socket{{Addr: s.Addr(), Port: s.Port(), Both: c.both}})
		if l.Listens != c.listens {
			t.Errorf("%+v: %+v", c, l)
		}
	}
}

// TestLookBack: strict rp_filter drops answers where policy routing holds for packets to an endpoint and not for its answers.
func TestLookBack(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	set := func(name, value string) { write(t, "/proc/sys/net/ipv4", name, value) }
	set("ip_forward", "1")
	for name, address := range map[string]string{"clients": "192.0.2.1/24", "one": "198.51.100.1/24", "two": "203.0.113.1/24"} {
		if name == "clients" {
			nstest.Exec(t, "ip", "link", "add", name, "type", "bridge")
		} else {
			nstest.Exec(t, "ip", "link", "add", name, "type", "veth", "peer", "name", name+"-peer")
			nstest.Exec(t, "ip", "link", "set", name+"-peer", "up")
		}
		nstest.Exec(t, "ip", "addr", "add", address, "dev", name)
		nstest.Exec(t, "ip", "link", "set", name, "up")
		set("conf/"+name+"/rp_filter", "0")
	}
	set("conf/all/rp_filter", "0")
	set("conf/two/rp_filter", "1")
	ip(t, "route add 10.244.9.0/24 via 198.51.100.2", "route add 10.244.9.0/24 via 203.0.113.2 table 100")
	endpoint := netip.MustParseAddr("10.244.9.5")
	look := func(strict []string, filtered ...reality.Filtered) {
		t.Helper()
		got, err := See("/proc/sys").LookBack(t.Context(), []netip.Addr{endpoint, netip.MustParseAddr("fd00::5"), netip.MustParseAddr("192.0.2.1")})
		require.NoError(t, err)
		if !slices.Equal(got.Strict, strict) || !slices.Equal(got.Filtered, filtered) || !got.Known {
			t.Errorf("got %+v, want strict at %q and %v", got, strict, filtered)
		}
	}
	look(nil)
	ip(t, "rule add iif clients lookup 100")
	look([]string{"two"}, reality.Filtered{Addr: endpoint, By: "two", Back: "one"})
	set("conf/all/rp_filter", "2")
	look(nil)
	set("conf/all/rp_filter", "1")
	look([]string{"one", "two"}, reality.Filtered{Addr: endpoint, By: "two", Back: "one"})
	ip(t, "route replace 10.244.9.0/24 nexthop via 198.51.100.2 nexthop via 203.0.113.2")
	got, err := See("/proc/sys").LookBack(t.Context(), []netip.Addr{endpoint})
	if err != nil || len(got.Filtered) > 0 {
		t.Errorf("with a route of two hops: %+v, %v", got, err)
	}
}
