package nftables

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// attended is a kernel that tells before the generation is asked for, and before each set is listed.
type attended struct {
	kernel
	asked  func()
	listed func(set string)
}

func (a *attended) Generation() (uint32, error) {
	a.asked()
	return a.kernel.Generation()
}

func (a *attended) Sample(f plan.Family, table string, s nft.Set, each func(nft.Element) error) error {
	a.listed(s.Name)
	return a.kernel.Sample(f, table, s, each)
}

// TestUnchanged: nothing is compared again where nobody has changed anything in nftables since everything was as it should be. Whatever
// changes before, during or after a comparison has another one made.
func TestUnchanged(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(300, 3)
	synced(t, e, p, plan.Everything())
	b := &Backend{}
	b.Engines = []*engine{e}
	reports, clients := 0, 0
	b.Compared = func(drift.Report) { reports++ }
	e.onClients = func(plan.Family, int, int) { clients++ }
	listing := map[string]func(){} // what happens once, before a set is listed
	var first func()               // what happens whenever a comparison asks for the generation
	asking := func() {}
	e.reader = func() (kernel, error) {
		k, err := read()
		return &attended{k, func() { asking() }, func(set string) {
			if do := listing[set]; do != nil {
				delete(listing, set)
				do()
			}
		}}, err
	}
	compared := func(what string, wantFound int) {
		t.Helper()
		require.False(t, b.Unchanged(), what)
		if first != nil {
			asking = first
			defer func() { first, asking = nil, func() {} }()
		}
		found, again, err := e.CompareBeside(context.Background())
		require.NoError(t, err, what)
		require.False(t, again, what)
		require.Len(t, found, wantFound, what)
	}
	settled := func() {
		t.Helper()
		before, told := reports, clients
		require.True(t, b.Unchanged())
		require.True(t, b.Unchanged())
		require.Equal(t, before+2, reports)
		if told > 0 { // The kernel tells how many there are.
			require.Greater(t, clients, told)
		}
	}
	number := 1000
	change := func() {
		number += 3
		changeOf(t, e, p, plantest.LargeService(7, number, 3))
	}
	meddle := func() { nstest.Exec(t, "nft", "delete element ip nodeproxy endpoints { 10.96.0.17 . tcp . 80 . 1 }") }
	compared("after the first sync", 0)
	settled()
	change()
	compared("after a change", 0)
	settled()
	nstest.Exec(t, "nft", "add table ip others")
	compared("after another program has changed a table of its own", 0)
	settled()
	meddle()
	compared("after another program has changed the table", 1)
	compared("after the repair", 0)
	settled()
	synced(t, e, p, plan.Everything())
	compared("after a sync that has read everything", 0)
	settled()

	change()
	listing[e.sets[clusterIPs].Name] = meddle // All others have been listed.
	compared("while another program changes what has been listed", 0)
	compared("after that", 1)
	compared("after the repair", 0)
	settled()
	change()
	listing[e.sets[services].Name] = change
	compared("during a change", 0)
	compared("after that", 0)
	settled()
	change()
	first = func() {
		change()
		meddle()
	}
	compared("when a change, and another program's, comes first", 1)
	compared("after the repair", 0)
	settled()
}
