package proxier

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/topology"
)

// endpointSlice makes the slice ns/s of IPv4 with the port http, 8080, and these endpoints.
func endpointSlice(endpoints ...discovery.Endpoint) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "s", Labels: map[string]string{discovery.LabelServiceName: "a"}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
		Endpoints:   endpoints,
	}
}

func TestReadSliceEndpoints(t *testing.T) {
	t.Parallel()
	const ready = "10.0.0.1:8080 ready serving"
	problem := func(what string) []string {
		return []string{"problem: EndpointSlice ns/s: endpoints[0].addresses" + what + "; this endpoint is not used"}
	}
	conditions := func(ready, serving, terminating *bool) discovery.Endpoint {
		return discovery.Endpoint{Addresses: []string{"10.0.0.1"},
			Conditions: discovery.EndpointConditions{Ready: ready, Serving: serving, Terminating: terminating}}
	}
	addresses := func(list ...string) discovery.Endpoint { return discovery.Endpoint{Addresses: list} }
	yes, no := new(true), new(false)
	for _, tc := range []struct {
		name     string
		endpoint discovery.Endpoint
		want     string
		said     []string
	}{
		{"nil conditions", conditions(nil, nil, nil), ready, nil},
		{"all true", conditions(yes, yes, yes), ready + " terminating", nil},
		{"not ready, the rest nil", conditions(no, nil, nil), "10.0.0.1:8080 serving", nil},
		{"not ready, not serving", conditions(no, no, nil), "10.0.0.1:8080", nil},
		{"shutting down", conditions(no, yes, yes), "10.0.0.1:8080 serving terminating", nil},
		{"gone", conditions(no, no, yes), "10.0.0.1:8080 terminating", nil},
		{"not terminating", conditions(nil, nil, no), ready, nil},
		{"only the first address counts", addresses("10.0.0.1", "10.0.0.2"), ready, nil},
		{"leading zeros", addresses("010.000.000.001"), ready, nil},
		{"no address", addresses(), "", problem(": no address")},
		{"no IP address", addresses("host"), "", problem(`[0]: "host" is not an IPv4 address`)},
		{"of the other family", addresses("fd00::1"), "", problem(`[0]: "fd00::1" is not an IPv4 address`)},
		{"with a zone", addresses("fe80::1%eth0"), "", problem(`[0]: "fe80::1%eth0" is not an IPv4 address`)},
		{"loopback", addresses("127.0.0.1"), "", problem("[0]: 127.0.0.1 is a loopback address")},
		{"loopback, mapped", addresses("::ffff:127.0.0.1"), "", problem("[0]: 127.0.0.1 is a loopback address")},
		{"link-local, mapped", addresses("::ffff:a9fe:a9fe"), "", problem("[0]: 169.254.169.254 is a link-local address")},
		{"link-local", addresses("169.254.169.254"), "", problem("[0]: 169.254.169.254 is a link-local address")},
		{"unspecified", addresses("0.0.0.0"), "", problem("[0]: 0.0.0.0 is the unspecified address")},
		{"multicast", addresses("239.0.0.1"), "", problem("[0]: 239.0.0.1 is a multicast address")},
		{"on a node", discovery.Endpoint{Addresses: []string{"10.0.0.1"}, NodeName: new("me")}, ready + " on me", nil},
		{"with hints", discovery.Endpoint{Addresses: []string{"10.0.0.1"}, Hints: &discovery.EndpointHints{
			ForZones: []discovery.ForZone{{Name: "a"}, {Name: "b"}}, ForNodes: []discovery.ForNode{{Name: "me"}}}},
			ready + " for zones [a b] for nodes [me]", nil},
		{"with empty hints", discovery.Endpoint{Addresses: []string{"10.0.0.1"}, Hints: &discovery.EndpointHints{}}, ready, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, found := readSlice(endpointSlice(tc.endpoint))
			var got []string
			for _, e := range s.appendEndpoints(nil, plan.Key{Port: "http", Protocol: plan.TCP, Family: plan.IPv4}) {
				got = append(got, describe(e))
			}
			if strings.Join(got, ", ") != tc.want || !slices.Equal(said(found), tc.said) {
				t.Errorf("got %q, said %q; want %q, %q", got, said(found), tc.want, tc.said)
			}
		})
	}
}

