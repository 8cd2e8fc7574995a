package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Packet is the first packet of a new connection, as it reaches this node or leaves one of its processes.
type Packet struct {
	Src, Dst netip.Addr
	Protocol Protocol
	DstPort  uint16
	// Output is true for a packet that this node itself sends. Every other packet arrived by InInterface.
	Output      bool
	InInterface string
	// SrcLocal and DstLocal say whether Src and Dst are addresses of this node: of its interfaces, of the loopback range, or other
	// addresses in its local routing table.
	SrcLocal, DstLocal bool
}

func (p Packet) String() string {
	from := "in by " + p.InInterface
	if p.Output {
		from = "sent by this node"
	}
	local := func(is bool) string {
		if is {
			return " (local)"
		}
		return ""
	}
	return fmt.Sprintf("%s from %s%s to %s%s, %s", p.Protocol, p.Src, local(p.SrcLocal),
		netip.AddrPortFrom(p.Dst, p.DstPort), local(p.DstLocal), from)
}

// Action is what happens to a packet.
type Action uint8

// The actions. Pass leaves a packet alone: it is not for a Service. Forward sends it to one of the targets, each with equal
// probability. Reject answers with an ICMP error, Drop does not answer.
const (
	Pass Action = iota
	Forward
	Reject
	Drop
)

var actionNames = [...]string{"pass", "forward", "reject", "drop"}

func (a Action) String() string { return actionNames[a] }

// Target is an endpoint to which a packet may be sent.
type Target struct {
	Addr netip.AddrPort
	// Masquerade is true if the packet leaves the node with one of the node's addresses as its source. It does not matter for a
	// packet from elsewhere to an endpoint on this node's own host network, which never leaves.
	Masquerade bool
}

// Verdict is what happens to a packet, and why.
type Verdict struct {
	Action Action
	// ServicePort and Frontend are the destination of the packet; zero if it was not for a Service.
	ServicePort Key
	Frontend    Frontend
	// Targets are in order of address; empty unless Action is Forward.
	Targets []Target
	// Decisions led here, in their order.
	Decisions []Decision
}

// Reasons returns the texts of the decisions.
func (v Verdict) Reasons() []string {
	out := make([]string, len(v.Decisions))
	for i, d := range v.Decisions {
		out[i] = d.Text
	}
	return out
}

func (v Verdict) String() string {
	s := v.Action.String()
	for i, t := range v.Targets {
		s += [...]string{" to ", ", "}[min(i, 1)] + t.Addr.String()
		if t.Masquerade {
			s += " masqueraded"
		}
	}
	return s
}

// Verdict says what must happen to a packet. It is the specification that tests hold every backend's rules to, and it knows no
// rules itself. Each call walks the whole plan: for many packets, make an Evaluator.
func (p *Plan) Verdict(pkt Packet) Verdict { return NewEvaluator(p).Verdict(pkt) }

// Evaluator computes verdicts with an index of a plan's frontends. It does not see later changes of the plan. Several goroutines
// may use it.
type Evaluator struct {
	plan      *Plan
	addresses map[address]match
	nodePorts map[nodePort]match
}

type address struct {
	addr     netip.Addr
	protocol Protocol
	port     uint16
}

type nodePort struct {
	family   Family
	protocol Protocol
	port     uint16
}

type match struct {
	sp       *ServicePort
	frontend Frontend
}

// NewEvaluator indexes p.
func NewEvaluator(p *Plan) *Evaluator {
	e := &Evaluator{plan: p, addresses: map[address]match{}, nodePorts: map[nodePort]match{}}
	for _, sp := range p.Services {
		for _, f := range sp.Frontends {
			if f.Addr.IsValid() {
				e.addresses[address{f.Addr, f.Protocol, f.Port}] = match{sp, f}
			} else {
				e.nodePorts[nodePort{sp.Key.Family, f.Protocol, f.Port}] = match{sp, f}
			}
		}
	}
	return e
}

