package proxier

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/net"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// portSpec is what a Service asks for one of its ports in one family: a ServicePort before its frontends and endpoints are known.
type portSpec struct {
	key          plan.Key
	wants        []plan.Frontend // in order, each address and port once
	sourceRanges []netip.Prefix  // canonical
	affinity     time.Duration
	scheduler    plan.Scheduler
	internal     plan.Policy
	external     plan.Policy
	resetTCP     bool
	critical     bool
	healthCheck  bool // whether the Service has a health check node port
}

// defaultAffinity is the API's default for sessionAffinityConfig.clientIP.timeoutSeconds.
const defaultAffinity = time.Duration(v1.DefaultClientIPServiceAffinitySeconds) * time.Second

// readService turns a Service into a portSpec for each port and family. Fields that can't be used are left out and reported; the
// rest of the Service works.
func readService(svc *v1.Service, settings *plan.Settings, families []plan.Family) ([]portSpec, []source.Finding) {
	f := &source.Findings{Object: "Service " + svc.Namespace + "/" + svc.Name}
	if settings.IgnoreExternalIPs && len(svc.Spec.ExternalIPs) > 0 {
		f.Problem("spec.externalIPs", "these addresses are not proxied", "feature gate AllowServiceExternalIPs is false")
		without := *svc
		without.Spec.ExternalIPs = nil
		svc = &without
	}
	field, why := source.NotProxied(svc)
	if why == "" && svc.Spec.ClusterIP == "" && len(svc.Spec.ClusterIPs) == 0 {
		field, why = "spec.clusterIP", "it has no cluster IP yet"
	}
	if why != "" {
		f.Note(field, source.NotForProxy, "%s", why)
		return nil, f.List
	}
	if !safeText(svc.Namespace) || !safeText(svc.Name) {
		f.Problem("metadata", "the Service is not proxied", "namespace %.80q or name %.80q is not a valid object name",
			svc.Namespace, svc.Name)
		return nil, f.List
	}
	addrs := readAddresses(svc, f)
	ports := readPorts(svc, f)
	scheduler := readScheduler(svc, f)
	resetTCP := readResetTCP(svc, settings.ResetTCP, f)
	specs := make([]portSpec, 0, len(addrs.cluster)*len(ports))
	for _, family := range families {
		if !addrs.cluster[family].IsValid() {
			continue // The Service does not exist in this family.
		}
		for i, port := range ports {
			specs = append(specs, portSpec{
				key: plan.Key{
					Service: plan.Service{Namespace: svc.Namespace, Name: svc.Name},
					Port:    port.Name, Protocol: plan.Protocol(port.Protocol), Family: family,
				},
				internal:     internalPolicy(svc),
				external:     externalPolicy(svc),
				sourceRanges: addrs.sourceRanges[family],
				affinity:     affinity(svc),
				scheduler:    scheduler,
				resetTCP:     resetTCP && port.Protocol == v1.ProtocolTCP,
				critical:     critical(svc),
				healthCheck:  hasHealthCheck(svc),
				wants:        frontends(svc, addrs, port, family, i == 0),
			})
		}
	}
	return specs, f.List
}

// addresses are the addresses of a Service by family.
type addresses struct {
	cluster      map[plan.Family]netip.Addr
	external     []netip.Addr
	loadBalancer []netip.Addr
	sourceRanges map[plan.Family][]netip.Prefix
	// unlimited are the families without any source range, be it one that can't be read or one of all addresses.
	unlimited map[plan.Family]bool
}

