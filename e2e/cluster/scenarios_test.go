package cluster

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// TestScenarios holds what happens to packets while the cluster changes, with a real API server and its controllers.
func TestScenarios(t *testing.T) {
	for _, variant := range harness.Variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, variant)
			for _, sc := range scenarios {
				l.run(t, sc.name, sc.test)
			}
		})
	}
}

type scenarioTest struct {
	name string
	test func(*scenario)
}

var scenarios = []scenarioTest{
	{"service-before-endpoints", serviceBeforeEndpoints},
	{"endpoints-before-service", endpointsBeforeService},
	{"scale-0-3-0", scale},
	{"rolling-update-under-load", rollingUpdate},
	{"types", serviceTypes},
	{"port-and-target-port", ports},
	{"affinity-on-and-off", affinity},
	{"policies", policies},
	{"endpoints-only", endpointsOnly},
	{"two-slices", twoSlices},
	{"dual-stack-upgrade", dualStackUpgrade},
	{"node-zone-label", nodeZone},
	{"traffic-distribution", trafficDistribution},
	{"delete-and-recreate-same-ip", recreate},
	{"leaves-and-comes-back", otherProxy},
	{"api-server-from-a-pod", apiServerFromPod},
	{"daemon-killed-and-restarted-under-load", restart},
	{"storm-of-slices-under-load", storm},
	{"api-server-down-under-load", serverDown},
	{"api-server-hangs-under-load", serverHangs},
	{"compaction-while-away", compaction},
	{"lost-event", lostEvent},
	{"kube-proxys-command-line", dropIn},
	{"render-of-the-cluster", renderOfCluster},
	{"dashboard", dashboard},
}

func serviceBeforeEndpoints(s *scenario) {
	svc := s.service()
	s.eventually("refused without endpoints", ends(s.Client, at(svc, 4), harness.Refused))
	s.pod("n1a", "n2a")
	s.eventually("endpoints", servers(s.Client, at(svc, 4), "n1a", "n2a"))
}

func endpointsBeforeService(s *scenario) {
	s.pod("n1a", "n2a")
	svc := s.service()
	s.eventually("service", servers(s.Client, at(svc, 4), "n1a", "n2a"))
}

func scale(s *scenario) {
	svc := s.service()
	s.eventually("scaled to 0", ends(s.World.Pod("n1b").Host, at(svc, 4), harness.Refused))
	s.pod("n1a", "n2a", "n3a")
	s.eventually("scaled to 3", servers(s.World.Pod("n1b").Host, at(svc, 4), "n1a", "n2a", "n3a"))
	s.gone("n1a", "n2a", "n3a")
	s.eventually("scaled to 0 again", ends(s.World.Pod("n1b").Host, at(svc, 4), harness.Refused))
}

// rollingUpdate replaces three pods, one at a time, as a Deployment does with maxUnavailable 0. A container ends when no request comes any
// more: how long the controller and nodeproxy take until then, on a busy machine, is not what this is about.
func rollingUpdate(s *scenario) {
	svc := s.service(func(svc *v1.Service) { svc.Spec.Type = v1.ServiceTypeNodePort })
	old := []string{s.newPod(1), s.newPod(2), s.newPod(3)}
	s.pod(old...)
	s.eventually("first version", servers(s.Client, at(svc, 4), old...))
	s.load(s.Client, at(svc, 4))
	s.load(s.Client, s.nodePort(svc))
	s.load(s.World.Pod("n1a").Host, at(svc, 4))
	s.load(s.Node1().Host, at(svc, 4))
	var fresh []string
	for i, name := range old {
		next := s.newPod(i + 1)
		s.pod(next)
		fresh = append(fresh, next)
		s.eventually("new pod", func() error {
			if a := s.Client.Ask("tcp", at(svc, 4), harness.Brief); a.Server != next {
				return fmt.Errorf("%v, want %s", a, next)
			}
			return nil
		})
		s.terminate(name)
		s.eventually("the end of "+name+" in an EndpointSlice", func() error { return s.terminating(name) })
		s.eventually("no more requests to "+name, func() error { return s.unused(name) })
		s.unplug(name)
		s.gone(name)
	}
	s.eventually("second version", servers(s.Client, at(svc, 4), fresh...))
	s.endLoads()
}

