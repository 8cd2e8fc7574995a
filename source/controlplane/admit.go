package controlplane

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	utilnet "k8s.io/utils/net"

	"nodeproxy/source"
)

// Admit does what the API server does before it stores a new object, which must be of a type that Type.New returns: it sets
// defaults and validates. A rejected object must not be added to a Cluster. The caller completes the findings: they lack the place
// and the object, and those that reject the object lack the effect.
//
// Of what the API server would refuse, only that is refused here which the allocation and the slices rely on, or which would send
// traffic elsewhere than its author means, such as a misspelt policy. What makes no difference to a proxy is accepted.
func Admit(obj any) (findings []source.Finding, refused bool) {
	c := &checker{}
	switch obj := obj.(type) {
	case *v1.Service:
		c.meta(&obj.ObjectMeta, v1.NamespaceDefault, validation.IsDNS1035Label)
		setServiceDefaults(obj)
		c.service(obj)
	case *discovery.EndpointSlice:
		c.meta(&obj.ObjectMeta, v1.NamespaceDefault, validation.IsDNS1123Subdomain)
		c.slice(obj)
	case *legacyEndpoints:
		c.meta(&obj.ObjectMeta, v1.NamespaceDefault, validation.IsDNS1123Subdomain)
		c.endpoints(obj)
	case *v1.Pod:
		c.meta(&obj.ObjectMeta, v1.NamespaceDefault, validation.IsDNS1123Subdomain)
		c.pod(obj)
	case *v1.Node:
		c.meta(&obj.ObjectMeta, "", validation.IsDNS1123Subdomain)
	case *networking.ServiceCIDR:
		c.meta(&obj.ObjectMeta, "", validation.IsDNS1123Subdomain)
		c.serviceCIDR(obj)
	default:
		panic(fmt.Sprintf("%T is not used by a Cluster", obj))
	}
	return c.List, c.refused
}

// checker collects the findings of one object.
type checker struct {
	source.Findings
	effect  string // of a fault because of which the object can't be used
	refused bool
}

// reject reports a fault because of which the object can't be used.
func (c *checker) reject(field, format string, args ...any) {
	c.refused = true
	c.Problem(field, c.effect, format, args...)
}

// require refuses the object unless a rule holds.
func (c *checker) require(holds bool, field, format string, args ...any) {
	if !holds {
		c.reject(field, format, args...)
	}
}

// meta checks an object's name, namespace, labels and annotations. nameRule validates names of its kind; one without a namespace gets
// that of its kind, which is "" for objects of the cluster.
func (c *checker) meta(meta *metav1.ObjectMeta, namespace string, nameRule func(string) []string) {
	switch {
	case meta.Name == "" && meta.GenerateName != "":
		c.reject("metadata.name", "required; generateName is not expanded here")
	case meta.Name == "":
		c.reject("metadata.name", "required")
	default:
		c.format("metadata.name", meta.Name, nameRule)
	}
	if namespace == "" {
		meta.Namespace = ""
	} else {
		meta.Namespace = cmp.Or(meta.Namespace, namespace)
		c.format("metadata.namespace", meta.Namespace, validation.IsDNS1123Label)
	}
	const effect = "an API server would refuse the object; here it is used"
	for i, values := range []map[string]string{meta.Labels, meta.Annotations} {
		for _, key := range slices.Sorted(maps.Keys(values)) {
			field := []string{"metadata.labels", "metadata.annotations"}[i]
			if printable(key) {
				field += "[" + key + "]"
			}
			if len(validation.IsQualifiedName(strings.ToLower(key))) > 0 {
				c.Note(field, effect, "%.80q is not a valid key, which is a name of at most 63 letters, digits, '-', '_' or '.', after a "+
					"DNS domain and one '/' if any", key)
			}
			if msgs := validation.IsValidLabelValue(values[key]); i == 0 && len(msgs) > 0 {
				c.Note(field, effect, "%.80q is not a valid label value: %s", values[key], msgs[0])
			}
		}
	}
}

func printable(s string) bool {
	return len(s) < 200 && !strings.ContainsFunc(s, func(r rune) bool { return r < 0x21 || r > 0x7e })
}

// format refuses a value that breaks a rule about its format.
func (c *checker) format(field, value string, rule func(string) []string) {
	if msgs := rule(value); len(msgs) > 0 {
		msg, _, _ := strings.Cut(msgs[0], " (e.g.") // An example and a regular expression follow.
		if len(value) > 60 {
			value = fmt.Sprintf("%s… (%d characters)", value[:40], len(value))
		}
		c.reject(field, "%q: %s", value, msg)
	}
}

