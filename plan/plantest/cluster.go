// Package plantest makes plans to test with: random ones, with packets that are likely to meet their frontends, and large
// ones of a given size for benchmarks.
//
// Random plans obey what every plan that the proxier makes obeys: a frontend has one owner, by the order of kinds and
// keys; the others that ask for it are shadowed; endpoints are what package topology selects. Their addresses are few, so
// that Services, nodes, pods and clients meet: an external IP may be the node's, a pod its own Service's client, a service
// port some node port's number.
package plantest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed" // for all tests that draw from here
	"nodeproxy/plan"
)

// Cluster is a random plan, with what the plan itself does not hold of the world around it.
type Cluster struct {
	Plan *plan.Plan
	// LocalAddrs are the node's own addresses, without those of the loopback range.
	LocalAddrs []netip.Addr

	drafts []draft
}

// Local reports whether an address is the node's own.
func (c *Cluster) Local(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(c.LocalAddrs, a) }

// Clusters generates random plans with their world.
func Clusters() *rapid.Generator[*Cluster] { return rapid.Custom(drawCluster) }

// Plans generates random plans.
func Plans() *rapid.Generator[*plan.Plan] {
	return rapid.Map(Clusters(), func(c *Cluster) *plan.Plan { return c.Plan })
}

// world is the addresses of one family that random plans and packets are made of.
type world struct {
	node     netip.Addr   // the node's primary address
	other    netip.Addr   // a second address of the node
	bridge   netip.Addr   // the node's address in its own pod range
	nodes    []netip.Addr // other nodes' addresses
	pods     []netip.Addr // this node's pods
	farPods  []netip.Addr // other nodes' pods
	outside  []netip.Addr // clients outside of the cluster
	balancer []netip.Addr // load balancer IPs
	external []netip.Addr // external IPs that are no node's
	cluster  netip.Prefix // cluster IPs
	podRange netip.Prefix // of the cluster
	nodePods netip.Prefix // of this node
	ranges   []netip.Prefix
	nodeNets []netip.Prefix // for --nodeport-addresses
}

var worlds = map[plan.Family]world{
	plan.IPv4: {
		node: addr("192.168.1.10"), other: addr("172.16.0.10"), bridge: addr("10.244.1.1"),
		nodes:    addrs("192.168.1.11", "192.168.1.12"),
		pods:     addrs("10.244.1.2", "10.244.1.3", "10.244.1.4"),
		farPods:  addrs("10.244.2.2", "10.244.2.3", "10.244.3.2", "10.244.3.3"),
		outside:  addrs("203.0.113.1", "203.0.113.129", "198.51.100.1"),
		balancer: addrs("172.20.0.1", "172.20.0.2", "172.20.0.3"),
		external: addrs("198.18.0.1", "198.18.0.2"),
		cluster:  prefix("10.96.0.0/16"), podRange: prefix("10.244.0.0/16"), nodePods: prefix("10.244.1.0/24"),
		ranges: prefixes("203.0.113.0/24", "203.0.113.128/25", "198.51.100.1/32", "192.168.1.0/24", "192.168.1.10/32",
			"10.244.0.0/16", "172.20.0.2/32"),
		nodeNets: prefixes("192.168.1.0/24", "172.16.0.0/12", "127.0.0.0/8", "127.0.0.1/32", "10.244.1.1/32", "0.0.0.0/0"),
	},
	plan.IPv6: {
		node: addr("2001:db8:1::10"), other: addr("fd00:16::10"), bridge: addr("fd00:10:244:1::1"),
		nodes:    addrs("2001:db8:1::11", "2001:db8:1::12"),
		pods:     addrs("fd00:10:244:1::2", "fd00:10:244:1::3", "fd00:10:244:1::4"),
		farPods:  addrs("fd00:10:244:2::2", "fd00:10:244:2::3", "fd00:10:244:3::2", "fd00:10:244:3::3"),
		outside:  addrs("2001:db8:f::1", "2001:db8:f:8000::1", "2001:db8:e::1"),
		balancer: addrs("fd00:20::1", "fd00:20::2", "fd00:20::3"),
		external: addrs("2001:db8:d::1", "2001:db8:d::2", "::1.2.3.4"),
		cluster:  prefix("fd00:10:96::/112"), podRange: prefix("fd00:10:244::/48"), nodePods: prefix("fd00:10:244:1::/64"),
		ranges: prefixes("2001:db8:f::/48", "2001:db8:f:8000::/49", "2001:db8:e::1/128", "2001:db8:1::/64",
			"2001:db8:1::10/128", "fd00:10:244::/48", "fd00:20::2/128", "::1.2.3.0/120"),
		nodeNets: prefixes("2001:db8:1::/64", "fd00:16::/64", "::1/128", "fd00:10:244:1::1/128", "::/0"),
	},
}

const (
	nodeName   = "node-1"
	bridgeName = "cni0"
	vethPrefix = "veth"
)

// Ports are few, so that they meet. Those of Services contain some of the node ports.
var (
	servicePorts = []uint16{53, 80, 443, 30001, 30002}
	nodePorts    = []uint16{30001, 30002, 30003, 32000}
	targetPorts  = []uint16{53, 80, 8080}
	protocols    = []plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}
)

