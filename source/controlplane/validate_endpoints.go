package controlplane

import (
	"fmt"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The maximum numbers that the API server accepts.
const (
	maxSliceEndpoints = 1000
	maxSlicePorts     = 20000
	maxAddresses      = 100
	maxHints          = 8
)

func checkSlice(es *discovery.EndpointSlice, c *checker) {
	checkMeta(&es.ObjectMeta, true, validation.IsDNS1123Subdomain, c)
	if es.AddressType == "" {
		c.reject("addressType", "required: IPv4, IPv6 or FQDN")
	} else {
		oneOf(c, "addressType", es.AddressType, discovery.AddressTypeIPv4, discovery.AddressTypeIPv6, discovery.AddressTypeFQDN)
	}
	if len(es.Ports) > maxSlicePorts || len(es.Endpoints) > maxSliceEndpoints {
		c.reject("endpoints", "%d endpoints and %d ports; a slice holds at most %d and %d", len(es.Endpoints), len(es.Ports),
			maxSliceEndpoints, maxSlicePorts)
		return
	}
	names := map[string]int{}
	for i, p := range es.Ports {
		field := fmt.Sprintf("ports[%d]", i)
		if *p.Name != "" {
			c.format(field+".name", *p.Name, validation.IsDNS1123Label)
		}
		if first, ok := names[*p.Name]; ok {
			c.reject(field+".name", "%.63q is the name of ports[%d] too", *p.Name, first)
		} else {
			names[*p.Name] = i
		}
		oneOf(c, field+".protocol", *p.Protocol, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP)
		if p.Port != nil {
			c.portNumber(field+".port", *p.Port)
		}
	}
	for i := range es.Endpoints {
		checkEndpoint(&es.Endpoints[i], es.AddressType, fmt.Sprintf("endpoints[%d]", i), c)
	}
	if es.AddressType == discovery.AddressTypeFQDN && !c.refused {
		c.note("addressType", "not proxied", "a proxy can't forward to names")
	}
}

func checkEndpoint(e *discovery.Endpoint, kind discovery.AddressType, field string, c *checker) {
	if len(e.Addresses) == 0 || len(e.Addresses) > maxAddresses {
		c.reject(field+".addresses", "%d addresses; an endpoint has 1 to %d", len(e.Addresses), maxAddresses)
	}
	for i, text := range e.Addresses {
		at := fmt.Sprintf("%s.addresses[%d]", field, i)
		if kind == discovery.AddressTypeFQDN {
			c.format(at, text, validation.IsDNS1123Subdomain)
			continue
		}
		if ip, ok := c.endpointIP(at, text); ok && string(familyOf(ip)) != string(kind) &&
			(kind == discovery.AddressTypeIPv4 || kind == discovery.AddressTypeIPv6) {
			c.reject(at, "%s is not an %s address, which addressType asks for", ip, kind)
		}
	}
	if e.NodeName != nil {
		c.format(field+".nodeName", *e.NodeName, validation.IsDNS1123Subdomain)
	}
	if e.Zone != nil {
		c.format(field+".zone", *e.Zone, validation.IsValidLabelValue)
	}
	if e.Hostname != nil {
		c.format(field+".hostname", *e.Hostname, validation.IsDNS1123Label)
	}
	if e.Hints == nil {
		return
	}
	if len(e.Hints.ForZones) > maxHints || len(e.Hints.ForNodes) > maxHints {
		c.reject(field+".hints", "at most %d hints", maxHints)
		return
	}
	for i, z := range e.Hints.ForZones {
		c.format(fmt.Sprintf("%s.hints.forZones[%d].name", field, i), z.Name, validation.IsValidLabelValue)
	}
	for i, n := range e.Hints.ForNodes {
		c.format(fmt.Sprintf("%s.hints.forNodes[%d].name", field, i), n.Name, validation.IsDNS1123Subdomain)
	}
}

func checkEndpoints(ep *legacyEndpoints, c *checker) {
	checkMeta(&ep.ObjectMeta, true, validation.IsDNS1123Subdomain, c)
	for i := range ep.Subsets {
		s, field := &ep.Subsets[i], fmt.Sprintf("subsets[%d]", i)
		if len(s.Addresses)+len(s.NotReadyAddresses) == 0 {
			c.reject(field, "must have addresses or notReadyAddresses")
		}
		checkEndpointAddresses(s.Addresses, field+".addresses", c)
		checkEndpointAddresses(s.NotReadyAddresses, field+".notReadyAddresses", c)
		for j, p := range s.Ports {
			at := fmt.Sprintf("%s.ports[%d]", field, j)
			if p.Name != "" {
				c.format(at+".name", p.Name, validation.IsDNS1123Label)
			} else if len(s.Ports) > 1 {
				c.reject(at+".name", "required where there are several ports")
			}
			c.portNumber(at+".port", p.Port)
			oneOf(c, at+".protocol", p.Protocol, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP)
		}
	}
}

func checkEndpointAddresses(list []v1.EndpointAddress, field string, c *checker) {
	for i, a := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		c.endpointIP(at+".ip", a.IP)
		if a.Hostname != "" {
			c.format(at+".hostname", a.Hostname, validation.IsDNS1123Label)
		}
		if a.NodeName != nil {
			c.format(at+".nodeName", *a.NodeName, validation.IsDNS1123Subdomain)
		}
	}
}

func checkPod(pod *v1.Pod, c *checker) {
	checkMeta(&pod.ObjectMeta, true, validation.IsDNS1123Subdomain, c)
	if pod.Spec.NodeName != "" {
		c.format("spec.nodeName", pod.Spec.NodeName, validation.IsDNS1123Subdomain)
	}
	for i, ip := range pod.Status.PodIPs {
		field := fmt.Sprintf("status.podIPs[%d].ip", i)
		if i == 0 && ip.IP == pod.Status.PodIP {
			field = "status.podIP"
		}
		c.endpointIP(field, ip.IP)
	}
	for _, group := range []struct {
		field      string
		containers []v1.Container
	}{{"spec.containers", pod.Spec.Containers}, {"spec.initContainers", pod.Spec.InitContainers}} {
		for i := range group.containers {
			for j, p := range group.containers[i].Ports {
				at := fmt.Sprintf("%s[%d].ports[%d]", group.field, i, j)
				c.portNumber(at+".containerPort", p.ContainerPort)
				oneOf(c, at+".protocol", p.Protocol, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP)
				if p.Name != "" {
					c.format(at+".name", p.Name, validation.IsValidPortName)
				}
			}
		}
	}
	if c.refused {
		return
	}
	const effect = "it is not an endpoint of any Service"
	switch {
	case podFinished(pod):
		c.note("status.phase", effect, "the Pod has ended (%s)", pod.Status.Phase)
	case len(pod.Status.PodIPs) == 0:
		c.note("status", effect, "the Pod has no status.podIP; nothing here runs it and gives it one")
	case pod.Spec.NodeName == "":
		c.note("spec", effect+", but of those that publish not-ready addresses", "the Pod has no spec.nodeName: it runs nowhere")
	}
}

func podFinished(pod *v1.Pod) bool {
	return pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
}

func checkNode(node *v1.Node, c *checker) {
	checkMeta(&node.ObjectMeta, false, validation.IsDNS1123Subdomain, c)
}