// oneOf refuses a value that is not one of those given.
func oneOf[T ~string](c *checker, field string, value T, allowed ...T) {
	if !slices.Contains(allowed, value) {
		c.reject(field, "%.40q is not one of %s", value, strings.Trim(strings.ReplaceAll(fmt.Sprint(allowed), " ", ", "), "[]"))
	}
}

// optional is oneOf for a field that may be left out.
func optional[T ~string](c *checker, field string, value *T, allowed ...T) {
	if value != nil {
		oneOf(c, field, *value, allowed...)
	}
}

// protocol refuses an unknown protocol, and returns that of a port, which need not name one.
func (c *checker) protocol(field string, p v1.Protocol) v1.Protocol {
	p = cmp.Or(p, v1.ProtocolTCP)
	oneOf(c, field+".protocol", p, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP)
	return p
}

// portNumber refuses a number that is not a port.
func (c *checker) portNumber(field string, n int32) {
	c.require(n >= 1 && n <= 65535, field, "%d is not within 1-65535", n)
}

// ip refuses text that is not an address, or one of a special kind, for which there is a reason.
func (c *checker) ip(field, text string, linkLocal bool, reason string) (netip.Addr, bool) {
	ip, ok := source.ParseIP(text)
	if what := source.SpecialAddress(ip); !ok {
		c.reject(field, "%.60q is not an IP address", text)
	} else if what != "" && !(linkLocal && ip.IsLinkLocalUnicast()) {
		c.reject(field, "%s is %s, which %s", ip, what, reason)
	}
	return ip, ok
}

// endpointIP refuses an address that can't be reached or that would lead back to the node itself.
func (c *checker) endpointIP(field, text string) (netip.Addr, bool) {
	return c.ip(field, text, false, "neither an endpoint nor an external IP may be")
}

// virtualIP refuses an address that is none of a Service. A link-local one may be.
func (c *checker) virtualIP(field, text string) (netip.Addr, bool) {
	return c.ip(field, text, true, "a Service can't have")
}

// first refuses a second field with a value.
func first[K comparable](c *checker, seen map[K]string, key K, field, format string, args ...any) {
	if before, twice := seen[key]; twice {
		c.reject(field, format+" of %s too", append(args, before)...)
		return
	}
	seen[key], _, _ = strings.Cut(field, "].")
	seen[key] += "]"
}

func (c *checker) service(svc *v1.Service) {
	spec := &svc.Spec
	oneOf(c, "spec.type", spec.Type, v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer,
		v1.ServiceTypeExternalName)
	c.servicePorts(svc)
	if spec.Type != v1.ServiceTypeExternalName {
		c.clusterIPs(svc)
	}
	oneOf(c, "spec.sessionAffinity", spec.SessionAffinity, v1.ServiceAffinityNone, v1.ServiceAffinityClientIP)
	if spec.SessionAffinity == v1.ServiceAffinityClientIP {
		const day = 86400
		t := *spec.SessionAffinityConfig.ClientIP.TimeoutSeconds
		c.require(t >= 1 && t <= day, "spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not within 1-%d", t, day)
	}
	if reachableFromOutside(svc) {
		oneOf(c, "spec.externalTrafficPolicy", spec.ExternalTrafficPolicy, v1.ServiceExternalTrafficPolicyCluster,
			v1.ServiceExternalTrafficPolicyLocal)
	} else {
		c.require(spec.ExternalTrafficPolicy == "", "spec.externalTrafficPolicy", "may be set only where the Service is reached "+
			"from outside: spec.type NodePort or LoadBalancer, or external IPs")
	}
	optional(c, "spec.internalTrafficPolicy", spec.InternalTrafficPolicy, v1.ServiceInternalTrafficPolicyCluster,
		v1.ServiceInternalTrafficPolicyLocal)
	optional(c, "spec.trafficDistribution", spec.TrafficDistribution, v1.ServiceTrafficDistributionPreferClose,
		v1.ServiceTrafficDistributionPreferSameZone, v1.ServiceTrafficDistributionPreferSameNode)
	c.require(spec.HealthCheckNodePort == 0 || needsHealthCheck(svc), "spec.healthCheckNodePort",
		"may be set only where spec.type is LoadBalancer and spec.externalTrafficPolicy is Local")
	for i, ip := range spec.ExternalIPs {
		c.endpointIP(fmt.Sprintf("spec.externalIPs[%d]", i), ip)
	}
	c.require(len(spec.LoadBalancerSourceRanges) == 0 || spec.Type == v1.ServiceTypeLoadBalancer,
		"spec.loadBalancerSourceRanges", "may be set only where spec.type is LoadBalancer")
	for i, text := range spec.LoadBalancerSourceRanges {
		_, _, err := utilnet.ParseCIDRSloppy(strings.TrimSpace(text))
		c.require(err == nil, fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i), "%.60q is not a CIDR", text)
	}
	for i, in := range svc.Status.LoadBalancer.Ingress {
		field := fmt.Sprintf("status.loadBalancer.ingress[%d]", i)
		if in.IP != "" {
			c.virtualIP(field+".ip", in.IP)
		}
		optional(c, field+".ipMode", in.IPMode, v1.LoadBalancerIPModeVIP, v1.LoadBalancerIPModeProxy)
	}
}

