package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// writers is the number of clients that create the cluster's objects at once: what two processors can use.
const writers = 16

// Objects are the Services of the cluster. Of names and of addresses, none is used twice.
type Objects struct {
	client    kubernetes.Interface
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
