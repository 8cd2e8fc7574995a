package cluster

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/kernel/inkernel"
)

func TestMain(m *testing.M) {
	tests := func() int { return runTests(m) }
	if harness.ModeUnderTest() == harness.IPVS {
		os.Exit(inkernel.Run(tests))
	}
	os.Exit(tests())
}

func runTests(m *testing.M) int {
	if err := selectTier(); err != nil {
		fmt.Fprintln(os.Stderr, "selecting tests:", err)
		return 2
	}
	code := harness.Main(m)
	printTable()
	return code
}

// lab is a World with a control plane on node3 and nodeproxy on node1.
type lab struct {
	*harness.World
	cp                *ControlPlane
	variant           harness.Variant
	kubeconfig, token string
	daemon            *harness.Daemon
	mode              harness.Mode // that daemons start in, if not the default
	added             int          // pods that scenarios added
}

var clusterCIDR = "--cluster-cidr=" + harness.ClusterCIDR4.String() + "," + harness.ClusterCIDR6.String()

func newLab(t *testing.T, variant harness.Variant) *lab {
	t.Helper()
	w := harness.New(t, harness.Options{})
	cp, err := Start(w, w.Nodes[2].Host)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(cp.Logs())
		}
		cp.Close()
	})
	l := &lab{World: w, cp: cp, variant: variant}
	if l.kubeconfig, l.token, err = cp.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, n := range w.Nodes {
		node := w.NodeObject(n, map[string]string{v1.LabelTopologyZone: zones[i], v1.LabelHostname: n.Name})
		status := node.Status
		status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}
		status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("2")}
		made, err := cp.Admin.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		require.NoError(t, err)
		made.Status = status
		if _, err := cp.Admin.CoreV1().Nodes().UpdateStatus(t.Context(), made, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	l.startDaemon(t)
	return l
}

// withFront starts a Front, and returns it with a kubeconfig file by which nodeproxy reaches the API server through it.
func (l *lab) withFront(t *testing.T) (front *Front, kubeconfig string) {
	t.Helper()
	front, err := l.cp.Front(l.World)
	require.NoError(t, err)
	text, err := os.ReadFile(l.kubeconfig)
	require.NoError(t, err)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, text, 0o600))
	require.NoError(t, front.Redirect(l.cp, kubeconfig))
	return front, kubeconfig
}

// zones are those of node1, node2 and node3.
var zones = []string{"zone-a", "zone-b", "zone-c"}

func (l *lab) startDaemon(t *testing.T, more ...string) {
	t.Helper()
	flags := append([]string{clusterCIDR, "--manifests=", "--kubeconfig=" + l.kubeconfig}, more...)
	if l.mode != "" {
		flags = append(flags, "--mode="+string(l.mode))
	}
	l.daemon = l.Run(t, l.variant, flags...)
}

// scenario is one test on a lab, in an API namespace of its own.
type scenario struct {
	*testing.T
	*lab
	namespace string
	loads     []*harness.Load
	pause     time.Duration // of each worker of a load between two requests; 5 ms if it is 0
	ended     bool          // the loads are
}

// row is a line of the table that is printed at the end.
type row struct {
	name             string
	variant          harness.Variant
	ok               bool
	requests, failed int
	took             time.Duration
}

var table struct {
	sync.Mutex
	rows []row
}

// run runs a scenario as a subtest.
func (l *lab) run(t *testing.T, name string, test func(*scenario)) {
	t.Run(name, func(t *testing.T) {
		s := &scenario{T: t, lab: l, namespace: strings.ReplaceAll(name, "_", "-")}
		start := time.Now()
		defer func() {
			r := row{name: name, variant: l.variant, ok: !t.Failed(), took: time.Since(start)}
			for _, load := range s.loads {
				if !s.ended {
					load.Stop() // the test failed before it came to that
				}
				r.requests += load.Requests()
				r.failed += len(load.Failures())
			}
			table.Lock()
			defer table.Unlock()
			table.rows = append(table.rows, r)
		}()
		_, err := l.cp.Admin.CoreV1().Namespaces().Create(t.Context(),
			&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}, metav1.CreateOptions{})
		s.must(err)
		test(s)
	})
}