// unused fails if a request of a load goes to a pod. As long as it were one of three, they would all miss it once in 10¹⁴ times.
func (s *scenario) unused(pod string) error {
	s.Helper()
	for _, l := range s.loads {
		begin := time.Now()
		s.requested(l, l.Requests()+20)
		if l.LastFrom(pod).After(begin) {
			return fmt.Errorf("%s still gets requests", pod)
		}
	}
	return nil
}

// unplug takes a pod off the network, as the end of its containers does.
func (s *scenario) unplug(name string) {
	s.Helper()
	nl := s.World.Pod(name).Netlink()
	eth0, err := nl.LinkByName("eth0")
	s.must(err)
	s.must(nl.LinkSetDown(eth0))
}

func serviceTypes(s *scenario) {
	svc := s.service()
	s.pod("n1a", "n2a")
	both := []string{"n1a", "n2a"}
	s.eventually("ClusterIP", servers(s.Client, at(svc, 4), both...))
	stays := s.load(s.World.Pod("n1b").Host, at(svc, 4))

	svc = s.change(func(svc *v1.Service) { svc.Spec.Type = v1.ServiceTypeNodePort })
	nodePort := s.nodePort(svc)
	s.eventually("NodePort", servers(s.Client, nodePort, both...))

	svc = s.change(func(svc *v1.Service) { svc.Spec.Type = v1.ServiceTypeLoadBalancer })
	vip := netip.AddrPortFrom(harness.AddressesOf(1).VIP4, 80)
	svc.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: vip.Addr().String()}}
	_, err := s.cp.Admin.CoreV1().Services(s.namespace).UpdateStatus(s.Context(), svc, metav1.UpdateOptions{})
	s.must(err)
	s.eventually("LoadBalancer", servers(s.Client, vip, both...))
	s.must(servers(s.Client, nodePort, both...)())
	s.endLoads()
	if stays.Answers("n1a") == 0 {
		s.Error("no answer of n1a under load")
	}

	old := at(svc, 4)
	s.change(func(svc *v1.Service) {
		svc.Spec = v1.ServiceSpec{Type: v1.ServiceTypeExternalName, ExternalName: "example.org", Selector: svc.Spec.Selector}
	})
	for what, to := range map[string]netip.AddrPort{"cluster IP": old, "load balancer IP": vip} {
		s.eventually("ExternalName: no "+what, ends(s.Client, to, harness.TimedOut))
	}
	s.eventually("ExternalName: no node port", ends(s.Client, nodePort, harness.Refused))

	svc = s.change(func(svc *v1.Service) {
		svc.Spec.Type, svc.Spec.ExternalName = v1.ServiceTypeClusterIP, ""
		svc.Spec.Ports = []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}
	})
	s.eventually("ClusterIP again", servers(s.Client, at(svc, 4), both...))
}

func ports(s *scenario) {
	svc := s.service()
	s.pod("n1a", "n2a")
	s.eventually("port 80", servers(s.Client, at(svc, 4), "n1a", "n2a"))
	svc = s.change(func(svc *v1.Service) { svc.Spec.Ports[0].Port = 81 })
	to := netip.AddrPortFrom(at(svc, 4).Addr(), 81)
	s.eventually("port 81", servers(s.Client, to, "n1a", "n2a"))
	unused := harness.TimedOut
	if harness.ModeUnderTest() == harness.NFTables { // which refuses what goes to an unused port of a cluster IP
		unused = harness.Refused
	}
	s.eventually("port 80 no more", ends(s.Client, at(svc, 4), unused))
	s.load(s.Client, to)
	s.change(func(svc *v1.Service) { svc.Spec.Ports[0].TargetPort = intstr.FromInt32(8081) })
	s.eventually("target port 8081", func() error {
		for range 20 {
			if a := s.Client.Ask("tcp", to, harness.Brief); a.Port != 8081 {
				return fmt.Errorf("%v, want port 8081", a)
			}
		}
		return nil
	})
	s.more()
	s.endLoads()
}

