package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// dnsCache is where a NodeLocal DNS cache answers besides the cluster IP of the cluster's DNS.
var dnsCache = netip.MustParseAddr("169.254.20.10")

// dnsCacheAddresses are those that the cache has on its device. Beside a proxy in mode ipvs, it is set up without the cluster IP of the
// cluster's DNS: IPVS would take what is for that, and could not translate what connection tracking does not see.
func dnsCacheAddresses() []netip.Addr {
	return byMode([]netip.Addr{dnsCache, clusterIP(0, 4).Addr()}, []netip.Addr{dnsCache})
}

// nodeLocalDNS is NodeLocal DNS cache: it has addresses on a device of its own, listens there, and keeps what is for them out of
// connection tracking, and so out of a service proxy's rules.
var nodeLocalDNS = otherProgram{
	name: "NodeLocal DNS", kind: recorded,
	start: func(b *beside) {
		// The cache makes a dummy device, which not every kernel that tests run on has.
		b.script(b.text(`
			ip link add nodelocaldns type bridge
			ip link set nodelocaldns up
		`, 4))
		for _, addr := range dnsCacheAddresses() {
			b.script("ip addr add " + addr.String() + "/32 dev nodelocaldns")
			at := netip.AddrPortFrom(addr, 53)
			require.NoError(b, errors.Join(b.w.ServeTCP(b.w.Node1().Netns, "cache", at), b.w.ServeUDP(b.w.Node1().Netns, "cache", at)))
		}
		nodeLocalDNSRules(b)
	},
	reload: nodeLocalDNSRules,
}

func nodeLocalDNSRules(b *beside) {
	const why = `-m comment --comment "NodeLocal DNS Cache: `
	for _, addr := range dnsCacheAddresses() {
		for _, p := range networks {
			to, from := fmt.Sprintf("-d %s/32 -p %s -m %[2]s --dport 53 ", addr, p), fmt.Sprintf("-s %s/32 -p %s -m %[2]s --sport 53 ", addr, p)
			b.ensure("iptables", "raw", "-A", "PREROUTING "+to+why+`skip conntrack" -j CT --notrack`)
			b.ensure("iptables", "raw", "-A", "OUTPUT "+to+why+`skip conntrack" -j CT --notrack`)
			b.ensure("iptables", "raw", "-A", "OUTPUT "+from+why+`skip conntrack" -j CT --notrack`)
			b.ensure("iptables", "filter", "-A", "INPUT "+to+why+`allow DNS traffic" -j ACCEPT`)
			b.ensure("iptables", "filter", "-A", "OUTPUT "+from+why+`allow DNS traffic" -j ACCEPT`)
		}
	}
}

// TestNodeLocalDNS: a NodeLocal DNS cache answers at its own address, whichever program starts first, and in mode iptables at the
// cluster IP of the cluster's DNS. In mode ipvs, the latter is answered by endpoints of the Service. Either way no request fails, and
// device, addresses and rules of the cache stay as they are.
func TestNodeLocalDNS(t *testing.T) {
	onVariants(t, harness.Variants, func(t *testing.T, variant harness.Variant) {
		for _, order := range []string{neighbourFirst, nodeproxyFirst} {
			if mode == harness.IPVS && (order == neighbourFirst) != (variant == harness.NFT) {
				continue // as in testNeighbour
			}
			t.Run(order, func(t *testing.T) {
				b := newBeside(t, variant, nodeLocalDNS, order)
				dns := harness.Service("kube-dns", 0, harness.ClusterOnly, func(s *v1.Service) {
					for i := range s.Spec.Ports {
						s.Spec.Ports[i].Port = 53
					}
				})
				b.w.Write(t, "dns.yaml", harness.Objects(dns, b.w.Ready("n1a", "n2a")...)...)
				var d *harness.Daemon
				if order == nodeproxyFirst {
					d = b.run()
				}
				nodeLocalDNS.start(b)
				alone := b.others()
				if order == neighbourFirst {
					d = b.run()
				}
				b.cacheAnswers()
				b.untouched(alone, "while nodeproxy runs")
				b.under(d, nodeLocalDNS, 1, nodeLocalDNS.reload)
				b.cacheAnswers()
				b.leave(d)
				b.untouched(alone, "after nodeproxy cleanup")
				for _, addr := range dnsCacheAddresses() {
					for _, network := range networks {
						if err := serversOf(b.w.Pod("n1c").Host, network, netip.AddrPortFrom(addr, 53), "cache"); err != nil {
							t.Errorf("after nodeproxy cleanup: %v", err)
						}
					}
				}
				b.report()
			})
		}
	})
}

