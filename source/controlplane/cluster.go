// Package controlplane does what the API server and the controllers of a cluster would do with a set of objects: it sets defaults
// and validates (Admit), allocates cluster IPs and node ports, mirrors Endpoints, and makes EndpointSlices of Pods (Cluster). It
// knows objects but not where they come from: a caller that reads them from files adds the places to the findings.
package controlplane

import (
	"fmt"
	"maps"
	"net/netip"
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

// Remark is a finding about an object. The caller completes the finding by the object and its place.
type Remark struct {
	ID ID
	source.Finding
}

// Report receives all remarks on a topic, which replace those that it received before.
type Report func(topic string, remarks []Remark)

// Cluster is a set of objects, and what the API server and the controllers would make of them. It is incremental: a change costs
// work for the Services that it concerns only. What it delivers is a function of the objects alone.
type Cluster struct {
	ranges  Ranges
	report  Report
	objects map[ID]any

	services  map[types.NamespacedName]*v1.Service
	endpoints map[types.NamespacedName]*legacyEndpoints
	given     map[types.NamespacedName]map[string]*discovery.EndpointSlice // by Service and name, as objects
	made      map[types.NamespacedName]map[string]*discovery.EndpointSlice // by Service and name, by controllers
	zones     map[string]string                                            // by node
	selection selection
	granted   map[types.NamespacedName]*allocation
	moved     map[types.NamespacedName]*allocation // what Services had that others have now
	delivered map[types.NamespacedName]*v1.Service

	// What the last update has changed.
	batch   source.Batch
	dirty   map[types.NamespacedName]bool
	changed map[types.NamespacedName]bool // Services whose request changed
}

// New returns an empty cluster. It fails if the ranges are invalid.
func New(ranges Ranges, report Report) (*Cluster, error) {
	ranges, err := ranges.complete()
	if err != nil {
		return nil, err
	}
	return &Cluster{
		ranges:    ranges,
		report:    report,
		objects:   map[ID]any{},
		services:  map[types.NamespacedName]*v1.Service{},
		endpoints: map[types.NamespacedName]*legacyEndpoints{},
		given:     map[types.NamespacedName]map[string]*discovery.EndpointSlice{},
		made:      map[types.NamespacedName]map[string]*discovery.EndpointSlice{},
		zones:     map[string]string{},
		selection: newSelection(),
		granted:   map[types.NamespacedName]*allocation{},
		moved:     map[types.NamespacedName]*allocation{},
		delivered: map[types.NamespacedName]*v1.Service{},
	}, nil
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
	c.allocate()
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
		c.setService(name, as[v1.Service](before), as[v1.Service](after))
	case kindEndpointSlice:
		c.setSlice(name, as[discovery.EndpointSlice](before), as[discovery.EndpointSlice](after))
	case kindEndpoints:
		setOrDelete(c.endpoints, name, as[legacyEndpoints](after))
		c.dirty[name] = true
	case kindPod:
		c.setPod(name, as[v1.Pod](before), as[v1.Pod](after))
	case kindNode:
		c.setNode(id.Name, as[v1.Node](after))
	case kindServiceCIDR:
		c.batch.ServiceCIDRs[id.Name] = as[networking.ServiceCIDR](after)
	}
}

func as[T any](obj any) *T {
	t, _ := obj.(*T)
	return t
}

func setOrDelete[K comparable, T any](in map[K]*T, key K, value *T) {
	if value == nil {
		delete(in, key)
	} else {
		in[key] = value
	}
}

func (c *Cluster) setService(name types.NamespacedName, before, after *v1.Service) {
	setOrDelete(c.services, name, after)
	c.selection.setService(name, after)
	c.dirty[name] = true
	if before == nil || after == nil || !equality.Semantic.DeepEqual(before.Spec, after.Spec) {
		c.changed[name] = true
	}
}

func (c *Cluster) setSlice(name types.NamespacedName, before, after *discovery.EndpointSlice) {
	check := &checker{}
	if owner, ok := ownerOf(before); ok {
		delete(c.given[owner], name.Name)
		c.dirty[owner] = true
		c.batch.EndpointSlices[name] = nil
	}
	if owner, ok := ownerOf(after); ok {
		if c.given[owner] == nil {
			c.given[owner] = map[string]*discovery.EndpointSlice{}
		}
		c.given[owner][name.Name] = after
		c.dirty[owner] = true
		if after.AddressType != discovery.AddressTypeFQDN { // A proxy can't send to names.
			c.batch.EndpointSlices[name] = after
		}
	} else if after != nil {
		if _, headless := after.Labels[v1.IsHeadlessService]; headless {
			check.note("metadata.labels["+v1.IsHeadlessService+"]", source.NotForProxy, "the slice belongs to a headless Service")
		} else {
			check.note("metadata.labels", source.NotForProxy, "without a label %s the slice belongs to no Service", discovery.LabelServiceName)
		}
	}
	c.report("slice "+name.String(), check.remarks(kindEndpointSlice, name))
}

