package inspect

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
	"nodeproxy/topology"
)

// Explanation is the whole story of one Service on this node.
type Explanation struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Node      string `json:"node"`
	Zone      string `json:"zone,omitempty"`
	Mode      string `json:"mode"`
	Type      string `json:"type,omitempty"`
	// Selector is spec.selector in kubectl's form, such as "app=web".
	Selector string            `json:"selector,omitempty"`
	Ports    []PortExplanation `json:"ports"`
	// Checks are what was looked at on the node itself; none where Check was not called.
	Checks []Check `json:"checks,omitempty"`
	// Diagnoses are what is wrong, and what else its owner should know, the worst first.
	Diagnoses []Diagnosis `json:"diagnoses"`

	described     *proxier.Description
	masqueradeAll bool
}

// Problem reports whether anything is wrong.
func (e *Explanation) Problem() bool {
	return slices.ContainsFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Severity == problem })
}

// PortExplanation is a ServicePort with what happens to its traffic.
type PortExplanation struct {
	ServicePort
	TargetPort string                `json:"targetPort,omitempty"`
	Frontends  []FrontendExplanation `json:"frontends,omitzero"`
	// MoreFrontends is how many are not among these, where there are very many.
	MoreFrontends int        `json:"moreFrontends,omitempty"`
	Endpoints     []Endpoint `json:"endpoints"`
}

// FrontendExplanation is what happens to the traffic that reaches a frontend.
type FrontendExplanation struct {
	Frontend string    `json:"frontend"`
	Verdicts []Verdict `json:"verdicts"`
}

// Verdict is what happens to new connections from some kinds of source.
type Verdict struct {
	// From are the kinds of source.
	From []string `json:"from"`
	// Action is forward, reject, drop or pass.
	Action string `json:"action"`
	// Endpoints are those that may be chosen, and Masqueraded those of them that see an address of this node as the client's. Of very many, these are
	// the first: there are Chosen and MasqueradedTo of them.
	Endpoints     []string `json:"endpoints,omitempty"`
	Masqueraded   []string `json:"masqueraded,omitempty"`
	Chosen        int      `json:"chosen,omitempty"`
	MasqueradedTo int      `json:"masqueradedTo,omitempty"`
	// Reasons say why, in order.
	Reasons []string `json:"reasons"`

	targets []plan.Target
}

// What is explained of a Service is bounded: its owner may give it thousands of frontends with thousands of endpoints each.
const (
	mostFrontends      = 64  // of a ServicePort
	mostFrontendsInAll = 256 // of a Service
	mostChosen         = 64  // endpoints of a verdict
)

// Endpoint is an endpoint of a ServicePort, with what this node does with it.
type Endpoint struct {
	Address string `json:"address"`
	Pod     string `json:"pod,omitempty"`
	Node    string `json:"node,omitempty"`
	Zone    string `json:"zone,omitempty"`
	// Conditions are those of ready, serving and terminating that hold.
	Conditions []string `json:"conditions,omitempty"`
	// Hints are the nodes or zones that are meant to use it.
	Hints []string `json:"hints,omitempty"`
	// UsedFor are the traffic policies under which it gets traffic from here.
	UsedFor []string `json:"usedFor,omitempty"`
	// Unused are the reasons why it gets none under the others, by policy.
	Unused map[string]string `json:"unused,omitempty"`
}

