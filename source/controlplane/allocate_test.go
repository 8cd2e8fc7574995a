package controlplane

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/plan"
)

func find(t *testing.T, services map[types.NamespacedName]*v1.Service, name string) *v1.Service {
	t.Helper()
	svc := services[nameOf("default", name)]
	if svc == nil {
		t.Fatalf("there is no Service %s", name)
	}
	return svc
}

func TestBands(t *testing.T) {
	t.Parallel()
	for cidr, want := range map[string][3]string{ // size, first of the upper band, last address
		"10.96.0.0/16":       {"65534", "10.96.1.1", "10.96.255.254"},
		"10.96.0.0/24":       {"254", "10.96.0.17", "10.96.0.254"},
		"10.96.0.0/26":       {"62", "10.96.0.17", "10.96.0.62"},
		"10.96.0.0/28":       {"14", "10.96.0.1", "10.96.0.14"},
		"10.96.0.0/12":       {"1048574", "10.96.1.1", "10.111.255.254"},
		"fd00:10:96::/112":   {"65535", "fd00:10:96::101", "fd00:10:96::ffff"},
		"fd00:10:96:1::/120": {"255", "fd00:10:96:1::11", "fd00:10:96:1::ff"},
	} {
		p, prefix := addressPool(netip.MustParsePrefix(cidr)), netip.MustParsePrefix(cidr)
		got := [3]string{fmt.Sprint(p.size), address(prefix, p.lower).String(), address(prefix, p.size-1).String()}
		if got != want {
			t.Errorf("%s: %v, want %v", cidr, got, want)
		}
	}
	for r, want := range map[plan.PortRange]uint64{
		{First: 30000, Last: 32767}: 86, {First: 30000, Last: 30015}: 0, {First: 30000, Last: 30016}: 16, {First: 1, Last: 65535}: 128,
	} {
		if p := portPool(r); p.lower != want {
			t.Errorf("%v: the lower band has %d ports, want %d", r, p.lower, want)
		}
	}
}

func TestAllocationUsesUpperBandFirst(t *testing.T) {
	t.Parallel()
	small := func(r *Ranges) {
		r.ServiceCIDRs = prefixes("10.96.0.0/26")               // 16 lower, 46 upper
		r.NodePorts = plan.PortRange{First: 30000, Last: 30031} // 16 lower, 16 upper
	}
	count := func(n int) (upperIPs, upperPorts, lowerIPs, lowerPorts int, f findings) {
		b, f := load(t, names("web", n, "type: NodePort", "ports: [{port: 80}]"), small)
		seen := map[string]bool{}
		for _, svc := range b.Services {
			ip := netip.MustParseAddr(svc.Spec.ClusterIP)
			if port := fmt.Sprint(svc.Spec.Ports[0].NodePort); seen[port] || seen[svc.Spec.ClusterIP] {
				t.Errorf("%s or %s is given twice", ip, port)
			} else {
				seen[port], seen[svc.Spec.ClusterIP] = true, true
			}
			if ip.As4()[3] > 16 {
				upperIPs++
			} else {
				lowerIPs++
			}
			if svc.Spec.Ports[0].NodePort >= 30016 {
				upperPorts++
			} else {
				lowerPorts++
			}
		}
		return upperIPs, upperPorts, lowerIPs, lowerPorts, f
	}
	if a, b, c, d, _ := count(16); a != 16 || b != 16 || c != 0 || d != 0 {
		t.Errorf("16 Services: %d %d in the upper bands, %d %d in the lower", a, b, c, d)
	}
	if a, b, c, d, _ := count(20); a != 20 || b != 16 || c != 0 || d != 4 {
		t.Errorf("20 Services: %d %d in the upper bands, %d %d in the lower", a, b, c, d)
	}
	a, b, c, d, f := count(33)
	if a+c != 32 || b != 16 || d != 16 {
		t.Errorf("33 Services: %d %d in the upper bands, %d %d in the lower", a, b, c, d)
	}
	if !strings.Contains(f.String(), "spec.ports: no node port is left in the range 30000-30031; the Service is not proxied") {
		t.Error(f)
	}
}

func TestExplicitClaims(t *testing.T) {
	t.Parallel()
	b, f := load(t, service("b", "type: NodePort", "clusterIP: 10.96.0.10", "ports: [{port: 80, nodePort: 30100}]")+"---\n"+
		service("a", "clusterIP: 10.96.0.10", "ports: [{port: 80}]")+"---\n"+
		service("c", "type: NodePort", "clusterIP: 10.96.0.11", "ports: [{port: 80, nodePort: 30100}]")+"---\n"+
		service("d", "type: NodePort", "clusterIP: 10.96.0.12", "ports: [{port: 80, protocol: UDP, nodePort: 30100}]")+"---\n"+
		service("e", "type: NodePort", "clusterIP: 10.96.0.13", "ports: [{port: 80, nodePort: 30100}]"))
	same(t, "objects", describe(b), `
svc default/a ClusterIP 10.96.0.10 :80/TCP->80
svc default/c NodePort 10.96.0.11 :80/TCP->80@30100
svc default/d NodePort 10.96.0.12 :80/UDP->80@30100
svc default/e NodePort 10.96.0.13 :80/TCP->80`)
	for _, want := range []string{
		"Service default/b: spec.clusterIP: 10.96.0.10 is the cluster IP of Service default/a, which comes first by name; the Service is not proxied",
		"Service default/e: spec.ports[0].nodePort: 30100/TCP is a node port of Service default/c, which comes first by name; this node port is not proxied",
		"Service default/c: spec.ports: Service default/e names 30100/TCP, too; it does not get this node port, as it comes later by name",
	} {
		if !strings.Contains(f.String(), want) {
			t.Errorf("want %s\ngot %s", want, f)
		}
	}
}

