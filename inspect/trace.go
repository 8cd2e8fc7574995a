package inspect

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/proxier"
	"nodeproxy/topology"
)

// TraceQuery asks for the way of a packet that begins a connection.
type TraceQuery struct {
	// From is who sends it: node, outside, an address, or the NAME or NAMESPACE/NAME of a Pod. To is where it is sent: an address, the
	// name of a Service as plan.ParseService reads it, or node, each with :PORT, where PORT is a number or, for a Service, the name of a port.
	From, To string
	// Protocol is empty for that of the Service's port, or TCP.
	Protocol plan.Protocol
	// Namespace is that of names without one.
	Namespace string
}

// Trace is the way of a packet, in each address family that it may have.
type Trace struct {
	Node    string        `json:"node"`
	Mode    string        `json:"mode"`
	Packets []PacketTrace `json:"packets"`
}

// Problem reports whether a packet is rejected or dropped, or might be since the kernel is not as it should be.
func (t *Trace) Problem() bool {
	return slices.ContainsFunc(t.Packets, func(p PacketTrace) bool {
		return p.Action == plan.Reject.String() || p.Action == plan.Drop.String() || p.State == Pending || p.State == Refused
	})
}

// PacketTrace is the way of one packet.
type PacketTrace struct {
	Family      string        `json:"family"`
	Protocol    plan.Protocol `json:"protocol"`
	From        string        `json:"from"`
	Source      string        `json:"source"`
	Destination string        `json:"destination"`
	// FromNode says that this node sends it, and FromAnywhere that Source stands for all hosts outside.
	FromNode     bool `json:"fromNode,omitempty"`
	FromAnywhere bool `json:"fromAnywhere,omitempty"`
	// Service is the Service whose Frontend the packet reaches; both are empty if it reaches none. State is that of its ServicePort.
	Service  string `json:"service,omitempty"`
	Frontend string `json:"frontend,omitempty"`
	State    string `json:"state,omitempty"`
	// Action is forward, reject, drop, or pass for a packet that is left alone.
	Action string `json:"action"`
	// Reasons say why, in order, and Notes what to know besides.
	Reasons []string `json:"reasons"`
	Notes   []string `json:"notes,omitempty"`
	// Steps are those with which the ways to all outcomes begin. Each outcome has the rest of its own.
	Steps    []TraceStep    `json:"steps"`
	Outcomes []TraceOutcome `json:"outcomes"`
}

// TraceStep is a rule that matches the packet, or a virtual server or real server of IPVS.
type TraceStep struct {
	Hook  string `json:"hook"`
	Table string `json:"table"`
	Chain string `json:"chain,omitempty"`
	Rule  string `json:"rule"`
	// Elements are the elements of sets and maps by which the rule matches.
	Elements []string `json:"elements,omitempty"`
}

// TraceOutcome is one of the possible ends of the way.
type TraceOutcome struct {
	// Action is accept, reject or drop.
	Action      string  `json:"action"`
	Probability float64 `json:"probability"`
	// Endpoint is where the packet is sent to; empty if its destination stays.
	Endpoint string `json:"endpoint,omitempty"`
	Pod      string `json:"pod,omitempty"`
	Node     string `json:"node,omitempty"`
	// Masqueraded is true if the endpoint sees an address of this node as the client's.
	Masqueraded bool        `json:"masqueraded"`
	Steps       []TraceStep `json:"steps"`
}

// TraceError is returned for a question that does not say enough or names what is not known.
type TraceError struct{ text string }

func (e *TraceError) Error() string { return e.text }

func cantTrace(format string, args ...any) error { return &TraceError{fmt.Sprintf(format, args...)} }