// Verdict says what must happen to a packet. A frontend's own address takes precedence over a node port: an external IP that is an
// address of the node has that port to itself, even while it has no endpoint.
func (e *Evaluator) Verdict(pkt Packet) Verdict {
	pkt.Src, pkt.Dst = pkt.Src.Unmap().WithZone(""), pkt.Dst.Unmap().WithZone("")
	v := e.service(pkt)
	if v.Action != Forward && e.localnet(pkt) {
		v.Action = Drop
		v.because(LoopbackGuard, "%s may be reached from loopback addresses only, and %s is none: "+
			"localhost node ports make the kernel route such packets, so they are dropped", pkt.Dst, pkt.Src)
	}
	return v
}

// service returns the verdict without regard to the loopback guard.
func (e *Evaluator) service(pkt Packet) Verdict {
	if m, ok := e.addresses[address{pkt.Dst, pkt.Protocol, pkt.DstPort}]; ok {
		return e.decide(pkt, m)
	}
	if pkt.DstLocal {
		if m, ok := e.nodePorts[nodePort{FamilyOf(pkt.Dst), pkt.Protocol, pkt.DstPort}]; ok {
			return e.nodePort(pkt, m)
		}
	}
	var v Verdict
	v.because(ForNoService, "no Service has a frontend at %s/%s", netip.AddrPortFrom(pkt.Dst, pkt.DstPort), pkt.Protocol)
	return v
}

func (e *Evaluator) nodePort(pkt Packet, m match) Verdict {
	if m.frontend.Kind == HealthCheckNodePort {
		v := Verdict{ServicePort: m.sp.Key, Frontend: m.frontend}
		v.because(ForHealthCheck, "%s of %s: the node itself answers, and these rules let the packet in", m.frontend, m.sp.Key)
		return v
	}
	if settings := &e.plan.Settings; !settings.NodePortsAnswer(e.plan.Node, pkt.Dst) {
		var v Verdict
		if pkt.Dst.IsLoopback() && !settings.LocalhostReachable(FamilyOf(pkt.Dst)) {
			v.because(NoNodePortsOnLoopback, "%s of %s, but node ports do not answer on the loopback address %s",
				m.frontend, m.sp.Key, pkt.Dst)
		} else {
			v.because(NoNodePortsAtAddress, "%s of %s, but %s is not among the addresses that node ports answer at (nodePortAddresses)",
				m.frontend, m.sp.Key, pkt.Dst)
		}
		return v
	}
	return e.decide(pkt, m)
}

// localnet reports whether the packet is for a loopback address, though not from one, on a node whose kernel routes such packets
// for the sake of localhost node ports (CVE-2020-8558).
func (e *Evaluator) localnet(pkt Packet) bool {
	return e.plan.Settings.LocalhostReachable(IPv4) && IPv4.Loopback().Contains(pkt.Dst) && !IPv4.Loopback().Contains(pkt.Src)
}

// decide returns the verdict for a packet that reached a frontend.
func (e *Evaluator) decide(pkt Packet, m match) Verdict {
	v := Verdict{ServicePort: m.sp.Key, Frontend: m.frontend}
	v.because(ForFrontend, "it is for %s of %s", m.frontend, m.sp.Key)
	if !m.sp.Any {
		v.Action = Reject
		v.because(NoEndpoint, "no node has a usable endpoint")
		return v
	}
	if m.frontend.Kind == LoadBalancerIP && !e.admitted(pkt.Src, m.sp, &v) {
		v.Action = Drop
		return v
	}
	var policy Policy
	var masquerade bool
	if m.frontend.Kind == ClusterIP {
		policy, masquerade = m.sp.InternalPolicy, e.masqueradeInternal(pkt, &v)
		v.because(InternalPolicy, "the internal traffic policy is %s", policy)
	} else {
		policy, masquerade = e.external(pkt, m.sp, &v)
	}
	endpoints := m.sp.ForPolicy(policy)
	if len(endpoints) == 0 {
		v.Action = Drop
		v.because(NoEndpointForPolicy, "there are endpoints, but none that policy %s allows on this node", policy)
		return v
	}
	v.Action = Forward
	for _, ep := range endpoints {
		hairpin := ep.Addr.Addr() == pkt.Src
		if hairpin && !masquerade {
			v.because(MasqueradeHairpin, "endpoint %s would get its own packet: masqueraded, so that the answer comes back", ep.Addr)
		}
		v.Targets = append(v.Targets, Target{Addr: ep.Addr, Masquerade: masquerade || hairpin})
	}
	slices.SortFunc(v.Targets, func(a, b Target) int { return a.Addr.Compare(b.Addr) })
	return v
}

