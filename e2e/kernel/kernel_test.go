package kernel_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"nodeproxy/e2e/harness"
)

// insideVariable is set for the copy of this test binary that runs on the test kernel.
const insideVariable = "NODEPROXY_KERNEL_TEST_INSIDE"

func TestMain(m *testing.M) {
	os.Exit(harness.Main(m))
}

// inside says whether this is the copy on the test kernel, where the test is to go ahead. Elsewhere it runs the test
// there, in a network namespace of its own, and fails with it.
func inside(t *testing.T) bool {
	t.Helper()
	if os.Getenv(insideVariable) != "" {
		return true
	}
	t.Parallel()
	out, err := exec.Command("./run", "env", insideVariable+"=1", "unshare", "--net",
		os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("on the test kernel: %v\n%s", err, out)
	}
	return false
}

// must runs a command and fails the test if the command does.
func must(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// service is a virtual service as moby/ipvs wants it. The kernel refuses an IPv6 one without a netmask of 128.
func service(at netip.AddrPort, protocol uint16, scheduler string) *ipvs.Service {
	s := &ipvs.Service{
		Address: at.Addr().AsSlice(), Port: at.Port(), Protocol: protocol, SchedName: scheduler,
		AddressFamily: syscall.AF_INET, Netmask: 0xffffffff,
	}
	if at.Addr().Is6() {
		s.AddressFamily, s.Netmask = syscall.AF_INET6, 128
	}
	return s
}

// TestRegisters: threads of one process, which are one process to the host, do not get each other's floating-point registers; see shim/xstate.c.
func TestRegisters(t *testing.T) {
	if !inside(t) {
		return
	}
	compute := func(seed int) float64 {
		x := 1 / float64(seed+3)
		for range 20_000_000 {
			x = 3.9 * x * (1 - x) // Whatever goes wrong once makes another number of all that follow.
		}
		return x
	}
	var alone, beside [8]float64
	for i := range alone {
		alone[i] = compute(i)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(len(beside)))
	var all sync.WaitGroup
	for i := range beside {
		all.Go(func() { beside[i] = compute(i) })
	}
	all.Wait()
	if alone != beside {
		t.Errorf("one after the other: %v; side by side: %v", alone, beside)
	}
}

func TestSchedulers(t *testing.T) {
	if !inside(t) {
		return
	}
	handle, err := ipvs.New("")
	require.NoError(t, err)
	defer handle.Close()
	schedulers := []string{
		"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "fo", "ovf", "mh", "dh", "sh", "sed", "nq", "twos",
	}
	for _, protocol := range []uint16{syscall.IPPROTO_TCP, syscall.IPPROTO_UDP, syscall.IPPROTO_SCTP} {
		for _, address := range []string{"10.96.0.1", "fd00:10:96::1"} {
			for i, scheduler := range schedulers {
				want := service(netip.AddrPortFrom(netip.MustParseAddr(address), uint16(1+i)), protocol, scheduler)
				if err := handle.NewService(want); err != nil {
					t.Errorf("%s, protocol %d, %s: %v", address, protocol, scheduler, err)
					continue
				}
				if got, err := handle.GetService(want); err != nil || got.SchedName != scheduler {
					t.Errorf("%s, protocol %d, %s: read back as %+v, %v", address, protocol, scheduler, got, err)
				}
			}
		}
	}
}

// TestVirtualServer sends packets through IPVS to pods in other namespaces, in both families. TCP and UDP have to reach
// the pods in turn, and IPVS has to know of it.
func TestVirtualServer(t *testing.T) {
	if !inside(t) {
		return
	}
	w := harness.New(t, harness.Options{Pods: []int{1, 1, 0}})
	node, pods := w.Node1(), []string{"n1a", "n2a"}
	for _, path := range []string{"net/ipv4/vs/conntrack", "net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		require.NoError(t, node.Sysctl(path, "1"))
	}
	for _, tool := range []string{"iptables", "ip6tables"} {
		_, err := node.Output(tool, "-t", "nat", "-A", "POSTROUTING", "-m", "ipvs", "--ipvs", "-j", "MASQUERADE")
		require.NoError(t, err)
	}
	dummy := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "kube-ipvs0"}}
	require.NoError(t, node.Netlink().LinkAdd(dummy))
	var handle *ipvs.Handle
	if err := node.Do(func() (err error) { handle, err = ipvs.New(""); return err }); err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	addresses := harness.AddressesOf(1)
	for _, family := range []int{4, 6} {
		vip := addresses.VIP(family)
		mask := net.CIDRMask(vip.BitLen(), vip.BitLen())
		address := &netlink.Addr{IPNet: &net.IPNet{IP: vip.AsSlice(), Mask: mask}, Flags: syscall.IFA_F_NODAD}
		require.NoError(t, node.Netlink().AddrAdd(dummy, address))
		for network, protocol := range map[string]uint16{"tcp": syscall.IPPROTO_TCP, "udp": syscall.IPPROTO_UDP} {
			at := netip.AddrPortFrom(vip, 80)
			virtual := service(at, protocol, ipvs.RoundRobin)
			// On a busy machine, it can take a while until all neighbours have found each other: another virtual server
			// is for that.
			first := service(netip.AddrPortFrom(vip, 81), protocol, ipvs.RoundRobin)
			for _, v := range []*ipvs.Service{first, virtual} {
				require.NoError(t, handle.NewService(v))
				for _, pod := range pods {
					server := &ipvs.Destination{
						Address: w.Pod(pod).IP(family).AsSlice(), Port: 8080, Weight: 1,
						AddressFamily: v.AddressFamily, ConnectionFlags: ipvs.ConnectionFlagMasq,
					}
					require.NoError(t, handle.NewDestination(v, server))
				}
			}
			seen := map[string]bool{}
			for begun := time.Now(); len(seen) < len(pods) && time.Since(begun) < 3*time.Minute; {
				if a := w.Client.Ask(network, netip.AddrPortFrom(vip, 81), harness.Patient); a.Outcome == harness.Answered {
					seen[a.Server] = true
				}
			}
			var got []string
			for range pods {
				answer := w.Client.Ask(network, at, harness.Patient)
				if answer.Outcome != harness.Answered {
					t.Fatalf("%s to %s: %v", network, at, answer)
				}
				got = append(got, answer.Server)
			}
			slices.Sort(got)
			if !slices.Equal(got, pods) {
				t.Errorf("%s to %s: answered by %v, want each of %v once", network, at, got, pods)
			}
			// The connections, and not the counters: these are some two seconds late.
			servers, err := handle.GetDestinations(virtual)
			if err != nil || len(servers) != len(pods) {
				t.Fatalf("%s to %s: IPVS has the real servers %v, %v", network, at, servers, err)
			}
			for _, server := range servers {
				if n := server.ActiveConnections + server.InactiveConnections; n != 1 {
					t.Errorf("%s to %s: IPVS has %d connections to %s, want 1", network, at, n, server.Address)
				}
			}
		}
	}
}

