package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/source"
)

// model is the objects of a world, and says by them alone what must happen to a packet: a second opinion about what proxier, topology and a
// mode make of them, for as much as the objects of a world may say.
type model struct {
	source.Batch
	masqueradeAll bool
}

func (w *world) model(objects source.Batch) model {
	return model{objects, w.cfg.Settings.MasqueradeAll}
}

// verdict says what must happen to a packet.
func (m model) verdict(q plan.Packet) plan.Verdict {
	svc, port, kind := m.owner(q)
	if svc == nil {
		return plan.Verdict{}
	}
	return m.decide(q, svc, port, kind)
}

// owner returns the Service that has the address and port that a packet goes to, the name of its port there, and what kind of address this is.
func (m model) owner(q plan.Packet) (svc *v1.Service, port string, kind plan.FrontendKind) {
	for _, name := range slices.SortedFunc(maps.Keys(m.Services), func(a, b types.NamespacedName) int { return cmp.Compare(a.Name, b.Name) }) {
		svc := m.Services[name] // Of two that ask for an address, the first in order has it.
		if svc == nil {
			continue
		}
		for _, port := range svc.Spec.Ports {
			at := func(ip string) bool { return netip.MustParseAddr(ip) == q.Dst && uint16(port.Port) == q.DstPort }
			ofFamily := func(ip string) bool { return plan.FamilyOf(netip.MustParseAddr(ip)) == plan.FamilyOf(q.Dst) }
			balancer := func(i v1.LoadBalancerIngress) bool { return at(i.IP) && *i.IPMode == v1.LoadBalancerIPModeVIP }
			switch {
			case slices.ContainsFunc(svc.Spec.ClusterIPs, at):
				return svc, port.Name, plan.ClusterIP
			case slices.ContainsFunc(svc.Status.LoadBalancer.Ingress, balancer):
				return svc, port.Name, plan.LoadBalancerIP
			case slices.ContainsFunc(svc.Spec.ExternalIPs, at):
				return svc, port.Name, plan.ExternalIP
			case q.DstLocal && port.NodePort != 0 && uint16(port.NodePort) == q.DstPort && slices.ContainsFunc(svc.Spec.ClusterIPs, ofFamily):
				return svc, port.Name, plan.NodePort
			}
		}
	}
	return nil, "", 0
}

// refuses reports whether a mode refuses packets to ports of an address that no Service has there: of a cluster IP, and in mode ipvs of a load
// balancer IP.
func (m model) refuses(mode string, a netip.Addr) bool {
	for _, svc := range m.Services {
		if svc == nil {
			continue
		}
		given := func(i v1.LoadBalancerIngress) bool {
			return i.IP == a.String() && *i.IPMode == v1.LoadBalancerIPModeVIP
		}
		if mode != "iptables" && slices.Contains(svc.Spec.ClusterIPs, a.String()) ||
			mode == "ipvs" && slices.ContainsFunc(svc.Status.LoadBalancer.Ingress, given) {
			return true
		}
	}
	return false
}

// decide says what must happen to a packet for a port of a Service, by an address of some kind.
func (m model) decide(q plan.Packet, svc *v1.Service, port string, kind plan.FrontendKind) plan.Verdict {
	fromPod := fromPods(q.Src)
	local, masquerade := ptr.Deref(svc.Spec.InternalTrafficPolicy, "") == v1.ServiceInternalTrafficPolicyLocal, m.masqueradeAll || !fromPod
	if kind != plan.ClusterIP {
		isLocal := svc.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal
		local, masquerade = isLocal && !fromPod && !q.SrcLocal, !isLocal || q.SrcLocal
	}
	all := m.endpoints(svc.Name, port, plan.FamilyOf(q.Dst))
	if len(usable(all)) == 0 {
		return plan.Verdict{Action: plan.Reject}
	}
	ranges := svc.Spec.LoadBalancerSourceRanges
	admits := func(r string) bool { return netip.MustParsePrefix(r).Contains(q.Src) }
	if kind == plan.LoadBalancerIP && len(ranges) > 0 && !slices.ContainsFunc(ranges, admits) {
		return plan.Verdict{Action: plan.Drop}
	}
	here := func(e discovery.Endpoint) bool { return *e.NodeName == "n1" }
	if !local {
		here = m.hinted(usable(all))
	}
	maps.DeleteFunc(all, func(_ netip.AddrPort, e discovery.Endpoint) bool { return !here(e) })
	v := plan.Verdict{Action: plan.Drop}
	for to := range usable(all) {
		v.Action, v.Targets = plan.Forward, append(v.Targets, plan.Target{Addr: to, Masquerade: masquerade || to.Addr() == q.Src})
	}
	return v
}

