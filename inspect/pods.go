package inspect

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// podsOf returns the Pods of the Service's namespace and those of other namespaces; false where Pods can't be read.
func (c *diagnosis) podsOf() (here, elsewhere []*v1.Pod, known bool) {
	if c.readPods != nil {
		list, err := c.readPods(c.d.Service.Namespace)
		c.podsKnown, c.readPods = err == nil, nil
		byName := func(a, b *v1.Pod) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) }
		list = slices.SortedFunc(slices.Values(list), byName)
		own := func(p *v1.Pod) bool { return p.Namespace == c.d.Service.Namespace }
		c.podsHere, c.podsElsewhere = only(list, own), only(list, func(p *v1.Pod) bool { return !own(p) })
	}
	return c.podsHere, c.podsElsewhere, c.podsKnown
}

// podsByName returns the Pods of the Service's namespace; false where they can't be read.
func (c *diagnosis) podsByName() (map[string]*v1.Pod, bool) {
	out := map[string]*v1.Pod{}
	here, _, known := c.podsOf()
	for _, p := range here {
		out[p.Name] = p
	}
	return out, known
}

// podAddrs returns the addresses of a Pod.
func podAddrs(p *v1.Pod) (out []netip.Addr) {
	for _, ip := range append([]v1.PodIP{{IP: p.Status.PodIP}}, p.Status.PodIPs...) {
		if a, ok := source.ParseIP(ip.IP); ok && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
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
		case len(m.differs) == 0: // No miss at all.
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
	is := labels.SelectorFromSet(selector)
	return only(pods, func(p *v1.Pod) bool { return is.Matches(labels.Set(p.Labels)) })
}

// noPods says why a Service with a selector has no endpoints, by the Pods; false if they do not tell. A headless Service has no ServicePort.
func (c *diagnosis) noPods(sp *plan.ServicePort) bool {
	here, elsewhere, known := c.podsOf()
	match := selected(c.d.Selector, here)
	if !known || len(here) >= mostPods && len(match) == 0 { // There may be others.
		return false
	}
	text, ns := selector(c.d.Selector), c.d.Service.Namespace
	reasons := words(match, withoutEndpoint)
	if slices.Contains(reasons, "") {
		if sp == nil || c.noNamedPort(sp, match) {
			return sp != nil
		}
		of := func(p *v1.Pod) bool {
			return withoutEndpoint(p) == "" && slices.ContainsFunc(podAddrs(p), func(a netip.Addr) bool { return plan.FamilyOf(a) == sp.Key.Family })
		}
		if !slices.ContainsFunc(match, of) {
			c.add(problem, OtherFamily, otherFamily, "The Service has an %s cluster IP, but the Pods that its selector %s matches have no address of that family, so connections are refused.", sp.Key.Family, text)
			return true
		}
		return false // The controller has yet to follow.
	}
	// Whatever the port: it is said once.
	lead := "The Service has no endpoints, so " + either(sp == nil, "its name has no addresses in DNS: ", "connections are refused: ")
	nearly, near := c.nearly(here)
	rest, which := withoutSet(c.d.Selector)
	ofRest, others := selected(rest, here), selected(c.d.Selector, elsewhere)
	do := "create the Pods, or correct spec.selector: kubectl -n " + ns + " get pods --show-labels"
	switch {
	case len(match) > 0:
		c.noneRuns(match, reasons, lead, nearly, near)
	case which != "" && len(rest) > 0 && len(ofRest) > 0:
		c.add(problem, SelectorMatchesNothing, "have that Pod made again (scale up its controller), or take the label out of spec.selector",
			"%sits selector %s matches no Pod. A controller sets the label %s, and gives no Pod this value now; the rest of the selector matches %s.",
			lead, text, which, podNames(ofRest))
	case near > 0 && (len(others) == 0 || near >= exactly):
		c.add(problem, SelectorMatchesNothing, toMatch, "%sits selector %s matches no Pod. %s", lead, text, nearly)
	case len(others) > 0:
		c.add(problem, SelectorMatchesNothing, "create the Service in the namespace of its Pods",
			"%sits selector %s matches no Pod of namespace %s. Those of other namespaces do not count, such as %s/%s.",
			lead, text, ns, others[0].Namespace, others[0].Name)
	case len(here) == 0:
		c.add(problem, SelectorMatchesNothing, do, "%sits selector %s matches no Pod, since there is none in namespace %s.", lead, text, ns)
	default:
		c.add(problem, SelectorMatchesNothing, do, "%sits selector %s matches no Pod, and no Pod in namespace %s has any of these labels.", lead, text, ns)
	}
	return true
}

// noneRuns is about Pods that the selector matches, and of which none can be an endpoint, each for a reason.
func (c *diagnosis) noneRuns(match []*v1.Pod, reasons []string, lead, nearly string, near int) {
	names := some(words(match, func(p *v1.Pod) string { return p.Name + " (" + withoutEndpoint(p) + ")" }))
	if len(slices.Compact(slices.Sorted(slices.Values(reasons)))) == 1 {
		names = podNames(match) + " (" + reasons[0] + ")"
	}
	runs := func(why string) bool { return !strings.HasPrefix(why, hasEnded) }
	if near >= exactly && !slices.ContainsFunc(reasons, runs) {
		c.add(problem, NoEndpoints, toMatch, "%sall Pods that its selector %s matches have ended: %s. %s", lead, selector(c.d.Selector), names, nearly)
		return
	}
	do := either(held(match[0]), "find out why the finalizer stays; a StatefulSet does not replace the Pod before", "find out why the Pods do not run")
	c.add(problem, NoEndpoints, do+": kubectl -n "+c.d.Service.Namespace+" describe pod "+match[0].Name,
		"%snone of the Pods that its selector %s matches can be an endpoint: %s.", lead, selector(c.d.Selector), names)
}

// toMatch is what to do about a selector that nearly matches.
const toMatch = "correct spec.selector of the Service, or the labels of the Pods (in a Deployment, spec.template.metadata.labels)"

// nearly says which Pods the selector nearly matches, and how likely they are meant; 0 for none.
func (c *diagnosis) nearly(pods []*v1.Pod) (text string, likeness int) {
	near := nearMisses(c.d.Selector, pods)
	if len(near) == 0 {
		return "", 0
	}
	alike := only(near, func(m mismatch) bool { return slices.Equal(m.differs, near[0].differs) })
	names := some(words(alike, func(m mismatch) string { return m.pod.Name }))
	who := either(len(alike) > 1, "Pods "+names+" nearly match", "Pod "+names+" nearly matches")
	return fmt.Sprintf("%s: %s.", who, strings.Join(near[0].differs, " and ")), near[0].likeness
}

func podNames(pods []*v1.Pod) string {
	return some(words(pods, func(p *v1.Pod) string { return p.Name }))
}

// setByControllers are labels to which controllers give values that differ from Pod to Pod, or change with each version. A value that no Pod has is
// that of a Pod which is gone.
var setByControllers = []string{
	"statefulset.kubernetes.io/pod-name", "apps.kubernetes.io/pod-index", "controller-revision-hash", "pod-template-hash", "pod-template-generation",
	"batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-completion-index",
}

// withoutSet returns a selector without the labels that controllers set, and the first of these; "" if it has none.
func withoutSet(selector map[string]string) (rest map[string]string, which string) {
	rest = maps.Clone(selector)
	for _, label := range setByControllers {
		if value, has := rest[label]; has {
			delete(rest, label)
			which = cmp.Or(which, label+"="+value)
		}
	}
	return rest, which
}

// hasEnded is why a Pod that has run to its end can't be an endpoint.
const hasEnded = "it has ended"

// withoutEndpoint says why a Pod can't be an endpoint; "" if it can.
func withoutEndpoint(p *v1.Pod) string {
	switch {
	case p.Status.Phase != v1.PodSucceeded && p.Status.Phase != v1.PodFailed:
	case held(p):
		return hasEnded + ", and is not gone until something removes its finalizer " + p.Finalizers[0]
	case p.Status.Reason != "": // such as Evicted
		return hasEnded + ": " + joined(": ", p.Status.Reason, p.Status.Message)
	default:
		return hasEnded
	}
	switch {
	case p.Spec.NodeName == "":
		for _, c := range p.Status.Conditions {
			if c.Type == v1.PodScheduled && c.Status == v1.ConditionFalse && c.Message != "" {
				return "not scheduled to a node: " + strings.TrimSuffix(c.Message, ".")
			}
		}
		return "not scheduled to a node"
	case p.Status.PodIP == "" && len(p.Status.PodIPs) == 0:
		for _, s := range p.Status.ContainerStatuses {
			if s.State.Waiting != nil && s.State.Waiting.Reason == "ContainerCreating" { // which is what the kubelet says until there is a sandbox
				return "without an IP: the network plugin has not made its network, or a volume is missing (ContainerCreating)"
			}
		}
		return "without an IP"
	}
	return ""
}

// held reports whether a Pod is deleted, and not gone before something removes its finalizers.
func held(p *v1.Pod) bool { return p.DeletionTimestamp != nil && len(p.Finalizers) > 0 }

// noNamedPort says that Pods which could be endpoints have no port of the targetPort's name; false if that is not why there are none.
func (c *diagnosis) noNamedPort(sp *plan.ServicePort, pods []*v1.Pod) bool {
	target := targetOf(c.d, sp.Key).Target
	if isNumber(target) {
		return false
	}
	declared := containerPorts(pods, sp.Key.Protocol)
	named := func(p v1.ContainerPort) bool { return p.Name == target }
	if slices.ContainsFunc(declared, named) {
		return false // The controller has yet to follow.
	}
	what := either(len(declared) > 0, "what they declare is "+portList(declared), "they declare none for this protocol")
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
	target := targetOf(c.d, sp.Key).Target
	here, _, known := c.podsOf()
	if !known || len(c.d.Selector) == 0 {
		return
	}
	pods := selected(c.d.Selector, here)
	if !isNumber(target) {
		c.lackNamed(sp, target, pods)
		c.twiceNamed(sp, target, pods)
		return
	}
	is := func(p v1.ContainerPort) bool { return fmt.Sprint(p.ContainerPort) == target }
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
		number := targetOf(c.d, sp.Key).Number
		if slices.ContainsFunc(declared, func(p v1.ContainerPort) bool { return p.ContainerPort == int32(number) }) {
			do = fmt.Sprintf("if the Pods do not listen there, set spec.ports[].targetPort to %d, or swap port and targetPort if they are the wrong way round", number)
		}
		c.add(note, TargetPortNotDeclared, do,
			"The targetPort is %s, and no container of the Pods declares this port%s; what they declare is %s.", target, c.name(sp), portList(declared))
	}
}

