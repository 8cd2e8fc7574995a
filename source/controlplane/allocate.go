package controlplane

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// allocator allocates cluster IPs and node ports as the API server does. But what a Service gets is a pure function of the set of
// Services and of the ranges, so that it is the same on every node and after every restart, whatever files the objects are in.
//
// The canonical order is that of namespace and name. First, in this order, each Service gets the addresses and ports that it
// names. One whose address another has already is refused; of one whose node port another has, only that port is, as it may have been in use at its
// cluster IP when the other came. Then pool.allocate allocates the rest.
type allocator struct {
	cidrs map[v1.IPFamily]netip.Prefix
	first v1.IPFamily // the family of Services that name none
	ports plan.PortRange

	ips       map[netip.Addr]types.NamespacedName
	nodePorts map[portClaim]types.NamespacedName
	out       map[types.NamespacedName]*allocation
}

// portClaim is a node port, which two Services may share only if their protocols differ.
type portClaim struct {
	protocol v1.Protocol
	port     int32
}

// allocation is what a Service gets.
type allocation struct {
	checker
	families  []v1.IPFamily
	ips       []string // as many as families
	nodePorts []int32  // as many as ports; 0 where none, taken where another Service has what it names
	health    int32
}

// taken stands for a node port that another Service has.
const taken = -1

func familyOf(ip netip.Addr) v1.IPFamily {
	if ip.Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}

// allocatable reports whether a Service gets cluster IPs.
func allocatable(svc *v1.Service) bool {
	return svc.Spec.Type != v1.ServiceTypeExternalName && !headless(svc)
}

// wantsNodePorts reports whether a Service gets a node port for each port without one.
func wantsNodePorts(svc *v1.Service) bool {
	return svc.Spec.Type == v1.ServiceTypeNodePort ||
		svc.Spec.Type == v1.ServiceTypeLoadBalancer && *svc.Spec.AllocateLoadBalancerNodePorts
}

// allocate returns what each of the Services gets.
func allocate(r *Ranges, services map[types.NamespacedName]*v1.Service) *allocator {
	a := &allocator{
		cidrs: map[v1.IPFamily]netip.Prefix{}, first: familyOf(r.ServiceCIDRs[0].Addr()), ports: r.NodePorts,
		ips: map[netip.Addr]types.NamespacedName{}, nodePorts: map[portClaim]types.NamespacedName{},
		out: make(map[types.NamespacedName]*allocation, len(services)),
	}
	for _, cidr := range r.ServiceCIDRs {
		a.cidrs[familyOf(cidr.Addr())] = cidr.Masked()
	}
	names := slices.SortedFunc(maps.Keys(services), compareNames)
	names = slices.DeleteFunc(names, func(n types.NamespacedName) bool {
		svc := services[n]
		if !allocatable(svc) {
			return true
		}
		got := &allocation{checker: checker{effect: "the Service is not proxied"}, nodePorts: make([]int32, len(svc.Spec.Ports))}
		a.out[n] = got
		a.families(svc, got)
		a.claim(n, svc, got)
		return got.refused
	})
	a.clusterIPs(names)
	a.allocatePorts(names, services)
	return a
}

func compareNames(a, b types.NamespacedName) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// families chooses the families of a Service (KEP-563).
func (a *allocator) families(svc *v1.Service, got *allocation) {
	spec := &svc.Spec
	got.families = slices.Clone(spec.IPFamilies)
	for i, text := range spec.ClusterIPs {
		if ip, ok := source.ParseIP(text); ok && i >= len(got.families) {
			got.families = append(got.families, familyOf(ip))
		}
	}
	if len(got.families) == 0 {
		got.families = []v1.IPFamily{a.first}
	}
	if *spec.IPFamilyPolicy != v1.IPFamilyPolicySingleStack && len(got.families) == 1 {
		other := v1.IPv6Protocol
		if got.families[0] == other {
			other = v1.IPv4Protocol
		}
		if _, ok := a.cidrs[other]; ok {
			got.families = append(got.families, other)
		} else if *spec.IPFamilyPolicy == v1.IPFamilyPolicyRequireDualStack {
			got.reject("spec.ipFamilyPolicy", "RequireDualStack, but there is no service CIDR for %s", other)
		}
	}
	for i, f := range got.families {
		if _, ok := a.cidrs[f]; !ok && i >= len(spec.ClusterIPs) {
			got.reject("spec.ipFamilies", "there is no service CIDR for %s", f)
		}
	}
}