func printTable() {
	table.Lock()
	defer table.Unlock()
	if len(table.rows) == 0 {
		return
	}
	fmt.Printf("\n%-42s %-7s %-6s %9s %7s %8s\n", "scenario, with a real control plane", "variant", "result", "requests", "failed", "took")
	slices.SortStableFunc(table.rows, func(a, b row) int { return strings.Compare(string(a.variant), string(b.variant)) })
	for _, r := range table.rows {
		result := "ok"
		if !r.ok {
			result = "FAILED"
		}
		fmt.Printf("%-42s %-7s %-6s %9d %7d %8s\n", r.name, r.variant, result, r.requests, r.failed, r.took.Round(time.Millisecond*10))
	}
}

func (s *scenario) must(err error) {
	s.Helper()
	require.NoError(s, err)
}

// service creates the Service web: TCP port 80 to the pods' 8080, for pods with label app=web. The changes given are
// applied to it before.
func (s *scenario) service(changes ...func(*v1.Service)) *v1.Service {
	s.Helper()
	return s.serviceNamed("web", changes...)
}

func (s *scenario) serviceNamed(name string, changes ...func(*v1.Service)) *v1.Service {
	s.Helper()
	svc := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: s.namespace},
		Spec: v1.ServiceSpec{
			Selector: map[string]string{"app": "web"},
			Ports:    []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}},
		},
	}
	for _, change := range changes {
		change(svc)
	}
	svc, err := s.cp.Admin.CoreV1().Services(s.namespace).Create(s.Context(), svc, metav1.CreateOptions{})
	s.must(err)
	return svc
}

// change changes the Service web.
func (s *scenario) change(change func(*v1.Service)) *v1.Service {
	s.Helper()
	for {
		svc, err := s.cp.Admin.CoreV1().Services(s.namespace).Get(s.Context(), "web", metav1.GetOptions{})
		s.must(err)
		change(svc)
		svc, err = s.cp.Admin.CoreV1().Services(s.namespace).Update(s.Context(), svc, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) {
			s.must(err)
			return svc
		}
	}
}

func (s *scenario) deleteService() {
	s.Helper()
	s.must(s.cp.Admin.CoreV1().Services(s.namespace).Delete(s.Context(), "web", metav1.DeleteOptions{}))
}

// pod makes Pods, ready, that run as these pods of the World; see harness.World.Pod.
func (s *scenario) pod(names ...string) {
	s.Helper()
	for _, name := range names {
		obj := s.PodObject(s.World.Pod(name), map[string]string{"app": "web"})
		obj.Namespace = s.namespace
		status := obj.Status
		// A kubelet says since when; the endpoints controller passes that on as the time of the change.
		for i := range status.Conditions {
			status.Conditions[i].LastTransitionTime = metav1.Now()
		}
		made, err := s.cp.Admin.CoreV1().Pods(s.namespace).Create(s.Context(), obj, metav1.CreateOptions{})
		s.must(err)
		made.Status = status
		_, err = s.cp.Admin.CoreV1().Pods(s.namespace).UpdateStatus(s.Context(), made, metav1.UpdateOptions{})
		s.must(err)
	}
}

// terminate asks for the end of a Pod, as a rollout does; it is gone only after gone, which is the kubelet's part.
func (s *scenario) terminate(name string) {
	s.Helper()
	s.must(s.cp.Admin.CoreV1().Pods(s.namespace).Delete(s.Context(), name,
		metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(30))}))
}

// terminating fails as long as the EndpointSlices do not say that a pod terminates.
func (s *scenario) terminating(name string) error {
	list, err := s.cp.Admin.DiscoveryV1().EndpointSlices(s.namespace).List(s.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, es := range list.Items {
		for _, ep := range es.Endpoints {
			if ep.TargetRef != nil && ep.TargetRef.Name == name && !ptr.Deref(ep.Conditions.Terminating, false) {
				return fmt.Errorf("EndpointSlice %s has %s with conditions %v", es.Name, name, ep.Conditions)
			}
		}
	}
	return nil
}

func (s *scenario) gone(names ...string) {
	s.Helper()
	for _, name := range names {
		s.must(s.cp.Admin.CoreV1().Pods(s.namespace).Delete(s.Context(), name,
			metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}))
	}
}

