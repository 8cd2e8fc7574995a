// Package apiserver delivers the Services, EndpointSlices and ServiceCIDRs of a cluster, and the Node that this program runs
// on, as they change at the API server.
//
// It uses client-go's reflectors, the part of an informer that lists and watches, without an informer's cache: the
// proxier keeps what it needs of an object in a form of its own, and nobody else asks for one.
package apiserver

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"nodeproxy/source"
)

// DefaultNodeTimeout is how long the Node is waited for by default.
const DefaultNodeTimeout = 30 * time.Second

// DefaultPodCIDRTimeout is how long those should wait for the Node's pod CIDRs who need them; kube-proxy waits as long.
const DefaultPodCIDRTimeout = 5 * time.Minute

const (
	// optionalTimeout is how long optional resources are waited for when all else is there. Their coming later would only
	// mean that everything is programmed twice.
	optionalTimeout = 2 * time.Second
	// askAgain is the wait before the API server is asked again for what it does not serve, or not to this program. Its
	// version or the rights may change, but nobody is in a hurry.
	askAgain = 10 * time.Minute
)

// Config says what to watch.
type Config struct {
	Client *Client
	// NodeName is the name of this node's Node object, the only one that is watched.
	NodeName string
	// Silence is how long a watch may be silent before it is taken for dead and another is opened; zero means
	// DefaultSilence.
	Silence time.Duration
	// NodeTimeout is how long the Node is waited for when all else is there; zero means DefaultNodeTimeout. An API server
	// that does not tell of it must not keep all Services from working.
	NodeTimeout time.Duration
	// PodCIDRTimeout is how long a Node with spec.podCIDRs is waited for when all else is there, instead of NodeTimeout for
	// any Node; zero means that pod CIDRs are not waited for. It is for detect-local-mode NodeCIDR: without them the node's
	// pods are not told from other clients.
	PodCIDRTimeout time.Duration
	Log            *slog.Logger
	// Report receives what there is to say of objects; nil discards it.
	Report source.Report

	askAgain time.Duration // zero means the constant
}

// Source is a source.Source. It runs once.
type Source struct {
	cfg       Config
	resources []*resource

	mu      sync.Mutex // guards what follows, and keeps batches in order
	sink    source.Sink
	missing map[*resource]bool // what has not been delivered for the first time
	synced  bool
	lately  *time.Timer // set once nothing is missing but what is not waited for without end
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
		if r.optional {
			r.unavailable = func() { s.notWaitedFor(r) }
		}
	}
	return s
}

// Run delivers objects until ctx ends, and then returns nil: whatever the API server does, it is asked again, and what
// has been delivered stays in force meanwhile. The first batch with Synced comes when all Services, EndpointSlices,
// ServiceCIDRs where they are served, and the Node, if there is one, have been delivered.
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
		reflector := cache.NewReflectorWithOptions(r.listWatch(), r.example, objects,
			cache.ReflectorOptions{Name: r.name, Backoff: ptr.To(retries), Clock: interruptible{ctx: ctx}})
		running.Go(func() { keepWatching(ctx, reflector, r) })
	}
	running.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lately != nil {
		s.lately.Stop()
	}
	return nil
}

// deliver passes a batch on. complete is true for one after which everything that the API server has of the resource has
// been passed on.
func (s *Source) deliver(r *resource, b source.Batch, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if complete && r.synced() && r.name == nodes {
		s.tellNode(b.Nodes[s.cfg.NodeName])
	}
	if s.missing[r] && s.enough(r, b, complete) {
		delete(s.missing, r)
		b.Synced = s.nowSynced()
	}
	if !b.Empty() {
		s.sink.Apply(b)
	}
}

// enough reports whether there is nothing more of a resource to wait for after a batch.
func (s *Source) enough(r *resource, b source.Batch, complete bool) bool {
	if r.name != nodes || s.cfg.PodCIDRTimeout == 0 {
		return complete
	}
	return hasPodCIDRs(b.Nodes[s.cfg.NodeName])
}

func hasPodCIDRs(node *v1.Node) bool {
	return node != nil && (len(node.Spec.PodCIDRs) > 0 || node.Spec.PodCIDR != "")
}

// tellNode says what is missing of the Node when the API server has told of all that there are for the first time.
func (s *Source) tellNode(node *v1.Node) {
	if node == nil {
		s.cfg.Report(source.Finding{
			Severity: source.Problem, Object: "Node " + s.cfg.NodeName, Detail: "the cluster has no Node of this name",
			Effect: "zone hints are not heeded, and node ports with addresses \"primary\" have none, until there is one; if the name is " +
				"wrong (--hostname-override), no endpoint counts as being on this node, and traffic with policy Local is dropped",
		})
	}
	if s.cfg.PodCIDRTimeout > 0 && !hasPodCIDRs(node) {
		s.cfg.Log.Info("waiting for the Node's spec.podCIDRs, which detect-local-mode NodeCIDR needs; the rules stay as they are",
			"node", s.cfg.NodeName, "at-most", s.cfg.PodCIDRTimeout)
	}
}

// notWaitedFor notes that the API server does not give this resource, as yet or ever.
func (s *Source) notWaitedFor(r *resource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.missing[r] {
		return
	}
	delete(s.missing, r)
	if s.nowSynced() {
		s.sink.Apply(source.Batch{Synced: true})
	}
}

// nowSynced reports whether everything has been delivered as of now, once. Where what is missing is nothing to wait for
// without end, it sets the time until which it is waited for.
func (s *Source) nowSynced() bool {
	if s.synced {
		return false
	}
	if len(s.missing) == 0 {
		s.synced = true
		return true
	}
	var wait time.Duration
	for r := range s.missing {
		switch {
		case r.optional:
			wait = max(wait, optionalTimeout)
		case r.name == nodes:
			wait = max(wait, cmp.Or(s.cfg.PodCIDRTimeout, s.cfg.NodeTimeout))
		default:
			return false
		}
	}
	if s.lately != nil {
		s.lately.Stop() // It was set when more was missing, for which to wait longer.
	}
	s.lately = time.AfterFunc(wait, s.goOn)
	return false
}

// goOn declares all delivered, though something is missing.
func (s *Source) goOn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.synced {
		return
	}
	s.synced = true
	for r := range s.missing {
		if r.name != nodes {
			continue
		}
		effect := "the API server does not tell of this node; Services are proxied without regard to its zone and addresses"
		if s.cfg.PodCIDRTimeout > 0 {
			effect = "this node has no spec.podCIDRs yet; Services are proxied without them"
		}
		s.cfg.Log.Warn(effect, "node", s.cfg.NodeName, "waited", cmp.Or(s.cfg.PodCIDRTimeout, s.cfg.NodeTimeout))
	}
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
