package inspect

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
	"nodeproxy/topology"
)

// Diagnosis is something that is wrong with a Service on this node, or that its owner should know.
type Diagnosis struct {
	// Severity is "problem" or "note".
	Severity string `json:"severity"`
	// Code names the kind of diagnosis, for scripts.
	Code string `json:"code"`
	// What says what is wrong, and what follows from it; Do says what helps, and is empty where nothing has to be done.
	What string `json:"what"`
	Do   string `json:"do,omitempty"`
	// about are the addresses that it is about, where others are weighed by it.
	about []netip.Addr
}

const (
	problem = "problem"
	note    = "note"
)

// The codes of diagnoses.
const (
	NoService         = "NoService"         // there are EndpointSlices, but no Service
	NotProxied        = "NotProxied"        // the Service is not for a proxy
	NoEndpoints       = "NoEndpoints"       // no EndpointSlice has an endpoint
	NoPortMatches     = "NoPortMatches"     // no EndpointSlice has the port
	OtherFamily       = "OtherFamily"       // all endpoints are of the other address family
	NoneReady         = "NoneReady"         // no endpoint is ready
	OnlyTerminating   = "OnlyTerminating"   // the only endpoints that serve are terminating
	NoneLocal         = "NoneLocal"         // the traffic policy is Local, and no endpoint is here
	HintsNotHonoured  = "HintsNotHonoured"  // there are hints, but they can't be honoured here
	HintsHonoured     = "HintsHonoured"     // hints keep endpoints elsewhere from getting traffic from here
	SourceRanges      = "SourceRanges"      // the load balancer IPs answer some clients only
	AddressTaken      = "AddressTaken"      // another Service has the address and port
	AddressContested  = "AddressContested"  // another Service asks for the address and port, and does not get it
	RefusedByKernel   = "RefusedByKernel"   // the kernel refuses the Service
	NotYetProgrammed  = "NotYetProgrammed"  // a change waits for the next sync
	RulesStay         = "RulesStay"         // the kernel may have rules of before for the Service, which is not known
	ObjectFinding     = "ObjectFinding"     // an object has a field that can't be used
	SomeEndpointsDown = "SomeEndpointsDown" // some endpoints are not ready

	SelectorMatchesNothing = "SelectorMatchesNothing" // no Pod has the labels of the selector
	TargetPortNotDeclared  = "TargetPortNotDeclared"  // no container declares the targetPort
	SelectorMatchesOthers  = "SelectorMatchesOthers"  // the selector matches Pods that do not declare the targetPort, though others do
	ListedTwice            = "ListedTwice"            // an endpoint is listed more than once, with different conditions
	EndpointIsService      = "EndpointIsService"      // an endpoint is the cluster IP of a Service, or a node port of this node
	ProxyHeader            = "ProxyHeader"            // the load balancer adds a header that nodes do not
	NodesCountAsPods       = "NodesCountAsPods"       // clusterCIDR holds the node's own address
	NotOfAPod              = "NotOfAPod"              // beside the Pods of the selector, there are endpoints that are none
	PodGone                = "PodGone"                // an endpoint is that of a Pod which is gone, or has another address
	NotServing             = "NotServing"             // endpoints get traffic although they do not serve
	OneFamily              = "OneFamily"              // clients outside of the other address family can't reach it
	NothingOutside         = "NothingOutside"         // nothing on this node answers what comes from outside
	NodePortsNowhere       = "NodePortsNowhere"       // node ports answer at the node's primary addresses alone, and none is known
	AddressElsewhere       = "AddressElsewhere"       // an endpoint is this node, at an address that the machine does not have
	PodsNotTold            = "PodsNotTold"            // the range of the pods' addresses is not known
	NameTwice              = "NameTwice"              // several container ports have the targetPort's name
	NodeExcluded           = "NodeExcluded"           // load balancers leave this node out
	NoLoadBalancer         = "NoLoadBalancer"         // the type is LoadBalancer, and nothing has given it an address
	LeftToBalancer         = "LeftToBalancer"         // load balancer IPs that nodes leave to the load balancer
	PortsByName            = "PortsByName"            // clients that find the Pods by DNS must use other ports
	NotAName               = "NotAName"               // an ExternalName is no name that DNS can answer with
)

// diagnosis collects the diagnoses of one Service.
type diagnosis struct {
	*Node
	d      *proxier.Description
	list   []Diagnosis
	listed map[string]bool // what is in list
	taken  map[string]bool // sentences on frontends that other Services have
	// readPods is Node.Pods until it has been asked. Then podsHere are the Pods of the Service's namespace that it returned, and podsElsewhere the others.
	readPods                func(namespace string) ([]*v1.Pod, error)
	podsHere, podsElsewhere []*v1.Pod
	podsKnown               bool
	// elsewhere returns what reports whether an address is known not to be one of this machine.
	elsewhere func() func(netip.Addr) bool
	// others are findings that the proxier does not know, and file is the manifest that has the Service, if any.
	others []source.Finding
	file   string
}

func (c *diagnosis) add(severity, code, do, what string, args ...any) {
	if c.file != "" { // There may be no cluster, and no kubectl.
		do, _, _ = strings.Cut(do, ": kubectl ")
		if strings.HasPrefix(do, "kubectl ") {
			do = ""
		}
	}
	d := Diagnosis{Severity: severity, Code: code, What: fmt.Sprintf(what, args...), Do: do}
	if text := fmt.Sprint(d); !c.listed[text] {
		c.listed[text] = true
		c.list = append(c.list, d)
	}
}