// Trace follows a packet through the rules of the node's mode: those that are programmed, or those that would be.
func (n *Node) Trace(q TraceQuery) (*Trace, error) {
	t := &tracer{Node: n, query: q, programmed: n.snapshot()}
	switch { // What is desired changes in time, and may be ahead of the kernel.
	case t.programmed == nil:
		n.View(func(s *proxier.State) { t.whole = s.Plan() })
	case t.programmed.Generation == 0:
		return nil, cantTrace("nothing has been programmed yet; \"nodeproxy get findings\" may say why")
	default:
		t.whole = t.programmed.Plan()
	}
	var err error
	if t.local, err = t.isLocal(); err != nil {
		return nil, err
	}
	packets, err := t.packets()
	if err != nil {
		return nil, err
	}
	out := &Trace{Node: t.whole.Node.Name, Mode: n.Mode}
	for _, p := range packets {
		one, err := t.trace(p)
		if err != nil {
			return nil, err
		}
		out.Packets = append(out.Packets, *one)
	}
	return out, nil
}

// tracer answers one question.
type tracer struct {
	*Node
	query      TraceQuery
	programmed *plan.Snapshot // nil where nothing is
	whole      *plan.Plan     // must not be changed
	local      func(netip.Addr) bool
	podsRead   bool
}

// isLocal returns what tells the addresses of the node from others.
func (t *tracer) isLocal() (func(netip.Addr) bool, error) {
	if t.Local != nil {
		return t.Local()
	}
	ips := t.whole.Node.IPs
	return func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(ips, a) }, nil
}

// sent is a packet with the words for its sender.
type sent struct {
	plan.Packet
	from  string
	notes []string
}

// packets returns the packets that the question is about, one for each family.
func (t *tracer) packets() ([]sent, error) {
	targets, err := t.targets()
	if err != nil {
		return nil, err
	}
	var out []sent
	var why error
	for _, to := range targets {
		p, err := t.source(to)
		if err != nil {
			why = cmp.Or(why, err)
			continue
		}
		p.Dst, p.DstPort, p.Protocol, p.DstLocal = to.Addr, to.Port, to.Protocol, t.local(to.Addr)
		p.SrcLocal = t.local(p.Src)
		out = append(out, p)
	}
	if len(out) == 0 {
		return nil, why
	}
	return out, nil
}

// targets returns where the packets go.
func (t *tracer) targets() ([]plan.Address, error) {
	to := t.query.To
	protocol := cmp.Or(t.query.Protocol, plan.TCP)
	if at, err := netip.ParseAddrPort(to); err == nil {
		if at.Port() == 0 {
			return nil, cantTrace("%s: no packet is sent to port 0", to)
		}
		return []plan.Address{{Addr: at.Addr().Unmap().WithZone(""), Protocol: protocol, Port: at.Port()}}, nil
	}
	if a, err := netip.ParseAddr(strings.Trim(to, "[]")); err == nil {
		return t.at(a.Unmap().WithZone(""))
	}
	if i := strings.LastIndexByte(to, ':'); i >= 0 {
		if _, err := netip.ParseAddr(strings.Trim(to[:i], "[]")); err == nil {
			if _, err := strconv.ParseUint(to[i+1:], 10, 16); err == nil {
				return nil, cantTrace("%s: want an address of IPv4 as in 192.0.2.1:80, and one of IPv6 as in [2001:db8::1]:80", to)
			}
			return nil, cantTrace("%s: %q is not the number of a port, 1 to 65535", to, to[i+1:])
		}
	}
	name, port, _ := strings.Cut(to, ":")
	if name == "outside" {
		return nil, cantTrace("%s: outside is for FROM; give an address to send to", to)
	}
	if name == "node" {
		return t.atNode(port, protocol)
	}
	svc, ok := plan.ParseService(name, t.query.Namespace)
	if !ok {
		return nil, cantTrace("%q is neither an address nor the name of a Service: want NAME, NAMESPACE/NAME or a name of DNS, such as NAME.NAMESPACE", name)
	}
	return t.ofService(svc, port)
}

// at returns the only port that Services have at an address.
func (t *tracer) at(a netip.Addr) ([]plan.Address, error) {
	var found []plan.Address
	for _, sp := range t.whole.Services {
		for _, f := range sp.Frontends {
			if f.Addr == a && cmp.Or(t.query.Protocol, f.Protocol) == f.Protocol {
				found = append(found, plan.Address{Addr: a, Protocol: f.Protocol, Port: f.Port})
			}
		}
	}
	if len(found) == 1 {
		return found, nil
	}
	return nil, cantTrace("%s needs a port: %s", a, portsOf(found, netip.AddrPortFrom(a, 80).String()))
}

