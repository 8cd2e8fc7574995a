package controlplane

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"nodeproxy/source"
)

// maxPodSlice is how many endpoints the EndpointSlice controller puts into a slice.
const maxPodSlice = 100

// The names of the controllers that would make the slices.
const (
	sliceController  = "endpointslice-controller.k8s.io"
	mirrorController = "endpointslicemirroring-controller.k8s.io"
)

// sliceGroups are slices of any number of endpoints, by the family and ports that these share.
type sliceGroups map[string]*discovery.EndpointSlice

func (g sliceGroups) add(family v1.IPFamily, ports []discovery.EndpointPort, e discovery.Endpoint) {
	key := string(family)
	for _, p := range ports {
		key += fmt.Sprintf(" %s/%s/%d", *p.Name, *p.Protocol, *p.Port)
	}
	if g[key] == nil {
		g[key] = &discovery.EndpointSlice{AddressType: discovery.AddressType(family), Ports: ports}
	}
	g[key].Endpoints = append(g[key].Endpoints, e)
}

// slices makes the EndpointSlices of a Service from the groups, each of at most size endpoints, with what a proxy reads. Their names follow from
// the Service, the controller, the group and the number within it.
func (g sliceGroups) slices(svc *v1.Service, controller string, size int) (out []*discovery.EndpointSlice) {
	for _, key := range slices.Sorted(maps.Keys(g)) {
		endpoints, n := g[key].Endpoints, 0
		slices.SortStableFunc(endpoints, func(a, b discovery.Endpoint) int {
			return cmp.Or(cmp.Compare(refName(a), refName(b)), slices.Compare(a.Addresses, b.Addresses))
		})
		for chunk := range slices.Chunk(endpoints, size) {
			es := *g[key]
			es.ObjectMeta = metav1.ObjectMeta{
				Namespace: svc.Namespace, Name: sliceName(svc.Name, fmt.Sprintf("%s %s %s %d", svc.Namespace, controller, key, n)),
				Labels: map[string]string{discovery.LabelServiceName: svc.Name},
			}
			es.Endpoints = chunk
			out = append(out, &es)
			n++
		}
	}
	return out
}

func refName(e discovery.Endpoint) string {
	if e.TargetRef == nil {
		return ""
	}
	return e.TargetRef.Name
}

// sliceName appends a hash to a Service's name, as the API server appends random letters.
func sliceName(service, what string) string {
	const letters = "bcdfghjklmnpqrstvwxz2456789" // those of generated names, which spell no words
	n, _ := hash(service + " " + what)
	suffix := make([]byte, 10)
	for i := range suffix {
		suffix[i] = letters[n%uint64(len(letters))]
		n /= uint64(len(letters))
	}
	return service + "-" + string(suffix)
}

// podSlices makes the slices of a Service from the Pods that its selector selects, as the EndpointSlice controller
// does. zone returns the zone of a node, if it is known.
func podSlices(svc *v1.Service, pods []*v1.Pod, zone func(node string) string, c *source.Findings) []*discovery.EndpointSlice {
	groups := sliceGroups{}
	unnamed := map[string][]string{} // by field: the Pods that lack a named port
	for _, pod := range pods {
		if podFinished(pod) || len(pod.Status.PodIPs) == 0 || pod.Spec.NodeName == "" && !svc.Spec.PublishNotReadyAddresses {
			continue
		}
		var ports []discovery.EndpointPort
		for i := range svc.Spec.Ports {
			p := &svc.Spec.Ports[i]
			number, ok := targetPort(pod, p)
			if !ok {
				field := fmt.Sprintf("spec.ports[%d].targetPort", i)
				unnamed[field] = append(unnamed[field], pod.Name)
				continue
			}
			ports = append(ports, discovery.EndpointPort{Name: new(p.Name), Port: new(number), Protocol: new(p.Protocol)})
		}
		if len(ports) == 0 {
			continue
		}
		for _, family := range svc.Spec.IPFamilies {
			if e, ok := podEndpoint(svc, pod, family, zone); ok {
				groups.add(family, ports, e)
			}
		}
	}
	for _, field := range slices.Sorted(maps.Keys(unnamed)) {
		names := unnamed[field]
		slices.Sort(names)
		if len(names) > 3 {
			names = append(names[:3:3], fmt.Sprintf("and %d more", len(unnamed[field])-3))
		}
		c.Problem(field, "they are not endpoints of this port",
			"no container port of this name and protocol in Pod %s", strings.Join(names, ", "))
	}
	return groups.slices(svc, sliceController, maxPodSlice)
}