// diagnose returns what is wrong with a Service, problems first.
func (n *Node) diagnose(d *proxier.Description, own *plan.Plan, programmed *plan.Snapshot, refused map[plan.Key]plan.Refusal) []Diagnosis {
	c := &diagnosis{Node: n, d: d, list: []Diagnosis{}, listed: map[string]bool{}, taken: map[string]bool{}, readPods: n.Pods,
		elsewhere: sync.OnceValue(n.elsewhere), others: n.otherFindings()}
	if n.ServiceFile != nil {
		c.file = n.ServiceFile(d.Service.Namespace, d.Service.Name)
	}
	c.service()
	c.reach(own.Node)
	for _, sp := range d.ServicePorts {
		c.addresses(sp)
		c.node(sp, own)
		c.endpoints(sp, own.Node)
		c.kernel(sp, programmed, refused)
	}
	if more := len(c.taken) - mostTaken; more > 0 {
		c.add(problem, AddressTaken, "give the Service or the others other addresses or ports",
			"%d more of its frontends belong to other Services, which take precedence.", more)
	}
	for _, of := range d.Contested {
		c.add(note, AddressContested, "give one of the two another address or port",
			"%s is asked for by Service %s, too, which does not get it: what is sent there goes to this Service.", upper(of.Frontend.String()), of.By.PortName())
	}
	c.objects()
	worstFirst(c.list)
	return c.list
}

// worstFirst puts problems before notes, which come before what is only suspected.
func worstFirst(list []Diagnosis) {
	order := []string{problem, note, suspected}
	slices.SortStableFunc(list, func(a, b Diagnosis) int { return slices.Index(order, a.Severity) - slices.Index(order, b.Severity) })
}

// service is about the Service as a whole.
func (c *diagnosis) service() {
	svc := c.d.Service
	switch {
	case !c.d.Exists && c.OnlyProxied:
		c.add(note, NoService, fmt.Sprintf("see whether there is one: kubectl -n %s get service %s", svc.Namespace, svc.Name),
			"EndpointSlices name the Service %s. There is none, or it is headless, an ExternalName, or another proxy's, and not for nodeproxy.", svc)
	case !c.d.Exists:
		c.add(problem, NoService, fmt.Sprintf("create it, or delete what has the label kubernetes.io/service-name=%s: kubectl -n %s get endpointslices -l kubernetes.io/service-name=%s",
			svc.Name, svc.Namespace, svc.Name),
			"EndpointSlices name the Service %s, but there is none, or it is headless, an ExternalName, or another proxy's.", svc)
	case c.d.Type == "LoadBalancer" && c.d.Ingress == 0 && len(c.d.ServicePorts) > 0:
		c.add(note, NoLoadBalancer, fmt.Sprintf("see whether a controller for load balancers runs, and what it says: kubectl -n %s describe service %s", svc.Namespace, svc.Name),
			"The Service is of type LoadBalancer, but nothing has given it an address yet (status.loadBalancer.ingress is empty): Kubernetes itself does not, only a cloud's controller or one such as MetalLB.")
	case len(c.d.ServicePorts) == 0:
		for _, f := range c.d.Findings {
			if f.Effect == source.NotForProxy {
				do := when(strings.Contains(f.Field, source.LabelProxyName), "remove the label if no such proxy runs")
				alias := when(c.d.ExternalName != "", fmt.Sprintf(": DNS answers with the name %q", c.d.ExternalName))
				c.add(note, NotProxied, do, "The Service is not proxied, here or on any node: %s (%s)%s.", f.Detail, f.Field, alias)
			}
		}
		c.byName()
	}
}

