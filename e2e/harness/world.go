package harness

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"nodeproxy/internal/nstest"
)

// The address plan, the same in every World.
var (
	ClusterCIDR4  = netip.MustParsePrefix("10.244.0.0/16")
	ClusterCIDR6  = netip.MustParsePrefix("fd00:10:244::/48")
	ServiceCIDR4  = netip.MustParsePrefix("10.96.0.0/16")
	ServiceCIDR6  = netip.MustParsePrefix("fd00:10:96::/112")
	VIPRange4     = netip.MustParsePrefix("198.51.100.0/24")
	VIPRange6     = netip.MustParsePrefix("fd00:198::/112")
	ExternalIPs4  = netip.MustParsePrefix("192.0.2.0/24")
	ExternalIPs6  = netip.MustParsePrefix("fd00:192::/112")
	nodeNet4      = netip.MustParsePrefix("192.168.77.0/24")
	nodeNet6      = netip.MustParsePrefix("fd00:77::/64")
	secondNet4    = netip.MustParsePrefix("192.168.78.0/24")
	secondNet6    = netip.MustParsePrefix("fd00:78::/64")
	client4       = netip.MustParseAddr("203.0.113.7")
	client6       = netip.MustParseAddr("2001:db8:c::7")
	podGateway4   = netip.MustParseAddr("169.254.1.1")
	podGateway6   = netip.MustParseAddr("fe80::1")
	forService    = []netip.Prefix{ServiceCIDR4, ServiceCIDR6, VIPRange4, VIPRange6, ExternalIPs4, ExternalIPs6}
	defaultRoute4 = netip.MustParsePrefix("0.0.0.0/0")
	defaultRoute6 = netip.MustParsePrefix("::/0")
)

// PodBridge is the bridge that the pods of a node are attached to with Options.Bridge; PodInterfacePrefix starts the
// name of every pod's interface on its node.
const (
	PodBridge          = "cbr0"
	PodInterfacePrefix = "pod"
)

// Options say what a World is made of. The zero value gives three nodes with 3, 2 and 1 pods that each serve TCP and UDP
// on ports 8080 and 8081.
type Options struct {
	// Pods are the numbers of pods on node1, node2, node3.
	Pods []int
	// Ports are those on which each pod serves TCP and UDP.
	Ports []uint16
	// Bridge attaches the pods to the bridge PodBridge on their node instead of routing to each one's own interface.
	Bridge bool
	// SecondAddress gives every node a second address in each family, which the others can reach.
	SecondAddress bool
	// OwnFirewall leaves the firewall of the nodes to the test, also with hostile settings.
	OwnFirewall bool
}

// Host is something with addresses: a node, a pod or the outside client.
type Host struct {
	*Netns
	IP4, IP6 netip.Addr
	// Second4 and Second6 are a node's second addresses; see Options.SecondAddress.
	Second4, Second6 netip.Addr
}

// IP returns the host's address of a family, 4 or 6.
func (h *Host) IP(family int) netip.Addr { return pick(family, h.IP4, h.IP6) }

func pick[T any](family int, four, six T) T {
	if family == 6 {
		return six
	}
	return four
}

func familyOf(a netip.Addr) int {
	if a.Is6() {
		return 6
	}
	return 4
}

// Pod is a pod with its servers running.
type Pod struct {
	*Host
	Node *Node
}

// Node is a node of the cluster.
type Node struct {
	*Host
	Pods []*Pod

	index int
}

// World is a cluster network. Its first node is the one under test.
type World struct {
	Nodes  []*Node
	Client *Host
	// Dir is a directory for this World's files. Manifests is the directory inside it that Daemons watch.
	Dir, Manifests string
	// Launch, if set, makes the command that daemons are started with, in place of exec.Command. The process must become the
	// daemon itself, so that signals reach it.
	Launch func(path string, args ...string) *exec.Cmd
	// DaemonEnv is what Daemons have in their environment besides this process's own.
	DaemonEnv []string

	opts    Options
	fabric  *Netns
	all     []*Netns
	atEnd   []func()
	daemons []*Daemon
	test    string // whose World this is; "" outside of tests
	// hardened are the variants of iptables in which the nodes of a hostile World have their firewall.
	hardened map[Variant]bool
}

