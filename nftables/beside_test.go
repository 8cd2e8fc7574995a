package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// meddling is a kernel beside which something happens while a set is listed.
type meddling struct {
	kernel
	during func()
	closed *int
}

func (m *meddling) Sample(f plan.Family, table string, s nft.Set, each func(nft.Element) error) error {
	n := 0
	return m.kernel.Sample(f, table, s, func(e nft.Element) error {
		if n++; n == 3 {
			m.during()
		}
		return each(e)
	})
}

func (m *meddling) Close() error {
	*m.closed++
	return m.kernel.Close()
}

// beside has the engine read beside syncs by a kernel that calls during in the middle of each set. It returns how many are open.
func beside(e *engine, during func()) (open func() int) {
	var opened, closed int
	e.reader = func() (kernel, error) {
		k, err := read()
		opened++
		return &meddling{k, during, &closed}, err
	}
	return func() int { return opened - closed }
}

// TestCompareBeside: what another program changes is found, named and repaired without a sync of everything, if it is not much; else such
// a sync is asked for.
func TestCompareBeside(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(300, 3)
	ctx := context.Background()
	synced(t, e, p, plan.Everything())
	var last drift.Report
	reports := 0
	b := &Backend{}
	b.Engines = []*engine{e}
	b.Compared = func(r drift.Report) { last, reports = r, reports+1 }
	if again := b.Compare(ctx); again || reports != 1 || len(last.Found) > 0 {
		t.Fatalf("where nothing differs: %t, reported %d times, %v", again, reports, last)
	}
	for _, tc := range []struct {
		nft   string
		state drift.State // of what is repaired; "" where a sync of everything is asked for
	}{
		{"delete element ip nodeproxy services { 10.96.0.12 . tcp . 80 }", drift.Missing},
		{"delete element ip nodeproxy endpoints { 10.96.0.12 . tcp . 80 . 1 }; " +
			"add element ip nodeproxy endpoints { 10.96.0.12 . tcp . 80 . 1 : 192.0.2.1 . 80 }", drift.Changed},
		{"add element ip nodeproxy cluster-ips { 192.0.2.1 }", drift.Unexpected},
		{"add element ip nodeproxy source-ranges { 192.0.2.1 . tcp . 80 . 10.0.0.0 . 8 }", drift.Unexpected},
		{"flush map ip nodeproxy endpoints", ""},
		{"flush chain ip nodeproxy prerouting", ""},
		{"add rule ip nodeproxy to-services drop", ""},
		{"add table ip nodeproxy { flags dormant; }", ""},
		{"delete table ip nodeproxy", ""},
	} {
		if out, err := exec.Command("nft", tc.nft).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v: %s", tc.nft, err, out)
		}
		last = drift.Report{}
		switch again := b.Compare(ctx); {
		case tc.state == "" != again:
			t.Errorf("after %q, a sync of everything is asked for: %t", tc.nft, again)
		case again:
			if err := e.Sync(ctx, p, plan.Everything()); err != nil || len(e.Found) == 0 {
				t.Errorf("after %q, the sync found %v; %v", tc.nft, e.Found, err)
			}
		case len(last.Found) != 1 || last.Found[0].State != tc.state || last.Err != nil:
			t.Errorf("after %q, found %v", tc.nft, last)
		}
		holds(t, e, p)
		if again := b.Compare(ctx); again || len(last.Found) > 0 && tc.state == "" {
			t.Errorf("after the repair: %t, %v", again, last)
		}
	}
}

// TestCompareDuringChanges: changes that are made during a comparison are no drift, and what another program does meanwhile is found then or
// by the next comparison.
func TestCompareDuringChanges(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(rt, "family")
		_ = Cleanup()
		e, _ := testEngine(t, f)
		defer e.forget()
		readsByKey(rt, e)
		inSteps(rt, e)
		plans := rapid.SliceOfN(plantest.Plans(), 2, 6).Draw(rt, "plans")
		for _, p := range plans {
			p.Node, p.Settings = plans[0].Node, plans[0].Settings
		}
		p, next := plans[0], plans[1:]
		synced(rt, e, p, plan.Everything())
		meddle, meddled := false, false
		open := beside(e, func() {
			if len(next) == 0 {
				return
			}
			changed := plan.Only(plantest.Differing(p, next[0]))
			if p, next = next[0], next[1:]; rapid.IntRange(0, 5).Draw(rt, "everything") == 0 {
				changed = plan.Everything()
			}
			err := e.Sync(ctx, p, changed)
			if err != nil && meddled { // What it should have removed is gone.
				err = e.Sync(ctx, p, plan.Everything())
			}
			require.NoError(rt, err)
			if meddle {
				_, _ = exec.Command("nft", fmt.Sprintf("flush map %s nodeproxy services", nft.FamilyName(f))).CombinedOutput()
				meddle, meddled = false, true
			}
		})
		found, again, err := e.CompareBeside(ctx)
		if len(found) > 0 || again || err != nil {
			rt.Fatalf("found %v, %t, %v", found, again, err)
		}
		isRemembered(rt, e)
		require.NoError(rt, syncWhole(e, p, plan.Only(nil)))
		holds(rt, e, p)
		meddle = rapid.Bool().Draw(rt, "another program too")
		for range 2 {
			_, again, err := e.CompareBeside(ctx)
			require.NoError(rt, err)
			if again {
				synced(rt, e, p, plan.Everything())
			}
		}
		require.NoError(rt, syncWhole(e, p, plan.Only(nil)))
		holds(rt, e, p)
		if open() != 0 {
			rt.Fatalf("%d sockets are left open", open())
		}
	})
}