// ownerOf returns the Service of a slice that is delivered; false if it is not.
func ownerOf(es *discovery.EndpointSlice) (types.NamespacedName, bool) {
	if es == nil {
		return types.NamespacedName{}, false
	}
	_, headless := es.Labels[v1.IsHeadlessService]
	name := es.Labels[discovery.LabelServiceName]
	return types.NamespacedName{Namespace: es.Namespace, Name: name}, name != "" && !headless
}

func (c *Cluster) setPod(name types.NamespacedName, before, after *v1.Pod) {
	put(c.selection.pods, name, after)
	for _, svc := range append(c.selection.servicesOf(before), c.selection.servicesOf(after)...) {
		c.dirty[svc] = true
	}
}

func (c *Cluster) setNode(name string, node *v1.Node) {
	c.batch.Nodes[name] = node
	zone := ""
	if node != nil {
		zone = node.Labels[v1.LabelTopologyZone]
	}
	if c.zones[name] == zone {
		return
	}
	c.zones[name] = zone
	for svc := range c.services { // A Node's zone does not change often.
		c.dirty[svc] = true
	}
}

// allocate allocates addresses and ports again if a Service asks for something else than before, and reports those that have
// moved because of another Service, for as long as that one has them.
func (c *Cluster) allocate() {
	if len(c.changed) == 0 {
		return
	}
	before := c.granted
	c.granted = allocate(&c.ranges, c.services)
	for name, now := range c.granted {
		was := before[name]
		if now.equal(was) {
			continue
		}
		c.dirty[name] = true
		if c.moved[name] == nil && was != nil && !was.refused {
			c.moved[name] = was
		}
	}
	for name := range before {
		if c.granted[name] == nil {
			c.dirty[name] = true
		}
	}
	ips, ports := c.inUse()
	for name, was := range c.moved {
		var remarks []Remark
		if now := c.granted[name]; now != nil && !now.refused && !c.changed[name] {
			remarks = movedFrom(name, c.services[name], was, now, ips, ports)
		}
		if len(remarks) == 0 {
			delete(c.moved, name)
		}
		c.report("moved "+name.String(), remarks)
	}
}

// inUse returns the cluster IPs and node ports of all Services, if any has moved.
func (c *Cluster) inUse() (ips map[string]bool, ports map[int32]bool) {
	ips, ports = map[string]bool{}, map[int32]bool{}
	if len(c.moved) == 0 {
		return ips, ports
	}
	for _, a := range c.granted {
		if a.refused {
			continue
		}
		for _, ip := range a.ips {
			ips[ip] = true
		}
		for _, port := range append([]int32{a.health}, a.nodePorts...) {
			ports[port] = true
		}
	}
	return ips, ports
}

// movedFrom returns what other Services have taken of what was allocated to one that does not name it.
func movedFrom(name types.NamespacedName, svc *v1.Service, was, now *allocation, ips map[string]bool, ports map[int32]bool) []Remark {
	check := &checker{}
	moved := func(field string, from, to any) {
		check.problem(field, fmt.Sprintf("it moves to %v; name it in the manifest to keep it for good", to), "the allocated %v belongs to another Service now", from)
	}
	for i := len(svc.Spec.ClusterIPs); i < min(len(was.ips), len(now.ips)); i++ {
		if from := was.ips[i]; from != now.ips[i] && ips[from] {
			moved(clusterIPField(i), from, now.ips[i])
		}
	}
	for i, p := range svc.Spec.Ports {
		if from := was.nodePorts[i]; p.NodePort == 0 && from > 0 && from != now.nodePorts[i] && ports[from] {
			moved(fmt.Sprintf("spec.ports[%d].nodePort", i), from, now.nodePorts[i])
		}
	}
	if from := was.health; svc.Spec.HealthCheckNodePort == 0 && from > 0 && from != now.health && ports[from] {
		moved("spec.healthCheckNodePort", from, now.health)
	}
	return check.remarks(kindService, name)
}