// Explain tells the story of a Service. The error is an UnknownServiceError if nothing is known of it.
func (n *Node) Explain(svc plan.Service) (*Explanation, error) {
	d, own, err := n.describeService(svc)
	out := &Explanation{Namespace: svc.Namespace, Name: svc.Name, Node: own.Node.Name, Zone: own.Node.Zone, Mode: n.Mode, Ports: []PortExplanation{},
		described: &proxier.Description{}, masqueradeAll: own.Settings.MasqueradeAll}
	if err != nil || !d.Exists {
		// A file may have the Service, and a reason why it is not used.
		if of := n.findingsOf(svc); len(of) > 0 {
			c := &diagnosis{Node: n, d: &proxier.Description{Service: svc, Exists: true, Findings: of}, list: []Diagnosis{}, listed: map[string]bool{}}
			c.service()
			c.objects()
			if own.Partial {
				c.add(note, RulesStay, "", "%s.", upper(rulesStay))
			}
			out.Diagnoses = c.list
			return out, nil
		}
		if err != nil {
			return nil, err
		}
	}
	programmed, refused := n.snapshot(), n.refused()
	out.Type, out.Selector, out.described = d.Type, selector(d.Selector), d
	frontends := mostFrontendsInAll
	for _, sp := range d.ServicePorts {
		p := explainPort(d, own, sp, min(frontends, mostFrontends), programmed, refused)
		out.Ports = append(out.Ports, p)
		frontends -= len(p.Frontends)
	}
	out.Diagnoses = n.diagnose(d, own, programmed, refused)
	return out, nil
}

// rulesStay is what holds for Services that are not known while the plan is partial.
const rulesStay = "not all objects could be read since nodeproxy started, so the rules that the kernel had before for Services that are not known stay in force"

// findingsOf returns why a Service of a file is not used; nil for no reason.
func (n *Node) findingsOf(svc plan.Service) []source.Finding {
	return only(n.otherFindings(), func(f source.Finding) bool { return f.Object == "Service "+svc.String() })
}

// selector returns a selector as kubectl takes it.
func selector(labels map[string]string) string {
	return strings.Join(words(slices.Sorted(maps.Keys(labels)), func(k string) string { return k + "=" + labels[k] }), ",")
}

func explainPort(d *proxier.Description, own *plan.Plan, sp *plan.ServicePort, frontends int, programmed *plan.Snapshot,
	refused map[plan.Key]plan.Refusal) PortExplanation {
	out := PortExplanation{ServicePort: describe(sp), Frontends: []FrontendExplanation{}, Endpoints: []Endpoint{}}
	out.State, out.Since = state(sp, programmed, refused)
	out.TargetPort = targetOf(d, sp.Key).Target
	evaluator, pod := plan.NewEvaluator(own), podHere(own.Settings.DetectLocal, sp)
	for _, f := range sp.Frontends[:min(len(sp.Frontends), frontends)] {
		out.Frontends = append(out.Frontends, FrontendExplanation{Frontend: f.String(), Verdicts: verdicts(evaluator, own, sp, f, pod)})
	}
	out.MoreFrontends = len(sp.Frontends) - len(out.Frontends)
	uses := usesOf(sp)
	for _, ep := range d.Endpoints(sp.Key) {
		out.Endpoints = append(out.Endpoints, uses.explain(ep))
	}
	return out
}

// targetOf returns the port of a Service, as its object spells it, that a ServicePort is of.
func targetOf(d *proxier.Description, k plan.Key) proxier.Port {
	for _, p := range d.Ports {
		if p.Name == k.Port && p.Protocol == k.Protocol {
			return p
		}
	}
	return proxier.Port{}
}

// uses says for each address of an endpoint under which policies it is used, and why not under others.
type uses struct {
	used   map[netip.AddrPort][]string
	unused map[netip.AddrPort]map[string]string
}

func usesOf(sp *plan.ServicePort) uses {
	out := uses{map[netip.AddrPort][]string{}, map[netip.AddrPort]map[string]string{}}
	for _, policy := range []plan.Policy{plan.Cluster, plan.Local} {
		for _, ep := range sp.ForPolicy(policy) {
			out.used[ep.Addr] = append(out.used[ep.Addr], policy.String())
		}
	}
	for _, ex := range sp.Excluded {
		if out.unused[ex.Addr] == nil {
			out.unused[ex.Addr] = map[string]string{}
		}
		out.unused[ex.Addr][ex.Policy.String()] = string(ex.Reason)
	}
	return out
}

// conditions are those of ready, serving and terminating that hold.
func conditions(ep topology.Endpoint) []string {
	return filled(when(ep.Ready, "ready"), when(ep.Serving, "serving"), when(ep.Terminating, "terminating"))
}