// reach is about clients that the Service as a whole is not for.
func (c *diagnosis) reach(node plan.Node) {
	ports := c.d.ServicePorts
	if len(ports) == 0 {
		return
	}
	if len(c.d.LeftToBalancer) > 0 {
		c.add(note, LeftToBalancer, "", "Load balancer IP %s has ipMode Proxy: nodes leave it to the load balancer.", some(c.d.LeftToBalancer))
	}
	if c.d.ProxyProtocol != "" {
		for _, sp := range ports {
			if i := slices.IndexFunc(sp.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.LoadBalancerIP }); i >= 0 {
				c.add(note, ProxyHeader, "have the load balancer's controller set ipMode Proxy or a host name in status.loadBalancer.ingress, if Pods or nodes are to use it",
					"The load balancer adds a PROXY header (annotation %s), but what Pods and this node send to load balancer IP %s goes straight to endpoints, without it: those that insist on the header refuse that.",
					c.d.ProxyProtocol, sp.Frontends[i].Addr)
				break
			}
		}
	}
	external := func(sp *plan.ServicePort) bool { return sp.HasExternal() || len(sp.Shadowed) > 0 }
	lost := func(f source.Finding) bool {
		return c.mine(f) && f.Kind == source.Claimed && f.Severity == source.Problem
	}
	if c.d.Type == "LoadBalancer" && !slices.ContainsFunc(ports, external) && !slices.ContainsFunc(c.others, lost) {
		c.add(note, NothingOutside, "see that the load balancer sends to the Pods themselves, or set spec.allocateLoadBalancerNodePorts to true",
			"Nothing on this node answers what comes from outside: the Service has no node port (spec.allocateLoadBalancerNodePorts), and no load balancer IP or "+
				"external IP that nodes take. Host names and IPs of ipMode Proxy in status.loadBalancer.ingress are the load balancer's own.")
	}
	if c.d.Type == "LoadBalancer" && c.d.Leaving && slices.ContainsFunc(ports, external) {
		c.add(note, NodeExcluded, fmt.Sprintf("if it is to stay, remove the taint, which the cluster autoscaler may have left: kubectl taint node %s %s-", node.Name, source.TaintToBeDeleted),
			"Load balancers leave this node out, as it is about to be removed (taint %s, or its Node is deleted) and health checks answer 503 (KEP-3836).", source.TaintToBeDeleted)
	}
	if c.d.Type == "LoadBalancer" && c.d.Excluded && slices.ContainsFunc(ports, external) {
		here := func(sp *plan.ServicePort) bool { // What the load balancer sends elsewhere finds nothing.
			return sp.ExternalPolicy == plan.Local && len(sp.Endpoints.Local) > 0 && len(sp.Endpoints.Local) == len(sp.Endpoints.Cluster)
		}
		so := either(slices.ContainsFunc(ports, here),
			"externalTrafficPolicy is Local while all endpoints are here, so that nothing from there reaches any", "they send to other nodes")
		c.add(note, NodeExcluded, fmt.Sprintf("if load balancers should send to it, remove the label: kubectl label node %s %s-", node.Name, v1.LabelNodeExcludeBalancers),
			"Load balancers that heed it, as those of clouds do, leave this node out, as its Node has the label %s: %s.", v1.LabelNodeExcludeBalancers, so)
	}
	family := ports[0].Key.Family
	if !slices.ContainsFunc(ports, (*plan.ServicePort).HasExternal) || slices.ContainsFunc(ports, func(sp *plan.ServicePort) bool { return sp.Key.Family != family }) {
		return // Pods and nodes have both families, and take the address that DNS names.
	}
	for _, other := range plan.Families {
		if other != family && node.IP(other).IsValid() { // Elsewhere, no client has an address of it.
			c.add(note, OneFamily, "set spec.ipFamilyPolicy to PreferDualStack if they should; the cluster needs a service CIDR of each family for that",
				"The Service has %s addresses only, although this node has both families: clients outside that use %s alone can't reach it.", family, other)
		}
	}
}

// name says which port of the Service is meant, where it has several.
func (c *diagnosis) name(sp *plan.ServicePort) string {
	both := slices.ContainsFunc(c.d.ServicePorts, func(o *plan.ServicePort) bool { return o.Key.Family != sp.Key.Family })
	text := joined(", ", when(len(c.d.Ports) > 1, fmt.Sprintf("port %q", sp.Key.Port)), when(both, sp.Key.Family.String()))
	return when(text != "", " ("+text+")")
}

// mostTaken is how many frontends that other Services have are named: one Service can ask for thousands.
const mostTaken = 5

// addresses is about what a ServicePort asks for and does not get, and who may reach it.
func (c *diagnosis) addresses(sp *plan.ServicePort) {
	for _, sh := range sp.Shadowed {
		// A node port is taken in each family.
		text := fmt.Sprintf("%s belongs to Service %s, which takes precedence: what is sent there goes to that Service.", upper(sh.Frontend.String()), sh.Owner.PortName())
		if c.taken[text] = true; len(c.taken) <= mostTaken {
			c.add(problem, AddressTaken, "give one of the two another address or port", "%s", text)
		}
	}
	if !hasKind(sp, plan.LoadBalancerIP) || len(sp.SourceRanges) == 0 {
		return
	}
	if nobody := func(r netip.Prefix) bool { return r.IsSingleIP() && r.Addr().IsUnspecified() }; !slices.ContainsFunc(sp.SourceRanges, func(r netip.Prefix) bool { return !nobody(r) }) {
		everybody := netip.PrefixFrom(sp.SourceRanges[0].Addr(), 0)
		c.add(problem, SourceRanges, fmt.Sprintf("to admit everybody, write %s, or leave spec.loadBalancerSourceRanges out", everybody),
			"Nobody can reach the load balancer IPs: spec.loadBalancerSourceRanges admits %s alone, which no client has%s.", ranges(sp), c.name(sp))
		return
	}
	c.add(note, SourceRanges, "add the client's range to spec.loadBalancerSourceRanges if it should get in",
		"Only clients from %s may reach the load balancer IPs; those of others are dropped%s.", ranges(sp), c.name(sp))
	if hasKind(sp, plan.NodePort) {
		c.add(note, SourceRanges, "set spec.allocateLoadBalancerNodePorts to false if the load balancer needs no node ports", "The source ranges do not limit who may reach the node ports.")
	}
}

func hasKind(sp *plan.ServicePort, kind plan.FrontendKind) bool {
	return slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return f.Kind == kind })
}

// nameNode is what to do where no Node of this node's name is known.
const nameNode = "create the Node, or give the name that it has with --hostname-override"

// unknownNode says why nothing is known of the Node of a name, and what to do.
func (c *diagnosis) unknownNode(name string) (why, do string) {
	if c.d.NodeUnread != "" {
		return fmt.Sprintf("the Node %s has not been read", name), c.d.NodeUnread
	}
	return fmt.Sprintf("no Node of the name %s is known", name), nameNode
}

