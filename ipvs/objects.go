package ipvs

import (
	"net/netip"
	"slices"

	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// objects are one ServicePort's share of the kernel's virtual servers, set entries and addresses. They depend on the ServicePort,
// the options and the node, and, for the marks of one without a node port, on its identity.
type objects struct {
	servers []serverClaim
	members []member
	vips    []netip.Addr
	ports   []plan.Address // of addresses that other hosts may have; only these ports are made local
}

// serverClaim is a virtual server that a ServicePort asks for.
type serverClaim struct {
	id ipvs.ServerID
	wanted
}

// wanted is what a virtual server should be: that of a ServicePort, with the endpoints of a policy. One without endpoints need not exist;
// but if it exists, with connections to former endpoints, it is kept for them. The zero wanted asks for nothing.
type wanted struct {
	sp     *plan.ServicePort
	policy plan.Policy
}

// endpoints are those that should be real servers, in order of address.
func (w wanted) endpoints() []plan.Endpoint {
	if w.sp == nil || !w.sp.Any {
		return nil
	}
	return w.sp.ForPolicy(w.policy)
}

// drains reports whether connections are left to an endpoint that is no longer used. Those of UDP and SCTP have no end to wait for.
func (w wanted) drains() bool { return w.sp != nil && w.sp.Key.Protocol == plan.TCP }

// lingers reports whether an endpoint that is not used still exists: its connections are left to it.
func (w wanted) lingers(a netip.AddrPort) bool {
	return w.sp != nil && slices.ContainsFunc(w.sp.Excluded, func(x plan.Exclusion) bool { return x.Addr == a })
}

// realServer is an endpoint as a real server.
func realServer(ep plan.Endpoint) ipvs.RealServer {
	return ipvs.RealServer{Addr: ep.Addr, Weight: max(uint32(ep.Weight), 1)}
}

// wanted returns the properties of a virtual server.
func (o Options) wanted(id ipvs.ServerID, w wanted) ipvs.Server {
	scheduler, persistence := o.scheduler(w.sp), w.sp.Affinity
	if w.sp.Affinity > 0 && id.Mark != 0 {
		// With persistence, IPVS does not translate the port of what a mark selects (ip_vs_sched_persist in Linux): the port at the
		// endpoint would be that of the frontend. A hash of the client's address needs no memory.
		scheduler, persistence = o.sticky(w.sp), 0
		scheduler.Ports = false
	}
	return ipvs.Server{ID: id, Scheduler: scheduler.Name, Ports: scheduler.Ports, Fallback: scheduler.Fallback, Persistence: persistence}
}

// builder makes the objects of one ServicePort.
type builder struct {
	sp     *plan.ServicePort
	node   *plan.Node
	marks  marks
	id     markID
	marked []markKind // those with a virtual server
	out    objects
}

// needsMarks reports whether a ServicePort has a virtual server that is selected by a mark.
func needsMarks(sp *plan.ServicePort) bool {
	return slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool {
		return f.Kind == plan.NodePort || sp.ExternalPolicy == plan.Local && external(f.Kind)
	})
}

func external(k plan.FrontendKind) bool { return k == plan.LoadBalancerIP || k == plan.ExternalIP }

// nodePortOf returns a ServicePort's node port, if it has one.
func nodePortOf(sp *plan.ServicePort) (plan.Frontend, bool) {
	i := slices.IndexFunc(sp.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.NodePort })
	if i < 0 {
		return plan.Frontend{}, false
	}
	return sp.Frontends[i], true
}

func (b *builder) objects() objects {
	for _, f := range b.sp.Frontends {
		switch f.Kind {
		case plan.ClusterIP:
			b.clusterIP(f)
		case plan.LoadBalancerIP, plan.ExternalIP:
			b.external(f)
		case plan.NodePort:
			b.nodePort(f)
		case plan.HealthCheckNodePort:
			b.member(setHealthCheckNodePort, ipset.Entry{Port: f.Port})
		}
	}
	if b.sp.Any {
		for _, ep := range b.sp.All() {
			if ep.Local || ep.Unplaced { // Other endpoints' traffic to themselves does not pass this node.
				b.member(setLoopBack, ipset.Entry{
					Addr: ep.Addr.Addr(), Protocol: b.sp.Key.Protocol, Port: ep.Addr.Port(), Addr2: ep.Addr.Addr(),
				})
			}
		}
	}
	return b.out
}

func (b *builder) member(set setID, e ipset.Entry) {
	b.out.members = append(b.out.members, member{set, e})
}

// at returns the entry for a frontend with an address.
func at(f plan.Frontend) ipset.Entry {
	return ipset.Entry{Addr: f.Addr, Protocol: f.Protocol, Port: f.Port}
}

