// Package proxier turns the objects that a source delivers into the plan of a node, and keeps a backend in step with it.
package proxier

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/internal/keyed"
	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/topology"
)

// State is the service map: the known Services, EndpointSlices and this node, and the plan that follows from them. It is
// incremental: Apply records which Services a batch touches, and Update recomputes only those. The plan is a function of the
// objects alone, whatever the order and grouping in which they came.
//
// A State is not safe for concurrent use. It owns the plan that it returns, which changes with the next Update.
type State struct {
	families []plan.Family
	// nodeIP, if valid, overrides the Node's address of its family.
	nodeIP   netip.Addr
	plan     *plan.Plan
	services map[plan.Service]*service
	// slices are those of the Services, which each knows: the label that says so can change, and a deletion comes without the object.
	slices   *keyed.Set[types.NamespacedName, slice]
	claims   claims
	reserved reserved
	dirty    map[plan.Service]struct{}
	// given is the configuration; the plan's settings also depend on objects. cidrs are the ranges of ServiceCIDR objects, by name.
	given plan.Settings
	cidrs map[string][]netip.Prefix
	// leaving is set while this node is about to be removed.
	leaving bool
	// excluded is set while load balancers leave this node out, by a label of its object.
	excluded bool
	// nodeKnown is set once there has been an object of this node, nodeGone while there is none any more, nodeMissing if the source expects one
	// and has none, nodeUnread if it could not read whether there is one. otherNodes are the others, with why they are not ready; "" if they are.
	nodeKnown, nodeGone, nodeMissing, nodeUnread bool
	podCIDRs                                     bool // of this node are known
	otherNodes                                   map[string]string
	nodeFindings                                 []source.Finding // about fields of this node's object
	// nodePorts is how many node ports Services ask for.
	nodePorts int
	// triggers collects what Triggers will return after the next Update; updated is what it returns now.
	triggers, updated []Trigger
	// rebuild is set when the node or a setting that all rules depend on has changed.
	rebuild bool
	synced  bool
	report  source.Report
	// reported holds the last findings about each object, so that none is reported twice.
	reported map[string][]source.Finding
}

// service is the known state of one Service.
type service struct {
	exists bool // there is a Service object, even if it is not proxied
	object packedObject
	specs  []portSpec // nil while there is none to proxy
	slices []*slice   // in order of name
}

// slice returns where the slice of a name is, or would be.
func (svc *service) slice(name string) (at int, found bool) {
	return slices.BinarySearchFunc(svc.slices, name, func(s *slice, name string) int { return cmp.Compare(s.name, name) })
}

// NewState returns a state without objects, for the node of that name. The families are those that the node can forward; frontends
// of another family are ignored. ServiceCIDRs that the source delivers are added to those of the settings. report may be nil.
func NewState(nodeName string, settings plan.Settings, families []plan.Family, report source.Report) *State {
	if report == nil {
		report = func(source.Finding) {}
	}
	s := &State{
		families: families,
		plan:     plan.New(plan.Node{Name: nodeName}, settings),
		services: map[plan.Service]*service{},
		slices: keyed.New(func(s *slice) types.NamespacedName {
			return types.NamespacedName{Namespace: s.service.Namespace, Name: s.name}
		}),
		claims:   newClaims(),
		dirty:    map[plan.Service]struct{}{},
		given:    settings,
		cidrs:    map[string][]netip.Prefix{},
		rebuild:  true,
		report:   report,
		reported: map[string][]source.Finding{},

		otherNodes: map[string]string{},
	}
	s.plan.Settings.ServiceCIDRs = s.serviceCIDRs()
	return s
}

// Synced reports whether the source has delivered everything that it had at the start. Before that the plan must not be programmed:
// it lacks Services whose rules may be in the kernel and in use.
func (s *State) Synced() bool { return s.synced }

// Plan returns the plan as of the last Update.
func (s *State) Plan() *plan.Plan { return s.plan }

// Objects returns how many Services and EndpointSlices are known.
func (s *State) Objects() int { return len(s.services) + s.slices.Len() }

// Apply applies a batch of objects.
func (s *State) Apply(b source.Batch) {
	// In order, so that findings are in order too.
	for _, name := range sortedNames(b.Services) {
		s.applyService(name, b.Services[name])
	}
	for _, name := range sortedNames(b.EndpointSlices) {
		s.applySlice(name, b.EndpointSlices[name])
	}
	s.applyServiceCIDRs(b.ServiceCIDRs)
	s.applyNodes(b.Nodes)
	if b.Extent != source.Unchanged {
		partial := b.Extent == source.Partial
		s.rebuild = s.rebuild || partial != s.plan.Partial
		s.plan.Partial = partial
	}
	s.synced = s.synced || b.Synced
	s.nodeMissing, s.nodeUnread = s.nodeMissing || b.NodeMissing, s.nodeUnread || b.NodeUnread
	s.limitNodePorts()
	s.reportNode()
}

