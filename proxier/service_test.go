package proxier

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// makeService makes ns/a with cluster IP 10.96.0.1 and the unnamed port 80, and changes it.
func makeService(changes ...func(*v1.Service)) *v1.Service {
	svc := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"},
		Spec: v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, ClusterIP: "10.96.0.1",
			Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
	}
	for _, change := range changes {
		change(svc)
	}
	return svc
}

func clusterIPs(ips ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = ips[0], ips }
}

func ofType(t v1.ServiceType) func(*v1.Service) { return func(s *v1.Service) { s.Spec.Type = t } }

func externalIPs(ips ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.ExternalIPs = ips }
}

func ports(list ...v1.ServicePort) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.Ports = list }
}

// ingress sets the load balancer's entries, each "IP", "IP MODE" or a host name that begins with a letter.
func ingress(entries ...string) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		for _, e := range entries {
			ip, mode, hasMode := strings.Cut(e, " ")
			i := v1.LoadBalancerIngress{IP: ip}
			if ip != "" && ip[0] >= 'a' && !strings.Contains(ip, ":") {
				i = v1.LoadBalancerIngress{Hostname: ip}
			}
			if hasMode {
				i.IPMode = new(v1.LoadBalancerIPMode(mode))
			}
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, i)
		}
	}
}

func sourceRanges(ranges ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = ranges }
}

func externalLocal(s *v1.Service) {
	s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
}

// said is what was found, as a user reads it.
func said(list []source.Finding) []string {
	var out []string
	for _, f := range list {
		out = append(out, f.Severity.String()+": "+f.String())
	}
	return out
}

// wants is what a Service asks for: "key frontend, frontend", a line for each ServicePort.
func wants(specs []portSpec) []string {
	var out []string
	for _, s := range specs {
		var list []string
		for _, f := range s.wants {
			list = append(list, f.String())
		}
		out = append(out, s.key.String()+" "+strings.Join(list, ", "))
	}
	return out
}

