package measure

import (
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	// Namespace is that of all Services.
	Namespace = "bench"
	// ServicePort is where clients reach them.
	ServicePort = 80
	// EndpointPort is where their endpoints listen.
	EndpointPort = 8080
	portName     = "http"

	// NodesOfCluster is the number of nodes over which endpoints are spread, as they are in a cluster of some size. One in so many
	// runs on node1.
	NodesOfCluster = 200
	// PerSlice is the most endpoints in one EndpointSlice, as Kubernetes' own controller makes them.
	PerSlice = 100
	// MostServices is the most that the service range has addresses for.
	MostServices = 60000
	// Stride is prime: services that are so far from each other lie all over the cluster, and each comes once before one comes
	// again, unless their number is a multiple.
	Stride = 7919
)

// EndpointRange holds every endpoint's address: on each node under test, one pod answers for all of them.
var EndpointRange = netip.MustParsePrefix("10.128.0.0/10")

// PodRange is what the proxies are told to be the range of all pods: it holds the endpoints and the harness's own pods.
const PodRange = "10.128.0.0/9"

// Service is a Service with its endpoints.
type Service struct {
	Name      string
	Addr      netip.Addr // the cluster IP; the zero Addr until the API server has allotted it
	Endpoints []netip.Addr
}

// Frontend is where clients reach the Service.
func (s *Service) Frontend() netip.AddrPort { return netip.AddrPortFrom(s.Addr, ServicePort) }

// Has reports whether it is an endpoint of the Service.
func (s *Service) Has(endpoint netip.Addr) bool { return slices.Contains(s.Endpoints, endpoint) }

// Object is the Service as the API has it.
func (s *Service) Object() *v1.Service {
	out := &v1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: s.Name},
		Spec: v1.ServiceSpec{
			Ports: []v1.ServicePort{{Name: portName, Protocol: v1.ProtocolTCP, Port: ServicePort, TargetPort: intstr.FromInt32(EndpointPort)}},
		},
	}
	if s.Addr.IsValid() {
		out.Spec.ClusterIP = s.Addr.String()
	}
	return out
}

// Slices are the EndpointSlices of the Service.
func (s *Service) Slices() []*discovery.EndpointSlice {
	name, protocol, port := portName, v1.ProtocolTCP, int32(EndpointPort)
	var out []*discovery.EndpointSlice
	for first := 0; first < len(s.Endpoints); first += PerSlice {
		out = append(out, &discovery.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{
				Namespace: Namespace, Name: s.sliceName(first),
				Labels: map[string]string{discovery.LabelServiceName: s.Name, discovery.LabelManagedBy: "bench"},
			},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
			Endpoints:   s.endpointsFrom(first),
		})
	}
	return out
}

// sliceName is the name of the slice that begins with the endpoint at first.
func (s *Service) sliceName(first int) string { return fmt.Sprintf("%s-%d", s.Name, first/PerSlice) }

// endpointsFrom are the endpoints in that slice.
func (s *Service) endpointsFrom(first int) []discovery.Endpoint {
	ready := true
	var out []discovery.Endpoint
	for _, addr := range s.Endpoints[first:min(first+PerSlice, len(s.Endpoints))] {
		b := addr.As4()
		node := fmt.Sprintf("node%d", (int(b[2])<<8+int(b[3]))%NodesOfCluster+1)
		out = append(out, discovery.Endpoint{
			Addresses: []string{addr.String()}, NodeName: &node, Conditions: discovery.EndpointConditions{Ready: &ready},
		})
	}
	return out
}

// Nth is the n-th address of an IPv4 range, which has to have so many.
func Nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	return netip.AddrFrom4([4]byte{b[0], b[1] + byte(n>>16), b[2] + byte(n>>8), b[3] + byte(n)})
}
