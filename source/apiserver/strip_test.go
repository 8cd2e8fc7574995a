package apiserver

import (
	"reflect"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

func fullMeta(name string, labels, annotations map[string]string) metav1.ObjectMeta {
	labels["app.kubernetes.io/name"] = "web"
	annotations["kubectl.kubernetes.io/last-applied-configuration"] = "{}"
	return metav1.ObjectMeta{
		Namespace: "default", Name: name, ResourceVersion: "7", UID: "u", Labels: labels, Annotations: annotations,
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1("{}")}},
	}
}

func fullService() *v1.Service {
	return &v1.Service{
		ObjectMeta: fullMeta("web", map[string]string{"k8s-app": "kube-dns"}, map[string]string{
			source.AnnotationKubeRouterScheduler: "mh", source.AnnotationKubeRouterSchedFlags: "flag-2"}),
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7", "fd00::7"},
			ExternalIPs: []string{"192.0.2.7"}, Selector: map[string]string{"app": "web"},
			LoadBalancerSourceRanges: []string{"203.0.113.0/24"},
			SessionAffinity:          v1.ServiceAffinityClientIP,
			SessionAffinityConfig:    &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(77))}},
			InternalTrafficPolicy:    ptr.To(v1.ServiceInternalTrafficPolicyLocal),
			ExternalTrafficPolicy:    v1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 30077,
			Ports: []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, AppProtocol: ptr.To("h2c"), Port: 80,
				TargetPort: intstr.FromInt32(8080), NodePort: 30080}},
		},
		Status: v1.ServiceStatus{
			LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{
				{IP: "198.51.100.7", Hostname: "lb.example.org"}, {IP: "198.51.100.8", IPMode: ptr.To(v1.LoadBalancerIPModeProxy)},
			}},
			Conditions: []metav1.Condition{{Type: "x"}},
		},
	}
}

func fullSlice() *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta: fullMeta("web-1", map[string]string{discovery.LabelServiceName: "web"}, map[string]string{
			source.AnnotationWeights: "10.244.1.5=3", v1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05Z"}),
		AddressType: discovery.AddressTypeIPv4,
		Ports: []discovery.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To(int32(8080)),
			AppProtocol: ptr.To("h2c")}},
		Endpoints: []discovery.Endpoint{{
			Addresses: []string{"10.244.1.5"}, NodeName: ptr.To("n1"), Zone: ptr.To("zone-a"), Hostname: ptr.To("web-0"),
			Conditions: discovery.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(true), Terminating: ptr.To(true)},
			Hints:      &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "zone-a"}}, ForNodes: []discovery.ForNode{{Name: "n1"}}},
			TargetRef:  &v1.ObjectReference{Kind: "Pod", Name: "web-0", UID: "u"},
		}},
	}
}

func fullNode() *v1.Node {
	return &v1.Node{
		ObjectMeta: fullMeta("n1", map[string]string{v1.LabelTopologyZone: "zone-a"}, map[string]string{}),
		Spec: v1.NodeSpec{PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24"}, ProviderID: "x",
			Taints: []v1.Taint{{Key: "other"}, {Key: source.TaintToBeDeleted, Effect: v1.TaintEffectNoSchedule}}},
		Status: v1.NodeStatus{
			Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.168.77.11"}},
			Images:    []v1.ContainerImage{{Names: []string{"big"}}},
		},
	}
}

func fullServiceCIDR() *networking.ServiceCIDR {
	return &networking.ServiceCIDR{
		ObjectMeta: fullMeta("kubernetes", map[string]string{}, map[string]string{}),
		Spec:       networking.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16", "fd00:10:96::/112"}},
		Status:     networking.ServiceCIDRStatus{Conditions: []metav1.Condition{{Type: "Ready"}}},
	}
}

// planOf is what the proxier makes of the objects, and whether the node is eligible for load balancers.
func planOf(svc *v1.Service, es *discovery.EndpointSlice, cidr *networking.ServiceCIDR, node *v1.Node) (*plan.Plan, bool) {
	settings := plan.Settings{DetectLocal: plan.DetectLocal{Mode: plan.DetectNodeCIDR}}
	s := proxier.NewState("n1", settings, plan.Families[:], nil)
	s.Apply(source.Batch{
		Services:       map[types.NamespacedName]*v1.Service{{Namespace: svc.Namespace, Name: svc.Name}: svc},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{{Namespace: es.Namespace, Name: es.Name}: es},
		ServiceCIDRs:   map[string]*networking.ServiceCIDR{cidr.Name: cidr},
		Nodes:          map[string]*v1.Node{node.Name: node}, Synced: true,
	})
	p, _ := s.Update()
	return p, s.NodeEligible()
}

func stripped[T any](obj *T) *T {
	strip(obj)
	return obj
}

// TestStripLosesNothingInUse: the proxier comes to the same plan, whether objects are stripped or not.
func TestStripLosesNothingInUse(t *testing.T) {
	want, eligible := planOf(fullService(), fullSlice(), fullServiceCIDR(), fullNode())
	got, still := planOf(stripped(fullService()), stripped(fullSlice()), stripped(fullServiceCIDR()), stripped(fullNode()))
	if eligible || still {
		t.Errorf("eligible: %t, of the stripped Node %t, want neither: it has the taint", eligible, still)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("plan of stripped objects:\n%+v\nwant:\n%+v", got, want)
	}
	for key, sp := range want.Services {
		if sp.Affinity == 0 || sp.Scheduler != (plan.Scheduler{Name: "mh", Ports: true}) ||
			key.Family == plan.IPv4 && (!sp.Endpoints.Any || sp.All()[0].Weight != 3) {
			t.Errorf("%s: %+v: this shows too little", key, sp)
		}
	}
	if len(want.Services) != 2 || want.Node.Zone != "zone-a" || len(want.Settings.ServiceCIDRs) != 2 {
		t.Errorf("%d ServicePorts on %+v, settings %+v: this shows too little", len(want.Services), want.Node, want.Settings)
	}
}

func TestStripTakesOutWhatIsNotInUse(t *testing.T) {
	annotations := []int{2, 2, 0, 0}
	labels := []int{1, 1, 1, 0}
	for i, obj := range []metav1.Object{fullService(), fullSlice(), fullNode(), fullServiceCIDR()} {
		strip(obj)
		once, m := obj.(runtime.Object).DeepCopyObject(), obj
		if m.GetManagedFields() != nil || len(m.GetAnnotations()) != annotations[i] || len(m.GetLabels()) != labels[i] || m.GetResourceVersion() != "7" {
			t.Errorf("%T: %+v is left", once, m)
		}
		if twice := strip(obj); !reflect.DeepEqual(once, twice) {
			t.Errorf("stripped twice: %+v, want as after once: %+v", twice, once)
		}
	}
	if es := stripped(fullSlice()); es.Endpoints[0].TargetRef != nil || es.Endpoints[0].Zone != nil {
		t.Errorf("%+v is left of an endpoint", es.Endpoints[0])
	}
	deleting := fullNode()
	deleting.Spec.Taints, deleting.DeletionTimestamp = nil, &metav1.Time{}
	if _, eligible := planOf(fullService(), fullSlice(), fullServiceCIDR(), stripped(deleting)); eligible {
		t.Error("a stripped Node no longer says that it is being deleted")
	}
	if n := stripped(fullNode()); n.Status.Images != nil || len(n.Spec.Taints) != 1 {
		t.Errorf("%+v is left of a Node", n)
	}
}