// lackNamed names the Pods that have no port of the targetPort's name, though others have: those are no endpoints.
func (c *diagnosis) lackNamed(sp *plan.ServicePort, target string, pods []*v1.Pod) {
	named := func(port v1.ContainerPort) bool { return port.Name == target }
	lack := only(pods, func(p *v1.Pod) bool {
		return p.DeletionTimestamp == nil && withoutEndpoint(p) == "" && !slices.ContainsFunc(containerPorts([]*v1.Pod{p}, sp.Key.Protocol), named)
	})
	if len(lack) == 0 {
		return
	}
	what := cmp.Or(portList(containerPorts(lack, sp.Key.Protocol)), "none for this protocol")
	c.add(problem, SelectorMatchesOthers, fmt.Sprintf("give a container port of these Pods the name %q, or exclude them by the selector if they are another app's", target),
		"Some of the Pods that the selector %s matches declare no port %q (%s), which is the targetPort, and get no traffic%s: %s. What they declare is %s.",
		selector(c.d.Selector), target, sp.Key.Protocol, c.name(sp), podNames(lack), what)
}

// twiceNamed names the Pods of which several containers have a port of the targetPort's name: the first counts.
func (c *diagnosis) twiceNamed(sp *plan.ServicePort, target string, pods []*v1.Pod) {
	named := func(port v1.ContainerPort) bool { return port.Name == target }
	twice := only(pods, func(p *v1.Pod) bool { return len(only(containerPorts([]*v1.Pod{p}, sp.Key.Protocol), named)) > 1 })
	if len(twice) > 0 {
		c.add(note, NameTwice, "give the ports different names, and set spec.ports[].targetPort to that of the container which is meant",
			"More than one container of the Pods declares a port %q (%s), which is the targetPort, and the first of them gets the traffic%s: %s.", target, sp.Key.Protocol, c.name(sp), podNames(twice))
	}
}