func drawCluster(t *rapid.T) *Cluster {
	c := &Cluster{Plan: plan.New(drawNode(t), drawSettings(t))}
	for _, f := range plan.Families {
		w := worlds[f]
		c.LocalAddrs = append(c.LocalAddrs, w.node, w.other, w.bridge)
		for _, vip := range slices.Concat(w.balancer[:1], w.external[:1]) {
			if chance(t, 3, "the node has "+vip.String()) {
				c.LocalAddrs = append(c.LocalAddrs, vip)
			}
		}
	}
	c.drafts = drawServices(t)
	for _, d := range c.drafts {
		c.Plan.Set(d.choose(c.Plan.Node))
	}
	return c
}

func drawNode(t *rapid.T) plan.Node {
	n := plan.Node{Name: nodeName, Zone: rapid.SampledFrom([]string{"", "zone-a"}).Draw(t, "zone")}
	for _, f := range plan.Families {
		if !chance(t, 6, fmt.Sprintf("the node has no %s address in its status", f)) {
			n.IPs = append(n.IPs, worlds[f].node)
		}
	}
	return n
}

func drawSettings(t *rapid.T) plan.Settings {
	s := plan.Settings{
		DetectLocal:        drawDetectLocal(t),
		MasqueradeAll:      chance(t, 4, "masquerade all"),
		LocalhostNodePorts: rapid.Bool().Draw(t, "localhost node ports"),
	}
	for _, f := range plan.Families {
		if chance(t, 2, fmt.Sprintf("the %s service CIDR is known", f)) {
			s.ServiceCIDRs = append(s.ServiceCIDRs, worlds[f].cluster)
			if chance(t, 4, fmt.Sprintf("so is a %s service CIDR of one address", f)) {
				s.ServiceCIDRs = append(s.ServiceCIDRs, netip.PrefixFrom(nth(worlds[f].cluster, 4000), f.Bits()))
			}
		}
	}
	switch rapid.IntRange(0, 3).Draw(t, "node port addresses") {
	case 0:
		s.NodePortAddresses.Primary = true
	case 1:
		all := slices.Concat(worlds[plan.IPv4].nodeNets, worlds[plan.IPv6].nodeNets)
		s.NodePortAddresses.CIDRs = rapid.SliceOfNDistinct(rapid.SampledFrom(all), 1, 4, rapid.ID).Draw(t, "node port CIDRs")
	}
	return s
}

func drawDetectLocal(t *rapid.T) plan.DetectLocal {
	d := plan.DetectLocal{Mode: rapid.SampledFrom([]plan.DetectLocalMode{
		plan.DetectNone, plan.DetectClusterCIDR, plan.DetectNodeCIDR, plan.DetectBridgeInterface,
		plan.DetectInterfaceNamePrefix,
	}).Draw(t, "detect local")}
	for _, f := range plan.Families {
		if chance(t, 5, fmt.Sprintf("no %s pod range", f)) {
			continue
		}
		switch d.Mode {
		case plan.DetectClusterCIDR:
			d.CIDRs = append(d.CIDRs, rapid.SampledFrom([]netip.Prefix{worlds[f].podRange, worlds[f].podRange, f.All()}).
				Draw(t, fmt.Sprintf("%s pod range", f)))
		case plan.DetectNodeCIDR:
			d.CIDRs = append(d.CIDRs, worlds[f].nodePods)
		}
	}
	switch d.Mode {
	case plan.DetectBridgeInterface:
		d.Interface = bridgeName
	case plan.DetectInterfaceNamePrefix:
		d.Interface = vethPrefix
	}
	return d
}

// chance is true once in about n times. Simpler cases are those where it is false.
func chance(t *rapid.T, n int, what string) bool { return rapid.IntRange(0, n-1).Draw(t, what) == n-1 }

var addr, prefix = netip.MustParseAddr, netip.MustParsePrefix

func addrs(list ...string) []netip.Addr { return parsed(list, addr) }

func prefixes(list ...string) []netip.Prefix { return parsed(list, prefix) }

func parsed[T any](list []string, parse func(string) T) []T {
	var out []T
	for _, s := range list {
		out = append(out, parse(s))
	}
	return out
}

// GoString describes the plan for a failed test's output.
func (c *Cluster) GoString() string {
	var b strings.Builder
	fmt.Fprintf(&b, "node %+v, local addresses %s\nsettings %+v\n", c.Plan.Node, c.LocalAddrs, c.Plan.Settings)
	for _, f := range plan.Families {
		for _, sp := range c.Plan.Sorted(f) {
			if sp.Key.Service.Namespace == plainNamespace {
				continue // They are always the same.
			}
			fmt.Fprintf(&b, "%s: %v, internal %s, external %s, source ranges %v, affinity %s, scheduler %v\n", sp.Key, sp.Frontends,
				sp.InternalPolicy, sp.ExternalPolicy, sp.SourceRanges, sp.Affinity, sp.Scheduler)
			fmt.Fprintf(&b, "  cluster %v, local %v, any %t\n", sp.Endpoints.Cluster, sp.Endpoints.Local, sp.Any)
		}
	}
	return b.String()
}
