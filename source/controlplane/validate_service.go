package controlplane

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	utilnet "k8s.io/utils/net"

	"nodeproxy/source"
)

func checkService(svc *v1.Service, c *checker) {
	checkMeta(&svc.ObjectMeta, true, validation.IsDNS1035Label, c)
	spec := &svc.Spec
	oneOf(c, "spec.type", spec.Type, v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer,
		v1.ServiceTypeExternalName)
	checkServicePorts(svc, c)
	checkClusterIPs(svc, c)
	checkExternalName(svc, c)
	checkAffinity(spec, c)
	checkPolicies(svc, c)
	for i, ip := range spec.ExternalIPs {
		c.endpointIP(fmt.Sprintf("spec.externalIPs[%d]", i), ip)
	}
	checkLoadBalancer(svc, c)
	for _, key := range slices.Sorted(maps.Keys(spec.Selector)) {
		if msgs := validation.IsQualifiedName(key); len(msgs) > 0 {
			c.reject("spec.selector", "%.80q is not a valid label key: %s", key, msgs[0])
		}
		if msgs := validation.IsValidLabelValue(spec.Selector[key]); len(msgs) > 0 {
			c.reject("spec.selector", "%.80q is not a valid label value: %s", spec.Selector[key], msgs[0])
		}
	}
}

func headless(svc *v1.Service) bool { return svc.Spec.ClusterIP == v1.ClusterIPNone }

func checkServicePorts(svc *v1.Service, c *checker) {
	type number struct {
		protocol v1.Protocol
		port     int32
	}
	ports := svc.Spec.Ports
	if len(ports) == 0 && !headless(svc) && svc.Spec.Type != v1.ServiceTypeExternalName {
		c.reject("spec.ports", "required: a Service of this type needs at least one port")
	}
	names, numbers, nodePorts := map[string]int{}, map[number]int{}, map[number]int{}
	for i := range ports {
		p, field := &ports[i], fmt.Sprintf("spec.ports[%d]", i)
		if p.Name != "" {
			c.format(field+".name", p.Name, validation.IsDNS1123Label)
			if first, ok := names[p.Name]; ok {
				c.reject(field+".name", "%.63q is the name of spec.ports[%d] too", p.Name, first)
			} else {
				names[p.Name] = i
			}
		} else if len(ports) > 1 {
			c.reject(field+".name", "required where there are several ports")
		}
		c.portNumber(field+".port", p.Port)
		oneOf(c, field+".protocol", p.Protocol, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP)
		if p.TargetPort.Type == intstr.Int {
			if p.TargetPort.IntVal != p.Port { // A default has the fault of its source, which is reported.
				c.portNumber(field+".targetPort", p.TargetPort.IntVal)
			}
		} else {
			c.format(field+".targetPort", p.TargetPort.StrVal, validation.IsValidPortName)
		}
		if first, ok := numbers[number{p.Protocol, p.Port}]; ok {
			c.reject(field+".port", "%d/%.10s is the port of spec.ports[%d] too", p.Port, p.Protocol, first)
		} else {
			numbers[number{p.Protocol, p.Port}] = i
		}
		if p.NodePort == 0 {
			continue
		}
		switch first, ok := nodePorts[number{p.Protocol, p.NodePort}]; {
		case ok:
			c.reject(field+".nodePort", "%d/%.10s is the node port of spec.ports[%d] too", p.NodePort, p.Protocol, first)
		case svc.Spec.Type == v1.ServiceTypeClusterIP:
			c.reject(field+".nodePort", "may not be set where spec.type is ClusterIP")
		default:
			c.portNumber(field+".nodePort", p.NodePort)
		}
		nodePorts[number{p.Protocol, p.NodePort}] = i
	}
}

func checkClusterIPs(svc *v1.Service, c *checker) {
	spec := &svc.Spec
	if spec.Type == v1.ServiceTypeExternalName {
		return
	}
	if len(spec.ClusterIPs) > 0 && spec.ClusterIPs[0] != spec.ClusterIP {
		c.reject("spec.clusterIPs", "the first value must be that of spec.clusterIP, %.60q", spec.ClusterIP)
	}
	if headless(svc) {
		if len(spec.ClusterIPs) > 1 {
			c.reject("spec.clusterIPs", "None must be the only value")
		}
		if spec.Type != v1.ServiceTypeClusterIP {
			c.reject("spec.clusterIP", "may not be None where spec.type is %s", spec.Type)
		}
	}
	seen := map[v1.IPFamily]bool{}
	for i, f := range spec.IPFamilies {
		oneOf(c, fmt.Sprintf("spec.ipFamilies[%d]", i), f, v1.IPv4Protocol, v1.IPv6Protocol)
		if seen[f] {
			c.reject(fmt.Sprintf("spec.ipFamilies[%d]", i), "%s is given twice", f)
		}
		seen[f] = true
	}
	if p := spec.IPFamilyPolicy; p != nil {
		oneOf(c, "spec.ipFamilyPolicy", *p, v1.IPFamilyPolicySingleStack, v1.IPFamilyPolicyPreferDualStack,
			v1.IPFamilyPolicyRequireDualStack)
	}
	if headless(svc) {
		return
	}
	if len(spec.ClusterIPs) > 2 {
		c.reject("spec.clusterIPs", "at most one address a family")
	}
	used := map[v1.IPFamily]bool{}
	for i, text := range spec.ClusterIPs {
		field := fmt.Sprintf("spec.clusterIPs[%d]", i)
		if i == 0 {
			field = "spec.clusterIP"
		}
		ip, ok := c.ip(field, text)
		if !ok {
			continue
		}
		if what := source.SpecialAddress(ip); what != "" && !ip.IsLinkLocalUnicast() {
			c.reject(field, "%s is %s; a cluster IP may not be", ip, what)
		}
		family := familyOf(ip)
		if used[family] {
			c.reject(field, "a second %s address", family)
		}
		used[family] = true
		if i < len(spec.IPFamilies) && spec.IPFamilies[i] != family {
			c.reject(field, "%s is not an %s address, which spec.ipFamilies[%d] asks for", ip, spec.IPFamilies[i], i)
		}
	}
	if single := spec.IPFamilyPolicy == nil || *spec.IPFamilyPolicy == v1.IPFamilyPolicySingleStack; single &&
		(len(spec.ClusterIPs) == 2 || len(spec.IPFamilies) == 2) {
		c.reject("spec.ipFamilyPolicy", "must be PreferDualStack or RequireDualStack where two families are asked for")
	}
}

