package inspect

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
)

// byName is about Services that clients reach by DNS alone: headless ones and those of type ExternalName.
func (c *diagnosis) byName() {
	switch {
	case c.d.ExternalName != "":
		c.externalName()
	case c.d.Headless && len(c.d.Selector) > 0:
		c.headless()
	}
}

// externalName is about what a Service is an alias for.
func (c *diagnosis) externalName() {
	name := c.d.ExternalName
	if _, err := netip.ParseAddr(name); err == nil {
		c.add(problem, NotAName, "make it a Service of type ClusterIP without a selector, and list the address in an EndpointSlice",
			"spec.externalName is an IP address: DNS answers with %q as a name, which no client can resolve.", name)
		return
	}
	if c.d.AliasShort {
		c.add(problem, NotAName, fmt.Sprintf("set spec.externalName to %s.%s.svc.cluster.local, with the domain of your cluster", c.d.Alias.Name, c.d.Alias.Namespace),
			"spec.externalName %q is taken as a full name, and there is no such name: search lists of Pods complete what a program asks for, but not what DNS answers with. Service %s seems to be meant.", name, c.d.Alias)
		return
	}
	if c.d.Alias.Name != "" && !c.d.AliasKnown {
		c.add(note, NotAName, "see whether that Service exists, or correct spec.externalName",
			"spec.externalName %q is the name of Service %s, which is not known here: there is none, or it is headless, another proxy's, or refused.", name, c.d.Alias)
	}
	if len(c.d.Ports) > 0 || len(c.d.Selector) > 0 {
		c.add(note, PortsByName, "", "spec.ports and spec.selector have no effect: clients get the other name, and use whatever port they like.")
	}
}

// headless is about a headless Service with a selector: DNS gives clients the addresses of the Pods that are ready.
func (c *diagnosis) headless() {
	for _, p := range c.d.Ports {
		if isNumber(p.Target) && fmt.Sprint(p.Number) != p.Target {
			c.add(note, PortsByName, fmt.Sprintf("have clients use port %s, or set spec.ports[].port to it", p.Target),
				"Port %d/%s is %s at the Pods, and nothing translates it: clients get the addresses of the Pods from DNS, and at port %[1]d nothing answers unless the Pods listen there, too.",
				p.Number, p.Protocol, p.Target)
		}
	}
	here, _, known := c.podsOf()
	_, others := c.unusedEndpoints()
	if !known || len(here) >= mostPods || len(c.d.Slices)+len(others) > 0 { // There are endpoints of other origin, or may be.
		return
	}
	var match, unready []string
	ending := false
	for _, p := range selected(c.d.Selector, here) {
		switch {
		case withoutEndpoint(p) != "":
			continue
		case p.DeletionTimestamp != nil:
			ending = true
			continue
		case !has(p, v1.PodReady, v1.ConditionTrue):
			unready = append(unready, p.Name)
		}
		match = append(match, p.Name)
	}
	switch {
	case len(match) == 0 && ending && c.d.PublishNotReady:
	case len(match) == 0 && ending:
		c.add(problem, NoneReady, "wait for new Pods, or find out why there are none: "+c.pods("-o wide"),
			"All Pods that the selector %s matches are terminating, so the name of the Service has no addresses in DNS.", selector(c.d.Selector))
	case len(match) == 0:
		c.noPods(nil)
	case len(unready) == 0 || c.d.PublishNotReady:
	case len(unready) == len(match):
		c.add(problem, NoneReady, c.findUnready(unready), "No Pod that the selector %s matches is ready, so the name of the Service has no addresses in DNS: %s.", selector(c.d.Selector), some(unready))
	default:
		c.add(note, SomeEndpointsDown, c.pods("-o wide"), "Not ready, and so without an address in DNS, %s %d of %d Pods: %s.", are(len(unready)), len(unready), len(match), some(unready))
	}
}