// TestCompareGivesWay: a comparison ends with its context, and changes nothing where a sync has read or forgotten everything meanwhile.
func TestCompareGivesWay(t *testing.T) {
	nstest.Enter(t)
	e, k := testEngine(t, plan.IPv4)
	p := plantest.Large(300, 3)
	ctx, cancel := context.WithCancel(context.Background())
	if _, again, err := e.CompareBeside(ctx); !again || err != nil {
		t.Errorf("before anything was written: %t, %v", again, err)
	}
	synced(t, e, p, plan.Everything())
	nstest.Exec(t, "nft", "delete element ip nodeproxy services { 10.96.0.12 . tcp . 80 }")
	k.fail = func(int) error { return unix.EIO }
	if found, again, err := e.CompareBeside(ctx); !again || !errors.Is(err, unix.EIO) || e.current != nil || e.kernel != nil {
		t.Errorf("where the repair fails: %v, %t, %v", found, again, err)
	}
	k.fail = nil
	synced(t, e, p, plan.Everything())
	holds(t, e, p)
	beside(e, func() { e.current = nil })
	if _, again, err := e.CompareBeside(ctx); !again || err != nil {
		t.Errorf("after a sync that failed: %t, %v", again, err)
	}
	synced(t, e, p, plan.Everything())
	n := 0
	open := beside(e, func() { n++; cancel() })
	if _, _, err := e.CompareBeside(ctx); !errors.Is(err, context.Canceled) || n != 1 || open() != 0 {
		t.Errorf("after its end: %v, %d sets were read, %d sockets are open", err, n, open())
	}
}

// BenchmarkChangeDuringComparison is how long a change of one Service takes while everything is compared, on average and at most.
func BenchmarkChangeDuringComparison(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("%dx%d", size.services, size.endpoints), func(b *testing.B) {
			nstest.Enter(b)
			p := plantest.Large(size.services, size.endpoints)
			e, _ := testEngine(b, plan.IPv4)
			synced(b, e, p, plan.Everything())
			var took []time.Duration
			n := 0
			for b.Loop() {
				ready := make(chan kernel, 2) // They are opened by this thread, which is in the namespace.
				for range cap(ready) {
					k, err := read()
					require.NoError(b, err)
					ready <- k
				}
				e.reader = func() (kernel, error) { return <-ready, nil }
				ended := make(chan error)
				go func() {
					found, again, err := e.CompareBeside(context.Background())
					if len(found) > 0 || again {
						err = errors.Join(err, fmt.Errorf("found %v, %t", found, again))
					}
					ended <- err
				}()
				for running := true; running; {
					select {
					case err := <-ended:
						if running = false; err != nil {
							b.Fatal(err)
						}
					case <-time.After(10 * time.Millisecond):
						sp := plantest.LargeService(n*7%size.services, size.services*size.endpoints+n*size.endpoints, size.endpoints)
						sp.Endpoints.Cluster[0].Addr = netip.AddrPortFrom(sp.Endpoints.Cluster[0].Addr.Addr(), uint16(n)+1)
						slices.SortFunc(sp.Endpoints.Cluster, func(a, b plan.Endpoint) int { return a.Addr.Compare(b.Addr) })
						n++
						p.Set(sp)
						start := time.Now()
						synced(b, e, p, plan.Only(plan.Keys{sp.Key: {}}))
						took = append(took, time.Since(start))
					}
				}
				for close(ready); len(ready) > 0; {
					_ = (<-ready).Close()
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs/change-p50")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs/change-p99")
			b.ReportMetric(float64(took[len(took)-1].Microseconds()), "µs/change-max")
		})
	}
}

// TestWatchBegins: what other programs changed before they were watched for leads to a comparison, too. That need not wait until one is
// due by time, which after a long first sync may be half an hour.
func TestWatchBegins(t *testing.T) {
	nstest.Enter(t)
	ctx, cancel := context.WithCancel(t.Context())
	suspicions := 0
	b := &Backend{ports: &ownPorts{}}
	require.NoError(t, b.Watch(ctx, func(string) {
		suspicions++
		cancel()
	}))
	require.Equal(t, 1, suspicions)
}
