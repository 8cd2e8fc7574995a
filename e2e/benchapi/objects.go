package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
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

	// writers is the number of clients that create the cluster's objects at once: what two processors can use.
	writers = 16
	// nodesOfCluster is the number of nodes over which endpoints are spread, as they are in a cluster of this size.
	nodesOfCluster = 200
	// perSlice is the most endpoints in one EndpointSlice, as Kubernetes' own controller makes them.
	perSlice = 100
)

// endpointRange holds every endpoint's address: on each node under test, one pod answers for all of them.
var endpointRange = netip.MustParsePrefix("10.128.0.0/10")

// podRange is what the proxies are told to be the range of all pods: it holds the endpoints and the harness's own pods.
const podRange = "10.128.0.0/9"

// service is a Service with its endpoints, as the API server has it.
type service struct {
	name      string
	addr      netip.Addr // the cluster IP, which the API server allotted
	endpoints []netip.Addr
}

// frontend is where clients reach the Service.
func (s *service) frontend() netip.AddrPort { return netip.AddrPortFrom(s.addr, servicePort) }

func (s *service) has(endpoint netip.Addr) bool {
	for _, e := range s.endpoints {
		if e == endpoint {
			return true
		}
	}
	return false
}

// objects are the Services of the cluster. Their addresses come from one counter, so none is used twice.
type objects struct {
	client    kubernetes.Interface
	services  []*service
	endpoints int // of each service
	named     atomic.Int32
	used      atomic.Int32
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

// createAll creates n Services and their EndpointSlices, with many requests at once.
func (o *objects) createAll(ctx context.Context, n int) error {
	_, err := o.client.CoreV1().Namespaces().Create(ctx,
		&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("namespace %s: %w", namespace, err)
	}
	o.services = make([]*service, n)
	var next atomic.Int32
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for w := range writers {
		wg.Go(func() {
			for errs[w] == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				s := o.newService()
				o.services[i] = s
				errs[w] = o.create(ctx, s, func() {})
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// newService thinks up a Service with endpoints of its own.
func (o *objects) newService() *service {
	s := &service{name: fmt.Sprintf("svc-%05d", o.named.Add(1))}
	for range o.endpoints {
		s.endpoints = append(s.endpoints, o.freshEndpoint())
	}
	return s
}

// create creates the Service, then its EndpointSlices. In between, when the cluster IP is known, it calls named.
func (o *objects) create(ctx context.Context, s *service, named func()) error {
	made, err := o.client.CoreV1().Services(namespace).Create(ctx, &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: s.name},
		Spec: v1.ServiceSpec{
			Ports: []v1.ServicePort{{Name: portName, Port: servicePort, TargetPort: intstr.FromInt32(endpointPort)}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("service %s: %w", s.name, err)
	}
	if s.addr, err = netip.ParseAddr(made.Spec.ClusterIP); err != nil {
		return fmt.Errorf("service %s: clusterIP: %w", s.name, err)
	}
	named()
	name, protocol, port := portName, v1.ProtocolTCP, int32(endpointPort)
	for first := 0; first < len(s.endpoints); first += perSlice {
		_, err := o.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name:   sliceName(s, first),
				Labels: map[string]string{discovery.LabelServiceName: s.name, discovery.LabelManagedBy: "benchapi"},
			},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
			Endpoints:   endpointsOf(s, first),
		}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("EndpointSlice of %s: %w", s.name, err)
		}
	}
	return nil
}

func sliceName(s *service, first int) string { return fmt.Sprintf("%s-%d", s.name, first/perSlice) }

// endpointsOf are the endpoints in the slice that begins with the one at first.
func endpointsOf(s *service, first int) []discovery.Endpoint {
	ready := true
	var out []discovery.Endpoint
	for _, addr := range s.endpoints[first:min(first+perSlice, len(s.endpoints))] {
		b := addr.As4()
		node := fmt.Sprintf("node%d", (int(b[2])<<8+int(b[3]))%nodesOfCluster+1)
		out = append(out, discovery.Endpoint{
			Addresses: []string{addr.String()}, NodeName: &node, Conditions: discovery.EndpointConditions{Ready: &ready},
		})
	}
	return out
}

// prepareChange replaces the first endpoint of a Service by a new one; what it returns sends the PATCH.
func (o *objects) prepareChange(s *service) (endpoint netip.Addr, patch func(context.Context) error, err error) {
	s.endpoints[0] = o.freshEndpoint()
	body, err := json.Marshal(map[string]any{"endpoints": endpointsOf(s, 0)})
	if err != nil {
		return netip.Addr{}, nil, err
	}
	return s.endpoints[0], func(ctx context.Context) error {
		_, err := o.client.DiscoveryV1().EndpointSlices(namespace).Patch(ctx, sliceName(s, 0), types.MergePatchType, body,
			metav1.PatchOptions{})
		if err != nil {
			return fmt.Errorf("patch the EndpointSlice of %s: %w", s.name, err)
		}
		return nil
	}, nil
}
