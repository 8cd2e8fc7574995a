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

	"nodeproxy/e2e/harness"
)

const (
	servicePort  = 80
	endpointPort = 8080

	// firstService is the offset of the first service's address in the service range: its lower band is for addresses that
	// people choose themselves.
	firstService = 256
	// maxServices is the number of addresses above firstService. Each service has the address scatter further on than the
	// one before it, modulo maxServices: so they lie all over the range, as those do that the API server allots, and in
	// another order than the names. As scatter is prime, no address comes twice.
	maxServices = 60000
	scatter     = 40507

	// nodesOfCluster is the number of nodes over which the endpoints are spread, as they are in a cluster of this size.
	nodesOfCluster = 200

	// perFile is how many services one manifest file describes.
	perFile = 100

	// perSlice is the most endpoints in one EndpointSlice, as the API server's controller makes them.
	perSlice = 100
)

// endpointRange holds every endpoint's address. One pod answers for all of them.
var endpointRange = netip.MustParsePrefix("10.128.0.0/10")

// podRange is what nodeproxy is told to be the range of all pods: it holds the endpoints and the harness's own pods.
var podRange = netip.MustParsePrefix("10.128.0.0/9")

// cluster is a set of services in manifest files.
type cluster struct {
	dir      string
	services []service
}

type service struct {
	name      string
	addr      netip.Addr
	endpoints []netip.Addr
}

// frontend is the address at which clients reach a service.
func (s service) frontend() netip.AddrPort { return netip.AddrPortFrom(s.addr, servicePort) }

// newCluster makes services, each with as many endpoints as sizes tells, and writes their manifests.
func newCluster(dir string, sizes ...int) (*cluster, error) {
	c := &cluster{dir: dir, services: make([]service, len(sizes))}
	used := 0
	for i, n := range sizes {
		s := service{
			name: fmt.Sprintf("svc-%05d", i),
			addr: add(harness.ServiceCIDR4.Addr(), firstService+i*scatter%maxServices),
		}
		for range n {
			used++
			s.endpoints = append(s.endpoints, add(endpointRange.Addr(), used))
		}
		c.services[i] = s
	}
	for first := 0; first < len(sizes); first += perFile {
		if err := c.write(first); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// uniform is the sizes of n services of the same number of endpoints.
func uniform(n, endpoints int) []int {
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = endpoints
	}
	return sizes
}

// last is the service with the highest address, and first the one with the lowest: a search in the order of addresses
// finds last the last, and one in the order of names something in between.
func (c *cluster) last() service {
	return slices.MaxFunc(c.services, func(a, b service) int { return a.addr.Compare(b.addr) })
}

func (c *cluster) first() service {
	return slices.MinFunc(c.services, func(a, b service) int { return a.addr.Compare(b.addr) })
}

// write replaces the file that holds service i, as an editor that saves to a new file and renames it.
func (c *cluster) write(i int) error {
	replace, err := c.prepare(i)
	if err != nil {
		return err
	}
	return replace()
}

// prepare makes a new version of the file that holds service i; what it returns puts it in place.
func (c *cluster) prepare(i int) (replace func() error, err error) {
	first := i / perFile * perFile
	var items []any
	for _, s := range c.services[first:min(first+perFile, len(c.services))] {
		items = append(items, s.object())
		items = append(items, s.slices()...)
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(c.dir, fmt.Sprintf("services-%05d.json", first))
	// Away from the watched directory, so that only the rename is seen.
	drafts := filepath.Join(filepath.Dir(c.dir), "drafts")
	if err := os.MkdirAll(drafts, 0o755); err != nil {
		return nil, err
	}
	draft := filepath.Join(drafts, "services.json")
	if err := os.WriteFile(draft, text, 0o644); err != nil {
		return nil, err
	}
	return func() error { return os.Rename(draft, file) }, nil
}

func (s service) object() *v1.Service {
	return &v1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: s.name},
		Spec: v1.ServiceSpec{
			ClusterIP: s.addr.String(),
			Ports:     []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: servicePort}},
		},
	}
}

func (s service) slices() []any {
	var out []any
	name, protocol, port, ready := "http", v1.ProtocolTCP, int32(endpointPort), true
	for first := 0; first < len(s.endpoints); first += perSlice {
		slice := &discovery.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "bench", Name: fmt.Sprintf("%s-%d", s.name, first/perSlice),
				Labels: map[string]string{discovery.LabelServiceName: s.name},
			},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
		}
		for _, addr := range s.endpoints[first:min(first+perSlice, len(s.endpoints))] {
			node := nodeOf(addr)
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses: []string{addr.String()}, NodeName: &node,
				Conditions: discovery.EndpointConditions{Ready: &ready},
			})
		}
		out = append(out, slice)
	}
	return out
}

// nodeOf spreads the endpoints over the nodes of the cluster: one in nodesOfCluster runs on node1, the node under test.
func nodeOf(addr netip.Addr) string {
	b := addr.As4()
	return fmt.Sprintf("node%d", (int(b[2])<<8+int(b[3]))%nodesOfCluster+1)
}

// add is the address n after a.
func add(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	for i := 3; i >= 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	return netip.AddrFrom4(b)
}
