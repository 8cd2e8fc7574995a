package proxier

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/topology"
)

// Description is what is known of one Service: its object, its EndpointSlices and what follows from them for this node. A receiver
// must not modify what it refers to.
type Description struct {
	Service plan.Service
	// NodeKnown is true if there is or was an object of this node.
	NodeKnown bool
	// NodeUnread is what to do where there may be such an object that has not been read; "" elsewhere.
	NodeUnread string
	// Excluded is true if that object has the label by which load balancers leave the node out.
	Excluded bool
	// Leaving is true if the node is about to be removed, or its object is gone, so that health checks answer 503.
	Leaving bool
	// NodesDown says of other nodes that are not ready why.
	NodesDown map[string]string
	// PodCIDRs is true if that object has a range of Pods' addresses of its own.
	PodCIDRs bool
	// Exists is true if there is a Service object. EndpointSlices may exist without one.
	Exists bool
	Object
	// Selector is spec.selector.
	Selector map[string]string
	// Alias is the Service that has the ExternalName, if that has the form of one in the usual cluster domain, and AliasKnown says whether it is
	// known. AliasShort is true for a name that lacks the cluster domain: within the cluster, search lists complete it, but not where DNS
	// answers with it.
	Alias                  plan.Service
	AliasKnown, AliasShort bool
	// Slices are the EndpointSlices that a proxy can use, in order of name.
	Slices []Slice
	// ServicePorts are the desired state, in order of key; none if the Service is not proxied.
	ServicePorts []*plan.ServicePort
	// Contested are frontends of the Service that others ask for, too, up to a number.
	Contested []Contested
	// Frontends are the endpoints in use that are the cluster IP and port of a Service, or a node port at this node, with what they are.
	Frontends map[netip.AddrPort]Owned
	// Findings are about the Service and its EndpointSlices. Where it has none of these, Unused are about others of its namespace.
	Findings, Unused []source.Finding
	// Strays are the EndpointSlices of its namespace that name a Service which is not known, with that name, where it has none itself and no selector.
	Strays map[string]string
}

// Owned is a frontend of a Service.
type Owned struct {
	Frontend plan.Frontend
	By       plan.Service
}

// Contested is a frontend that a ServicePort owns, and another that asks for it.
type Contested struct {
	Frontend plan.Frontend
	By       plan.Key
}

// mostContested is how many of them are described: one Service may have thousands of frontends.
const mostContested = 8

// Port is a port of a Service, as its object spells it.
type Port struct {
	Name     string
	Protocol plan.Protocol
	Number   uint16
	Target   string // a number, or the name of a port of the Pods
}

// Slice is an EndpointSlice. Each of its ports, which are in order of name and protocol, applies to each of its endpoints, whose own port
// is 0.
type Slice struct {
	Name      string
	Family    plan.Family
	Ports     []SlicePort
	Endpoints []topology.Endpoint
}

// SlicePort is a port of an EndpointSlice.
type SlicePort struct {
	Name     string
	Protocol plan.Protocol
	Number   uint16
}

// Entry is an endpoint as an EndpointSlice lists it.
type Entry struct {
	topology.Endpoint
	Slice string
}

// Entries returns all entries for a ServicePort, in order of slice. An endpoint may have several.
func (d *Description) Entries(k plan.Key) []Entry {
	var out []Entry
	for _, s := range d.Slices {
		for _, port := range portsFor(s.Family, s.Ports, k) {
			for _, ep := range s.Endpoints {
				ep.Addr = netip.AddrPortFrom(ep.Addr.Addr(), port.Number)
				out = append(out, Entry{ep, s.Name})
			}
		}
	}
	return out
}

// Endpoints returns the endpoints of a ServicePort, used or not, in order of address.
func (d *Description) Endpoints(k plan.Key) []topology.Endpoint {
	var out []topology.Endpoint
	for _, e := range d.Entries(k) {
		out = append(out, e.Endpoint)
	}
	return topology.Merge(out)
}

