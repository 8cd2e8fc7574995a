package ipvs

import (
	"net/netip"

	"nodeproxy/kernel/ipset"
	"nodeproxy/plan"
)

// setID names one of the ipsets that the rules ask. Those up to setLoopBack have kube-proxy's names and types. Entries come and go
// in the order of these numbers or in the reverse one, see memberChanges.
type setID int

const (
	// Frontends with endpoints for their policy.
	setClusterIP setID = iota
	setLoadBalancer
	setExternalIP
	// External frontends under policy Local. Their marks are for traffic from pods and from the node.
	setLoadBalancerLocal
	setExternalIPLocal
	// Frontends limited to source ranges, and what is admitted to them.
	setLoadBalancerFirewall
	setSourceCIDR
	setSourceIP
	// VIPs that are bound to the device one by one.
	setVIPs
	setHealthCheckNodePort
	// Endpoints on this node, for traffic that comes back to where it was sent from.
	setLoopBack
	// Node ports, with their marks: under policy Cluster, and under policy Local.
	setNodePort
	setNodePortLocal
	// What is refused, and what is dropped because its policy allows no endpoint here.
	setNoEndpoints
	setNoLocalEndpoints
	setNodePortNoEndpoints
	setNodePortNoLocalEndpoints
	setCount
)

// setKind is the part of a set that is the same for both families.
type setKind struct {
	name, kind string
	marks      bool
}

var setKinds = [setCount]setKind{
	setClusterIP:                {"CLUSTER-IP", "hash:ip,port", false},
	setLoadBalancer:             {"LOAD-BALANCER", "hash:ip,port", false},
	setExternalIP:               {"EXTERNAL-IP", "hash:ip,port", false},
	setLoadBalancerLocal:        {"LOAD-BALANCER-LOCAL", "hash:ip,port", true},
	setExternalIPLocal:          {"EXTERNAL-IP-LOCAL", "hash:ip,port", true},
	setLoadBalancerFirewall:     {"LOAD-BALANCER-FW", "hash:ip,port", false},
	setSourceCIDR:               {"LOAD-BALANCER-SOURCE-CIDR", "hash:ip,port,net", false},
	setSourceIP:                 {"LOAD-BALANCER-SOURCE-IP", "hash:ip,port,ip", false},
	setVIPs:                     {"IPVS-IPS", "hash:ip", false},
	setHealthCheckNodePort:      {"HEALTH-CHECK-NODE-PORT", "bitmap:port", false},
	setLoopBack:                 {"LOOP-BACK", "hash:ip,port,ip", false},
	setNodePort:                 {"NODE-PORT", "hash:net,port", true},
	setNodePortLocal:            {"NODE-PORT-LOCAL", "hash:net,port", true},
	setNoEndpoints:              {"NO-ENDPOINTS", "hash:ip,port", false},
	setNoLocalEndpoints:         {"NO-LOCAL-ENDPOINTS", "hash:ip,port", false},
	setNodePortNoEndpoints:      {"NP-NO-ENDPOINTS", "hash:net,port", false},
	setNodePortNoLocalEndpoints: {"NP-NO-LOCAL-ENDPOINTS", "hash:net,port", false},
}

// maxSetName is the longest name of a set (IPSET_MAXNAMELEN less the final NUL).
const maxSetName = 31

// setName is a set's name. A set is of one family, and names are for both, so those of IPv6 have something in them, as
// kube-proxy has it.
func setName(id setID, f plan.Family) string { return familyName(setKinds[id].name, f) }

func familyName(name string, f plan.Family) string {
	if f == plan.IPv6 {
		name = "KUBE-6-" + name
	} else {
		name = "KUBE-" + name
	}
	return name[:min(len(name), maxSetName)]
}

func setOf(id setID, f plan.Family) ipset.Set {
	return ipset.Set{Name: setName(id, f), Type: setKinds[id].kind, Family: f, Marks: setKinds[id].marks}
}

// kubeProxySets are sets of kube-proxy's, without their prefixes, for which there is no use here.
var kubeProxySets = []string{"NODE-PORT-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-LOCAL-UDP",
	"NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH"}

// member is an entry of a set.
type member struct {
	set   setID
	entry ipset.Entry
}

// key is what makes an entry the same one: all but the mark, which can change.
func (m member) key() member {
	m.entry.Mark, m.entry.Mask = 0, 0
	return m
}

// everywhere are the halves of a family's addresses, since no set takes a range of all.
func everywhere(f plan.Family) [2]netip.Prefix {
	if f == plan.IPv6 {
		return [2]netip.Prefix{netip.MustParsePrefix("::/1"), netip.MustParsePrefix("8000::/1")}
	}
	return [2]netip.Prefix{netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1")}
}
