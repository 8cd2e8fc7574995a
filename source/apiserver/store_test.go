package apiserver

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
)

// TestFirstListPassesOn: objects of the first list are passed on as they arrive, each once, and the list keeps nothing of them; what is gone from
// one attempt to the next is said to be. A later list is delivered as a whole.
func TestFirstListPassesOn(t *testing.T) {
	known, batches, complete := map[types.NamespacedName]*v1.Service{}, 0, false
	s := &store{resource: resources(Config{Client: &Client{}})[0], versions: newVersions(),
		deliver: func(_ *resource, b source.Batch, all bool) {
			batches, complete = batches+1, all
			for name, svc := range b.Services {
				if known[name] != nil && svc != nil {
					t.Errorf("%s comes again", name)
				}
				known[name] = svc
				if svc == nil {
					delete(known, name)
				}
			}
		}}
	stream := func(first, n int) (list []any) {
		for i := first; i < first+n; i++ {
			kept, err := s.Transformer()(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(i), ResourceVersion: "1"}})
			require.NoError(t, err)
			list = append(list, kept)
		}
		return list
	}
	for _, object := range stream(0, aheadSize+10) { // This attempt breaks off.
		if _, is := object.(*passedOn); !is {
			t.Fatalf("the list keeps a %T", object)
		}
	}
	if len(known) != aheadSize || batches != 1 || complete {
		t.Errorf("%d have come in %d batches, complete: %t", len(known), batches, complete)
	}
	require.NoError(t, s.Replace(stream(5, 2*aheadSize), "2"))
	if len(known) != 2*aheadSize || known[types.NamespacedName{Namespace: "ns", Name: "4"}] != nil || !complete {
		t.Errorf("in the end there are %d, complete: %t", len(known), complete)
	}
	batches = 0
	if list := stream(5, 3*aheadSize); batches != 0 {
		t.Errorf("a later list comes in parts")
	} else if err := s.Replace(list, "3"); err != nil || len(known) != 3*aheadSize || batches != 1 {
		t.Errorf("after another list there are %d, in %d batches: %v", len(known), batches, err)
	}
}
