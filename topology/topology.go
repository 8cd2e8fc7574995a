// Package topology chooses, from all endpoints of a service port, those that this node may use, and says why not the
// others. It is pure: no state, no clock, no Kubernetes API types.
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

// Endpoint is an endpoint as the EndpointSlices of a Service describe it.
type Endpoint struct {
	Addr netip.AddrPort
	// Node is the name of the node that the endpoint runs on; empty where that is not known.
	Node string
	// Ready, Serving and Terminating are the endpoint's conditions, absent ones already read as the API says: ready and
	// serving true, terminating false.
	Ready, Serving, Terminating bool
	// ForNodes and ForZones are the endpoint's hints: the nodes and zones that should send to it.
	ForNodes, ForZones []string
	// Weight is as in plan.Endpoint.
	Weight uint16
}

// Node is where the choice is made.
type Node struct {
	Name, Zone string
}

// Use says which traffic policies the frontends of a service port need endpoints for.
type Use struct {
	Cluster, Local bool
}

// UseOf derives the needed policies. A service port that is reachable from outside always needs the endpoints of policy
// Cluster: under externalTrafficPolicy Local, the node's own traffic and its pods' still goes to any endpoint.
func UseOf(internal, external plan.Policy, hasExternal bool) Use {
	return Use{
		Cluster: internal == plan.Cluster || hasExternal,
		Local:   internal == plan.Local || hasExternal && external == plan.Local,
	}
}

// Select chooses the endpoints for a service port. The order of the endpoints given does not matter; an address that
// occurs twice counts once, as Merge would have it.
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
			if ep.Node == "" || ep.Node != node.Name {
				return plan.NotLocal
			}
			return ""
		}
		out.Local = choose(endpoints, node, plan.Local, local, &out.Excluded)
	}
	return out
}

// fallback reports whether the endpoint may stand in while no ready one exists: it shuts down, but still answers.
func (ep Endpoint) fallback() bool { return !ep.Ready && ep.Serving && ep.Terminating }

// choose picks the ready endpoints that allowed has nothing against or, without any, those that are terminating but
// still serve.
func choose(endpoints []Endpoint, node Node, policy plan.Policy, allowed func(Endpoint) plan.Reason,
	excluded *[]plan.Exclusion) []plan.Endpoint {
	reasons := make([]plan.Reason, len(endpoints))
	anyReady := false
	for i, ep := range endpoints {
		reasons[i] = allowed(ep)
		anyReady = anyReady || ep.Ready && reasons[i] == ""
	}
	var chosen []plan.Endpoint
	for i, ep := range endpoints {
		reason := reasons[i]
		if reason == "" {
			reason = condition(ep, anyReady)
		}
		if reason != "" {
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

// condition says what an endpoint's conditions have against its use.
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

// allowAny returns what the hints allow under policy Cluster. Hints count only if every ready endpoint has them and one
// of them names this node (or its zone): otherwise some endpoint would get no traffic from anywhere, or this node would
// have none to send to. Node hints come before zone hints.
func allowAny(endpoints []Endpoint, node Node) func(Endpoint) plan.Reason {
	ready := slices.DeleteFunc(slices.Clone(endpoints), func(ep Endpoint) bool { return !ep.Ready })
	forNode := func(ep Endpoint) []string { return ep.ForNodes }
	forZone := func(ep Endpoint) []string { return ep.ForZones }
	switch {
	case hinted(ready, node.Name, forNode):
		return byHint(node.Name, forNode, plan.NotForThisNode)
	case hinted(ready, node.Zone, forZone):
		return byHint(node.Zone, forZone, plan.NotForThisZone)
	}
	return func(Endpoint) plan.Reason { return "" }
}

func hinted(ready []Endpoint, name string, hints func(Endpoint) []string) bool {
	here := false
	for _, ep := range ready {
		h := hints(ep)
		if len(h) == 0 {
			return false
		}
		here = here || slices.Contains(h, name)
	}
	return here
}

// byHint leaves out ready endpoints that are meant for others. Endpoints that are not ready are left to their
// condition, which is the better explanation.
func byHint(name string, hints func(Endpoint) []string, reason plan.Reason) func(Endpoint) plan.Reason {
	return func(ep Endpoint) plan.Reason {
		if ep.Ready && !slices.Contains(hints(ep), name) {
			return reason
		}
		return ""
	}
}

// Merge sorts endpoints by address and leaves each address once. Where an address is listed twice (in two slices while
// an endpoint moves between them, or since a new pod got the address of an old one that is still shutting down), the one
// that is not terminating is the one that answers there now.
func Merge(endpoints []Endpoint) []Endpoint {
	sorted := slices.Clone(endpoints)
	slices.SortFunc(sorted, func(a, b Endpoint) int {
		return cmp.Or(
			a.Addr.Compare(b.Addr),
			b.rank()-a.rank(),
			// Nothing tells which of two equally good entries is right; any order will do that is always the same.
			cmp.Compare(a.Node, b.Node),
			slices.Compare(a.ForNodes, b.ForNodes),
			slices.Compare(a.ForZones, b.ForZones),
			cmp.Compare(b.Weight, a.Weight), // One that is given goes before none.
		)
	})
	return slices.CompactFunc(sorted, func(a, b Endpoint) bool { return a.Addr == b.Addr })
}

// rank orders the entries for one address: the best description of what is there now has the highest.
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