func affinity(s *scenario) {
	svc := s.service()
	s.pod("n1a", "n2a", "n3a")
	all := []string{"n1a", "n2a", "n3a"}
	s.eventually("without", servers(s.Client, at(svc, 4), all...))
	s.load(s.World.Pod("n1b").Host, at(svc, 4))
	s.change(func(svc *v1.Service) { svc.Spec.SessionAffinity = v1.ServiceAffinityClientIP })
	s.eventually("with", func() error {
		first := s.Client.Ask("tcp", at(svc, 4), harness.Brief)
		for range 30 {
			if a := s.Client.Ask("tcp", at(svc, 4), harness.Brief); a.Outcome != harness.Answered || a.Server != first.Server {
				return fmt.Errorf("%v after %v", a, first)
			}
		}
		return nil
	})
	s.change(func(svc *v1.Service) {
		svc.Spec.SessionAffinity, svc.Spec.SessionAffinityConfig = v1.ServiceAffinityNone, nil
	})
	s.eventually("without again", servers(s.Client, at(svc, 4), all...))
	s.endLoads()
}

func policies(s *scenario) {
	svc := s.service(func(svc *v1.Service) { svc.Spec.Type = v1.ServiceTypeNodePort })
	s.pod("n1a", "n2a")
	to := s.nodePort(svc)
	s.eventually("Cluster", servers(s.Client, to, "n1a", "n2a"))
	s.load(s.Client, to)
	s.load(s.World.Pod("n1b").Host, at(svc, 4))
	s.change(func(svc *v1.Service) {
		svc.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		svc.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	})
	s.eventually("external Local", servers(s.Client, to, "n1a"))
	s.eventually("internal Local", servers(s.World.Pod("n1b").Host, at(svc, 4), "n1a"))
	if a := s.Client.Ask("tcp", to, harness.Patient); a.Source != s.Client.IP4 {
		s.Errorf("external Local: %v, want the client's own address %s", a, s.Client.IP4)
	}
	s.endLoads()
	s.gone("n1a")
	s.eventually("external Local without local endpoints", ends(s.Client, to, harness.TimedOut))
	s.eventually("internal Local without local endpoints", ends(s.World.Pod("n1b").Host, at(svc, 4), harness.TimedOut))
	s.change(func(svc *v1.Service) {
		svc.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
		svc.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyCluster)
	})
	s.eventually("external Cluster again", servers(s.Client, to, "n2a"))
	s.eventually("internal Cluster again", servers(s.World.Pod("n1b").Host, at(svc, 4), "n2a"))
}

func withoutSelector(svc *v1.Service) { svc.Spec.Selector = nil }

// endpointsOnly: the mirroring controller makes EndpointSlices of Endpoints that somebody wrote.
func endpointsOnly(s *scenario) {
	svc := s.service(withoutSelector)
	//lint:ignore SA1019 that this deprecated kind still works is what is tested
	eps := &v1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: s.namespace},
		//lint:ignore SA1019 as above
		Subsets: []v1.EndpointSubset{{
			Addresses: []v1.EndpointAddress{{IP: s.World.Pod("n1a").IP4.String()}, {IP: s.World.Pod("n3a").IP4.String()}},
			Ports:     []v1.EndpointPort{{Port: 8080}},
		}},
	}
	eps, err := s.cp.Admin.CoreV1().Endpoints(s.namespace).Create(s.Context(), eps, metav1.CreateOptions{})
	s.must(err)
	s.eventually("mirrored", servers(s.Client, at(svc, 4), "n1a", "n3a"))
	eps.Subsets[0].Addresses = eps.Subsets[0].Addresses[1:]
	_, err = s.cp.Admin.CoreV1().Endpoints(s.namespace).Update(s.Context(), eps, metav1.UpdateOptions{})
	s.must(err)
	s.eventually("an address less", servers(s.Client, at(svc, 4), "n3a"))
	s.must(s.cp.Admin.CoreV1().Endpoints(s.namespace).Delete(s.Context(), "web", metav1.DeleteOptions{}))
	s.eventually("no Endpoints", ends(s.Client, at(svc, 4), harness.Refused))
}

