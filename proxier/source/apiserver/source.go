// Package apiserver delivers the Services and EndpointSlices of a cluster, and the Node that this program runs on, as
// they change at the API server.
//
// It uses client-go's reflectors, the part of an informer that lists and watches, without an informer's cache: the
// proxier keeps what it needs of an object in a form of its own, and nobody else asks for one.
package apiserver

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"nodeproxy/proxier/source"
)

// DefaultNodeTimeout is how long the Node is waited for by default.
const DefaultNodeTimeout = 30 * time.Second

// Config says what to watch.
type Config struct {
	Client kubernetes.Interface
	// NodeName is the name of this node's Node object, the only one that is watched.
	NodeName string
	// Silence is how long a watch may be silent before it is taken for dead and another is opened; zero means
	// DefaultSilence.
	Silence time.Duration
	// NodeTimeout is how long the Node is waited for when all else is there; zero means DefaultNodeTimeout. An API server
	// that does not tell of it must not keep all Services from working.
	NodeTimeout time.Duration
	Log         *slog.Logger
	// Report receives what there is to say of objects; nil discards it.
	Report source.Report
}

// Source is a source.Source. It runs once.
type Source struct {
	cfg       Config
	resources []*resource

	mu      sync.Mutex // guards what follows, and keeps batches in order
	sink    source.Sink
	missing map[*resource]bool // what has not been delivered for the first time
	synced  bool
	noNode  *time.Timer
}

// New returns a Source that makes no request before it runs.
func New(cfg Config) *Source {
	if cfg.Silence == 0 {
		cfg.Silence = DefaultSilence
	}
	if cfg.NodeTimeout == 0 {
		cfg.NodeTimeout = DefaultNodeTimeout
	}
	if cfg.Report == nil {
		cfg.Report = func(source.Finding) {}
	}
	s := &Source{cfg: cfg, resources: resources(cfg), missing: map[*resource]bool{}}
	for _, r := range s.resources {
		s.missing[r] = true
	}
	return s
}

// The names of the resources, as the API has them.
const (
	services       = "services"
	endpointSlices = "endpointslices"
	nodes          = "nodes"
)

func resources(cfg Config) []*resource {
	core, slices := cfg.Client.CoreV1(), cfg.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll)
	all := core.Services(metav1.NamespaceAll)
	out := []*resource{{
		name: services, example: &v1.Service{},
		fields: fields.OneTermNotEqualSelector("spec.clusterIP", v1.ClusterIPNone).String(),
		labels: "!" + labelProxyName,
		list:   lister(all.List), watch: all.Watch,
	}, {
		name: endpointSlices, example: &discovery.EndpointSlice{},
		labels: "!" + v1.IsHeadlessService,
		list:   lister(slices.List), watch: slices.Watch,
	}, {
		name: nodes, example: &v1.Node{},
		fields: fields.OneTermEqualSelector(metav1.ObjectNameField, cfg.NodeName).String(),
		list:   lister(core.Nodes().List), watch: core.Nodes().Watch,
	}}
	for _, r := range out {
		r.silence, r.log = cfg.Silence, cfg.Log
	}
	return out
}

// lister turns a typed list function into one that fits all.
func lister[L runtime.Object](list func(context.Context, metav1.ListOptions) (L, error)) func(
	context.Context, metav1.ListOptions) (runtime.Object, error) {
	return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) }
}

// Run delivers objects until ctx ends, and then returns nil: whatever the API server does, it is asked again, and what
// has been delivered stays in force meanwhile. The first batch with Synced comes when all Services, EndpointSlices and the
// Node, if there is one, have been delivered.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	s.mu.Lock()
	if s.sink != nil {
		s.mu.Unlock()
		return errors.New("apiserver: a Source runs only once")
	}
	s.sink = sink
	s.mu.Unlock()
	ctx = quietly(ctx, s.cfg.Log)
	var running sync.WaitGroup
	for _, r := range s.resources {
		objects := &store{resource: r, put: putInto[r.name], deliver: s.deliver, versions: map[types.NamespacedName]string{}}
		reflector := cache.NewReflectorWithOptions(r.listWatch(s.cfg.Client), r.example, objects,
			cache.ReflectorOptions{Name: r.name, Backoff: ptr.To(retries)})
		running.Go(func() { keepWatching(ctx, reflector) })
	}
	running.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noNode != nil {
		s.noNode.Stop()
	}
	return nil
}

// putInto notes an object, or with nil that it is gone, in the part of a batch where it belongs.
var putInto = map[string]func(*source.Batch, types.NamespacedName, any){
	services: func(b *source.Batch, name types.NamespacedName, obj any) {
		o, _ := obj.(*v1.Service)
		if b.Services == nil {
			b.Services = map[types.NamespacedName]*v1.Service{}
		}
		b.Services[name] = o
	},
	endpointSlices: func(b *source.Batch, name types.NamespacedName, obj any) {
		o, _ := obj.(*discovery.EndpointSlice)
		if b.EndpointSlices == nil {
			b.EndpointSlices = map[types.NamespacedName]*discovery.EndpointSlice{}
		}
		b.EndpointSlices[name] = o
	},
	nodes: func(b *source.Batch, name types.NamespacedName, obj any) {
		o, _ := obj.(*v1.Node)
		if b.Nodes == nil {
			b.Nodes = map[string]*v1.Node{}
		}
		b.Nodes[name.Name] = o
	},
}

// deliver passes a batch on. complete is true for one after which everything that the API server has of the resource has
// been passed on.
func (s *Source) deliver(r *resource, b source.Batch, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if complete && s.missing[r] {
		delete(s.missing, r)
		r.synced()
		if r.name == nodes && len(b.Nodes) == 0 {
			s.cfg.Report(source.Finding{
				Severity: source.Problem, Object: "Node " + s.cfg.NodeName, Detail: "the cluster has no Node of this name",
				Effect: "zone hints are not heeded, and node ports with addresses \"primary\" have none, until there is one",
			})
		}
		b.Synced = s.nowSynced()
	}
	if !b.Empty() {
		s.sink.Apply(b)
	}
}

// nowSynced reports whether everything has been delivered as of now, once.
func (s *Source) nowSynced() bool {
	if s.synced {
		return false
	}
	if len(s.missing) == 0 {
		s.synced = true
		return true
	}
	onlyNode := len(s.missing) == 1
	for r := range s.missing {
		onlyNode = onlyNode && r.name == nodes
	}
	if onlyNode && s.noNode == nil {
		s.noNode = time.AfterFunc(s.cfg.NodeTimeout, s.goOnWithoutNode)
	}
	return false
}

func (s *Source) goOnWithoutNode() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.synced {
		return
	}
	s.synced = true
	s.cfg.Log.Warn("the API server does not tell of this node; Services are proxied without regard to its zone and addresses",
		"node", s.cfg.NodeName, "waited", s.cfg.NodeTimeout)
	s.sink.Apply(source.Batch{Synced: true})
}

// Staleness says for each resource how current it is. It is safe for concurrent use.
func (s *Source) Staleness() []Staleness {
	now := time.Now()
	var out []Staleness
	for _, r := range s.resources {
		out = append(out, r.staleness(now))
	}
	return out
}

var _ source.Source = (*Source)(nil)
