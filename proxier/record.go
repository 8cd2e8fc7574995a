package proxier

import (
	"cmp"
	"maps"
	"slices"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// Reason is why a sync was made.
type Reason string

// The reasons. A sync may have several.
const (
	Start   Reason = "start"   // the first one
	Arrived Reason = "change"  // objects have changed
	Rest    Reason = "rest"    // the last change was too large for one sync
	Retry   Reason = "retry"   // the sync before failed
	Resync  Reason = "resync"  // Proxier.Resync asked for it
	Drift   Reason = "drift"   // another program may have changed something in the kernel, or has
	Compare Reason = "compare" // it was time to compare everything with the kernel
)

// MostNamed is how many Services a Difference names at most.
const MostNamed = 256

// Input counts the objects that have come since the sync before, of each kind those that are new or changed and those that are gone.
type Input struct {
	Services       int `json:"services,omitempty"`
	EndpointSlices int `json:"endpointSlices,omitempty"`
	Nodes          int `json:"nodes,omitempty"`
	ServiceCIDRs   int `json:"serviceCIDRs,omitempty"`
	// Gone is how many of all of these are gone.
	Gone int `json:"gone,omitempty"`
}

func countInput(b source.Batch) Input {
	in := Input{len(b.Services), len(b.EndpointSlices), len(b.Nodes), len(b.ServiceCIDRs), 0}
	in.Gone = gone(b.Services) + gone(b.EndpointSlices) + gone(b.Nodes) + gone(b.ServiceCIDRs)
	return in
}

// Add adds the numbers of more.
func (in *Input) Add(more Input) {
	in.Services, in.EndpointSlices = in.Services+more.Services, in.EndpointSlices+more.EndpointSlices
	in.Nodes, in.ServiceCIDRs = in.Nodes+more.Nodes, in.ServiceCIDRs+more.ServiceCIDRs
	in.Gone += more.Gone
}

func gone[K comparable, V any](objects map[K]*V) (n int) {
	for _, o := range objects {
		if o == nil {
			n++
		}
	}
	return n
}

// Difference is how one plan differs from the one before.
type Difference struct {
	// Services are the first MostNamed of the Services that differ, in order, and Others counts the rest.
	Services []ServiceDifference
	Others   int
	// Added, Changed and Removed count ServicePorts; EndpointsAdded and EndpointsRemoved the endpoints that they use.
	Added, Changed, Removed          int
	EndpointsAdded, EndpointsRemoved int
}

// ServiceDifference is how one Service differs.
type ServiceDifference struct {
	Service plan.Service
	// Ports is how many ServicePorts differ.
	Ports int
	// EndpointsAdded and EndpointsRemoved count endpoints that are used by a ServicePort, once for each.
	EndpointsAdded, EndpointsRemoved int
	// Added and Removed are set if the whole Service is new, or gone.
	Added, Removed bool
}

// difference compares a plan with the one that was published before; nil for none.
func difference(before *plan.Snapshot, desired *plan.Plan, change plan.Change) Difference {
	var d Difference
	before = cmp.Or(before, &plan.Snapshot{})
	differing := map[plan.Service]*ServiceDifference{}
	note := func(k plan.Key, was, is *plan.ServicePort) {
		if was == is || was != nil && is != nil && was.Equal(is) {
			return
		}
		s := differing[k.Service]
		if s == nil {
			s = &ServiceDifference{Service: k.Service}
			differing[k.Service] = s
		}
		s.Ports++
		var old, now []plan.Endpoint
		if was != nil {
			old = was.All()
		}
		if is != nil {
			now = is.All()
		}
		added, removed := endpointDifference(old, now)
		s.EndpointsAdded, s.EndpointsRemoved = s.EndpointsAdded+added, s.EndpointsRemoved+removed
		d.EndpointsAdded, d.EndpointsRemoved = d.EndpointsAdded+added, d.EndpointsRemoved+removed
		switch {
		case was == nil:
			d.Added++
			s.Added = !before.Serves(k.Service)
		case is == nil:
			d.Removed++
			s.Removed = !desired.Serves(k.Service)
		default:
			d.Changed++
		}
	}
	if change.All() {
		same := 0
		for _, ports := range before.Services() {
			for _, was := range ports {
				is := desired.Services[was.Key]
				if is != nil {
					same++
				}
				note(was.Key, was, is)
			}
		}
		if same < len(desired.Services) {
			for k, is := range desired.Services {
				if before.ServicePort(k) == nil {
					note(k, nil, is)
				}
			}
		}
	}
	for k := range change.Keys() {
		note(k, before.ServicePort(k), desired.Services[k])
	}
	services := slices.SortedFunc(maps.Values(differing), func(a, b *ServiceDifference) int { return a.Service.Compare(b.Service) })
	d.Others = max(0, len(services)-MostNamed)
	for _, s := range services[:len(services)-d.Others] {
		d.Services = append(d.Services, *s)
	}
	return d
}

// endpointDifference counts the endpoints of two lists, both in order of address, that are only in one of them.
func endpointDifference(old, now []plan.Endpoint) (added, removed int) {
	for len(old) > 0 && len(now) > 0 {
		switch c := old[0].Addr.Compare(now[0].Addr); {
		case c < 0:
			removed, old = removed+1, old[1:]
		case c > 0:
			added, now = added+1, now[1:]
		default:
			old, now = old[1:], now[1:]
		}
	}
	return added + len(now), removed + len(old)
}
