package plan

import "testing"

// TestChange: no ServicePorts are not the same as all of them, and who says nothing says everything.
func TestChange(t *testing.T) {
	key := Key{Service: Service{"ns", "a"}, Protocol: TCP, Family: IPv4}
	for _, c := range []struct {
		what      string
		change    Change
		all, none bool
		keys      int
	}{
		{"everything", Everything(), true, false, 0},
		{"the zero Change", Change{}, true, false, 0},
		{"nothing", Only(nil), false, true, 0},
		{"nothing, from an empty set", Only(Keys{}), false, true, 0},
		{"one", Only(Keys{key: {}}), false, false, 1},
	} {
		if c.change.All() != c.all || c.change.None() != c.none || len(c.change.Keys()) != c.keys {
			t.Errorf("%s: All %t, None %t, Keys %v", c.what, c.change.All(), c.change.None(), c.change.Keys())
		}
	}
}
