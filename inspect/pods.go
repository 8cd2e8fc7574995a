package inspect

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/topology"
)

// podsOf returns the Pods of the Service's namespace and those of other namespaces; false where Pods can't be read.
func (c *diagnosis) podsOf() (here, elsewhere []*v1.Pod, known bool) {
	if c.readPods != nil {
		list, err := c.readPods(c.d.Service.Namespace)
		c.allPods, c.podsKnown, c.readPods = list, err == nil, nil
	}
	for _, p := range c.allPods {
		if p.Namespace == c.d.Service.Namespace {
			here = append(here, p)
		} else {
			elsewhere = append(elsewhere, p)
		}
	}
	byName := func(a, b *v1.Pod) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) }
	slices.SortFunc(here, byName)
	slices.SortFunc(elsewhere, byName)
	return here, elsewhere, c.podsKnown
}

// mismatch is how a Pod's labels differ from the selector.
type mismatch struct {
	pod     *v1.Pod
	differs []string // in words, in order of label
	// likeness is greater for a Pod that is more likely to be meant; 0 for none at all.
	likeness int
}

// exactly is what a label that matches adds to the likeness, which is more than what one that nearly does adds.
const exactly = 4

// compareLabels compares a selector with a Pod's labels.
func compareLabels(selector map[string]string, pod *v1.Pod) mismatch {
	m := mismatch{pod: pod}
	for _, k := range slices.Sorted(maps.Keys(selector)) {
		want := selector[k]
		have, there := pod.Labels[k]
		switch {
		case there && have == want:
			m.likeness += exactly
		case there:
			m.differs = append(m.differs, fmt.Sprintf("%s=%s in place of %s=%s", k, have, k, want))
			if resembles(have, want) {
				m.likeness += 2
			}
		default:
			m.differs = append(m.differs, "label "+k+" missing")
			for _, other := range slices.Sorted(maps.Keys(pod.Labels)) {
				if pod.Labels[other] == want {
					m.differs[len(m.differs)-1] = fmt.Sprintf("%s=%s in place of %s=%s", other, want, k, want)
					m.likeness++
					break
				}
			}
		}
	}
	return m
}

// resembles reports whether a label's value could be meant to be another: one is the beginning of the other, they have the same letters,
// or a third of the letters differ at most.
func resembles(a, b string) bool {
	letters := func(s string) string {
		r := []rune(s)
		slices.Sort(r)
		return string(r)
	}
	return a != "" && strings.HasPrefix(b, a) || b != "" && strings.HasPrefix(a, b) || letters(a) == letters(b) ||
		distance(a, b) <= max(len(a), len(b))/3
}

// nearMisses returns the Pods that a selector misses by the least, if it matches any label of theirs or nearly does.
func nearMisses(selector map[string]string, pods []*v1.Pod) []mismatch {
	var out []mismatch
	for _, p := range pods {
		m := compareLabels(selector, p)
		switch {
		case m.likeness == 0 || len(out) > 0 && m.likeness < out[0].likeness:
		case len(out) > 0 && m.likeness == out[0].likeness:
			out = append(out, m)
		default:
			out = []mismatch{m}
		}
	}
	return out
}

func selected(selector map[string]string, pods []*v1.Pod) []*v1.Pod {
	var out []*v1.Pod
	for _, p := range pods {
		if len(compareLabels(selector, p).differs) == 0 {
			out = append(out, p)
		}
	}
	return out
}