func (b *beside) cacheAnswers() {
	b.Helper()
	atService := byMode([]string{"cache"}, []string{"n1a", "n2a"})
	for _, client := range []*harness.Host{b.w.Pod("n1c").Host, b.w.Pod("n1a").Host, b.w.Node1().Host} {
		for _, network := range networks {
			assert.NoError(b, serversOf(client, network, netip.AddrPortFrom(dnsCache, 53), "cache"))
			assert.NoError(b, serversOf(client, network, netip.AddrPortFrom(clusterIP(0, 4).Addr(), 53), atService...))
		}
	}
}

// mesh is what a service mesh has in each of its pods: rules that lead connections to a proxy beside the application, which goes on
// with them as a user of its own.
type mesh struct {
	name              string
	inbound, outbound uint16
	uid               int
	rules             string
	// inboundFrom is the address from which the proxy goes on to the application, if not one that the system picks.
	inboundFrom map[int]netip.Addr
}

var meshes = []mesh{
	{
		name: "Istio", inbound: 15006, outbound: 15001, uid: 1337,
		inboundFrom: map[int]netip.Addr{4: netip.MustParseAddr("127.0.0.6"), 6: netip.MustParseAddr("::6")},
		rules: `*nat
			-A PREROUTING -p tcp -j ISTIO_INBOUND
			-A OUTPUT -p tcp -j ISTIO_OUTPUT
			-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN
			-A ISTIO_INBOUND -p tcp -m tcp --dport 15090 -j RETURN
			-A ISTIO_INBOUND -p tcp -m tcp --dport 15021 -j RETURN
			-A ISTIO_INBOUND -p tcp -m tcp --dport 15020 -j RETURN
			-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
			-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
			4 -A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
			6 -A ISTIO_OUTPUT -s ::6/128 -o lo -j RETURN
			4 -A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
			6 -A ISTIO_OUTPUT ! -d ::1/128 -o lo -p tcp -m tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
			-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
			-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
			4 -A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
			6 -A ISTIO_OUTPUT -d ::1/128 -j RETURN
			-A ISTIO_OUTPUT -j ISTIO_REDIRECT
			-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
			COMMIT
		`,
	},
	{
		name: "Linkerd", inbound: 4143, outbound: 4140, uid: 2102,
		rules: `*nat
			-A PREROUTING -m comment --comment "proxy-init/install-proxy-init-prerouting" -j PROXY_INIT_REDIRECT
			-A OUTPUT -m comment --comment "proxy-init/install-proxy-init-output" -j PROXY_INIT_OUTPUT
			-A PROXY_INIT_REDIRECT -p tcp -m multiport --dports 4190,4191,4567,4568 -j RETURN
			-A PROXY_INIT_REDIRECT -p tcp -j REDIRECT --to-ports 4143
			-A PROXY_INIT_OUTPUT -m owner --uid-owner 2102 -j RETURN
			-A PROXY_INIT_OUTPUT -o lo -j RETURN
			-A PROXY_INIT_OUTPUT -p tcp -m multiport --dports 4567,4568 -j RETURN
			-A PROXY_INIT_OUTPUT -p tcp -j REDIRECT --to-ports 4140
			COMMIT
		`,
	},
}