// Object is what a Service's object says that is only described.
type Object struct {
	// Type is spec.type, and Ports are spec.ports.
	Type  string
	Ports []Port
	// Headless is true for a Service without a cluster IP. ExternalName is the name that a Service is an alias for.
	Headless     bool
	ExternalName string
	// PublishNotReady is spec.publishNotReadyAddresses.
	PublishNotReady bool
	// Ingress is the number of entries of status.loadBalancer.ingress.
	Ingress int
	// LeftToBalancer are the addresses among these that nodes do not take (ipMode Proxy).
	LeftToBalancer []string
	// ProxyProtocol is the annotation by which the load balancer is to put a PROXY header before what it passes on; empty if there is none.
	ProxyProtocol string
}

// packedObject is an Object, and the selector, in half of the memory: of most, little is known.
type packedObject struct {
	kind     string
	ports    []Port
	selector []label
	rest     *Object // without Type and Ports; nil where all of it is empty
}

// object returns the Object.
func (p *packedObject) object() (out Object) {
	if p.rest != nil {
		out = *p.rest
	}
	out.Type, out.Ports = p.kind, p.ports
	return out
}

// label is a part of a selector. A map takes 350 bytes however few there are, and most Services have one or two.
type label struct{ key, value string }

func packObject(svc *v1.Service) packedObject {
	out := packedObject{kind: string(svc.Spec.Type)}
	if n := len(svc.Spec.Selector); n > 0 {
		out.selector = make([]label, 0, n)
	}
	for key, value := range svc.Spec.Selector {
		out.selector = append(out.selector, label{key, value})
	}
	rest := Object{Ingress: len(svc.Status.LoadBalancer.Ingress), PublishNotReady: svc.Spec.PublishNotReadyAddresses,
		ProxyProtocol: source.ProxyProtocol(svc.Annotations)}
	if svc.Spec.Type == v1.ServiceTypeExternalName {
		rest.ExternalName = strings.TrimSuffix(svc.Spec.ExternalName, ".")
	} else {
		rest.Headless = svc.Spec.ClusterIP == v1.ClusterIPNone
	}
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IP != "" && in.IPMode != nil && *in.IPMode == v1.LoadBalancerIPModeProxy {
			rest.LeftToBalancer = append(rest.LeftToBalancer, in.IP)
		}
	}
	if rest.Headless || rest.ExternalName != "" || rest.PublishNotReady || rest.Ingress > 0 || rest.ProxyProtocol != "" {
		rest := rest
		out.rest = &rest
	}
	for _, p := range svc.Spec.Ports {
		port := Port{Name: p.Name, Protocol: plan.Protocol(p.Protocol), Number: uint16(p.Port), Target: p.TargetPort.String()}
		if port.Target == "0" || port.Target == "" { // The API server fills it in; a file may not have it.
			port.Target = strconv.Itoa(int(p.Port))
		}
		out.ports = append(out.ports, port)
	}
	return out
}

