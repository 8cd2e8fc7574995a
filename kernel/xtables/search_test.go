package xtables

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSearch runs searches in which the kernel refuses one thing always, and everything from one call on until another one.
func TestSearch(t *testing.T) {
	refusal := func() error { return &RestoreError{Message: "invalid argument"} }
	const things, bad = 8, 5
	for from := range 30 {
		for until := from; until < 30; until++ {
			t.Run(fmt.Sprintf("%d-%d", from, until), func(t *testing.T) {
				calls := 0
				broken := func() bool {
					calls++
					return from < calls && calls <= until
				}
				taken := map[int]bool{}
				var refused []int
				s := Search[int]{
					Try: func(list []int) error {
						if broken() || slices.Contains(list, bad) {
							return refusal()
						}
						for _, thing := range list {
							taken[thing] = true
						}
						return nil
					},
					Refused: func(thing int, err error) { refused = append(refused, thing) },
					Works:   func() bool { return !broken() },
				}
				err := s.Run([]int{0, 1, 2, 3, 4, 5, 6, 7})
				if err == nil {
					require.Equal(t, []int{bad}, refused)
					require.Len(t, taken, things-1)
				} else {
					require.Subset(t, []int{bad}, refused)
					require.NotEqual(t, from, until, "an error, though nothing is wrong but one thing")
				}
			})
		}
	}
}