// newPod adds a pod to the World, with a name and an address that no other has.
func (s *scenario) newPod(node int) string {
	s.Helper()
	s.added++
	name := fmt.Sprintf("p%d", s.added)
	s.AddPod(s.T, s.Nodes[node-1], name, fmt.Sprintf("10.244.%d.%d", node, 100+s.added), 8080)
	return name
}

// workers is how many requests of a load are under way at a time.
const workers = 2

// load starts requests that must all be answered.
func (s *scenario) load(from *harness.Host, to netip.AddrPort) *harness.Load {
	l := from.StartLoad("tcp", to, workers, cmp.Or(s.pause, 5*time.Millisecond))
	s.loads = append(s.loads, l)
	return l
}

// enoughRequests is how many requests a load must have made to show anything.
const enoughRequests = 50

// more waits until each load has made some requests more.
func (s *scenario) more() {
	s.Helper()
	for _, l := range s.loads {
		s.requested(l, l.Requests()+20)
	}
}

// requested waits until a load has made n requests.
func (s *scenario) requested(l *harness.Load, n int) {
	s.Helper()
	s.eventually("requests", func() error {
		if made := l.Requests(); made < n {
			return fmt.Errorf("%d requests, want %d", made, n)
		}
		return nil
	})
}

// endLoads ends all loads, not before each has made enough requests. A failed or missing request fails the test.
func (s *scenario) endLoads() {
	s.Helper()
	s.ended = true
	for _, l := range s.loads {
		s.requested(l, enoughRequests)
		l.Stop()
		if failures := l.Failures(); len(failures) > 0 {
			s.Errorf("%d of %d requests failed; the first: %v after %v", len(failures), l.Requests(), failures[0], failures[0].Took)
		}
	}
}

// eventually repeats a check until it succeeds, and fails the test if it doesn't in time.
func (s *scenario) eventually(what string, check func() error) {
	s.Helper()
	s.within(harness.Limit, what, check)
}

func (s *scenario) within(timeout time.Duration, what string, check func() error) {
	s.Helper()
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		err := check()
		if err == nil {
			harness.Settle(s.T)
			return
		}
		if time.Since(start) > timeout {
			s.Fatalf("%s, still not after %v: %v", what, timeout, err)
		}
	}
}

// servers returns a check that TCP requests are answered by all of these servers and no other.
func servers(client *harness.Host, to netip.AddrPort, want ...string) func() error {
	return func() error {
		seen := map[string]int{}
		for i := 0; i < 200 && (i < 12 || len(seen) < len(want)); i++ {
			a := client.Ask("tcp", to, harness.Brief)
			if a.Outcome != harness.Answered || !slices.Contains(want, a.Server) {
				return fmt.Errorf("%s from %s: %v, want an answer of one of %v", to, client.Name, a, want)
			}
			seen[a.Server]++
		}
		if len(seen) < len(want) {
			return fmt.Errorf("%s from %s: answers of %v, want all of %v", to, client.Name, seen, want)
		}
		return nil
	}
}

// ends returns a check that a TCP request ends in a certain way.
func ends(client *harness.Host, to netip.AddrPort, want harness.Outcome) func() error {
	timeout := harness.Brief
	if want == harness.Refused {
		timeout = harness.Patient // the socket may take note only of the second ICMP error, a second later
	}
	return func() error {
		if a := client.Ask("tcp", to, timeout); a.Outcome != want {
			return fmt.Errorf("%s from %s: %v, want %s", to, client.Name, a, want)
		}
		return nil
	}
}

// at is the frontend at a Service's cluster IP of a family and port 80.
func at(svc *v1.Service, family int) netip.AddrPort {
	for _, text := range svc.Spec.ClusterIPs {
		if ip := netip.MustParseAddr(text); ip.Is4() == (family == 4) {
			return netip.AddrPortFrom(ip, 80)
		}
	}
	return netip.AddrPort{}
}

// nodePort is the first port of a Service at node1's address.
func (s *scenario) nodePort(svc *v1.Service) netip.AddrPort {
	return netip.AddrPortFrom(s.Node1().IP4, uint16(svc.Spec.Ports[0].NodePort))
}