// portsOf lists the ports to choose from, and shows how to choose one.
func portsOf(found []plan.Address, example string) string {
	if len(found) == 0 {
		return "such as " + example
	}
	ports := words(found, func(a plan.Address) string { return fmt.Sprintf("%d/%s", a.Port, a.Protocol) })
	slices.Sort(ports)
	return "there are " + strings.Join(slices.Compact(ports), ", ")
}

// atNode returns a port of the node's primary addresses.
func (t *tracer) atNode(port string, protocol plan.Protocol) ([]plan.Address, error) {
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 {
		return nil, cantTrace("%q: node needs the number of a port, such as node:30080", t.query.To)
	}
	if t.query.Protocol == "" { // A node port may be one of UDP alone.
		var only []plan.Protocol
		for _, sp := range t.whole.Services {
			for _, f := range sp.Frontends {
				if f.Kind == plan.NodePort && f.Port == uint16(number) && !slices.Contains(only, f.Protocol) {
					only = append(only, f.Protocol)
				}
			}
		}
		if len(only) == 1 {
			protocol = only[0]
		}
	}
	var out []plan.Address
	for _, f := range plan.Families {
		if ip := t.whole.Node.IP(f); ip.IsValid() {
			out = append(out, plan.Address{Addr: ip, Protocol: protocol, Port: uint16(number)})
		}
	}
	if len(out) == 0 {
		return nil, cantTrace("no address of node %s is known, as there is no Node object of it; give an address in place of \"node\"", t.whole.Node.Name)
	}
	return out, nil
}

// ofService returns the cluster IPs of a Service, with one of its ports.
func (t *tracer) ofService(svc plan.Service, port string) ([]plan.Address, error) {
	keys := t.whole.KeysOf(svc)
	if len(keys) == 0 {
		if _, _, err := t.describeService(svc); err != nil && len(t.findingsOf(svc)) == 0 {
			return nil, err
		}
		return nil, cantTrace("Service %s has no port that is proxied here; \"nodeproxy explain %[1]s\" says why", svc)
	}
	var all, found []plan.Address
	for _, k := range keys {
		for _, f := range t.whole.Services[k].Frontends {
			if f.Kind != plan.ClusterIP {
				continue
			}
			a := plan.Address{Addr: f.Addr, Protocol: f.Protocol, Port: f.Port}
			all = append(all, a)
			if cmp.Or(t.query.Protocol, f.Protocol) == f.Protocol && (port == "" || port == k.Port || port == fmt.Sprint(f.Port)) {
				found = append(found, a)
			}
		}
	}
	one := func(a plan.Address) bool { return a.Protocol == found[0].Protocol && a.Port == found[0].Port }
	switch number, err := strconv.ParseUint(port, 10, 16); {
	case err == nil && number == 0:
		return nil, cantTrace("Service %s: no packet is sent to port 0", svc)
	case len(all) == 0:
		return nil, cantTrace("Service %s has no cluster IP on this node; give one of its addresses; \"nodeproxy explain %[1]s\" lists them", svc)
	case len(found) == 0 && err == nil: // A port that it does not have may be asked for.
		for _, a := range all {
			a.Port, a.Protocol = uint16(number), cmp.Or(t.query.Protocol, plan.TCP)
			if !slices.Contains(found, a) {
				found = append(found, a)
			}
		}
	case len(found) == 0:
		return nil, cantTrace("Service %s has no port %q of this protocol: %s", svc, port, portsOf(all, ""))
	case slices.ContainsFunc(found, func(a plan.Address) bool { return !one(a) }):
		return nil, cantTrace("Service %s has several ports; give one, as in %s:%d, and the protocol with -p: %s", svc, svc.Name, found[0].Port, portsOf(found, ""))
	}
	return found, nil
}

