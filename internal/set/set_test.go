package set

import (
	"maps"
	"testing"
)

func TestSet(t *testing.T) {
	t.Parallel()
	s := Keys(map[int]string{1: "", 2: "", 3: ""})
	s.Delete(3, 4)
	s.Insert(5)
	if !maps.Equal(s, Of(1, 2, 5)) || s.Has(3) || !s.Has(5) {
		t.Errorf("%v", s)
	}
	if u, d := s.Union(Of(6)), s.Difference(Of(2, 6)); !maps.Equal(u, Of(1, 2, 5, 6)) || !maps.Equal(d, Of(1, 5)) || len(s) != 3 {
		t.Errorf("%v and %v of %v", u, d, s)
	}
}
