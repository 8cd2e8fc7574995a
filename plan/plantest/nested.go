package plantest

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/topology"
)

// Pools returns a plan as that of a busy cluster, the same at every call: 721 Services with load balancer IPs from four pools
// of 256 addresses, and one Service with source ranges and affinity, and 802 ports of TCP and UDP at a single such IP.
func Pools(f plan.Family) *plan.Plan {
	p := emptyPlan()
	pools := prefixes("10.20.4.0/24", "10.20.21.0/24", "10.28.4.0/24", "10.180.4.0/24")
	clusterIPs := prefix("172.20.0.0/16")
	sources := prefixes("10.0.0.0/8", "192.168.0.0/16")
	if f == plan.IPv6 {
		pools = prefixes("fd00:20::400/120", "fd00:20::1500/120", "fd00:20:0:1::/120", "fd00:a0::/120")
		clusterIPs, sources = prefix("fd11:96::/112"), prefixes("fd00::/16", "2001:db8::/32")
	}
	for i := range 721 {
		sp := &plan.ServicePort{Key: plan.Key{
			Service: plan.Service{Namespace: "pools", Name: fmt.Sprintf("s%d", i)}, Protocol: plan.TCP, Family: f,
		}, Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: nth(clusterIPs, 10+i), Protocol: plan.TCP, Port: 443},
			{Kind: plan.LoadBalancerIP, Addr: nth(pools[i%4], 20+i/4), Protocol: plan.TCP, Port: 443},
		}}
		p.Set(withEndpoints(sp, 2*i, 2))
	}
	for i := range 401 {
		for _, proto := range []plan.Protocol{plan.TCP, plan.UDP} {
			port := uint16(16100 + i)
			sp := &plan.ServicePort{Key: plan.Key{
				Service: plan.Service{Namespace: "pools", Name: "media"}, Port: fmt.Sprintf("%s-%d", proto.Lower(), port),
				Protocol: proto, Family: f,
			}, Frontends: []plan.Frontend{
				{Kind: plan.ClusterIP, Addr: nth(clusterIPs, 5000), Protocol: proto, Port: port},
				{Kind: plan.LoadBalancerIP, Addr: nth(pools[0], 200), Protocol: proto, Port: port},
			}, SourceRanges: sources, Affinity: time.Hour}
			p.Set(withEndpoints(sp, 2000, 1))
		}
	}
	return p
}

// Crossed returns the plan of a cluster with a Service that nests its frontends as deep as it can, the same at every call: nine
// external IPs, of which each leaves what it has in common with the others one digit later, and 106 ports at each. Beside it
// there are ten plain Services.
func Crossed(f plan.Family) *plan.Plan {
	p := emptyPlan()
	addPlain(p, f, 10)
	first := addr("198.51.100.1")
	if f == plan.IPv6 {
		first = addr("2001:db8:cafe:babe:1234:5678:9abc:def1")
	}
	for i := range 106 {
		proto, port := []plan.Protocol{plan.TCP, plan.UDP}[i%2], uint16(i/2%3<<12|i/6)
		sp := &plan.ServicePort{Key: plan.Key{
			Service: plan.Service{Namespace: "tenant", Name: "crossed"}, Port: fmt.Sprintf("p%d", i), Protocol: proto, Family: f,
		}}
		for n := range 9 {
			a := first
			if n > 0 {
				a = flipped(first, n-1)
			}
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: a, Protocol: proto, Port: 1 + port})
		}
		slices.SortFunc(sp.Frontends, plan.Frontend.Compare)
		p.Set(withEndpoints(sp, 3000, 1))
	}
	return p
}

// Nested generates plans of one family whose frontends have long prefixes in common and leave them digit by digit, with many
// ports at some addresses; with plain Services beside them, and all that leads to the longest chains of rules behind them.
func Nested(f plan.Family) *rapid.Generator[*plan.Plan] {
	return rapid.Custom(func(t *rapid.T) *plan.Plan {
		p := emptyPlan()
		addPlain(p, f, rapid.SampledFrom([]int{0, 30, 120}).Draw(t, "plain services"))
		for i := range rapid.IntRange(1, 4).Draw(t, "hostile services") {
			drawNested(t, p, f, i)
		}
		return p
	})
}

