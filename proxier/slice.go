package proxier

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/topology"
)

// slice holds what the proxier needs of an EndpointSlice.
type slice struct {
	Slice
	// triggered is the time of the change that caused the slice's last update; zero if not known.
	triggered time.Time
}

// endpointsFor returns the slice's endpoints for one port of a Service. Slices and Services are matched by the port's name and
// protocol, never by its number.
func (s *Slice) endpointsFor(key plan.Key) []topology.Endpoint {
	if s.Family != key.Family {
		return nil
	}
	want := SlicePort{Name: key.Port, Protocol: key.Protocol}
	first, _ := slices.BinarySearchFunc(s.Ports, want, SlicePort.compare)
	var out []topology.Endpoint
	for _, port := range s.Ports[first:] {
		if port.compare(want) != 0 {
			break
		}
		for _, ep := range s.Endpoints {
			ep.Addr = netip.AddrPortFrom(ep.Addr.Addr(), port.Number)
			out = append(out, ep)
		}
	}
	return out
}

// compare orders ports by what they are matched by.
func (p SlicePort) compare(o SlicePort) int {
	return cmp.Or(cmp.Compare(p.Name, o.Name), cmp.Compare(p.Protocol, o.Protocol))
}

// sliceService returns the Service that an EndpointSlice belongs to; false if it belongs to none, or to a headless one, which the
// presence of a label says, whatever its value.
func sliceService(es *discovery.EndpointSlice) (plan.Service, bool) {
	name := es.Labels[discovery.LabelServiceName]
	_, headless := es.Labels[v1.IsHeadlessService]
	return plan.Service{Namespace: es.Namespace, Name: name}, name != "" && !headless
}

// readSlice reads an EndpointSlice; nil if a proxy can't use it at all.
func readSlice(es *discovery.EndpointSlice) (*slice, []source.Finding) {
	f := &findings{object: "EndpointSlice " + es.Namespace + "/" + es.Name}
	out := &slice{Slice: Slice{Name: es.Name}}
	switch es.AddressType {
	case discovery.AddressTypeIPv4:
		out.Family = plan.IPv4
	case discovery.AddressTypeIPv6:
		out.Family = plan.IPv6
	default:
		f.note("addressType", "ignored", "a proxy can't send to endpoints of type %.20q", es.AddressType)
		return nil, f.list
	}
	for i, p := range es.Ports {
		port := SlicePort{Protocol: plan.TCP}
		if p.Name != nil {
			port.Name = *p.Name
		}
		if p.Protocol != nil {
			port.Protocol = plan.Protocol(*p.Protocol)
		}
		if p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
			f.problem(fmt.Sprintf("ports[%d].port", i), "this port has no endpoints from this slice",
				"the port number is not within 1-65535")
			continue
		}
		port.Number = uint16(*p.Port)
		out.Ports = append(out.Ports, port)
	}
	slices.SortStableFunc(out.Ports, SlicePort.compare)
	for i := range es.Endpoints {
		if ep, ok := readEndpoint(&es.Endpoints[i], out.Family, f, i); ok {
			out.Endpoints = append(out.Endpoints, ep)
		}
	}
	if text, ok := es.Annotations[source.AnnotationWeights]; ok {
		setWeights(text, out.Endpoints, f)
	}
	// The annotation is optional and may be wrong; it is for metrics only.
	out.triggered, _ = time.Parse(time.RFC3339Nano, es.Annotations[v1.EndpointsLastChangeTriggerTime])
	return out, f.list
}

func readEndpoint(e *discovery.Endpoint, family plan.Family, f *findings, i int) (topology.Endpoint, bool) {
	const effect = "this endpoint is not used"
	field := fmt.Sprintf("endpoints[%d].addresses", i)
	if len(e.Addresses) == 0 {
		f.problem(field, effect, "no address")
		return topology.Endpoint{}, false
	}
	// A slice's endpoint may list several addresses; only the first has a meaning (KEP-0752).
	field += "[0]"
	ip, ok := source.ParseIP(e.Addresses[0])
	if !ok || plan.FamilyOf(ip) != family {
		f.problem(field, effect, "%.80q is not an %s address", e.Addresses[0], family)
		return topology.Endpoint{}, false
	}
	if what := source.SpecialAddress(ip); what != "" {
		f.problem(field, effect, "%s is %s", ip, what)
		return topology.Endpoint{}, false
	}
	is := func(condition *bool, absent bool) bool {
		if condition == nil {
			return absent
		}
		return *condition
	}
	ep := topology.Endpoint{
		Addr:        netip.AddrPortFrom(ip, 0),
		Ready:       is(e.Conditions.Ready, true),
		Serving:     is(e.Conditions.Serving, true),
		Terminating: is(e.Conditions.Terminating, false),
	}
	if e.NodeName != nil {
		ep.Node = *e.NodeName
	}
	if e.Zone != nil {
		ep.Zone = *e.Zone
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
