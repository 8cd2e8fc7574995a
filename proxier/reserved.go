package proxier

import (
	"maps"
	"net/netip"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// reserved are the TCP addresses and ports of the API server itself. A Service that had one of them as an external IP or a load
// balancer IP would cut off this node, and every other, from the means to repair that. As a cluster IP such an address is
// legitimate: default/kubernetes has it.
type reserved struct {
	given     map[netip.AddrPort]struct{} // by which this program reaches it
	endpoints map[netip.AddrPort]struct{} // those of default/kubernetes
}

// apiServer is the Service of the API server.
var apiServer = plan.Service{Namespace: "default", Name: "kubernetes"}

// has reports whether a frontend is the API server's own address and port.
func (r *reserved) has(f plan.Frontend) bool {
	if f.Protocol != plan.TCP || f.Kind != plan.LoadBalancerIP && f.Kind != plan.ExternalIP {
		return false
	}
	at := netip.AddrPortFrom(f.Addr, f.Port)
	_, given := r.given[at]
	_, endpoint := r.endpoints[at]
	return given || endpoint
}

// Reserve sets the addresses of the API server, replacing those set before. The next Update uses them.
func (s *State) Reserve(list []netip.AddrPort) {
	now := map[netip.AddrPort]struct{}{}
	for _, at := range list {
		now[netip.AddrPortFrom(at.Addr().Unmap(), at.Port())] = struct{}{}
	}
	s.touchReserved(s.reserved.given, now)
	s.reserved.given = now
}

// reserveEndpoints reserves the endpoints of default/kubernetes.
func (s *State) reserveEndpoints() {
	now := map[netip.AddrPort]struct{}{}
	if svc := s.services[apiServer]; svc != nil {
		for _, slice := range svc.slices {
			for _, port := range slice.ports {
				for _, ep := range slice.endpoints {
					if port.Protocol == plan.TCP {
						now[netip.AddrPortFrom(ep.addr, port.Number)] = struct{}{}
					}
				}
			}
		}
	}
	s.touchReserved(s.reserved.endpoints, now)
	s.reserved.endpoints = now
}

// touchReserved touches the Services that ask for addresses that have become reserved or are no longer reserved.
func (s *State) touchReserved(before, now map[netip.AddrPort]struct{}) {
	if maps.Equal(before, now) {
		return
	}
	for _, list := range []map[netip.AddrPort]struct{}{before, now} {
		for at := range list {
			s.touchClaimants(claimOf(plan.Frontend{Addr: at.Addr(), Protocol: plan.TCP, Port: at.Port()}, plan.FamilyOf(at.Addr())))
		}
	}
}

// reportReserved reports the frontends that a Service does not get because they are the API server's.
func (s *State) reportReserved(spec *portSpec) {
	f := &source.Findings{Object: "Service " + spec.key.Service.String()}
	for _, want := range spec.wants {
		if s.reserved.has(want) {
			f.Problem(portField(spec.key), "this frontend is not proxied", "%s is the address and port of the API server itself", want).
				Event = "APIServerAddress"
		}
	}
	s.reportNew("reserved "+spec.key.String(), f.List)
}
