package measure

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// Objects are the Services of the cluster. Of names and of addresses, none is used twice.
type Objects struct {
	client    kubernetes.Interface
	put       func(context.Context, map[string]runtime.Object) error // into etcd
	Services  []*Service
	endpoints int // of each service
	// So many there were so far.
	named, used, changed int
}

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

// Where CreateUpTo takes addresses from: beyond the lower band of the service range, from which the API server does not take any itself.
// Each Service has the address scatter further on than the one before it, modulo MostServices: so they lie all over the range. As scatter
// is prime, none comes twice.
const (
	firstService = 256
	scatter      = 40507
)

// ScatteredAddr is the address of the i-th Service.
func ScatteredAddr(i int) netip.Addr {
	return Nth(harness.ServiceCIDR4, firstService+i*scatter%MostServices)
}

// CreateUpTo creates Services and their EndpointSlices until there are n. By requests that would take minutes, so they are written into
// etcd, with the allocation of each address.
func (o *Objects) CreateUpTo(ctx context.Context, n int) error {
	if len(o.Services) == 0 {
		_, err := o.client.CoreV1().Namespaces().Create(ctx,
			&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("namespace %s: %w", Namespace, err)
		}
	}
	objects := map[string]runtime.Object{}
	now := metav1.Now()
	put := func(key string, o runtime.Object, meta *metav1.ObjectMeta) {
		meta.UID, meta.CreationTimestamp, meta.Generation = uuid.NewUUID(), now, 1
		objects[key] = o
	}
	for len(o.Services) < n {
		s := o.NewService()
		s.Addr = ScatteredAddr(len(o.Services))
		o.Services = append(o.Services, s)
		service := s.Object()
		service.Spec.ClusterIPs, service.Spec.Type = []string{s.Addr.String()}, v1.ServiceTypeClusterIP
		service.Spec.IPFamilies, service.Spec.IPFamilyPolicy = []v1.IPFamily{v1.IPv4Protocol}, ptr.To(v1.IPFamilyPolicySingleStack)
		put("services/specs/"+Namespace+"/"+s.Name, service, &service.ObjectMeta)
		allocated := &networking.IPAddress{
			TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "IPAddress"},
			ObjectMeta: metav1.ObjectMeta{Name: s.Addr.String(), Labels: map[string]string{
				networking.LabelIPAddressFamily: string(v1.IPv4Protocol), networking.LabelManagedBy: "ipallocator.k8s.io"}},
			Spec: networking.IPAddressSpec{ParentRef: &networking.ParentReference{Resource: "services", Namespace: Namespace, Name: s.Name}},
		}
		put("ipaddresses/"+s.Addr.String(), allocated, &allocated.ObjectMeta)
		for _, slice := range s.Slices() {
			put("endpointslices/"+Namespace+"/"+slice.Name, slice, &slice.ObjectMeta)
		}
	}
	if err := o.put(ctx, objects); err != nil {
		return err
	}
	return o.awaitCached(ctx)
}

// awaitCached waits until the API server has all objects in its cache, from which it answers the proxies.
func (o *Objects) awaitCached(ctx context.Context) error {
	slices := 0
	for _, s := range o.Services {
		slices += (len(s.Endpoints) + PerSlice - 1) / PerSlice
	}
	cached := metav1.ListOptions{ResourceVersion: "0"}
	for begun := time.Now(); time.Since(begun) < ColdStartTimeout; time.Sleep(time.Second) {
		services, err := o.client.CoreV1().Services(Namespace).List(ctx, cached)
		if err != nil {
			return err
		}
		endpoints, err := o.client.DiscoveryV1().EndpointSlices(Namespace).List(ctx, cached)
		if err != nil {
			return err
		}
		if len(services.Items) >= len(o.Services) && len(endpoints.Items) >= slices {
			return nil
		}
	}
	return fmt.Errorf("the API server does not know of all objects within %s", ColdStartTimeout)
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
	made, err := o.client.CoreV1().Services(Namespace).Create(ctx, s.Object(), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("service %s: %w", s.Name, err)
	}
	if s.Addr, err = netip.ParseAddr(made.Spec.ClusterIP); err != nil {
		return fmt.Errorf("service %s: clusterIP: %w", s.Name, err)
	}
	named()
	for _, slice := range s.Slices() {
		if _, err := o.client.DiscoveryV1().EndpointSlices(Namespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("EndpointSlice of %s: %w", s.Name, err)
		}
	}
	return nil
}

// PrepareChange replaces the first endpoint of a Service by a new one; what it returns sends the PATCH.
func (o *Objects) PrepareChange(s *Service) (endpoint netip.Addr, patch func(context.Context) error, err error) {
	s.Endpoints[0] = o.freshEndpoint()
	body, err := json.Marshal(map[string]any{"endpoints": s.endpointsFrom(0)})
	if err != nil {
		return netip.Addr{}, nil, err
	}
	return s.Endpoints[0], func(ctx context.Context) error {
		_, err := o.client.DiscoveryV1().EndpointSlices(Namespace).Patch(ctx, s.sliceName(0), types.MergePatchType, body,
			metav1.PatchOptions{})
		if err != nil {
			return fmt.Errorf("patch the EndpointSlice of %s: %w", s.Name, err)
		}
		return nil
	}, nil
}