func readAddresses(svc *v1.Service, f *source.Findings) addresses {
	out := addresses{cluster: map[plan.Family]netip.Addr{}}
	usable := func(field, text, effect string, linkLocal bool) (netip.Addr, bool) {
		ip, ok := source.ParseIP(text)
		what := source.SpecialAddress(ip)
		if !ok {
			f.Problem(field, effect, "%.80q is not an IP address", text)
		} else if ok = what == "" || linkLocal && ip.IsLinkLocalUnicast(); !ok {
			f.Problem(field, effect, "%s is %s", ip, what)
		}
		return ip, ok
	}
	clusterIPs := svc.Spec.ClusterIPs
	if len(clusterIPs) == 0 {
		clusterIPs = []string{svc.Spec.ClusterIP}
	}
	for i, text := range clusterIPs {
		// No API server allocates addresses of a special kind. From an untrusted one, they would capture the node's own traffic.
		ip, ok := usable(fmt.Sprintf("spec.clusterIPs[%d]", i), text, "the Service is not proxied at it", true)
		if family := plan.FamilyOf(ip); ok && !out.cluster[family].IsValid() {
			out.cluster[family] = ip
		}
	}
	for i, text := range svc.Spec.ExternalIPs {
		if ip, ok := usable(fmt.Sprintf("spec.externalIPs[%d]", i), text, "this external IP is not proxied", false); ok {
			out.external = append(out.external, ip)
		}
	}
	for i, ingress := range svc.Status.LoadBalancer.Ingress {
		if ingress.IP == "" || ingress.IPMode != nil && *ingress.IPMode == v1.LoadBalancerIPModeProxy {
			continue // A host name, or a load balancer that must see every packet itself (KEP-1860).
		}
		ip, ok := source.ParseIP(ingress.IP)
		if !ok || ip.IsUnspecified() || ip.IsMulticast() || ip.IsLoopback() {
			f.Problem(fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i), "this load balancer IP is not proxied",
				"%.80q is not an address that a load balancer can have", ingress.IP)
			continue
		}
		out.loadBalancer = append(out.loadBalancer, ip)
	}
	out.readSourceRanges(svc, f)
	out.otherFamily(svc, f)
	return out
}

// otherFamily reports addresses of a family in which the Service has no cluster IP, and so no rules, and those that no source range is for.
func (a *addresses) otherFamily(svc *v1.Service, f *source.Findings) {
	const why = "%s is an %s address, and the Service has no cluster IP of that family"
	lacks := func(ip netip.Addr) bool { return len(a.cluster) > 0 && !a.cluster[plan.FamilyOf(ip)].IsValid() }
	for i, text := range svc.Spec.ExternalIPs {
		if ip, ok := source.ParseIP(text); ok && lacks(ip) {
			f.Problem(fmt.Sprintf("spec.externalIPs[%d]", i), "this external IP is not proxied", why, ip, plan.FamilyOf(ip))
		}
	}
	for i, ingress := range svc.Status.LoadBalancer.Ingress {
		if ip, ok := source.ParseIP(ingress.IP); ok && slices.Contains(a.loadBalancer, ip) && lacks(ip) {
			f.Note(fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i), "this load balancer IP is not proxied", why, ip, plan.FamilyOf(ip))
		}
	}
	if len(svc.Spec.LoadBalancerSourceRanges) == 0 {
		return
	}
	for _, family := range plan.Families {
		of := func(ip netip.Addr) bool { return plan.FamilyOf(ip) == family && !lacks(ip) }
		if a.unlimited[family] && slices.ContainsFunc(a.loadBalancer, of) {
			f.Problem("spec.loadBalancerSourceRanges", "everybody may reach the load balancer IPs of that family; add a range of it", "no range is of %s", family)
		}
	}
}

