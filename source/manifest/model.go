package manifest

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
)

// model is the cluster that the manifests describe: the objects in force, and what the API server and the controllers
// would make of them. It is incremental: a changed object costs the work for the Services that it concerns. What it
// delivers is a function of the objects in force alone.
type model struct {
	cfg    *Config
	report reporter
	files  map[string]*file
	faulty map[string]*file // those with documents that can't be used
	others map[string]bool  // kinds of which it has been said that they are not proxied

	candidates map[objectID][]*entry // all entries of an object, in order
	inForce    map[objectID]*entry   // the first of them
	marks      int                   // the last one given to an entry

	services  map[types.NamespacedName]*v1.Service
	endpoints map[types.NamespacedName]*legacyEndpoints
	given     map[types.NamespacedName]map[string]*discovery.EndpointSlice // by Service and name, from manifests
	made      map[types.NamespacedName]map[string]*discovery.EndpointSlice // by Service and name, by controllers
	zones     map[string]string                                            // by node
	selection selection
	granted   map[types.NamespacedName]*allocation
	delivered map[types.NamespacedName]*v1.Service

	// What the current update has touched so far.
	batch   source.Batch
	dirty   map[types.NamespacedName]bool
	changed map[types.NamespacedName]bool // Services whose request changed
}

func newModel(cfg *Config) *model {
	return &model{
		cfg:        cfg,
		report:     reporter{report: cfg.Report, current: map[string][]said{}},
		files:      map[string]*file{},
		faulty:     map[string]*file{},
		others:     map[string]bool{},
		candidates: map[objectID][]*entry{},
		inForce:    map[objectID]*entry{},
		services:   map[types.NamespacedName]*v1.Service{},
		endpoints:  map[types.NamespacedName]*legacyEndpoints{},
		given:      map[types.NamespacedName]map[string]*discovery.EndpointSlice{},
		made:       map[types.NamespacedName]map[string]*discovery.EndpointSlice{},
		zones:      map[string]string{},
		selection:  newSelection(),
		granted:    map[types.NamespacedName]*allocation{},
		delivered:  map[types.NamespacedName]*v1.Service{},
	}
}

// update takes new versions of files in, and drops the files that are gone. It returns what is to be delivered.
func (m *model) update(readings []*reading, gone []string) source.Batch {
	m.batch = source.Batch{
		Services:       map[types.NamespacedName]*v1.Service{},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{},
		ServiceCIDRs:   map[string]*networking.ServiceCIDR{},
		Nodes:          map[string]*v1.Node{},
	}
	m.dirty, m.changed = map[types.NamespacedName]bool{}, map[types.NamespacedName]bool{}
	touched := map[objectID]bool{}
	for _, r := range readings {
		m.putFile(r, touched)
	}
	for _, path := range gone {
		if f := m.files[path]; f != nil {
			m.replaceEntries(f.entries, nil, touched)
			m.report.tell("file "+path, nil)
			delete(m.files, path)
			delete(m.faulty, path)
		}
	}
	for id := range touched {
		m.settle(id)
	}
	m.allocate()
	for name := range m.dirty {
		m.recompute(name)
	}
	m.report.flush()
	return m.batch
}

func (m *model) putFile(r *reading, touched map[objectID]bool) {
	f := m.files[r.path]
	if f == nil {
		f = &file{path: r.path}
		m.files[r.path] = f
	}
	if r.err != nil {
		effect := "it is left out"
		if len(f.entries) > 0 {
			effect = effectFile
		}
		m.report.tell("file "+r.path, []remark{{file: r.text.name,
			issue: issue{severity: source.Problem, detail: "can't be read: " + r.err.Error(), effect: effect,
				leftOut: true}}})
		return
	}
	before := f.entries
	f.put(r)
	delete(m.faulty, r.path)
	if f.bad {
		m.faulty[r.path] = f
	}
	m.replaceEntries(before, f.entries, touched)
	m.report.tell("file "+r.path, m.withoutOthers(f.remarks))
}

// withoutOthers reports of each kind of objects that is not proxied the first one, once, and returns the remarks about all else.
func (m *model) withoutOthers(remarks []remark) []remark {
	var out []remark
	for _, rem := range remarks {
		switch e := rem.entry; {
		case e == nil || e.other == "":
			out = append(out, rem)
		case !m.others[e.other]:
			m.others[e.other] = true
			m.report.tell("kind "+e.other, []remark{rem})
		}
	}
	return out
}