func TestReadServiceFrontends(t *testing.T) {
	t.Parallel()
	nodePort := func(n int32) v1.ServicePort { return v1.ServicePort{Port: 80, NodePort: n} }
	badIngress := func(i int, text string) string {
		return fmt.Sprintf("problem: Service ns/a: status.loadBalancer.ingress[%d].ip: %q is not an address that a load balancer "+
			"can have; this load balancer IP is not proxied", i, text)
	}
	for _, tc := range []struct {
		name  string
		svc   *v1.Service
		wants []string
		said  []string
	}{
		{name: "a cluster IP", svc: makeService(), wants: []string{"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}},
		{name: "dual stack", svc: makeService(clusterIPs("fd00::1", "10.96.0.1")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP", "ns/a/TCP/IPv6 cluster IP [fd00::1]:80/TCP"}},
		{name: "IPv6 alone", svc: makeService(clusterIPs("fd00::1")), wants: []string{
			"ns/a/TCP/IPv6 cluster IP [fd00::1]:80/TCP"}},
		{name: "two cluster IPs of one family", svc: makeService(clusterIPs("10.96.0.1", "10.96.0.2")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}},
		{name: "leading zeros are decimal", svc: makeService(clusterIPs("010.096.000.001")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}},
		{name: "an IPv4-mapped address is IPv4", svc: makeService(clusterIPs("::ffff:10.96.0.1")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}},
		{name: "a cluster IP that is none", svc: makeService(clusterIPs("10.96.0.999")), said: []string{
			`problem: Service ns/a: spec.clusterIPs[0]: "10.96.0.999" is not an IP address; the Service is not proxied at it`}},
		{name: "one bad of two", svc: makeService(clusterIPs("x", "fd00::1")), wants: []string{
			"ns/a/TCP/IPv6 cluster IP [fd00::1]:80/TCP"}, said: []string{
			`problem: Service ns/a: spec.clusterIPs[0]: "x" is not an IP address; the Service is not proxied at it`}},
		{name: "several ports, in order of name and protocol", svc: makeService(ports(
			v1.ServicePort{Name: "b", Port: 53, Protocol: "UDP"}, v1.ServicePort{Name: "b", Port: 53, Protocol: "TCP"},
			v1.ServicePort{Name: "a", Port: 132, Protocol: "SCTP"})), wants: []string{
			"ns/a:a/SCTP/IPv4 cluster IP 10.96.0.1:132/SCTP",
			"ns/a:b/TCP/IPv4 cluster IP 10.96.0.1:53/TCP",
			"ns/a:b/UDP/IPv4 cluster IP 10.96.0.1:53/UDP"}},
		{name: "no protocol is TCP", svc: makeService(ports(v1.ServicePort{Port: 80})), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}},
		{name: "a node port, in each family", svc: makeService(clusterIPs("10.96.0.1", "fd00::1"), ofType("NodePort"),
			ports(nodePort(30080))), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP, node port 30080/TCP",
			"ns/a/TCP/IPv6 cluster IP [fd00::1]:80/TCP, node port 30080/TCP"}},
		{name: "external IPs go to their family", svc: makeService(externalIPs("192.0.2.1", "2001:db8::1")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP, external IP 192.0.2.1:80/TCP"}, said: []string{
			"problem: Service ns/a: spec.externalIPs[1]: 2001:db8::1 is an IPv6 address, and the Service has no cluster IP of that family; this external IP is not proxied"}},
		{name: "source ranges of the other family alone", svc: makeService(ingress("192.0.2.1"), sourceRanges("2001:db8::/32")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP, load balancer IP 192.0.2.1:80/TCP"}, said: []string{
			"problem: Service ns/a: spec.loadBalancerSourceRanges: no range is of IPv4; everybody may reach the load balancer IPs of that family; add a range of it"}},
		{name: "a load balancer IP of the other family", svc: makeService(ingress("2001:db8::1"), sourceRanges("::/0")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}, said: []string{
			"note: Service ns/a: status.loadBalancer.ingress[0].ip: 2001:db8::1 is an IPv6 address, and the Service has no cluster IP of that family; this load balancer IP is not proxied"}},
		{name: "cluster IPs that can't be", svc: makeService(clusterIPs("127.0.0.1", "ff02::1", "0.0.0.0", "10.96.0.1")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}, said: []string{
			"problem: Service ns/a: spec.clusterIPs[0]: 127.0.0.1 is a loopback address; the Service is not proxied at it",
			"problem: Service ns/a: spec.clusterIPs[1]: ff02::1 is a multicast address; the Service is not proxied at it",
			"problem: Service ns/a: spec.clusterIPs[2]: 0.0.0.0 is the unspecified address; the Service is not proxied at it"}},
		{name: "external IPs that can't be", svc: makeService(externalIPs("127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.0.1", "x",
			"192.0.2.1")), wants: []string{"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP, external IP 192.0.2.1:80/TCP"},
			said: []string{
				"problem: Service ns/a: spec.externalIPs[0]: 127.0.0.1 is a loopback address; this external IP is not proxied",
				"problem: Service ns/a: spec.externalIPs[1]: 0.0.0.0 is the unspecified address; this external IP is not proxied",
				"problem: Service ns/a: spec.externalIPs[2]: 224.0.0.1 is a multicast address; this external IP is not proxied",
				"problem: Service ns/a: spec.externalIPs[3]: 169.254.0.1 is a link-local address; this external IP is not proxied",
				`problem: Service ns/a: spec.externalIPs[4]: "x" is not an IP address; this external IP is not proxied`}},
		{name: "load balancer IPs by mode; host names are none", svc: makeService(ingress("192.0.2.1", "192.0.2.2 VIP",
			"192.0.2.3 Proxy", "lb.example.com")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP, load balancer IP 192.0.2.1:80/TCP, load balancer IP 192.0.2.2:80/TCP"}},
		{name: "load balancer IPs that can't be", svc: makeService(ingress("127.0.0.1", "0.0.0.0", "10.0.0.300")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}, said: []string{
			badIngress(0, "127.0.0.1"),
			badIngress(1, "0.0.0.0"),
			badIngress(2, "10.0.0.300")}},
		{name: "one address as two kinds is of the better one", svc: makeService(ingress("192.0.2.1"),
			externalIPs("192.0.2.1", "192.0.2.1", "10.96.0.1")), wants: []string{
			"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP, load balancer IP 192.0.2.1:80/TCP"}},
		{name: "two ports of one number stay two frontends of their protocols", svc: makeService(externalIPs("192.0.2.1"), ports(
			v1.ServicePort{Name: "t", Port: 53}, v1.ServicePort{Name: "u", Port: 53, Protocol: "UDP"})), wants: []string{
			"ns/a:t/TCP/IPv4 cluster IP 10.96.0.1:53/TCP, external IP 192.0.2.1:53/TCP",
			"ns/a:u/UDP/IPv4 cluster IP 10.96.0.1:53/UDP, external IP 192.0.2.1:53/UDP"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			specs, found := readService(tc.svc, &plan.Settings{}, plan.Families[:])
			if got := wants(specs); !slices.Equal(got, tc.wants) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.wants, "\n"))
			}
			if got := said(found); !slices.Equal(got, tc.said) {
				t.Errorf("said\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.said, "\n"))
			}
		})
	}
}

// TestReadServiceFamilies: what a Service asks for in a family that the node can't forward is left alone.
func TestReadServiceFamilies(t *testing.T) {
	t.Parallel()
	specs, found := readService(makeService(clusterIPs("10.96.0.1", "fd00::1"), externalIPs("2001:db8::1")), &plan.Settings{}, []plan.Family{plan.IPv4})
	if want := []string{"ns/a/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}; !slices.Equal(wants(specs), want) || len(found) > 0 {
		t.Errorf("got %q, said %q", wants(specs), said(found))
	}
}

// TestReadServiceNotProxied: what is none of a service proxy's business, and why.
func TestReadServiceNotProxied(t *testing.T) {
	t.Parallel()
	proxyName := func(name string) func(*v1.Service) {
		return func(s *v1.Service) { s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": name} }
	}
	for _, tc := range []struct {
		svc  *v1.Service
		want string
	}{
		{makeService(ofType("ExternalName")), "spec.type: an ExternalName Service is a DNS alias and has no address"},
		{makeService(clusterIPs("None")), "spec.clusterIP: a headless Service has no cluster IP; clients reach its endpoints directly"},
		{makeService(proxyName("mesh")), `metadata.labels[service.kubernetes.io/service-proxy-name]: the label gives the Service to the proxy "mesh"`},
		{makeService(proxyName("")), `metadata.labels[service.kubernetes.io/service-proxy-name]: the label gives the Service to the proxy ""`},
		{makeService(func(s *v1.Service) { s.Spec.ClusterIP = "" }), "spec.clusterIP: it has no cluster IP yet"},
	} {
		specs, found := readService(tc.svc, &plan.Settings{}, plan.Families[:])
		want := "note: Service ns/a: " + tc.want + "; not proxied"
		if len(specs) > 0 || !slices.Equal(said(found), []string{want}) {
			t.Errorf("got %q, said %q, want %q", wants(specs), said(found), want)
		}
	}
}

// TestReadServicePorts: a port that can't be used is reported, and the others work.
func TestReadServicePorts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		bad  v1.ServicePort
		want string
	}{
		{v1.ServicePort{Name: "x"}, "spec.ports[1].port: 0 is not within 1-65535; this port is not proxied"},
		{v1.ServicePort{Name: "x", Port: -1}, "spec.ports[1].port: -1 is not within 1-65535; this port is not proxied"},
		{v1.ServicePort{Name: "x", Port: 65616}, "spec.ports[1].port: 65616 is not within 1-65535; this port is not proxied"},
		{v1.ServicePort{Name: "x", Port: 1, NodePort: 65536},
			"spec.ports[1].nodePort: 65536 is not within 1-65535; this port is not proxied"},
		{v1.ServicePort{Name: "x", Port: 1, NodePort: -1},
			"spec.ports[1].nodePort: -1 is not within 1-65535; this port is not proxied"},
		{v1.ServicePort{Name: "x", Port: 1, Protocol: "ICMP"},
			`spec.ports[1].protocol: "ICMP" is not one of TCP, UDP, SCTP; this port is not proxied`},
		{v1.ServicePort{Name: "x", Port: 1, Protocol: "tcp"},
			`spec.ports[1].protocol: "tcp" is not one of TCP, UDP, SCTP; this port is not proxied`},
		{v1.ServicePort{Name: "x\n-A INPUT", Port: 1},
			`spec.ports[1].name: "x\n-A INPUT" is not a valid port name; this port is not proxied`},
		{v1.ServicePort{Name: `x" -j ACCEPT`, Port: 1},
			`spec.ports[1].name: "x\" -j ACCEPT" is not a valid port name; this port is not proxied`},
		{v1.ServicePort{Name: strings.Repeat("x", 64), Port: 1},
			`spec.ports[1].name: "` + strings.Repeat("x", 64) + `" is not a valid port name; this port is not proxied`},
		{v1.ServicePort{Name: "good", Port: 1},
			`spec.ports[1]: a second port of name "good" and protocol TCP; the first of them is proxied`},
	} {
		specs, found := readService(makeService(ports(v1.ServicePort{Name: "good", Port: 80}, tc.bad)), &plan.Settings{}, plan.Families[:])
		if got := wants(specs); !slices.Equal(got, []string{"ns/a:good/TCP/IPv4 cluster IP 10.96.0.1:80/TCP"}) {
			t.Errorf("%+v: got %q", tc.bad, got)
		}
		if got, want := said(found), "problem: Service ns/a: "+tc.want; !slices.Equal(got, []string{want}) {
			t.Errorf("said %q, want %q", got, want)
		}
	}
}

// TestReadServiceName: a name that no API server lets in gets into no rule.
func TestReadServiceName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a\n-A INPUT -j ACCEPT", `a" -j DROP`, "a b", "", strings.Repeat("a", 300), "ä", "a/b", "a:b",
		"$(id)", "a\x00"} {
		for _, field := range []func(*v1.Service){
			func(s *v1.Service) { s.Name = name },
			func(s *v1.Service) { s.Namespace = name },
		} {
			specs, found := readService(makeService(field), &plan.Settings{}, plan.Families[:])
			if len(specs) > 0 || len(found) != 1 || found[0].Field != "metadata" || found[0].Severity != source.Problem {
				t.Errorf("%q: got %q, said %q", name, wants(specs), said(found))
			}
		}
	}
}

func TestReadServiceSourceRanges(t *testing.T) {
	t.Parallel()
	bad := func(i int, text string) string {
		return fmt.Sprintf("problem: Service ns/a: spec.loadBalancerSourceRanges[%d]: %q is not a CIDR; this range admits nobody", i, text)
	}
	for _, tc := range []struct {
		ranges []string
		v4, v6 string
		said   []string
	}{
		{ranges: nil, v4: "[]", v6: "[]"},
		{ranges: []string{" 10.0.0.0/8\t", "192.168.1.7/16"}, v4: "[10.0.0.0/8 192.168.0.0/16]", v6: "[]"},
		{ranges: []string{"192.168.0.0/16", "10.0.0.0/8", "010.0.0.0/8"}, v4: "[10.0.0.0/8 192.168.0.0/16]", v6: "[]"},
		{ranges: []string{"10.0.0.0/8", "2001:db8::/32"}, v4: "[10.0.0.0/8]", v6: "[2001:db8::/32]"},
		{ranges: []string{"10.0.0.0/8", "0.0.0.0/0", "2001:db8::/32"}, v4: "[]", v6: "[2001:db8::/32]"},
		{ranges: []string{"0.0.0.0/0", "::/0"}, v4: "[]", v6: "[]"},
		{ranges: []string{"10.1.0.0/16", "10.0.0.0/16", "10.1.2.3/32"}, v4: "[10.0.0.0/15]", v6: "[]"},
		{ranges: []string{"128.0.0.0/1", "0.0.0.0/1", "2001:db8::1/128", "2001:db8::/128"}, v4: "[]", v6: "[2001:db8::/127]"},
		{ranges: []string{"10.0.0.0/8", "10.0.0.0/33"}, v4: "[10.0.0.0/8]", v6: "[]", said: []string{bad(1, "10.0.0.0/33")}},
		// Were the only range left out, everybody would be let in.
		{ranges: []string{"10.0.0.0"}, v4: "[0.0.0.0/32]", v6: "[::/128]", said: []string{bad(0, "10.0.0.0")}},
		{ranges: []string{"", "x"}, v4: "[0.0.0.0/32]", v6: "[::/128]", said: []string{bad(0, ""), bad(1, "x")}},
		// What can't be read closes the family that it may have been meant for, whatever the other one has.
		{ranges: []string{"x", "0.0.0.0/0"}, v4: "[]", v6: "[::/128]", said: []string{bad(0, "x")}},
		{ranges: []string{"10.0.0.0/33", "2001:db8::/32"}, v4: "[0.0.0.0/32]", v6: "[2001:db8::/32]", said: []string{bad(0, "10.0.0.0/33")}},
		// iptables knows no other spelling of a range of IPv4.
		{ranges: []string{"::ffff:10.0.0.0/104"}, v4: "[10.0.0.0/8]", v6: "[]"},
	} {
		specs, found := readService(makeService(clusterIPs("10.96.0.1", "fd00::1"), ingress("192.0.2.1"), sourceRanges(tc.ranges...)),
			&plan.Settings{}, plan.Families[:])
		v4, v6 := fmt.Sprint(specs[0].sourceRanges), fmt.Sprint(specs[1].sourceRanges)
		if v4 != tc.v4 || v6 != tc.v6 || !slices.Equal(said(found), tc.said) {
			t.Errorf("%q: got %s and %s, said %q; want %s and %s, %q", tc.ranges, v4, v6, said(found), tc.v4, tc.v6, tc.said)
		}
	}
}

func TestReadServicePolicies(t *testing.T) {
	t.Parallel()
	internalLocal := func(s *v1.Service) { s.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyLocal) }
	internalCluster := func(s *v1.Service) { s.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyCluster) }
	for _, tc := range []struct {
		name               string
		svc                *v1.Service
		internal, external plan.Policy
	}{
		{"neither is given", makeService(), plan.Cluster, plan.Cluster},
		{"internal Cluster", makeService(internalCluster), plan.Cluster, plan.Cluster},
		{"internal Local", makeService(internalLocal), plan.Local, plan.Cluster},
		{"external Local of a cluster IP is void", makeService(externalLocal), plan.Cluster, plan.Cluster},
		{"external Local of a node port", makeService(externalLocal, ofType("NodePort")), plan.Cluster, plan.Local},
		{"external Local of a load balancer", makeService(externalLocal, ofType("LoadBalancer")), plan.Cluster, plan.Local},
		{"external Local of an external IP", makeService(externalLocal, externalIPs("192.0.2.1")), plan.Cluster, plan.Local},
		{"both", makeService(externalLocal, internalLocal, ofType("NodePort")), plan.Local, plan.Local},
	} {
		specs, _ := readService(tc.svc, &plan.Settings{}, plan.Families[:])
		if specs[0].internal != tc.internal || specs[0].external != tc.external {
			t.Errorf("%s: internal %s, external %s", tc.name, specs[0].internal, specs[0].external)
		}
	}
}

func TestReadServiceAffinity(t *testing.T) {
	t.Parallel()
	clientIP := func(timeout *int32) func(*v1.Service) {
		return func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: timeout}}
		}
	}
	for _, tc := range []struct {
		svc  *v1.Service
		want string
	}{
		{makeService(), "0s"},
		{makeService(clientIP(new(int32(60))), func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityNone }), "0s"},
		{makeService(clientIP(new(int32(60)))), "1m0s"},
		{makeService(clientIP(nil)), "3h0m0s"},
		{makeService(clientIP(new(int32(0)))), "3h0m0s"},
		{makeService(clientIP(new(int32(-1)))), "3h0m0s"},
		{makeService(func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }), "3h0m0s"},
	} {
		if specs, _ := readService(tc.svc, &plan.Settings{}, plan.Families[:]); specs[0].affinity.String() != tc.want {
			t.Errorf("%+v: %s, want %s", tc.svc.Spec.SessionAffinityConfig, specs[0].affinity, tc.want)
		}
	}
}

// TestReadServiceHealthCheck: the health check node port is of a load balancer under policy Local, and of one port only.
func TestReadServiceHealthCheck(t *testing.T) {
	t.Parallel()
	const at32000 = "health check node port 32000/TCP"
	check := func(n int32) func(*v1.Service) { return func(s *v1.Service) { s.Spec.HealthCheckNodePort = n } }
	two := ports(v1.ServicePort{Name: "b", Port: 81}, v1.ServicePort{Name: "a", Port: 80, Protocol: "UDP"})
	for _, tc := range []struct {
		name string
		svc  *v1.Service
		want []string // the ports that have it, with the frontend
	}{
		{"load balancer, Local", makeService(check(32000), ofType("LoadBalancer"), externalLocal, two), []string{"ns/a:a/UDP/IPv4 " + at32000}},
		{"in each family", makeService(check(32000), ofType("LoadBalancer"), externalLocal, clusterIPs("10.96.0.1", "fd00::1")),
			[]string{"ns/a/TCP/IPv4 " + at32000, "ns/a/TCP/IPv6 " + at32000}},
		{"load balancer, Cluster", makeService(check(32000), ofType("LoadBalancer"), two), nil},
		{"node port, Local", makeService(check(32000), ofType("NodePort"), externalLocal), nil},
		{"none", makeService(ofType("LoadBalancer"), externalLocal), nil},
		{"too large", makeService(check(65536), ofType("LoadBalancer"), externalLocal), nil},
		{"negative", makeService(check(-1), ofType("LoadBalancer"), externalLocal), nil},
	} {
		specs, _ := readService(tc.svc, &plan.Settings{}, plan.Families[:])
		var got []string
		for _, s := range specs {
			for _, f := range s.wants {
				if f.Kind == plan.HealthCheckNodePort {
					got = append(got, s.key.String()+" "+f.String())
				}
			}
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// TestCritical: what a node needs before all else.
func TestCritical(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		namespace, name string
		labels          map[string]string
		want            bool
	}{
		{"default", "kubernetes", nil, true},
		{"other", "kubernetes", nil, false},
		{"kube-system", "kube-dns", nil, true},
		{"kube-system", "coredns", nil, true},
		{"kube-system", "dns", map[string]string{"k8s-app": "kube-dns"}, true},
		{"kube-system", "dns", nil, false},
		{"default", "dns", map[string]string{"k8s-app": "kube-dns"}, false},
	} {
		specs, _ := readService(makeService(func(s *v1.Service) {
			s.Namespace, s.Name, s.Labels = tc.namespace, tc.name, tc.labels
		}), &plan.Settings{}, plan.Families[:])
		if specs[0].critical != tc.want {
			t.Errorf("%s/%s %v: %v", tc.namespace, tc.name, tc.labels, specs[0].critical)
		}
	}
}
