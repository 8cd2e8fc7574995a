// Package controlplane does what the API server and the controllers of a cluster would do with a set of objects: it sets defaults
// and validates (Admit), allocates cluster IPs and node ports, mirrors Endpoints, and makes EndpointSlices of Pods (Cluster). It
// knows objects but not where they come from: a caller that reads them from files adds the places to the findings.
package controlplane

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// Ranges are the ranges of cluster IPs and node ports.
type Ranges struct {
	// ServiceCIDRs are the ranges of cluster IPs, at most one for each family; the first is that of Services that ask for no
	// family. Default: 10.96.0.0/16. ServiceCIDR objects are delivered, but nothing is allocated from them.
	ServiceCIDRs []netip.Prefix
	// NodePorts is the range of node ports. Default: 30000-32767.
	NodePorts plan.PortRange
}

// complete returns the ranges with their defaults. It fails if they are invalid.
func (r Ranges) complete() (Ranges, error) {
	if len(r.ServiceCIDRs) == 0 {
		r.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	}
	for i, cidr := range r.ServiceCIDRs {
		if !cidr.IsValid() {
			return r, fmt.Errorf("service CIDR %d is not a CIDR", i+1)
		}
		for _, other := range r.ServiceCIDRs[:i] {
			if familyOf(other.Addr()) == familyOf(cidr.Addr()) {
				return r, fmt.Errorf("service CIDRs %s and %s are of one family; only one of each can be used", other, cidr)
			}
		}
	}
	if r.NodePorts == (plan.PortRange{}) {
		r.NodePorts = plan.PortRange{First: 30000, Last: 32767}
	}
	if r.NodePorts.First == 0 || r.NodePorts.First > r.NodePorts.Last {
		return r, fmt.Errorf("%s is not a range of node ports", r.NodePorts)
	}
	return r, nil
}

// Report receives all findings on a topic, which are about one object and replace those that it received before. The receiver completes
// them by the object and its place.
type Report func(topic string, about ID, found []source.Finding)

// Cluster is a set of objects, and what the API server and the controllers would make of them. It is incremental: a change costs
// work for the Services that it concerns only. What it delivers is a function of the objects alone.
type Cluster struct {
	ranges     Ranges
	report     Report
	objects    map[ID]any
	namespaces map[string]*namespace
	granted    *allocator
	moved      map[types.NamespacedName]*allocation // what Services had that others have now

	// What the last update has changed.
	batch   source.Batch
	dirty   map[types.NamespacedName]bool
	changed map[types.NamespacedName]bool // Services whose request changed
}

// namespace has the Pods of a namespace, and what belongs to its Services, by name.
type namespace struct {
	pods     map[string]*v1.Pod
	services map[string]*knownService
}

// knownService is what is known of one Service.
type knownService struct {
	object      *v1.Service // nil if there is none
	delivered   *v1.Service
	given, made map[string]*discovery.EndpointSlice // by name: those that are objects, and those that controllers make
}

// New returns an empty cluster. It fails if the ranges are invalid.
func New(ranges Ranges, report Report) (*Cluster, error) {
	ranges, err := ranges.complete()
	return &Cluster{
		ranges: ranges, report: report, objects: map[ID]any{}, namespaces: map[string]*namespace{},
		granted: &allocator{}, moved: map[types.NamespacedName]*allocation{},
	}, err
}

// Update applies new versions of objects, nil for those that are gone, and returns the batch to deliver.
func (c *Cluster) Update(objects map[ID]any) source.Batch {
	c.batch = source.Batch{
		Services:       map[types.NamespacedName]*v1.Service{},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{},
		ServiceCIDRs:   map[string]*networking.ServiceCIDR{},
		Nodes:          map[string]*v1.Node{},
	}
	c.dirty, c.changed = map[types.NamespacedName]bool{}, map[types.NamespacedName]bool{}
	for id, obj := range objects {
		c.set(id, obj)
	}
	if len(c.changed) > 0 {
		c.allocate()
	}
	for name := range c.dirty {
		c.recompute(name)
	}
	return c.batch
}

// set replaces an object and notes the Services that it concerns.
func (c *Cluster) set(id ID, after any) {
	before := c.objects[id]
	if before == after || equality.Semantic.DeepEqual(before, after) {
		return
	}
	if after == nil {
		delete(c.objects, id)
	} else {
		c.objects[id] = after
	}
	name := types.NamespacedName{Namespace: id.Namespace, Name: id.Name}
	switch id.Kind {
	case kindService:
		was, is := as[v1.Service](before), as[v1.Service](after)
		c.service(name).object, c.dirty[name] = is, true
		if was == nil || is == nil || !equality.Semantic.DeepEqual(was.Spec, is.Spec) {
			c.changed[name] = true
		}
	case kindEndpointSlice:
		c.setSlice(name, as[discovery.EndpointSlice](before), as[discovery.EndpointSlice](after))
	case kindEndpoints:
		c.dirty[name] = true
	case kindPod:
		was, is := as[v1.Pod](before), as[v1.Pod](after)
		in := c.namespace(id.Namespace)
		if in.pods[id.Name] = is; is == nil {
			delete(in.pods, id.Name)
		}
		for service, svc := range in.services {
			if selects(svc.object, was) || selects(svc.object, is) {
				c.dirty[types.NamespacedName{Namespace: id.Namespace, Name: service}] = true
			}
		}
	case kindNode:
		was, is := as[v1.Node](before), as[v1.Node](after)
		c.batch.Nodes[id.Name] = is
		if zoneOf(was) != zoneOf(is) { // That does not happen often.
			for name := range c.services() {
				c.dirty[name] = true
			}
		}
	case kindServiceCIDR:
		c.batch.ServiceCIDRs[id.Name] = as[networking.ServiceCIDR](after)
	}
}

