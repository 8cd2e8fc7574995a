package controlplane

import (
	"cmp"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// setServiceDefaults sets the defaults of the API server for those fields that a service proxy or the controllers in this package read.
func setServiceDefaults(svc *v1.Service) {
	spec := &svc.Spec
	spec.Type = cmp.Or(spec.Type, v1.ServiceTypeClusterIP)
	spec.SessionAffinity = cmp.Or(spec.SessionAffinity, v1.ServiceAffinityNone)
	switch c := spec.SessionAffinityConfig; {
	case spec.SessionAffinity == v1.ServiceAffinityNone:
		spec.SessionAffinityConfig = nil
	case spec.SessionAffinity == v1.ServiceAffinityClientIP && (c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil):
		timeout := &v1.ClientIPConfig{TimeoutSeconds: new(v1.DefaultClientIPServiceAffinitySeconds)}
		spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: timeout}
	}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		p.Protocol = cmp.Or(p.Protocol, v1.ProtocolTCP)
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if reachableFromOutside(svc) && spec.ExternalTrafficPolicy == "" {
		spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	}
	if spec.Type != v1.ServiceTypeExternalName {
		spec.InternalTrafficPolicy = cmp.Or(spec.InternalTrafficPolicy, new(v1.ServiceInternalTrafficPolicyCluster))
		spec.IPFamilyPolicy = cmp.Or(spec.IPFamilyPolicy, new(v1.IPFamilyPolicySingleStack))
	}
	if spec.Type == v1.ServiceTypeLoadBalancer {
		spec.AllocateLoadBalancerNodePorts = cmp.Or(spec.AllocateLoadBalancerNodePorts, new(true))
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