// source returns a packet from whom the question says, for a target. The target is not in it yet.
func (t *tracer) source(to plan.Address) (sent, error) {
	f, from := plan.FamilyOf(to.Addr), t.query.From
	switch from {
	case "node":
		return t.fromNode(to.Addr)
	case "outside":
		return sent{Packet: plan.Packet{Src: outside[f], InInterface: interfaceOutside}, from: "a host outside, here with an address from a range for documentation"}, nil
	}
	if a, err := netip.ParseAddr(from); err == nil {
		a = a.Unmap().WithZone("")
		if plan.FamilyOf(a) != f {
			return sent{}, cantTrace("%s can't send to %s: they are of different address families", a, to.Addr)
		}
		return t.fromAddress(a), nil
	}
	namespace, name, found := strings.Cut(from, "/")
	if !found {
		namespace, name = t.query.Namespace, from
	}
	return t.fromPod(namespace, name, f)
}

func (t *tracer) fromNode(dst netip.Addr) (sent, error) {
	f := plan.FamilyOf(dst)
	src := t.whole.Node.IP(f)
	if t.local(dst) { // The kernel sends what is for itself from the same address.
		src = dst
	}
	if !src.IsValid() {
		return sent{}, cantTrace("node %s has no %s address", t.whole.Node.Name, f)
	}
	return sent{Packet: plan.Packet{Src: src, Output: true}, from: "this node"}, nil
}

// fromAddress returns a packet from an address: the node's own, a pod's, or that of another host.
func (t *tracer) fromAddress(a netip.Addr) sent {
	out := sent{Packet: plan.Packet{Src: a, InInterface: interfaceOutside}}
	detect := t.whole.Settings.DetectLocal
	switch {
	case t.local(a):
		out.Packet = plan.Packet{Src: a, Output: true}
		out.from = "this node"
	case t.endpointHere(a):
		out.InInterface, out.from = podInterface(detect), "a pod on this node"
	case detect.ByCIDR() && detect.Matches(a, ""):
		out.from = "a pod, since the address is in " + detect.CIDR(plan.FamilyOf(a)).String()
	default:
		out.from = "another host"
		if detect.Implemented(plan.FamilyOf(a)) && !detect.ByCIDR() {
			out.notes = append(out.notes, fmt.Sprintf("Pods are recognised by their interface, and none is known to have %s: it counts as another host's. "+
				"For a pod on this node, give the name of the Pod.", a))
		}
	}
	return out
}

// endpointHere reports whether an address is that of an endpoint on this node.
func (t *tracer) endpointHere(a netip.Addr) bool {
	for _, sp := range t.whole.Services {
		if slices.ContainsFunc(sp.All(), func(ep plan.Endpoint) bool { return ep.Local && ep.Addr.Addr() == a }) {
			return true
		}
	}
	return false
}

// podInterface is the interface by which packets of pods on this node arrive.
func podInterface(d plan.DetectLocal) string {
	switch d.Mode {
	case plan.DetectBridgeInterface:
		return d.Interface
	case plan.DetectInterfaceNamePrefix:
		return d.Interface + "0"
	}
	return "(pod)"
}

// fromPod returns a packet of a Pod.
func (t *tracer) fromPod(namespace, name string, f plan.Family) (sent, error) {
	pod := t.findPod(namespace, name)
	if len(pod.addrs) == 0 {
		return sent{}, &UnknownPodError{Namespace: namespace, Name: name, Read: t.podsRead, Similar: t.podsLike(namespace, name)}
	}
	i := slices.IndexFunc(pod.addrs, func(a netip.Addr) bool { return plan.FamilyOf(a) == f })
	if i < 0 {
		return sent{}, cantTrace("Pod %s/%s has no %s address", namespace, name, f)
	}
	out := t.fromAddress(pod.addrs[i])
	out.notes = nil
	if !out.Output && (pod.node == "" || pod.node == t.whole.Node.Name) {
		out.InInterface = podInterface(t.whole.Settings.DetectLocal)
	}
	out.from = fmt.Sprintf("Pod %s/%s", namespace, name)
	switch {
	case out.Output:
		out.from += " in the network of this node"
	case pod.node != "" && pod.node != t.whole.Node.Name:
		out.from += " on node " + pod.node
		out.notes = append(out.notes, fmt.Sprintf("The Pod is on node %s, so it is the proxy there that handles its packets; this is what would happen here.", pod.node))
	}
	return out, nil
}

