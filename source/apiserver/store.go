package apiserver

import (
	"fmt"
	"strconv"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"nodeproxy/internal/keyed"
	"nodeproxy/source"
)

// store passes the objects of one resource on, and keeps only their names and versions: the names to find out after a new list which
// objects are gone, the versions so as not to pass on again what has not changed. Only the follower's goroutine uses it.
type store struct {
	resource *resource
	deliver  func(r *resource, b source.Batch, complete bool)
	known    *keyed.Set[types.NamespacedName, known]
	listed   bool // all objects have been delivered once
	// ahead has objects of the first list that have arrived and were not passed on yet, and size is how many.
	ahead source.Batch
	size  int
	// lists counts lists, from their beginnings on. listing says that one is under way. Of a list after the first, differs has what is not as
	// it is known, and changed the names of what a watch beside it has brought since it began.
	lists   uint32
	listing bool
	differs map[types.NamespacedName]any
	changed map[types.NamespacedName]struct{}
}

// known is what is kept of an object: its name and version, and which list it was last seen in, or brought by the watch after.
type known struct {
	name    types.NamespacedName
	version uint64 // as the API server's versions are numbers; 0 for any other
	list    uint32
}

func newStore(r *resource, deliver func(r *resource, b source.Batch, complete bool)) *store {
	return &store{resource: r, deliver: deliver, known: keyed.New(func(k *known) types.NamespacedName { return k.name })}
}

// aheadSize is how many objects of the first list are passed on at once.
const aheadSize = 256

// begin begins a list, in place of one that may have broken off.
func (s *store) begin() {
	s.lists++
	s.listing, s.differs, s.changed = true, map[types.NamespacedName]any{}, map[types.NamespacedName]struct{}{}
}

// list takes an object of the list. Those of the first list are passed on as they arrive, so that not all are in memory at the same time:
// nothing is programmed before all of them have come. What differs in a later list is passed on as a whole, as is then programmed at once,
// with what is gone.
func (s *store) list(e watch.Event) {
	name, version := identify(e.Object)
	if _, newer := s.changed[name]; newer || e.Type == watch.Bookmark {
		return
	}
	had := s.known.Get(name)
	delete(s.differs, name)
	switch {
	case e.Type == watch.Deleted: // while the list was under way
		if had != nil {
			had.list = s.lists - 1
		}
	case had != nil && had.version == version && version != 0:
		had.list = s.lists
	case s.listed:
		s.differs[name] = strip(e.Object)
	default:
		s.put(&s.ahead, name, version, strip(e.Object))
		if s.size++; s.size == aheadSize {
			s.deliver(s.resource, s.ahead, false)
			s.ahead, s.size = source.Batch{}, 0
		}
	}
}

// complete records that all objects of the list have come: what is not among them is gone.
func (s *store) complete() {
	b := s.ahead
	for name, obj := range s.differs {
		_, version := identify(obj)
		s.put(&b, name, version, obj)
	}
	var gone []types.NamespacedName
	for k := range s.known.All() {
		if k.list != s.lists {
			gone = append(gone, k.name)
		}
	}
	for _, name := range gone {
		s.known.Delete(name)
		s.resource.put(&b, name, nil)
	}
	s.ahead, s.size, s.listed, s.listing, s.differs, s.changed = source.Batch{}, 0, true, false, nil, nil
	s.deliver(s.resource, b, true)
}

// change takes what a watch brings.
func (s *store) change(e watch.Event) {
	var b source.Batch
	name, version := identify(e.Object)
	if s.listing {
		s.changed[name] = struct{}{}
		delete(s.differs, name)
	}
	had := s.known.Get(name)
	switch {
	case e.Type == watch.Deleted && had == nil:
		return
	case e.Type == watch.Deleted:
		s.known.Delete(name)
		s.resource.put(&b, name, nil)
	case had != nil && had.version == version && version != 0:
		had.list = s.lists
		return
	default:
		s.put(&b, name, version, strip(e.Object))
	}
	s.deliver(s.resource, b, false)
}

// put puts an object into a batch and notes it.
func (s *store) put(b *source.Batch, name types.NamespacedName, version uint64, obj any) {
	s.resource.put(b, name, obj)
	s.known.Put(&known{name, version, s.lists})
}

// identify returns the name and the version of an object of the API.
func identify(obj any) (types.NamespacedName, uint64) {
	o, err := meta.Accessor(obj)
	if err != nil {
		panic(fmt.Sprintf("apiserver: %T is no object: %v", obj, err))
	}
	version, _ := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	return types.NamespacedName{Namespace: interned(o.GetNamespace()), Name: o.GetName()}, version
}
