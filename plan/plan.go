// Package plan holds the desired forwarding state of one node as plain data.
//
// A Plan is what the proxier makes of Services, EndpointSlices and the Node, and everything that a backend may read. It knows
// neither Kubernetes API types nor the kernel. Everything in it has a stable order, so that the same cluster state gives the same
// bytes of rules on every node and after every restart.
package plan

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"nodeproxy/internal/keyed"
)

// Family is an IP address family.
type Family uint8

// The address families, with the numbers of their IP versions.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Families lists both address families in the order in which everything is rendered.
var Families = [...]Family{IPv4, IPv6}

// FamilyOf returns the family of an address; an IPv4-mapped IPv6 address counts as IPv4.
func FamilyOf(a netip.Addr) Family {
	if a.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// Unmapped returns a range masked, converted to IPv4 if it consists of IPv4-mapped IPv6 addresses, which no rule accepts. It
// returns false for a range that holds those addresses and others.
func Unmapped(p netip.Prefix) (netip.Prefix, bool) {
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return netip.Prefix{}, false
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), p.IsValid()
}

// Bits is the length of an address of this family: 32 or 128.
func (f Family) Bits() int {
	if f == IPv4 {
		return 32
	}
	return 128
}

var loopback4, loopback6 = netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")

// All is the range of all addresses.
func (f Family) All() netip.Prefix {
	return netip.PrefixFrom(f.Loopback().Addr(), 0).Masked()
}

// Loopback is the range of a family's loopback addresses.
func (f Family) Loopback() netip.Prefix {
	if f == IPv4 {
		return loopback4
	}
	return loopback6
}