// node is about what a ServicePort lacks for want of what the Node should say.
func (c *diagnosis) node(sp *plan.ServicePort, own *plan.Plan) {
	family := sp.Key.Family
	for _, f := range sp.Frontends {
		if !nodePortNowhere(own, sp, f) {
			ranges := own.Settings.NodePortAddresses.Ranges(family, own.Node)
			wide := false
			here := func(r netip.Prefix) bool {
				if r.IsSingleIP() {
					return !c.elsewhere()(r.Addr())
				}
				wide = true
				return slices.ContainsFunc(own.Node.IPs, r.Contains)
			}
			if none := f.Kind == plan.NodePort && len(ranges) > 0 && !slices.ContainsFunc(ranges, here); none && wide {
				c.add(note, NodePortsNowhere, "correct nodePortAddresses, unless this machine has other addresses that are meant",
					"None of the Node's addresses is in nodePortAddresses, to which node ports are limited%s: %s answers only at addresses in %s.", c.name(sp), f, some(words(ranges, netip.Prefix.String)))
			} else if none {
				c.add(problem, NodePortsNowhere, "correct status.addresses of the Node (--node-ip of the kubelet), or set nodePortAddresses otherwise",
					"Nothing answers at %s of this node%s: node ports are limited to addresses that this machine does not have (nodePortAddresses): %s.",
					f, c.name(sp), some(words(ranges, func(r netip.Prefix) string { return r.Addr().String() })))
			}
			continue
		}
		severity, do := problem, "see that the kubelet or the cloud controller manager sets an InternalIP in status.addresses of the Node, or set nodePortAddresses otherwise"
		why := fmt.Sprintf("Node %s has no %s address", own.Node.Name, family)
		switch {
		case !c.d.NodeKnown:
			why, do = c.unknownNode(own.Node.Name)
		case len(own.Node.IPs) > 0: // It has the other family, and that may be all it should have.
			severity = note
		}
		c.add(severity, NodePortsNowhere, do, "Nothing answers at %s of this node%s: node ports are limited to the node's primary addresses (nodePortAddresses), and %s.",
			f, c.name(sp), why)
	}
	c.hostNetwork(sp, own.Node)
	c.podRange(sp, own)
}

// hostNetwork is about endpoints in this node's own network at an address that the machine does not have.
func (c *diagnosis) hostNetwork(sp *plan.ServicePort, node plan.Node) {
	ip := node.IP(sp.Key.Family)
	at := func(ep plan.Endpoint) bool { return ep.Local && ep.Addr.Addr() == ip }
	if i := slices.IndexFunc(sp.All(), at); i >= 0 && c.elsewhere()(ip) {
		c.add(problem, AddressElsewhere, "correct status.addresses of the Node (--node-ip of the kubelet), or give the machine that address",
			"Endpoint %s is this node itself, but the machine does not have the address that its Node names, and connections that go there fail%s.", sp.All()[i].Addr, c.name(sp))
	}
}

// podRange is about pods that are not told from other clients, since no range of their addresses is known in a family.
func (c *diagnosis) podRange(sp *plan.ServicePort, own *plan.Plan) {
	family, d := sp.Key.Family, own.Settings.DetectLocal
	local := sp.ExternalPolicy == plan.Local && sp.HasExternal()
	elsewhere := func(ep plan.Endpoint) bool { return !ep.Local }
	switch {
	case d.Implemented(family) && d.Mode == plan.DetectClusterCIDR && local && d.CIDR(family).Contains(own.Node.IP(family)) && slices.ContainsFunc(sp.Endpoints.Cluster, elsewhere):
		severity := either(c.d.PodCIDRs, problem, note) // Where Pods and hosts share a network, answers find their way.
		c.add(severity, NodesCountAsPods, "set clusterCIDR to the range of the Pods' addresses alone (spec.podCIDRs of all Nodes are in it)",
			"clusterCIDR %s holds this node's own address %s, too, so that other hosts of that range count as Pods%s: externalTrafficPolicy Local does not apply to them, and what they send to endpoints "+
				"on other nodes is not masqueraded, and answered past this node.", d.CIDR(family), own.Node.IP(family), c.name(sp))
	case d.Implemented(family):
	case d.Mode == plan.DetectNodeCIDR && local:
		why, do := fmt.Sprintf("Node %s has no %s one in spec.podCIDRs", own.Node.Name, family),
			"have the controller manager allot pod CIDRs (--allocate-node-cidrs), or set detectLocalMode otherwise"
		if !c.d.NodeKnown {
			why, do = c.unknownNode(own.Node.Name)
		}
		c.add(problem, PodsNotTold, do, "Pods of this node are not told from clients outside, so that externalTrafficPolicy Local applies to them, too%s: "+
			"detectLocalMode is NodeCIDR, but no pod CIDR is known, as %s.", c.name(sp), why)
	case d.Mode == plan.DetectClusterCIDR && len(d.CIDRs) > 0: // Of one family alone: a slip, where there are Services of both.
		does := "clients that are no pods reach its cluster IP with their own address as the source, and endpoints may not find the way back to them" +
			when(local, "; externalTrafficPolicy Local applies to pods, too")
		c.add(note, PodsNotTold, "add the range of the pods' addresses of this family to clusterCIDR (a comma-separated pair)",
			"clusterCIDR is %s and has no %s range, so pods are not told from other clients%s: %s.", d.CIDRs[0], family, c.name(sp), does)
	}
}