// TestSetTarget marks a packet with the mark that a set holds for its destination, through both variants of iptables.
func TestSetTarget(t *testing.T) {
	if !inside(t) {
		return
	}
	must(t, "ip", "link", "set", "lo", "up")
	for i, variant := range harness.Variants {
		for _, family := range []struct{ name, tool, address string }{
			{"inet", "iptables", "127.0.0.1"},
			{"inet6", "ip6tables", "::1"},
		} {
			// Rules of both variants see every packet: each has a port of its own.
			port := 5300 + i
			set, tool := fmt.Sprintf("S%d%s", i, family.name), family.tool+"-"+string(variant)
			mark := fmt.Sprintf("0x%x", 0x40+i)
			must(t, "ipset", "create", set, "hash:ip,port", "family", family.name, "skbinfo", "counters", "comment")
			must(t, "ipset", "add", set, fmt.Sprintf("%s,udp:%d", family.address, port), "skbmark", mark, "comment", "a port")
			must(t, tool, "-t", "mangle", "-A", "INPUT", "-j", "SET", "--map-set", set, "dst,dst", "--map-mark")
			must(t, tool, "-t", "filter", "-A", "INPUT", "-m", "mark", "--mark", mark, "-j", "ACCEPT")

			conn, err := net.Dial("udp", net.JoinHostPort(family.address, strconv.Itoa(port)))
			require.NoError(t, err)
			if _, err := conn.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			conn.Close()
			if got := must(t, tool, "-t", "filter", "-L", "INPUT", "-v", "-n", "-x"); !strings.Contains(got, "       1       ") {
				t.Errorf("%s: the rule for the mark did not count one packet:\n%s", tool, got)
			}
		}
	}
}