// claim claims the addresses and ports that a Service names, or none of them if another Service has one of the addresses.
func (a *allocator) claim(n types.NamespacedName, svc *v1.Service, got *allocation) {
	got.ips = make([]string, len(got.families))
	ips := map[netip.Addr]types.NamespacedName{}
	for i, text := range svc.Spec.ClusterIPs {
		ip, _ := source.ParseIP(text)
		field := clusterIPField(i)
		if owner, taken := a.ips[ip]; taken {
			got.reject(field, "%s is the cluster IP of Service %s, which comes first by name", ip, owner)
		}
		if cidr, ok := a.cidrs[familyOf(ip)]; !ok {
			got.Note(field, ip.String()+" is used as given", "there is no service CIDR for %s", familyOf(ip))
		} else if !cidr.Contains(ip) {
			got.Note(field, "it is used as given", "%s is outside the service CIDR %s", ip, cidr)
		}
		got.ips[i], ips[ip] = text, n
	}
	claims := a.explicitPorts(svc, got)
	if got.refused {
		return
	}
	for i, p := range svc.Spec.Ports {
		if got.nodePorts[i] == taken {
			a.yieldPort(n, fmt.Sprintf("spec.ports[%d].nodePort", i), portClaim{p.Protocol, p.NodePort})
		}
	}
	maps.Copy(a.ips, ips)
	for _, c := range claims {
		a.nodePorts[c] = n
	}
}

// explicitPorts returns the node ports that a Service names.
func (a *allocator) explicitPorts(svc *v1.Service, got *allocation) (claims []portClaim) {
	claim := func(field string, c portClaim) {
		if c.port < int32(a.ports.First) || c.port > int32(a.ports.Last) {
			got.reject(field, "%d is not within the range of node ports, %d-%d", c.port, a.ports.First, a.ports.Last)
		} else if slices.Contains(claims, c) {
			got.reject(field, "%d/%s is a node port of this Service already", c.port, c.protocol)
		}
		claims = append(claims, c)
	}
	for i, p := range svc.Spec.Ports {
		c := portClaim{p.Protocol, p.NodePort}
		if _, has := a.nodePorts[c]; has {
			got.nodePorts[i] = taken
		} else if c.port != 0 {
			claim(fmt.Sprintf("spec.ports[%d].nodePort", i), c)
			got.nodePorts[i] = c.port
		}
	}
	if got.health = svc.Spec.HealthCheckNodePort; got.health != 0 {
		c := portClaim{v1.ProtocolTCP, got.health}
		if owner, has := a.nodePorts[c]; has {
			got.reject("spec.healthCheckNodePort", "%d/TCP is a node port of Service %s, which comes first by name", c.port, owner)
		}
		claim("spec.healthCheckNodePort", c)
	}
	return claims
}

// yieldPort says that a Service does not get a node port that it names, both of it and of the one that has it.
func (a *allocator) yieldPort(n types.NamespacedName, field string, c portClaim) {
	owner, port := a.nodePorts[c], fmt.Sprintf("%d/%s", c.port, c.protocol)
	a.out[n].Problem(field, "this node port is not proxied", "%s is a node port of Service %s, which comes first by name", port, owner).
		Kind = source.Claimed
	a.out[owner].Note("spec.ports", "it does not get this node port, as it comes later by name", "Service %s names %s, too", n, port).
		Kind = source.Claimed
}

// clusterIPs allocates the addresses that no Service names.
func (a *allocator) clusterIPs(names []types.NamespacedName) {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		cidr, ok := a.cidrs[family]
		if !ok {
			continue
		}
		var bids []bid
		for _, n := range names {
			got := a.out[n]
			i := slices.Index(got.families, family)
			if i < 0 || got.ips[i] != "" {
				continue
			}
			bids = append(bids, bid{
				key: fmt.Sprintf("%s %s", n, family),
				take: func(slot uint64) {
					ip := address(cidr, slot)
					a.ips[ip], got.ips[i] = n, ip.String()
				},
				fail: func() { got.reject("spec.clusterIP", "no address is left in the service CIDR %s", cidr) },
			})
		}
		addressPool(cidr).allocate(bids, func(slot uint64) bool { _, taken := a.ips[address(cidr, slot)]; return !taken })
	}
}

// portOwners returns the Services that have a node port, for any protocol.
func (a *allocator) portOwners(port int32) (out []types.NamespacedName) {
	for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP} {
		if owner, has := a.nodePorts[portClaim{protocol, port}]; has {
			out = append(out, owner)
		}
	}
	return out
}