// endpoints is about the endpoints of a ServicePort.
func (c *diagnosis) endpoints(sp *plan.ServicePort, node plan.Node) {
	list := c.d.Endpoints(sp.Key)
	if len(list) == 0 {
		c.noEndpoints(sp)
		return
	}
	c.listedTwice(sp)
	c.foreign(sp)
	unready := only(list, func(ep topology.Endpoint) bool { return !ep.Ready && !ep.Terminating })
	pods := c.pods("-o wide")
	switch {
	case !sp.Any && len(unready) > 0:
		c.add(problem, NoneReady, c.findUnready(words(unready, podOf)),
			"No endpoint is ready, so connections are refused%s: %s.", c.name(sp), some(words(unready, called)))
		return
	case !sp.Any:
		c.add(problem, NoneReady, "wait for new Pods, or find out why there are none: "+pods,
			"All endpoints are terminating and serve no longer, so connections are refused%s.", c.name(sp))
		return
	case len(unready) > 0:
		c.add(note, SomeEndpointsDown, pods, "Not ready, and so without traffic, %s %d of %d endpoints%s: %s.",
			are(len(unready)), len(unready), len(list), c.name(sp), some(words(unready, called)))
	}
	if published := only(list, func(ep topology.Endpoint) bool { return ep.Ready && !ep.Serving }); len(published) > 0 {
		why := either(c.d.PublishNotReady, " (spec.publishNotReadyAddresses)", "")
		c.add(note, NotServing, c.findUnready(words(published, podOf)), "%d of %d endpoints %s not serving, but published as ready%s, so that new connections go there, too%s: %s.",
			len(published), len(list), are(len(published)), why, c.name(sp), some(words(published, called)))
	}
	ready := slices.ContainsFunc(list, func(ep topology.Endpoint) bool { return ep.Ready })
	stays := func(ep plan.Endpoint) bool { return !ep.Terminating }
	if used := sp.All(); len(used) > 0 && !slices.ContainsFunc(used, stays) {
		if ready { // They are elsewhere, where the traffic policy does not allow this node to send.
			c.add(problem, OnlyTerminating, "find out why no new Pod becomes ready on this node: "+pods,
				"No endpoint on this node is ready, and the traffic policy is Local. What is terminating here but still serves gets the traffic until it ends%s: %s.",
				c.name(sp), counted(len(used), "endpoint"))
			c.local(sp, node)
			return
		}
		c.add(problem, OnlyTerminating, "find out why no new Pod becomes ready: "+pods,
			"No endpoint is ready. What is terminating but still serves gets the traffic until it ends%s: %s.", c.name(sp), counted(len(used), "endpoint"))
	}
	if local := sp.Endpoints.Local; ready && sp.ExternalPolicy == plan.Local && sp.HasExternal() && len(sp.Endpoints.Cluster) > 0 && len(local) > 0 &&
		!slices.ContainsFunc(local, stays) && slices.ContainsFunc(sp.Endpoints.Cluster, stays) {
		severity := either(c.d.Type == "LoadBalancer", note, problem) // Its health check node port tells the load balancer so.
		c.add(severity, OnlyTerminating, "find out why no new Pod becomes ready on this node: "+pods,
			"No endpoint on this node is ready, and externalTrafficPolicy is Local. What is terminating here but still serves gets what comes from outside until it ends%s: %s.",
			c.name(sp), counted(len(local), "endpoint"))
	}
	c.local(sp, node)
	c.hints(sp, list, node)
	c.targetPort(sp)
}

// foreign is about endpoints in use that are not what they should be: those of Pods, where there is a selector.
func (c *diagnosis) foreign(sp *plan.ServicePort) {
	used := map[netip.AddrPort]bool{}
	for _, ep := range sp.All() {
		used[ep.Addr] = true
		if f, is := c.d.Frontends[ep.Addr]; is {
			what, do := "the cluster IP", "list the endpoints of that Service, or make this one an ExternalName for it"
			if f.Frontend.Kind == plan.NodePort {
				what, do = "a node port at this node", "list the endpoints of that Service, or give this one its selector"
			}
			c.add(problem, EndpointIsService, do,
				"Endpoint %s is %s of Service %s, and what this node sends to an endpoint is not sent on to those of another Service%s: it gets nowhere.",
				ep.Addr, what, f.By, c.name(sp))
		}
	}
	if len(c.d.Selector) == 0 {
		return
	}
	ofPods := false
	var foreign, where []string
	for _, e := range c.d.Entries(sp.Key) {
		if ofPods = ofPods || e.Pod != ""; e.Pod == "" && used[e.Addr] {
			foreign, where = append(foreign, e.Addr.String()), append(where, e.Slice)
		}
	}
	if where = slices.Compact(where); ofPods && len(foreign) > 0 {
		c.add(note, NotOfAPod, fmt.Sprintf("if nobody means that, delete what lists them: kubectl -n %s delete endpointslice %s", c.d.Service.Namespace, strings.Join(where[:min(3, len(where))], " ")),
			"Beside the Pods of the selector %s, there are endpoints that are none, and they get a share of the connections%s: %s, in EndpointSlice %s.",
			selector(c.d.Selector), c.name(sp), some(foreign), some(where))
	}
	c.podsGone(sp, used)
}

// mostListed is how many endpoints are named that are listed twice.
const mostListed = 3