func checkExternalName(svc *v1.Service, c *checker) {
	if svc.Spec.Type != v1.ServiceTypeExternalName {
		return
	}
	if svc.Spec.ClusterIP != "" && !headless(svc) || len(svc.Spec.ClusterIPs) > 0 {
		c.reject("spec.clusterIP", "may not be set where spec.type is ExternalName")
	}
	if svc.Spec.ExternalName == "" {
		c.reject("spec.externalName", "required where spec.type is ExternalName")
	} else {
		c.format("spec.externalName", strings.TrimSuffix(svc.Spec.ExternalName, "."), validation.IsDNS1123Subdomain)
	}
}

// maxAffinity is the maximum of sessionAffinityConfig.clientIP.timeoutSeconds, a day.
const maxAffinity = 86400

func checkAffinity(spec *v1.ServiceSpec, c *checker) {
	oneOf(c, "spec.sessionAffinity", spec.SessionAffinity, v1.ServiceAffinityNone, v1.ServiceAffinityClientIP)
	if spec.SessionAffinity == v1.ServiceAffinityClientIP {
		if t := *spec.SessionAffinityConfig.ClientIP.TimeoutSeconds; t < 1 || t > maxAffinity {
			c.reject("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not within 1-%d", t, maxAffinity)
		}
	}
}

func checkPolicies(svc *v1.Service, c *checker) {
	spec := &svc.Spec
	if reachableFromOutside(svc) {
		oneOf(c, "spec.externalTrafficPolicy", spec.ExternalTrafficPolicy, v1.ServiceExternalTrafficPolicyCluster,
			v1.ServiceExternalTrafficPolicyLocal)
	} else if spec.ExternalTrafficPolicy != "" {
		c.reject("spec.externalTrafficPolicy", "may be set only where the Service is reached from outside: spec.type NodePort or "+
			"LoadBalancer, or external IPs")
	}
	if p := spec.InternalTrafficPolicy; p != nil {
		oneOf(c, "spec.internalTrafficPolicy", *p, v1.ServiceInternalTrafficPolicyCluster, v1.ServiceInternalTrafficPolicyLocal)
	}
	if d := spec.TrafficDistribution; d != nil {
		oneOf(c, "spec.trafficDistribution", *d, v1.ServiceTrafficDistributionPreferClose,
			v1.ServiceTrafficDistributionPreferSameZone, v1.ServiceTrafficDistributionPreferSameNode)
	}
	if spec.HealthCheckNodePort != 0 {
		if !needsHealthCheck(svc) {
			c.reject("spec.healthCheckNodePort", "may be set only where spec.type is LoadBalancer and "+
				"spec.externalTrafficPolicy is Local")
		} else {
			c.portNumber("spec.healthCheckNodePort", spec.HealthCheckNodePort)
		}
	}
}

func checkLoadBalancer(svc *v1.Service, c *checker) {
	spec := &svc.Spec
	balanced := spec.Type == v1.ServiceTypeLoadBalancer
	if len(spec.LoadBalancerSourceRanges) > 0 && !balanced {
		c.reject("spec.loadBalancerSourceRanges", "may be set only where spec.type is LoadBalancer")
	}
	for i, text := range spec.LoadBalancerSourceRanges {
		if _, _, err := utilnet.ParseCIDRSloppy(strings.TrimSpace(text)); err != nil {
			c.reject(fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i), "%.60q is not a CIDR", text)
		}
	}
	if spec.AllocateLoadBalancerNodePorts != nil && !balanced {
		c.reject("spec.allocateLoadBalancerNodePorts", "may be set only where spec.type is LoadBalancer")
	}
	if spec.LoadBalancerClass != nil && !balanced {
		c.reject("spec.loadBalancerClass", "may be set only where spec.type is LoadBalancer")
	}
	if len(svc.Status.LoadBalancer.Ingress) > 0 && !balanced {
		c.reject("status.loadBalancer.ingress", "may be set only where spec.type is LoadBalancer")
	}
	for i, in := range svc.Status.LoadBalancer.Ingress {
		field := fmt.Sprintf("status.loadBalancer.ingress[%d]", i)
		if in.IP != "" {
			ip, ok := c.ip(field+".ip", in.IP)
			if ok && (ip.IsUnspecified() || ip.IsLoopback() || ip.IsMulticast()) {
				c.reject(field+".ip", "%s is %s; a load balancer can't have it", ip, source.SpecialAddress(ip))
			}
			if in.IPMode != nil {
				oneOf(c, field+".ipMode", *in.IPMode, v1.LoadBalancerIPModeVIP, v1.LoadBalancerIPModeProxy)
			}
		} else if in.IPMode != nil {
			c.reject(field+".ipMode", "may not be set without ip")
		}
		if in.Hostname != "" {
			c.format(field+".hostname", in.Hostname, validation.IsDNS1123Subdomain)
		}
	}
}
