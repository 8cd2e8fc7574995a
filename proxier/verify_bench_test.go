package proxier

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"nodeproxy/source"
)

// BenchmarkVerify makes the ServicePorts of 10,000 Services of two endpoints anew, and compares them with the plan and what was programmed.
func BenchmarkVerify(b *testing.B) {
	p := New(Config{NodeName: "me", Families: newTestState(nil).families})
	all := services(0, 10000, 80)
	all.EndpointSlices = map[types.NamespacedName]*discovery.EndpointSlice{}
	for name, svc := range all.Services {
		s := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: svc.Name + "-1",
			Labels: map[string]string{discovery.LabelServiceName: svc.Name}}, AddressType: discovery.AddressTypeIPv4,
			Ports: []discovery.EndpointPort{{Name: &svc.Spec.Ports[0].Name, Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080)}}}
		for i := range 2 {
			n := len(all.EndpointSlices)
			s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.%d.%d.%d", i, n/256, n%256)}})
		}
		name.Name = s.Name
		all.EndpointSlices[name] = s
	}
	p.state.Apply(all)
	p.state.Apply(source.Batch{Synced: true})
	p.published.Publish(p.state.Update())
	p.settled.Store(true)
	b.ReportAllocs()
	for b.Loop() {
		if n, found, err := p.Verify(b.Context()); n != 10000 || len(found) > 0 || err != nil {
			b.Fatal(n, found, err)
		}
	}
}