// listedTwice is about endpoints that are listed more than once, in different conditions: one of the entries decides.
func (c *diagnosis) listedTwice(sp *plan.ServicePort) {
	entries := map[netip.AddrPort][]proxier.Entry{}
	for _, e := range c.d.Entries(sp.Key) {
		entries[e.Addr] = append(entries[e.Addr], e)
	}
	state := func(e topology.Endpoint) string { return Endpoint{Conditions: conditions(e)}.condition() }
	named := 0
	for _, addr := range slices.SortedFunc(maps.Keys(entries), netip.AddrPort.Compare) {
		list := entries[addr]
		if len(list) == 1 || !slices.ContainsFunc(list, func(e proxier.Entry) bool { return state(e.Endpoint) != state(list[0].Endpoint) }) {
			continue
		}
		if named++; named > mostListed {
			continue
		}
		var all []topology.Endpoint
		var where []string
		for _, e := range list {
			all = append(all, e.Endpoint)
			where = append(where, state(e.Endpoint)+" in EndpointSlice "+e.Slice+when(e.Pod != "", " (Pod "+e.Pod+")"))
		}
		wins := topology.Merge(all)[0]
		why := "what still serves comes first"
		switch {
		case !wins.Terminating && slices.ContainsFunc(all, func(e topology.Endpoint) bool { return e.Terminating }):
			why = "what is not terminating comes first"
		case wins.Ready && slices.ContainsFunc(all, func(e topology.Endpoint) bool { return !e.Ready }):
			why = "what is ready comes first"
		}
		c.add(note, ListedTwice, "", "%s is listed more than once%s: %s. It counts as %s, since %s.", addr, c.name(sp), some(where), state(wins), why)
	}
	if more := named - mostListed; more > 0 {
		c.add(note, ListedTwice, "", "%d more endpoints are listed more than once, in different conditions%s.", more, c.name(sp))
	}
}

// noEndpoints says why a ServicePort has no endpoint at all.
func (c *diagnosis) noEndpoints(sp *plan.ServicePort) {
	var ports, others []string
	any, family := false, false
	for _, s := range c.d.Slices {
		if len(s.Endpoints) == 0 {
			continue
		}
		any = true
		if s.Family != sp.Key.Family {
			continue
		}
		family = true
		for _, p := range s.Ports {
			if p.Protocol == sp.Key.Protocol {
				ports = append(ports, portName(p.Name))
			} else {
				others = append(others, fmt.Sprintf("%s (%s)", portName(p.Name), p.Protocol))
			}
		}
	}
	switch {
	case !any && len(c.d.Selector) > 0 && c.noPods(sp):
	case len(c.d.Slices) == 0 && len(c.d.Selector) > 0:
		c.add(problem, NoEndpoints, fmt.Sprintf("see whether there is one (a controller makes it as soon as there is the Service): kubectl -n %s get endpointslices -l kubernetes.io/service-name=%s",
			sp.Key.Service.Namespace, sp.Key.Service.Name),
			"The Service has no endpoints, so connections are refused%s: it has no EndpointSlice.", c.name(sp))
	case !any && len(c.d.Selector) > 0:
		c.add(problem, NoEndpoints, "compare the selector with the labels of the Pods: "+c.pods("--show-labels"),
			"The Service has no endpoints, so connections are refused%s: the EndpointSlices have no Pod that its selector %s matches, or not yet.", c.name(sp), selector(c.d.Selector))
	case !any:
		const what = "The Service has no endpoints, so connections are refused%s. It has no selector either, "
		unused, alike := c.unusedEndpoints()
		if len(alike) > 0 {
			unused = alike
		}
		if len(unused) > 0 {
			do := "correct it, if it is meant for this Service"
			if !strings.Contains(unused[0], ": addressType: ") { // Then it is not its name or label that is wrong.
				do += ": Endpoints have its name, and EndpointSlices the label kubernetes.io/service-name=" + sp.Key.Service.Name
			} else {
				do += ": list IP addresses (addressType IPv4 or IPv6), or make the Service an ExternalName"
			}
			c.add(problem, NoEndpoints, do, what+"and this is not used: %s.", c.name(sp), some(unused))
			return
		}
		for _, name := range slices.Sorted(maps.Keys(c.d.Strays)) {
			if of := c.d.Strays[name]; strings.HasPrefix(name, sp.Key.Service.Name) || resembles(of, sp.Key.Service.Name) {
				c.add(problem, NoEndpoints, "if it is meant for this Service, set its label kubernetes.io/service-name to "+sp.Key.Service.Name,
					what+"and EndpointSlice %s is for a Service %s (by its label kubernetes.io/service-name), of which there is none.", c.name(sp), name, of)
				return
			}
		}
		c.add(problem, NoEndpoints, fmt.Sprintf("give it a selector, or create an EndpointSlice with the label kubernetes.io/service-name=%s", sp.Key.Service.Name),
			what+"so nobody creates them.", c.name(sp))
	case !family:
		c.add(problem, OtherFamily, otherFamily,
			"The Service has an %s cluster IP, but all of its endpoints are of the other address family, so connections are refused.", sp.Key.Family)
	default:
		slices.Sort(ports)
		has := "none for " + string(sp.Key.Protocol)
		if ports = slices.Compact(ports); len(ports) > 0 {
			has = some(ports)
		}
		if slices.Sort(others); len(others) > 0 {
			has += ", and " + some(slices.Compact(others))
		}
		do := "give the port of the EndpointSlices the name and protocol of the Service's port"
		if target := targetOf(c.d, sp.Key).Target; len(c.d.Selector) > 0 && !isNumber(target) {
			do = fmt.Sprintf("give a container port of the Pods the name of the targetPort, %q", target)
			if here, _, known := c.podsOf(); known {
				named := func(p v1.ContainerPort) bool { return p.Name == target }
				if other := declaredFor(selected(c.d.Selector, here), sp.Key.Protocol, named); other != "" {
					do += fmt.Sprintf(" and protocol %s: the one of this name is for %s", sp.Key.Protocol, other)
				} else if declared := containerPorts(selected(c.d.Selector, here), sp.Key.Protocol); len(declared) > 0 {
					do += "; those that they declare are " + portList(declared)
				}
			}
		}
		c.add(problem, NoPortMatches, do,
			"The EndpointSlices have endpoints, but no port %s (%s), so connections are refused; the ports that they have are %s.",
			portName(sp.Key.Port), sp.Key.Protocol, has)
	}
}

