// Package apiserver delivers the Services, EndpointSlices and ServiceCIDRs of a cluster, and the Node that this program runs
// on, as they change at the API server.
//
// It lists and watches by requests of client-go, without its reflectors and informers: there is no cache of objects, as the proxier keeps
// what it needs of an object in its own form, and nothing else asks for objects; and changes come while everything is listed again (see
// follower).
package apiserver

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/source"
)

// DefaultNodeTimeout is how long the source waits for the Node by default.
const DefaultNodeTimeout = 30 * time.Second

// DefaultPodCIDRTimeout is how long a program that needs the Node's pod CIDRs should wait for them; kube-proxy waits as long.
const DefaultPodCIDRTimeout = 5 * time.Minute

const (
	// optionalTimeout is how long the source waits for optional resources once everything else has been delivered. If they came
	// later, everything would be programmed twice.
	optionalTimeout = 2 * time.Second
	// askAgain is the pause before another request for a resource that the API server does not serve, or not to this program. Its
	// version or the rights may change, but that is not urgent.
	askAgain = 10 * time.Minute
)

// Config says what to watch.
type Config struct {
	Client *Client
	// NodeName is the name of this node's Node object, the only one that is watched.
	NodeName string
	// Silence is how long a watch may deliver nothing before it is considered dead and another is opened; zero means
	// DefaultSilence.
	Silence time.Duration
	// NodeTimeout is how long to wait for the Node once everything else has been delivered; zero means DefaultNodeTimeout. An API
	// server that does not deliver it must not keep all Services from working.
	NodeTimeout time.Duration
	// PodCIDRTimeout is how long to wait for a Node with spec.podCIDRs once everything else has been delivered, instead of
	// NodeTimeout for any Node; zero means not to wait for pod CIDRs. It is for detect-local-mode NodeCIDR: without them the node's
	// pods can't be distinguished from other clients.
	PodCIDRTimeout time.Duration
	// Random returns a random time below a limit, for a pause before a request for a resource; nil means math/rand.
	Random func(resource string, limit time.Duration) time.Duration
	Log    *slog.Logger
	// Report receives findings about objects; nil discards them.
	Report source.Report

	// Zero means the constants of these names, and requestTimeout.
	optionalTimeout, askAgain, loadTimeout time.Duration
}

func (c *Config) report(f source.Finding) {
	if c.Report != nil {
		c.Report(f)
	}
}

// Source is a source.Source. It runs once.
type Source struct {
	cfg       Config
	resources []*resource

	mu        sync.Mutex // guards what follows, and keeps batches in order
	sink      source.Sink
	followers []*follower        // of the resources
	missing   map[*resource]bool // what has not been delivered for the first time
	synced    bool
	lately    *time.Timer // set once only resources are missing that have a time limit
}

// New returns a Source that makes no request before it runs.
func New(cfg Config) *Source {
	cfg.Silence, cfg.NodeTimeout = cmp.Or(cfg.Silence, DefaultSilence), cmp.Or(cfg.NodeTimeout, DefaultNodeTimeout)
	s := &Source{cfg: cfg, resources: resources(cfg), missing: map[*resource]bool{}}
	for _, r := range s.resources {
		s.missing[r] = true
		if r.optional {
			r.unavailable = func() { s.notWaitedFor(r) }
		}
	}
	return s
}

// Run delivers objects until ctx ends, and then returns nil: whatever the API server does, requests are repeated, and delivered
// objects stay in force meanwhile. The first batch with Synced comes when all Services, EndpointSlices, ServiceCIDRs where they are
// served, and the Node, if there is one, have been delivered.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	s.mu.Lock()
	if s.sink != nil {
		s.mu.Unlock()
		return errors.New("apiserver: a Source runs only once")
	}
	s.sink = sink
	for _, r := range s.resources {
		s.followers = append(s.followers, newFollower(r, newStore(r, s.deliver)))
	}
	s.mu.Unlock()
	ctx = quietly(ctx, s.cfg.Log)
	var running sync.WaitGroup
	for _, f := range s.followers {
		running.Go(func() { f.run(ctx) })
	}
	running.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true // Neither the timer nor a request that is just failing passes anything on after this.
	if s.lately != nil {
		s.lately.Stop()
	}
	return nil
}

// deliver passes a batch on. complete is true if all objects of the resource have been passed on with this batch.
func (s *Source) deliver(r *resource, b source.Batch, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if complete && r.synced() && r.name == nodes { // for the first time
		node := b.Nodes[s.cfg.NodeName]
		b.NodeMissing = node == nil
		if s.cfg.PodCIDRTimeout > 0 && !hasPodCIDRs(node) {
			s.cfg.Log.Info("waiting for the Node's spec.podCIDRs, which detect-local-mode NodeCIDR needs; the rules stay as they are",
				"node", s.cfg.NodeName, "at-most", s.cfg.PodCIDRTimeout)
		}
	}
	if s.missing[r] && s.enough(r, b, complete) {
		delete(s.missing, r)
		b.Synced = s.nowSynced()
	}
	if !b.Empty() {
		s.sink.Apply(b)
	}
}

// enough reports whether the source need not wait for more of a resource after a batch.
func (s *Source) enough(r *resource, b source.Batch, complete bool) bool {
	if r.name != nodes || s.cfg.PodCIDRTimeout == 0 {
		return complete
	}
	return hasPodCIDRs(b.Nodes[s.cfg.NodeName])
}

func hasPodCIDRs(node *v1.Node) bool {
	return node != nil && (len(node.Spec.PodCIDRs) > 0 || node.Spec.PodCIDR != "")
}

// notWaitedFor records that the API server does not serve this resource, for now or at all.
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

// nowSynced reports, once, whether everything has been delivered. If only resources with a time limit are missing, it starts the
// timer.
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
			wait = max(wait, cmp.Or(s.cfg.optionalTimeout, optionalTimeout))
		case r.name == nodes:
			wait = max(wait, cmp.Or(s.cfg.PodCIDRTimeout, s.cfg.NodeTimeout))
		default:
			return false
		}
	}
	if s.lately != nil {
		s.lately.Stop() // It was set for a longer wait.
	}
	s.lately = time.AfterFunc(wait, s.goOn)
	return false
}

// goOn declares everything delivered although something is missing.
func (s *Source) goOn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.synced {
		return
	}
	s.synced = true
	b := source.Batch{Synced: true}
	for r := range s.missing {
		if r.name != nodes {
			continue
		}
		b.NodeUnread = !r.current(time.Now()).Synced
		effect := "the API server has not delivered this Node; Services are proxied without regard to its zone and addresses"
		if s.cfg.PodCIDRTimeout > 0 && !b.NodeUnread {
			effect = "this node has no spec.podCIDRs yet; Services are proxied without them"
		}
		s.cfg.Log.Warn(effect, "node", s.cfg.NodeName, "waited", cmp.Or(s.cfg.PodCIDRTimeout, s.cfg.NodeTimeout))
	}
	s.sink.Apply(b)
}

// Watches returns how current each resource is, except those that the program can do without. It is safe for concurrent use.
func (s *Source) Watches() []source.Watch {
	now := time.Now()
	var out []source.Watch
	for _, r := range s.resources {
		if !r.optional {
			out = append(out, r.current(now))
		}
	}
	return out
}

var _ source.Source = (*Source)(nil)
