package iptables

import (
	"context"
	"testing"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// TestVerify: the chains of one Service, those that lead to them and the jumps from built-in chains are found to be as written, or not;
// what belongs to other Services does not matter.
func TestVerify(t *testing.T) {
	t.Parallel()
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		l := newLab(t, v, 100) // More than a dispatcher lists one by one.
		defer l.end()
		var mine, other plan.Key
		for k := range l.plan.Services {
			if k.Family == plan.IPv4 && (mine.Service.Name == "" || k.Service == mine.Service) {
				mine = k
			} else if k.Family == plan.IPv4 {
				other = k
			}
		}
		verify := func() drift.Found {
			t.Helper()
			things, found, err := l.backend.Verify(context.Background(), mine.Service)
			if err != nil || things < 20 {
				t.Fatalf("%d things, %v", things, err)
			}
			return found
		}
		if found := verify(); len(found) > 0 {
			t.Errorf("nothing has changed: %s", found.Words(5))
		}
		program := "iptables-" + string(v)
		nstest.Exec(t, program, "-t", "nat", "-F", serviceChain("KUBE-SVC-", other))
		if found := verify(); len(found) > 0 {
			t.Errorf("another Service's chain is empty: %s", found.Words(5))
		}
		nstest.Exec(t, program, "-t", "nat", "-F", serviceChain("KUBE-SVC-", mine))
		if found := verify(); len(found) == 0 || found[0].State != drift.Missing || found[0].Kind != drift.Rule {
			t.Errorf("its chain is empty: %s", found.Words(5))
		}
		before := len(verify())
		nstest.Exec(t, program, "-t", "nat", "-F", "PREROUTING")
		if found := verify(); len(found) != before+1 {
			t.Errorf("the jump from PREROUTING is missing: %s", found.Words(5))
		}
		nstest.Exec(t, program, "-t", "nat", "-F")
		nstest.Exec(t, program, "-t", "nat", "-X")
		if found := verify(); len(found) < before+4 {
			t.Errorf("the table is empty: %s", found.Words(5))
		}
	})
}
