package proxier

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"nodeproxy/source"
)

// cluster is a set of objects, as a source holds them.
type cluster struct {
	services map[types.NamespacedName]*v1.Service
	slices   map[types.NamespacedName]*discovery.EndpointSlice
	cidrs    map[string]*networking.ServiceCIDR
	node     *v1.Node // as it was last
	nodeGone bool
}

func newCluster() *cluster {
	return &cluster{
		services: map[types.NamespacedName]*v1.Service{},
		slices:   map[types.NamespacedName]*discovery.EndpointSlice{},
		cidrs:    map[string]*networking.ServiceCIDR{},
	}
}

// drawEvent changes one object of the cluster and returns the batch with it. There are few names and addresses,
// so that objects come back after they went, and claim what others have.
func (c *cluster) drawEvent(t *rapid.T) source.Batch {
	name := types.NamespacedName{Namespace: "ns", Name: rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "name")}
	gone := rapid.IntRange(0, 3).Draw(t, "gone") == 0
	switch rapid.SampledFrom([]string{"service", "service", "slice", "slice", "slice", "cidr", "node"}).Draw(t, "kind") {
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
	case "cidr":
		c.cidrs[name.Name] = nil
		if !gone {
			ranges := rapid.SampledFrom([]string{"10.96.0.0/16", "10.97.0.0/16", "::ffff:10.96.0.0/112", "fd00::/112", "x"})
			c.cidrs[name.Name] = &networking.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name.Name},
				Spec: networking.ServiceCIDRSpec{CIDRs: rapid.SliceOfN(ranges, 0, 2).Draw(t, "ranges")}}
		}
		return source.Batch{ServiceCIDRs: map[string]*networking.ServiceCIDR{name.Name: c.cidrs[name.Name]}}
	}
	return c.drawNode(t, gone)
}

// drawNode changes this node, or adds another.
func (c *cluster) drawNode(t *rapid.T, gone bool) source.Batch {
	name := rapid.SampledFrom([]string{"me", "me", "other"}).Draw(t, "node")
	if gone {
		c.nodeGone = c.nodeGone || name == "me"
		return source.Batch{Nodes: map[string]*v1.Node{name: nil}}
	}
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{
		Name:   name,
		Labels: map[string]string{v1.LabelTopologyZone: rapid.SampledFrom([]string{"a", "b", ""}).Draw(t, "zone")},
	}}
	n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP,
		Address: rapid.SampledFrom([]string{"192.168.0.1", "192.168.0.2", "x"}).Draw(t, "node IP")}}
	n.Spec.PodCIDRs = []string{rapid.SampledFrom([]string{"10.244.1.0/24", "10.244.2.0/24", "x"}).Draw(t, "pod CIDR")}
	if rapid.IntRange(0, 3).Draw(t, "tainted") == 0 {
		n.Spec.Taints = []v1.Taint{{Key: source.TaintToBeDeleted}}
	}
	if name == "me" {
		c.node, c.nodeGone = n, false
	}
	return source.Batch{Nodes: map[string]*v1.Node{n.Name: n}}
}

// eligible is what a State of these objects should say of this node.
func (c *cluster) eligible() bool {
	return !c.nodeGone && (c.node == nil || len(c.node.Spec.Taints) == 0)
}

// oneByOne are the objects of the cluster in any order, each as a batch of its own.
func (c *cluster) oneByOne(t *rapid.T) []source.Batch {
	var list []source.Batch
	for _, name := range sortedNames(c.services) {
		list = append(list, source.Batch{Services: map[types.NamespacedName]*v1.Service{name: c.services[name]}})
	}
	for _, name := range sortedNames(c.slices) {
		list = append(list, source.Batch{EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{name: c.slices[name]}})
	}
	for _, name := range slices.Sorted(maps.Keys(c.cidrs)) {
		list = append(list, source.Batch{ServiceCIDRs: map[string]*networking.ServiceCIDR{name: c.cidrs[name]}})
	}
	if nodes := c.nodes(); nodes != nil {
		list = append(list, source.Batch{Nodes: nodes})
	}
	return rapid.Permutation(list).Draw(t, "order")
}

