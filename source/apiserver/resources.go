package apiserver

import (
	"cmp"
	"context"
	"math/rand/v2"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"

	"nodeproxy/source"
)

// The names of the resources in the API.
const (
	services       = "services"
	endpointSlices = "endpointslices"
	nodes          = "nodes"
	serviceCIDRs   = "servicecidrs"
)

// resources returns the resources to watch.
func resources(cfg Config) []*resource {
	out := []*resource{{
		name: services, client: cfg.Client.core, example: &v1.Service{}, newList: func() runtime.Object { return &v1.ServiceList{} },
		put:    func(b *source.Batch, name types.NamespacedName, obj any) { put(&b.Services, name, obj) },
		fields: fields.OneTermNotEqualSelector("spec.clusterIP", v1.ClusterIPNone).String(),
		labels: "!" + source.LabelProxyName,
	}, {
		name: endpointSlices, client: cfg.Client.discovery, example: &discovery.EndpointSlice{},
		newList: func() runtime.Object { return &discovery.EndpointSliceList{} },
		put:     func(b *source.Batch, name types.NamespacedName, obj any) { put(&b.EndpointSlices, name, obj) },
		labels:  "!" + v1.IsHeadlessService,
	}, {
		name: nodes, client: cfg.Client.core, example: &v1.Node{}, newList: func() runtime.Object { return &v1.NodeList{} },
		put:    func(b *source.Batch, name types.NamespacedName, obj any) { put(&b.Nodes, name.Name, obj) },
		fields: fields.OneTermEqualSelector(metav1.ObjectNameField, cfg.NodeName).String(),
	}, {
		name: serviceCIDRs, client: cfg.Client.networking, example: &networking.ServiceCIDR{},
		newList:  func() runtime.Object { return &networking.ServiceCIDRList{} },
		put:      func(b *source.Batch, name types.NamespacedName, obj any) { put(&b.ServiceCIDRs, name.Name, obj) },
		optional: true, group: networking.GroupName, askAgain: cmp.Or(cfg.askAgain, askAgain),
	}}
	random := cfg.Random
	if random == nil {
		random = func(_ string, limit time.Duration) time.Duration { return rand.N(limit) }
	}
	all, again := &answers{}, make(turn, 1)
	for _, r := range out {
		kinds, _, err := scheme.ObjectKinds(r.example)
		utilruntime.Must(err)
		r.apiVersion, r.kind = kinds[0].ToAPIVersionAndKind()
		r.silence, r.log, r.answers, r.turn = cfg.Silence, cfg.Log, all, again
		r.random = func(limit time.Duration) time.Duration { return random(r.name, limit) }
		if r.name != endpointSlices {
			r.before = spread
		}
	}
	return out
}

// get returns a request for the objects of a resource in all namespaces.
func (r *resource) get(o metav1.ListOptions) *rest.Request {
	o.FieldSelector, o.LabelSelector = r.fields, r.labels
	request := r.client.Get().Resource(r.name).VersionedParams(&o, parameters)
	if o.TimeoutSeconds != nil {
		request.Timeout(time.Duration(*o.TimeoutSeconds) * time.Second)
	}
	return request
}

func (r *resource) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	list := r.newList()
	return list, r.get(o).Do(ctx).Into(list)
}

func put[K comparable, V any](objects *map[K]*V, name K, obj any) {
	if *objects == nil {
		*objects = map[K]*V{}
	}
	(*objects)[name], _ = obj.(*V)
}