// otherApp names the Pods that declare other ports than the targetPort, which others declare: the selector may match them by mistake.
func (c *diagnosis) otherApp(sp *plan.ServicePort, target string, pods []*v1.Pod, is func(v1.ContainerPort) bool) {
	others := only(pods, func(p *v1.Pod) bool {
		own := containerPorts([]*v1.Pod{p}, sp.Key.Protocol)
		return p.DeletionTimestamp == nil && withoutEndpoint(p) == "" && len(own) > 0 && !slices.ContainsFunc(own, is)
	})
	if len(others) == 0 {
		return
	}
	c.add(note, SelectorMatchesOthers, "if they are another app's, give the selector a label that only the Service's own Pods have",
		"The selector %s also matches Pods that do not declare the targetPort %s, though others do%s: %s. They get a share of the connections, "+
			"and refuse it unless they listen there; what they declare is %s.",
		selector(c.d.Selector), target, c.name(sp), podNames(others), portList(containerPorts(others, sp.Key.Protocol)))
}

// findUnready says how to find out why Pods are not ready.
func (c *diagnosis) findUnready(names []string) string {
	pods, _ := c.podsByName()
	if names[0] == "" && len(c.d.Selector) > 0 { // Whose they are is not known.
		return "find out why the readiness probes fail: kubectl -n " + c.d.Service.Namespace + " describe pod -l " + selector(c.d.Selector)
	}
	if names[0] == "" {
		return "see what writes the EndpointSlices, and why it says that they are not ready (endpoints[].conditions)"
	}
	describe := "kubectl -n " + c.d.Service.Namespace + " describe pod " + names[0]
	for _, name := range names {
		if p := pods[name]; p != nil {
			if container, why, look := stuck(p); container != "" {
				return fmt.Sprintf("find out why the containers do not run, such as %s of Pod %s (%s): kubectl -n %s %s", container, name, why, c.d.Service.Namespace, look)
			}
		}
	}
	for _, name := range names {
		if p := pods[name]; p != nil && starting(p) != "" {
			return fmt.Sprintf("find out why the startup probe of container %s of Pod %s does not succeed: kubectl -n %[3]s describe pod %[2]s", starting(p), name, c.d.Service.Namespace)
		}
		if p := pods[name]; p != nil && waiting(p) != "" {
			return fmt.Sprintf("find out what the init container %s of Pod %s waits for: kubectl -n %[3]s logs %[2]s -c %[1]s", waiting(p), name, c.d.Service.Namespace)
		}
	}
	gates, nodes := map[string]string{}, []string(nil)
	for _, name := range names {
		p := pods[name]
		if p == nil {
			return "find out why the readiness probes fail: " + describe
		}
		closed := closedGates(p)
		switch {
		case has(p, v1.PodReady, v1.ConditionTrue):
			return "see why the EndpointSlices lag behind: Pod " + name + " is ready (kube-controller-manager makes them)"
		case len(closed) > 0:
			maps.Copy(gates, closed)
		case has(p, v1.ContainersReady, v1.ConditionTrue): // Then it is not the kubelet that says that the Pod is not ready.
			nodes = append(nodes, p.Spec.NodeName)
		case !slices.ContainsFunc(running(p), func(c v1.Container) bool { return c.ReadinessProbe != nil }) && has(p, v1.ContainersReady, v1.ConditionFalse):
			return "find out why the containers are not ready: " + describe
		default:
			return "find out why the readiness probes fail: " + joined(": ", oddProbe(p), describe)
		}
	}
	if slices.Sort(nodes); len(nodes) > 0 {
		nodes = slices.Compact(nodes)
		for _, name := range nodes {
			if why := c.d.NodesDown[name]; why != "" {
				return fmt.Sprintf("node %s is not ready (%s), and so its Pods are not: kubectl describe node %[1]s", name, strings.TrimSuffix(why, "."))
			}
		}
		return fmt.Sprintf("their containers were ready when the kubelet last said so: see whether it still runs on node %s: kubectl describe node %s", some(nodes), nodes[0])
	}
	for _, gate := range slices.Sorted(maps.Keys(gates)) {
		if why := gates[gate]; why != "" {
			return fmt.Sprintf("their containers are ready, but not their readiness gates: the condition %s is not True (%s): %s", gate, why, describe)
		}
	}
	return fmt.Sprintf("their containers are ready, but not their readiness gates: find out why nothing has set the condition %s to True (a controller does "+
		"that, such as one for load balancers): %s", some(slices.Sorted(maps.Keys(gates))), describe)
}