// New makes a World that goes away with the test.
func New(t testing.TB, o Options) *World {
	t.Helper()
	w, err := Build(o)
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	w.name(t.Name())
	t.Cleanup(func() {
		if t.Failed() {
			for _, d := range w.daemons {
				t.Logf("log of %s:\n%s", d, d.tail(80))
			}
		}
		if err := w.Close(); err != nil {
			t.Errorf("harness: %v", err)
		}
	})
	return w
}

// Build makes a World. The caller closes it.
func Build(o Options) (*World, error) {
	if o.Pods == nil {
		o.Pods = []int{3, 2, 1}
	}
	if o.Ports == nil {
		o.Ports = []uint16{8080, 8081}
	}
	dir, err := worldDir()
	if err != nil {
		return nil, err
	}
	w := &World{opts: o, Dir: dir, Manifests: dir + "/manifests"}
	register(w)
	if err := w.build(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// AtEnd has the World call f when it is closed, before its namespaces and files are removed.
func (w *World) AtEnd(f func()) { w.atEnd = append(w.atEnd, f) }

// Close ends the daemons and servers, and removes the namespaces and files.
func (w *World) Close() error {
	var errs []error
	for _, d := range w.daemons {
		errs = append(errs, d.end())
	}
	for _, f := range w.atEnd {
		f()
	}
	for _, n := range w.all {
		n.Close()
	}
	unregister(w)
	return errors.Join(append(errs, os.RemoveAll(w.Dir))...)
}

// Node1 is the node under test.
func (w *World) Node1() *Node { return w.Nodes[0] }

// Pod returns a pod by its name: n1a is the first pod of node1. It panics if there is none.
func (w *World) Pod(name string) *Pod {
	for _, n := range w.Nodes {
		for _, p := range n.Pods {
			if p.Name == name {
				return p
			}
		}
	}
	panic("harness: no pod " + name)
}

func (w *World) newNetns(name string) (*Netns, error) {
	n, err := newNetns(name)
	if err == nil {
		w.all = append(w.all, n)
	}
	return n, err
}

func (w *World) build() error {
	if err := os.Mkdir(w.Manifests, 0o755); err != nil {
		return err
	}
	if err := w.buildFabric(); err != nil {
		return err
	}
	for i, pods := range w.opts.Pods {
		if err := w.addNode(i, pods); err != nil {
			return err
		}
	}
	err := w.addClient()
	for _, n := range w.Nodes {
		err = errors.Join(err, w.routesOf(n))
	}
	return err
}

// buildFabric makes the bridge that joins the nodes and the client. Its own address is the gateway; as it does not
// forward, packets that leave the cluster by mistake vanish there without an answer.
func (w *World) buildFabric() error {
	n, err := w.newNetns("fabric")
	if err != nil {
		return err
	}
	w.fabric = n
	return errors.Join(
		n.sysctls(map[string]string{"net/bridge/bridge-nf-call-iptables": "0", "net/bridge/bridge-nf-call-ip6tables": "0"}),
		n.addBridge("br0"),
		n.addAddrs("br0", nodeNet4.Bits(), nth(nodeNet4, 1), nodeNet6.Bits(), nth(nodeNet6, 1)),
	)
}

func (w *World) addNode(i, pods int) error {
	name := fmt.Sprintf("node%d", i+1)
	ns, err := w.newNetns(name)
	if err != nil {
		return err
	}
	host := &Host{Netns: ns, IP4: nth(nodeNet4, 11+i), IP6: nth(nodeNet6, 11+i)}
	n := &Node{Host: host, index: i + 1}
	w.Nodes = append(w.Nodes, n)
	if nstest.Hostile() {
		err = ns.sysctls(hostileSysctls)
	}
	err = errors.Join(err, w.uplink(ns, name), ns.addAddrs("eth0", nodeNet4.Bits(), n.IP4, nodeNet6.Bits(), n.IP6))
	if w.opts.SecondAddress {
		n.Second4, n.Second6 = nth(secondNet4, 11+i), nth(secondNet6, 11+i)
		err = errors.Join(err, ns.addAddrs("eth0", secondNet4.Bits(), n.Second4, secondNet6.Bits(), n.Second6))
	}
	err = errors.Join(err, ns.sysctls(nodeSysctls))
	if w.opts.Bridge {
		err = errors.Join(err, ns.addBridge(PodBridge), ns.addPodGateway(PodBridge))
	}
	for p := 0; p < pods && err == nil; p++ {
		err = w.addPod(n, p)
	}
	return err
}

// nodeSysctls make a namespace a router, and lift the limits on ICMP errors: one a second per destination, and 50 at once
// in all, would make many refused connections of a fast test look like lost ones.
var nodeSysctls = map[string]string{
	"net/ipv4/ip_forward":          "1",
	"net/ipv6/conf/all/forwarding": "1",
	"net/ipv4/icmp_ratelimit":      "0",
	"net/ipv6/icmp/ratelimit":      "0",
	"net/ipv4/icmp_msgs_burst":     "10000",
	"net/ipv4/icmp_msgs_per_sec":   "100000",
}

// uplink joins a namespace to the fabric with an interface eth0.
func (w *World) uplink(n *Netns, name string) error {
	return errors.Join(n.addVeth("eth0", w.fabric, name), w.fabric.enslave(name, "br0"))
}

// addPod makes the i-th pod of a node, with addresses in the node's range.
func (w *World) addPod(n *Node, i int) error {
	name := fmt.Sprintf("n%d%c", n.index, 'a'+i)
	_, err := w.newPod(n, name, nth(podRange4(n.index), 10+i), nth(podRange6(n.index), 10+i), w.opts.Ports)
	return err
}

// AddPod makes one more pod on a node, at an IPv4 address that need not be of the node's range, and serves these ports.
// The other nodes and the client get routes to it.
func (w *World) AddPod(t testing.TB, n *Node, name, ip4 string, ports ...uint16) *Pod {
	t.Helper()
	at, err := netip.ParseAddr(ip4)
	if err != nil {
		t.Fatal(err)
	}
	p, err := w.newPod(n, name, at, nth(podRange6(n.index), 100+len(n.Pods)), ports)
	for _, other := range w.Nodes {
		if err == nil && other != n {
			err = other.addRoute("eth0", netip.PrefixFrom(p.IP4, 32), n.IP4, other.IP4)
		}
	}
	if err == nil {
		err = w.Client.addRoute("eth0", netip.PrefixFrom(p.IP4, 32), w.Node1().IP4, netip.Addr{})
	}
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	return p
}

// newPod makes a pod whose only neighbour is its node, so that the node routes all of its packets.
func (w *World) newPod(n *Node, name string, ip4, ip6 netip.Addr, ports []uint16) (*Pod, error) {
	ns, err := w.newNetns(name)
	if err != nil {
		return nil, err
	}
	p := &Pod{Node: n, Host: &Host{Netns: ns, IP4: ip4, IP6: ip6}}
	n.Pods = append(n.Pods, p)
	hostSide := PodInterfacePrefix + name
	if len(hostSide) > syscall.IFNAMSIZ-1 {
		hostSide = fmt.Sprint(PodInterfacePrefix, len(n.Pods))
	}
	toPod := hostSide
	err = errors.Join(ns.addVeth("eth0", n.Netns, hostSide), ns.addAddrs("eth0", 32, p.IP4, 128, p.IP6))
	if w.opts.Bridge {
		toPod = PodBridge
		err = errors.Join(err, n.enslave(hostSide, PodBridge), n.allowHairpin(hostSide))
	} else {
		err = errors.Join(err, n.addPodGateway(hostSide))
	}
	err = errors.Join(err,
		n.addRoute(toPod, netip.PrefixFrom(p.IP4, 32), netip.Addr{}, n.IP4),
		n.addRoute(toPod, netip.PrefixFrom(p.IP6, 128), netip.Addr{}, n.IP6),
		ns.addRoute("eth0", netip.PrefixFrom(podGateway4, 32), netip.Addr{}, netip.Addr{}),
		ns.addRoute("eth0", defaultRoute4, podGateway4, netip.Addr{}),
		ns.addRoute("eth0", defaultRoute6, podGateway6, netip.Addr{}),
	)
	for _, port := range ports {
		err = errors.Join(err, w.ServeBoth(p.Host, name, port))
	}
	return p, err
}

// addPodGateway gives an interface of a node to its pods the addresses that they send everything to. A node with strict ARP
// answers only for addresses of the interface that was asked.
func (n *Netns) addPodGateway(name string) error {
	return errors.Join(n.addAddr(name, 32, podGateway4, syscall.RT_SCOPE_LINK), n.addAddr(name, 64, podGateway6, syscall.RT_SCOPE_LINK))
}

// addClient makes the outside client, which sends what is meant for the cluster to node1.
func (w *World) addClient() error {
	ns, err := w.newNetns("client")
	if err != nil {
		return err
	}
	w.Client = &Host{Netns: ns, IP4: client4, IP6: client6}
	err = errors.Join(w.uplink(ns, "client"), ns.addAddrs("eth0", 32, client4, 128, client6))
	for _, onLink := range []netip.Prefix{nodeNet4, nodeNet6, secondNet4, secondNet6} {
		err = errors.Join(err, ns.addRoute("eth0", onLink, netip.Addr{}, netip.Addr{}))
	}
	return errors.Join(err, w.viaNode1(ns, append([]netip.Prefix{ClusterCIDR4, ClusterCIDR6}, forService...)))
}

func (w *World) viaNode1(n *Netns, dsts []netip.Prefix) (err error) {
	for _, dst := range dsts {
		err = errors.Join(err, n.addRoute("eth0", dst, w.Node1().IP(familyOf(dst.Addr())), netip.Addr{}))
	}
	return err
}

// routesOf gives a node its routes to the client, to the other nodes' pods and to everything else.
func (w *World) routesOf(n *Node) error {
	err := errors.Join(
		n.addRoute("eth0", netip.PrefixFrom(client4, 32), netip.Addr{}, n.IP4),
		n.addRoute("eth0", netip.PrefixFrom(client6, 128), netip.Addr{}, n.IP6),
		n.addRoute("eth0", defaultRoute4, nth(nodeNet4, 1), n.IP4),
		n.addRoute("eth0", defaultRoute6, nth(nodeNet6, 1), n.IP6),
	)
	for _, other := range w.Nodes {
		if other != n {
			err = errors.Join(err,
				n.addRoute("eth0", podRange4(other.index), other.IP4, n.IP4),
				n.addRoute("eth0", podRange6(other.index), other.IP6, n.IP6))
		}
	}
	if n != w.Node1() {
		err = errors.Join(err, w.viaNode1(n.Netns, forService))
	}
	return err
}

// podRange4 is the range of pod addresses of the node with this number.
func podRange4(node int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", node))
}

func podRange6(node int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%d::/64", node))
}

// PodCIDRs are the pod ranges of the node, one a family.
func (n *Node) PodCIDRs() []netip.Prefix {
	return []netip.Prefix{podRange4(n.index), podRange6(n.index)}
}

// nth returns the i-th address of a prefix, for i below 65536.
func nth(p netip.Prefix, i int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	b[len(b)-1] += byte(i)
	b[len(b)-2] += byte(i >> 8)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// Dump returns the rules of a node and its connections, for the message of a failed test.
func (n *Node) Dump(variant Variant) string {
	var b strings.Builder
	for _, tool := range []string{"iptables", "ip6tables"} {
		out, err := n.Output(variant.Tool(tool) + "-save")
		fmt.Fprintf(&b, "--- %s-save in %s (%v)\n%s", variant.Tool(tool), n.Name, err, out)
	}
	return b.String()
}

func link(n *Netns, name string) (netlink.Link, error) {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("interface %s of %s: %w", name, n.Name, err)
	}
	return l, nil
}