// readSourceRanges reads loadBalancerSourceRanges. Ranges that make up all addresses of a family lift the limit for that family. A range
// that can't be read admits no source. If it is the only range of its family, whichever that was meant to be, leaving it out would
// admit every source; so a range without usable sources replaces it.
func (a *addresses) readSourceRanges(svc *v1.Service, f *source.Findings) {
	if len(svc.Spec.LoadBalancerSourceRanges) == 0 {
		return
	}
	a.sourceRanges = map[plan.Family][]netip.Prefix{}
	bad := map[plan.Family]bool{} // the families that an unreadable range may have been meant for
	for i, text := range svc.Spec.LoadBalancerSourceRanges {
		cidr, ok := parseCIDR(strings.TrimSpace(text))
		if !ok {
			f.Problem(fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i), "this range admits nobody",
				"%.80q is not a CIDR", text)
			bad[plan.IPv4] = bad[plan.IPv4] || !strings.Contains(text, ":")
			bad[plan.IPv6] = bad[plan.IPv6] || !strings.Contains(text, ".")
			continue
		}
		family := plan.FamilyOf(cidr.Addr())
		a.sourceRanges[family] = append(a.sourceRanges[family], cidr)
	}
	unread := len(bad) > 0 && len(a.sourceRanges) == 0
	a.unlimited = map[plan.Family]bool{}
	for _, family := range plan.Families {
		switch ranges := plan.Canonical(a.sourceRanges[family]); {
		case len(ranges) == 0 && (bad[family] || unread):
			nobody := netip.PrefixFrom(family.All().Addr(), family.Bits())
			a.sourceRanges[family] = []netip.Prefix{nobody}
		case len(ranges) == 0:
			a.unlimited[family] = true
		case ranges[0].Bits() == 0:
			delete(a.sourceRanges, family)
		default:
			a.sourceRanges[family] = ranges
		}
	}
}

// readPorts returns the usable ports of a Service in order of name and protocol, with the protocol filled in.
func readPorts(svc *v1.Service, f *source.Findings) []v1.ServicePort {
	type id struct {
		name     string
		protocol v1.Protocol
	}
	seen := map[id]bool{}
	var out []v1.ServicePort
	for i, port := range svc.Spec.Ports {
		field := fmt.Sprintf("spec.ports[%d]", i)
		port.Protocol = cmp.Or(port.Protocol, v1.ProtocolTCP)
		switch {
		case port.Port < 1 || port.Port > 65535:
			f.Problem(field+".port", "this port is not proxied", "%d is not within 1-65535", port.Port)
		case port.NodePort < 0 || port.NodePort > 65535:
			f.Problem(field+".nodePort", "this port is not proxied", "%d is not within 1-65535", port.NodePort)
		case port.Protocol != v1.ProtocolTCP && port.Protocol != v1.ProtocolUDP && port.Protocol != v1.ProtocolSCTP:
			f.Problem(field+".protocol", "this port is not proxied", "%.80q is not one of TCP, UDP, SCTP", port.Protocol)
		case port.Name != "" && !safeText(port.Name):
			f.Problem(field+".name", "this port is not proxied", "%.80q is not a valid port name", port.Name)
		case seen[id{port.Name, port.Protocol}]:
			f.Problem(field, "the first of them is proxied", "a second port of name %q and protocol %s", port.Name, port.Protocol)
		default:
			seen[id{port.Name, port.Protocol}] = true
			out = append(out, port)
		}
	}
	slices.SortFunc(out, func(a, b v1.ServicePort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol))
	})
	return out
}

// frontends returns the frontends of a port of a Service in one family. The health check node port belongs to the Service as a
// whole; its first port carries it.
func frontends(svc *v1.Service, addrs addresses, port v1.ServicePort, family plan.Family, first bool) []plan.Frontend {
	protocol := plan.Protocol(port.Protocol)
	out := []plan.Frontend{{Kind: plan.ClusterIP, Addr: addrs.cluster[family], Protocol: protocol, Port: uint16(port.Port)}}
	add := func(kind plan.FrontendKind, ips []netip.Addr) {
		for _, ip := range ips {
			if plan.FamilyOf(ip) == family {
				out = append(out, plan.Frontend{Kind: kind, Addr: ip, Protocol: protocol, Port: uint16(port.Port)})
			}
		}
	}
	add(plan.LoadBalancerIP, addrs.loadBalancer)
	add(plan.ExternalIP, addrs.external)
	if port.NodePort != 0 {
		out = append(out, plan.Frontend{Kind: plan.NodePort, Protocol: protocol, Port: uint16(port.NodePort)})
	}
	if first && hasHealthCheck(svc) {
		out = append(out, plan.Frontend{Kind: plan.HealthCheckNodePort, Protocol: plan.TCP, Port: uint16(svc.Spec.HealthCheckNodePort)})
	}
	if len(out) == 1 {
		return out
	}
	slices.SortFunc(out, plan.Frontend.Compare)
	// An address listed twice, even as two kinds, is one frontend: of the kind that takes precedence.
	seen := make(map[claim]struct{}, len(out))
	return slices.Clip(slices.DeleteFunc(out, func(fe plan.Frontend) bool {
		before := len(seen)
		seen[claimOf(fe, family)] = struct{}{}
		return len(seen) == before
	}))
}