func (u uses) explain(ep topology.Endpoint) Endpoint {
	nodes := words(ep.ForNodes, func(n string) string { return "node " + n })
	zones := words(ep.ForZones, func(z string) string { return "zone " + z })
	return Endpoint{Address: ep.Addr.String(), Pod: ep.Pod, Node: ep.Node, Zone: ep.Zone, Conditions: conditions(ep), Hints: slices.Concat(nodes, zones),
		UsedFor: u.used[ep.Addr], Unused: u.unused[ep.Addr]}
}

// client is a kind of source, with a packet that stands for it.
type client struct {
	name   string
	packet plan.Packet
}

// The addresses that stand for clients elsewhere are from the ranges for documentation (RFC 5737, RFC 3849, RFC 9637).
var outside = map[plan.Family]netip.Addr{
	plan.IPv4: netip.MustParseAddr("198.51.100.7"), plan.IPv6: netip.MustParseAddr("2001:db8::7"),
}

// elsewhere returns an address outside that no source range has; false if they have all that are tried.
func elsewhere(f plan.Family, ranges []netip.Prefix) (netip.Addr, bool) {
	others := []netip.Addr{outside[f], netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("192.0.2.7")}
	if f == plan.IPv6 {
		others = []netip.Addr{outside[f], netip.MustParseAddr("3fff::7")}
	}
	for _, a := range others {
		if !contains(ranges, a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// interfaceOutside stands for the interface by which packets of other hosts arrive. No pod's interface is called so.
const interfaceOutside = "(uplink)"

// clients returns the kinds of client that matter for a frontend of a ServicePort. pod is a packet of a pod, nil where pods are not told from others.
func clients(p *plan.Plan, sp *plan.ServicePort, f plan.Frontend, pod *plan.Packet) []client {
	family := sp.Key.Family
	if f.Kind == plan.HealthCheckNodePort {
		return []client{{"anywhere", plan.Packet{Src: outside[family], InInterface: interfaceOutside}}}
	}
	var out []client
	if pod != nil {
		out = append(out, client{"a pod on this node", *pod})
	}
	if ip := p.Node.IP(family); ip.IsValid() {
		out = append(out, client{"this node", plan.Packet{Src: ip, SrcLocal: true, Output: true}},
			client{"another node", plan.Packet{Src: neighbour(ip), InInterface: interfaceOutside}})
	}
	if f.Kind != plan.LoadBalancerIP || len(sp.SourceRanges) == 0 {
		return append(out, client{"outside", plan.Packet{Src: outside[family], InInterface: interfaceOutside}})
	}
	within := sp.SourceRanges[0].Addr()
	out = append(out, client{"outside within " + ranges(sp), plan.Packet{Src: within, InInterface: interfaceOutside}})
	if src, ok := elsewhere(family, sp.SourceRanges); ok {
		out = append(out, client{"elsewhere outside", plan.Packet{Src: src, InInterface: interfaceOutside}})
	}
	return out
}

// mostRanges is how many source ranges are named: one Service can have thousands.
const mostRanges = 20

// ranges returns the source ranges of a ServicePort.
func ranges(sp *plan.ServicePort) string {
	out := words(sp.SourceRanges[:min(len(sp.SourceRanges), mostRanges)], netip.Prefix.String)
	if more := len(sp.SourceRanges) - mostRanges; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, ", ")
}

// podHere returns a packet of a pod on this node that is no endpoint of the ServicePort. It returns nil where pods are not told from
// other clients.
func podHere(detect plan.DetectLocal, sp *plan.ServicePort) *plan.Packet {
	f := sp.Key.Family
	if !detect.Implemented(f) {
		return nil
	}
	if !detect.ByCIDR() {
		return &plan.Packet{Src: outside[f], InInterface: podInterface(detect)}
	}
	taken := map[netip.Addr]bool{}
	for _, ep := range sp.All() {
		taken[ep.Addr.Addr()] = true
	}
	src := detect.CIDR(f).Addr().Next()
	for taken[src] {
		src = src.Next()
	}
	if !detect.CIDR(f).Contains(src) {
		return nil
	}
	return &plan.Packet{Src: src, InInterface: interfaceOutside}
}

// neighbour returns another address close to one.
func neighbour(ip netip.Addr) netip.Addr {
	if next := ip.Next(); next.IsValid() {
		return next
	}
	return ip.Prev()
}

// verdicts returns what happens at a frontend, with the kinds of source to which the same happens together.
func verdicts(e *plan.Evaluator, p *plan.Plan, sp *plan.ServicePort, f plan.Frontend, pod *plan.Packet) []Verdict {
	var out []Verdict
	for _, c := range clients(p, sp, f, pod) {
		pkt := c.packet
		pkt.Dst, pkt.Protocol, pkt.DstPort = f.Addr, f.Protocol, f.Port
		if !f.Addr.IsValid() {
			pkt.Dst, pkt.DstLocal = p.Node.IP(sp.Key.Family), true
			if ranges := p.Settings.NodePortAddresses.Ranges(sp.Key.Family, p.Node); len(ranges) > 0 && !contains(ranges, pkt.Dst) {
				pkt.Dst = ranges[0].Addr()
			}
			if !pkt.Dst.IsValid() { // The node may have addresses that its Node does not name.
				pkt.Dst = anyAddress(sp.Key.Family)
			}
		}
		v := asVerdict(e.Verdict(pkt))
		if nodePortNowhere(p, sp, f) {
			v.Reasons = []string{fmt.Sprintf("node ports answer at the node's primary addresses alone, and no %s one is known", sp.Key.Family)}
		}
		if i := slices.IndexFunc(out, v.same); i >= 0 {
			out[i].From = append(out[i].From, c.name)
			continue
		}
		v.From = []string{c.name}
		out = append(out, v)
	}
	for i := range out {
		out[i].targets = nil // There may be very many.
	}
	return out
}

// anyAddress returns the unspecified address, which stands for whatever local address a client sends to. No frontend has it.
func anyAddress(f plan.Family) netip.Addr {
	if f == plan.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// nodePortNowhere reports whether a frontend is a node port that answers at no address, as it is limited to the primary one, and none is known.
func nodePortNowhere(p *plan.Plan, sp *plan.ServicePort, f plan.Frontend) bool {
	n := p.Settings.NodePortAddresses
	return f.Kind == plan.NodePort && !n.All(sp.Key.Family) && len(n.Ranges(sp.Key.Family, p.Node)) == 0
}

func contains(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

func asVerdict(v plan.Verdict) Verdict {
	out := Verdict{Action: v.Action.String(), Reasons: v.Reasons(), Chosen: len(v.Targets), targets: v.Targets}
	if last := v.Decisions[len(v.Decisions)-1]; last.Code == plan.OutsideSourceRanges { // Several kinds of source share this verdict.
		out.Reasons[len(out.Reasons)-1] = "spec.loadBalancerSourceRanges does not admit the source"
	}
	for i, t := range v.Targets {
		if i < mostChosen {
			out.Endpoints = append(out.Endpoints, t.Addr.String())
		}
		if t.Masquerade {
			if out.MasqueradedTo++; out.MasqueradedTo <= mostChosen {
				out.Masqueraded = append(out.Masqueraded, t.Addr.String())
			}
		}
	}
	return out
}

// same reports whether the same happens.
func (v Verdict) same(o Verdict) bool {
	return v.Action == o.Action && slices.Equal(v.targets, o.targets)
}

// Summary says what happens in one line.
func (v Verdict) Summary() string {
	switch v.Action {
	case plan.Pass.String():
		return v.Reasons[len(v.Reasons)-1]
	case plan.Reject.String(), plan.Drop.String():
		return v.Action + ": " + v.Reasons[len(v.Reasons)-1]
	}
	s := fmt.Sprintf("forward to %s", counted(v.Chosen, "endpoint"))
	switch v.MasqueradedTo {
	case 0:
		return s
	case v.Chosen:
		return s + ", masqueraded"
	}
	text := some(v.Masqueraded)
	if more := v.MasqueradedTo - len(v.Masqueraded); more > 0 { // The list is not all.
		text = fmt.Sprintf("%d of them", v.MasqueradedTo)
	}
	return s + ", masqueraded to " + text
}
