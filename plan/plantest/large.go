package plantest

import (
	"fmt"
	"net/netip"

	"nodeproxy/plan"
	"nodeproxy/topology"
)

// largePods are the addresses of endpoints of large plans.
var largePods = prefix("10.244.0.0/14")

// Large returns a plan of many Services, the same at every call: n Services, named bench/s0 and so on, each with a cluster IP
// within 10.96.0.0/12, one TCP port 80 and the given number of endpoints, of which one in a hundred is on this node. All is IPv4.
// Pods are recognised by the range 10.244.0.0/14, whose addresses the endpoints take in order; up to 65,536 Services have cluster
// IPs of their own, and up to 262,144 endpoints addresses of their own.
func Large(n, endpoints int) *plan.Plan {
	p := plan.New(
		plan.Node{Name: nodeName, IPs: []netip.Addr{worlds[plan.IPv4].node}},
		plan.Settings{DetectLocal: plan.DetectLocal{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{largePods}}})
	for i := range n {
		p.Set(LargeService(i, i*endpoints, endpoints))
	}
	return p
}

// LargeService returns the i-th ServicePort of a large plan, with endpoints at the addresses that begin at the first-th.
// Given another first, it is what the ServicePort becomes when its endpoints are replaced.
func LargeService(i, first, endpoints int) *plan.ServicePort {
	sp := &plan.ServicePort{Key: plan.Key{
		Service: plan.Service{Namespace: "bench", Name: fmt.Sprintf("s%d", i)}, Protocol: plan.TCP, Family: plan.IPv4,
	}}
	sp.Frontends = []plan.Frontend{{
		Kind: plan.ClusterIP, Addr: nth(netip.MustParsePrefix("10.96.0.0/12"), 10+i), Protocol: plan.TCP, Port: 80,
	}}
	list := serving(largePods, first, endpoints, 100)
	sp.Endpoints = topology.Select(list, topology.Node{Name: nodeName}, topology.UseOf(plan.Cluster, plan.Cluster, false))
	return sp
}
