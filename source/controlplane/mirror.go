package controlplane

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"nodeproxy/source"
)

// maxMirrored is how many addresses of a subset the EndpointSlice mirroring controller mirrors.
const maxMirrored = 1000

// leaderAnnotation marks Endpoints that serve as a lock for leader election and hold no useful addresses.
const leaderAnnotation = "control-plane.alpha.kubernetes.io/leader"

// mirrored reports whether Endpoints are mirrored at all.
func mirrored(ep *legacyEndpoints) bool {
	_, leader := ep.Annotations[leaderAnnotation]
	return ep.Labels[discovery.LabelSkipMirror] != "true" && !leader && ep.DeletionTimestamp == nil
}

// mirrorAddress is an address of Endpoints with the ports that it has, over all subsets.
type mirrorAddress struct {
	v1.EndpointAddress
	ready    []v1.EndpointPort
	notReady []v1.EndpointPort
}

// mirrorSlices makes the slices of a Service from its Endpoints, as the mirroring controller does: subsets are
// joined by address and split again by ports, and an address that is not ready for a port in one subset is not ready for it,
// whatever the others say.
func mirrorSlices(svc *v1.Service, ep *legacyEndpoints, c *checker) []*discovery.EndpointSlice {
	groups := sliceGroups{}
	for _, a := range mirrorAddresses(ep) {
		a.add(groups, a.ready, true)
		a.add(groups, a.notReady, false)
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		if g := groups[key]; len(g.endpoints) > maxMirrored {
			c.problem("subsets", fmt.Sprintf("the first %d are used", maxMirrored),
				"%d %s addresses with the same ports; at most %d are mirrored", len(g.endpoints), g.family, maxMirrored)
			g.endpoints = g.endpoints[:maxMirrored]
		}
	}
	return groups.slices(svc, mirrorController, maxMirrored)
}

func (a *mirrorAddress) add(groups sliceGroups, ports []v1.EndpointPort, ready bool) {
	ip, ok := source.ParseIP(a.IP)
	if !ok || len(ports) == 0 {
		return
	}
	e := discovery.Endpoint{
		Addresses:  []string{ip.String()},
		Conditions: discovery.EndpointConditions{Ready: new(ready)},
		NodeName:   a.NodeName,
		TargetRef:  a.TargetRef,
	}
	if a.Hostname != "" {
		e.Hostname = new(a.Hostname)
	}
	slices.SortFunc(ports, func(a, b v1.EndpointPort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	var out []discovery.EndpointPort
	for _, p := range ports {
		out = append(out, discovery.EndpointPort{
			Name: new(p.Name), Port: new(p.Port), Protocol: new(p.Protocol), AppProtocol: p.AppProtocol,
		})
	}
	groups.add(familyOf(ip), out, e)
}

// mirrorAddresses joins the subsets, in order of address.
func mirrorAddresses(ep *legacyEndpoints) []*mirrorAddress {
	type addressKey struct{ ip, kind, namespace, name string }
	byKey := map[addressKey]*mirrorAddress{}
	var out []*mirrorAddress
	enter := func(a v1.EndpointAddress) *mirrorAddress {
		key := addressKey{ip: a.IP}
		if ip, ok := source.ParseIP(a.IP); ok {
			key.ip = ip.String()
		}
		if r := a.TargetRef; r != nil {
			key.kind, key.namespace, key.name = r.Kind, r.Namespace, r.Name
		}
		if byKey[key] == nil {
			byKey[key] = &mirrorAddress{EndpointAddress: a}
			out = append(out, byKey[key])
		}
		return byKey[key]
	}
	same := func(p v1.EndpointPort) func(v1.EndpointPort) bool {
		return func(q v1.EndpointPort) bool { return p.Name == q.Name && p.Port == q.Port && p.Protocol == q.Protocol }
	}
	for i := range ep.Subsets {
		s := &ep.Subsets[i]
		for _, a := range s.NotReadyAddresses {
			m := enter(a)
			for _, p := range s.Ports {
				m.ready = slices.DeleteFunc(m.ready, same(p))
				if !slices.ContainsFunc(m.notReady, same(p)) {
					m.notReady = append(m.notReady, p)
				}
			}
		}
		for _, a := range s.Addresses {
			m := enter(a)
			for _, p := range s.Ports {
				if !slices.ContainsFunc(m.ready, same(p)) && !slices.ContainsFunc(m.notReady, same(p)) {
					m.ready = append(m.ready, p)
				}
			}
		}
	}
	slices.SortStableFunc(out, func(a, b *mirrorAddress) int { return cmp.Compare(a.IP, b.IP) })
	return out
}