func describe(e topology.Endpoint) string {
	s := e.Addr.String()
	for _, c := range []struct {
		is   bool
		name string
	}{{e.Ready, " ready"}, {e.Serving, " serving"}, {e.Terminating, " terminating"}} {
		if c.is {
			s += c.name
		}
	}
	if e.Node != "" {
		s += " on " + e.Node
	}
	if len(e.ForZones) > 0 {
		s += fmt.Sprint(" for zones ", e.ForZones)
	}
	if len(e.ForNodes) > 0 {
		s += fmt.Sprint(" for nodes ", e.ForNodes)
	}
	return s
}

// TestReadSlicePorts: slice and Service meet by the port's name and protocol.
func TestReadSlicePorts(t *testing.T) {
	t.Parallel()
	es := endpointSlice(discovery.Endpoint{Addresses: []string{"10.0.0.1"}})
	es.Ports = []discovery.EndpointPort{
		{Port: new(int32(1))}, // the unnamed port of a Service with a single one
		{Name: new("dns"), Port: new(int32(2))},
		{Name: new("dns"), Port: new(int32(3)), Protocol: new(v1.ProtocolUDP)},
		{Name: new("none")},
		{Name: new("zero"), Port: new(int32(0))},
		{Name: new("large"), Port: new(int32(65536))},
		{Name: new("dns"), Port: new(int32(4))}, // two pods may give one name to different numbers
	}
	s, found := readSlice(es)
	for key, want := range map[plan.Key]string{
		{Protocol: plan.TCP, Family: plan.IPv4}:                "[10.0.0.1:1]",
		{Protocol: plan.UDP, Family: plan.IPv4}:                "[]",
		{Port: "dns", Protocol: plan.TCP, Family: plan.IPv4}:   "[10.0.0.1:2 10.0.0.1:4]",
		{Port: "dns", Protocol: plan.UDP, Family: plan.IPv4}:   "[10.0.0.1:3]",
		{Port: "dns", Protocol: plan.SCTP, Family: plan.IPv4}:  "[]",
		{Port: "dns", Protocol: plan.TCP, Family: plan.IPv6}:   "[]",
		{Port: "none", Protocol: plan.TCP, Family: plan.IPv4}:  "[]",
		{Port: "zero", Protocol: plan.TCP, Family: plan.IPv4}:  "[]",
		{Port: "large", Protocol: plan.TCP, Family: plan.IPv4}: "[]",
	} {
		got := []string{}
		for _, e := range s.appendEndpoints(nil, key) {
			got = append(got, e.Addr.String())
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%s: %s, want %s", key, got, want)
		}
	}
	var want []string
	for _, i := range []int{3, 4, 5} {
		want = append(want, fmt.Sprintf("problem: EndpointSlice ns/s: ports[%d].port: the port number is not within 1-65535; "+
			"this port has no endpoints from this slice", i))
	}
	if !slices.Equal(said(found), want) {
		t.Errorf("said %q, want %q", said(found), want)
	}
}

// TestReadSliceOfNames: a proxy has no use for host names.
func TestReadSliceOfNames(t *testing.T) {
	t.Parallel()
	es := endpointSlice(discovery.Endpoint{Addresses: []string{"host.example.com"}})
	es.AddressType = discovery.AddressTypeFQDN
	s, found := readSlice(es)
	want := `note: EndpointSlice ns/s: addressType: a proxy can't send to endpoints of type "FQDN"; ignored`
	if s != nil || !slices.Equal(said(found), []string{want}) {
		t.Errorf("got %v, said %q", s, said(found))
	}
}

func TestServiceOf(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		labels map[string]string
		want   bool
	}{
		{map[string]string{discovery.LabelServiceName: "a"}, true},
		{map[string]string{discovery.LabelServiceName: ""}, false},
		{nil, false},
		{map[string]string{discovery.LabelServiceName: "a", v1.IsHeadlessService: ""}, false},
		{map[string]string{discovery.LabelServiceName: "a", v1.IsHeadlessService: "false"}, false},
	} {
		es := endpointSlice()
		es.Labels = tc.labels
		got, ok := source.ServiceOf(es)
		if ok != tc.want || ok && got != (types.NamespacedName{Namespace: "ns", Name: "a"}) {
			t.Errorf("%v: %s, %v", tc.labels, got, ok)
		}
	}
}