// Describe returns what is known of a Service; false if nothing is.
func (s *State) Describe(id plan.Service) (*Description, bool) {
	svc := s.services[id]
	if svc == nil {
		return nil, false
	}
	d := &Description{
		Service: id, NodeKnown: s.nodeKnown, NodeUnread: s.haveNodeRead(), Excluded: s.excluded, Leaving: s.leaving, NodesDown: map[string]string{},
		PodCIDRs: s.podCIDRs, Exists: svc.exists, Object: svc.object.object(), Frontends: map[netip.AddrPort]Owned{},
		Findings: slices.Clone(s.reported["Service "+id.String()]),
	}
	for _, l := range svc.object.selector {
		if d.Selector == nil {
			d.Selector = map[string]string{}
		}
		d.Selector[l.key] = l.value
	}
	s.describeAlias(d)
	for name, why := range s.otherNodes {
		if why != "" {
			d.NodesDown[name] = why
		}
	}
	for _, slice := range svc.slices {
		d.Slices = append(d.Slices, slice.described())
		d.Findings = append(d.Findings, s.reported["EndpointSlice "+id.Namespace+"/"+slice.name]...)
	}
	if len(d.Slices) == 0 {
		var others []string
		for object := range s.reported {
			if strings.HasPrefix(object, "EndpointSlice "+id.Namespace+"/") {
				others = append(others, object)
			}
		}
		if len(d.Selector) == 0 { // Else a controller makes them.
			d.Strays = s.strays(id.Namespace)
		}
		slices.Sort(others)
		for _, object := range others {
			d.Unused = append(d.Unused, s.reported[object]...)
		}
	}
	d.Findings = append(d.Findings, s.reported["shadowed "+id.String()]...)
	for _, k := range s.plan.KeysOf(id) {
		sp := s.plan.Services[k]
		for _, ep := range sp.All() {
			at := plan.Frontend{Addr: ep.Addr.Addr(), Protocol: k.Protocol, Port: ep.Addr.Port()}
			if slices.Contains(s.plan.Node.IPs, at.Addr) && s.plan.Settings.NodePortsAnswer(s.plan.Node, at.Addr) {
				at.Addr = netip.Addr{}
			}
			if owner, is := s.claims.owners[claimOf(at, k.Family)]; is && (owner.kind == plan.ClusterIP || owner.kind == plan.NodePort) {
				at.Kind = owner.kind
				d.Frontends[ep.Addr] = Owned{at, owner.key.Service}
			}
		}
		for _, f := range sp.Frontends {
			others := s.claims.others[claimOf(f, k.Family)]
			if len(others) > 0 && len(d.Contested) < mostContested && others[0].key.Service != id {
				d.Contested = append(d.Contested, Contested{f, *others[0].key})
			}
		}
		d.ServicePorts = append(d.ServicePorts, sp)
		d.Findings = append(d.Findings, s.reported["reserved "+k.String()]...)
	}
	return d, true
}

// strays returns the EndpointSlices of a namespace that name a Service which is not known, with that name.
func (s *State) strays(namespace string) map[string]string {
	out := map[string]string{}
	for id, svc := range s.services {
		if id.Namespace != namespace || svc.exists {
			continue
		}
		for _, slice := range svc.slices {
			out[slice.name] = id.Name
		}
	}
	return out
}

// describeAlias says which Service an ExternalName is the name of. One without the cluster domain may be any other, unless there is such a Service.
func (s *State) describeAlias(d *Description) {
	name, full := strings.CutSuffix(strings.ToLower(d.ExternalName), ".cluster.local")
	name, ofService := strings.CutSuffix(name, ".svc")
	svc, ns, two := strings.Cut(name, ".")
	if !two {
		ns = d.Service.Namespace
	}
	if svc == "" || strings.Contains(ns, ".") || full && !ofService || ofService && !two {
		return
	}
	alias := plan.Service{Namespace: ns, Name: svc}
	other := s.services[alias]
	if known := other != nil && other.exists; known || ofService {
		d.Alias, d.AliasKnown, d.AliasShort = alias, known, !full
	}
}

// EndpointsOf iterates over the endpoints of all Services of a namespace, used or not, with port 0. Those in several EndpointSlices come
// several times.
func (s *State) EndpointsOf(namespace string) iter.Seq[topology.Endpoint] {
	return func(yield func(topology.Endpoint) bool) {
		for id, svc := range s.services {
			if id.Namespace != namespace {
				continue
			}
			for _, slice := range svc.slices {
				for i := range slice.endpoints {
					if !yield(slice.endpoints[i].at(0)) {
						return
					}
				}
			}
		}
	}
}

// Pods iterates over the Pods of all endpoints, as namespace and name, in no order. Those of several EndpointSlices come several times.
func (s *State) Pods() iter.Seq2[string, string] {
	return func(yield func(namespace, name string) bool) {
		for id, svc := range s.services {
			for _, slice := range svc.slices {
				for i := range slice.endpoints {
					if d := slice.endpoints[i].details; d != nil && d.pod != "" && !yield(id.Namespace, d.pod) {
						return
					}
				}
			}
		}
	}
}

// Services returns the Services that have an object or EndpointSlices, in no order: sorting them would hold up a sync.
func (s *State) Services() []plan.Service {
	return slices.Collect(maps.Keys(s.services))
}

// Findings returns what is wrong with objects, and what else their owners should know, in order of object.
func (s *State) Findings() []source.Finding {
	var out []source.Finding
	for _, object := range slices.Sorted(maps.Keys(s.reported)) {
		out = append(out, s.reported[object]...)
	}
	return out
}
