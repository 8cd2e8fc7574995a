package apiserver

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"nodeproxy/source"
)

// store receives the objects of one resource from a reflector. It passes them on and keeps only their names and versions: the names
// to find out after a new list which objects are gone, the versions so as not to pass on again what has not changed. Only the
// reflector's goroutine uses it.
type store struct {
	resource *resource
	deliver  func(r *resource, b source.Batch, complete bool)
	versions map[types.NamespacedName]string
	listed   bool // all objects have been delivered once
	// ahead has objects of the first list that have arrived and were not passed on yet, and size is how many.
	ahead source.Batch
	size  int
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
		name, version, err := identify(obj)
		if err != nil {
			return nil, err
		}
		if err := s.take(&s.ahead, obj, s.versions); err != nil {
			return nil, err
		}
		if s.size++; s.size == aheadSize {
			s.deliver(s.resource, s.ahead, false)
			s.ahead, s.size = source.Batch{}, 0
		}
		return &passedOn{name: name, version: version}, nil
	}
}

// passedOn stands for an object that has been passed on, in the list that it is in.
type passedOn struct {
	metav1.Object
	name    types.NamespacedName
	version string
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
	if err := s.take(&b, obj, s.versions); err != nil {
		return err
	}
	s.deliver(s.resource, b, false)
	return nil
}

// Delete implements cache.ReflectorStore.
func (s *store) Delete(obj any) error {
	name, _, err := identify(obj)
	if err != nil {
		return err
	}
	if _, known := s.versions[name]; !known {
		return nil
	}
	delete(s.versions, name)
	var b source.Batch
	s.resource.put(&b, name, nil)
	s.deliver(s.resource, b, false)
	return nil
}

// Replace implements cache.ReflectorStore: list has all existing objects.
func (s *store) Replace(objects []any, _ string) error {
	b := s.ahead
	now := make(map[types.NamespacedName]string, len(objects))
	for _, obj := range objects {
		if p, is := obj.(*passedOn); is {
			now[p.name] = p.version
			continue
		}
		if err := s.take(&b, obj, now); err != nil {
			return err
		}
	}
	for name := range s.versions {
		if _, still := now[name]; !still {
			s.resource.put(&b, name, nil)
		}
	}
	s.versions, s.ahead, s.listed = now, source.Batch{}, true
	s.deliver(s.resource, b, true)
	return nil
}

// Resync implements cache.ReflectorStore. There is nothing to repeat: the receiver of the batches keeps their content.
func (s *store) Resync() error { return nil }

// take strips an object and puts it into a batch, unless this version has been passed on already, and records its version in
// versions.
func (s *store) take(b *source.Batch, obj any, versions map[types.NamespacedName]string) error {
	name, version, err := identify(obj)
	if err != nil {
		return err
	}
	if had, known := s.versions[name]; !known || had != version || version == "" {
		s.resource.put(b, name, strip(obj))
	}
	versions[name] = version
	return nil
}

func identify(obj any) (types.NamespacedName, string, error) {
	o, err := meta.Accessor(obj)
	if err != nil {
		return types.NamespacedName{}, "", fmt.Errorf("object from the API server: %w", err)
	}
	return types.NamespacedName{Namespace: interned(o.GetNamespace()), Name: o.GetName()}, o.GetResourceVersion(), nil
}

var _ cache.TransformingStore = (*store)(nil)
