package harness

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// Namespace is that of all objects made here.
const Namespace = "e2e"

// Write puts a manifest file into the daemon's directory as most editors do: a new file takes the old one's name.
func (w *World) Write(t testing.TB, file string, objects ...runtime.Object) {
	t.Helper()
	w.WriteText(t, file, YAML(t, objects...))
}

// WriteText is Write for any content.
func (w *World) WriteText(t testing.TB, file, text string) {
	t.Helper()
	fresh := filepath.Join(w.Dir, file+".new")
	if err := os.WriteFile(fresh, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(fresh, filepath.Join(w.Manifests, file)); err != nil {
		t.Fatal(err)
	}
}

// Remove removes a manifest file.
func (w *World) Remove(t testing.TB, file string) {
	t.Helper()
	if err := os.Remove(filepath.Join(w.Manifests, file)); err != nil {
		t.Fatal(err)
	}
}

// YAML renders objects as one multi-document file.
func YAML(t testing.TB, objects ...runtime.Object) string {
	t.Helper()
	var b bytes.Buffer
	for _, o := range objects {
		doc, err := yaml.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "---\n%s", doc)
	}
	return b.String()
}

// NodeObject describes a node as its kubelet would, with these labels.
func (w *World) NodeObject(n *Node, labels map[string]string) *v1.Node {
	cidrs := n.PodCIDRs()
	return &v1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: labels},
		Spec:       v1.NodeSpec{PodCIDR: cidrs[0].String(), PodCIDRs: []string{cidrs[0].String(), cidrs[1].String()}},
		Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
			{Type: v1.NodeInternalIP, Address: n.IP4.String()},
			{Type: v1.NodeInternalIP, Address: n.IP6.String()},
		}},
	}
}

// NodeObjects describes all nodes, without labels.
func (w *World) NodeObjects() []runtime.Object {
	var out []runtime.Object
	for _, n := range w.Nodes {
		out = append(out, w.NodeObject(n, nil))
	}
	return out
}

// PodObject describes a pod that runs and is ready, with these labels. The changes given are then applied to it.
func (w *World) PodObject(p *Pod, labels map[string]string, changes ...func(*v1.Pod)) *v1.Pod {
	pod := &v1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: p.Name, Labels: labels},
		Spec: v1.PodSpec{
			NodeName:   p.Node.Name,
			Containers: []v1.Container{{Name: "server", Image: "server"}},
		},
		Status: v1.PodStatus{
			Phase:      v1.PodRunning,
			PodIP:      p.IP4.String(),
			PodIPs:     []v1.PodIP{{IP: p.IP4.String()}, {IP: p.IP6.String()}},
			HostIP:     p.Node.IP4.String(),
			Conditions: []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}},
		},
	}
	for _, change := range changes {
		change(pod)
	}
	return pod
}

// Addresses are the frontends of a Service made by Service; both families of each.
type Addresses struct {
	ClusterIP4, ClusterIP6   netip.Addr
	VIP4, VIP6               netip.Addr
	ExternalIP4, ExternalIP6 netip.Addr
	NodePort                 uint16 // for TCP and UDP port "a"; port "b" has the next one
}

// AddressesOf are the addresses of the Service with this number, from 1 to 253.
func AddressesOf(number int) Addresses {
	return Addresses{
		ClusterIP4: nth(ServiceCIDR4, 10+number), ClusterIP6: nth(ServiceCIDR6, 10+number),
		VIP4: nth(VIPRange4, number), VIP6: nth(VIPRange6, number),
		ExternalIP4: nth(ExternalIPs4, number), ExternalIP6: nth(ExternalIPs6, number),
		NodePort: uint16(30000 + 10*number),
	}
}

// ClusterIP is the cluster IP of a family, 4 or 6.
func (a Addresses) ClusterIP(family int) netip.Addr { return pick(family, a.ClusterIP4, a.ClusterIP6) }

// VIP is the LoadBalancer IP of a family.
func (a Addresses) VIP(family int) netip.Addr { return pick(family, a.VIP4, a.VIP6) }

// ExternalIP is the external IP of a family.
func (a Addresses) ExternalIP(family int) netip.Addr {
	return pick(family, a.ExternalIP4, a.ExternalIP6)
}

// ServicePort is the port at which every Service made by Service listens, for TCP (port name a) and UDP (a-udp). Its
// target is port 8080 of the pods.
const ServicePort = 80