func (f Family) String() string {
	switch f { // Everything that is reported of a ServicePort comes by here.
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return fmt.Sprintf("IPv%d", uint8(f))
}

// Protocol is a transport protocol, spelled as in the Kubernetes API.
type Protocol string

// The protocols that a Service can have.
const (
	TCP  Protocol = "TCP"
	UDP  Protocol = "UDP"
	SCTP Protocol = "SCTP"
)

// Lower is the protocol's name as iptables and IANA spell it.
func (p Protocol) Lower() string {
	switch p { // Nearly every rule has it.
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return strings.ToLower(string(p))
}

// Service names a Service.
type Service struct {
	Namespace, Name string
}

func (s Service) String() string { return s.Namespace + "/" + s.Name }

// ParseService reads the name of a Service as people write it: NAMESPACE/NAME; NAME, for which namespace is given; or as DNS has it, which is
// NAME.NAMESPACE, NAME.NAMESPACE.svc or, with the domain of the cluster, NAME.NAMESPACE.svc.DOMAIN. It reports whether the text is one of these.
func ParseService(text, namespace string) (Service, bool) {
	name := text
	if before, after, found := strings.Cut(text, "/"); found {
		namespace, name = before, after
	} else if list := strings.Split(strings.TrimSuffix(text, "."), "."); len(list) == 2 || len(list) > 2 && list[2] == "svc" {
		name, namespace = list[0], list[1]
	}
	if namespace == "" || name == "" || strings.ContainsAny(name, "/.") || strings.Contains(namespace, ".") {
		return Service{}, false
	}
	return Service{Namespace: namespace, Name: name}, true
}

// Compare orders Services by namespace, then name.
func (s Service) Compare(o Service) int {
	if c := cmp.Compare(s.Namespace, o.Namespace); c != 0 {
		return c
	}
	return cmp.Compare(s.Name, o.Name)
}

// Key identifies one ServicePort: a port of a Service, in one family.
type Key struct {
	Service  Service
	Port     string // the port's name; empty for a Service with a single unnamed port
	Protocol Protocol
	Family   Family
}

// PortName is "namespace/name:port", or "namespace/name" where the port has no name. Rule comments carry it, and chain
// names are derived from it, in the same form as kube-proxy's.
func (k Key) PortName() string {
	if k.Port == "" {
		return k.Service.String()
	}
	return k.Service.String() + ":" + k.Port
}

func (k Key) String() string {
	return k.PortName() + "/" + string(k.Protocol) + "/" + k.Family.String()
}

// Compare orders keys by Service, port name, protocol and family.
func (k Key) Compare(o Key) int {
	// Not cmp.Or, for which everything would be compared: large plans are sorted by this.
	if c := k.Service.Compare(o.Service); c != 0 {
		return c
	}
	return cmp.Or(cmp.Compare(k.Port, o.Port), cmp.Compare(k.Protocol, o.Protocol), cmp.Compare(k.Family, o.Family))
}

// Keys is a set of ServicePorts, such as those that a change affects.
type Keys map[Key]struct{}

// Add adds k to the set.
func (ks Keys) Add(k Key) { ks[k] = struct{}{} }

// Sorted returns the keys of one family in order.
func (ks Keys) Sorted(f Family) []Key {
	out := make([]Key, 0, len(ks))
	for k := range ks {
		if k.Family == f {
			out = append(out, k)
		}
	}
	slices.SortFunc(out, Key.Compare)
	return out
}

// FrontendKind says which field of a Service a frontend comes from.
type FrontendKind uint8

// The kinds of frontend, in order of precedence: where two Services ask for the same address, port and protocol, a cluster IP
// (which the API server allocates) wins over a load balancer IP (which a controller writes), and that wins over an external IP
// (which any user may write).
const (
	ClusterIP FrontendKind = iota
	LoadBalancerIP
	ExternalIP
	NodePort
	HealthCheckNodePort
)

var frontendKindNames = [...]string{"cluster IP", "load balancer IP", "external IP", "node port", "health check node port"}

func (k FrontendKind) String() string { return frontendKindNames[k] }

// Frontend is an address, protocol and port at which clients reach a Service. A node port has no address of its own:
// its Addr is the zero Addr, and it is reached at those addresses of the node that Settings.NodePortAddresses allows.
type Frontend struct {
	Addr     netip.Addr
	Protocol Protocol
	Port     uint16
	Kind     FrontendKind
}

func (f Frontend) String() string {
	if !f.Addr.IsValid() {
		return fmt.Sprintf("%s %d/%s", f.Kind, f.Port, f.Protocol)
	}
	return fmt.Sprintf("%s %s/%s", f.Kind, netip.AddrPortFrom(f.Addr, f.Port), f.Protocol)
}

// Compare orders frontends by kind, address, protocol and port.
func (f Frontend) Compare(o Frontend) int {
	return cmp.Or(
		cmp.Compare(f.Kind, o.Kind),
		f.Addr.Compare(o.Addr),
		cmp.Compare(f.Protocol, o.Protocol),
		cmp.Compare(f.Port, o.Port),
	)
}

// Shadowed is a frontend that a ServicePort asks for but does not get, because another one takes precedence.
type Shadowed struct {
	Frontend Frontend
	Owner    Key
}

// Policy is a traffic policy.
type Policy uint8

// The traffic policies: Cluster sends to any endpoint of the cluster, Local to those on this node only (KEP-2086).
const (
	Cluster Policy = iota
	Local
)

func (p Policy) String() string {
	if p == Local {
		return "Local"
	}
	return "Cluster"
}

// Endpoint is a destination of a ServicePort's traffic.
type Endpoint struct {
	Addr netip.AddrPort
	// Local is true if the endpoint runs on this node.
	Local bool
	// Unplaced is true if the endpoint's node is not known: it may be this one.
	Unplaced bool
	// Terminating is true for an endpoint that is terminating but still serves, and is used because no ready one is left
	// (KEP-1669).
	Terminating bool
	// Weight is the endpoint's relative share of traffic, for schedulers that use weights; zero counts as 1. Modes ipvs
	// and nftables have such schedulers.
	Weight uint16
}

// Scheduler says how modes ipvs and nftables select endpoints. The zero Scheduler is the default one.
type Scheduler struct {
	// Name is the name of the kernel module without "ip_vs_", such as rr.
	Name string
	// Ports makes the schedulers sh and mh hash the client's port along with its address. Fallback makes them select another
	// endpoint if the selected one accepts no connections.
	Ports, Fallback bool
}

// Schedulers are the names of all schedulers that a kernel may have.
var Schedulers = []string{"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf", "twos"}

// Reason says why an endpoint is not used.
type Reason string

// The reasons to exclude an endpoint.
const (
	NotReady           Reason = "not ready"
	Terminating        Reason = "terminating, and ready endpoints exist"
	TerminatingStopped Reason = "terminating and no longer serving"
	NotForThisNode     Reason = "its node hints name other nodes"
	NotForThisZone     Reason = "its zone hints name other zones"
	NotLocal           Reason = "on another node, and the traffic policy is Local"
	NodeUnknown        Reason = "its EndpointSlice names no node, and the traffic policy is Local"
)

// Exclusion is an endpoint that a policy excludes, with the reason.
type Exclusion struct {
	Addr   netip.AddrPort
	Policy Policy
	Reason Reason
}

// Endpoints is the result of endpoint selection for one ServicePort on this node.
type Endpoints struct {
	// Cluster are the endpoints for traffic under policy Cluster; nil if no frontend uses that policy.
	Cluster []Endpoint
	// Local are the endpoints for traffic under policy Local; nil if no frontend uses that policy.
	Local []Endpoint
	// Any is true if the ServicePort has a usable endpoint on any node. If it has none, traffic is rejected; if it has some, but
	// none that the policy allows here, traffic is dropped, so that a load balancer tries another node.
	Any bool
	// Excluded are the excluded endpoints, in order of policy and address.
	Excluded []Exclusion
}

// All returns the endpoints of both policies, each address once, in order of address.
func (e Endpoints) All() []Endpoint {
	if len(e.Local) == 0 {
		return e.Cluster
	}
	if len(e.Cluster) == 0 {
		return e.Local
	}
	all := slices.Concat(e.Cluster, e.Local)
	slices.SortStableFunc(all, func(a, b Endpoint) int { return a.Addr.Compare(b.Addr) })
	return slices.CompactFunc(all, func(a, b Endpoint) bool { return a.Addr == b.Addr })
}

// ServicePort is the desired state of one port of one Service in one family. It is immutable once it is in a Plan: a change
// replaces it.
type ServicePort struct {
	Key Key
	// Frontends are the frontends that this ServicePort owns, in order.
	Frontends []Frontend
	// Shadowed are those that it asks for but another ServicePort owns, in order.
	Shadowed []Shadowed

	// InternalPolicy is for traffic to the cluster IP, ExternalPolicy for traffic to every other frontend.
	InternalPolicy, ExternalPolicy Policy
	// SourceRanges, if not empty, are the only sources that may reach the load balancer IPs. They do not apply to node ports and
	// external IPs (as in kube-proxy). They are canonical.
	SourceRanges []netip.Prefix
	// Affinity, if not zero, is how long a client address keeps its endpoint, in whole seconds.
	Affinity time.Duration
	// Scheduler is the one that the Service asks for.
	Scheduler Scheduler
	// ResetTCP asks for TCP connections to an endpoint that is gone (not merely terminating) to be reset when the client next
	// sends. It is never set for other protocols.
	ResetTCP bool
	// Critical marks what a node needs before anything else works (the API server, cluster DNS): it is programmed first.
	Critical bool

	Endpoints
}

// Has reports whether the ServicePort owns a frontend.
func (sp *ServicePort) Has(f Frontend) bool {
	_, found := slices.BinarySearchFunc(sp.Frontends, f, Frontend.Compare)
	return found
}

// HasExternal reports whether the ServicePort has a frontend to which the external policy applies.
func (sp *ServicePort) HasExternal() bool {
	return slices.ContainsFunc(sp.Frontends, func(f Frontend) bool {
		return f.Kind == LoadBalancerIP || f.Kind == ExternalIP || f.Kind == NodePort
	})
}

// ForPolicy returns the endpoints for traffic under p.
func (sp *ServicePort) ForPolicy(p Policy) []Endpoint {
	if p == Local {
		return sp.Endpoints.Local
	}
	return sp.Endpoints.Cluster
}

// Equal reports whether two ServicePorts ask for the same state.
func (sp *ServicePort) Equal(o *ServicePort) bool {
	return sp.Key == o.Key &&
		sp.InternalPolicy == o.InternalPolicy &&
		sp.ExternalPolicy == o.ExternalPolicy &&
		sp.Affinity == o.Affinity &&
		sp.Critical == o.Critical &&
		sp.Scheduler == o.Scheduler &&
		sp.ResetTCP == o.ResetTCP &&
		sp.Any == o.Any &&
		slices.Equal(sp.Frontends, o.Frontends) &&
		slices.Equal(sp.Shadowed, o.Shadowed) &&
		slices.Equal(sp.SourceRanges, o.SourceRanges) &&
		slices.Equal(sp.Endpoints.Cluster, o.Endpoints.Cluster) &&
		slices.Equal(sp.Endpoints.Local, o.Endpoints.Local) &&
		slices.Equal(sp.Excluded, o.Excluded)
}

// Ports are ServicePorts by key, for who keeps very many of them.
type Ports = keyed.Set[Key, ServicePort]

// NewPorts returns Ports without any.
func NewPorts() *Ports { return keyed.New(func(sp *ServicePort) Key { return sp.Key }) }

// Plan is the desired state of a node.
type Plan struct {
	Node     Node
	Settings Settings
	// Services holds every ServicePort. Use Set and Delete to change it.
	Services map[Key]*ServicePort
	// Partial says that not all ServicePorts may be known. The kernel's state for frontends that the plan does not have must stay
	// as it is, and work.
	Partial bool
	// ports lists the ServicePorts of each Service in order of key, so that they are found without a walk over the plan.
	ports map[Service][]*ServicePort
}

// New returns an empty plan.
func New(node Node, settings Settings) *Plan {
	return &Plan{Node: node, Settings: settings, Services: map[Key]*ServicePort{}, ports: map[Service][]*ServicePort{}}
}

// Address is a frontend without its kind: the destination of a packet. Addr is invalid for node ports.
type Address struct {
	Addr     netip.Addr
	Protocol Protocol
	Port     uint16
}

// Addresses returns the addresses of all frontends of a family.
func (p *Plan) Addresses(family Family) map[Address]bool {
	out := map[Address]bool{}
	for k, sp := range p.Services {
		if k.Family == family {
			for _, f := range sp.Frontends {
				out[Address{f.Addr, f.Protocol, f.Port}] = true
			}
		}
	}
	return out
}

// Adds reports whether a change of these ServicePorts adds one of the family that was not there before, where before returns nil.
func (p *Plan) Adds(changed Keys, family Family, before func(Key) *ServicePort) bool {
	for k := range changed {
		if k.Family == family && p.Services[k] != nil && before(k) == nil {
			return true
		}
	}
	return false
}

// ErrPartial is why the kernel is not changed from another mode's objects to this one's while not all ServicePorts are known.
var ErrPartial = errors.New("the rules of another proxy mode are in force here and stay until all objects have been read, as they may serve some that are not known yet")

// Set adds a ServicePort, or replaces the one with its key.
func (p *Plan) Set(sp *ServicePort) {
	ports := p.ports[sp.Key.Service]
	if i, found := find(ports, sp.Key); found {
		ports[i] = sp
	} else {
		p.ports[sp.Key.Service] = slices.Insert(ports, i, sp)
	}
	p.Services[sp.Key] = sp
}

// find returns where a key is, or would be, among ServicePorts in order of key.
func find(ports []*ServicePort, k Key) (at int, found bool) {
	return slices.BinarySearchFunc(ports, k, func(sp *ServicePort, k Key) int { return sp.Key.Compare(k) })
}

// Delete removes a ServicePort.
func (p *Plan) Delete(k Key) {
	delete(p.Services, k)
	ports := p.ports[k.Service]
	i, found := find(ports, k)
	if !found {
		return
	}
	if ports = slices.Delete(ports, i, i+1); len(ports) == 0 {
		delete(p.ports, k.Service)
	} else {
		p.ports[k.Service] = ports
	}
}

// KeysOf returns the keys of one Service in order.
func (p *Plan) KeysOf(svc Service) []Key {
	var keys []Key
	for _, sp := range p.ports[svc] {
		keys = append(keys, sp.Key)
	}
	return keys
}

// Serves reports whether a Service has any ServicePort.
func (p *Plan) Serves(svc Service) bool { return len(p.ports[svc]) > 0 }

// Sorted returns the ServicePorts of one family in order of key. It walks everything: for full syncs and for printing.
func (p *Plan) Sorted(f Family) []*ServicePort {
	out := make([]*ServicePort, 0, len(p.Services))
	for k, sp := range p.Services {
		if k.Family == f {
			out = append(out, sp)
		}
	}
	slices.SortFunc(out, func(a, b *ServicePort) int { return a.Key.Compare(b.Key) })
	return out
}

// Node is what the plan needs to know about the node itself.
type Node struct {
	Name string
	// Zone is the node's label topology.kubernetes.io/zone; empty if it has none.
	Zone string
	// IPs are the node's own primary addresses, at most one a family, from its status.
	IPs []netip.Addr
}

// IP returns the node's primary address of a family, or the zero Addr.
func (n Node) IP(f Family) netip.Addr {
	for _, ip := range n.IPs {
		if FamilyOf(ip) == f {
			return ip
		}
	}
	return netip.Addr{}
}

// Equal reports whether two nodes are the same in every respect.
func (n Node) Equal(o Node) bool {
	return n.Name == o.Name && n.Zone == o.Zone && slices.Equal(n.IPs, o.IPs)
}
