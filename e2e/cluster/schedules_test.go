package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// The environment variables that say how many schedules TestSchedules has on each variant, and the seed of the first one.
const (
	schedulesVariable = "NODEPROXY_SCHEDULES"
	scheduleVariable  = "NODEPROXY_SCHEDULE"
)

// TestSchedules is TestProve of cmd/nodeproxy with a real API server and a real kernel: what happens to objects, to the API server, to
// nodeproxy and, in every second schedule, to its rules, is drawn from a seed. In the end, packets get where the objects say, the kernel
// holds what they ask for, and nodeproxy says that it does. Unless others change rules, no request to a Service that stays as it is fails.
func TestSchedules(t *testing.T) {
	n, first := numberOf(t, schedulesVariable, 4), numberOf(t, scheduleVariable, 0)
	variants := harness.Variants
	if harness.ModeUnderTest() == harness.NFTables {
		variants = variants[:1] // They are the same there.
	}
	for _, variant := range variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, variant)
			front, kubeconfig := l.withFront(t)
			l.kubeconfig = kubeconfig
			require.NoError(t, l.daemon.Stop())
			l.startDaemon(t)
			for seed := first; seed < first+n; seed++ {
				l.run(t, fmt.Sprintf("schedule-%d", seed), func(s *scenario) {
					x := &schedule{scenario: s, front: front, random: rand.New(rand.NewPCG(uint64(seed), 0))}
					x.run(seed%2 == 1)
				})
			}
		})
	}
}

func numberOf(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// schedule is one of TestSchedules.
type schedule struct {
	*scenario
	front    *Front
	random   *rand.Rand
	services [5]scheduledService
	flags    []string // of the nodeproxy that runs
	lost     func() int64
	stopLoss func()
}

// scheduledService is a Service with an EndpointSlice of its own.
type scheduledService struct {
	*v1.Service          // nil if it is not there
	pods        []string // its endpoints
}

// scheduledPods are those that are endpoints.
var scheduledPods = []string{"n1a", "n1b", "n2a", "n3a"}

// scheduledEvent is something that may happen. It returns words for what has happened.
type scheduledEvent struct {
	name   string
	weight int
	do     func(*schedule) string
}

var scheduledEvents = []scheduledEvent{
	{"endpoints", 10, func(x *schedule) string { return x.changeEndpoints(x.random.IntN(len(x.services))) }},
	{"all endpoints", 1, func(x *schedule) string {
		for i := range x.services {
			x.changeEndpoints(i)
		}
		return ""
	}},
	{"service", 3, func(x *schedule) string { return x.changeService(x.random.IntN(len(x.services))) }},
	{"watches expire", 2, func(x *schedule) string {
		x.eventually("nodeproxy watches", func() error { return x.front.Expire(x.Node1().IP4) })
		return ""
	}},
	{"events lost", 1, (*schedule).lose},
	{"API server killed", 1, func(x *schedule) string {
		x.cp.APIServer.Kill()
		x.must(x.cp.StartAPIServer())
		return ""
	}},
	{"API server hangs", 1, func(x *schedule) string {
		x.must(x.cp.APIServer.Freeze())
		long := time.Duration(x.random.Int64N(int64(3 * time.Second)))
		time.Sleep(long) // how long it hangs
		x.must(x.cp.APIServer.Thaw())
		return long.String()
	}},
	{"nodeproxy killed", 3, func(x *schedule) string {
		x.must(x.daemon.Kill())
		x.startDaemon(x.T, x.flags...)
		return ""
	}},
	{"nodeproxy killed in a change", 2, func(x *schedule) string {
		what := x.changeEndpoints(x.random.IntN(len(x.services)))
		long := time.Duration(x.random.Int64N(int64(50 * time.Millisecond)))
		time.Sleep(long) // which is somewhere in that change
		x.must(x.daemon.Kill())
		x.startDaemon(x.T, x.flags...)
		return what + " after " + long.String()
	}},
	{"other flags", 1, func(x *schedule) string {
		x.must(x.daemon.Stop())
		if x.flags = nil; x.random.IntN(2) == 0 {
			x.flags = append(x.flags, "--masquerade-all")
		}
		if x.random.IntN(2) == 0 {
			x.flags = append(x.flags, "--iptables-masquerade-bit=15", "--nftables-masquerade-bit=15")
		}
		x.startDaemon(x.T, x.flags...)
		return strings.Join(x.flags, " ")
	}},
}

// scheduledDisturbances are what others do to rules, by mode. {} stands for the variant, and CHAIN for a chain of Services.
var scheduledDisturbances = map[harness.Mode][]string{
	harness.IPTables: {"iptables-{} -w -t nat -F", "ip6tables-{} -w -t nat -F", "iptables-{} -w -t filter -F", "iptables-{} -w -t nat -F PREROUTING",
		"iptables-{} -w -t nat -F CHAIN", "iptables-{} -w -t nat -I CHAIN -p tcp -j ACCEPT", "iptables-{} -w -t nat -D CHAIN 1"},
	harness.IPVS: {"ipvsadm -C", "ipset flush KUBE-CLUSTER-IP", "ip link del kube-ipvs0", "iptables-{} -w -t filter -F", "iptables-{} -w -t nat -F"},
	harness.NFTables: {"nft delete table ip nodeproxy", "nft delete table ip6 nodeproxy", "nft flush chain ip nodeproxy prerouting",
		"nft flush map ip nodeproxy services", "nft flush map ip nodeproxy endpoints", "nft insert rule ip nodeproxy to-services accept",
		"nft 'add table ip nodeproxy { flags dormant; }'"},
}

func (x *schedule) run(disturbed bool) {
	defer x.putBack()
	for i := range x.services {
		_, err := x.cp.Admin.DiscoveryV1().EndpointSlices(x.namespace).Create(x.Context(), &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: x.sliceName(i), Namespace: x.namespace, Labels: map[string]string{discovery.LabelServiceName: x.name(i)}},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: ptr.To(""), Port: ptr.To(int32(8080)), Protocol: ptr.To(v1.ProtocolTCP)}},
		}, metav1.CreateOptions{})
		x.must(err)
		x.changeService(i)
		x.changeEndpoints(i)
	}
	if !disturbed {
		x.loadedService("n1a", "n2a")
	}
	events := scheduledEvents
	if disturbed {
		events = append(slices.Clone(events), scheduledEvent{"rules changed", 6, (*schedule).disturb})
	}
	var weighted []scheduledEvent
	for _, e := range events {
		weighted = append(weighted, slices.Repeat([]scheduledEvent{e}, e.weight)...)
	}
	for range 8 + x.random.IntN(8) {
		time.Sleep(time.Duration(x.random.Int64N(int64(time.Second))) / time.Duration(1+9*x.random.IntN(2))) // until the next event
		e := weighted[x.random.IntN(len(weighted))]
		x.Logf("%s %s", e.name, e.do(x))
	}
	x.end()
}