// Service makes a dual-stack Service of type LoadBalancer with every kind of frontend, at the addresses of its number,
// and no selector. The changes given are then applied to it.
func Service(name string, number int, changes ...func(*v1.Service)) *v1.Service {
	a := AddressesOf(number)
	s := &v1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: name},
		Spec: v1.ServiceSpec{
			Type:           v1.ServiceTypeLoadBalancer,
			ClusterIP:      a.ClusterIP4.String(),
			ClusterIPs:     []string{a.ClusterIP4.String(), a.ClusterIP6.String()},
			IPFamilies:     []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
			IPFamilyPolicy: ptr.To(v1.IPFamilyPolicyRequireDualStack),
			ExternalIPs:    []string{a.ExternalIP4.String(), a.ExternalIP6.String()},
			Ports: []v1.ServicePort{
				{Name: "a", Protocol: v1.ProtocolTCP, Port: ServicePort, NodePort: int32(a.NodePort)},
				{Name: "a-udp", Protocol: v1.ProtocolUDP, Port: ServicePort, NodePort: int32(a.NodePort)},
			},
		},
		Status: v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{
			{IP: a.VIP4.String()}, {IP: a.VIP6.String()},
		}}},
	}
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].TargetPort = intstr.FromInt32(8080)
	}
	for _, change := range changes {
		change(s)
	}
	return s
}

// ClusterOnly makes a Service one of type ClusterIP.
func ClusterOnly(s *v1.Service) {
	s.Spec.Type = v1.ServiceTypeClusterIP
	s.Spec.ExternalIPs = nil
	s.Status = v1.ServiceStatus{}
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].NodePort = 0
	}
}

// Policies sets a Service's traffic policies, "Cluster" or "Local".
func Policies(internal, external string) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicy(internal))
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicy(external)
	}
}

// Endpoint is an endpoint of a slice made by Slices: a pod, ready unless changed.
type Endpoint struct {
	*Pod
	Conditions discovery.EndpointConditions
	Hints      *discovery.EndpointHints
}

// Ready makes ready endpoints of pods.
func (w *World) Ready(pods ...string) []Endpoint {
	var out []Endpoint
	for _, name := range pods {
		out = append(out, Endpoint{Pod: w.Pod(name), Conditions: discovery.EndpointConditions{
			Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)}})
	}
	return out
}

// Terminating makes endpoints of pods that shut down but still serve.
func (w *World) Terminating(pods ...string) []Endpoint {
	out := w.Ready(pods...)
	for i := range out {
		out[i].Conditions.Ready, out[i].Conditions.Terminating = ptr.To(false), ptr.To(true)
	}
	return out
}

var addressTypes = map[int]discovery.AddressType{4: discovery.AddressTypeIPv4, 6: discovery.AddressTypeIPv6}

// Slices makes the EndpointSlices of a Service, one a family, with the Service's own ports.
func Slices(s *v1.Service, endpoints ...Endpoint) []runtime.Object {
	return SlicesNamed(s, s.Name, endpoints...)
}

// SlicesNamed is Slices with names that start with prefix, for a Service with several slices a family.
func SlicesNamed(s *v1.Service, prefix string, endpoints ...Endpoint) []runtime.Object {
	var out []runtime.Object
	for _, family := range []int{4, 6} {
		slice := &discovery.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{
				Namespace: s.Namespace,
				Name:      fmt.Sprintf("%s-v%d", prefix, family),
				Labels:    map[string]string{discovery.LabelServiceName: s.Name},
			},
			AddressType: addressTypes[family],
			Endpoints:   []discovery.Endpoint{},
		}
		for _, p := range s.Spec.Ports {
			slice.Ports = append(slice.Ports, discovery.EndpointPort{
				Name: ptr.To(p.Name), Protocol: ptr.To(p.Protocol), Port: ptr.To(p.TargetPort.IntVal)})
		}
		for _, ep := range endpoints {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses:  []string{ep.IP(family).String()},
				NodeName:   ptr.To(ep.Node.Name),
				Conditions: ep.Conditions,
				Hints:      ep.Hints,
			})
		}
		out = append(out, slice)
	}
	return out
}

// Objects joins a Service and its slices into what Write takes.
func Objects(s *v1.Service, endpoints ...Endpoint) []runtime.Object {
	return append([]runtime.Object{s}, Slices(s, endpoints...)...)
}

// WriteInPlace is Write for a file that is overwritten where it is, as some editors and shells do.
func (w *World) WriteInPlace(t testing.TB, file string, objects ...runtime.Object) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.Manifests, file), []byte(YAML(t, objects...)), 0o644); err != nil {
		t.Fatal(err)
	}
}
