package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"nodeproxy/e2e/harness"
)

// seed is a manifest as people write them, and what packets must do once it is in force.
type seed struct {
	file string
	// pods are labels, "key=value", of the pods n1a, n1b and n2a; they serve these ports, and are described beside the seed.
	pods  string
	ports []uint16
	// servers are machines at addresses that the seed itself names, on node2; their names are their addresses.
	servers []string
	zone    string // of node1
	check   func(t *testing.T, s *seeded)
}

// seeded is a World with a seed in force.
type seeded struct {
	*harness.World
	variant harness.Variant
}

// clusterIP finds the IPv4 cluster IP that a Service port was given, by the comment of its rule.
func (s *seeded) clusterIP(t *testing.T, portName string) netip.Addr {
	t.Helper()
	rule := regexp.MustCompile(`-A KUBE-SERVICES -d (\S+)/32 .*--comment "` + regexp.QuoteMeta(portName) +
		` (cluster IP|has no endpoints)"`)
	m := rule.FindStringSubmatch(rules(t, s.World, s.variant))
	if m == nil {
		t.Fatalf("no rule for %s in\n%s", portName, rules(t, s.World, s.variant))
	}
	addr, err := netip.ParseAddr(m[1])
	require.NoError(t, err)
	if !harness.ServiceCIDR4.Contains(addr) {
		t.Errorf("%s has cluster IP %s, outside of %s", portName, addr, harness.ServiceCIDR4)
	}
	return addr
}

// nodePort finds the node port that a Service port was given.
func (s *seeded) nodePort(t *testing.T, portName string) uint16 {
	t.Helper()
	rule := regexp.MustCompile(`-A KUBE-NODEPORTS .*--comment "?` + regexp.QuoteMeta(portName) + `"? -m tcp --dport (\d+)`)
	m := rule.FindStringSubmatch(rules(t, s.World, s.variant))
	if m == nil {
		t.Fatalf("no node port rule for %s in\n%s", portName, rules(t, s.World, s.variant))
	}
	var port uint16
	if _, err := fmt.Sscan(m[1], &port); err != nil {
		t.Fatal(err)
	}
	return port
}

// answers checks that a Service port is served by exactly these servers, at their target port, to a client in a pod and
// to one outside.
func (s *seeded) answers(t *testing.T, portName string, port, target uint16, servers ...string) {
	t.Helper()
	to := netip.AddrPortFrom(s.clusterIP(t, portName), port)
	for _, client := range []*harness.Host{s.Pod("n1c").Host, s.Client} {
		assert.NoError(t, serversOf(client, "tcp", to, servers...), "%s", portName)
		if a := client.Ask("tcp", to, harness.Patient); a.Port != target {
			t.Errorf("%s: %v, want target port %d", portName, a, target)
		}
	}
}

// refuses checks that a Service port without endpoints is refused.
func (s *seeded) refuses(t *testing.T, portName string, port uint16) {
	t.Helper()
	assert.NoError(t, ends(s.Pod("n1c").Host, netip.AddrPortFrom(s.clusterIP(t, portName), port), harness.Refused)(), "%s", portName)
}

// onNodePort checks that a node port is served by exactly these servers to an outside client, whose address they see
// if it is kept.
func (s *seeded) onNodePort(t *testing.T, port uint16, kept bool, servers ...string) {
	t.Helper()
	to := netip.AddrPortFrom(s.Node1().IP4, port)
	assert.NoError(t, serversOf(s.Client, "tcp", to, servers...))
	source := s.Node1().IP4
	if kept {
		source = s.Client.IP4
	}
	if a := s.Client.Ask("tcp", to, harness.Patient); a.Source != source {
		t.Errorf("node port %d: %v, want it to see %s", port, a, source)
	}
}

