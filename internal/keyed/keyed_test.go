package keyed_test

import (
	"maps"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/internal/keyed"
	_ "nodeproxy/internal/seed"
)

type value struct{ key, version int }

// TestLikeMap: after any changes, a set has what a map has.
func TestLikeMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		set, want := keyed.New(func(v *value) int { return v.key }), map[int]*value{}
		most := rapid.SampledFrom([]int{3, 30, 300}).Draw(t, "most")
		for i := range rapid.IntRange(0, 8*most).Draw(t, "changes") {
			key := rapid.IntRange(0, most).Draw(t, "key")
			if rapid.Bool().Draw(t, "delete") {
				set.Delete(key)
				delete(want, key)
			} else {
				v := &value{key, i}
				set.Put(v)
				want[key] = v
			}
		}
		clone := set.Clone()
		set.Put(&value{key: -1})
		if clone.Get(-1) != nil || set.Get(-1) == nil {
			t.Error("a clone changes with its original")
		}
		set = clone
		got := map[int]*value{}
		for v := range set.All() {
			got[v.key] = v
		}
		if !maps.Equal(got, want) || set.Len() != len(want) {
			t.Errorf("the set has %d values %v, want %v", set.Len(), got, want)
		}
		for key := range most + 1 {
			if set.Get(key) != want[key] {
				t.Errorf("value %d is %v, want %v", key, set.Get(key), want[key])
			}
		}
	})
}
