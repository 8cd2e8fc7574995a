package nftables

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestBesideTransactions: a start, a sync and a comparison of everything get through beside another program that commits transactions in
// another table without a pause.
func TestBesideTransactions(t *testing.T) {
	nstest.Enter(t)
	c, err := nft.Dial()
	require.NoError(t, err)
	defer c.Close()
	b := nft.NewBatch(plan.IPv4, "other") // Its chains come before ours in listings.
	b.AddTable()
	require.NoError(t, c.Commit(b))
	committed, stop, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				ended <- nil
				return
			case committed <- struct{}{}:
			default:
			}
			b := nft.NewBatch(plan.IPv4, "other")
			if n%2 == 0 {
				b.AddChain(nft.Chain{Name: "here"})
			} else {
				b.DeleteChain("here")
			}
			if err := c.Commit(b); err != nil {
				ended <- err
				return
			}
		}
	}()
	defer func() {
		close(stop)
		assert.NoError(t, <-ended)
	}()
	p := plantest.Large(0, 0)
	for i := range 500 { // Each has chains of its own, so that a listing of rules takes longer than many transactions.
		p.Set(ownTimeout(i))
	}
	ctx := context.Background()
	e, _ := testEngine(t, plan.IPv4)
	synced(t, e, p, plan.Everything())
	for range 2 {
		<-committed
		again, k := testEngine(t, plan.IPv4)
		if err := again.Sync(ctx, p, plan.Everything()); err != nil || k.commits > 0 {
			t.Fatalf("a start over what is there: %v, %d transactions", err, k.commits)
		}
		<-committed
		if err := again.Sync(ctx, p, plan.Everything()); err != nil || len(again.Found) > 0 || k.commits > 0 {
			t.Fatalf("a sync of everything: %v, found %v, %d transactions", err, again.Found, k.commits)
		}
		<-committed
		if found, more, err := again.CompareBeside(ctx); err != nil || len(found) > 0 || more {
			t.Fatalf("a comparison: found %v, %t, %v", found, more, err)
		}
		again.forget()
	}
}
