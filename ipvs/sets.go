package ipvs

import (
	"net/netip"

	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// setID names an ipset that the rules use. Those up to setLoopBack have kube-proxy's names and types. Entries are added and removed
// in the order of these numbers or in the reverse order, see memberChanges.
type setID uint8

const (
	// Frontends with endpoints for their policy.
	setClusterIP setID = iota
	setLoadBalancer
	setExternalIP
	// External frontends under policy Local, with marks for traffic from pods and from the node.
	setLoadBalancerLocal
	setExternalIPLocal
	// Frontends limited to source ranges, and what is admitted to them.
	setLoadBalancerFirewall
	setSourceCIDR
	setSourceIP
	// VIPs that are added to the device one by one.
	setVIPs
	setHealthCheckNodePort
	// Endpoints on this node, for traffic that returns to its sender.
	setLoopBack
	// Node ports, with their marks: under policy Cluster, and under policy Local.
	setNodePort
	setNodePortLocal
	// Frontends that are refused, and frontends whose policy allows no endpoint here, which are dropped.
	setNoEndpoints
	setNoLocalEndpoints
	setNodePortNoEndpoints
	setNodePortNoLocalEndpoints
	setCount
)

// setKind is what a set has in common for both families.
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

// marked is the mark of an entry.
type marked struct{ mark, mask uint32 }

func (m member) marked() marked { return marked{m.entry.Mark, m.entry.Mask} }

// memberKey is an entry of a set without its mark, which can change, in a third of the memory: there are as many as frontends.
type memberKey struct {
	addr, addr2 address // the second is that of a range, if the entry has one
	length      uint8   // of that range, and one more; 0 for none
	protocol    uint8
	port        uint16
	set         setID
}

// address is an address in the memory that it needs.
type address struct {
	bytes [16]byte
	bits  uint8 // 32, 128, or 0 for none
}

func packed(a netip.Addr) address { return address{a.As16(), uint8(a.BitLen())} }

func (a address) addr() netip.Addr {
	switch a.bits {
	case 0:
		return netip.Addr{}
	case 32:
		return netip.AddrFrom16(a.bytes).Unmap()
	}
	return netip.AddrFrom16(a.bytes)
}

// key identifies an entry.
func (m member) key() memberKey {
	k := memberKey{set: m.set, addr: packed(m.entry.Addr), addr2: packed(m.entry.Addr2), port: m.entry.Port,
		protocol: netlink.Protocol(m.entry.Protocol)}
	if m.entry.Net.IsValid() {
		k.addr2, k.length = packed(m.entry.Net.Addr()), uint8(m.entry.Net.Bits())+1
	}
	return k
}

// entry returns the entry with a mark.
func (k memberKey) entry(m marked) ipset.Entry {
	e := ipset.Entry{Addr: k.addr.addr(), Protocol: netlink.ProtocolOf(k.protocol), Port: k.port, Mark: m.mark, Mask: m.mask}
	if k.length == 0 {
		e.Addr2 = k.addr2.addr()
	} else {
		e.Net = netip.PrefixFrom(k.addr2.addr(), int(k.length)-1)
	}
	return e
}

// everywhere returns the two halves of a family's addresses, since no set accepts the range of all.
func everywhere(f plan.Family) [2]netip.Prefix {
	if f == plan.IPv6 {
		return [2]netip.Prefix{netip.MustParsePrefix("::/1"), netip.MustParsePrefix("8000::/1")}
	}
	return [2]netip.Prefix{netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1")}
}