// has reports whether a condition of a Pod is known, and has a status.
func has(p *v1.Pod, kind v1.PodConditionType, status v1.ConditionStatus) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool { return c.Type == kind && c.Status == status })
}

// oddProbe names a readiness probe of a Pod for a port that none of its containers declares, though they declare others; "" if there is none.
func oddProbe(p *v1.Pod) string {
	var declared []v1.ContainerPort
	for _, ctr := range running(p) {
		declared = append(declared, ctr.Ports...)
	}
	for _, ctr := range running(p) {
		port := probed(ctr.ReadinessProbe)
		is := func(o v1.ContainerPort) bool {
			return o.Name != "" && o.Name == port || fmt.Sprint(o.ContainerPort) == port
		}
		if port != "" && port != istioProbes && len(declared) > 0 && !slices.ContainsFunc(declared, is) {
			return fmt.Sprintf("that of container %s of Pod %s asks port %s, and what the Pod declares is %s", ctr.Name, p.Name, port, portList(declared))
		}
	}
	return ""
}

// istioProbes is the port at which Istio's sidecar answers its own probes, and which it does not declare.
const istioProbes = "15021"

// meshProbes begins the paths of probes that Istio's sidecar answers on behalf of the containers.
const meshProbes = "/app-health/"

// probed returns the port of the Pod that a probe asks, by number or name; "" if it asks none.
func probed(p *v1.Probe) string {
	switch {
	case p == nil:
	case p.HTTPGet != nil && (p.HTTPGet.Host != "" || strings.HasPrefix(p.HTTPGet.Path, meshProbes)):
	case p.HTTPGet != nil:
		return p.HTTPGet.Port.String()
	case p.TCPSocket != nil:
		return p.TCPSocket.Port.String()
	case p.GRPC != nil:
		return fmt.Sprint(p.GRPC.Port)
	}
	return ""
}

