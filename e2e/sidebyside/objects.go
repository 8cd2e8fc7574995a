package sidebyside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
)

const (
	// Namespace is that of all Services.
	Namespace = "bench"
	// ServicePort is where clients reach them, EndpointPort where their endpoints listen.
	ServicePort  = 80
	EndpointPort = 8080
	portName     = "http"

	// writers is the number of clients that create the cluster's objects at once: what two processors can use.
	writers = 16
	// nodesOfCluster is the number of nodes over which endpoints are spread, as they are in a cluster of some size.
	nodesOfCluster = 200
	// perSlice is the most endpoints in one EndpointSlice, as Kubernetes' own controller makes them.
	perSlice = 100
	// MostServices is the most that the service range has addresses for.
	MostServices = 60000
)

// EndpointRange holds every endpoint's address: on each node under test, one pod answers for all of them.
var EndpointRange = netip.MustParsePrefix("10.128.0.0/10")

// PodRange is what the proxies are told to be the range of all pods: it holds the endpoints and the harness's own pods.
const PodRange = "10.128.0.0/9"

// Service is a Service with its endpoints, as the API server has it.
type Service struct {
	Name      string
	Addr      netip.Addr // the cluster IP, which the API server allotted
	Endpoints []netip.Addr
}

// Frontend is where clients reach the Service.
func (s *Service) Frontend() netip.AddrPort { return netip.AddrPortFrom(s.Addr, ServicePort) }

// Has reports whether it is an endpoint of the Service.
func (s *Service) Has(endpoint netip.Addr) bool { return slices.Contains(s.Endpoints, endpoint) }

// Objects are the Services of the cluster. Of names and of addresses, none is used twice.
type Objects struct {
	client    kubernetes.Interface
	Services  []*Service
	endpoints int // of each service
	// So many there were so far.
	named, used, changed int
}

// Stride is prime, so that Next visits each service once before it comes to any again, unless their number is a multiple.
const Stride = 7919

// Next is the service to change next, in an order that is neither that of names nor that of addresses.
func (o *Objects) Next() *Service {
	o.changed++
	return o.Services[o.changed*Stride%len(o.Services)]
}

// freshEndpoint is an address that no endpoint has had yet.
func (o *Objects) freshEndpoint() netip.Addr {
	o.used++
	return Nth(EndpointRange, o.used)
}

// Nth is the n-th address of an IPv4 range.
func Nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	return netip.AddrFrom4([4]byte{b[0], b[1] + byte(n>>16), b[2] + byte(n>>8), b[3] + byte(n)})
}

// CreateUpTo creates Services and their EndpointSlices, with many requests at once, until there are n.
func (o *Objects) CreateUpTo(ctx context.Context, n int) error {
	first := len(o.Services)
	if first == 0 {
		_, err := o.client.CoreV1().Namespaces().Create(ctx,
			&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("namespace %s: %w", Namespace, err)
		}
	}
	for len(o.Services) < n {
		o.Services = append(o.Services, o.NewService())
	}
	missing := o.Services[first:]
	var next atomic.Int32
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for w := range writers {
		wg.Go(func() {
			for errs[w] == nil {
				i := int(next.Add(1)) - 1
				if i >= len(missing) {
					return
				}
				errs[w] = o.Create(ctx, missing[i], func() {})
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// NewService thinks up a Service with endpoints of its own.
func (o *Objects) NewService() *Service {
	o.named++
	s := &Service{Name: fmt.Sprintf("svc-%05d", o.named)}
	for range o.endpoints {
		s.Endpoints = append(s.Endpoints, o.freshEndpoint())
	}
	return s
}

// Create creates the Service, then its EndpointSlices. In between, when the cluster IP is known, it calls named.
func (o *Objects) Create(ctx context.Context, s *Service, named func()) error {
	made, err := o.client.CoreV1().Services(Namespace).Create(ctx, &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name},
		Spec: v1.ServiceSpec{
			Ports: []v1.ServicePort{{Name: portName, Port: ServicePort, TargetPort: intstr.FromInt32(EndpointPort)}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("service %s: %w", s.Name, err)
	}
	if s.Addr, err = netip.ParseAddr(made.Spec.ClusterIP); err != nil {
		return fmt.Errorf("service %s: clusterIP: %w", s.Name, err)
	}
	named()
	name, protocol, port := portName, v1.ProtocolTCP, int32(EndpointPort)
	for first := 0; first < len(s.Endpoints); first += perSlice {
		_, err := o.client.DiscoveryV1().EndpointSlices(Namespace).Create(ctx, &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name:   sliceName(s, first),
				Labels: map[string]string{discovery.LabelServiceName: s.Name, discovery.LabelManagedBy: "sidebyside"},
			},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
			Endpoints:   endpointsOf(s, first),
		}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("EndpointSlice of %s: %w", s.Name, err)
		}
	}
	return nil
}

func sliceName(s *Service, first int) string { return fmt.Sprintf("%s-%d", s.Name, first/perSlice) }

// endpointsOf are the endpoints in the slice that begins with the one at first.
func endpointsOf(s *Service, first int) []discovery.Endpoint {
	ready := true
	var out []discovery.Endpoint
	for _, addr := range s.Endpoints[first:min(first+perSlice, len(s.Endpoints))] {
		b := addr.As4()
		node := fmt.Sprintf("node%d", (int(b[2])<<8+int(b[3]))%nodesOfCluster+1)
		out = append(out, discovery.Endpoint{
			Addresses: []string{addr.String()}, NodeName: &node, Conditions: discovery.EndpointConditions{Ready: &ready},
		})
	}
	return out
}

// PrepareChange replaces the first endpoint of a Service by a new one; what it returns sends the PATCH.
func (o *Objects) PrepareChange(s *Service) (endpoint netip.Addr, patch func(context.Context) error, err error) {
	s.Endpoints[0] = o.freshEndpoint()
	body, err := json.Marshal(map[string]any{"endpoints": endpointsOf(s, 0)})
	if err != nil {
		return netip.Addr{}, nil, err
	}
	return s.Endpoints[0], func(ctx context.Context) error {
		_, err := o.client.DiscoveryV1().EndpointSlices(Namespace).Patch(ctx, sliceName(s, 0), types.MergePatchType, body,
			metav1.PatchOptions{})
		if err != nil {
			return fmt.Errorf("patch the EndpointSlice of %s: %w", s.Name, err)
		}
		return nil
	}, nil
}
