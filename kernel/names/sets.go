package names

import (
	"slices"

	"nodeproxy/plan"
)

// A Set is the name of an ipset of mode ipvs, without its prefix. A set is of one family, so there is one of each for each family.
type Set string

// The sets. Those up to LoopBack have kube-proxy's names and types.
const (
	ClusterIPs           Set = "CLUSTER-IP"
	LoadBalancerIPs      Set = "LOAD-BALANCER"
	ExternalIPs          Set = "EXTERNAL-IP"
	LoadBalancerIPsLocal Set = "LOAD-BALANCER-LOCAL"
	ExternalIPsLocal     Set = "EXTERNAL-IP-LOCAL"
	LoadBalancerFirewall Set = "LOAD-BALANCER-FW"
	SourceCIDRs          Set = "LOAD-BALANCER-SOURCE-CIDR"
	SourceIPs            Set = "LOAD-BALANCER-SOURCE-IP"
	BoundIPs             Set = "IPVS-IPS"
	HealthCheckNodePorts Set = "HEALTH-CHECK-NODE-PORT"
	LoopBack             Set = "LOOP-BACK"
	NodePortMarks        Set = "NODE-PORT"
	NodePortMarksLocal   Set = "NODE-PORT-LOCAL"
	NoEndpoints          Set = "NO-ENDPOINTS"
	NoLocalEndpoints     Set = "NO-LOCAL-ENDPOINTS"
	NodePortsNoEndpoints Set = "NP-NO-ENDPOINTS"
	NodePortsNoLocal     Set = "NP-NO-LOCAL-ENDPOINTS"
)

var sets = []Set{
	ClusterIPs, LoadBalancerIPs, ExternalIPs, LoadBalancerIPsLocal, ExternalIPsLocal, LoadBalancerFirewall, SourceCIDRs, SourceIPs, BoundIPs,
	HealthCheckNodePorts, LoopBack, NodePortMarks, NodePortMarksLocal, NoEndpoints, NoLocalEndpoints, NodePortsNoEndpoints,
	NodePortsNoLocal,
}

// KubeProxySets are sets that kube-proxy alone has.
var KubeProxySets = []Set{
	"NODE-PORT-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-LOCAL-UDP", "NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH",
}

// maxSetName is the length of the longest name of a set (IPSET_MAXNAMELEN less the final NUL).
const maxSetName = 31

// Of returns the name of the set of a family.
func (s Set) Of(f plan.Family) string {
	name := "KUBE-" + string(s)
	if f == plan.IPv6 {
		name = "KUBE-6-" + string(s)
	}
	return name[:min(len(name), maxSetName)]
}

// IsOurSet reports whether an ipset is kube-proxy's or this program's.
func IsOurSet(name string) bool {
	return slices.ContainsFunc(slices.Concat(sets, KubeProxySets), func(s Set) bool { return name == s.Of(plan.IPv4) || name == s.Of(plan.IPv6) })
}
