package ipvs

import (
	"fmt"
	"sync"
	"testing"
)

// TestSchedulersAtOnce: both families, comparisons and questions may ask for schedulers beside each other, and each is looked for once.
func TestSchedulersAtOnce(t *testing.T) {
	t.Parallel()
	asked := map[string]int{}
	s := &schedulers{known: map[string]bool{}, has: func(name string) bool {
		asked[name]++
		return len(name)%2 == 0
	}}
	const names = 1000
	var running sync.WaitGroup
	for range 4 {
		running.Go(func() {
			for i := range names {
				if name := fmt.Sprint(i); s.lacks(name) != (len(name)%2 == 1) {
					t.Errorf("%s: %t", name, len(name)%2 == 0)
				}
			}
		})
	}
	running.Wait()
	for name, n := range asked {
		if n != 1 {
			t.Errorf("%s was looked for %d times", name, n)
		}
	}
	if len(asked) != names {
		t.Errorf("%d schedulers were looked for, want %d", len(asked), names)
	}
}