// usable returns the endpoints that are ready; where there are none, those that terminate and still serve.
func usable(all map[netip.AddrPort]discovery.Endpoint) map[netip.AddrPort]discovery.Endpoint {
	ready, serving := map[netip.AddrPort]discovery.Endpoint{}, map[netip.AddrPort]discovery.Endpoint{}
	for at, e := range all {
		switch {
		case *e.Conditions.Ready:
			ready[at] = e
		case *e.Conditions.Serving && *e.Conditions.Terminating:
			serving[at] = e
		}
	}
	if len(ready) > 0 {
		return ready
	}
	return serving
}

// hinted reports which endpoints this node is to use, of those that are usable: the ones for its zone where all are for some zones, and any
// is for this one.
func (m model) hinted(usable map[netip.AddrPort]discovery.Endpoint) func(discovery.Endpoint) bool {
	zone := m.Nodes["n1"].Labels[v1.LabelTopologyZone]
	forZone := func(e discovery.Endpoint) bool {
		return e.Hints != nil && slices.Contains(e.Hints.ForZones, discovery.ForZone{Name: zone})
	}
	all := func(discovery.Endpoint) bool { return true }
	here := false
	for _, e := range usable {
		if e.Hints == nil || !*e.Conditions.Ready {
			return all
		}
		here = here || forZone(e)
	}
	if here {
		return forZone
	}
	return all
}

// endpoints returns those of a Service's port, whether they can be used or not. Of two entries for an address, that which does not terminate
// counts, then one that is ready, that serves, and that has fewer hints or lower ones.
func (m model) endpoints(service, port string, f plan.Family) map[netip.AddrPort]discovery.Endpoint {
	number := func(is bool) int {
		if is {
			return 1
		}
		return 0
	}
	hints := func(e discovery.Endpoint) string {
		return fmt.Sprint(ptr.Deref(e.Hints, discovery.EndpointHints{}).ForZones)
	}
	precedes := func(a, b discovery.Endpoint) bool {
		return cmp.Or(number(*a.Conditions.Terminating)-number(*b.Conditions.Terminating), number(*b.Conditions.Ready)-number(*a.Conditions.Ready),
			number(*b.Conditions.Serving)-number(*a.Conditions.Serving), cmp.Compare(hints(a), hints(b))) < 0
	}
	out := map[netip.AddrPort]discovery.Endpoint{}
	for _, s := range m.EndpointSlices {
		if s == nil || s.Labels[discovery.LabelServiceName] != service || string(s.AddressType) != f.String() {
			continue
		}
		for _, p := range s.Ports {
			for _, e := range s.Endpoints {
				at := netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port))
				if had, is := out[at]; *p.Name == port && (!is || precedes(e, had)) {
					out[at] = e
				}
			}
		}
	}
	return out
}

// agrees looks whether the rules of a family do with packets what the objects ask for.
func (w *world) agrees(f plan.Family, m model) (why string) {
	if strings.Contains(w.foreign[f], stolen) {
		return "" // It has rules for Services.
	}
	rules, err := w.rules.packets(f)
	if err != nil {
		return err.Error()
	}
	for q := range w.probes(f) {
		want := m.verdict(q.packet())
		if want.Action == plan.Pass && m.refuses(w.cfg.Mode, q.to.Addr()) {
			want.Action = plan.Reject
		}
		outcomes, err := rules.Trace(q.packet(), thisNode)
		if err == nil {
			err = packetsim.Agree(want, q.packet(), outcomes)
		}
		if err != nil {
			return fmt.Sprintf("the objects ask for something else for packet %s: %v", q.packet(), err)
		}
	}
	return ""
}
