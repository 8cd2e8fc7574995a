// Package set has sets as maps without values.
package set

import "maps"

// Set is a set. Any map without values is one.
type Set[T comparable] map[T]struct{}

// Of returns the set of some things.
func Of[T comparable](things ...T) Set[T] {
	s := make(Set[T], len(things))
	s.Insert(things...)
	return s
}

// Keys returns the set of the keys of a map.
func Keys[T comparable, V any](m map[T]V) Set[T] {
	s := make(Set[T], len(m))
	for thing := range m {
		s[thing] = struct{}{}
	}
	return s
}

// Has reports whether s has a thing.
func (s Set[T]) Has(thing T) bool {
	_, is := s[thing]
	return is
}

// Insert adds things.
func (s Set[T]) Insert(things ...T) {
	for _, thing := range things {
		s[thing] = struct{}{}
	}
}

// Delete removes things.
func (s Set[T]) Delete(things ...T) {
	for _, thing := range things {
		delete(s, thing)
	}
}

// Union returns what s or another set has.
func (s Set[T]) Union(other Set[T]) Set[T] {
	out := make(Set[T], len(s)+len(other))
	maps.Copy(out, s)
	maps.Copy(out, other)
	return out
}

// Difference returns what s has and another set has not.
func (s Set[T]) Difference(other Set[T]) Set[T] {
	out := maps.Clone(s)
	maps.DeleteFunc(out, func(thing T, _ struct{}) bool { return other.Has(thing) })
	return out
}
