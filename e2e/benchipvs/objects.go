package main

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
	namespace    = "bench"
	portName     = "http"
	servicePort  = 80
	endpointPort = 8080
	// maxEndpoints is the most that one EndpointSlice holds as Kubernetes' own controller makes them.
	maxEndpoints = 100
	// writers is the number of clients that create objects at once.
	writers = 8
)

// endpointRange holds every endpoint's address: on each node under test, one pod answers for all of them.
var endpointRange = netip.MustParsePrefix("10.128.0.0/10")

// podRange is what the proxies are told to be the range of all pods: the endpoints and the harness's own pods.
const podRange = "10.128.0.0/9"

// service is a Service with its endpoints, as the API server has it.
type service struct {
	name      string
	addr      netip.Addr // the cluster IP, which the API server allotted
	endpoints []netip.Addr
}

// frontend is where clients reach the Service.
func (s *service) frontend() netip.AddrPort { return netip.AddrPortFrom(s.addr, servicePort) }

func (s *service) has(endpoint netip.Addr) bool { return slices.Contains(s.endpoints, endpoint) }

// objects are the Services of the cluster.
type objects struct {
	client    kubernetes.Interface
	endpoints int // of each service
	services  []*service
	used      atomic.Int32 // addresses of endpoints: none is used twice
	changed   int
}

// stride is prime, so that next visits each service once before it comes to any again.
const stride = 7919

// next is the service to change next, in an order that is neither that of names nor that of addresses.
func (o *objects) next() *service {
	o.changed++
	return o.services[o.changed*stride%len(o.services)]
}

// freshEndpoint is an address that no endpoint has had yet.
func (o *objects) freshEndpoint() netip.Addr {
	n := uint32(o.used.Add(1))
	b := endpointRange.Addr().As4()
	return netip.AddrFrom4([4]byte{b[0], b[1] + byte(n>>16), byte(n >> 8), byte(n)})
}

// createUpTo creates Services and their EndpointSlices until there are n.
func (o *objects) createUpTo(ctx context.Context, n int) error {
	first := len(o.services)
	if first == 0 {
		_, err := o.client.CoreV1().Namespaces().Create(ctx,
			&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("namespace %s: %w", namespace, err)
		}
	}
	o.services = append(o.services, make([]*service, n-first)...)
	next := atomic.Int32{}
	next.Store(int32(first))
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for w := range writers {
		wg.Go(func() {
			for errs[w] == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				o.services[i], errs[w] = o.create(ctx, i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// create creates a Service and its EndpointSlice.
func (o *objects) create(ctx context.Context, i int) (*service, error) {
	s := &service{name: fmt.Sprintf("svc-%05d", i)}
	for range o.endpoints {
		s.endpoints = append(s.endpoints, o.freshEndpoint())
	}
	made, err := o.client.CoreV1().Services(namespace).Create(ctx, &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: s.name},
		Spec: v1.ServiceSpec{
			Ports: []v1.ServicePort{{Name: portName, Port: servicePort, TargetPort: intstr.FromInt32(endpointPort)}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("service %s: %w", s.name, err)
	}
	if s.addr, err = netip.ParseAddr(made.Spec.ClusterIP); err != nil {
		return nil, fmt.Errorf("service %s: clusterIP: %w", s.name, err)
	}
	name, protocol, port := portName, v1.ProtocolTCP, int32(endpointPort)
	_, err = o.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:   s.name,
			Labels: map[string]string{discovery.LabelServiceName: s.name, discovery.LabelManagedBy: "benchipvs"},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
		Endpoints:   endpointsOf(s),
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("EndpointSlice of %s: %w", s.name, err)
	}
	return s, nil
}

// endpointsOf are the endpoints as a slice lists them, on some two hundred nodes.
func endpointsOf(s *service) []discovery.Endpoint {
	ready := true
	var out []discovery.Endpoint
	for _, addr := range s.endpoints {
		node := fmt.Sprintf("other-%d", addr.As4()[3]%200)
		out = append(out, discovery.Endpoint{
			Addresses: []string{addr.String()}, NodeName: &node, Conditions: discovery.EndpointConditions{Ready: &ready},
		})
	}
	return out
}

// prepareChange replaces the first endpoint of a Service by a new one; what it returns sends the PATCH.
func (o *objects) prepareChange(s *service) (endpoint netip.Addr, patch func(context.Context) error, err error) {
	s.endpoints[0] = o.freshEndpoint()
	body, err := json.Marshal(map[string]any{"endpoints": endpointsOf(s)})
	if err != nil {
		return netip.Addr{}, nil, err
	}
	return s.endpoints[0], func(ctx context.Context) error {
		_, err := o.client.DiscoveryV1().EndpointSlices(namespace).Patch(ctx, s.name, types.MergePatchType, body,
			metav1.PatchOptions{})
		if err != nil {
			return fmt.Errorf("patch the EndpointSlice of %s: %w", s.name, err)
		}
		return nil
	}, nil
}