// waiting returns the init container that a Pod waits for; "" if there is none, or it can't be told.
func waiting(p *v1.Pod) string {
	for _, ctr := range p.Spec.InitContainers {
		if sidecar(ctr) {
			continue
		}
		for _, s := range p.Status.InitContainerStatuses {
			if s.Name == ctr.Name && s.State.Running != nil {
				return ctr.Name
			}
		}
	}
	return ""
}

// ended says how a container ended last.
func ended(p *v1.Pod, container string, t *v1.ContainerStateTerminated) string {
	if t.Reason == "OOMKilled" {
		for _, ctr := range slices.Concat(p.Spec.Containers, p.Spec.InitContainers) {
			if limit, has := ctr.Resources.Limits[v1.ResourceMemory]; has && ctr.Name == container {
				return "it used more memory than its limit of " + limit.String() + " allows: OOMKilled"
			}
		}
		return "it used more memory than there was for it: OOMKilled"
	}
	return fmt.Sprintf("it ended with exit code %d", t.ExitCode)
}

// starting returns a container of a Pod that runs, and whose startup probe has not succeeded yet; "" if there is none.
func starting(p *v1.Pod) string {
	for _, ctr := range running(p) {
		for _, s := range slices.Concat(p.Status.ContainerStatuses, p.Status.InitContainerStatuses) {
			if ctr.StartupProbe != nil && s.Name == ctr.Name && s.State.Running != nil && s.Started != nil && !*s.Started {
				return ctr.Name
			}
		}
	}
	return ""
}

