package apiserver

import (
	"maps"
	"slices"
	"unique"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/source"
)

// The labels and annotations that are kept.
var (
	serviceLabels      = []string{source.LabelProxyName, "k8s-app"}
	serviceAnnotations = append(slices.Clone(source.SchedulerAnnotations), source.AnnotationKubeRouterSchedFlags,
		source.AnnotationResetTCP)
	sliceLabels      = []string{discovery.LabelServiceName, v1.IsHeadlessService}
	sliceAnnotations = []string{source.AnnotationWeights, v1.EndpointsLastChangeTriggerTime}
	nodeLabels       = []string{v1.LabelTopologyZone, v1.LabelNodeExcludeBalancers}
)

// interned returns a string that all share who have the same. Every object comes with strings of its own, and very many are the same: those of
// namespaces, protocols and types.
func interned[T ~string](s T) T { return T(unique.Make(string(s)).Value()) }

// strip takes everything out of an object but the fields that the proxier and explain read. The rest (managed fields, most labels and
// annotations, and the references of endpoints, which explain does without, as there may be very many) would only take memory. Stripping
// twice is the same as stripping once. Objects of other kinds are left as they are. It returns the object, which nobody else may have: a
// copy of each would double what a list makes.
func strip(obj any) any {
	switch o := obj.(type) {
	case *v1.Service:
		stripService(o)
	case *discovery.EndpointSlice:
		stripSlice(o)
	case *v1.Node:
		stripNode(o)
	case *networking.ServiceCIDR:
		stripServiceCIDR(o)
	}
	return obj
}

func stripMeta(m *metav1.ObjectMeta, labels, annotations []string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: interned(m.Namespace), Name: m.Name, ResourceVersion: m.ResourceVersion,
		Labels: only(m.Labels, labels), Annotations: only(m.Annotations, annotations),
	}
}

func only(entries map[string]string, keep []string) map[string]string {
	maps.DeleteFunc(entries, func(key, _ string) bool { return !slices.Contains(keep, key) })
	if len(entries) == 0 {
		return nil
	}
	return entries
}

func stripService(s *v1.Service) {
	annotations := serviceAnnotations
	if key := source.ProxyProtocol(s.Annotations); key != "" {
		annotations = append(annotations[:len(annotations):len(annotations)], key)
	}
	for i, p := range s.Spec.Ports {
		s.Spec.Ports[i] = v1.ServicePort{
			Name: interned(p.Name), Protocol: interned(p.Protocol), Port: p.Port, NodePort: p.NodePort, TargetPort: p.TargetPort,
		}
	}
	for i, in := range s.Status.LoadBalancer.Ingress {
		s.Status.LoadBalancer.Ingress[i] = v1.LoadBalancerIngress{IP: in.IP, IPMode: in.IPMode}
	}
	*s = v1.Service{
		ObjectMeta: stripMeta(&s.ObjectMeta, serviceLabels, annotations),
		Spec: v1.ServiceSpec{
			Type:                     interned(s.Spec.Type),
			ClusterIP:                s.Spec.ClusterIP,
			ClusterIPs:               s.Spec.ClusterIPs,
			ExternalIPs:              s.Spec.ExternalIPs,
			LoadBalancerSourceRanges: s.Spec.LoadBalancerSourceRanges,
			SessionAffinity:          s.Spec.SessionAffinity,
			SessionAffinityConfig:    s.Spec.SessionAffinityConfig,
			InternalTrafficPolicy:    s.Spec.InternalTrafficPolicy,
			ExternalTrafficPolicy:    s.Spec.ExternalTrafficPolicy,
			HealthCheckNodePort:      s.Spec.HealthCheckNodePort,
			Ports:                    s.Spec.Ports,
			// The rest is for explain.
			Selector:                 s.Spec.Selector,
			ExternalName:             s.Spec.ExternalName,
			PublishNotReadyAddresses: s.Spec.PublishNotReadyAddresses,
		},
		Status: v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: s.Status.LoadBalancer.Ingress}},
	}
}

func stripSlice(s *discovery.EndpointSlice) {
	for i, p := range s.Ports {
		if p.Name != nil {
			*p.Name = interned(*p.Name)
		}
		if p.Protocol != nil {
			*p.Protocol = interned(*p.Protocol)
		}
		s.Ports[i] = discovery.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port}
	}
	for i, e := range s.Endpoints {
		s.Endpoints[i] = discovery.Endpoint{Addresses: e.Addresses, Conditions: e.Conditions, NodeName: e.NodeName, Hints: e.Hints}
	}
	*s = discovery.EndpointSlice{
		ObjectMeta: stripMeta(&s.ObjectMeta, sliceLabels, sliceAnnotations), AddressType: s.AddressType, Ports: s.Ports, Endpoints: s.Endpoints,
	}
}

// stripNode also keeps the signs that the node is about to be removed: load balancers leave it out then.
func stripNode(n *v1.Node) {
	stripped := v1.Node{
		ObjectMeta: stripMeta(&n.ObjectMeta, nodeLabels, nil),
		Spec:       v1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs},
		Status:     v1.NodeStatus{Addresses: n.Status.Addresses},
	}
	stripped.DeletionTimestamp = n.DeletionTimestamp
	if i := slices.IndexFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == source.TaintToBeDeleted }); i >= 0 {
		stripped.Spec.Taints = []v1.Taint{{Key: source.TaintToBeDeleted, Effect: n.Spec.Taints[i].Effect}}
	}
	*n = stripped
}

func stripServiceCIDR(c *networking.ServiceCIDR) {
	*c = networking.ServiceCIDR{ObjectMeta: stripMeta(&c.ObjectMeta, nil, nil), Spec: c.Spec}
}