func TestReadNode(t *testing.T) {
	t.Parallel()
	internal := func(ip string) v1.NodeAddress { return v1.NodeAddress{Type: v1.NodeInternalIP, Address: ip} }
	external := func(ip string) v1.NodeAddress { return v1.NodeAddress{Type: v1.NodeExternalIP, Address: ip} }
	for _, tc := range []struct {
		name      string
		addresses []v1.NodeAddress
		podCIDR   string
		podCIDRs  []string
		ips       string
		cidrs     string
		said      []string
	}{
		{name: "nothing", ips: "[]", cidrs: "[]"},
		{name: "the first internal IP of each family", addresses: []v1.NodeAddress{
			{Type: v1.NodeHostName, Address: "me"}, internal("192.168.0.1"), internal("192.168.0.2"), internal("fd00::1")},
			ips: "[192.168.0.1 fd00::1]", cidrs: "[]"},
		{name: "internal before external", addresses: []v1.NodeAddress{external("203.0.113.1"), internal("192.168.0.1"),
			external("2001:db8::1")}, ips: "[192.168.0.1 2001:db8::1]", cidrs: "[]"},
		{name: "a bad address", addresses: []v1.NodeAddress{internal("x"), internal("192.168.000.001")}, ips: "[192.168.0.1]",
			cidrs: "[]", said: []string{`problem: Node me: status.addresses[0].address: "x" is not an IP address; ignored`}},
		{name: "pod CIDRs", podCIDR: "10.244.1.0/24", podCIDRs: []string{"10.244.1.0/24", "fd00:1::/64"}, ips: "[]",
			cidrs: "[10.244.1.0/24 fd00:1::/64]"},
		{name: "the old field alone", podCIDR: "10.244.1.0/24", ips: "[]", cidrs: "[10.244.1.0/24]"},
		{name: "a bad pod CIDR", podCIDRs: []string{"x", "10.244.1.7/24"}, ips: "[]", cidrs: "[10.244.1.0/24]",
			said: []string{`problem: Node me: spec.podCIDRs[0]: "x" is not a CIDR; ignored`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "me", Labels: map[string]string{v1.LabelTopologyZone: "a"}}}
			n.Status.Addresses, n.Spec.PodCIDR, n.Spec.PodCIDRs = tc.addresses, tc.podCIDR, tc.podCIDRs
			got, cidrs, found := readNode(n)
			if got.Name != "me" || got.Zone != "a" || fmt.Sprint(got.IPs) != tc.ips || fmt.Sprint(cidrs) != tc.cidrs {
				t.Errorf("got %+v, %v; want IPs %s, pod CIDRs %s", got, cidrs, tc.ips, tc.cidrs)
			}
			if !slices.Equal(said(found), tc.said) {
				t.Errorf("said %q, want %q", said(found), tc.said)
			}
		})
	}
}

// TestTriggers: of each slice, the time of a change is reported once, and only from when everything has been delivered.
func TestTriggers(t *testing.T) {
	t.Parallel()
	s := newTestState(nil)
	apply := func(at string, synced bool) []time.Time {
		es := weighted(discovery.AddressTypeIPv4, "", "10.244.1.5")
		es.Annotations[v1.EndpointsLastChangeTriggerTime] = at
		s.Apply(ofSlice(es))
		s.Apply(source.Batch{Synced: synced})
		s.Update()
		var out []time.Time
		for _, trigger := range s.Triggers() {
			if trigger.Family != plan.IPv4 {
				t.Errorf("the trigger is for %s", trigger.Family)
			}
			out = append(out, trigger.Time)
		}
		return out
	}
	const first, second = "2026-01-02T03:04:05Z", "2026-01-02T03:04:05.5Z"
	for i, step := range []struct {
		at     string
		synced bool
		want   string // none if empty
	}{
		{first, true, ""}, {first, false, ""}, {second, false, second}, {second, false, ""}, {"", false, ""}, {"yesterday", false, ""},
	} {
		got := apply(step.at, step.synced)
		if step.want == "" && len(got) == 0 {
			continue
		}
		if len(got) != 1 || got[0].Format(time.RFC3339Nano) != step.want {
			t.Errorf("step %d: %v, want %q", i, got, step.want)
		}
	}
}
