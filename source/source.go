// Package source delivers the objects of a cluster to the proxier: Services, EndpointSlices, ServiceCIDRs and Nodes, wherever they
// are kept. Besides the proxier, only this package and those below it know Kubernetes API types.
package source

import (
	"context"
	"fmt"
	"maps"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Batch is a set of changed objects. A nil object is gone. Objects are shared: a receiver must not modify them.
type Batch struct {
	Services       map[types.NamespacedName]*v1.Service
	EndpointSlices map[types.NamespacedName]*discovery.EndpointSlice
	// ServiceCIDRs are the ranges that the cluster allots cluster IPs from (KEP-1880).
	ServiceCIDRs map[string]*networking.ServiceCIDR
	Nodes        map[string]*v1.Node
	// NodeMissing is true if the source expects a Node of this node's name, and has none. Manifests need not have Nodes.
	NodeMissing bool
	// NodeUnread is true if the source goes on without having been able to read whether there is a Node of this node's name. It says later
	// what there is.
	NodeUnread bool
	// Synced is true once everything that existed when the source started has been delivered, with this batch.
	Synced bool
	// Extent says whether all objects are known, if that has changed.
	Extent Extent
}

// Extent says how much a source knows.
type Extent int

// By default, the objects delivered when a source is synced are the Whole. The extent is Partial if the source has not been able to
// read a part since it started: objects in that part are not known, and the kernel's state for them must stay.
const (
	Unchanged Extent = iota
	Whole
	Partial
)

// Empty reports whether the batch has no content.
func (b Batch) Empty() bool {
	return len(b.Services) == 0 && len(b.EndpointSlices) == 0 && len(b.ServiceCIDRs) == 0 && len(b.Nodes) == 0 &&
		!b.NodeMissing && !b.NodeUnread && !b.Synced && b.Extent == Unchanged
}

// Merge adds a later batch to this one; the later object wins. A Node that is gone remains as one that is being deleted: its last
// known state counts for as long as this program runs on it.
func (b *Batch) Merge(later Batch) {
	b.Services = merge(b.Services, later.Services)
	b.EndpointSlices = merge(b.EndpointSlices, later.EndpointSlices)
	b.ServiceCIDRs = merge(b.ServiceCIDRs, later.ServiceCIDRs)
	last := map[string]*v1.Node{}
	for name, node := range later.Nodes {
		if before := b.Nodes[name]; node == nil && before != nil {
			last[name] = deleted(before)
		}
	}
	b.Nodes = merge(merge(b.Nodes, later.Nodes), last)
	b.NodeMissing, b.NodeUnread = b.NodeMissing || later.NodeMissing, b.NodeUnread || later.NodeUnread
	b.Synced = b.Synced || later.Synced
	if later.Extent != Unchanged {
		b.Extent = later.Extent
	}
}

// deleted returns a Node with a deletion timestamp.
func deleted(node *v1.Node) *v1.Node {
	if node.DeletionTimestamp != nil {
		return node
	}
	out := *node
	out.DeletionTimestamp = &metav1.Time{}
	return &out
}

func merge[K comparable, V any](into, from map[K]V) map[K]V {
	if into == nil && len(from) > 0 {
		into = make(map[K]V, len(from))
	}
	maps.Copy(into, from)
	return into
}

// Sink receives batches. It blocks only for as long as it takes to record them.
type Sink interface {
	Apply(Batch)
}

// Source delivers objects to a sink until ctx ends or it fails for good.
type Source interface {
	Run(ctx context.Context, sink Sink) error
}

// Watch says how current the known objects of one resource are.
type Watch struct {
	// Resource is the resource's name, such as services.
	Resource string
	// Synced is true once all objects have been delivered.
	Synced bool
	// Age is the time since the source last sent anything that confirms this state: objects, a change or a bookmark. With a sound
	// connection it stays below some 70 seconds. It is negative before the first answer.
	Age time.Duration
	// Failure is the last failure since then; empty if there was none.
	Failure string
}

// Severity grades a Finding.
type Severity int

// A Note is about a limit by design (an Ingress is not proxied); a Problem should be fixed.
const (
	Note Severity = iota
	Problem
)

func (s Severity) String() string {
	if s == Problem {
		return "problem"
	}
	return "note"
}

// Kind tells the findings apart that others repeat in words of their own.
type Kind int

// The kinds of findings.
const (
	// Other is any kind that is not listed here.
	Other Kind = iota
	// PortConflict says that a program of the node listens where a Service is.
	PortConflict
	// Claimed says that another Service has an address and port that this one asks for.
	Claimed
)

// NotForProxy is the Effect of a Finding that says why no proxy serves an object, as of its kind or its fields. Others say it in words of
// their own.
const NotForProxy = "not proxied"

// Finding is something that the owner of an object should know about it.
type Finding struct {
	Kind     Kind
	Severity Severity
	// Where is FILE:LINE for an object from a manifest, and empty for one from the API server.
	Where string
	// Object is kind and name, such as "Service default/web"; empty if that could not be read.
	Object string
	// Field is the path of the field in question, such as spec.ports[0].port; empty for the object as a whole.
	Field string
	// Detail says what was wrong, Effect what happens now.
	Detail, Effect string
	// Event is the reason of the event to write in the cluster; empty for none.
	Event string
	// LeftOut is set if an object, or a whole file, can't be used.
	LeftOut bool
}

func (f Finding) String() string {
	s := ""
	for _, part := range []string{f.Where, f.Object, f.Field} {
		if part != "" {
			s += part + ": "
		}
	}
	s += f.Detail
	if f.Effect != "" {
		s += "; " + f.Effect
	}
	return s
}

// Report receives findings, each once.
type Report func(Finding)

// Findings collects what there is to say of an object.
type Findings struct {
	Object string
	List   []Finding
}

// Problem adds a fault, and returns it for more to be said of it until the next one is added.
func (f *Findings) Problem(field, effect, detail string, args ...any) *Finding {
	f.List = append(f.List, Finding{
		Severity: Problem, Object: f.Object, Field: field, Detail: fmt.Sprintf(detail, args...), Effect: effect,
	})
	return &f.List[len(f.List)-1]
}

// Note adds a limit that is there by design.
func (f *Findings) Note(field, effect, detail string, args ...any) *Finding {
	added := f.Problem(field, effect, detail, args...)
	added.Severity = Note
	return added
}