// foundPod is what is known of a Pod.
type foundPod struct {
	addrs []netip.Addr
	node  string
}

// findPod looks for a Pod among the Pods, if they can be read, and among the endpoints.
func (t *tracer) findPod(namespace, name string) (out foundPod) {
	if t.Pods != nil {
		list, err := t.Pods(namespace)
		t.podsRead = err == nil && len(list) < mostPods
		for _, p := range list {
			if p.Namespace != namespace || p.Name != name {
				continue
			}
			return foundPod{podAddrs(p), p.Spec.NodeName}
		}
	}
	t.View(func(s *proxier.State) {
		for ep := range s.EndpointsOf(namespace) {
			if ep.Pod == name {
				if a := ep.Addr.Addr(); !slices.Contains(out.addrs, a) {
					out.addrs = append(out.addrs, a)
				}
				out.node = cmp.Or(ep.Node, out.node)
			}
		}
	})
	slices.SortFunc(out.addrs, netip.Addr.Compare)
	return out
}

// podsLike returns the Pods that may be meant by a name that none has: those of the namespace with a similar one, then those of other
// namespaces with the same. Where there are none, it is the namespace that may be misspelt.
func (t *tracer) podsLike(namespace, name string) []string {
	here, elsewhere, namespaces := map[string]bool{}, map[string]bool{}, map[string]bool{}
	add := func(ns, pod string) {
		namespaces[ns] = true
		switch {
		case ns != namespace && strings.EqualFold(pod, name):
			elsewhere[ns+"/"+pod] = true
		case ns == namespace && pod != name && similar(pod, name):
			here[ns+"/"+pod] = true
		}
	}
	if t.Pods != nil {
		list, _ := t.Pods(namespace) // That they can't be read has been noticed.
		for _, p := range list {
			add(p.Namespace, p.Name)
		}
	}
	t.View(func(s *proxier.State) {
		for ns, pod := range s.Pods() {
			add(ns, pod)
		}
	})
	if len(here)+len(elsewhere) == 0 && !namespaces[namespace] {
		for ns := range namespaces {
			if similar(ns, namespace) {
				elsewhere["namespace "+ns] = true
			}
		}
	}
	return append(slices.Sorted(maps.Keys(here)), slices.Sorted(maps.Keys(elsewhere))...)
}

// trace follows one packet.
func (t *tracer) trace(p sent) (*PacketTrace, error) {
	family := plan.FamilyOf(p.Dst)
	near := t.whole.Near(p.Packet)
	verdict := near.Verdict(p.Packet)
	m, err := t.Machine(t.whole, near, family, t.local)
	if err != nil {
		return nil, fmt.Errorf("rendering the rules: %w", err)
	}
	var outcomes []packetsim.Outcome
	martian := !p.Output && m.IsAdded(p.Src)
	if martian {
		outcomes = []packetsim.Outcome{{Action: packetsim.Drop, Probability: 1}}
	} else if outcomes, err = m.Trace(p.Packet, packetsim.Node{Local: t.local}); err != nil {
		return nil, fmt.Errorf("following %s: %w", p.Packet, err)
	}
	out := &PacketTrace{
		Family: family.String(), Protocol: p.Protocol, From: p.from, Source: p.Src.String(),
		Destination: netip.AddrPortFrom(p.Dst, p.DstPort).String(), FromNode: p.Output, FromAnywhere: t.query.From == "outside", Notes: p.notes, Steps: []TraceStep{}, Outcomes: []TraceOutcome{},
	}
	sp := t.whole.Services[verdict.ServicePort]
	if sp != nil {
		out.Service, out.Frontend = sp.Key.PortName(), verdict.Frontend.String()
		t.note(out, sp)
	} else if t.whole.Partial {
		out.Notes = append(out.Notes, upper(rulesStay)+": they may do something else with this packet.")
	}
	pods := t.podsBehind(sp)
	for _, o := range outcomes {
		to := TraceOutcome{Action: string(o.Action), Probability: o.Probability, Masqueraded: o.Masquerade && (p.Output || !o.Delivered), Steps: steps(o.Steps)}
		if o.DNAT {
			to.Endpoint = o.Dst.String()
			to.Pod, to.Node = pods[o.Dst].Pod, pods[o.Dst].Node
		}
		out.Outcomes = append(out.Outcomes, to)
	}
	out.factor()
	out.Action = actionOf(out.Outcomes)
	if martian {
		out.Reasons = []string{fmt.Sprintf("%s is an address of Services, which are the node's own in mode %s: the kernel takes in no packet from them", p.Src, t.Mode)}
		return out, nil
	}
	t.reasons(out, p.Packet, verdict)
	return out, nil
}