// stuck returns a container of a Pod that does not run, why, and what kubectl has to show then; "" if there is none.
func stuck(p *v1.Pod) (container, why, look string) {
	for _, s := range p.Status.ContainerStatuses {
		if t := s.State.Terminated; t != nil && p.Spec.RestartPolicy == v1.RestartPolicyNever {
			return s.Name, fmt.Sprintf("it has ended with exit code %d, and is not started again", t.ExitCode), "logs " + p.Name + " -c " + s.Name
		}
	}
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "PodInitializing" { // It waits for another container.
			if why = w.Reason; s.RestartCount == 0 { // Of a container that has run, its log tells more.
				why = joined(": ", w.Reason, w.Message)
			} else if t := s.LastTerminationState.Terminated; t != nil {
				why += ", after " + ended(p, s.Name, t)
			}
			if s.RestartCount > 0 {
				return s.Name, why, fmt.Sprintf("logs %s -c %s --previous", p.Name, s.Name)
			}
			return s.Name, why, "describe pod " + p.Name
		}
	}
	return "", "", ""
}

// mostPods is how many Pods of a namespace may be read. Of more, those that are read may not be all.
const mostPods = 5000

// podsGone is about endpoints in use of Pods that there are not any more, or that have other addresses.
func (c *diagnosis) podsGone(sp *plan.ServicePort, used map[netip.AddrPort]bool) {
	pods, known := c.podsByName()
	if !known || len(pods) == 0 || len(pods) >= mostPods {
		return
	}
	var gone []string
	for _, ep := range c.d.Endpoints(sp.Key) {
		if ep.Pod == "" || !used[ep.Addr] {
			continue
		}
		switch p := pods[ep.Pod]; {
		case p == nil:
			gone = append(gone, fmt.Sprintf("%s of Pod %s, which is gone", ep.Addr, ep.Pod))
		case p.Status.PodIP != "" && !slices.Contains(podAddrs(p), ep.Addr.Addr()):
			gone = append(gone, fmt.Sprintf("%s of Pod %s, which has %s now", ep.Addr, ep.Pod, p.Status.PodIP))
		}
	}
	if len(gone) > 0 {
		c.add(problem, PodGone, "see whether kube-controller-manager runs, which makes EndpointSlices, and what it says",
			"The EndpointSlices are not up to date, and connections to these endpoints may hang%s: %s.", c.name(sp), some(gone))
	}
}

// closedGates returns the readiness gates for which a Pod whose containers are ready is not, each with what its condition says; these are empty where
// nothing has set it.
func closedGates(p *v1.Pod) map[string]string {
	conditions := map[v1.PodConditionType]v1.PodCondition{}
	for _, c := range p.Status.Conditions {
		conditions[c.Type] = c
	}
	out := map[string]string{}
	for _, g := range p.Spec.ReadinessGates {
		c := conditions[g.ConditionType]
		if conditions[v1.ContainersReady].Status != v1.ConditionFalse && c.Status != v1.ConditionTrue {
			out[string(g.ConditionType)] = joined(": ", c.Reason, c.Message)
		}
	}
	return out
}

// running returns the containers of a Pod that are meant to run as long as it does: of the init containers, only the sidecars.
func running(p *v1.Pod) []v1.Container {
	return slices.Concat(p.Spec.Containers, only(p.Spec.InitContainers, sidecar))
}

// sidecar reports whether an init container is not to end (KEP-753).
func sidecar(c v1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == v1.ContainerRestartPolicyAlways
}

// containerPorts returns the ports of a protocol that the containers of Pods declare, each once.
func containerPorts(pods []*v1.Pod, protocol plan.Protocol) []v1.ContainerPort {
	var out []v1.ContainerPort
	for _, p := range pods {
		for _, container := range running(p) {
			for _, port := range container.Ports {
				is := plan.Protocol(port.Protocol) == protocol || port.Protocol == "" && protocol == plan.TCP
				same := func(o v1.ContainerPort) bool { return o.ContainerPort == port.ContainerPort && o.Name == port.Name }
				if is && !slices.ContainsFunc(out, same) {
					out = append(out, port)
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b v1.ContainerPort) int { return int(a.ContainerPort - b.ContainerPort) })
	return out
}

// portList is such as "8080 (http), 9090".
func portList(ports []v1.ContainerPort) string {
	return some(words(ports, func(p v1.ContainerPort) string {
		return fmt.Sprint(p.ContainerPort) + when(p.Name != "", " ("+p.Name+")")
	}))
}
