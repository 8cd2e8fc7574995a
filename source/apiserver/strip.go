package apiserver

import (
	"maps"
	"slices"
	"unique"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

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

// strip returns an object with only the fields that the proxier and explain read. Everything else (managed fields, most labels and annotations, and the
// references of endpoints, which explain does without, as there may be very many) would only take memory. Stripping twice is the same as stripping once. Objects of other
// kinds are returned unchanged.
func strip(obj any) any {
	switch o := obj.(type) {
	case *v1.Service:
		return stripService(o)
	case *discovery.EndpointSlice:
		return stripSlice(o)
	case *v1.Node:
		return stripNode(o)
	case *networking.ServiceCIDR:
		return stripServiceCIDR(o)
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
	var out map[string]string
	for _, key := range keep {
		if value, ok := entries[key]; ok {
			if out == nil {
				out = make(map[string]string, 1)
			}
			out[key] = value
		}
	}
	if maps.Equal(out, entries) {
		return entries
	}
	return out
}

func stripService(s *v1.Service) *v1.Service {
	annotations := serviceAnnotations
	if key := source.ProxyProtocol(s.Annotations); key != "" {
		annotations = append(annotations[:len(annotations):len(annotations)], key)
	}
	out := &v1.Service{
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
			// The rest is for explain.
			Selector:                 s.Spec.Selector,
			ExternalName:             s.Spec.ExternalName,
			PublishNotReadyAddresses: s.Spec.PublishNotReadyAddresses,
		},
	}
	for _, p := range s.Spec.Ports {
		out.Spec.Ports = append(out.Spec.Ports,
			v1.ServicePort{Name: interned(p.Name), Protocol: interned(p.Protocol), Port: p.Port, NodePort: p.NodePort, TargetPort: p.TargetPort})
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		out.Status.LoadBalancer.Ingress = append(out.Status.LoadBalancer.Ingress,
			v1.LoadBalancerIngress{IP: in.IP, IPMode: in.IPMode})
	}
	return out
}

func stripSlice(s *discovery.EndpointSlice) *discovery.EndpointSlice {
	out := &discovery.EndpointSlice{
		ObjectMeta:  stripMeta(&s.ObjectMeta, sliceLabels, sliceAnnotations),
		AddressType: s.AddressType,
		Endpoints:   make([]discovery.Endpoint, len(s.Endpoints)),
	}
	for _, p := range s.Ports {
		if p.Name != nil {
			p.Name = ptr.To(interned(*p.Name))
		}
		if p.Protocol != nil {
			p.Protocol = ptr.To(interned(*p.Protocol))
		}
		out.Ports = append(out.Ports, discovery.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
	for i, e := range s.Endpoints {
		out.Endpoints[i] = discovery.Endpoint{
			Addresses: e.Addresses, Conditions: e.Conditions, NodeName: e.NodeName, Hints: e.Hints,
		}
	}
	return out
}

// stripNode also keeps the signs that the node is about to be removed: load balancers leave it out then.
func stripNode(n *v1.Node) *v1.Node {
	out := &v1.Node{
		ObjectMeta: stripMeta(&n.ObjectMeta, nodeLabels, nil),
		Spec:       v1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs},
		Status:     v1.NodeStatus{Addresses: n.Status.Addresses},
	}
	out.DeletionTimestamp = n.DeletionTimestamp
	if i := slices.IndexFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == source.TaintToBeDeleted }); i >= 0 {
		out.Spec.Taints = []v1.Taint{{Key: source.TaintToBeDeleted, Effect: n.Spec.Taints[i].Effect}}
	}
	return out
}

func stripServiceCIDR(c *networking.ServiceCIDR) *networking.ServiceCIDR {
	return &networking.ServiceCIDR{ObjectMeta: stripMeta(&c.ObjectMeta, nil, nil), Spec: c.Spec}
}
