package source

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

type batches []Batch

func (b *batches) Apply(x Batch) { *b = append(*b, x) }

// TestBuffer: what came before there was anybody to take it comes as one batch, without objects that have gone meanwhile, but for
// Nodes; what comes after comes as it is.
func TestBuffer(t *testing.T) {
	t.Parallel()
	name := func(s string) types.NamespacedName { return types.NamespacedName{Namespace: "a", Name: s} }
	var h Buffer
	var got batches
	h.Apply(Batch{
		Services:       map[types.NamespacedName]*v1.Service{name("stays"): {}, name("goes"): {}},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{name("goes"): {}},
		Nodes:          map[string]*v1.Node{"n": {}},
	})
	h.Apply(Batch{
		Services:       map[types.NamespacedName]*v1.Service{name("goes"): nil, name("never was"): nil},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{name("goes"): nil},
		Nodes:          map[string]*v1.Node{"n": nil},
	})
	h.Apply(Batch{Synced: true})
	h.PassTo(&got)
	if len(got) != 1 {
		t.Fatalf("%d batches, want 1", len(got))
	}
	b := got[0]
	if len(b.Services) != 1 || b.Services[name("stays")] == nil || len(b.EndpointSlices) != 0 || !b.Synced {
		t.Errorf("kept was %+v", b)
	}
	if node := b.Nodes["n"]; node == nil || node.DeletionTimestamp == nil {
		t.Errorf("a Node that is gone is %+v, want it as it is while it is being deleted", node)
	}
	h.Apply(Batch{Services: map[types.NamespacedName]*v1.Service{name("stays"): nil}})
	if len(got) != 2 || len(got[1].Services) != 1 || got[1].Services[name("stays")] != nil {
		t.Errorf("passed on was %+v", got[1:])
	}
}

// TestEmptyBuffer: nothing is passed on where nothing came.
func TestEmptyBuffer(t *testing.T) {
	t.Parallel()
	var h Buffer
	var got batches
	h.PassTo(&got)
	if len(got) != 0 {
		t.Errorf("passed on was %+v", got)
	}
}
