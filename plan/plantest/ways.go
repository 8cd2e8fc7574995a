package plantest

import (
	"fmt"
	"strings"

	"nodeproxy/plan/packetsim"
)

// Ways describes outcomes with the rules that lead to each, and without the places where these were found.
func Ways(list []packetsim.Outcome) string {
	var b strings.Builder
	for _, o := range list {
		fmt.Fprintln(&b, o)
		for _, s := range o.Steps {
			fmt.Fprintf(&b, "  %s %s %s: %s %q\n", s.Hook, s.Table, s.Chain, s.Text(), s.Elements)
		}
	}
	return b.String()
}
