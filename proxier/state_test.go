package proxier

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/source"
)

func ptr[T any](v T) *T { return &v }

// cluster is a set of objects, as a source holds them.
type cluster struct {
	services map[types.NamespacedName]*v1.Service
	slices   map[types.NamespacedName]*discovery.EndpointSlice
	node     *v1.Node
}

func newCluster() *cluster {
	return &cluster{
		services: map[types.NamespacedName]*v1.Service{},
		slices:   map[types.NamespacedName]*discovery.EndpointSlice{},
	}
}

// drawEvent changes one object of the cluster and returns the batch that tells of it. There are few names and addresses,
// so that objects come back after they went, and claim what others have.
func (c *cluster) drawEvent(t *rapid.T) source.Batch {
	name := types.NamespacedName{Namespace: "ns", Name: rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "name")}
	gone := rapid.IntRange(0, 3).Draw(t, "gone") == 0
	switch rapid.SampledFrom([]string{"service", "service", "slice", "slice", "slice", "node"}).Draw(t, "kind") {
	case "service":
		c.services[name] = nil
		if !gone {
			c.services[name] = drawService(t, name)
		}
		return source.Batch{Services: map[types.NamespacedName]*v1.Service{name: c.services[name]}}
	case "slice":
		name.Name += rapid.SampledFrom([]string{"-1", "-2"}).Draw(t, "slice")
		c.slices[name] = nil
		if !gone {
			c.slices[name] = drawSlice(t, name)
		}
		return source.Batch{EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{name: c.slices[name]}}
	}
	c.node = &v1.Node{ObjectMeta: metav1.ObjectMeta{
		Name:   "me",
		Labels: map[string]string{v1.LabelTopologyZone: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "zone")},
	}}
	c.node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.168.0.1"}}
	return source.Batch{Nodes: map[string]*v1.Node{"me": c.node}}
}

// all is the whole cluster as one batch.
func (c *cluster) all() source.Batch {
	b := source.Batch{Services: maps.Clone(c.services), EndpointSlices: maps.Clone(c.slices), Synced: true}
	if c.node != nil {
		b.Nodes = map[string]*v1.Node{"me": c.node}
	}
	return b
}

func drawService(t *rapid.T, name types.NamespacedName) *v1.Service {
	some := func(label string, values ...string) []string {
		return rapid.SliceOfN(rapid.SampledFrom(values), 0, 2).Draw(t, label)
	}
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	s := &svc.Spec
	s.Type = rapid.SampledFrom([]v1.ServiceType{"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"}).Draw(t, "type")
	s.ClusterIPs = rapid.SampledFrom([][]string{{"10.96.0.1"}, {"10.96.0.2", "fd00::2"}, {"fd00::3"}, {"None"}, {"bad"}}).Draw(t, "IPs")
	s.ClusterIP = s.ClusterIPs[0]
	s.ExternalIPs = some("external", "1.1.1.1", "10.96.0.1", "127.0.0.1", "fd00::2")
	s.ExternalTrafficPolicy = rapid.SampledFrom([]v1.ServiceExternalTrafficPolicy{"Cluster", "Local"}).Draw(t, "eTP")
	s.InternalTrafficPolicy = ptr(rapid.SampledFrom([]v1.ServiceInternalTrafficPolicy{"Cluster", "Local"}).Draw(t, "iTP"))
	s.LoadBalancerSourceRanges = some("ranges", "10.0.0.0/8", "0.0.0.0/0", " 1.0.0.0/8 ", "x")
	for _, ip := range some("vip", "1.1.1.1", "2.2.2.2") {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
	}
	for _, p := range rapid.SliceOfN(rapid.SampledFrom([]string{"x", "y"}), 1, 2).Draw(t, "ports") {
		port := v1.ServicePort{Name: p, Port: rapid.SampledFrom([]int32{80, 81, 0}).Draw(t, "port")}
		if s.Type != v1.ServiceTypeClusterIP {
			port.NodePort = rapid.SampledFrom([]int32{0, 30000, 30001}).Draw(t, "node port")
		}
		s.Ports = append(s.Ports, port)
	}
	return svc
}