func sortedNames[T any](objects map[types.NamespacedName]T) []types.NamespacedName {
	return slices.SortedFunc(maps.Keys(objects), func(a, b types.NamespacedName) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

// touch marks a Service as changed.
func (s *State) touch(svc plan.Service) { s.dirty[svc] = struct{}{} }

func (s *State) applyService(name types.NamespacedName, obj *v1.Service) {
	id := plan.Service{Namespace: name.Namespace, Name: name.Name}
	svc := s.services[id]
	if svc == nil {
		if obj == nil {
			return
		}
		svc = &service{}
		s.services[id] = svc
	}
	for i := range svc.specs {
		s.unclaim(&svc.specs[i])
	}
	var found []source.Finding
	svc.specs, svc.exists, svc.object = nil, obj != nil, packedObject{}
	if svc.exists {
		svc.object = packObject(obj)
		svc.specs, found = readService(obj, &s.plan.Settings, s.families)
	}
	for i := range svc.specs {
		s.claim(&svc.specs[i])
	}
	s.reportNew("Service "+id.String(), found)
	s.touch(id)
	s.forgetIfEmpty(id, svc)
}

func (s *State) applySlice(name types.NamespacedName, obj *discovery.EndpointSlice) {
	var parsed *slice
	var found []source.Finding
	if obj != nil {
		if _, ok := source.ServiceOf(obj); ok {
			parsed, found = readSlice(obj)
		} else if obj.Labels[discovery.LabelServiceName] == "" {
			f := &source.Findings{Object: "EndpointSlice " + name.String()}
			f.Note("metadata.labels", source.NotForProxy, "without a label %s the slice belongs to no Service", discovery.LabelServiceName)
			found = f.List
		}
	}
	s.reportNew("EndpointSlice "+name.String(), found)
	old := s.slices.Get(name)
	if old != nil && (parsed == nil || old.service != parsed.service) {
		svc := s.services[old.service]
		at, _ := svc.slice(name.Name)
		svc.slices = slices.Delete(svc.slices, at, at+1)
		s.slices.Delete(name)
		s.touchSlices(old.service)
		s.forgetIfEmpty(old.service, svc)
		old = nil
	}
	if parsed == nil {
		return
	}
	svc := s.services[parsed.service]
	if svc == nil {
		svc = &service{}
		s.services[parsed.service] = svc
	}
	s.noteTrigger(old, parsed)
	if at, found := svc.slice(name.Name); found {
		svc.slices[at] = parsed
	} else {
		svc.slices = slices.Insert(svc.slices, at, parsed)
	}
	s.slices.Put(parsed)
	s.touchSlices(parsed.service)
}

// touchSlices marks a Service whose slices have changed.
func (s *State) touchSlices(id plan.Service) {
	s.touch(id)
	if id == apiServer {
		s.reserveEndpoints()
	}
}

// noteTrigger records the time of the change that caused a slice's update, if it is a new one. What happened before the source had
// delivered everything says nothing about this program's speed.
func (s *State) noteTrigger(before, now *slice) {
	if !s.synced || now.triggered.IsZero() || before != nil && !now.triggered.After(before.triggered) {
		return
	}
	s.triggers = append(s.triggers, Trigger{now.family, now.triggered})
}

// Trigger is the time of a change of endpoints of one family.
type Trigger struct {
	Family plan.Family
	Time   time.Time
}

// Triggers returns the times of the changes of endpoints in the last Update, as their EndpointSlices state them: when the Pod or
// the Service changed. Slices that do not state it are left out. The result is valid until the next Update.
func (s *State) Triggers() []Trigger { return s.updated }

// forgetIfEmpty removes the entry of a Service of which nothing is left.
func (s *State) forgetIfEmpty(id plan.Service, svc *service) {
	if !svc.exists && len(svc.slices) == 0 {
		delete(s.services, id)
	}
}

// reportNew reports the new findings about an object.
func (s *State) reportNew(object string, found []source.Finding) {
	if len(found) == 0 { // most often
		delete(s.reported, object)
		return
	}
	before := make(map[source.Finding]struct{}, len(s.reported[object]))
	for _, f := range s.reported[object] {
		before[f] = struct{}{}
	}
	for _, f := range found {
		if _, said := before[f]; !said {
			s.report(f)
		}
	}
	s.reported[object] = found
}

// Update recomputes what the batches since the last Update touched. It returns the plan and how it has changed:
// everything, where that is something on which every rule may depend, as it is at first.
func (s *State) Update() (*plan.Plan, plan.Change) {
	changed := plan.Keys{}
	s.updated, s.triggers = s.triggers, s.updated[:0]
	all := s.rebuild
	if all {
		s.rebuild = false
		for id := range s.services {
			s.touch(id)
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(s.dirty), plan.Service.Compare) {
		s.recompute(id, changed)
	}
	s.dirty = map[plan.Service]struct{}{} // One that was large once would stay so.
	if all {
		return s.plan, plan.EveryService()
	}
	return s.plan, plan.Only(changed)
}

// recompute updates the part of the plan that belongs to one Service.
func (s *State) recompute(id plan.Service, changed plan.Keys) {
	svc := s.services[id]
	if svc == nil {
		svc = &service{}
	}
	wanted, before := plan.Keys{}, len(changed)
	for i := range svc.specs {
		spec := &svc.specs[i]
		wanted.Add(spec.key)
		sp := s.servicePort(svc, spec)
		s.reportReserved(spec)
		if old := s.plan.Services[spec.key]; old == nil || !old.Equal(sp) {
			s.plan.Set(sp)
			changed.Add(spec.key)
		}
	}
	for _, key := range slices.Backward(s.plan.KeysOf(id)) { // The last one is removed in the least time.
		if _, ok := wanted[key]; !ok {
			s.plan.Delete(key)
			s.reportNew("reserved "+key.String(), nil)
			changed.Add(key)
		}
	}
	if len(changed) > before {
		s.reportShadowed(id)
	}
}

// servicePort combines what a Service asks for with what it gets.
func (s *State) servicePort(svc *service, spec *portSpec) *plan.ServicePort {
	var endpoints []topology.Endpoint
	for _, slice := range svc.slices {
		endpoints = slice.appendEndpoints(endpoints, spec.key)
	}
	sp := &plan.ServicePort{
		Key:            spec.key,
		InternalPolicy: spec.internal,
		ExternalPolicy: spec.external,
		SourceRanges:   spec.sourceRanges,
		Affinity:       spec.affinity,
		Scheduler:      spec.scheduler,
		ResetTCP:       spec.resetTCP,
		Critical:       spec.critical,
	}
	for _, f := range spec.wants {
		if s.reserved.has(f) {
			continue
		}
		if owner := s.claims.owner(claimOf(f, spec.key.Family)); owner == spec.key {
			sp.Frontends = append(sp.Frontends, f)
		} else {
			sp.Shadowed = append(sp.Shadowed, plan.Shadowed{Frontend: f, Owner: owner})
		}
	}
	if len(sp.Frontends) == len(spec.wants) {
		sp.Frontends = spec.wants // Neither ever changes.
	}
	node := topology.Node{Name: s.plan.Node.Name, Zone: s.plan.Node.Zone}
	sp.Endpoints = topology.Select(endpoints, node, topology.UseOf(spec.internal, spec.external, sp.HasExternal() || spec.healthCheck))
	return sp
}

// mostShadowed is how many frontends of a Service are reported each if others have them. A Service can ask for any number; of more, a
// single finding has the count and the first few.
const mostShadowed = 3

// reportShadowed reports the frontends that a Service asks for and other ServicePorts have.
func (s *State) reportShadowed(id plan.Service) {
	f := &source.Findings{Object: "Service " + id.String()}
	count := 0
	var examples []string
	for _, key := range s.plan.KeysOf(id) {
		shadowed := s.plan.Services[key].Shadowed
		count += len(shadowed)
		for _, sh := range shadowed[:min(len(shadowed), mostShadowed-len(examples))] {
			examples = append(examples, fmt.Sprintf("%s by %s", sh.Frontend, sh.Owner))
			f.Problem(portField(key), sh.Owner.String()+" gets the traffic", "%s is also claimed by %s, which takes precedence",
				sh.Frontend, sh.Owner)
		}
	}
	if count > mostShadowed {
		f.List = nil
		f.Problem("spec", "the others get the traffic", "%d frontends are also claimed by others, which take precedence, among them %s",
			count, strings.Join(examples, ", "))
	}
	for i := range f.List {
		f.List[i].Kind = source.Claimed
	}
	s.reportNew("shadowed "+id.String(), f.List)
}

// portField returns the field path of a port of a Service.
func portField(k plan.Key) string {
	if k.Port == "" {
		return "spec.ports"
	}
	return "spec.ports[" + k.Port + "]"
}