// admitted reports whether the source ranges let src reach the load balancer IP that the verdict is for. If the node itself is within them, it
// may come from that IP, too: a node that has such an address of its own sends to it from it.
func (e *Evaluator) admitted(src netip.Addr, sp *ServicePort, v *Verdict) bool {
	if len(sp.SourceRanges) == 0 {
		return true
	}
	node := e.plan.Node.IP(sp.Key.Family)
	nodeAllowed := false
	for _, r := range sp.SourceRanges {
		if r.Contains(src) {
			v.because(InSourceRange, "source %s is within source range %s", src, r)
			return true
		}
		nodeAllowed = nodeAllowed || r.Contains(node)
	}
	if nodeAllowed && src == v.Frontend.Addr {
		v.because(OwnLoadBalancerIP, "source %s is the load balancer IP itself, and the node's %s is within the source ranges", src, node)
		return true
	}
	v.because(OutsideSourceRanges, "source %s is outside of the source ranges %s", src, some(sp.SourceRanges))
	return false
}

// some lists the first few ranges.
func some(ranges []netip.Prefix) string {
	const most = 4
	var out []string
	for _, r := range ranges[:min(len(ranges), most)] {
		out = append(out, r.String())
	}
	text := strings.Join(out, ", ")
	if more := len(ranges) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// masqueradeInternal decides for traffic to a cluster IP: a client outside the cluster that was routed here would not accept
// answers that come straight from a pod.
func (e *Evaluator) masqueradeInternal(pkt Packet, v *Verdict) bool {
	detect := e.plan.Settings.DetectLocal
	switch {
	case e.plan.Settings.MasqueradeAll:
		v.because(MasqueradeAll, "all traffic to cluster IPs is masqueraded")
		return true
	case detect.Implemented(FamilyOf(pkt.Dst)) && !e.fromPod(pkt):
		v.because(MasqueradeNotFromPod, "it does not come from a pod: masqueraded")
		return true
	}
	return false
}

// external decides, for traffic to every frontend but the cluster IP, which policy applies and whether to masquerade. Under policy
// Local, traffic of pods and of the node itself is treated as if it had left the node and returned by the load balancer, which may
// pick any node.
func (e *Evaluator) external(pkt Packet, sp *ServicePort, v *Verdict) (policy Policy, masquerade bool) {
	switch {
	case sp.ExternalPolicy == Cluster:
		v.because(ExternalPolicyCluster, "the external traffic policy is Cluster: masqueraded, since the endpoint may be on another node")
		return Cluster, true
	case e.fromPod(pkt):
		v.because(ExternalPolicyFromPod, "the external traffic policy is Local, but pods reach every endpoint")
		return Cluster, false
	case pkt.SrcLocal:
		v.because(ExternalPolicyFromNode, "the external traffic policy is Local, but the node itself reaches every endpoint, masqueraded")
		return Cluster, true
	}
	v.because(ExternalPolicyLocal, "the external traffic policy is Local")
	return Local, false
}

func (e *Evaluator) fromPod(pkt Packet) bool {
	iface := pkt.InInterface
	if pkt.Output {
		iface = ""
	}
	return e.plan.Settings.DetectLocal.Matches(pkt.Src, iface)
}

func (v *Verdict) because(code Code, format string, args ...any) {
	v.Decisions = append(v.Decisions, Decision{code, fmt.Sprintf(format, args...)})
}