// otherFamily is what to do where Pods lack addresses of a family that the Service has.
const otherFamily = "give the Service the family of its Pods alone (spec.ipFamilies, with ipFamilyPolicy SingleStack), or the Pods addresses of both"

// portName is the name of a port, in quotes; that of the only port may be empty.
func portName(name string) string {
	if name == "" {
		return "without a name"
	}
	return fmt.Sprintf("%q", name)
}

// unusedEndpoints are findings about EndpointSlices and Endpoints of the Service's namespace that are not used, and those of them whose names begin
// with the Service's.
func (c *diagnosis) unusedEndpoints() (all, alike []string) {
	said := map[source.Finding]bool{}
	for _, f := range slices.Concat(c.others, c.d.Unused) {
		kind, name, _ := strings.Cut(f.Object, " ")
		name, here := strings.CutPrefix(name, c.d.Service.Namespace+"/")
		if !here || kind != "EndpointSlice" && kind != "Endpoints" || f.Effect != source.NotForProxy && !f.LeftOut {
			continue
		}
		text, nowhere := f.String(), f
		if nowhere.Where = ""; said[nowhere] { // The source has said it, too.
			continue
		}
		said[nowhere] = true
		all = append(all, text)
		if strings.HasPrefix(name, c.d.Service.Name) {
			alike = append(alike, f.String())
		}
	}
	return all, alike
}

// pods returns the command that lists the Pods of the Service.
func (c *diagnosis) pods(flags string) string {
	of := when(len(c.d.Selector) > 0 && flags != "--show-labels", " -l "+selector(c.d.Selector))
	return "kubectl -n " + c.d.Service.Namespace + " get pods" + of + " " + flags
}

// local is about traffic policies that allow none of the usable endpoints.
func (c *diagnosis) local(sp *plan.ServicePort, node plan.Node) {
	if len(sp.Endpoints.Local) > 0 {
		return
	}
	orName := when(!c.d.NodeKnown && c.d.NodeUnread == "", fmt.Sprintf("; if this node has a Node of another name than %s, give that with --hostname-override", node.Name))
	full := func(long, short string) bool {
		return strings.HasPrefix(strings.ToLower(long), strings.ToLower(short)+".")
	}
	aliases := only(c.d.Endpoints(sp.Key), func(ep topology.Endpoint) bool {
		_, address := netip.ParseAddr(ep.Node)
		return address != nil && (full(ep.Node, node.Name) || full(node.Name, ep.Node) || ep.Node != node.Name && strings.EqualFold(ep.Node, node.Name))
	})
	what, internal := "No usable endpoint runs on this node", "run a Pod on every node (a DaemonSet)"
	external, severity := "run a Pod on this node, send to a node that has one, or set spec.externalTrafficPolicy to Cluster", problem
	if len(aliases) > 0 { // It is very likely this one.
		alias := aliases[0].Node
		what = fmt.Sprintf("No usable endpoint is known to run on this node, for which nodeproxy has the name %s, while endpoints are on %s", node.Name, alias)
		first := fmt.Sprintf("if node %s is this one, start nodeproxy with --hostname-override=%s; else ", alias, alias)
		internal, external, orName = first+internal, first+external, ""
	}
	if c.d.Type == "LoadBalancer" { // As it is meant to be: a load balancer asks the health check node port where to send.
		external, severity = "see that the load balancer leaves this node out, as the health check node port tells it to", note
	}
	if in, all := c.unplaced(sp); len(in) > 0 {
		what = "No usable endpoint is known to run on this node, since no node is named (endpoints[].nodeName) in EndpointSlice " + some(in)
		internal = "have what writes the EndpointSlice set endpoints[].nodeName"
		if all {
			severity = problem // So it is on every node.
			external = internal + ", or set spec.externalTrafficPolicy to Cluster"
		}
	}
	if sp.InternalPolicy == plan.Local {
		c.add(problem, NoneLocal, internal+", or set spec.internalTrafficPolicy to Cluster"+orName,
			"%s, and internalTrafficPolicy is Local: what is sent to the cluster IP is dropped%s.", what, c.name(sp))
	}
	if sp.ExternalPolicy == plan.Local && sp.HasExternal() {
		c.add(severity, NoneLocal, external+orName, "%s, and externalTrafficPolicy is Local: what comes from outside is dropped%s.", what, c.name(sp))
	}
}

// unplaced returns the EndpointSlices that name no node for endpoints that would be used here if this one ran them, and whether that is so of all that
// would be used.
func (c *diagnosis) unplaced(sp *plan.ServicePort) (in []string, all bool) {
	all = true
	for _, e := range c.d.Entries(sp.Key) {
		switch {
		case !e.Ready && !e.Serving:
		case e.Node == "":
			in = append(in, e.Slice)
		default:
			all = false
		}
	}
	return slices.Compact(in), all
}

