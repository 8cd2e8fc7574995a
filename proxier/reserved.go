package proxier

import (
	"maps"
	"net/netip"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// reserved are the addresses and ports of TCP at which the API server itself is reached. A Service that had one of them for an
// external IP or a load balancer IP would cut this node off, and each node with it, from what could mend that. As a cluster IP
// such an address is legitimate: default/kubernetes has it.
type reserved struct {
	given     map[netip.AddrPort]struct{} // where this program reaches it
	endpoints map[netip.AddrPort]struct{} // those of default/kubernetes
}

// apiServer is the Service that leads to the API server.
var apiServer = plan.Service{Namespace: "default", Name: "kubernetes"}

// has reports whether a frontend is the API server's own.
func (r *reserved) has(f plan.Frontend) bool {
	if f.Protocol != plan.TCP || f.Kind != plan.LoadBalancerIP && f.Kind != plan.ExternalIP {
		return false
	}
	at := netip.AddrPortFrom(f.Addr, f.Port)
	_, given := r.given[at]
	_, endpoint := r.endpoints[at]
	return given || endpoint
}

// Reserve says where the API server is reached, in place of what was said before. The next Update follows that.
func (s *State) Reserve(list []netip.AddrPort) {
	now := map[netip.AddrPort]struct{}{}
	for _, at := range list {
		now[netip.AddrPortFrom(at.Addr().Unmap(), at.Port())] = struct{}{}
	}
	s.touchReserved(s.reserved.given, now)
	s.reserved.given = now
}

// reserveEndpoints takes the endpoints of default/kubernetes for the API server's addresses.
func (s *State) reserveEndpoints() {
	now := map[netip.AddrPort]struct{}{}
	if svc := s.services[apiServer]; svc != nil {
		for _, slice := range svc.slices {
			for _, port := range slice.ports {
				for _, ep := range slice.endpoints {
					if port.protocol == plan.TCP {
						now[netip.AddrPortFrom(ep.Addr.Addr(), port.port)] = struct{}{}
					}
				}
			}
		}
	}
	s.touchReserved(s.reserved.endpoints, now)
	s.reserved.endpoints = now
}

// touchReserved touches the Services that ask for what is reserved from now on, or no more.
func (s *State) touchReserved(before, now map[netip.AddrPort]struct{}) {
	if maps.Equal(before, now) {
		return
	}
	for _, list := range []map[netip.AddrPort]struct{}{before, now} {
		for at := range list {
			tell(s.claims[claim{plan.FamilyOf(at.Addr()), at.Addr(), plan.TCP, at.Port()}], s.touchKey)
		}
	}
}

// tellReserved says which frontends a Service does not get since they are the API server's.
func (s *State) tellReserved(spec *portSpec) {
	f := &findings{object: "Service " + spec.key.Service.String()}
	for _, want := range spec.wants {
		if s.reserved.has(want) {
			f.list = append(f.list, source.Finding{
				Severity: source.Problem, Object: f.object, Field: portField(spec.key), Event: "APIServerAddress",
				Detail: want.String() + " is the address and port of the API server itself", Effect: "this frontend is not proxied",
			})
		}
	}
	s.tell("reserved "+spec.key.String(), f.list)
}
