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
// objects are gone, the versions so as not to pass on again what has not changed. The follower's mutex guards it.
type store struct {
	resource *resource
	deliver  func(r *resource, b source.Batch, complete bool)
	known    *keyed.Set[types.NamespacedName, known]
	listed   bool // all objects have been delivered once
	// ahead has objects of the first list that have arrived and were not passed on yet, and size is how many.
	ahead source.Batch
	size  int
	// lists counts lists, from their beginnings on. listing says that one is under way. Of a list after the first, differs has what is not as
	// it is known, and changed the names of what a watch beside it has brought since it began, with the versions of that.
	lists   uint32
	listing bool
	differs map[types.NamespacedName]any
	changed map[types.NamespacedName]uint64
	// asOf is the version of the last list; 0 while there is another.
	asOf uint64
	// verifying is the verification that is under way; nil for none.
	verifying *verification
}

// known is what is kept of an object: its name and version, and which list it was last seen in, or brought by the watch after. What a watch
// brings beside a list is not in that before the list has it, too.
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
	if s.verifying != nil {
		s.verifying.move()
	}
	s.lists++
	s.listing, s.differs, s.changed, s.asOf = true, map[types.NamespacedName]any{}, map[types.NamespacedName]uint64{}, 0
	s.verifying = nil
}

// list takes an object of the list. Those of the first list are passed on as they arrive, so that not all are in memory at the same time:
// nothing is programmed before all of them have come. What differs in a later list is passed on as a whole, as is then programmed at once,
// with what is gone.
func (s *store) list(e watchEvent) error {
	version := number(e.version)
	if e.kind == watch.Bookmark || s.later(e.name, version) {
		return nil
	}
	had := s.known.Get(e.name)
	delete(s.differs, e.name)
	switch {
	case e.kind == watch.Deleted: // while the list was under way
		if had != nil {
			had.list = s.lists - 1
		}
		return nil
	case had != nil && had.version == version && version != 0:
		had.list = s.lists
		return nil
	}
	obj, err := s.resource.decode(e)
	if err != nil {
		return err
	}
	name, version := identify(obj)
	if s.listed {
		s.differs[name] = strip(obj)
		return nil
	}
	s.put(&s.ahead, name, version, s.lists, strip(obj))
	if s.size++; s.size == aheadSize {
		s.deliver(s.resource, s.ahead, false)
		s.ahead, s.size = source.Batch{}, 0
	}
	return nil
}

// later reports whether the watch beside a list has brought an object, or its end, as of later than a version. The server of the watch and
// that of the list may be two, and either may lag behind the other.
func (s *store) later(name types.NamespacedName, version uint64) bool {
	brought, is := s.changed[name]
	return is && (brought > version || version == 0)
}

// complete records that all objects of the list have come, as of a version: what is not among them is gone.
func (s *store) complete(asOf uint64) {
	b := s.ahead
	for name, obj := range s.differs {
		_, version := identify(obj)
		s.put(&b, name, version, s.lists, obj)
	}
	var gone []types.NamespacedName
	for k := range s.known.All() {
		if k.list != s.lists && !s.later(k.name, asOf) {
			gone = append(gone, k.name)
		}
	}
	for _, name := range gone {
		s.known.Delete(name)
		s.resource.put(&b, name, nil)
	}
	s.ahead, s.size, s.listed, s.listing, s.differs, s.changed, s.asOf = source.Batch{}, 0, true, false, nil, nil, asOf
	s.deliver(s.resource, b, true)
}

// change takes what a watch brings.
func (s *store) change(e watchEvent) error {
	name, version, list := e.name, number(e.version), s.lists
	had := s.known.Get(name)
	if s.verifying != nil {
		s.verifying.bring(name)
	}
	same := had != nil && had.version == version && version != 0
	var obj any
	if e.kind != watch.Deleted && !same {
		decoded, err := s.resource.decode(e)
		if err != nil {
			return err
		}
		name, version = identify(decoded)
		obj = strip(decoded)
	}
	if s.listing {
		s.changed[name] = version
		differs, differing := s.differs[name], uint64(0)
		if differs != nil {
			_, differing = identify(differs)
		}
		if differing <= version {
			delete(s.differs, name)
		}
		if differs == nil || differing != version {
			list--
		}
	}
	var b source.Batch
	switch {
	case e.kind == watch.Deleted && had == nil, e.kind != watch.Deleted && same:
		return nil
	case e.kind == watch.Deleted:
		s.known.Delete(name)
		s.resource.put(&b, name, nil)
	default:
		s.put(&b, name, version, list, obj)
	}
	s.deliver(s.resource, b, false)
	return nil
}

// put puts an object into a batch and notes it.
func (s *store) put(b *source.Batch, name types.NamespacedName, version uint64, list uint32, obj any) {
	s.resource.put(b, name, obj)
	s.known.Put(&known{name, version, list})
}

// identify returns the name and the version of an object of the API.
func identify(obj any) (types.NamespacedName, uint64) {
	o, err := meta.Accessor(obj)
	if err != nil {
		panic(fmt.Sprintf("apiserver: %T is no object: %v", obj, err))
	}
	return types.NamespacedName{Namespace: interned(o.GetNamespace()), Name: o.GetName()}, number(o.GetResourceVersion())
}

// number returns a version as a number, as those of the API server are; 0 for any other.
func number(version string) uint64 {
	n, _ := strconv.ParseUint(version, 10, 64)
	return n
}