func as[T any](obj any) *T {
	t, _ := obj.(*T)
	return t
}

func (c *Cluster) namespace(name string) *namespace {
	if c.namespaces[name] == nil {
		c.namespaces[name] = &namespace{map[string]*v1.Pod{}, map[string]*knownService{}}
	}
	return c.namespaces[name]
}

func (c *Cluster) service(name types.NamespacedName) *knownService {
	in := c.namespace(name.Namespace).services
	if in[name.Name] == nil {
		in[name.Name] = &knownService{given: map[string]*discovery.EndpointSlice{}}
	}
	return in[name.Name]
}

// services returns all Services.
func (c *Cluster) services() map[types.NamespacedName]*v1.Service {
	out := map[types.NamespacedName]*v1.Service{}
	for id, obj := range c.objects {
		if svc, is := obj.(*v1.Service); is {
			out[types.NamespacedName{Namespace: id.Namespace, Name: id.Name}] = svc
		}
	}
	return out
}

// zoneOf returns the zone of a Node, which may be nil.
func zoneOf(node *v1.Node) string {
	if node == nil {
		return ""
	}
	return node.Labels[v1.LabelTopologyZone]
}

// zone returns the zone of the Node of a name; "" if it is not known.
func (c *Cluster) zone(node string) string {
	return zoneOf(as[v1.Node](c.objects[ID{Kind: kindNode, Name: node}]))
}