func TestNodePorts(t *testing.T) {
	t.Parallel()
	b, _ := load(t, service("both", "type: NodePort", "ports:", "- {name: t, port: 53}", "- {name: u, port: 53, protocol: UDP}", "- {name: x, port: 54}")+
		"---\n"+service("one", "type: NodePort", "ports:", "- {name: t, port: 53, nodePort: 30053}", "- {name: u, port: 53, protocol: UDP}")+
		"---\n"+service("none", "type: LoadBalancer", "allocateLoadBalancerNodePorts: false", "ports:", "- {name: t, port: 53}", "- {name: u, port: 54, nodePort: 30054}")+
		"---\n"+service("health", "type: LoadBalancer", "externalTrafficPolicy: Local", "ports: [{port: 80}]")+
		"---\n"+service("chosen", "type: LoadBalancer", "externalTrafficPolicy: Local", "healthCheckNodePort: 30055", "ports: [{port: 80}]"))
	both, one, none := find(t, b.Services, "both").Spec.Ports, find(t, b.Services, "one").Spec.Ports, find(t, b.Services, "none").Spec.Ports
	if both[0].NodePort == 0 || both[0].NodePort != both[1].NodePort || both[2].NodePort == both[0].NodePort || both[2].NodePort == 0 {
		t.Errorf("both: %v", both)
	}
	if one[0].NodePort != 30053 || one[1].NodePort != 30053 {
		t.Errorf("one: %v", one)
	}
	if none[0].NodePort != 0 || none[1].NodePort != 30054 {
		t.Errorf("none: %v", none)
	}
	if h := find(t, b.Services, "health").Spec; h.HealthCheckNodePort < 30086 || h.HealthCheckNodePort == h.Ports[0].NodePort {
		t.Errorf("health: %d", h.HealthCheckNodePort)
	}
	if h := find(t, b.Services, "chosen").Spec.HealthCheckNodePort; h != 30055 {
		t.Errorf("chosen: %d", h)
	}
}

func TestFamilies(t *testing.T) {
	t.Parallel()
	dual := func(r *Ranges) { r.ServiceCIDRs = prefixes("10.96.0.0/16", "fd00:10:96::/112") }
	b, f := load(t, service("default", "ports: [{port: 80}]")+
		"---\n"+service("prefer", "ipFamilyPolicy: PreferDualStack", "ports: [{port: 80}]")+
		"---\n"+service("require", "ipFamilyPolicy: RequireDualStack", "ipFamilies: [IPv6]", "ports: [{port: 80}]")+
		"---\n"+service("six", "ipFamilies: [IPv6]", "ports: [{port: 80}]")+
		"---\n"+service("given", "ipFamilyPolicy: PreferDualStack", "clusterIP: fd00:10:96::9", "ports: [{port: 80}]"), dual)
	v4, v6 := netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")
	for name, want := range map[string][]netip.Prefix{
		"default": {v4}, "prefer": {v4, v6}, "require": {v6, v4}, "six": {v6}, "given": {v6, v4},
	} {
		spec := find(t, b.Services, name).Spec
		if len(spec.ClusterIPs) != len(want) || len(spec.IPFamilies) != len(want) || spec.ClusterIP != spec.ClusterIPs[0] {
			t.Errorf("%s: %v %v\n%s", name, spec.ClusterIPs, spec.IPFamilies, f)
			continue
		}
		for i, cidr := range want {
			if ip := netip.MustParseAddr(spec.ClusterIPs[i]); !cidr.Contains(ip) || spec.IPFamilies[i] != familyOf(ip) {
				t.Errorf("%s: %s is not within %s", name, ip, cidr)
			}
		}
	}
	single, _ := load(t, service("prefer", "ipFamilyPolicy: PreferDualStack", "ports: [{port: 80}]"))
	if ips := find(t, single.Services, "prefer").Spec.ClusterIPs; len(ips) != 1 {
		t.Errorf("single stack: %v", ips)
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	b, _ := load(t, service("web", "sessionAffinity: ClientIP", "ports: [{port: 80}]")+
		"---\n"+service("lb", "type: LoadBalancer", "ports: [{port: 80}]")+"status: {loadBalancer: {ingress: [{ip: 1.2.3.4}]}}\n")
	spec := find(t, b.Services, "web").Spec
	if spec.Type != v1.ServiceTypeClusterIP || spec.Ports[0].Protocol != v1.ProtocolTCP || spec.Ports[0].TargetPort.IntVal != 80 ||
		*spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != 10800 || *spec.InternalTrafficPolicy != v1.ServiceInternalTrafficPolicyCluster ||
		*spec.IPFamilyPolicy != v1.IPFamilyPolicySingleStack || spec.ExternalTrafficPolicy != "" {
		t.Errorf("%+v", spec)
	}
	lb := find(t, b.Services, "lb")
	if lb.Spec.ExternalTrafficPolicy != v1.ServiceExternalTrafficPolicyCluster || !*lb.Spec.AllocateLoadBalancerNodePorts ||
		*lb.Status.LoadBalancer.Ingress[0].IPMode != v1.LoadBalancerIPModeVIP {
		t.Errorf("%+v", lb)
	}
}