// TestMeshes: a pod whose connections go through the proxy of a service mesh reaches Services as others do: the mesh's proxy is told
// the address of the Service, and its own connection goes to an endpoint. An endpoint with such a proxy answers like any. The pod's
// rules are its own affair.
func TestMeshes(t *testing.T) {
	for _, m := range meshes {
		t.Run(m.name, func(t *testing.T) {
			onVariants(t, harness.Variants, func(t *testing.T, variant harness.Variant) {
				for _, order := range []string{neighbourFirst, nodeproxyFirst} {
					if mode != harness.IPVS || (order == neighbourFirst) == (variant == harness.NFT) {
						t.Run(order, func(t *testing.T) { testMesh(t, variant, m, order) })
					}
				}
			})
		})
	}
}

func testMesh(t *testing.T, variant harness.Variant, m mesh, order string) {
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
	b := &beside{T: t, w: w, variant: variant, row: neighbourRow{order: order}}
	client, server := w.Pod("n1c"), w.Pod("n1a")
	var d *harness.Daemon
	if order == nodeproxyFirst {
		d = b.run()
	}
	var out, in *sidecar
	for _, pod := range []*harness.Pod{client, server} {
		outputOnHost(t, pod.Host, "ip -6 addr add ::6/128 dev lo nodad")
		outgoing, incoming := b.sidecar(pod, m, m.outbound, nil), b.sidecar(pod, m, m.inbound, m.inboundFrom)
		if pod == client {
			out = outgoing
		} else {
			in = incoming
		}
		b.restoreIn(pod, m.rules)
	}
	rules := b.podRules()
	if order == neighbourFirst {
		d = b.run()
	}
	for _, family := range families {
		for _, to := range frontends(w, 1, family) {
			wantServers(t, client.Host, to, "n1a", "n2a")
			out.was(t, to)
			wantServers(t, w.Client, to, "n1a", "n2a")
			wantServers(t, w.Node1().Host, to, "n1a", "n2a")
		}
		in.was(t, netip.AddrPortFrom(server.IP(family), 8080))
		// To itself: the proxy's connection comes back to the pod that it left.
		wantServers(t, server.Host, clusterIP(1, family), "n1a", "n2a")
	}
	var loads []*harness.Load
	for _, family := range families {
		loads = append(loads, client.StartLoad("tcp", clusterIP(1, family), 1, 5*time.Millisecond),
			w.Client.StartLoad("tcp", nodePort(w.Node1().IP(family), 1), 1, 5*time.Millisecond))
	}
	for i := range byMode(5, 2) {
		for _, l := range loads {
			eventually(t, "requests", func() error { return requestsMade(l, 10*(i+1)) })
		}
		for _, pod := range []*harness.Pod{client, server} {
			b.restoreIn(pod, withoutJumps(m.rules))
		}
	}
	for _, l := range loads {
		eventually(t, "requests", func() error { return requestsMade(l, 50) })
	}
	noFailures(t, loads...)
	b.leave(d)
	if now := b.podRules(); now != rules {
		t.Errorf("rules of pods have changed: %s", firstDifference(rules, now))
	}
}

// withoutJumps leaves out the rules in built-in chains: those that are there stay.
func withoutJumps(rules string) string {
	return builtInRule.ReplaceAllString(rules, "")
}

func outputOnHost(t *testing.T, h *harness.Host, command string) {
	t.Helper()
	if _, err := h.Output("sh", "-c", command); err != nil {
		t.Fatal(err)
	}
}

// restoreIn gives rules to iptables-restore in a pod.
func (b *beside) restoreIn(pod *harness.Pod, rules string) {
	b.Helper()
	for _, family := range families {
		tool := b.variant.Tool(map[int]string{4: "iptables", 6: "ip6tables"}[family]) + "-restore"
		if _, err := pod.OutputWithInput(b.text(declared(rules), family), tool, "-w", "--noflush"); err != nil {
			b.Fatal(err)
		}
	}
}

