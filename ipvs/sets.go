package ipvs

import (
	"net/netip"

	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/names"
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
	name  names.Set
	kind  string
	marks bool
}

var setKinds = [setCount]setKind{
	setClusterIP:                {names.ClusterIPs, "hash:ip,port", false},
	setLoadBalancer:             {names.LoadBalancerIPs, "hash:ip,port", false},
	setExternalIP:               {names.ExternalIPs, "hash:ip,port", false},
	setLoadBalancerLocal:        {names.LoadBalancerIPsLocal, "hash:ip,port", true},
	setExternalIPLocal:          {names.ExternalIPsLocal, "hash:ip,port", true},
	setLoadBalancerFirewall:     {names.LoadBalancerFirewall, "hash:ip,port", false},
	setSourceCIDR:               {names.SourceCIDRs, "hash:ip,port,net", false},
	setSourceIP:                 {names.SourceIPs, "hash:ip,port,ip", false},
	setVIPs:                     {names.BoundIPs, "hash:ip", false},
	setHealthCheckNodePort:      {names.HealthCheckNodePorts, "bitmap:port", false},
	setLoopBack:                 {names.LoopBack, "hash:ip,port,ip", false},
	setNodePort:                 {names.NodePortMarks, "hash:net,port", true},
	setNodePortLocal:            {names.NodePortMarksLocal, "hash:net,port", true},
	setNoEndpoints:              {names.NoEndpoints, "hash:ip,port", false},
	setNoLocalEndpoints:         {names.NoLocalEndpoints, "hash:ip,port", false},
	setNodePortNoEndpoints:      {names.NodePortsNoEndpoints, "hash:net,port", false},
	setNodePortNoLocalEndpoints: {names.NodePortsNoLocal, "hash:net,port", false},
}

func setName(id setID, f plan.Family) string { return setKinds[id].name.Of(f) }

func setOf(id setID, f plan.Family) ipset.Set {
	return ipset.Set{Name: setName(id, f), Type: setKinds[id].kind, Family: f, Marks: setKinds[id].marks}
}

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