// selects reports whether a Service selects a Pod. Either may be nil.
func selects(svc *v1.Service, pod *v1.Pod) bool {
	if svc == nil || pod == nil || len(svc.Spec.Selector) == 0 {
		return false
	}
	for k, v := range svc.Spec.Selector {
		if have, ok := pod.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// podsOf returns the Pods that a Service selects, in order of name.
func (c *Cluster) podsOf(svc *v1.Service) (out []*v1.Pod) {
	for _, pod := range c.namespace(svc.Namespace).pods {
		if selects(svc, pod) {
			out = append(out, pod)
		}
	}
	slices.SortFunc(out, func(a, b *v1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func (c *Cluster) setSlice(name types.NamespacedName, before, after *discovery.EndpointSlice) {
	check := &source.Findings{}
	if owner, ok := ownerOf(before); ok {
		delete(c.service(owner).given, name.Name)
		c.dirty[owner] = true
		c.batch.EndpointSlices[name] = nil
	}
	if owner, ok := ownerOf(after); ok {
		c.service(owner).given[name.Name] = after
		c.dirty[owner] = true
		if after.AddressType != discovery.AddressTypeFQDN { // A proxy can't send to names.
			c.batch.EndpointSlices[name] = after
		}
	} else if after != nil {
		if _, headless := after.Labels[v1.IsHeadlessService]; headless {
			check.Note("metadata.labels["+v1.IsHeadlessService+"]", source.NotForProxy, "the slice belongs to a headless Service")
		} else {
			check.Note("metadata.labels", source.NotForProxy, "without a label %s the slice belongs to no Service", discovery.LabelServiceName)
		}
	}
	c.report("slice "+name.String(), idOf(kindEndpointSlice, name), check.List)
}

// ownerOf returns the Service of a slice that is delivered; false if it is not.
func ownerOf(es *discovery.EndpointSlice) (types.NamespacedName, bool) {
	if es == nil {
		return types.NamespacedName{}, false
	}
	return source.ServiceOf(es)
}

// allocate allocates addresses and ports again, and reports those that have moved because of another Service, for as long as that
// one has them.
func (c *Cluster) allocate() {
	before := c.granted.out
	c.granted = allocate(&c.ranges, c.services())
	for name, now := range c.granted.out {
		was := before[name]
		if reflect.DeepEqual(now, was) {
			continue
		}
		c.dirty[name] = true
		if c.moved[name] == nil && was != nil && !was.refused {
			c.moved[name] = was
		}
	}
	for name, was := range c.moved {
		check := &source.Findings{}
		if now := c.granted.out[name]; now != nil && !now.refused && !c.changed[name] {
			c.granted.movedFrom(c.service(name).object, was, now, check)
		}
		if len(check.List) == 0 {
			delete(c.moved, name)
		}
		c.report("moved "+name.String(), idOf(kindService, name), check.List)
	}
}

// recompute delivers one Service, unless it is refused, and the slices that controllers make for it.
func (c *Cluster) recompute(name types.NamespacedName) {
	known := c.service(name)
	svc, ep := known.object, as[legacyEndpoints](c.objects[idOf(kindEndpoints, name)])
	var forService, forEndpoints source.Findings
	var out *v1.Service
	var made []*discovery.EndpointSlice
	if svc == nil {
		if ep != nil {
			forEndpoints.Note("metadata.name", source.NotForProxy, "there is no Service of this name in the namespace")
		}
	} else if field, why := source.NotProxied(svc); why != "" {
		forService.Note(field, source.NotForProxy, "%s", why)
		out = svc // The proxier tells clients of it what to expect.
	} else if got := c.granted.out[name]; got.refused {
		for _, f := range got.List {
			f.LeftOut = true
			forService.List = append(forService.List, f)
		}
	} else {
		forService.List = slices.Clone(got.List)
		out = got.apply(svc)
		made = c.makeSlices(out, ep, len(known.given) > 0, &forService, &forEndpoints)
		checkPortNames(out, append(slices.Collect(maps.Values(known.given)), made...), &forService)
	}
	if !equality.Semantic.DeepEqual(known.delivered, out) {
		c.batch.Services[name], known.delivered = out, out
	}
	before := known.made
	known.made = map[string]*discovery.EndpointSlice{}
	for _, es := range made {
		known.made[es.Name] = es
		if !equality.Semantic.DeepEqual(before[es.Name], es) {
			c.batch.EndpointSlices[types.NamespacedName{Namespace: name.Namespace, Name: es.Name}] = es
		}
	}
	for gone := range before {
		if known.made[gone] == nil {
			c.batch.EndpointSlices[types.NamespacedName{Namespace: name.Namespace, Name: gone}] = nil
		}
	}
	if svc == nil && len(known.given) == 0 {
		delete(c.namespace(name.Namespace).services, name.Name)
	}
	c.report("service "+name.String(), idOf(kindService, name), forService.List)
	c.report("service "+name.String()+" Endpoints", idOf(kindEndpoints, name), forEndpoints.List)
}

// makeSlices returns the slices that the controllers make for one Service, which may have Endpoints, and slices that are given.
func (c *Cluster) makeSlices(
	svc *v1.Service, ep *legacyEndpoints, given bool, forService, forEndpoints *source.Findings,
) []*discovery.EndpointSlice {
	if topologyAuto(svc) {
		forService.Note("metadata.annotations", "as with trafficDistribution PreferSameZone, each endpoint is for its own zone",
			"the annotation asks for shares by the CPUs of each zone, which manifests do not hold")
	}
	const none = "connections to it are refused until there are"
	pods, selector, mirrors := c.podsOf(svc), len(svc.Spec.Selector) > 0, ep != nil && mirrored(ep)
	switch {
	case len(pods) > 0:
		if ep != nil {
			forEndpoints.Note("", "not used", "the Service has a selector; its endpoints are the Pods that match")
		}
		return podSlices(svc, pods, c.zone, forService)
	case mirrors && !selector:
		return mirrorSlices(svc, ep, forEndpoints)
	case mirrors && !given:
		forEndpoints.Note("", "the Endpoints are used", "the Service has a selector, but the manifests hold neither a Pod that "+
			"matches nor an EndpointSlice for it")
		return mirrorSlices(svc, ep, forEndpoints)
	case ep != nil && selector:
		forEndpoints.Note("", "not used",
			"the Service has a selector and EndpointSlices, or the Endpoints are marked not to be mirrored")
	case ep != nil:
		forEndpoints.Note("metadata", source.NotForProxy,
			"they are marked not to be mirrored to EndpointSlices, or are being deleted")
	case !given && selector:
		forService.Note("spec.selector", none,
			"no Pod in the manifests matches, and neither Endpoints nor EndpointSlices belong to the Service")
	case !given:
		forService.Note("", none, "the Service has no selector, and neither Endpoints nor EndpointSlices belong to it")
	}
	return nil
}

// checkPortNames reports the ports without a slice that has a port of the same name and protocol, by which the two are matched;
// the target port does not matter.
func checkPortNames(svc *v1.Service, slices []*discovery.EndpointSlice, check *source.Findings) {
	if len(slices) == 0 {
		return
	}
	type id struct {
		name     string
		protocol v1.Protocol
	}
	has := map[id]bool{}
	for _, es := range slices {
		for _, p := range es.Ports {
			has[id{*p.Name, *p.Protocol}] = true
		}
	}
	for i, p := range svc.Spec.Ports {
		if !has[id{p.Name, p.Protocol}] {
			check.Note(fmt.Sprintf("spec.ports[%d].name", i), "connections to it are refused until there is",
				"no EndpointSlice or Endpoints of this Service has a port named %q with protocol %s", p.Name, p.Protocol)
		}
	}
}