// hints is about topology hints.
func (c *diagnosis) hints(sp *plan.ServicePort, list []topology.Endpoint, node plan.Node) {
	excluded := only(sp.Excluded, func(ex plan.Exclusion) bool {
		return ex.Policy == plan.Cluster && (ex.Reason == plan.NotForThisZone || ex.Reason == plan.NotForThisNode)
	})
	usable := only(list, func(ep topology.Endpoint) bool { return ep.Ready })
	ready, hinted := len(usable), len(only(usable, func(ep topology.Endpoint) bool { return len(ep.ForZones) > 0 }))
	zones := map[string]bool{}
	for _, ep := range usable {
		for _, z := range ep.ForZones {
			zones[z] = true
		}
	}
	if left := len(excluded); left > 0 {
		reason := excluded[left-1].Reason
		where, do := either(reason == plan.NotForThisNode, "nodes", "zones"), ""
		used := len(sp.Endpoints.Cluster)
		local := func(ex plan.Exclusion) bool {
			return ex.Policy == plan.Cluster && ex.Reason == reason && slices.ContainsFunc(sp.Endpoints.Local, func(ep plan.Endpoint) bool { return ep.Addr == ex.Addr })
		}
		text := fmt.Sprintf("Hints leave %s to other %s, so this node sends nothing there%s%s.", counted(left, "endpoint"), where,
			either(slices.ContainsFunc(sp.Excluded, local), " but what policy Local is for", ""), c.name(sp))
		if reason == plan.NotForThisZone && 2*used*len(zones) <= used+left { // Half of an equal share, or less.
			text += fmt.Sprintf(" All traffic of zone %s goes to %d of %d endpoints.", node.Zone, used, used+left)
			do = "if that is too much for what runs there, spread the Pods over the zones (topologySpreadConstraints), or do without spec.trafficDistribution"
		}
		c.add(note, HintsHonoured, do, "%s", text)
		return
	}
	byNode := func(ep topology.Endpoint) bool { return ep.Ready && slices.Contains(ep.ForNodes, node.Name) }
	switch {
	case len(sp.Endpoints.Cluster) == 0 || hinted == 0 || zones[node.Zone] && hinted == ready || slices.ContainsFunc(list, byNode):
	case hinted < ready:
		c.add(note, HintsNotHonoured, "", "%d of %d ready endpoints %s zone hints, so hints do not count and all of them get traffic%s.", ready-hinted, ready, either(ready-hinted == 1, "lacks", "lack"), c.name(sp))
	case node.Zone == "" && !c.d.NodeKnown:
		why, do := c.unknownNode(node.Name)
		c.add(note, HintsNotHonoured, do, "The endpoints have zone hints, but %s, and so no zone: hints do not count here and all of them get traffic%s.",
			why, c.name(sp))
	case node.Zone == "":
		c.add(note, HintsNotHonoured, "give the Node the label topology.kubernetes.io/zone",
			"The endpoints have zone hints, but this Node has no zone, so hints do not count here and all of them get traffic%s.", c.name(sp))
	default:
		c.add(note, HintsNotHonoured, "", "The zone hints name %s, and none names this node's zone %s, so hints do not count here and all endpoints get traffic%s.",
			strings.Join(slices.Sorted(maps.Keys(zones)), ", "), node.Zone, c.name(sp))
	}
}

// kernel is about what has become of a ServicePort in the kernel.
func (c *diagnosis) kernel(sp *plan.ServicePort, programmed *plan.Snapshot, refused map[plan.Key]plan.Refusal) {
	switch s, _ := state(sp, programmed, refused); s {
	case Refused:
		r := refused[sp.Key]
		first, _, _ := strings.Cut(r.String(), "\n") // Of an input for iptables, the rest quotes what was refused.
		c.add(problem, RefusedByKernel, "see what the kernel lacks or has run out of (dmesg); all other Services go on", "%s; %s.", upper(first), r.Effect())
	case Pending:
		c.add(note, NotYetProgrammed, "wait a moment; if it stays so, nodeproxy's log says why it can't write",
			"The latest change of the Service is not in the kernel yet%s.", c.name(sp))
	}
}

// objects repeats what is wrong with the Service's objects.
func (c *diagnosis) objects() {
	for _, f := range c.d.Findings {
		if f.Effect == source.NotForProxy || f.Kind == source.Claimed { // There is a diagnosis of that already.
			continue
		}
		c.add(f.Severity.String(), either(f.Kind == source.PortConflict, PortConflict, ObjectFinding), correction(f), "%s.", f)
	}
	for _, f := range c.others {
		if strings.HasSuffix(f.Field, ".targetPort") && c.podsKnown { // Of that, the Pods tell more.
			continue
		}
		if c.mine(f) && (f.Kind == source.Claimed || f.Kind == source.Other && f.Severity == source.Problem) && !slices.Contains(c.d.Findings, f) {
			c.add(f.Severity.String(), ObjectFinding, correction(f), "%s.", f)
		}
	}
}

// correction is what to do about an object, or a file, that is not used as it is; "" where that is another program's conflict, or nothing is wrong.
func correction(f source.Finding) string {
	kind, name, _ := strings.Cut(f.Object, " ")
	namespace, name, _ := strings.Cut(name, "/")
	switch what := cmp.Or(f.Field, "it"); {
	case f.Severity != source.Problem || f.Kind != source.Other:
		return ""
	case f.Where != "":
		return "correct " + what + " in " + f.Where
	case kind == "Service" || kind == "EndpointSlice" || kind == "Endpoints":
		return fmt.Sprintf("correct %s: kubectl -n %s edit %s %s", what, namespace, strings.ToLower(kind), name)
	}
	return ""
}

// mine reports whether a finding is about the Service, or about the whole of its file.
func (c *diagnosis) mine(f source.Finding) bool {
	return f.Object == "Service "+c.d.Service.String() || f.Object == "" && f.Where != "" && f.Where == c.file
}

// called returns the name by which an endpoint is best known.
func called(ep topology.Endpoint) string { return cmp.Or(ep.Pod, ep.Addr.Addr().String()) }

// podOf returns the Pod of an endpoint; "" for one of none.
func podOf(ep topology.Endpoint) string { return ep.Pod }