// slice writes an EndpointSlice of the Service web. zones, if given, are the hints of the pods, one each.
func (s *scenario) slice(name string, pods []string, zones ...string) {
	s.Helper()
	es := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: s.namespace, Labels: map[string]string{discovery.LabelServiceName: "web"},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: ptr.To(""), Port: ptr.To(int32(8080)), Protocol: ptr.To(v1.ProtocolTCP)}},
	}
	for i, pod := range pods {
		p := s.World.Pod(pod)
		ep := discovery.Endpoint{
			Addresses: []string{p.IP4.String()}, NodeName: ptr.To(p.Node.Name),
			Conditions: discovery.EndpointConditions{Ready: ptr.To(true)},
		}
		if len(zones) > 0 {
			ep.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: zones[i]}}}
		}
		es.Endpoints = append(es.Endpoints, ep)
	}
	_, err := s.cp.Admin.DiscoveryV1().EndpointSlices(s.namespace).Create(s.Context(), es, metav1.CreateOptions{})
	s.must(err)
}

func twoSlices(s *scenario) {
	svc := s.service(withoutSelector)
	s.slice("one", []string{"n1a", "n2a"})
	s.slice("two", []string{"n2a", "n3a"}) // an address may stand in both, as while the controller moves it
	s.eventually("both", servers(s.Client, at(svc, 4), "n1a", "n2a", "n3a"))
	s.load(s.Client, at(svc, 4))
	s.must(s.cp.Admin.DiscoveryV1().EndpointSlices(s.namespace).Delete(s.Context(), "one", metav1.DeleteOptions{}))
	s.eventually("the second", servers(s.Client, at(svc, 4), "n2a", "n3a"))
	s.endLoads()
}

func dualStackUpgrade(s *scenario) {
	svc := s.service(func(svc *v1.Service) {
		svc.Spec.IPFamilyPolicy = ptr.To(v1.IPFamilyPolicySingleStack)
		svc.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol}
	})
	s.pod("n1a", "n2a")
	s.eventually("IPv4 alone", servers(s.Client, at(svc, 4), "n1a", "n2a"))
	s.load(s.Client, at(svc, 4))
	svc = s.change(func(svc *v1.Service) {
		svc.Spec.IPFamilyPolicy = ptr.To(v1.IPFamilyPolicyRequireDualStack)
		svc.Spec.IPFamilies = append(svc.Spec.IPFamilies, v1.IPv6Protocol)
	})
	six := at(svc, 6)
	s.eventually("IPv6 too", servers(s.Client, six, "n1a", "n2a"))
	s.change(func(svc *v1.Service) {
		svc.Spec.IPFamilyPolicy = ptr.To(v1.IPFamilyPolicySingleStack)
		svc.Spec.IPFamilies, svc.Spec.ClusterIPs = svc.Spec.IPFamilies[:1], svc.Spec.ClusterIPs[:1]
	})
	s.eventually("IPv4 alone again", ends(s.Client, six, s.freeClusterIP()))
	s.endLoads()
}

