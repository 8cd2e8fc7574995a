package nftables

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestWrittenInFlight: what is written while the next transaction is prepared counts as written, and what the kernel has refused does not.
func TestWrittenInFlight(t *testing.T) {
	nstest.Enter(t)
	for _, most := range []int{mostInTransaction, 50} {
		_ = Cleanup()
		e, k := testEngine(t, plan.IPv4)
		e.most = most
		p := plantest.Large(100, 3)
		// Of kinds, the chains count.
		all := len(without(p, e, kinds, kindsWithin))
		expect := func(what string, want int) {
			t.Helper()
			if got := e.TakeWritten()[drift.SetElement]; got != want {
				t.Errorf("%s, at most %d in a transaction: %d elements count as written, want %d", what, most, got, want)
			}
		}
		synced(t, e, p, plan.Everything())
		expect("the first sync", all)
		empty := plan.New(p.Node, p.Settings)
		changed := plantest.Differing(p, empty)
		all -= len(without(empty, e, kinds, kindsWithin))
		synced(t, e, empty, plan.Only(changed))
		expect("removing all", all)
		if most > 50 {
			continue
		}
		once := k.commits + 2
		k.fail = func(n int) error {
			if n == once {
				return &nft.RefusedError{What: "a test", Err: unix.EINVAL}
			}
			return nil
		}
		synced(t, e, p, plan.Only(changed))
		expect("a refusal in the middle", all)
		holds(t, e, p)
	}
}

// without are the elements that a plan asks for, but those of some sets.
func without(p *plan.Plan, e *engine, sets ...setID) map[id]value {
	_, all, _ := desired(p, e.family, e.options)
	maps.DeleteFunc(all, func(i id, _ value) bool { return slices.Contains(sets, i.set) })
	return all
}

// TestFlightAtTheEnd: a sync that ends with an error, in whichever transaction, has nothing under way when it returns, and the one after it
// mends everything.
func TestFlightAtTheEnd(t *testing.T) {
	nstest.Enter(t)
	p := plantest.Large(60, 3)
	next := plantest.Large(60, 2)
	next.Node, next.Settings = p.Node, p.Settings
	changes := []plan.Change{plan.Everything(), plan.Only(plantest.Differing(p, next))}
	for _, after := range []bool{false, true} {
		for _, change := range changes {
			for at := 1; ; at++ {
				_ = Cleanup()
				e, k := testEngine(t, plan.IPv4)
				e.most = 40
				synced(t, e, p, plan.Everything())
				ctx, cancel := context.WithCancel(context.Background())
				begun := k.commits
				cancels := at%2 == 0
				k.after = after
				k.fail = func(n int) error {
					if n != begun+at {
						return nil
					}
					if cancels {
						cancel()
						return nil
					}
					return errors.New("no buffer space for the answer")
				}
				err := e.Sync(ctx, next, change)
				cancel()
				k.fail = nil
				if k.commits < begun+at {
					break
				}
				if err == nil && !cancels {
					t.Fatalf("transaction %d failed, and the sync did not", at)
				}
				if err != nil && e.current != nil {
					t.Fatalf("after an error in transaction %d, the engine trusts its memory", at)
				}
				require.NoError(t, e.Sync(context.Background(), next, plan.Only(plan.Keys{})), "after %d", at)
				holds(t, e, next)
				_ = e.kernel.Close()
				e.kernel = nil
			}
		}
	}
}

// unreadable is a kernel that reads no single element.
type unreadable struct {
	kernel
	asked int
}

func (u *unreadable) Element(plan.Family, string, nft.Set, nft.Element) (nft.Element, bool, error) {
	u.asked++
	return nft.Element{}, false, unix.ENOBUFS
}

// TestCountersUnread: that counters can't be read keeps no change from being written.
func TestCountersUnread(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, k := testEngine(t, plan.IPv4)
	e.traffic = newTrafficReader(nil)
	p := plantest.Large(3, 2)
	synced(t, e, p, plan.Everything())
	u := &unreadable{kernel: k.kernel}
	k.kernel = u
	sp := plantest.LargeService(1, 50, 3)
	p.Set(sp)
	if err := e.Sync(ctx, p, plan.Only(plan.Keys{sp.Key: {}})); err != nil || u.asked == 0 {
		t.Errorf("after %d attempts to read: %v", u.asked, err)
	}
	holds(t, e, p)
}
