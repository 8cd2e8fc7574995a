package nftables

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
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

// TestUnchanged: elements are not read where nobody has changed anything in nftables since all of them were as they should be. Whatever changes
// before, during or after a comparison has them read again.
func TestUnchanged(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(300, 3)
	synced(t, e, p, plan.Everything())
	b := &Backend{}
	b.Engines = []*engine{e}
	lists := 0
	listing := map[string]func(){} // what happens once, before a set is listed
	asking := func() {}            // what happens whenever the generation is asked for
	e.reader = func() (kernel, error) {
		k, err := read()
		return &attended{k, func() { asking() }, func(set string) {
			lists++
			if do := listing[set]; do != nil {
				delete(listing, set)
				do()
			}
		}}, err
	}
	compared := func(what string, wantFound int, wantUnchanged bool) {
		t.Helper()
		lists = 0
		found, again, err := e.CompareBeside(context.Background())
		require.NoError(t, err, what)
		require.False(t, again, what)
		require.Len(t, found, wantFound, what)
		require.Equal(t, wantUnchanged, b.Unchanged(), what)
		require.Equal(t, wantUnchanged, lists == 0, "%s: %d sets were listed", what, lists)
	}
	number := 1000
	change := func() {
		number += 3
		changeOf(t, e, p, plantest.LargeService(7, number, 3))
	}
	meddle := func() { nstest.Exec(t, "nft", "delete element ip nodeproxy endpoints { 10.96.0.17 . tcp . 80 . 1 }") }
	settled := func() {
		t.Helper()
		compared("the next one", 0, true)
		compared("the one after that", 0, true)
	}

	compared("after the first sync", 0, false)
	settled()
	change()
	compared("after a change", 0, false)
	settled()
	nstest.Exec(t, "nft", "add table ip others")
	compared("after another program has changed a table of its own", 0, false)
	settled()
	meddle()
	compared("after another program has changed the table", 1, false)
	compared("after the repair", 0, false)
	settled()
	synced(t, e, p, plan.Everything())
	compared("after a sync that has read everything", 0, false)
	settled()

	change()
	listing[e.sets[clusterIPs].Name] = meddle // All others have been listed.
	compared("while another program changes what has been listed", 0, false)
	compared("after that", 1, false)
	compared("after the repair", 0, false)
	settled()
	change()
	listing[e.sets[services].Name] = change
	compared("during a change", 0, false)
	compared("after that", 0, false)
	settled()
	asking = func() {
		change()
		meddle()
	}
	compared("when a change, and another program's, comes first", 1, false)
	asking = func() {}
	compared("after the repair", 0, false)
	settled()
}