func addPlain(p *plan.Plan, f plan.Family, n int) {
	for i := range n {
		d := plainDraft(f, i)
		d.sp.Frontends = d.wants
		p.Set(withEndpoints(d.sp, 2*i, 2))
	}
}

// drawNested draws one Service: addresses that leave a random one at some of its digits, each with a number of ports.
func drawNested(t *rapid.T, p *plan.Plan, f plan.Family, i int) {
	label := func(what string) string { return fmt.Sprintf("hostile service %d: %s", i, what) }
	raw := rapid.SliceOfN(rapid.Byte(), f.Bits()/8, f.Bits()/8).Draw(t, label("address"))
	raw[0], raw[f.Bits()/8-1] = raw[0]&0x1f|0x20, byte(i) // No two Services have the same address.
	first, _ := netip.AddrFromSlice(raw)
	list := []netip.Addr{first}
	digits := f.Bits()/4 - 2
	for _, at := range rapid.SliceOfNDistinct(rapid.IntRange(0, digits-1), 1, digits, rapid.ID).Draw(t, label("digits")) {
		for range rapid.SampledFrom([]int{1, 1, 2}).Draw(t, label("addresses at a digit")) {
			list = append(list, flipped(list[len(list)-1], at), flipped(first, at))
		}
	}
	list = append(list, first)
	slices.SortFunc(list, netip.Addr.Compare)
	list = slices.Compact(list)
	const most = 1500 // frontends
	ports := min(rapid.SampledFrom([]int{1, 6, 40, 106}).Draw(t, label("ports")), max(1, most/len(list)))
	kind := rapid.SampledFrom([]plan.FrontendKind{plan.ExternalIP, plan.LoadBalancerIP}).Draw(t, label("kind"))
	affinity := rapid.SampledFrom([]time.Duration{0, time.Hour}).Draw(t, label("affinity"))
	policy := rapid.SampledFrom([]plan.Policy{plan.Cluster, plan.Local}).Draw(t, label("external policy"))
	endpoints := rapid.SampledFrom([]int{1, 0, 3}).Draw(t, label("endpoints"))
	stride := rapid.SampledFrom([]int{1, 16, 256, 601}).Draw(t, label("stride of ports"))
	many := chance(t, 3, label("a port has many endpoints"))
	for n := range ports {
		proto := protocols[n%2]
		sp := &plan.ServicePort{Key: plan.Key{
			Service: plan.Service{Namespace: "hostile", Name: fmt.Sprintf("s%d", i)}, Port: fmt.Sprintf("p%d", n),
			Protocol: proto, Family: f,
		}, Affinity: affinity, ExternalPolicy: policy}
		if kind == plan.LoadBalancerIP {
			sp.SourceRanges = worlds[f].ranges[:1]
		}
		for _, a := range list {
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: kind, Addr: a, Protocol: proto, Port: uint16(1 + n*stride)})
		}
		if n == 0 {
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: proto, Port: uint16(31000 + i)})
		}
		count := endpoints
		if many && n == 0 {
			count = 80
		}
		p.Set(withEndpoints(sp, 3000+100*i, count))
	}
}

// flipped is an address with another digit, of four bits, at one place.
func flipped(a netip.Addr, digit int) netip.Addr {
	raw := a.AsSlice()
	raw[digit/2] ^= byte(0x50 >> (4 * (digit % 2)))
	out, _ := netip.AddrFromSlice(raw)
	return out
}

func emptyPlan() *plan.Plan {
	return plan.New(plan.Node{Name: nodeName, IPs: []netip.Addr{worlds[plan.IPv4].node, worlds[plan.IPv6].node}}, plan.Settings{
		DetectLocal: plan.DetectLocal{Mode: plan.DetectClusterCIDR,
			CIDRs: []netip.Prefix{worlds[plan.IPv4].podRange, worlds[plan.IPv6].podRange}}})
}

// withEndpoints gives a ServicePort endpoints on other nodes and, for every other one, on this node.
func withEndpoints(sp *plan.ServicePort, first, count int) *plan.ServicePort {
	list := serving(worlds[sp.Key.Family].podRange, 7<<8+first+1, count, 2)
	sp.Endpoints = topology.Select(list, topology.Node{Name: nodeName},
		topology.UseOf(sp.InternalPolicy, sp.ExternalPolicy, sp.HasExternal()))
	return sp
}