func steps(list []packetsim.Step) []TraceStep {
	out := []TraceStep{}
	for _, s := range list {
		rule := strings.TrimPrefix(s.Text(), "-A "+s.Chain+" ")
		out = append(out, TraceStep{Hook: string(s.Hook), Table: s.Table, Chain: s.Chain, Rule: rule, Elements: s.Elements})
	}
	return out
}

func (s TraceStep) equal(o TraceStep) bool {
	return s.Hook == o.Hook && s.Table == o.Table && s.Chain == o.Chain && s.Rule == o.Rule && slices.Equal(s.Elements, o.Elements)
}

// factor moves the steps with which all outcomes begin to the packet.
func (p *PacketTrace) factor() {
	n := 0
	for first := p.Outcomes[0].Steps; n < len(first); n++ {
		if slices.ContainsFunc(p.Outcomes, func(o TraceOutcome) bool { return len(o.Steps) <= n || !o.Steps[n].equal(first[n]) }) {
			break
		}
	}
	p.Steps = p.Outcomes[0].Steps[:n]
	for i := range p.Outcomes {
		p.Outcomes[i].Steps = p.Outcomes[i].Steps[n:]
	}
}

// actionOf is forward if any outcome leads to an endpoint.
func actionOf(list []TraceOutcome) string {
	if slices.ContainsFunc(list, func(o TraceOutcome) bool { return o.Endpoint != "" }) {
		return plan.Forward.String()
	}
	if o := list[0]; o.Action != string(packetsim.Accept) {
		return o.Action
	}
	return plan.Pass.String()
}

// podsBehind returns the endpoints of a ServicePort, with their Pods, as far as these are known.
func (t *tracer) podsBehind(sp *plan.ServicePort) map[netip.AddrPort]topology.Endpoint {
	out := map[netip.AddrPort]topology.Endpoint{}
	if sp == nil {
		return out
	}
	if d, _, err := t.describeService(sp.Key.Service); err == nil {
		for _, ep := range d.Endpoints(sp.Key) {
			out[ep.Addr] = ep
		}
	}
	return out
}

// note notes what may differ from the rules that are traced, or in time.
func (t *tracer) note(out *PacketTrace, sp *plan.ServicePort) {
	if sp.Affinity > 0 {
		out.Notes = append(out.Notes, fmt.Sprintf("With session affinity, this is the way of a client that has not connected in the last %s; another goes to the same endpoint as before.", sp.Affinity))
	}
	if t.programmed == nil {
		return
	}
	var now *plan.ServicePort
	t.View(func(s *proxier.State) { now = s.Plan().Services[sp.Key] })
	refused := t.refused()
	if r, is := refused[sp.Key]; is {
		out.State = Refused
		out.Notes = append(out.Notes, upper(r.String())+"; "+r.Effect()+".")
		return
	}
	if out.State = Programmed; now != sp {
		out.State = Pending
		out.Notes = append(out.Notes, "The latest change of the Service is not in the kernel yet: this is the way as it is programmed.")
	}
}