// allocatePorts allocates the node ports that no Service names.
func (a *allocator) allocatePorts(names []types.NamespacedName, services map[types.NamespacedName]*v1.Service) {
	number := func(slot uint64) int32 { return int32(uint64(a.ports.First) + slot) }
	var bids []bid
	for _, n := range names {
		svc, got := services[n], a.out[n]
		if got.refused {
			continue
		}
		enter := func(what string, take func(port int32)) {
			bids = append(bids, bid{
				key:  fmt.Sprintf("%s %s", n, what),
				take: func(slot uint64) { take(number(slot)) },
				fail: func() {
					got.reject("spec.ports", "no node port is left in the range %d-%d", a.ports.First, a.ports.Last)
				},
			})
		}
		if wantsNodePorts(svc) {
			a.portBids(n, svc, got, enter)
		}
		if needsHealthCheck(svc) && got.health == 0 {
			enter("health check", func(port int32) { a.nodePorts[portClaim{v1.ProtocolTCP, port}], got.health = n, port })
		}
	}
	// A number is free if no protocol has it, so that one Service answers at it.
	portPool(a.ports).allocate(bids, func(slot uint64) bool { return len(a.portOwners(number(slot))) == 0 })
}

// portBids enters a bid for each number among the ports of a Service that lack a node port. Ports with the same number and different
// protocols have the same node port.
func (a *allocator) portBids(n types.NamespacedName, svc *v1.Service, got *allocation, enter func(string, func(int32))) {
	ports := svc.Spec.Ports
	named := map[int32]int32{} // by port, the node port that one of its protocols names
	for i, p := range ports {
		named[p.Port] = cmp.Or(named[p.Port], max(0, got.nodePorts[i]))
	}
	groups := map[int32][]int{}
	for i, p := range ports {
		if got.nodePorts[i] != 0 {
			continue
		}
		c := portClaim{p.Protocol, named[p.Port]}
		if _, taken := a.nodePorts[c]; c.port != 0 && !taken {
			a.nodePorts[c], got.nodePorts[i] = n, c.port
		} else {
			groups[p.Port] = append(groups[p.Port], i)
		}
	}
	for i, p := range ports {
		group := groups[p.Port]
		if len(group) == 0 || group[0] != i {
			continue
		}
		enter("port "+p.Name, func(port int32) {
			for _, i := range group {
				a.nodePorts[portClaim{ports[i].Protocol, port}], got.nodePorts[i] = n, port
			}
		})
	}
}

// movedFrom reports what other Services have taken of what was allocated to one that does not name it.
func (a *allocator) movedFrom(svc *v1.Service, was, now *allocation, check *source.Findings) {
	inUse := func(owners ...types.NamespacedName) bool {
		return slices.ContainsFunc(owners, func(n types.NamespacedName) bool { return !a.out[n].refused })
	}
	moved := func(field string, from, to any) {
		check.Problem(field, fmt.Sprintf("it moves to %v; name it in the manifest to keep it for good", to), "the allocated %v belongs to another Service now", from)
	}
	for i := len(svc.Spec.ClusterIPs); i < min(len(was.ips), len(now.ips)); i++ {
		from := was.ips[i]
		if owner, taken := a.ips[netip.MustParseAddr(from)]; taken && from != now.ips[i] && inUse(owner) {
			moved(clusterIPField(i), from, now.ips[i])
		}
	}
	for i, p := range svc.Spec.Ports {
		if from := was.nodePorts[i]; p.NodePort == 0 && from > 0 && from != now.nodePorts[i] && inUse(a.portOwners(from)...) {
			moved(fmt.Sprintf("spec.ports[%d].nodePort", i), from, now.nodePorts[i])
		}
	}
	if from := was.health; svc.Spec.HealthCheckNodePort == 0 && from > 0 && from != now.health && inUse(a.portOwners(from)...) {
		moved("spec.healthCheckNodePort", from, now.health)
	}
}

// apply returns a copy of a Service with its allocation.
func (got *allocation) apply(svc *v1.Service) *v1.Service {
	out := *svc
	out.Spec.ClusterIPs = slices.Clone(got.ips)
	out.Spec.ClusterIP = got.ips[0]
	out.Spec.IPFamilies = got.families
	out.Spec.Ports = slices.Clone(svc.Spec.Ports)
	for i := range out.Spec.Ports {
		out.Spec.Ports[i].NodePort = max(0, got.nodePorts[i])
	}
	out.Spec.HealthCheckNodePort = got.health
	return &out
}
