// Package keyed has a set that takes less memory than a map where there are very many values.
package keyed

import (
	"hash/maphash"
	"iter"
	"slices"
)

// Set holds values that have their keys in them, by pointers. A map would hold the keys once more, and those of this program are long: of
// 45,000 ServicePorts, a map takes more than five megabytes, and a Set half of one. The zero Set can't be used.
type Set[K comparable, V any] struct {
	key func(*V) K
	// slots is a hash table with linear probing. Its length is a power of two, and at least a quarter of it is free.
	slots []*V
	n     int
	seed  maphash.Seed
}

// least is the length of the smallest table.
const least = 8

// New returns an empty Set of values whose keys are what key returns. The key of a value must not change while the Set has it.
func New[K comparable, V any](key func(*V) K) *Set[K, V] {
	return &Set[K, V]{key: key, seed: maphash.MakeSeed()}
}

// Len returns the number of values.
func (s *Set[K, V]) Len() int { return s.n }

// Get returns the value with a key; nil if there is none.
func (s *Set[K, V]) Get(k K) *V {
	if s.n == 0 {
		return nil
	}
	return s.slots[s.find(k)]
}

// Put adds a value, in place of the one with its key.
func (s *Set[K, V]) Put(v *V) {
	if 4*(s.n+1) > 3*len(s.slots) {
		s.resize(max(least, 2*len(s.slots)))
	}
	i := s.find(s.key(v))
	if s.slots[i] == nil {
		s.n++
	}
	s.slots[i] = v
}

// Delete removes the value with a key, if there is one.
func (s *Set[K, V]) Delete(k K) {
	if s.n == 0 {
		return
	}
	free, mask := s.find(k), len(s.slots)-1
	if s.slots[free] == nil {
		return
	}
	s.slots[free] = nil
	// What had to give way to it moves up, so that it is found again.
	for i := (free + 1) & mask; s.slots[i] != nil; i = (i + 1) & mask {
		if home := s.home(s.key(s.slots[i])); (i-home)&mask >= (i-free)&mask {
			s.slots[free], s.slots[i] = s.slots[i], nil
			free = i
		}
	}
	if s.n--; len(s.slots) > least && 8*s.n < len(s.slots) {
		s.resize(len(s.slots) / 2)
	}
}

// Clone returns a Set of the same values.
func (s *Set[K, V]) Clone() *Set[K, V] { return &Set[K, V]{s.key, slices.Clone(s.slots), s.n, s.seed} }

// All iterates over the values, in no order. The Set must not change meanwhile.
func (s *Set[K, V]) All() iter.Seq[*V] {
	return func(yield func(*V) bool) {
		for _, v := range s.slots {
			if v != nil && !yield(v) {
				return
			}
		}
	}
}

// home returns where a key should be.
func (s *Set[K, V]) home(k K) int { return int(maphash.Comparable(s.seed, k)) & (len(s.slots) - 1) }

// find returns where a key is, or else the free slot where it would be.
func (s *Set[K, V]) find(k K) int {
	i := s.home(k)
	for s.slots[i] != nil && s.key(s.slots[i]) != k {
		i = (i + 1) & (len(s.slots) - 1)
	}
	return i
}

func (s *Set[K, V]) resize(n int) {
	before := s.slots
	s.slots = make([]*V, n)
	for _, v := range before {
		if v != nil {
			s.slots[s.find(s.key(v))] = v
		}
	}
}