// reasons adds why what happens to the packet does, with what is near where it reaches no Service.
func (t *tracer) reasons(out *PacketTrace, pkt plan.Packet, v plan.Verdict) {
	out.Reasons = v.Reasons()
	if v.ServicePort == (plan.Key{}) {
		out.Notes = append(out.Notes, t.nearby(pkt)...)
	}
	if out.Action == v.Action.String() {
		return
	}
	at := ""
	switch owner, held := t.clusterIP(pkt.Dst); {
	case v.Action == plan.Pass && held:
		at = fmt.Sprintf("%s is the cluster IP of Service %s, and no Service has the port there", pkt.Dst, owner)
	case v.Action == plan.Pass && contains(t.whole.Settings.ServiceCIDRs, pkt.Dst):
		at = fmt.Sprintf("%s is in the ranges of cluster IPs, and no Service has it", pkt.Dst)
	case v.Action == plan.Pass:
		at = fmt.Sprintf("%s is an address of Services, and none has the port there", pkt.Dst)
	default:
		at = fmt.Sprintf("it should %s", v.Action)
	}
	does := map[string]string{"reject": "rejects it", "drop": "drops it", "pass": "leaves it alone", "forward": "forwards it"}[out.Action]
	out.Reasons = append(out.Reasons, fmt.Sprintf("%s: mode %s %s", at, t.Mode, does))
}

// clusterIP returns the first Service with a cluster IP.
func (t *tracer) clusterIP(a netip.Addr) (owner plan.Service, found bool) {
	for k, sp := range t.whole.Services {
		for _, f := range sp.Frontends {
			if f.Kind == plan.ClusterIP && f.Addr == a && (!found || k.Service.Compare(owner) < 0) {
				owner, found = k.Service, true
			}
		}
	}
	return owner, found
}

// mostNearby bounds how many sentences tell what is near.
const mostNearby = 5

// nearby tells what is near the destination of a packet that reaches no Service.
func (t *tracer) nearby(pkt plan.Packet) []string {
	at := map[plan.Service][]string{}
	var out []string
	for k, sp := range t.whole.Services {
		for _, f := range sp.Frontends {
			text := fmt.Sprintf("%d/%s", f.Port, f.Protocol)
			if f.Addr == pkt.Dst && !slices.Contains(at[k.Service], text) {
				at[k.Service] = append(at[k.Service], text)
			}
			if f.Kind == plan.NodePort && f.Port == pkt.DstPort && k.Family == plan.FamilyOf(pkt.Dst) {
				switch {
				case !pkt.DstLocal:
					out = append(out, fmt.Sprintf("%d is a node port of Service %s, but %s is not an address of this node.", f.Port, k.PortName(), pkt.Dst))
				case f.Protocol != pkt.Protocol:
					out = append(out, fmt.Sprintf("Service %s has the node port with protocol %s.", k.PortName(), f.Protocol))
				}
			}
		}
		for _, sh := range sp.Shadowed {
			if f := sh.Frontend; f.Addr == pkt.Dst && f.Protocol == pkt.Protocol && f.Port == pkt.DstPort && f.Addr.IsValid() {
				out = append(out, fmt.Sprintf("Service %s asks for it too, but does not get it.", k.PortName()))
			}
		}
		if slices.ContainsFunc(sp.All(), func(ep plan.Endpoint) bool { return ep.Addr == netip.AddrPortFrom(pkt.Dst, pkt.DstPort) }) && k.Protocol == pkt.Protocol {
			out = append(out, fmt.Sprintf("It is an endpoint of Service %s, which is reached directly.", k.PortName()))
		}
	}
	for _, svc := range slices.SortedFunc(maps.Keys(at), plan.Service.Compare) {
		slices.Sort(at[svc])
		out = append(out, fmt.Sprintf("Service %s has %s with %s.", svc, pkt.Dst, strings.Join(at[svc], ", ")))
	}
	slices.Sort(out)
	out = slices.Compact(out)
	if len(out) > mostNearby {
		out = append(out[:mostNearby], "There are more.")
	}
	return out
}