func drawSlice(t *rapid.T, name types.NamespacedName) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: name.Namespace, Name: name.Name,
		Labels: map[string]string{
			discovery.LabelServiceName: rapid.SampledFrom([]string{"a", "b", "c", "d", ""}).Draw(t, "of"),
		},
	}}
	s.AddressType = rapid.SampledFrom([]discovery.AddressType{"IPv4", "IPv4", "IPv6", "FQDN"}).Draw(t, "type")
	for _, p := range []string{"x", "y"} {
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: ptr(p), Port: ptr[int32](8080)})
	}
	for _, ip := range rapid.SliceOfN(rapid.SampledFrom([]string{"10.0.0.1", "10.0.0.2", "fd01::1", "169.254.0.1"}), 0, 3).Draw(t, "ips") {
		e := discovery.Endpoint{Addresses: []string{ip}}
		e.Conditions.Ready = rapid.SampledFrom([]*bool{nil, ptr(true), ptr(false)}).Draw(t, "ready")
		e.Conditions.Terminating = rapid.SampledFrom([]*bool{nil, ptr(true)}).Draw(t, "terminating")
		e.NodeName = rapid.SampledFrom([]*string{nil, ptr("me"), ptr("other")}).Draw(t, "node")
		if rapid.Bool().Draw(t, "hinted") {
			e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{
				Name: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "hint")}}}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func newTestState(report source.Report) *State {
	return NewState("me", plan.Settings{}, plan.Families[:], report)
}

func dump(p *plan.Plan) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%+v\n", p.Node)
	for _, f := range plan.Families {
		for _, sp := range p.Sorted(f) {
			fmt.Fprintf(&b, "%+v\n", *sp)
		}
	}
	return b.String()
}

// TestPlanFollowsFromObjectsAlone: whatever the order and grouping of events, and however often the plan was made
// meanwhile, it is the one that the final objects give; and the keys that Update names are those that differ.
func TestPlanFollowsFromObjectsAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, s := newCluster(), newTestState(nil)
		before := map[plan.Key]*plan.ServicePort{}
		var pending source.Batch
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			pending.Merge(c.drawEvent(t))
			if rapid.Bool().Draw(t, "apply") {
				s.Apply(pending)
				pending = source.Batch{}
			}
			if rapid.IntRange(0, 3).Draw(t, "update") == 0 {
				before = checkChanged(t, s, before)
			}
		}
		s.Apply(pending)
		checkChanged(t, s, before)

		fresh := newTestState(nil)
		fresh.Apply(c.all())
		fresh.Update()
		if got, want := dump(s.Plan()), dump(fresh.Plan()); got != want {
			t.Fatalf("by events:\n%s\nat once:\n%s", got, want)
		}
		for id := range s.services {
			if svc := s.services[id]; len(svc.slices) == 0 && c.services[types.NamespacedName(id)] == nil {
				t.Fatalf("%s is kept though nothing is left of it", id)
			}
		}
		// All objects go: nothing may be left.
		gone := source.Batch{Services: map[types.NamespacedName]*v1.Service{},
			EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{}}
		for name := range c.services {
			gone.Services[name] = nil
		}
		for name := range c.slices {
			gone.EndpointSlices[name] = nil
		}
		s.Apply(gone)
		s.Update()
		if n := len(s.services) + len(s.claims) + len(s.sliceOf) + len(s.plan.Services) + len(s.dirty); n > 0 {
			t.Fatalf("%d things are left when all objects are gone", n)
		}
		if len(s.reported) > 0 {
			t.Fatalf("findings about objects that are gone are kept: %v", s.reported)
		}
	})
}