var seeds = []seed{
	{
		file: "affinity.yaml", pods: "app=optimized-app", ports: []uint16{8080},
		check: func(t *testing.T, s *seeded) {
			const name = "default/optimized-service:http"
			stickyServer(t, s.Pod("n1c").Host, "tcp", netip.AddrPortFrom(s.clusterIP(t, name), 80))
			to := netip.AddrPortFrom(s.Node1().IP4, s.nodePort(t, name))
			server := stickyServer(t, s.Client, "tcp", to)
			if server != "n1a" && server != "n1b" {
				t.Errorf("%s answers from outside, want one on this node", server)
			}
			if a := s.Client.Ask("tcp", to, harness.Patient); a.Source != s.Client.IP4 {
				t.Errorf("%v, want it to see %s", a, s.Client.IP4)
			}
		},
	},
	{
		file: "clusterip.yaml", pods: "run=pod-python", ports: []uint16{443},
		check: func(t *testing.T, s *seeded) {
			s.answers(t, "default/service-python", 3000, 443, "n1a", "n1b", "n2a")
		},
	},
	{
		file: "clusterip.yaml", pods: "run=pod-perl", ports: []uint16{443}, // no pod has the label that is asked for
		check: func(t *testing.T, s *seeded) { s.refuses(t, "default/service-python", 3000) },
	},
	{
		file: "nodeport.yaml", pods: "run=pod-python", ports: []uint16{443},
		check: func(t *testing.T, s *seeded) {
			s.answers(t, "default/service-python", 3000, 443, "n1a", "n1b", "n2a")
			s.onNodePort(t, 30080, false, "n1a", "n1b", "n2a")
		},
	},
	{
		file: "loadbalancer-local.yaml", pods: "run=pod-python", ports: []uint16{443},
		check: func(t *testing.T, s *seeded) {
			s.answers(t, "default/service-python", 3000, 443, "n1a", "n1b", "n2a")
			s.onNodePort(t, 30080, true, "n1a", "n1b")
		},
	},
	{
		file: "external-ips.yaml", pods: "app.kubernetes.io/name=MyApp", ports: []uint16{49152},
		check: func(t *testing.T, s *seeded) {
			s.answers(t, "default/my-service:http", 80, 49152, "n1a", "n1b", "n2a")
			to := netip.MustParseAddrPort("198.51.100.32:80")
			assert.NoError(t, serversOf(s.Client, "tcp", to, "n1a", "n1b", "n2a"))
		},
	},
	{
		file: "selector.yaml", pods: "app.kubernetes.io/name=MyApp", ports: []uint16{9376},
		check: func(t *testing.T, s *seeded) { s.answers(t, "default/my-service", 80, 9376, "n1a", "n1b", "n2a") },
	},
	{
		file: "endpoints-legacy.yaml", servers: []string{"192.168.1.100"}, ports: []uint16{3306},
		check: func(t *testing.T, s *seeded) { s.answers(t, "default/legacy-system", 3306, 3306, "192.168.1.100") },
	},
	{
		file: "endpoints-named-port.yaml", servers: []string{"10.244.2.5"}, ports: []uint16{8080},
		check: func(t *testing.T, s *seeded) { s.answers(t, "default/svc-8092:svc-p8092", 8092, 8080, "10.244.2.5") },
	},
	{
		file: "slice.yaml", servers: []string{"10.1.2.3"}, ports: []uint16{80},
		check: func(t *testing.T, s *seeded) { s.answers(t, "default/example:http", 80, 80, "10.1.2.3") },
	},
	{
		file: "slice-hints.yaml", servers: []string{"10.1.2.3"}, ports: []uint16{80}, zone: "zone-a",
		check: func(t *testing.T, s *seeded) { s.answers(t, "default/hinted", 80, 80, "10.1.2.3") },
	},
	{
		// No endpoint has a hint for this zone: the hints don't count, and nobody goes without.
		file: "slice-hints.yaml", servers: []string{"10.1.2.3"}, ports: []uint16{80}, zone: "zone-b",
		check: func(t *testing.T, s *seeded) { s.answers(t, "default/hinted", 80, 80, "10.1.2.3") },
	},
	{
		file: "slice-zone.yaml", servers: []string{"10.244.1.5"}, ports: []uint16{8080},
		check: func(t *testing.T, s *seeded) { s.refuses(t, "default/web-service", 80) },
	},
	{
		file: "several-ports.yaml",
		check: func(t *testing.T, s *seeded) {
			s.refuses(t, "default/complex-app:http", 80)
			s.refuses(t, "default/complex-app:https", 443)
			s.refuses(t, "default/complex-app:metrics", 9090)
		},
	},
	{
		file: "use-cases.yaml", pods: "app=web-frontend", ports: []uint16{80},
		check: func(t *testing.T, s *seeded) {
			s.refuses(t, "default/internal-api", 8080)
			s.answers(t, "default/external-web", 80, 80, "n1a", "n1b", "n2a")
			s.onNodePort(t, 30080, false, "n1a", "n1b", "n2a")
		},
	},
}