// setZone changes the label of node1 that says in which zone it is.
func (s *scenario) setZone(zone string) {
	s.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, v1.LabelTopologyZone, zone)
	_, err := s.cp.Admin.CoreV1().Nodes().Patch(s.Context(), "node1", types.MergePatchType, patch, metav1.PatchOptions{})
	s.must(err)
}

func nodeZone(s *scenario) {
	svc := s.service(withoutSelector)
	s.slice("hinted", []string{"n1a", "n2a", "n3a"}, zones...)
	s.eventually("first zone", servers(s.Client, at(svc, 4), "n1a"))
	s.load(s.Client, at(svc, 4))
	s.setZone(zones[1])
	s.eventually("second zone", servers(s.Client, at(svc, 4), "n2a"))
	s.setZone("elsewhere")
	s.eventually("a zone without endpoints", servers(s.Client, at(svc, 4), "n1a", "n2a", "n3a"))
	s.setZone(zones[0])
	s.eventually("first zone again", servers(s.Client, at(svc, 4), "n1a"))
	s.endLoads()
}

// trafficDistribution: the hints are the endpointslice controller's.
func trafficDistribution(s *scenario) {
	svc := s.service()
	s.pod("n1a", "n2a", "n3a")
	s.eventually("anywhere", servers(s.Client, at(svc, 4), "n1a", "n2a", "n3a"))
	s.load(s.Client, at(svc, 4))
	s.change(func(svc *v1.Service) {
		svc.Spec.TrafficDistribution = ptr.To(v1.ServiceTrafficDistributionPreferSameZone)
	})
	s.eventually("same zone", servers(s.Client, at(svc, 4), "n1a"))
	s.change(func(svc *v1.Service) { svc.Spec.TrafficDistribution = nil })
	s.eventually("anywhere again", servers(s.Client, at(svc, 4), "n1a", "n2a", "n3a"))
	s.change(func(svc *v1.Service) {
		svc.Spec.TrafficDistribution = ptr.To(v1.ServiceTrafficDistributionPreferSameNode)
	})
	s.eventually("same node", servers(s.Client, at(svc, 4), "n1a"))
	s.endLoads()
}

func recreate(s *scenario) {
	svc := s.service()
	s.pod("n1a")
	s.eventually("first", servers(s.Client, at(svc, 4), "n1a"))
	s.deleteService()
	s.must(s.cp.Admin.DiscoveryV1().EndpointSlices(s.namespace).DeleteCollection(s.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{})) // else the garbage collector's part, which does not run here
	s.slice("second", []string{"n2a"})
	again := s.service(withoutSelector, func(n *v1.Service) { n.Spec.ClusterIP = svc.Spec.ClusterIP })
	if at(again, 4) != at(svc, 4) {
		s.Fatalf("the second Service has %s, want %s", at(again, 4), at(svc, 4))
	}
	s.eventually("second", func() error {
		err := s.cp.Admin.DiscoveryV1().EndpointSlices(s.namespace).DeleteCollection(s.Context(), metav1.DeleteOptions{},
			metav1.ListOptions{LabelSelector: discovery.LabelManagedBy}) // which the controller has made late
		return errors.Join(err, servers(s.Client, at(svc, 4), "n2a")())
	})
	s.deleteService()
	s.eventually("none", ends(s.Client, at(svc, 4), s.freeClusterIP()))
}

// freeClusterIP is how a request to a cluster IP ends that no Service has. Where a route makes them all the node's own, it refuses.
func (s *scenario) freeClusterIP() harness.Outcome {
	if harness.ModeUnderTest() == harness.IPVS && harness.VIPsWith(s.variant) == harness.VIPRoutes {
		return harness.Refused
	}
	return harness.TimedOut
}