// checkChanged updates the state and checks the keys that it names against what differs from before.
func checkChanged(t *rapid.T, s *State, before map[plan.Key]*plan.ServicePort) map[plan.Key]*plan.ServicePort {
	p, changed := s.Update()
	after := maps.Clone(p.Services)
	if changed == nil {
		return after
	}
	differ := plan.Keys{}
	for k, sp := range after {
		if before[k] == nil || !before[k].Equal(sp) {
			differ.Add(k)
		}
	}
	for k := range before {
		if after[k] == nil {
			differ.Add(k)
		}
	}
	if !maps.Equal(differ, changed) {
		t.Fatalf("changed: %v; what differs: %v", changed, differ)
	}
	for k, sp := range after {
		if sp.Key != k || !slices.Contains(p.KeysOf(k.Service), k) {
			t.Fatalf("%s is not found under its Service", k)
		}
	}
	return after
}

// TestFindingsAreToldOnce: what is wrong with an object is said when it appears and when it changes, and not again.
func TestFindingsAreToldOnce(t *testing.T) {
	var said []string
	s := newTestState(func(f source.Finding) { said = append(said, f.String()) })
	apply := func(svc *v1.Service) []string {
		said = nil
		s.Apply(source.Batch{Services: map[types.NamespacedName]*v1.Service{{Namespace: "ns", Name: "a"}: svc}})
		s.Update()
		return said
	}
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"}, Spec: v1.ServiceSpec{
		ClusterIP: "10.96.0.1", ExternalIPs: []string{"127.0.0.1"}, Ports: []v1.ServicePort{{Port: 80}},
	}}
	want := "Service ns/a: spec.externalIPs[0]: 127.0.0.1 is a loopback address; this external IP is not proxied"
	if got := apply(svc); !slices.Equal(got, []string{want}) {
		t.Errorf("at first: %q", got)
	}
	changed := svc.DeepCopy()
	changed.Spec.Ports[0].Port = 81
	if got := apply(changed); len(got) != 0 {
		t.Errorf("another field changed: %q", got)
	}
	mended := changed.DeepCopy()
	mended.Spec.ExternalIPs = nil
	apply(mended)
	if got := apply(svc); !slices.Equal(got, []string{want}) {
		t.Errorf("wrong again after it was right: %q", got)
	}
}

// TestOwners: who has a frontend that several Services ask for.
func TestOwners(t *testing.T) {
	s := newTestState(nil)
	service := func(name, clusterIP string, external ...string) *v1.Service {
		return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: v1.ServiceSpec{
			ClusterIP: clusterIP, ExternalIPs: external, Ports: []v1.ServicePort{{Port: 80}},
		}}
	}
	set := func(name string, svc *v1.Service) plan.Keys {
		s.Apply(source.Batch{Services: map[types.NamespacedName]*v1.Service{{Namespace: "ns", Name: name}: svc}})
		_, changed := s.Update()
		return changed
	}
	owns := func(name, ip string) bool {
		for _, sp := range s.Plan().Sorted(plan.IPv4) {
			for _, f := range sp.Frontends {
				if sp.Key.Service.Name == name && f.Addr.String() == ip {
					return true
				}
			}
		}
		return false
	}
	set("b", service("b", "10.96.0.2", "1.1.1.1"))
	set("z", service("z", "10.96.0.9"))
	set("a", service("a", "10.96.0.1", "1.1.1.1", "10.96.0.9"))
	if !owns("a", "1.1.1.1") || owns("b", "1.1.1.1") {
		t.Error("of two external IPs, that of the lower name counts, whichever came first")
	}
	if !owns("z", "10.96.0.9") || owns("a", "10.96.0.9") {
		t.Error("an external IP took a cluster IP's traffic")
	}
	if changed := set("a", nil); len(changed) != 2 || !owns("b", "1.1.1.1") {
		t.Errorf("when the owner goes, the next one takes over, and nothing else changes: %v", changed)
	}
}