// noPods says why a Service with a selector has no endpoints, by the Pods; false if they do not tell.
func (c *diagnosis) noPods(sp *plan.ServicePort) bool {
	here, elsewhere, known := c.podsOf()
	if !known {
		return false
	}
	const refused = "The Service has no endpoints, so connections are refused%s: "
	text, ns := selector(c.d.Selector), c.d.Service.Namespace
	if match := selected(c.d.Selector, here); len(match) > 0 {
		var names []string
		for _, p := range match {
			if why := withoutEndpoint(p); why != "" {
				names = append(names, p.Name+" ("+why+")")
			}
		}
		if len(names) < len(match) {
			return c.noNamedPort(sp, match) // Else the controller has yet to follow.
		}
		c.add(problem, NoEndpoints, "find out why the Pods do not run: "+c.pods("-o wide"),
			refused+"none of the Pods that its selector %s matches has an address: %s.", c.name(sp), text, some(names))
		return true
	}
	near, others := nearMisses(c.d.Selector, here), selected(c.d.Selector, elsewhere)
	if len(near) > 0 && (len(others) == 0 || near[0].likeness >= exactly) {
		var names []string
		differs := near[0].differs
		for _, m := range near {
			if slices.Equal(m.differs, differs) {
				names = append(names, m.pod.Name)
			}
		}
		who := "Pod " + names[0] + " nearly matches"
		if len(names) > 1 {
			who = "Pods " + some(names) + " nearly match"
		}
		c.add(problem, SelectorMatchesNothing,
			"correct spec.selector of the Service, or the labels of the Pods (in a Deployment, spec.template.metadata.labels)",
			refused+"its selector %s matches no Pod. %s: %s.", c.name(sp), text, who, strings.Join(differs, " and "))
		return true
	}
	if len(others) > 0 {
		c.add(problem, SelectorMatchesNothing, "create the Service in the namespace of its Pods",
			refused+"its selector %s matches no Pod of namespace %s. Those of other namespaces do not count, such as %s/%s.",
			c.name(sp), text, ns, others[0].Namespace, others[0].Name)
		return true
	}
	do := "create the Pods, or correct spec.selector: kubectl -n " + ns + " get pods --show-labels"
	if len(here) == 0 {
		c.add(problem, SelectorMatchesNothing, do, refused+"its selector %s matches no Pod, since there is none in namespace %s.", c.name(sp), text, ns)
		return true
	}
	c.add(problem, SelectorMatchesNothing, do, refused+"its selector %s matches no Pod, and none of the %d in namespace %s has any of these labels.",
		c.name(sp), text, len(here), ns)
	return true
}

// withoutEndpoint says why a Pod can't be an endpoint; "" if it can.
func withoutEndpoint(p *v1.Pod) string {
	switch {
	case p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed:
		return "it has ended"
	case p.Spec.NodeName == "":
		return "not scheduled to a node"
	case p.Status.PodIP == "" && len(p.Status.PodIPs) == 0:
		return "without an IP"
	}
	return ""
}

// noNamedPort says that Pods which could be endpoints have no port of the targetPort's name; false if that is not why there are none.
func (c *diagnosis) noNamedPort(sp *plan.ServicePort, pods []*v1.Pod) bool {
	target := c.target(sp.Key)
	if isNumber(target) {
		return false
	}
	declared := containerPorts(pods, sp.Key.Protocol)
	named := func(p v1.ContainerPort) bool { return p.Name == target }
	if slices.ContainsFunc(declared, named) {
		return false // The controller has yet to follow.
	}
	what := "what they declare is " + portList(declared)
	if len(declared) == 0 {
		what = "they declare none for this protocol"
	}
	do := fmt.Sprintf("give a container port of the Pods the name %q, or set spec.ports[].targetPort to what they have", target)
	if other := declaredFor(pods, sp.Key.Protocol, named); other != "" {
		what = "the port of this name is for " + string(other)
		do = "give the Service's port and the container port the same protocol"
	}
	c.add(problem, NoPortMatches, do, "The Service has no endpoints, so connections are refused%s: no container of the Pods that its selector %s matches "+
		"declares a port %q (%s), which is the targetPort; %s.", c.name(sp), selector(c.d.Selector), target, sp.Key.Protocol, what)
	return true
}

// isNumber reports whether a targetPort is a number rather than a name.
func isNumber(target string) bool { return strings.Trim(target, "0123456789") == "" }

// declaredFor returns another protocol for which Pods declare a port; "" if there is none.
func declaredFor(pods []*v1.Pod, but plan.Protocol, is func(v1.ContainerPort) bool) plan.Protocol {
	for _, other := range []plan.Protocol{plan.TCP, plan.UDP, plan.SCTP} {
		if other != but && slices.ContainsFunc(containerPorts(pods, other), is) {
			return other
		}
	}
	return ""
}