func (x *schedule) name(i int) string      { return fmt.Sprint("s", i) }
func (x *schedule) sliceName(i int) string { return fmt.Sprintf("%s-s%d", x.namespace, i) }

// changeEndpoints draws the endpoints of a Service.
func (x *schedule) changeEndpoints(i int) string {
	x.Helper()
	var pods []string
	list := []discovery.Endpoint{} // A patch replaces nothing by null.
	for _, name := range scheduledPods {
		if x.random.IntN(2) == 0 {
			p := x.World.Pod(name)
			pods = append(pods, name)
			list = append(list, discovery.Endpoint{Addresses: []string{p.IP4.String()}, NodeName: ptr.To(p.Node.Name),
				Conditions: discovery.EndpointConditions{Ready: ptr.To(true)}})
		}
	}
	patch, err := json.Marshal(map[string]any{"endpoints": list})
	x.must(err)
	all := x.cp.Admin.DiscoveryV1().EndpointSlices(x.namespace)
	x.eventually("the API server takes endpoints", func() error {
		_, err := all.Patch(x.Context(), x.sliceName(i), types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
	x.services[i].pods = pods
	return fmt.Sprintf("of %s: %v", x.name(i), pods)
}

// changeService makes a Service, or removes the one that is there, or changes its policies.
func (x *schedule) changeService(i int) string {
	x.Helper()
	all := x.cp.Admin.CoreV1().Services(x.namespace)
	policies := []v1.ServiceInternalTrafficPolicy{v1.ServiceInternalTrafficPolicyCluster, v1.ServiceInternalTrafficPolicyLocal}
	external := []v1.ServiceExternalTrafficPolicy{v1.ServiceExternalTrafficPolicyCluster, v1.ServiceExternalTrafficPolicyLocal}
	s := &x.services[i]
	spec := map[string]any{"internalTrafficPolicy": policies[x.random.IntN(2)], "externalTrafficPolicy": external[x.random.IntN(2)]}
	if removes := x.random.IntN(2) == 0; s.Service != nil && removes {
		x.eventually("the API server removes a Service", func() error {
			err := all.Delete(x.Context(), x.name(i), metav1.DeleteOptions{})
			if apierrors.IsNotFound(err) { // An answer was lost.
				return nil
			}
			return err
		})
		s.Service = nil
		return x.name(i) + " removed"
	}
	patch, err := json.Marshal(map[string]any{"spec": spec})
	x.must(err)
	x.eventually("the API server takes a Service", func() error {
		if s.Service == nil {
			svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: x.name(i)}, Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeNodePort, Ports: []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}
			if _, err := all.Create(x.Context(), svc, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
		now, err := all.Patch(x.Context(), x.name(i), types.MergePatchType, patch, metav1.PatchOptions{})
		if err == nil {
			s.Service = now
		}
		return err
	})
	return fmt.Sprintf("%s has %v", x.name(i), spec)
}

// lose makes the front lose the events of a Service's endpoints from now on.
func (x *schedule) lose() string {
	i := x.random.IntN(len(x.services))
	if x.stopLoss != nil {
		x.stopLoss()
	}
	x.lost, x.stopLoss = x.front.Lose(x.sliceName(i))
	return "of " + x.sliceName(i)
}

// disturb changes rules as others do.
func (x *schedule) disturb() string {
	list := scheduledDisturbances[harness.ModeUnderTest()]
	do := strings.ReplaceAll(list[x.random.IntN(len(list))], "{}", string(x.variant))
	which := x.random.Uint64() // Whatever the kernel holds, what is drawn later is the same.
	if strings.Contains(do, "CHAIN") {
		text, err := x.Node1().Output("iptables-"+string(x.variant)+"-save", "-t", "nat")
		x.must(err)
		var chains []string
		for line := range strings.Lines(text) {
			if name, _, _ := strings.Cut(line, " "); strings.HasPrefix(name, ":KUBE-S") {
				chains = append(chains, name[1:])
			}
		}
		if len(chains) == 0 {
			return "nothing, as there is no chain"
		}
		do = strings.ReplaceAll(do, "CHAIN", chains[which%uint64(len(chains))])
	}
	if _, err := x.Node1().Output("sh", "-c", do); err != nil {
		if !gone.MatchString(err.Error()) {
			x.Errorf("%v", err)
		}
		return err.Error()
	}
	return do
}

// gone finds what programs say of something that is not there, as another event may have taken it away, or that has just changed.
var gone = regexp.MustCompile(`No such file|does not exist|doesn't exist|No chain|deletion too big|Cannot find device|[Rr]esource busy|temporarily`)

// end ends all trouble, and checks what must hold then.
func (x *schedule) end() {
	x.Helper()
	if x.stopLoss != nil {
		x.stopLoss()
		x.Logf("%d events were lost", x.lost())
	}
	x.eventually("nodeproxy says that it has verified all", func() error {
		code, body, err := x.Node1().Get(harness.HealthAddr, "/readyz?verify")
		if err == nil && code != http.StatusOK {
			err = errors.New(body)
		}
		return err
	})
	for i, s := range x.services {
		x.eventually("what "+x.name(i)+" asks for", func() error { return x.serves(s) })
	}
	binary, err := harness.Binary()
	x.must(err)
	diff := append([]string{"diff", "--mode=" + string(harness.ModeUnderTest()), "--iptables-backend=" + string(x.variant),
		"--ipvs-vips=" + string(harness.VIPsWith(x.variant)), "--node-name=node1", "--kubeconfig=" + x.kubeconfig, clusterCIDR}, x.flags...)
	x.eventually("the kernel holds what the objects ask for", func() error {
		out, err := x.Node1().Output(binary, diff...)
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	if len(x.loads) > 0 {
		x.endLoads()
	}
	for i, s := range x.services {
		if s.Service != nil {
			x.must(x.cp.Admin.CoreV1().Services(x.namespace).Delete(x.Context(), x.name(i), metav1.DeleteOptions{}))
		}
	}
}

// putBack leaves the lab as the next schedule expects it, also after a failure.
func (x *schedule) putBack() {
	if x.stopLoss != nil {
		x.stopLoss()
	}
	if len(x.flags) > 0 {
		_ = x.daemon.Stop() // It may have ended.
		x.startDaemon(x.T)
	}
}

// serves fails if packets to a Service do not get where its objects say.
func (x *schedule) serves(s scheduledService) error {
	if s.Service == nil {
		return nil // Its address may be another Service's by now.
	}
	here := slices.DeleteFunc(slices.Clone(s.pods), func(name string) bool { return x.World.Pod(name).Node != x.Node1() })
	reached := func(to netip.AddrPort, local bool) error {
		want := s.pods
		if local {
			want = here
		}
		switch {
		case len(s.pods) == 0:
			return ends(x.Client, to, harness.Refused)()
		case len(want) == 0:
			return ends(x.Client, to, harness.TimedOut)()
		}
		return servers(x.Client, to, want...)()
	}
	return errors.Join(reached(at(s.Service, 4), ptr.Deref(s.Spec.InternalTrafficPolicy, "") == v1.ServiceInternalTrafficPolicyLocal),
		reached(x.nodePort(s.Service), s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal))
}