func headless(svc *v1.Service) bool { return svc.Spec.ClusterIP == v1.ClusterIPNone }

func (c *checker) servicePorts(svc *v1.Service) {
	ports := svc.Spec.Ports
	c.require(len(ports) > 0 || !allocatable(svc), "spec.ports", "required: a Service of this type needs at least one port")
	names, numbers, nodePorts := map[string]string{}, map[portClaim]string{}, map[portClaim]string{}
	for i := range ports {
		p, field := &ports[i], fmt.Sprintf("spec.ports[%d]", i)
		if p.Name != "" {
			c.format(field+".name", p.Name, validation.IsDNS1123Label)
			first(c, names, p.Name, field+".name", "%.63q is the name", p.Name)
		} else {
			c.require(len(ports) == 1, field+".name", "required where there are several ports")
		}
		c.portNumber(field+".port", p.Port)
		c.protocol(field, p.Protocol)
		if p.TargetPort.Type == intstr.String {
			c.format(field+".targetPort", p.TargetPort.StrVal, validation.IsValidPortName)
		} else if p.TargetPort.IntVal != p.Port { // A default has the fault of its source, which is reported.
			c.portNumber(field+".targetPort", p.TargetPort.IntVal)
		}
		first(c, numbers, portClaim{p.Protocol, p.Port}, field+".port", "%d/%.10s is the port", p.Port, p.Protocol)
		if p.NodePort == 0 {
			continue
		}
		first(c, nodePorts, portClaim{p.Protocol, p.NodePort}, field+".nodePort", "%d/%.10s is the node port", p.NodePort, p.Protocol)
		c.require(svc.Spec.Type != v1.ServiceTypeClusterIP, field+".nodePort", "may not be set where spec.type is ClusterIP")
	}
}

func (c *checker) clusterIPs(svc *v1.Service) {
	spec := &svc.Spec
	c.require(len(spec.ClusterIPs) == 0 || spec.ClusterIPs[0] == spec.ClusterIP,
		"spec.clusterIPs", "the first value must be that of spec.clusterIP, %.60q", spec.ClusterIP)
	optional(c, "spec.ipFamilyPolicy", spec.IPFamilyPolicy, v1.IPFamilyPolicySingleStack, v1.IPFamilyPolicyPreferDualStack,
		v1.IPFamilyPolicyRequireDualStack)
	for i, f := range spec.IPFamilies {
		field := fmt.Sprintf("spec.ipFamilies[%d]", i)
		oneOf(c, field, f, v1.IPv4Protocol, v1.IPv6Protocol)
		c.require(!slices.Contains(spec.IPFamilies[:i], f), field, "%s is given twice", f)
	}
	if headless(svc) {
		c.require(len(spec.ClusterIPs) == 1, "spec.clusterIPs", "None must be the only value")
		c.require(spec.Type == v1.ServiceTypeClusterIP, "spec.clusterIP", "may not be None where spec.type is %s", spec.Type)
		return
	}
	used := map[v1.IPFamily]bool{}
	for i, text := range spec.ClusterIPs {
		field := clusterIPField(i)
		ip, ok := c.virtualIP(field, text)
		if family := familyOf(ip); ok && used[family] {
			c.reject(field, "a second %s address", family)
		} else if ok && i < len(spec.IPFamilies) && spec.IPFamilies[i] != family {
			c.reject(field, "%s is not an %s address, which spec.ipFamilies[%d] asks for", ip, spec.IPFamilies[i], i)
		}
		used[familyOf(ip)] = ok
	}
	c.require(*spec.IPFamilyPolicy != v1.IPFamilyPolicySingleStack || len(spec.ClusterIPs) != 2 && len(spec.IPFamilies) != 2,
		"spec.ipFamilyPolicy", "must be PreferDualStack or RequireDualStack where two families are asked for")
}

// clusterIPField returns the field that names the i-th cluster IP.
func clusterIPField(i int) string {
	if i == 0 {
		return "spec.clusterIP"
	}
	return fmt.Sprintf("spec.clusterIPs[%d]", i)
}