// TestSeeds: manifests as found in the wild, each by itself, send packets where they say.
func TestSeeds(t *testing.T) {
	t.Parallel()
	for i, sd := range seeds {
		variant := harness.Variants[i%len(harness.Variants)] // what differs between them is tested elsewhere
		t.Run(fmt.Sprintf("%02d-%s/%s", i, strings.TrimSuffix(sd.file, ".yaml"), variant), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(filepath.Join("..", "testdata", "seeds", sd.file))
			require.NoError(t, err)
			ports := sd.ports
			if ports == nil {
				ports = []uint16{8080}
			}
			w := harness.New(t, harness.Options{Ports: ports})
			labels := map[string]string{}
			if sd.zone != "" {
				labels = zoneLabel(sd.zone)
			}
			w.Write(t, "node.yaml", w.NodeObject(w.Node1(), labels))
			for _, ip := range sd.servers {
				w.AddPod(t, w.Nodes[1], ip, ip, ports...)
			}
			if key, value, ok := strings.Cut(sd.pods, "="); ok {
				for _, name := range []string{"n1a", "n1b", "n2a"} {
					w.Write(t, name+".yaml", w.PodObject(w.Pod(name), map[string]string{key: value}))
				}
			}
			w.WriteText(t, sd.file, string(text))
			w.Run(t, variant, clusterCIDR)
			sd.check(t, &seeded{World: w, variant: variant})
		})
	}
}

// TestPodsAsEndpoints: a Service with a selector follows its Pods: their labels, readiness, end, named ports and host
// network, in both families.
func TestPodsAsEndpoints(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("web", 1)
		s.Namespace = "default"
		s.Spec.Selector = map[string]string{"app": "web"}
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			p.TargetPort = intstr.FromString("serve-" + strings.ToLower(string(p.Protocol)))
		}
		w.Write(t, "service.yaml", s)
		named := func(port int32) func(*v1.Pod) {
			return func(p *v1.Pod) {
				p.Spec.Containers[0].Ports = []v1.ContainerPort{
					{Name: "serve-tcp", ContainerPort: port, Protocol: v1.ProtocolTCP},
					{Name: "serve-udp", ContainerPort: port, Protocol: v1.ProtocolUDP},
				}
			}
		}
		web, other := map[string]string{"app": "web", "tier": "front"}, map[string]string{"app": "other"}
		pod := func(name string, labels map[string]string, changes ...func(*v1.Pod)) {
			w.Write(t, name+".yaml", w.PodObject(w.Pod(name), labels, changes...))
		}
		notReady := func(p *v1.Pod) { p.Status.Conditions[0].Status = v1.ConditionFalse }
		pod("n1a", web, named(8080))
		pod("n2a", web, named(8081)) // the same name is another port number in this one
		pod("n2b", web, named(8080), notReady)
		pod("n3a", other, named(8080))
		w.Run(t, variant, clusterCIDR)
		check := func(what string, want ...string) {
			t.Helper()
			for _, family := range families {
				for _, network := range networks {
					eventually(t, what, func() error { return serversOf(w.Client, network, clusterIP(1, family), want...) })
				}
			}
		}
		check("at first", "n1a", "n2a")
		for _, family := range families {
			for range 20 {
				a := w.Client.Ask("tcp", clusterIP(1, family), harness.Patient)
				if want := map[string]uint16{"n1a": 8080, "n2a": 8081}[a.Server]; a.Port != want {
					t.Fatalf("%v, want port %d", a, want)
				}
			}
		}
		pod("n2b", web, named(8080))
		check("a pod turned ready", "n1a", "n2a", "n2b")
		pod("n3a", web, named(8080))
		check("a pod got the label", "n1a", "n2a", "n2b", "n3a")
		pod("n1a", web, named(8080), func(p *v1.Pod) { p.DeletionTimestamp = deleted() })
		check("a pod shuts down", "n2a", "n2b", "n3a")
		pod("n2a", other, named(8081))
		pod("n2b", web, named(8080), notReady)
		check("a label lost, a pod not ready", "n3a")
		w.Remove(t, "n3a.yaml")
		check("only one that shuts down is left", "n1a")
		w.Remove(t, "n1a.yaml")
		for _, family := range families {
			eventually(t, "none", ends(w.Client, clusterIP(1, family), harness.Refused))
		}
		s.Spec.PublishNotReadyAddresses = true
		w.Write(t, "service.yaml", s)
		check("publishNotReadyAddresses", "n2b")

		// A pod in the host network has its node's addresses.
		require.NoError(t, w.ServeBoth(w.Nodes[2].Host, "node3", 8085))
		host := w.PodObject(w.Pod("n3a"), web, named(8085), func(p *v1.Pod) {
			p.Spec.HostNetwork = true
			p.Status.PodIP = w.Nodes[2].IP4.String()
			p.Status.PodIPs = []v1.PodIP{{IP: w.Nodes[2].IP4.String()}, {IP: w.Nodes[2].IP6.String()}}
		})
		w.Write(t, "n3a.yaml", host)
		check("host network", "n2b", "node3")
	})
}