// replaceEntries enters and removes what differs between two versions of a file.
func (m *model) replaceEntries(before, after []*entry, touched map[objectID]bool) {
	had, has := m.marks+1, m.marks+2
	m.marks += 2
	for _, e := range before {
		e.mark = had
	}
	for _, e := range after {
		was := e.mark
		e.mark = has
		if e.obj == nil {
			continue
		}
		if was != had {
			m.candidates[e.id] = append(m.candidates[e.id], e)
			touched[e.id] = true
		} else if len(m.candidates[e.id]) > 1 {
			touched[e.id] = true // Its place may have changed.
		}
	}
	for _, e := range before {
		if e.obj == nil || e.mark == has {
			continue
		}
		left := slices.DeleteFunc(m.candidates[e.id], func(o *entry) bool { return o == e })
		if m.candidates[e.id] = left; len(left) == 0 {
			delete(m.candidates, e.id)
		}
		touched[e.id] = true
	}
}

// settle decides which of an object's entries is in force, and sees to the consequences of a change.
func (m *model) settle(id objectID) {
	list := m.candidates[id]
	slices.SortStableFunc(list, compareEntries)
	m.tellDuplicates(id, list)
	var before, after any
	if e := m.inForce[id]; e != nil {
		before = e.obj
	}
	delete(m.inForce, id)
	if len(list) > 0 {
		m.inForce[id], after = list[0], list[0].obj
	}
	if before == after || equality.Semantic.DeepEqual(before, after) {
		return
	}
	name := types.NamespacedName{Namespace: id.namespace, Name: id.name}
	switch id.kind {
	case kindService:
		m.setService(name, as[v1.Service](before), as[v1.Service](after))
	case kindEndpointSlice:
		m.setSlice(name, as[discovery.EndpointSlice](before), as[discovery.EndpointSlice](after))
	case kindEndpoints:
		setOrDelete(m.endpoints, name, as[legacyEndpoints](after))
		m.dirty[name] = true
	case kindPod:
		m.setPod(as[v1.Pod](before), as[v1.Pod](after))
	case kindNode:
		m.setNode(id.name, as[v1.Node](after))
	case kindServiceCIDR:
		m.batch.ServiceCIDRs[id.name] = as[networking.ServiceCIDR](after)
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

func (m *model) tellDuplicates(id objectID, list []*entry) {
	var remarks []remark
	for i := 1; i < len(list); i++ {
		var lines lineFinder
		first := remark{entry: list[0], issue: issue{field: "metadata.name"}}
		where := sayf("%s:%d", list[0].doc.text.name, lines.find(&first))
		remarks = append(remarks, remark{object: id.String(), entry: list[i], issue: issue{
			severity: source.Problem, field: "metadata.name", detail: "the same object stands at " + where,
			effect:  "that one is used, as it comes first by file name and line; this one is left out",
			leftOut: true,
		}})
	}
	m.report.tell("duplicate "+id.String(), remarks)
}

func (m *model) setService(name types.NamespacedName, before, after *v1.Service) {
	setOrDelete(m.services, name, after)
	m.selection.setService(name, before, after)
	m.dirty[name] = true
	if before == nil || after == nil || !sameRequest(before, after) {
		m.changed[name] = true
	}
}

func (m *model) setSlice(name types.NamespacedName, before, after *discovery.EndpointSlice) {
	var remarks []remark
	tell := func(field, detail string) {
		id := objectID{kindEndpointSlice, name.Namespace, name.Name}
		remarks = append(remarks, remark{object: id.String(), entry: m.inForce[id],
			issue: issue{field: field, detail: detail, effect: "not proxied"}})
	}
	if owner, ok := ownerOf(before); ok {
		delete(m.given[owner], name.Name)
		m.dirty[owner] = true
		m.batch.EndpointSlices[name] = nil
	}
	if owner, ok := ownerOf(after); ok {
		if m.given[owner] == nil {
			m.given[owner] = map[string]*discovery.EndpointSlice{}
		}
		m.given[owner][name.Name] = after
		m.dirty[owner] = true
		if after.AddressType != discovery.AddressTypeFQDN { // A proxy can't send to names.
			m.batch.EndpointSlices[name] = after
		}
	} else if after != nil {
		if _, headless := after.Labels[v1.IsHeadlessService]; headless {
			tell("metadata.labels["+v1.IsHeadlessService+"]", "the slice belongs to a headless Service")
		} else {
			tell("metadata.labels", "without a label "+discovery.LabelServiceName+" the slice belongs to no Service")
		}
	}
	m.report.tell("slice "+name.String(), remarks)
}

// ownerOf names the Service that a slice is delivered for; false where it is for none.
func ownerOf(es *discovery.EndpointSlice) (types.NamespacedName, bool) {
	if es == nil {
		return types.NamespacedName{}, false
	}
	_, headless := es.Labels[v1.IsHeadlessService]
	name := es.Labels[discovery.LabelServiceName]
	return types.NamespacedName{Namespace: es.Namespace, Name: name}, name != "" && !headless
}

func (m *model) setPod(before, after *v1.Pod) {
	for name := range m.selection.servicesOf(before) {
		m.dirty[name] = true
	}
	m.selection.setPod(before, after)
	for name := range m.selection.servicesOf(after) {
		m.dirty[name] = true
	}
}

func (m *model) setNode(name string, node *v1.Node) {
	m.batch.Nodes[name] = node
	zone := ""
	if node != nil {
		zone = node.Labels[v1.LabelTopologyZone]
	}
	if m.zones[name] == zone {
		return
	}
	m.zones[name] = zone
	for _, pod := range m.selection.podsOn(name) {
		for svc := range m.selection.servicesOf(pod) {
			m.dirty[svc] = true
		}
	}
}

// allocate hands out addresses and ports anew where a Service asks for something else than before, and tells of those
// that another one's coming or going has moved.
func (m *model) allocate() {
	if len(m.changed) == 0 {
		return
	}
	before := m.granted
	m.granted = allocate(m.cfg, m.services)
	for name, now := range m.granted {
		was := before[name]
		if now.equal(was) {
			continue
		}
		m.dirty[name] = true
		if was != nil && !m.changed[name] && !was.refused && !now.refused {
			m.tellMoved(name, was, now)
		}
	}
	for name := range before {
		if m.granted[name] == nil {
			m.dirty[name] = true
		}
	}
}

func (m *model) tellMoved(name types.NamespacedName, was, now *allocation) {
	var remarks []remark
	id := objectID{kindService, name.Namespace, name.Name}
	moved := func(field string, from, to any) {
		remarks = append(remarks, remark{object: id.String(), entry: m.inForce[id], issue: issue{
			severity: source.Problem, field: field,
			detail: sayf("the allocated %v is another Service's by the same rules now", from),
			effect: sayf("it moves to %v; name it in the manifest to keep it for good", to),
		}})
	}
	if !slices.Equal(was.ips, now.ips) {
		moved("spec.clusterIPs", was.ips, now.ips)
	}
	if !slices.Equal(was.nodePorts, now.nodePorts) {
		moved("spec.ports", was.nodePorts, now.nodePorts)
	}
	if was.health != now.health {
		moved("spec.healthCheckNodePort", was.health, now.health)
	}
	m.report.tell("moved "+name.String(), nil) // It is news each time.
	m.report.tell("moved "+name.String(), remarks)
}

// recompute sees to one Service: whether and how it is delivered, and the slices that controllers make for it.
func (m *model) recompute(name types.NamespacedName) {
	svc := m.services[name]
	svcID := objectID{kindService, name.Namespace, name.Name}
	forService, forEndpoints := &checker{}, &checker{}
	var out *v1.Service
	var made []*discovery.EndpointSlice
	if svc == nil {
		m.tellOwnerless(name, forEndpoints)
	} else if field, why := notProxied(svc); why != "" {
		forService.note(field, "not proxied", "%s", why)
	} else if got := m.granted[name]; got.refused {
		forService.issues = got.issues
	} else {
		forService.issues = slices.Clone(got.issues)
		out = got.apply(svc)
		made = m.makeSlices(name, out, forService, forEndpoints)
		m.tellUnmatchedPorts(name, out, made, forService)
	}
	if before := m.delivered[name]; before == nil && out != nil || before != nil && !equality.Semantic.DeepEqual(before, out) {
		m.batch.Services[name] = out
		setOrDelete(m.delivered, name, out)
	}
	m.deliverMade(name, made)
	var remarks []remark
	for _, is := range forService.issues {
		is.leftOut = svc != nil && m.granted[name] != nil && m.granted[name].refused
		remarks = append(remarks, remark{issue: is, object: svcID.String(), entry: m.inForce[svcID]})
	}
	epID := objectID{kindEndpoints, name.Namespace, name.Name}
	for _, is := range forEndpoints.issues {
		remarks = append(remarks, remark{issue: is, object: epID.String(), entry: m.inForce[epID]})
	}
	m.report.tell("service "+name.String(), remarks)
}

func (m *model) tellOwnerless(name types.NamespacedName, c *checker) {
	if m.endpoints[name] != nil {
		c.note("metadata.name", "not proxied", "there is no Service of this name in the namespace")
	}
}

// notProxied says why a Service is none of a service proxy's business, and in which field that stands.
func notProxied(svc *v1.Service) (field, why string) {
	const proxyName = "service.kubernetes.io/service-proxy-name"
	if svc.Spec.Type == v1.ServiceTypeExternalName {
		return "spec.type", "an ExternalName Service is a DNS alias and has no address"
	}
	if headless(svc) {
		return "spec.clusterIP", "a headless Service has no cluster IP; clients reach its endpoints directly"
	}
	if value, ok := svc.Labels[proxyName]; ok {
		return "metadata.labels[" + proxyName + "]", sayf("the label gives the Service to the proxy %.63q", value)
	}
	return "", ""
}

// makeSlices plays the controllers for one Service.
func (m *model) makeSlices(
	name types.NamespacedName, svc *v1.Service, forService, forEndpoints *checker,
) []*discovery.EndpointSlice {
	ep := m.endpoints[name]
	given := len(m.given[name]) > 0
	if topologyAuto(svc) {
		forService.note("metadata.annotations", "as with trafficDistribution PreferSameZone, each endpoint is for its own zone",
			"the annotation asks for shares by the CPUs of each zone, which manifests don't tell")
	}
	const none = "connections to it are refused until there are"
	if len(svc.Spec.Selector) == 0 {
		switch {
		case ep != nil && mirrored(ep):
			return mirrorSlices(svc, ep, forEndpoints)
		case ep != nil:
			forEndpoints.note("metadata", "not proxied",
				"they are marked as not to be mirrored to EndpointSlices, or being deleted")
		case !given:
			forService.note("", none,
				"the Service has no selector, and neither Endpoints nor EndpointSlices belong to it")
		}
		return nil
	}
	pods := m.selection.podsOf(svc)
	switch {
	case len(pods) > 0:
		if ep != nil {
			forEndpoints.note("", "not used", "the Service has a selector; its endpoints are the Pods that match")
		}
		return podSlices(svc, pods, m.zones, forService)
	case ep != nil && !given && mirrored(ep):
		forEndpoints.note("", "the Endpoints are used", "the Service has a selector, but the manifests hold neither a Pod that "+
			"matches nor an EndpointSlice for it")
		return mirrorSlices(svc, ep, forEndpoints)
	case ep != nil:
		forEndpoints.note("", "not used",
			"the Service has a selector and EndpointSlices, or the Endpoints are marked as not to be mirrored")
	case !given:
		forService.note("spec.selector", none,
			"no Pod in the manifests matches, and neither Endpoints nor EndpointSlices belong to the Service")
	}
	return nil
}

// tellUnmatchedPorts tells of ports for which none of the slices has a port of the same name and protocol, which is what
// joins the two; the target port plays no part in it.
func (m *model) tellUnmatchedPorts(name types.NamespacedName, svc *v1.Service, made []*discovery.EndpointSlice, c *checker) {
	slices := append(slices.Collect(maps.Values(m.given[name])), made...)
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
			c.note(sayf("spec.ports[%d].name", i), "connections to it are refused until there is",
				"no EndpointSlice or Endpoints of this Service has a port named %q with protocol %s", p.Name, p.Protocol)
		}
	}
}

// deliverMade delivers the slices made for a Service that differ from those made before.
func (m *model) deliverMade(owner types.NamespacedName, made []*discovery.EndpointSlice) {
	before := m.made[owner]
	now := make(map[string]*discovery.EndpointSlice, len(made))
	for _, es := range made {
		key := types.NamespacedName{Namespace: es.Namespace, Name: es.Name}
		if was := before[es.Name]; was != nil && equality.Semantic.DeepEqual(was, es) {
			now[es.Name] = was
			continue
		}
		now[es.Name] = es
		m.batch.EndpointSlices[key] = es
	}
	for name := range maps.Keys(before) {
		if now[name] == nil {
			m.batch.EndpointSlices[types.NamespacedName{Namespace: owner.Namespace, Name: name}] = nil
		}
	}
	if len(now) > 0 {
		m.made[owner] = now
	} else {
		delete(m.made, owner)
	}
}
