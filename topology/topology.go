// Package topology selects, from all endpoints of a service port, those that this node may use, and says why the others are
// excluded. It is pure: no state, no clock, no Kubernetes API types.
//
// The rules are those of KEP-1669 and KEP-1672 (terminating endpoints), KEP-2086 (internalTrafficPolicy), KEP-2433
// (topology hints) and KEP-3015 (PreferSameZone, PreferSameNode).
package topology

import (
	"cmp"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// Endpoint is an endpoint as a Service's EndpointSlices describe it.
type Endpoint struct {
	Addr netip.AddrPort
	// Node is the name of the node on which the endpoint runs; empty if that is not known.
	Node string
	// Zone is the zone of that node, and Pod the Pod that answers; empty if not known. They play no part in the selection.
	Zone, Pod string
	// Ready, Serving and Terminating are the endpoint's conditions, with the API's defaults for absent ones: ready and serving
	// true, terminating false.
	Ready, Serving, Terminating bool
	// ForNodes and ForZones are the endpoint's hints: the nodes and zones that should send to it.
	ForNodes, ForZones []string
	// Weight is as in plan.Endpoint.
	Weight uint16
}

// Node is the node for which endpoints are selected.
type Node struct {
	Name, Zone string
}

// Use says for which traffic policies the frontends of a service port need endpoints.
type Use struct {
	Cluster, Local bool
}

// UseOf returns the policies that a service port needs. One that is reachable from outside always needs the endpoints of policy
// Cluster: under externalTrafficPolicy Local, the traffic of the node and its pods still goes to any endpoint.
func UseOf(internal, external plan.Policy, hasExternal bool) Use {
	return Use{
		Cluster: internal == plan.Cluster || hasExternal,
		Local:   internal == plan.Local || hasExternal && external == plan.Local,
	}
}

// Select selects the endpoints for a service port. The order of the given endpoints does not matter; an address that occurs twice
// counts once, as in Merge.
func Select(endpoints []Endpoint, node Node, use Use) plan.Endpoints {
	endpoints = Merge(endpoints)
	var out plan.Endpoints
	for _, ep := range endpoints {
		out.Any = out.Any || ep.Ready || ep.fallback()
	}
	if use.Cluster {
		out.Cluster = choose(endpoints, node, plan.Cluster, allowAny(endpoints, node), &out.Excluded)
	}
	if use.Local {
		local := func(ep Endpoint) plan.Reason {
			switch ep.Node {
			case "":
				return plan.NodeUnknown
			case node.Name:
				return ""
			}
			return plan.NotLocal
		}
		out.Local = choose(endpoints, node, plan.Local, local, &out.Excluded)
	}
	return out
}

// fallback reports whether the endpoint may be used while no ready one exists: it is terminating but still serves.
func (ep Endpoint) fallback() bool { return !ep.Ready && ep.Serving && ep.Terminating }

// choose picks the ready endpoints that allowed does not exclude or, if there are none, those that are terminating but still serve.
func choose(endpoints []Endpoint, node Node, policy plan.Policy, allowed func(Endpoint) plan.Reason,
	excluded *[]plan.Exclusion) []plan.Endpoint {
	reasons := make([]plan.Reason, len(endpoints))
	anyReady := false
	for i, ep := range endpoints {
		reasons[i] = allowed(ep)
		anyReady = anyReady || ep.Ready && reasons[i] == ""
	}
	n := 0
	for i, ep := range endpoints {
		if reasons[i] == "" {
			reasons[i] = condition(ep, anyReady)
		}
		if reasons[i] == "" {
			n++
		}
	}
	// Both lists stay, for very many ServicePorts: so they are made no longer than they have to be.
	var chosen []plan.Endpoint
	if n > 0 {
		chosen = make([]plan.Endpoint, 0, n)
	}
	if n < len(endpoints) {
		*excluded = append(make([]plan.Exclusion, 0, len(*excluded)+len(endpoints)-n), *excluded...)
	}
	for i, ep := range endpoints {
		if reason := reasons[i]; reason != "" {
			*excluded = append(*excluded, plan.Exclusion{Addr: ep.Addr, Policy: policy, Reason: reason})
			continue
		}
		chosen = append(chosen, plan.Endpoint{
			Addr:        ep.Addr,
			Local:       ep.Node != "" && ep.Node == node.Name,
			Unplaced:    ep.Node == "",
			Terminating: !ep.Ready,
			Weight:      ep.Weight,
		})
	}
	return chosen
}

// condition returns the reason why an endpoint's conditions exclude it.
func condition(ep Endpoint, anyReady bool) plan.Reason {
	switch {
	case ep.Ready:
		return ""
	case ep.fallback() && !anyReady:
		return ""
	case ep.fallback():
		return plan.Terminating
	case ep.Terminating:
		return plan.TerminatingStopped
	}
	return plan.NotReady
}

// allowAny returns the filter of the hints under policy Cluster. Hints count only if every ready endpoint has them and one of them
// names this node (or its zone): otherwise some endpoint would get no traffic from anywhere, or this node would have none to send
// to. Node hints take precedence over zone hints.
func allowAny(endpoints []Endpoint, node Node) func(Endpoint) plan.Reason {
	forNode := func(ep Endpoint) []string { return ep.ForNodes }
	forZone := func(ep Endpoint) []string { return ep.ForZones }
	switch {
	case hinted(endpoints, node.Name, forNode):
		return byHint(node.Name, forNode, plan.NotForThisNode)
	case hinted(endpoints, node.Zone, forZone):
		return byHint(node.Zone, forZone, plan.NotForThisZone)
	}
	return func(Endpoint) plan.Reason { return "" }
}

// hinted reports whether all ready endpoints have hints, and one of these has a name.
func hinted(endpoints []Endpoint, name string, hints func(Endpoint) []string) bool {
	here := false
	for _, ep := range endpoints {
		if !ep.Ready {
			continue
		}
		h := hints(ep)
		if len(h) == 0 {
			return false
		}
		here = here || slices.Contains(h, name)
	}
	return here
}

// byHint excludes ready endpoints that are meant for others. For endpoints that are not ready, the condition is the better
// explanation.
func byHint(name string, hints func(Endpoint) []string, reason plan.Reason) func(Endpoint) plan.Reason {
	return func(ep Endpoint) plan.Reason {
		if ep.Ready && !slices.Contains(hints(ep), name) {
			return reason
		}
		return ""
	}
}

// Merge sorts endpoints by address and keeps each address once. If an address is listed twice (in two slices while an endpoint
// moves between them, or because a new pod got the address of an old one that is still terminating), the entry that is not
// terminating wins: it answers there now.
func Merge(endpoints []Endpoint) []Endpoint {
	sorted := slices.Clone(endpoints)
	slices.SortFunc(sorted, func(a, b Endpoint) int {
		return cmp.Or(
			a.Addr.Compare(b.Addr),
			b.rank()-a.rank(),
			// Nothing says which of two equally ranked entries is right; any order will do if it is always the same.
			cmp.Compare(a.Node, b.Node),
			slices.Compare(a.ForNodes, b.ForNodes),
			slices.Compare(a.ForZones, b.ForZones),
			cmp.Compare(b.Weight, a.Weight), // An explicit weight comes before none.
		)
	})
	return slices.CompactFunc(sorted, func(a, b Endpoint) bool { return a.Addr == b.Addr })
}

// rank orders the entries for one address: the one that best describes the current state has the highest rank.
func (ep Endpoint) rank() int {
	r := 0
	if !ep.Terminating {
		r += 4
	}
	if ep.Ready {
		r += 2
	}
	if ep.Serving {
		r++
	}
	return r
}