// targetPort says whether the Pods declare the targetPort of a ServicePort that has endpoints.
func (c *diagnosis) targetPort(sp *plan.ServicePort) {
	target := c.target(sp.Key)
	if len(c.d.Selector) == 0 || !isNumber(target) {
		return // A name that no Pod has makes no endpoints.
	}
	here, _, known := c.podsOf()
	if !known {
		return
	}
	is := func(p v1.ContainerPort) bool { return fmt.Sprint(p.ContainerPort) == target }
	pods := selected(c.d.Selector, here)
	declared := containerPorts(pods, sp.Key.Protocol)
	if slices.ContainsFunc(declared, is) {
		c.otherApp(sp, target, pods, is)
		return
	}
	if other := declaredFor(pods, sp.Key.Protocol, is); other != "" {
		c.add(note, TargetPortNotDeclared, "if the Pods do not listen there, give the Service's port the protocol of the container port",
			"The targetPort is %s (%s), and the containers of the Pods declare this port for %s%s.", target, sp.Key.Protocol, other, c.name(sp))
		return
	}
	if len(declared) > 0 {
		do := "if the Pods do not listen there, set spec.ports[].targetPort to the port at which they do"
		i := slices.IndexFunc(c.d.Ports, func(p proxier.Port) bool { return p.Name == sp.Key.Port && p.Protocol == sp.Key.Protocol })
		if i >= 0 && slices.ContainsFunc(declared, func(p v1.ContainerPort) bool { return p.ContainerPort == int32(c.d.Ports[i].Number) }) {
			do = fmt.Sprintf("if the Pods do not listen there, set spec.ports[].targetPort to %d, or swap port and targetPort if they are the wrong way round", c.d.Ports[i].Number)
		}
		c.add(note, TargetPortNotDeclared, do,
			"The targetPort is %s, and no container of the Pods declares this port%s; what they declare is %s.", target, c.name(sp), portList(declared))
	}
}

// otherApp names the Pods that declare other ports than the targetPort, which others declare: the selector may match them by mistake.
func (c *diagnosis) otherApp(sp *plan.ServicePort, target string, pods []*v1.Pod, is func(v1.ContainerPort) bool) {
	var others []*v1.Pod
	var names []string
	for _, p := range pods {
		own := containerPorts([]*v1.Pod{p}, sp.Key.Protocol)
		if withoutEndpoint(p) == "" && len(own) > 0 && !slices.ContainsFunc(own, is) {
			others, names = append(others, p), append(names, p.Name)
		}
	}
	if len(others) == 0 {
		return
	}
	c.add(note, SelectorMatchesOthers, "if they are another app's, give the selector a label that only the Service's own Pods have",
		"The selector %s also matches Pods that do not declare the targetPort %s, though others do%s: %s. They get a share of the connections, "+
			"and refuse it unless they listen there; what they declare is %s.",
		selector(c.d.Selector), target, c.name(sp), some(names), portList(containerPorts(others, sp.Key.Protocol)))
}

// findUnready says how to find out why endpoints are not ready.
func (c *diagnosis) findUnready(list []topology.Endpoint) string {
	here, _, _ := c.podsOf()
	ns := c.d.Service.Namespace
	for _, ep := range list {
		i := slices.IndexFunc(here, func(p *v1.Pod) bool { return p.Name == ep.Pod })
		if i < 0 || ep.Ready || ep.Terminating {
			continue
		}
		if container, why, ran := stuck(here[i]); container != "" {
			look := "describe pod " + ep.Pod
			if ran {
				look = fmt.Sprintf("logs %s -c %s --previous", ep.Pod, container)
			}
			return fmt.Sprintf("find out why the containers do not run, such as %s of Pod %s (%s): kubectl -n %s %s", container, ep.Pod, why, ns, look)
		}
	}
	var gates []string
	for _, ep := range list {
		if ep.Ready || ep.Terminating {
			continue
		}
		i := slices.IndexFunc(here, func(p *v1.Pod) bool { return p.Name == ep.Pod })
		var of []string
		if i >= 0 {
			of = closedGates(here[i])
		}
		if len(of) == 0 {
			return "find out why the readiness probes fail: kubectl -n " + ns + " describe pod"
		}
		gates = append(gates, of...)
	}
	slices.Sort(gates)
	return fmt.Sprintf("their containers are ready, but not their readiness gates: find out why nothing has set the condition %s to True (a controller does "+
		"that, such as one for load balancers): kubectl -n %s describe pod", some(slices.Compact(gates)), ns)
}