// hasHealthCheck reports whether load balancers can ask for a Service's endpoints on this node.
func hasHealthCheck(svc *v1.Service) bool {
	hc := svc.Spec.HealthCheckNodePort
	return hc > 0 && hc <= 65535 && svc.Spec.Type == v1.ServiceTypeLoadBalancer && externalPolicy(svc) == plan.Local
}

func internalPolicy(svc *v1.Service) plan.Policy {
	if p := svc.Spec.InternalTrafficPolicy; p != nil && *p == v1.ServiceInternalTrafficPolicyLocal {
		return plan.Local
	}
	return plan.Cluster
}

// externalPolicy returns the external policy. It is Cluster, whatever the field says, for a Service that is not reachable from
// outside.
func externalPolicy(svc *v1.Service) plan.Policy {
	reachable := svc.Spec.Type == v1.ServiceTypeLoadBalancer || svc.Spec.Type == v1.ServiceTypeNodePort ||
		len(svc.Spec.ExternalIPs) > 0
	if reachable && svc.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		return plan.Local
	}
	return plan.Cluster
}

func affinity(svc *v1.Service) time.Duration {
	if svc.Spec.SessionAffinity != v1.ServiceAffinityClientIP {
		return 0
	}
	if c := svc.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil &&
		*c.ClientIP.TimeoutSeconds > 0 {
		return time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
	}
	return defaultAffinity
}

// readResetTCP returns whether a Service wants connections to removed endpoints to be reset: its own choice, or else that of the settings.
func readResetTCP(svc *v1.Service, otherwise bool, f *source.Findings) bool {
	text, given := svc.Annotations[source.AnnotationResetTCP]
	switch {
	case !given:
		return otherwise
	case text == "true" || text == "false":
		return text == "true"
	}
	f.Problem(annotationField(source.AnnotationResetTCP), "it is ignored", "%.80q is neither true nor false", text)
	return otherwise
}

// critical reports whether a node needs a Service before it can do anything else: the API server's own Service and cluster DNS, by
// the label that every installer sets.
func critical(svc *v1.Service) bool {
	switch svc.Namespace {
	case "default":
		return svc.Name == "kubernetes"
	case "kube-system":
		return svc.Labels["k8s-app"] == "kube-dns" || svc.Name == "kube-dns" || svc.Name == "coredns"
	}
	return false
}

// parseCIDR reads a range as leniently as source.ParseIP, and masks it.
func parseCIDR(text string) (netip.Prefix, bool) {
	_, cidr, err := net.ParseCIDRSloppy(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	ip, _ := netip.AddrFromSlice(cidr.IP)
	bits, _ := cidr.Mask.Size()
	return plan.Unmapped(netip.PrefixFrom(ip, bits))
}

// safeText reports whether a name has only characters of Kubernetes names. Names appear in rule comments, so a name with anything
// else, wherever it comes from, must stay out of the rules.
func safeText(name string) bool {
	if name == "" || len(name) > 63 {
		return false
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '.' && c != '_' {
			return false
		}
	}
	return true
}
