package drift

import (
	"strings"
	"testing"
)

// TestFound: everything is counted, the first differences are named, and the words say how many were left out.
func TestFound(t *testing.T) {
	var all Found
	if all.Total() != 0 || all.Words(3) != "" {
		t.Errorf("nothing found: %d, %q", all.Total(), all.Words(3))
	}
	for range 3 { // as three families would
		var one Found
		for i := range 9 {
			one.Add(Rule, Missing, "number %d", i)
		}
		one.Add(SetElement, Changed, "of a set")
		all.Merge(one)
	}
	if all.Counts[Rule] != 27 || all.Counts[SetElement] != 3 || all.Total() != 30 {
		t.Errorf("counts: %v", all.Counts)
	}
	if len(all.First) != Most {
		t.Errorf("%d differences are kept, want %d", len(all.First), Most)
	}
	if got, want := all.Words(2), "rule number 0: missing; rule number 1: missing; and 28 more"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := all.Words(Most); !strings.Contains(got, "set element of a set: changed") || !strings.HasSuffix(got, "; and 10 more") {
		t.Errorf("got %q", got)
	}
	if len(all.Counts) != 2 {
		t.Errorf("kinds: %v", all.Counts)
	}
}
