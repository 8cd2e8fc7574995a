package proxier

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unique"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/topology"
)

// slice holds what the proxier needs of an EndpointSlice.
type slice struct {
	service   plan.Service
	name      string
	family    plan.Family
	ports     []SlicePort
	endpoints []packed
	// triggered is the time of the change that caused the slice's last update; zero if not known.
	triggered time.Time
}

// packed is an endpoint in a third of the memory of a topology.Endpoint: there may be hundreds of thousands, and of most, little is known.
type packed struct {
	addr                        netip.Addr
	node                        unique.Handle[string]
	details                     *details // nil for none
	weight                      uint16
	ready, serving, terminating bool
}

// details are fields of a topology.Endpoint that many lack, or have in common.
type details struct {
	zone, pod          string
	forNodes, forZones []string
}

func (d *details) equal(o *details) bool {
	return d.zone == o.zone && d.pod == o.pod && slices.Equal(d.forNodes, o.forNodes) && slices.Equal(d.forZones, o.forZones)
}

// pack packs endpoints.
func pack(list []topology.Endpoint) []packed {
	out := make([]packed, len(list))
	last := &details{}
	for i := range list {
		ep := &list[i]
		out[i] = packed{ep.Addr.Addr(), unique.Make(ep.Node), nil, ep.Weight, ep.Ready, ep.Serving, ep.Terminating}
		now := details{ep.Zone, ep.Pod, ep.ForNodes, ep.ForZones}
		if now.equal(&details{}) {
			continue
		}
		if !last.equal(&now) {
			last = &details{now.zone, now.pod, now.forNodes, now.forZones}
		}
		out[i].details = last
	}
	return out
}

// at returns the endpoint, with a port.
func (p *packed) at(port uint16) topology.Endpoint {
	out := topology.Endpoint{
		Addr: netip.AddrPortFrom(p.addr, port), Node: p.node.Value(), Weight: p.weight,
		Ready: p.ready, Serving: p.serving, Terminating: p.terminating,
	}
	if d := p.details; d != nil {
		out.Zone, out.Pod, out.ForNodes, out.ForZones = d.zone, d.pod, d.forNodes, d.forZones
	}
	return out
}

// described returns the slice as others see it.
func (s *slice) described() Slice {
	out := Slice{s.name, s.family, s.ports, make([]topology.Endpoint, len(s.endpoints))}
	for i := range s.endpoints {
		out.Endpoints[i] = s.endpoints[i].at(0)
	}
	return out
}

// appendEndpoints appends the slice's endpoints for one port of a Service.
func (s *slice) appendEndpoints(out []topology.Endpoint, key plan.Key) []topology.Endpoint {
	ports := portsFor(s.family, s.ports, key)
	out = slices.Grow(out, len(ports)*len(s.endpoints))
	for _, port := range ports {
		for i := range s.endpoints {
			out = append(out, s.endpoints[i].at(port.Number))
		}
	}
	return out
}

// portsFor returns those of a slice's ports that are for one port of a Service. They are matched by name and protocol, never by number.
func portsFor(family plan.Family, ports []SlicePort, key plan.Key) []SlicePort {
	if family != key.Family {
		return nil
	}
	want := SlicePort{Name: key.Port, Protocol: key.Protocol}
	first, _ := slices.BinarySearchFunc(ports, want, SlicePort.compare)
	end := first
	for end < len(ports) && ports[end].compare(want) == 0 {
		end++
	}
	return ports[first:end]
}

// compare orders ports by what they are matched by.
func (p SlicePort) compare(o SlicePort) int {
	return cmp.Or(cmp.Compare(p.Name, o.Name), cmp.Compare(p.Protocol, o.Protocol))
}

// readSlice reads an EndpointSlice; nil if a proxy can't use it at all.
func readSlice(es *discovery.EndpointSlice) (*slice, []source.Finding) {
	f := &source.Findings{Object: "EndpointSlice " + es.Namespace + "/" + es.Name}
	service, _ := source.ServiceOf(es)
	out := &slice{name: es.Name, service: plan.Service(service)}
	switch es.AddressType {
	case discovery.AddressTypeIPv4:
		out.family = plan.IPv4
	case discovery.AddressTypeIPv6:
		out.family = plan.IPv6
	default:
		f.Note("addressType", "ignored", "a proxy can't send to endpoints of type %.20q", es.AddressType)
		return nil, f.List
	}
	for i, p := range es.Ports {
		number := ptr.Deref(p.Port, 0)
		if number < 1 || number > 65535 {
			f.Problem(fmt.Sprintf("ports[%d].port", i), "this port has no endpoints from this slice",
				"the port number is not within 1-65535")
			continue
		}
		protocol := plan.Protocol(ptr.Deref(p.Protocol, v1.ProtocolTCP))
		out.ports = append(out.ports, SlicePort{ptr.Deref(p.Name, ""), protocol, uint16(number)})
	}
	slices.SortStableFunc(out.ports, SlicePort.compare)
	endpoints := make([]topology.Endpoint, 0, len(es.Endpoints))
	for i := range es.Endpoints {
		if ep, ok := readEndpoint(&es.Endpoints[i], out.family, f, i); ok {
			endpoints = append(endpoints, ep)
		}
	}
	if text, ok := es.Annotations[source.AnnotationWeights]; ok {
		setWeights(text, endpoints, f)
	}
	out.endpoints = pack(endpoints)
	// The annotation is optional and may be wrong; it is for metrics only.
	out.triggered, _ = time.Parse(time.RFC3339Nano, es.Annotations[v1.EndpointsLastChangeTriggerTime])
	return out, f.List
}

func readEndpoint(e *discovery.Endpoint, family plan.Family, f *source.Findings, i int) (topology.Endpoint, bool) {
	unused := func(part, detail string, args ...any) (topology.Endpoint, bool) {
		f.Problem(fmt.Sprintf("endpoints[%d].addresses%s", i, part), "this endpoint is not used", detail, args...)
		return topology.Endpoint{}, false
	}
	if len(e.Addresses) == 0 {
		return unused("", "no address")
	}
	// A slice's endpoint may list several addresses; only the first has a meaning (KEP-0752).
	ip, ok := source.ParseIP(e.Addresses[0])
	if !ok || plan.FamilyOf(ip) != family {
		return unused("[0]", "%.80q is not an %s address", e.Addresses[0], family)
	}
	if what := source.SpecialAddress(ip); what != "" {
		return unused("[0]", "%s is %s", ip, what)
	}
	ep := topology.Endpoint{
		Addr:        netip.AddrPortFrom(ip, 0),
		Node:        ptr.Deref(e.NodeName, ""),
		Zone:        ptr.Deref(e.Zone, ""),
		Ready:       ptr.Deref(e.Conditions.Ready, true),
		Serving:     ptr.Deref(e.Conditions.Serving, true),
		Terminating: ptr.Deref(e.Conditions.Terminating, false),
	}
	if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
		ep.Pod = e.TargetRef.Name
	}
	if e.Hints != nil {
		for _, z := range e.Hints.ForZones {
			ep.ForZones = append(ep.ForZones, z.Name)
		}
		for _, n := range e.Hints.ForNodes {
			ep.ForNodes = append(ep.ForNodes, n.Name)
		}
	}
	return ep, true
}