// stuck returns a container of a Pod that does not run, why, and whether it has run before; "" if there is none.
func stuck(p *v1.Pod) (container, why string, ran bool) {
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "PodInitializing" { // It waits for another container.
			return s.Name, w.Reason, s.RestartCount > 0
		}
	}
	return "", "", false
}

// podsGone is about endpoints in use of Pods that there are not any more, or that have other addresses.
func (c *diagnosis) podsGone(sp *plan.ServicePort, used map[netip.AddrPort]bool) {
	const most = 5000 // Of more, those that are read may not be all.
	here, _, known := c.podsOf()
	if !known || len(here) == 0 || len(here) >= most {
		return
	}
	pods := map[string]*v1.Pod{}
	for _, p := range here {
		pods[p.Name] = p
	}
	var gone []string
	for _, ep := range c.d.Endpoints(sp.Key) {
		if ep.Pod == "" || !used[ep.Addr] {
			continue
		}
		has := func(ip string) bool {
			a, err := netip.ParseAddr(ip)
			return err == nil && a.Unmap() == ep.Addr.Addr()
		}
		switch p := pods[ep.Pod]; {
		case p == nil:
			gone = append(gone, fmt.Sprintf("%s of Pod %s, which is gone", ep.Addr, ep.Pod))
		case p.Status.PodIP != "" && !has(p.Status.PodIP) && !slices.ContainsFunc(p.Status.PodIPs, func(ip v1.PodIP) bool { return has(ip.IP) }):
			gone = append(gone, fmt.Sprintf("%s of Pod %s, which has %s now", ep.Addr, ep.Pod, p.Status.PodIP))
		}
	}
	if len(gone) > 0 {
		c.add(problem, PodGone, "see whether kube-controller-manager runs, which makes EndpointSlices, and what it says",
			"The EndpointSlices are not up to date, and connections to these endpoints may hang%s: %s.", c.name(sp), some(gone))
	}
}

// closedGates returns the readiness gates for which a Pod whose containers are ready is not.
func closedGates(p *v1.Pod) []string {
	is := func(kind v1.PodConditionType, status v1.ConditionStatus) bool {
		return slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool { return c.Type == kind && c.Status == status })
	}
	var out []string
	for _, g := range p.Spec.ReadinessGates {
		if !is(v1.ContainersReady, v1.ConditionFalse) && !is(g.ConditionType, v1.ConditionTrue) {
			out = append(out, string(g.ConditionType))
		}
	}
	return out
}

// containerPorts returns the ports of a protocol that the containers of Pods declare, each once.
func containerPorts(pods []*v1.Pod, protocol plan.Protocol) []v1.ContainerPort {
	var out []v1.ContainerPort
	for _, p := range pods {
		for _, containers := range [][]v1.Container{p.Spec.Containers, p.Spec.InitContainers} {
			for i := range containers {
				for _, port := range containers[i].Ports {
					is := plan.Protocol(port.Protocol) == protocol || port.Protocol == "" && protocol == plan.TCP
					same := func(o v1.ContainerPort) bool { return o.ContainerPort == port.ContainerPort && o.Name == port.Name }
					if is && !slices.ContainsFunc(out, same) {
						out = append(out, port)
					}
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b v1.ContainerPort) int { return int(a.ContainerPort - b.ContainerPort) })
	return out
}

// portList is such as "8080 (http), 9090".
func portList(ports []v1.ContainerPort) string {
	var out []string
	for _, p := range ports {
		text := fmt.Sprint(p.ContainerPort)
		if p.Name != "" {
			text += " (" + p.Name + ")"
		}
		out = append(out, text)
	}
	return some(out)
}
