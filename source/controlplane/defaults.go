package controlplane

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// The functions here set the defaults of the API server for those fields that a service proxy or the controllers in this package
// read.

func setNamespace(meta *metav1.ObjectMeta) {
	if meta.Namespace == "" {
		meta.Namespace = v1.NamespaceDefault
	}
}

func setServiceDefaults(svc *v1.Service) {
	setNamespace(&svc.ObjectMeta)
	spec := &svc.Spec
	if spec.Type == "" {
		spec.Type = v1.ServiceTypeClusterIP
	}
	if spec.SessionAffinity == "" {
		spec.SessionAffinity = v1.ServiceAffinityNone
	}
	switch spec.SessionAffinity {
	case v1.ServiceAffinityNone:
		spec.SessionAffinityConfig = nil
	case v1.ServiceAffinityClientIP:
		if c := spec.SessionAffinityConfig; c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
			spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
				ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(v1.DefaultClientIPServiceAffinitySeconds)},
			}
		}
	}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		if p.Protocol == "" {
			p.Protocol = v1.ProtocolTCP
		}
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if reachableFromOutside(svc) && spec.ExternalTrafficPolicy == "" {
		spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	}
	if spec.Type != v1.ServiceTypeExternalName && spec.InternalTrafficPolicy == nil {
		spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyCluster)
	}
	if spec.Type == v1.ServiceTypeLoadBalancer {
		if spec.AllocateLoadBalancerNodePorts == nil {
			spec.AllocateLoadBalancerNodePorts = new(true)
		}
		for i := range svc.Status.LoadBalancer.Ingress {
			if in := &svc.Status.LoadBalancer.Ingress[i]; in.IP != "" && in.IPMode == nil {
				in.IPMode = new(v1.LoadBalancerIPModeVIP)
			}
		}
	}
	// The API server fills in whichever of the two fields is left out.
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" && spec.Type != v1.ServiceTypeExternalName {
		spec.ClusterIPs = []string{spec.ClusterIP}
	} else if spec.ClusterIP == "" && len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
}

func reachableFromOutside(svc *v1.Service) bool {
	switch svc.Spec.Type {
	case v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer:
		return true
	case v1.ServiceTypeClusterIP:
		return len(svc.Spec.ExternalIPs) > 0
	}
	return false
}

// needsHealthCheck reports whether load balancers ask each node for the Service's local endpoints.
func needsHealthCheck(svc *v1.Service) bool {
	return svc.Spec.Type == v1.ServiceTypeLoadBalancer &&
		svc.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal
}

func setSliceDefaults(es *discovery.EndpointSlice) {
	setNamespace(&es.ObjectMeta)
	for i := range es.Ports {
		p := &es.Ports[i]
		if p.Name == nil {
			p.Name = new("")
		}
		if p.Protocol == nil {
			p.Protocol = new(v1.ProtocolTCP)
		}
	}
}

func setEndpointsDefaults(ep *legacyEndpoints) {
	setNamespace(&ep.ObjectMeta)
	for i := range ep.Subsets {
		for j := range ep.Subsets[i].Ports {
			if p := &ep.Subsets[i].Ports[j]; p.Protocol == "" {
				p.Protocol = v1.ProtocolTCP
			}
		}
	}
}

func setPodDefaults(pod *v1.Pod) {
	setNamespace(&pod.ObjectMeta)
	for _, containers := range [][]v1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range containers {
			for j := range containers[i].Ports {
				if p := &containers[i].Ports[j]; p.Protocol == "" {
					p.Protocol = v1.ProtocolTCP
				}
			}
		}
	}
	if ip := pod.Status.PodIP; ip != "" && !slices.Contains(pod.Status.PodIPs, v1.PodIP{IP: ip}) {
		pod.Status.PodIPs = append([]v1.PodIP{{IP: ip}}, pod.Status.PodIPs...)
	}
}
