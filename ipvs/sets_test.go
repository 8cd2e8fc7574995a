package ipvs

import (
	"testing"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// TestSetsAreRemovable: cleanup knows every set that this mode makes.
func TestSetsAreRemovable(t *testing.T) {
	for id := range setCount {
		for _, f := range plan.Families {
			if name := setName(id, f); !names.IsOurSet(name) {
				t.Errorf("set %s is not known to package names", name)
			}
		}
	}
}