// otherProxy: a Service that gets the label of another proxy leaves the watch, and comes back without it.
func otherProxy(s *scenario) {
	const label = "service.kubernetes.io/service-proxy-name"
	svc := s.service()
	s.pod("n1a")
	s.eventually("ours", servers(s.Client, at(svc, 4), "n1a"))
	s.change(func(svc *v1.Service) { svc.Labels = map[string]string{label: "other"} })
	s.eventually("another proxy's", ends(s.Client, at(svc, 4), s.freeClusterIP()))
	s.change(func(svc *v1.Service) { delete(svc.Labels, label) })
	s.eventually("ours again", servers(s.Client, at(svc, 4), "n1a"))
}

// apiServerFromPod: a pod reaches the API server at its Service's cluster IP, through the rules.
func apiServerFromPod(s *scenario) {
	svc, err := s.cp.Admin.CoreV1().Services("default").Get(s.Context(), "kubernetes", metav1.GetOptions{})
	s.must(err)
	client, err := kubernetes.NewForConfig(s.cp.Via(s.World.Pod("n1a").Netns,
		&rest.Config{Host: "https://" + svc.Spec.ClusterIP + ":443", BearerToken: s.token}))
	s.must(err)
	_, err = client.CoreV1().Nodes().Get(s.Context(), "node1", metav1.GetOptions{})
	s.must(err)
}

// loadedService starts load on a Service of two pods, which goes on while something breaks.
func (s *scenario) loadedService(pods ...string) *v1.Service {
	s.Helper()
	svc := s.service(func(svc *v1.Service) { svc.Spec.Type = v1.ServiceTypeNodePort })
	s.pod(pods...)
	s.eventually("service", servers(s.Client, at(svc, 4), pods...))
	s.load(s.Client, at(svc, 4))
	s.load(s.Client, s.nodePort(svc))
	s.load(s.World.Pod("n1b").Host, at(svc, 4))
	s.load(s.Node1().Host, at(svc, 4))
	return svc
}

func restart(s *scenario) {
	svc := s.loadedService("n1a", "n2a")
	s.more()
	s.must(s.daemon.Kill())
	s.pod("n3a")
	s.gone("n2a")
	s.more()
	s.startDaemon(s.T)
	s.eventually("changes while it was away", servers(s.Client, at(svc, 4), "n1a", "n3a"))
	s.endLoads()
}

// freshControllers restarts the controllers: after an outage they would wait for up to a minute until they ask the API
// server again, and it is not for them that these tests wait.
func (s *scenario) freshControllers() error {
	s.cp.ControllerManager.Kill()
	return s.cp.ControllerManager.Start()
}

// serverDown: the API server crashes, stays away for a while and comes back; changes get through after that.
func serverDown(s *scenario) {
	svc := s.loadedService("n1a", "n2a")
	line := len(s.daemon.Log())
	s.cp.APIServer.Kill()
	time.Sleep(time.Minute) // how long it is away
	s.must(s.daemon.WaitForAfter(line, harness.Limit, "request to the API server failed", "resource=services"))
	s.must(s.cp.StartAPIServer())
	s.must(s.freshControllers())
	s.pod("n3a")
	s.gone("n1a")
	s.eventually("changes after it is back", servers(s.Client, at(svc, 4), "n2a", "n3a"))
	s.must(s.daemon.WaitForAfter(line, harness.Limit, "the API server answers again", "resource=services"))
	s.endLoads()
}

// serverHangs: the API server no longer answers, and closes nothing.
func serverHangs(s *scenario) {
	svc := s.loadedService("n1a", "n2a")
	line := len(s.daemon.Log())
	s.must(s.cp.APIServer.Freeze())
	err := s.daemon.WaitForAfter(line, harness.Limit, "request to the API server failed")
	s.must(errors.Join(err, s.cp.APIServer.Thaw()))
	s.eventually("API server awake", func() error {
		_, err := s.cp.Admin.CoreV1().Nodes().Get(s.Context(), "node1", metav1.GetOptions{})
		return err
	})
	s.must(s.freshControllers())
	s.pod("n3a")
	s.gone("n1a")
	s.eventually("changes after it is back", servers(s.Client, at(svc, 4), "n2a", "n3a"))
	s.endLoads()
}

