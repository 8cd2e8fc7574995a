package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// openFiles is how many descriptors the process has open.
func openFiles(t rapid.TB) int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatalf("%v", err)
	}
	return len(list)
}

// TestSocketFaults: whatever becomes of an answer, and wherever, the sync fails or has done everything; after a failure another socket is
// used, everything is read, and one more sync converges. No descriptor is left open.
func TestSocketFaults(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	type fault struct {
		name     string
		received func(s *socket, b []byte, n int, err error) (int, error)
	}
	lost := func(no error) func(*socket, []byte, int, error) (int, error) {
		return func(*socket, []byte, int, error) (int, error) { return 0, no }
	}
	faults := []fault{
		{"answers overran the buffer", lost(unix.ENOBUFS)},
		{"no answer in time", lost(unix.EAGAIN)},
		{"the socket died", func(s *socket, _ []byte, _ int, _ error) (int, error) {
			_ = s.Socket.Close()
			return 0, unix.EBADF
		}},
		{"a message is cut short", func(_ *socket, _ []byte, n int, err error) (int, error) { return n - 4, err }},
		{"a dump was interrupted", func(_ *socket, b []byte, n int, err error) (int, error) {
			flags := binary.NativeEndian.Uint16(b[6:])
			binary.NativeEndian.PutUint16(b[6:], flags|unix.NLM_F_DUMP_INTR)
			return n, err
		}},
	}
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(rt, "family")
		what := rapid.SampledFrom(faults).Draw(rt, "fault")
		at := rapid.IntRange(1, 60).Draw(rt, "at answer")
		plans := rapid.SliceOfN(plantest.Plans(), 2, 4).Draw(rt, "plans")
		_ = Cleanup()
		before := openFiles(rt)
		answers, dials := 0, 0
		e := newEngine(f, Options{MasqueradeBit: 14}, slog.New(slog.DiscardHandler), func() (kernel, error) {
			dials++
			real, err := netlink.OpenLarge(unix.NETLINK_NETFILTER, 64<<20)
			s := &socket{Socket: real}
			s.received = func(b []byte, n int, err error) (int, error) {
				if answers++; answers == at && err == nil {
					return what.received(s, b, n, err)
				}
				return n, err
			}
			return nft.NewConn(s), err
		})
		e.most = rapid.SampledFrom([]int{mostInTransaction, 20}).Draw(rt, "most in a transaction")
		readsByKey(rt, e)
		failed := 0
		for i, p := range plans {
			p.Node, p.Settings = plans[0].Node, plans[0].Settings
			changed := plan.Everything()
			if i > 0 {
				changed = plan.Only(plantest.Differing(plans[i-1], p))
			}
			for syncWhole(e, p, changed) != nil {
				if failed++; failed > 1 {
					rt.Fatalf("%s: %d syncs failed", what.name, failed)
				}
				if e.current != nil || e.kernel != nil {
					rt.Fatalf("%s: the socket is used again", what.name)
				}
				changed = plan.Everything()
			}
			if failed > 0 { // What the failed sync has left, and nothing leads to, may be found by a comparison only.
				if _, again, err := e.CompareBeside(ctx); again || err != nil {
					rt.Fatalf("%s: a comparison: %t, %v", what.name, again, err)
				}
			}
			holds(rt, e, p)
		}
		if dials != failed+1 {
			rt.Fatalf("%s: %d sockets were opened, and %d syncs failed", what.name, dials, failed)
		}
		_ = e.kernel.Close()
		if after := openFiles(rt); after != before {
			rt.Fatalf("%s: %d descriptors are open, %d were", what.name, after, before)
		}
	})
}

// TestNoSocket: a node that has no descriptors left fails syncs without doing anything else, and goes on when there are some.
func TestNoSocket(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	real := e.dial
	e.dial = func() (kernel, error) { return nil, fmt.Errorf("netlink socket: %w", unix.EMFILE) }
	p := plantest.Large(20, 2)
	if err := e.Sync(context.Background(), p, plan.Everything()); !errors.Is(err, unix.EMFILE) {
		t.Errorf("the sync: %v", err)
	}
	e.dial = real
	synced(t, e, p, plan.Everything())
	holds(t, e, p)
	e.reader = func() (kernel, error) { return nil, fmt.Errorf("netlink socket: %w", unix.EMFILE) }
	if _, again, err := e.CompareBeside(context.Background()); !again || !errors.Is(err, unix.EMFILE) {
		t.Errorf("a comparison beside syncs: %t, %v", again, err)
	}
}