func (c *checker) slice(es *discovery.EndpointSlice) {
	if es.AddressType == "" {
		c.reject("addressType", "required: IPv4, IPv6 or FQDN")
		return
	}
	oneOf(c, "addressType", es.AddressType, discovery.AddressTypeIPv4, discovery.AddressTypeIPv6, discovery.AddressTypeFQDN)
	names := map[string]string{}
	for i := range es.Ports {
		p, field := &es.Ports[i], fmt.Sprintf("ports[%d]", i)
		p.Name, p.Protocol = cmp.Or(p.Name, new("")), cmp.Or(p.Protocol, new(v1.ProtocolTCP))
		first(c, names, *p.Name, field+".name", "%.63q is the name", *p.Name)
		c.protocol(field, *p.Protocol)
		if p.Port != nil {
			c.portNumber(field+".port", *p.Port)
		}
	}
	if es.AddressType == discovery.AddressTypeFQDN {
		c.Note("addressType", source.NotForProxy, "a proxy can't forward to names")
		return
	}
	for i, e := range es.Endpoints {
		field := fmt.Sprintf("endpoints[%d].addresses", i)
		c.require(len(e.Addresses) > 0, field, "0 addresses; an endpoint has at least one")
		for j, text := range e.Addresses {
			at := fmt.Sprintf("%s[%d]", field, j)
			ip, ok := c.endpointIP(at, text)
			c.require(!ok || string(familyOf(ip)) == string(es.AddressType), at, "%s is not an %s address, which addressType asks for", ip, es.AddressType)
		}
	}
}

func (c *checker) endpoints(ep *legacyEndpoints) {
	for i := range ep.Subsets {
		s, field := &ep.Subsets[i], fmt.Sprintf("subsets[%d]", i)
		for j, a := range s.Addresses {
			c.endpointIP(fmt.Sprintf("%s.addresses[%d].ip", field, j), a.IP)
		}
		for j, a := range s.NotReadyAddresses {
			c.endpointIP(fmt.Sprintf("%s.notReadyAddresses[%d].ip", field, j), a.IP)
		}
		for j := range s.Ports {
			p, at := &s.Ports[j], fmt.Sprintf("%s.ports[%d]", field, j)
			c.require(p.Name != "" || len(s.Ports) == 1, at+".name", "required where there are several ports")
			c.portNumber(at+".port", p.Port)
			p.Protocol = c.protocol(at, p.Protocol)
		}
	}
}

func (c *checker) pod(pod *v1.Pod) {
	if ip := pod.Status.PodIP; ip != "" && !slices.Contains(pod.Status.PodIPs, v1.PodIP{IP: ip}) {
		pod.Status.PodIPs = append([]v1.PodIP{{IP: ip}}, pod.Status.PodIPs...)
	}
	for i, ip := range pod.Status.PodIPs {
		field := fmt.Sprintf("status.podIPs[%d].ip", i)
		if i == 0 && ip.IP == pod.Status.PodIP {
			field = "status.podIP"
		}
		c.endpointIP(field, ip.IP)
	}
	for k, containers := range [][]v1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		field := []string{"spec.containers", "spec.initContainers"}[k]
		for i := range containers {
			for j := range containers[i].Ports {
				p, at := &containers[i].Ports[j], fmt.Sprintf("%s[%d].ports[%d]", field, i, j)
				c.portNumber(at+".containerPort", p.ContainerPort)
				p.Protocol = c.protocol(at, p.Protocol)
			}
		}
	}
	const effect = "it is not an endpoint of any Service"
	switch {
	case c.refused:
	case podFinished(pod):
		c.Note("status.phase", effect, "the Pod has ended (%s)", pod.Status.Phase)
	case len(pod.Status.PodIPs) == 0:
		c.Note("status", effect, "the Pod has no status.podIP; nothing here runs it and gives it one")
	case pod.Spec.NodeName == "":
		c.Note("spec", effect+", but of those that publish not-ready addresses", "the Pod has no spec.nodeName: it runs nowhere")
	}
}

func podFinished(pod *v1.Pod) bool {
	return pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
}

func (c *checker) serviceCIDR(s *networking.ServiceCIDR) {
	n := len(s.Spec.CIDRs)
	c.require(n == 1 || n == 2, "spec.cidrs", "%d ranges; a ServiceCIDR has one, or one of each family", n)
	seen := map[v1.IPFamily]bool{}
	for i, text := range s.Spec.CIDRs {
		field := fmt.Sprintf("spec.cidrs[%d]", i)
		// Unlike older fields, this one is parsed strictly.
		cidr, err := netip.ParsePrefix(text)
		switch family := familyOf(cidr.Addr()); {
		case err != nil || cidr.Addr().Is4In6():
			c.reject(field, "%.60q is not a CIDR", text)
		case cidr != cidr.Masked():
			c.reject(field, "%s has host bits set; the range is %s", text, cidr.Masked())
		case seen[family]:
			c.reject(field, "%s is the second range of its family", text)
		default:
			seen[family] = true
		}
	}
}