// podRules are the rules in the pods with a mesh's proxy.
func (b *beside) podRules() string {
	b.Helper()
	text := ""
	for _, name := range []string{"n1a", "n1c"} {
		for _, tool := range []string{"iptables", "ip6tables"} {
			out, err := b.w.Pod(name).Output("sh", "-c", b.variant.Tool(tool)+"-save -t nat | grep -v '^[#:]'")
			require.NoError(b, err)
			text += out
		}
	}
	return text
}

// sidecar is a proxy of a mesh: what is led to its port goes on to where it was going.
type sidecar struct {
	pod  *harness.Pod
	uid  int
	from map[int]netip.Addr

	mu   sync.Mutex
	seen map[netip.AddrPort]int
}

func (b *beside) sidecar(pod *harness.Pod, m mesh, port uint16, from map[int]netip.Addr) *sidecar {
	b.Helper()
	s := &sidecar{pod: pod, uid: m.uid, from: from, seen: map[netip.AddrPort]int{}}
	var l *net.TCPListener
	err := pod.Do(func() (err error) {
		l, err = net.ListenTCP("tcp", &net.TCPAddr{Port: int(port)})
		return err
	})
	require.NoError(b, err)
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.AcceptTCP()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				go s.serve(c)
			}
		}
	}()
	return s
}

func (s *sidecar) serve(c *net.TCPConn) {
	defer c.Close()
	to, err := originalDestination(c)
	if err != nil {
		return
	}
	s.mu.Lock()
	s.seen[to]++
	s.mu.Unlock()
	onward, err := s.dial(to)
	if err != nil {
		_ = c.SetLinger(0) // The client is told by a reset, as by a proxy that could not connect.
		return
	}
	defer onward.Close()
	done := make(chan struct{})
	go func() {
		_, _ = io.Copy(onward, c)
		_ = onward.(*net.TCPConn).CloseWrite()
		close(done)
	}()
	_, _ = io.Copy(c, onward)
	_ = c.CloseWrite()
	<-done
}

// dial connects as the proxy's own user, which the pod's rules let pass.
func (s *sidecar) dial(to netip.AddrPort) (c net.Conn, err error) {
	d := net.Dialer{Timeout: harness.Patient}
	family := 4
	if to.Addr().Is6() {
		family = 6
	}
	if from, ok := s.from[family]; ok {
		d.LocalAddr = &net.TCPAddr{IP: from.AsSlice()}
	}
	err = s.pod.Do(func() (err error) {
		// For this thread alone. What a socket is owned by is settled when it is made.
		_, _, _ = syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(s.uid), 0, 0)
		c, err = d.Dial("tcp", to.String())
		_, _, _ = syscall.RawSyscall(syscall.SYS_SETFSUID, 0, 0, 0)
		return err
	})
	return c, err
}

// was checks that connections to an address have come by.
func (s *sidecar) was(t *testing.T, to netip.AddrPort) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seen[to] == 0 {
		t.Errorf("the proxy in %s has seen no connection to %s, but %v", s.pod.Name, to, s.seen)
	}
}

// originalDestination is where a connection was going before a rule led it elsewhere.
func originalDestination(c *net.TCPConn) (netip.AddrPort, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	const soOriginalDst = 80
	var to netip.AddrPort
	var failed error
	err = raw.Control(func(fd uintptr) {
		level, size := syscall.SOL_IP, uint32(syscall.SizeofSockaddrInet4)
		if addrPortOf(c.LocalAddr()).Addr().Is6() {
			level, size = syscall.SOL_IPV6, uint32(syscall.SizeofSockaddrInet6)
		}
		var b [syscall.SizeofSockaddrInet6]byte
		_, _, errno := syscall.Syscall6(syscall.SYS_GETSOCKOPT, fd, uintptr(level), soOriginalDst,
			uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno != 0 {
			failed = errno
			return
		}
		port := uint16(b[2])<<8 | uint16(b[3])
		if level == syscall.SOL_IP {
			to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
		} else {
			to = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])), port)
		}
	})
	return to, errors.Join(err, failed)
}

// addrPortOf is an address of a socket, an IPv4 one as such.
func addrPortOf(a net.Addr) netip.AddrPort {
	at := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}
