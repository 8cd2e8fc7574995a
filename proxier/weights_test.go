package proxier

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

func weighted(family discovery.AddressType, weights string, ips ...string) *discovery.EndpointSlice {
	es := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a-1",
		Labels: map[string]string{discovery.LabelServiceName: "a"}, Annotations: map[string]string{source.AnnotationWeights: weights}},
		AddressType: family, Ports: []discovery.EndpointPort{{Port: new(int32(8080))}}}
	for _, ip := range ips {
		es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{ip}})
	}
	return es
}

func TestWeights(t *testing.T) {
	t.Parallel()
	const a, b = "10.244.1.5", "10.244.2.7"
	wrong := func(text string) string {
		return "problem: EndpointSlice ns/a-1: metadata.annotations[nodeproxy.io/weights]: " + text + "; this weight is ignored"
	}
	for _, c := range []struct {
		text  string
		want  []uint16 // of a and b
		found []string
	}{
		{"10.244.1.5=3,10.244.2.7=1", []uint16{3, 1}, nil},
		{" 10.244.2.7 = 65535 ,", []uint16{0, 65535}, nil},
		{"", []uint16{0, 0}, nil},
		{"010.244.001.005=2", []uint16{2, 0}, nil}, // as endpoints' addresses are read
		{"10.244.1.5=0,10.244.2.7=9", []uint16{0, 9}, []string{wrong(`"10.244.1.5=0": the weight is not within 1-65535`)}},
		{"10.244.1.5=65536", []uint16{0, 0}, []string{wrong(`"10.244.1.5=65536": the weight is not within 1-65535`)}},
		{"10.244.1.5=-1", []uint16{0, 0}, []string{wrong(`"10.244.1.5=-1": the weight is not within 1-65535`)}},
		{"10.244.1.5,10.244.2.7=2", []uint16{0, 2}, []string{wrong(`"10.244.1.5" is not of the form ADDRESS=WEIGHT`)}},
		{"web-0=2", []uint16{0, 0}, []string{wrong(`"web-0=2" is not of the form ADDRESS=WEIGHT`)}},
		{"10.244.9.9=2", []uint16{0, 0}, []string{wrong(`"10.244.9.9=2": the slice has no endpoint in use at this address`)}},
		{"10.244.1.5=2,10.244.1.5=3", []uint16{2, 0}, []string{wrong(`"10.244.1.5=3": the address has a weight already, 2`)}},
	} {
		got, found := readSlice(weighted(discovery.AddressTypeIPv4, c.text, a, b))
		if weights := []uint16{got.endpoints[0].weight, got.endpoints[1].weight}; !slices.Equal(weights, c.want) || !slices.Equal(said(found), c.found) {
			t.Errorf("%q: weights %d, found %q, want %d, %q", c.text, weights, said(found), c.want, c.found)
		}
	}
	v6, found := readSlice(weighted(discovery.AddressTypeIPv6, "fd00:0::5=4", "fd00::5"))
	if v6.endpoints[0].weight != 4 || len(found) > 0 {
		t.Errorf("IPv6: %+v, found %v", v6.endpoints, found)
	}
	_, found = readSlice(weighted(discovery.AddressTypeIPv4, strings.Repeat("x,", 1000), a))
	if n := len(found); n != mostWrongWeights+1 || !strings.Contains(found[n-1].Detail, "995 more parts are wrong") {
		t.Errorf("a thousand wrong parts give %d findings, at last %s", n, found[n-1])
	}
}

// TestWeightsReachThePlan: the weight of an endpoint is in the plan, for all ports of the Service, and a change of it is a
// change of the ServicePort.
func TestWeightsReachThePlan(t *testing.T) {
	t.Parallel()
	s := newTestState(nil)
	apply := func(weights string) (string, plan.Change) {
		s.Apply(ofService(makeService()))
		s.Apply(ofSlice(weighted(discovery.AddressTypeIPv4, weights, "10.244.1.5", "10.244.2.7")))
		p, change := s.Update()
		out := ""
		for _, ep := range p.Services[plan.Key{Service: plan.Service{Namespace: "ns", Name: "a"}, Protocol: plan.TCP, Family: plan.IPv4}].Cluster {
			out += fmt.Sprintf("%s=%d ", ep.Addr, ep.Weight)
		}
		return out, change
	}
	if got, _ := apply("10.244.1.5=3"); got != "10.244.1.5:8080=3 10.244.2.7:8080=0 " {
		t.Errorf("endpoints %s", got)
	}
	if got, change := apply("10.244.2.7=2"); got != "10.244.1.5:8080=0 10.244.2.7:8080=2 " || len(change.Keys()) != 1 {
		t.Errorf("after a change: endpoints %s, changed %v", got, change)
	}
	if _, change := apply("10.244.2.7=2"); !change.None() {
		t.Errorf("without a change: changed %v", change)
	}
}