// targetPort returns the port of a Pod that a Service port leads to; false if the Pod has none of that name. Ports of init
// containers count if these keep running (KEP-753).
func targetPort(pod *v1.Pod, p *v1.ServicePort) (int32, bool) {
	if p.TargetPort.Type == intstr.Int {
		return p.TargetPort.IntVal, true
	}
	containers := slices.Clip(pod.Spec.Containers)
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == v1.ContainerRestartPolicyAlways {
			containers = append(containers, c)
		}
	}
	for i := range containers {
		for _, port := range containers[i].Ports {
			if port.Name == p.TargetPort.StrVal && port.Protocol == p.Protocol {
				return port.ContainerPort, true
			}
		}
	}
	return 0, false
}

func podReady(pod *v1.Pod) bool {
	i := slices.IndexFunc(pod.Status.Conditions, func(c v1.PodCondition) bool { return c.Type == v1.PodReady })
	return i >= 0 && pod.Status.Conditions[i].Status == v1.ConditionTrue
}

// podEndpoint returns the endpoint of a Pod in one family; false if the Pod has no address of that family.
func podEndpoint(svc *v1.Service, pod *v1.Pod, family v1.IPFamily, zone func(node string) string) (discovery.Endpoint, bool) {
	var e discovery.Endpoint
	for _, p := range pod.Status.PodIPs {
		if ip, ok := source.ParseIP(p.IP); ok && familyOf(ip) == family {
			e.Addresses = append(e.Addresses, ip.String())
		}
	}
	if len(e.Addresses) == 0 {
		return e, false
	}
	serving, terminating := podReady(pod), pod.DeletionTimestamp != nil
	e.Conditions = discovery.EndpointConditions{
		Ready:       new(svc.Spec.PublishNotReadyAddresses || serving && !terminating),
		Serving:     new(serving),
		Terminating: new(terminating),
	}
	e.TargetRef = &v1.ObjectReference{Kind: kindPod, Namespace: pod.Namespace, Name: pod.Name}
	if pod.Spec.NodeName != "" {
		e.NodeName = new(pod.Spec.NodeName)
		if z := zone(pod.Spec.NodeName); z != "" {
			e.Zone = new(z)
		}
	}
	if *e.Conditions.Ready {
		e.Hints = hints(svc, &e)
	}
	return e, true
}

// topologyAuto reports whether an annotation asks for traffic to stay in its zone.
func topologyAuto(svc *v1.Service) bool {
	for _, key := range []string{v1.AnnotationTopologyMode, v1.DeprecatedAnnotationTopologyAwareHints} {
		if value := svc.Annotations[key]; value == "Auto" || value == "auto" {
			return true
		}
	}
	return false
}

// hints returns who is to use an endpoint: its own zone, and with PreferSameNode its own node first (KEP-4444, KEP-3015).
func hints(svc *v1.Service, e *discovery.Endpoint) *discovery.EndpointHints {
	prefer := svc.Spec.TrafficDistribution
	if topologyAuto(svc) {
		prefer = new(v1.ServiceTrafficDistributionPreferSameZone)
	}
	if prefer == nil {
		return nil
	}
	var h discovery.EndpointHints
	if *prefer == v1.ServiceTrafficDistributionPreferSameNode && e.NodeName != nil {
		h.ForNodes = []discovery.ForNode{{Name: *e.NodeName}}
	}
	if e.Zone != nil {
		h.ForZones = []discovery.ForZone{{Name: *e.Zone}}
	}
	if h.ForZones == nil && h.ForNodes == nil {
		return nil
	}
	return &h
}