// recompute delivers one Service, unless it is refused, and the slices that controllers make for it.
func (c *Cluster) recompute(name types.NamespacedName) {
	svc := c.services[name]
	forService, forEndpoints := &checker{}, &checker{}
	var out *v1.Service
	var made []*discovery.EndpointSlice
	if svc == nil {
		if c.endpoints[name] != nil {
			forEndpoints.note("metadata.name", source.NotForProxy, "there is no Service of this name in the namespace")
		}
	} else if field, why := source.NotProxied(svc); why != "" {
		forService.note(field, source.NotForProxy, "%s", why)
		out = svc // The proxier tells clients of it what to expect.
	} else if got := c.granted[name]; got.refused {
		for _, f := range got.findings {
			f.LeftOut = true
			forService.findings = append(forService.findings, f)
		}
	} else {
		forService.findings = slices.Clone(got.findings)
		out = got.apply(svc)
		made = c.makeSlices(name, out, forService, forEndpoints)
		c.checkPortNames(name, out, made, forService)
	}
	if before := c.delivered[name]; before == nil && out != nil || before != nil && !equality.Semantic.DeepEqual(before, out) {
		c.batch.Services[name] = out
		setOrDelete(c.delivered, name, out)
	}
	c.deliverMade(name, made)
	c.report("service "+name.String(), append(forService.remarks(kindService, name), forEndpoints.remarks(kindEndpoints, name)...))
}

// makeSlices returns the slices that the controllers make for one Service.
func (c *Cluster) makeSlices(
	name types.NamespacedName, svc *v1.Service, forService, forEndpoints *checker,
) []*discovery.EndpointSlice {
	ep := c.endpoints[name]
	given := len(c.given[name]) > 0
	if topologyAuto(svc) {
		forService.note("metadata.annotations", "as with trafficDistribution PreferSameZone, each endpoint is for its own zone",
			"the annotation asks for shares by the CPUs of each zone, which manifests do not hold")
	}
	const none = "connections to it are refused until there are"
	if len(svc.Spec.Selector) == 0 {
		switch {
		case ep != nil && mirrored(ep):
			return mirrorSlices(svc, ep, forEndpoints)
		case ep != nil:
			forEndpoints.note("metadata", source.NotForProxy,
				"they are marked not to be mirrored to EndpointSlices, or are being deleted")
		case !given:
			forService.note("", none,
				"the Service has no selector, and neither Endpoints nor EndpointSlices belong to it")
		}
		return nil
	}
	pods := c.selection.podsOf(svc)
	switch {
	case len(pods) > 0:
		if ep != nil {
			forEndpoints.note("", "not used", "the Service has a selector; its endpoints are the Pods that match")
		}
		return podSlices(svc, pods, c.zones, forService)
	case ep != nil && !given && mirrored(ep):
		forEndpoints.note("", "the Endpoints are used", "the Service has a selector, but the manifests hold neither a Pod that "+
			"matches nor an EndpointSlice for it")
		return mirrorSlices(svc, ep, forEndpoints)
	case ep != nil:
		forEndpoints.note("", "not used",
			"the Service has a selector and EndpointSlices, or the Endpoints are marked not to be mirrored")
	case !given:
		forService.note("spec.selector", none,
			"no Pod in the manifests matches, and neither Endpoints nor EndpointSlices belong to the Service")
	}
	return nil
}

// checkPortNames reports the ports without a slice that has a port of the same name and protocol, by which the two are matched;
// the target port does not matter.
func (c *Cluster) checkPortNames(name types.NamespacedName, svc *v1.Service, made []*discovery.EndpointSlice, check *checker) {
	slices := append(slices.Collect(maps.Values(c.given[name])), made...)
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
			check.note(fmt.Sprintf("spec.ports[%d].name", i), "connections to it are refused until there is",
				"no EndpointSlice or Endpoints of this Service has a port named %q with protocol %s", p.Name, p.Protocol)
		}
	}
}

// deliverMade delivers the slices made for a Service that differ from those made before.
func (c *Cluster) deliverMade(owner types.NamespacedName, made []*discovery.EndpointSlice) {
	before := c.made[owner]
	now := make(map[string]*discovery.EndpointSlice, len(made))
	for _, es := range made {
		key := types.NamespacedName{Namespace: es.Namespace, Name: es.Name}
		if was := before[es.Name]; was != nil && equality.Semantic.DeepEqual(was, es) {
			now[es.Name] = was
			continue
		}
		now[es.Name] = es
		c.batch.EndpointSlices[key] = es
	}
	for name := range maps.Keys(before) {
		if now[name] == nil {
			c.batch.EndpointSlices[types.NamespacedName{Namespace: owner.Namespace, Name: name}] = nil
		}
	}
	if len(now) > 0 {
		c.made[owner] = now
	} else {
		delete(c.made, owner)
	}
}
