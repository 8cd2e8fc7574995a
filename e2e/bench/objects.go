package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

const (
	// namespace is that of all Services. Clients reach them at servicePort, and their endpoints listen at endpointPort.
	namespace    = "bench"
	servicePort  = 80
	endpointPort = 8080
	// nodesOfCluster is the number of nodes over which endpoints are spread, as in a cluster of some size: one in so many is on node1.
	nodesOfCluster = 200
	// perSlice is the most endpoints in one EndpointSlice, as Kubernetes' own controller makes them; perFile the Services in one manifest.
	perSlice = 100
	perFile  = 100
	// mostServices is the most that the service range has addresses for. Those are taken from firstService on, beyond the lower band, from
	// which the API server does not take any itself. Each Service has the address scatter further on than the one before it: as that is
	// prime, they lie all over the range and none comes twice.
	mostServices = 60000
	firstService = 256
	scatter      = 40507
	// stride is prime too: of Services that are so far from each other, each comes once before one comes again, unless their number is a
	// multiple.
	stride = 7919
	// podRange is what the proxies are told to be the range of all pods: it holds the endpoints and the harness's own pods.
	podRange = "10.128.0.0/9"
)

// endpointRange holds every endpoint's address: on each node under test, one pod answers for all of them.
var endpointRange = netip.MustParsePrefix("10.128.0.0/10")

// service is a Service with its endpoints. The API server allots the address of one that has none.
type service struct {
	name      string
	addr      netip.Addr
	endpoints []netip.Addr
}

func (s *service) frontend() netip.AddrPort { return netip.AddrPortFrom(s.addr, servicePort) }

func (s *service) has(endpoint netip.Addr) bool { return slices.Contains(s.endpoints, endpoint) }

// object is the Service as the API has it.
func (s *service) object() *v1.Service {
	out := &v1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: s.name},
		Spec: v1.ServiceSpec{Ports: []v1.ServicePort{
			{Name: "http", Protocol: v1.ProtocolTCP, Port: servicePort, TargetPort: intstr.FromInt32(endpointPort)},
		}},
	}
	if s.addr.IsValid() {
		out.Spec.ClusterIP = s.addr.String()
	}
	return out
}

// slices are the EndpointSlices of the Service.
func (s *service) slices() (out []*discovery.EndpointSlice) {
	for i := range (len(s.endpoints) + perSlice - 1) / perSlice {
		out = append(out, &discovery.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: fmt.Sprintf("%s-%d", s.name, i),
				Labels: map[string]string{discovery.LabelServiceName: s.name, discovery.LabelManagedBy: "bench"},
			},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](endpointPort)}},
		})
		for _, addr := range s.endpoints[i*perSlice : min((i+1)*perSlice, len(s.endpoints))] {
			b := addr.As4()
			out[i].Endpoints = append(out[i].Endpoints, discovery.Endpoint{
				Addresses: []string{addr.String()}, Conditions: discovery.EndpointConditions{Ready: ptr.To(true)},
				NodeName: ptr.To(fmt.Sprintf("node%d", (int(b[2])<<8+int(b[3]))%nodesOfCluster+1)),
			})
		}
	}
	return out
}

// nth is the n-th address of an IPv4 range, which has to have so many.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	return netip.AddrFrom4([4]byte{b[0], b[1] + byte(n>>16), b[2] + byte(n>>8), b[3] + byte(n)})
}

// objects are the Services of a cluster. Of names and of addresses of endpoints, none is used twice.
type objects struct {
	services             []*service
	named, used, changed int
}

// fresh is an address that no endpoint has had yet.
func (o *objects) fresh() netip.Addr {
	o.used++
	return nth(endpointRange, o.used)
}

// invent thinks up a Service with endpoints of its own, which is not among the Services yet.
func (o *objects) invent(endpoints int) *service {
	s := &service{name: fmt.Sprintf("svc-%05d", o.named)}
	o.named++
	for range endpoints {
		s.endpoints = append(s.endpoints, o.fresh())
	}
	return s
}

// add adds a Service that has an address.
func (o *objects) add(endpoints int) *service {
	s := o.invent(endpoints)
	s.addr = nth(harness.ServiceCIDR4, firstService+len(o.services)*scatter%mostServices)
	o.services = append(o.services, s)
	return s
}

// next is the index of the Service to change next, in an order that is neither that of names nor that of addresses.
func (o *objects) next() int {
	o.changed++
	return o.changed * stride % len(o.services)
}

// ends are the Services with the lowest and the highest address: what searches in the order of addresses finds one first and the other last.
func (o *objects) ends() (first, last *service) {
	byAddress := func(a, b *service) int { return a.addr.Compare(b.addr) }
	return slices.MinFunc(o.services, byAddress), slices.MaxFunc(o.services, byAddress)
}

// manifests are objects in files of a directory.
type manifests struct {
	objects
	dir string
}

// writeManifests makes Services, each with as many endpoints as sizes tells.
func writeManifests(dir string, sizes ...int) *manifests {
	m := &manifests{dir: dir}
	for _, n := range sizes {
		m.add(n)
	}
	for first := 0; first < len(sizes); first += perFile {
		m.write(first)
	}
	return m
}

// write replaces the file that holds service i.
func (m *manifests) write(i int) { check(m.prepare(i)()) }

// prepare makes a new version of the file that holds service i; what it returns puts it in place, as an editor that saves to a new file
// and renames it.
func (m *manifests) prepare(i int) (replace func() error) {
	first := i / perFile * perFile
	var items []any
	for _, s := range m.services[first:min(first+perFile, len(m.services))] {
		items = append(items, s.object())
		for _, slice := range s.slices() {
			items = append(items, slice)
		}
	}
	text := must(json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items}))
	draft := filepath.Join(filepath.Dir(m.dir), "draft.json") // Not in the watched directory, so that only the rename is seen.
	check(os.WriteFile(draft, text, 0o644))
	return func() error { return os.Rename(draft, filepath.Join(m.dir, fmt.Sprintf("services-%05d.json", first))) }
}

// change replaces an endpoint of the next Service by a new one, once replace is called.
func (m *manifests) change() (s *service, was netip.Addr, replace func() error) {
	i := m.next()
	s = m.services[i]
	was, s.endpoints[0] = s.endpoints[0], m.fresh()
	return s, was, m.prepare(i)
}
