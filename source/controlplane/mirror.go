package controlplane

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
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

// mirrorAddress is an address of Endpoints, and whether it is ready for each of the ports that it has, over all subsets.
type mirrorAddress struct {
	v1.EndpointAddress
	ports map[v1.EndpointPort]bool
}

// mirrorSlices makes the slices of a Service from its Endpoints, as the mirroring controller does: subsets are
// joined by address and split again by ports.
func mirrorSlices(svc *v1.Service, ep *legacyEndpoints, c *source.Findings) []*discovery.EndpointSlice {
	groups := sliceGroups{}
	for _, a := range mirrorAddresses(ep) {
		ports := map[bool][]discovery.EndpointPort{} // by whether it is ready for them
		for _, p := range slices.SortedFunc(maps.Keys(a.ports), comparePorts) {
			ready := a.ports[p]
			ports[ready] = append(ports[ready], discovery.EndpointPort{Name: new(p.Name), Port: new(p.Port), Protocol: new(p.Protocol)})
		}
		ip, _ := source.ParseIP(a.IP)
		for ready, ports := range ports {
			groups.add(familyOf(ip), ports, discovery.Endpoint{
				Addresses: []string{ip.String()}, Conditions: discovery.EndpointConditions{Ready: new(ready)},
				NodeName: a.NodeName, TargetRef: a.TargetRef,
			})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		if g := groups[key]; len(g.Endpoints) > maxMirrored {
			c.Problem("subsets", fmt.Sprintf("the first %d are used", maxMirrored),
				"%d %s addresses with the same ports; at most %d are mirrored", len(g.Endpoints), g.AddressType, maxMirrored)
			g.Endpoints = g.Endpoints[:maxMirrored]
		}
	}
	return groups.slices(svc, mirrorController, maxMirrored)
}

func comparePorts(a, b v1.EndpointPort) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

// mirrorAddresses joins the subsets, in order of address. One that is not ready for a port in one subset is not ready for it, whatever
// the others say.
func mirrorAddresses(ep *legacyEndpoints) []*mirrorAddress {
	type addressKey struct {
		ip                    netip.Addr
		kind, namespace, name string
	}
	joined := map[addressKey]*mirrorAddress{}
	var out []*mirrorAddress
	enter := func(addresses []v1.EndpointAddress, ports []v1.EndpointPort, ready bool) {
		for _, a := range addresses {
			var key addressKey
			key.ip, _ = source.ParseIP(a.IP)
			if r := a.TargetRef; r != nil {
				key.kind, key.namespace, key.name = r.Kind, r.Namespace, r.Name
			}
			if joined[key] == nil {
				joined[key] = &mirrorAddress{a, map[v1.EndpointPort]bool{}}
				out = append(out, joined[key])
			}
			for _, p := range ports {
				p.AppProtocol = nil // No proxy needs it.
				before, has := joined[key].ports[p]
				joined[key].ports[p] = ready && (before || !has)
			}
		}
	}
	for _, s := range ep.Subsets {
		enter(s.NotReadyAddresses, s.Ports, false)
		enter(s.Addresses, s.Ports, true)
	}
	slices.SortStableFunc(out, func(a, b *mirrorAddress) int { return cmp.Compare(a.IP, b.IP) })
	return out
}
