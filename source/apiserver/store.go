package apiserver

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"nodeproxy/internal/keyed"
	"nodeproxy/source"
)

// store receives the objects of one resource from a reflector. It passes them on and keeps only their names and versions: the names
// to find out after a new list which objects are gone, the versions so as not to pass on again what has not changed. Only the
// reflector's goroutine uses it.
type store struct {
	resource *resource
	deliver  func(r *resource, b source.Batch, complete bool)
	versions *keyed.Set[types.NamespacedName, known]
	listed   bool // all objects have been delivered once
	// ahead has objects of the first list that have arrived and were not passed on yet, and size is how many.
	ahead source.Batch
	size  int
}

// known is the name and the version of an object.
type known struct {
	name    types.NamespacedName
	version string
}

func newVersions() *keyed.Set[types.NamespacedName, known] {
	return keyed.New(func(k *known) types.NamespacedName { return k.name })
}

// aheadSize is how many objects of the first list are passed on at once.
const aheadSize = 256

// Transformer implements cache.TransformingStore, for objects of a list that arrive one by one. Those of the first list are passed on as they
// arrive, so that not all are in memory at the same time: nothing is programmed before all of them have come. What differs in a later list is
// delivered as a whole, as is then programmed at once.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if s.listed {
			return strip(obj), nil
		}
		k, err := s.take(&s.ahead, obj)
		if err != nil {
			return nil, err
		}
		s.versions.Put(k)
		if s.size++; s.size == aheadSize {
			s.deliver(s.resource, s.ahead, false)
			s.ahead, s.size = source.Batch{}, 0
		}
		return &passedOn{known: k}, nil
	}
}

// passedOn stands for an object that has been passed on, in the list that it is in.
type passedOn struct {
	metav1.Object
	*known
}

// GetNamespace, GetName and GetResourceVersion implement metav1.Object, of which nobody asks for more.
func (p *passedOn) GetNamespace() string       { return p.name.Namespace }
func (p *passedOn) GetName() string            { return p.name.Name }
func (p *passedOn) GetResourceVersion() string { return p.version }

// Add implements cache.ReflectorStore.
func (s *store) Add(obj any) error { return s.Update(obj) }

// Update implements cache.ReflectorStore.
func (s *store) Update(obj any) error {
	var b source.Batch
	k, err := s.take(&b, obj)
	if err != nil {
		return err
	}
	s.versions.Put(k)
	s.deliver(s.resource, b, false)
	return nil
}

// Delete implements cache.ReflectorStore.
func (s *store) Delete(obj any) error {
	name, _, err := identify(obj)
	if err != nil {
		return err
	}
	if s.versions.Get(name) == nil {
		return nil
	}
	s.versions.Delete(name)
	var b source.Batch
	s.resource.put(&b, name, nil)
	s.deliver(s.resource, b, false)
	return nil
}

// Replace implements cache.ReflectorStore: list has all existing objects.
func (s *store) Replace(objects []any, _ string) error {
	b := s.ahead
	now := newVersions()
	for _, obj := range objects {
		if p, is := obj.(*passedOn); is {
			now.Put(p.known)
			continue
		}
		k, err := s.take(&b, obj)
		if err != nil {
			return err
		}
		now.Put(k)
	}
	for k := range s.versions.All() {
		if now.Get(k.name) == nil {
			s.resource.put(&b, k.name, nil)
		}
	}
	s.versions, s.ahead, s.listed = now, source.Batch{}, true
	s.deliver(s.resource, b, true)
	return nil
}

// Resync implements cache.ReflectorStore. There is nothing to repeat: the receiver of the batches keeps their content.
func (s *store) Resync() error { return nil }

// take strips an object and puts it into a batch, unless this version has been passed on already. It returns what there is to note of it.
func (s *store) take(b *source.Batch, obj any) (*known, error) {
	name, version, err := identify(obj)
	if err != nil {
		return nil, err
	}
	had := s.versions.Get(name)
	if had != nil && had.version == version && version != "" {
		return had, nil
	}
	s.resource.put(b, name, strip(obj))
	return &known{name, version}, nil
}

func identify(obj any) (types.NamespacedName, string, error) {
	o, err := meta.Accessor(obj)
	if err != nil {
		return types.NamespacedName{}, "", fmt.Errorf("object from the API server: %w", err)
	}
	return types.NamespacedName{Namespace: interned(o.GetNamespace()), Name: o.GetName()}, o.GetResourceVersion(), nil
}

var _ cache.TransformingStore = (*store)(nil)