// lostEvent: what is before the API server loses the event of a new endpoint, and the watch goes on. Whoever asks for a verification finds
// that, and it is repaired.
func lostEvent(s *scenario) {
	front, kubeconfig := s.withFront(s.T)
	socket := filepath.Join(s.TempDir(), "socket")
	s.must(s.daemon.Stop())
	defer func() {
		s.must(s.daemon.Stop())
		s.startDaemon(s.T)
	}()
	begun := time.Now()
	s.startDaemon(s.T, "--kubeconfig="+kubeconfig, "--socket="+socket)
	svc := s.service()
	s.pod("n1a")
	s.eventually("an endpoint", servers(s.Client, at(svc, 4), "n1a"))
	list, err := s.cp.Admin.DiscoveryV1().EndpointSlices(s.namespace).List(s.Context(), metav1.ListOptions{})
	s.must(err)
	require.Len(s, list.Items, 1)
	slice := list.Items[0].Name

	lost, stop := front.Lose(slice)
	s.pod("n2a")
	s.eventually("a lost event", func() error {
		if lost() == 0 {
			return errors.New("none")
		}
		return nil
	})
	later := s.serviceNamed("later")
	s.eventually("a later event", servers(s.Client, at(later, 4), "n1a", "n2a"))
	stop()

	binary, err := harness.Binary()
	s.must(err)
	want := fmt.Sprintf("EndpointSlice %s/%s: metadata.resourceVersion", s.namespace, slice)
	asked := time.Now()
	s.eventually("status --verify names the EndpointSlice", func() error {
		out, err := s.Node1().Output(binary, "status", "--verify", "--socket="+socket)
		if !strings.Contains(out, want) {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	s.eventually("both endpoints", servers(s.Client, at(svc, 4), "n1a", "n2a"))
	s.Logf("repaired within %v of the question, %d events were lost", time.Since(asked).Round(time.Millisecond), lost())
	code, body, err := s.Node1().Get(harness.HealthAddr, "/readyz?verify")
	s.must(err)
	if code != http.StatusServiceUnavailable || !strings.Contains(body, slice) {
		s.Errorf("/readyz?verify soon after it: %d %s", code, body)
	}
	s.eventually("an event", func() error { return s.hasEvent(begun, "VerificationRepaired", want) })
}

// compaction: nodeproxy stands still while a Service goes, another changes, and the API server forgets how that came
// about. It has to list anew, and to find out what is gone.
func compaction(s *scenario) {
	svc := s.loadedService("n1a", "n2a")
	goes, err := s.cp.Admin.CoreV1().Services(s.namespace).Create(s.Context(), &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "goes"},
		Spec:       v1.ServiceSpec{Selector: svc.Spec.Selector, Ports: []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}},
	}, metav1.CreateOptions{})
	s.must(err)
	s.eventually("Service that will go", servers(s.Client, at(goes, 4), "n1a", "n2a"))
	line := len(s.daemon.Log())
	s.must(syscall.Kill(s.daemon.PID(), syscall.SIGSTOP))
	s.must(s.cp.Admin.CoreV1().Services(s.namespace).Delete(s.Context(), "goes", metav1.DeleteOptions{}))
	s.pod("n3a")
	s.gone("n1a")
	time.Sleep(500 * time.Millisecond) // for the controllers
	s.must(s.cp.Compact(s.Context()))
	s.cp.APIServer.Kill()
	s.must(s.cp.StartAPIServer())
	s.must(syscall.Kill(s.daemon.PID(), syscall.SIGCONT))
	s.eventually("changes while it stood still", servers(s.Client, at(svc, 4), "n2a", "n3a"))
	s.eventually("the Service that went", ends(s.Client, at(goes, 4), s.freeClusterIP()))
	s.must(s.daemon.WaitForAfter(line, harness.Limit, "too old resource version"))
	s.endLoads()
}
