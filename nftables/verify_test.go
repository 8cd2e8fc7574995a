package nftables

import (
	"context"
	"slices"
	"testing"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestVerify: the elements of one Service and the chains that lead to them are found to be as written, or not; what belongs to other
// Services does not matter.
func TestVerify(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(50, 2)
	synced(t, e, p, plan.Everything())
	var keys []plan.Key
	for k := range p.Services {
		if k.Family == plan.IPv4 {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, plan.Key.Compare)
	verify := func() drift.Found {
		t.Helper()
		things, found, err := e.Verify(context.Background(), keys[0].Service)
		if err != nil || things < 40 {
			t.Fatalf("%d things, %v", things, err)
		}
		return found
	}
	if found := verify(); len(found) > 0 {
		t.Errorf("nothing has changed: %s", found.Words(5))
	}
	remove := func(k plan.Key) {
		t.Helper()
		address := p.Services[k].Frontends[0].Addr.String()
		nstest.Exec(t, "nft", "delete", "element", "ip", "nodeproxy", "services", "{", address, ".", "tcp", ".", "80", "}")
	}
	remove(keys[1])
	if found := verify(); len(found) > 0 {
		t.Errorf("another Service's element is missing: %s", found.Words(5))
	}
	remove(keys[0])
	if found := verify(); len(found) != 1 || found[0].State != drift.Missing || found[0].Kind != drift.SetElement {
		t.Errorf("an element is missing: %s", found.Words(5))
	}
	nstest.Exec(t, "nft", "flush", "table", "ip", "nodeproxy")
	if found := verify(); len(found) < 10 {
		t.Errorf("after nft flush table: %s", found.Words(5))
	}
	nstest.Exec(t, "nft", "delete", "table", "ip", "nodeproxy")
	if found := verify(); len(found) != 1 || found[0].Kind != drift.Table {
		t.Errorf("after nft delete table: %s", found.Words(5))
	}
}
