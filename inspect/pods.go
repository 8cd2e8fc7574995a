package inspect

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
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
			return false // The controller has yet to follow, or a port has no number: the EndpointSlices tell.
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

// targetPort says whether the Pods declare the targetPort of a ServicePort that has endpoints.
func (c *diagnosis) targetPort(sp *plan.ServicePort) {
	target := c.target(sp.Key)
	if len(c.d.Selector) == 0 || strings.Trim(target, "0123456789") != "" {
		return // A name that no Pod has makes no endpoints.
	}
	here, _, known := c.podsOf()
	declared := containerPorts(selected(c.d.Selector, here), sp.Key.Protocol)
	if !known || len(declared) == 0 || slices.ContainsFunc(declared, func(p v1.ContainerPort) bool { return fmt.Sprint(p.ContainerPort) == target }) {
		return
	}
	c.add(note, TargetPortNotDeclared, "if the Pods do not listen there, set spec.ports[].targetPort to the port at which they do",
		"The targetPort is %s, and no container of the Pods declares this port%s; what they declare is %s.", target, c.name(sp), portList(declared))
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