// server adds a virtual server with the endpoints of a policy.
func (b *builder) server(id ipvs.ServerID, policy plan.Policy) {
	b.out.servers = append(b.out.servers, serverClaim{id, wanted{b.sp, policy}})
}

// atAddress adds the virtual server for a frontend's address.
func (b *builder) atAddress(f plan.Frontend, policy plan.Policy) {
	if f.Kind == plan.ExternalIP { // Any user who may create Services may name any address, even that of another host.
		b.out.ports = append(b.out.ports, plan.Address{Addr: f.Addr, Protocol: f.Protocol, Port: f.Port})
	} else {
		b.out.vips = append(b.out.vips, f.Addr)
	}
	b.server(ipvs.ServerID{Family: b.sp.Key.Family, Protocol: f.Protocol, Addr: f.Addr, Port: f.Port}, policy)
}

// atMark adds the virtual server for a mark, unless there is one. Frontends share it.
func (b *builder) atMark(kind markKind) {
	if slices.Contains(b.marked, kind) {
		return
	}
	b.marked = append(b.marked, kind)
	policy := plan.Cluster
	if kind == localMark {
		policy = plan.Local
	}
	b.server(ipvs.ServerID{Family: b.sp.Key.Family, Mark: b.marks.of(b.id, kind)}, policy)
}

func (b *builder) clusterIP(f plan.Frontend) {
	b.atAddress(f, b.sp.InternalPolicy)
	switch {
	case !b.sp.Any:
		b.member(setNoEndpoints, at(f))
	case len(b.sp.ForPolicy(b.sp.InternalPolicy)) == 0:
		b.member(setNoLocalEndpoints, at(f))
	default:
		b.member(setClusterIP, at(f))
	}
}

// external adds a load balancer IP or an external IP. Under policy Local, its virtual server has the endpoints of this node; a mark
// selects another one for pods and the node itself.
func (b *builder) external(f plan.Frontend) {
	b.atAddress(f, b.sp.ExternalPolicy)
	if b.sp.ExternalPolicy == plan.Local {
		b.atMark(clusterMark)
		b.atMark(masqueradedMark)
	}
	if !b.sp.Any {
		b.member(setNoEndpoints, at(f))
		return
	}
	if f.Kind == plan.LoadBalancerIP && len(b.sp.SourceRanges) > 0 {
		b.sourceRanges(f)
	}
	set, local := setLoadBalancer, setLoadBalancerLocal
	if f.Kind == plan.ExternalIP {
		set, local = setExternalIP, setExternalIPLocal
	}
	if b.sp.ExternalPolicy == plan.Local {
		e := at(f)
		e.Mark, e.Mask = b.marks.of(b.id, localMark), b.marks.mask()
		b.member(local, e)
	}
	switch {
	case len(b.sp.ForPolicy(b.sp.ExternalPolicy)) == 0:
		b.member(setNoLocalEndpoints, at(f))
	case b.sp.ExternalPolicy == plan.Cluster:
		b.member(set, at(f))
	}
}

// sourceRanges limits a load balancer IP to the sources that may reach it. Where the node itself is within the ranges, a
// connection from it may have that address as its source.
func (b *builder) sourceRanges(f plan.Frontend) {
	b.member(setLoadBalancerFirewall, at(f))
	node := b.node.IP(b.sp.Key.Family)
	nodeAllowed := false
	for _, r := range b.sp.SourceRanges {
		e := at(f)
		e.Net = r
		b.member(setSourceCIDR, e)
		nodeAllowed = nodeAllowed || node.IsValid() && r.Contains(node)
	}
	if nodeAllowed {
		e := at(f)
		e.Addr2 = f.Addr
		b.member(setSourceIP, e)
	}
}

func (b *builder) nodePort(f plan.Frontend) {
	kind, set := masqueradedMark, setNodePort
	mask := ^uint32(0)
	if b.sp.ExternalPolicy == plan.Local {
		b.atMark(clusterMark)
		b.atMark(masqueradedMark)
		kind, set, mask = localMark, setNodePortLocal, b.marks.mask()
	}
	b.atMark(kind)
	for _, half := range everywhere(b.sp.Key.Family) {
		e := ipset.Entry{Net: half, Protocol: f.Protocol, Port: f.Port}
		if !b.sp.Any {
			b.member(setNodePortNoEndpoints, e)
			continue
		}
		if len(b.sp.ForPolicy(b.sp.ExternalPolicy)) == 0 {
			b.member(setNodePortNoLocalEndpoints, e)
		}
		e.Mark, e.Mask = b.marks.of(b.id, kind), mask
		b.member(set, e)
	}
}