// all is the whole cluster as one batch.
func (c *cluster) all() source.Batch {
	return source.Batch{Services: maps.Clone(c.services), EndpointSlices: maps.Clone(c.slices), ServiceCIDRs: maps.Clone(c.cidrs),
		Nodes: c.nodes(), Synced: true}
}

// nodes is this node as a part of a batch.
func (c *cluster) nodes() map[string]*v1.Node {
	var b source.Batch
	if c.node != nil {
		b.Nodes = map[string]*v1.Node{"me": c.node}
	}
	if c.nodeGone {
		b.Merge(source.Batch{Nodes: map[string]*v1.Node{"me": nil}})
	}
	return b.Nodes
}

func drawService(t *rapid.T, name types.NamespacedName) *v1.Service {
	some := func(label string, values ...string) []string {
		return rapid.SliceOfN(rapid.SampledFrom(values), 0, 2).Draw(t, label)
	}
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	svc.Annotations = rapid.SampledFrom([]map[string]string{
		nil, {source.AnnotationScheduler: "wrr"}, {source.AnnotationScheduler: "mh,port"}, {source.AnnotationScheduler: "best"},
		{source.AnnotationKubeRouterScheduler: "sh", source.AnnotationKubeRouterSchedFlags: "flag-1"},
	}).Draw(t, "scheduler")
	s := &svc.Spec
	s.Type = rapid.SampledFrom([]v1.ServiceType{"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"}).Draw(t, "type")
	s.ClusterIPs = rapid.SampledFrom([][]string{
		{"10.96.0.1"}, {"10.96.0.2", "fd00::2"}, {"fd00::3"}, {"None"}, {"bad"},
	}).Draw(t, "IPs")
	s.ClusterIP = s.ClusterIPs[0]
	s.ExternalIPs = some("external", "1.1.1.1", "10.96.0.1", "127.0.0.1", "fd00::2")
	s.ExternalTrafficPolicy = rapid.SampledFrom([]v1.ServiceExternalTrafficPolicy{"Cluster", "Local"}).Draw(t, "eTP")
	s.InternalTrafficPolicy = new(rapid.SampledFrom([]v1.ServiceInternalTrafficPolicy{"Cluster", "Local"}).Draw(t, "iTP"))
	s.HealthCheckNodePort = rapid.SampledFrom([]int32{0, 30000, 30001}).Draw(t, "health check")
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
	if rapid.IntRange(0, 9).Draw(t, "headless") == 0 {
		s.Labels[v1.IsHeadlessService] = ""
	}
	s.Annotations = rapid.SampledFrom([]map[string]string{
		nil, {source.AnnotationWeights: "10.0.0.1=3,10.0.0.2=1"}, {source.AnnotationWeights: "10.0.0.1=2,fd01::1=4"},
		{source.AnnotationWeights: "10.0.0.2=0,x"},
	}).Draw(t, "weights")
	s.AddressType = rapid.SampledFrom([]discovery.AddressType{"IPv4", "IPv4", "IPv6", "FQDN"}).Draw(t, "type")
	for _, p := range []string{"x", "y"} {
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: new(p), Port: new(int32(8080))})
	}
	ips := rapid.SampledFrom([]string{"10.0.0.1", "10.0.0.2", "fd01::1", "169.254.0.1"})
	for _, ip := range rapid.SliceOfN(ips, 0, 3).Draw(t, "ips") {
		e := discovery.Endpoint{Addresses: []string{ip}}
		e.Conditions.Ready = rapid.SampledFrom([]*bool{nil, new(true), new(false)}).Draw(t, "ready")
		e.Conditions.Terminating = rapid.SampledFrom([]*bool{nil, new(true)}).Draw(t, "terminating")
		e.NodeName = rapid.SampledFrom([]*string{nil, new("me"), new("other")}).Draw(t, "node")
		if rapid.Bool().Draw(t, "hinted") {
			e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{
				Name: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "hint")}}}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}
