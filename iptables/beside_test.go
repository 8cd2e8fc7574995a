package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// meddling is a kernel that is read chain by chain, while something happens.
type meddling struct {
	xtables.Kernel
	engine *engine
	during func() // between two chains, unless syncs have to wait
	err    error  // of each reading
}

func (m *meddling) Read(ctx context.Context, t names.Table) (*xtables.Reading, error) {
	r, err := m.Kernel.Read(ctx, t)
	if err != nil {
		return nil, err
	}
	r.Chains = func(ctx context.Context, list []string, _ ...xtables.Content) (xtables.Content, error) {
		out := xtables.Content{}
		for _, name := range list {
			if m.engine.syncing.TryLock() {
				m.engine.syncing.Unlock()
				m.during()
			}
			now, err := m.Save(ctx, t)
			if err := errors.Join(err, m.err); err != nil {
				return nil, err
			}
			if rules, exists := now[name]; exists {
				out[name] = rules
			}
		}
		return out, nil
	}
	return r, nil
}

// meddle has something happen while an engine reads.
func meddle(e *engine, during func()) *meddling {
	m := &meddling{Kernel: e.Kernel, engine: e, during: during}
	e.Kernel = m
	return m
}

// TestCompareDuringChanges: changes that are written while everything is compared do not wait, and are no drift; what another program does
// meanwhile is found then, or by the next comparison.
func TestCompareDuringChanges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f)
		plans := rapid.SliceOfN(plantest.Plans(), 2, 6).Draw(t, "plans")
		for _, p := range plans {
			p.Settings, p.Node = plans[0].Settings, plans[0].Node
		}
		p, next := plans[0], plans[1:]
		program(t, e, p, plan.Everything())
		others := func() {
			delete(k.Tables[names.NAT], names.MarkMasq)
			k.Tables[names.Filter]["FORWARD"] = nil
			k.Tables[names.Filter][names.PrefixCluster+"OTHER"] = []string{"-j ACCEPT"}
		}
		waits := false
		meddle(e, func() {
			if waits && chance(t, "another program") {
				waits = false
				others()
			}
			if len(next) == 0 || !chance(t, "a change") {
				return
			}
			change := plan.Only(plantest.Differing(p, next[0]))
			if p, next = next[0], next[1:]; chance(t, "everything") {
				change = plan.Everything()
			}
			if err := e.Sync(t.Context(), p, change); err != nil { // It may need a chain that the other program has removed.
				program(t, e, p, plan.Everything())
			}
		})
		found, again, err := e.CompareBeside(t.Context())
		if len(found) > 0 || again || err != nil || e.touched != nil {
			t.Fatalf("found %v, %t, %v", found, again, err)
		}
		same(t, "changes during a comparison", textOfKernel(k), wantText(p, f))
		waits = true
		for range 2 {
			if _, again, err := e.CompareBeside(t.Context()); again || err != nil {
				program(t, e, p, plan.Everything())
			}
			if waits {
				waits = false
				others()
			}
		}
		same(t, "another program during a comparison", textOfKernel(k), wantText(p, f))
	})
}

// TestCompareBeside: few chains and jumps that others have changed are put right beside syncs; anything else is left to a sync of
// everything.
func TestCompareBeside(t *testing.T) {
	t.Parallel()
	p := plantest.Large(600, 2)
	p.Settings.LocalhostNodePorts = true
	for _, tc := range []struct {
		name  string
		do    func(nat, filter xtables.Content)
		found int // put right beside syncs; 0 where a sync of everything is asked for
	}{
		{"a rule", func(nat, _ xtables.Content) { nat[names.MarkMasq] = nil }, 1},
		{"a foreign rule", func(nat, _ xtables.Content) { nat[names.NodePorts] = append(nat[names.NodePorts], "-j ACCEPT") }, 1},
		{"a jump", func(nat, _ xtables.Content) { nat["PREROUTING"] = nil }, 1},
		{"a chain and a jump", func(nat, filter xtables.Content) {
			delete(nat, names.Postrouting)
			filter["FORWARD"] = filter["FORWARD"][1:]
		}, 2},
		{"a stale chain", func(nat, _ xtables.Content) { nat["KUBE-SVC-OTHER"] = nil }, 0},
		{"a chain of another mode and the jump to it", func(_, filter xtables.Content) {
			filter["KUBE-IPVS-FILTER"] = nil
			filter["INPUT"] = append(filter["INPUT"], "-j KUBE-IPVS-FILTER")
		}, 0},
		{"the guard", func(_, filter xtables.Content) { filter[names.KubeletFirewall] = nil }, 0},
		{"the jump to it", func(_, filter xtables.Content) { filter["INPUT"] = filter["INPUT"][1:] }, 0},
		{"a table", func(nat, _ xtables.Content) { clear(nat) }, 0},
		{"built-in chains", func(nat, _ xtables.Content) {
			maps.DeleteFunc(nat, func(name string, _ []string) bool { return names.Builtin(name) })
		}, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			e, k := fakeEngine(plan.IPv4)
			e.options.CompactAbove = 0 // so that there are many chains
			b := &Backend{}
			var reports []drift.Report
			b.Engines, b.Compared = []*engine{e}, func(r drift.Report) { reports = append(reports, r) }
			program(t, e, p, plan.Everything())
			want := textOfKernel(k)
			tc.do(k.Tables[names.NAT], k.Tables[names.Filter])
			again := b.Compare(t.Context())
			if again != (tc.found == 0) || !again && (len(reports) != 1 || len(reports[0].Found) != tc.found) {
				t.Errorf("a sync of everything is asked for: %t; found %v", again, reports)
			}
			if again {
				require.Empty(t, reports, "the sync reports")
				program(t, e, p, plan.Everything())
			}
			same(t, "after the repair", textOfKernel(k), want)
			before := len(k.Restores)
			if again := b.Compare(t.Context()); again || len(reports[len(reports)-1].Found) > 0 || len(k.Restores) > before {
				t.Errorf("after the repair: %t, %v", again, reports)
			}
		})
	}
}

// TestCompareGivesWay: a comparison ends with its context, and changes nothing where a sync has compared or forgotten everything meanwhile.
func TestCompareGivesWay(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4)
	p := plantest.Large(30, 2)
	compare := func(ctx context.Context) (drift.Found, bool, error) {
		before := len(k.Restores)
		found, again, err := e.CompareBeside(ctx)
		require.Len(t, k.Restores, before)
		return found, again, err
	}
	if _, again, err := compare(t.Context()); !again || err != nil {
		t.Errorf("before anything was written: %t, %v", again, err)
	}
	program(t, e, p, plan.Everything())
	m := meddle(e, func() {})
	m.err = errors.New("no memory")
	if _, again, err := compare(t.Context()); !again || !errors.Is(err, m.err) || e.current == nil {
		t.Errorf("where reading fails: %t, %v", again, err)
	}
	m.err = nil
	differs := func() { k.Tables[names.NAT][names.MarkMasq] = nil }
	differs()
	m.during = func() { e.current = nil }
	if found, again, err := compare(t.Context()); len(found) > 0 || !again || err != nil {
		t.Errorf("after a sync that failed: %v, %t, %v", found, again, err)
	}
	program(t, e, p, plan.Everything())
	differs()
	m.during = func() { e.full++ }
	if found, again, err := compare(t.Context()); len(found) > 0 || again || err != nil {
		t.Errorf("after a sync of everything: %v, %t, %v", found, again, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	m.during = cancel
	if _, again, err := e.CompareBeside(ctx); !again || !errors.Is(err, context.Canceled) {
		t.Errorf("after its end: %t, %v", again, err)
	}
	program(t, e, p, plan.Everything())
	differs()
	m.during, k.Refuse = func() {}, names.MarkMasq
	if _, again, err := e.CompareBeside(t.Context()); !again || !xtables.IsRefused(err) || e.current != nil {
		t.Errorf("where the repair fails: %t, %v", again, err)
	}
}

// TestUnchanged: a comparison is spared where nothing at all has changed since one that found everything as it should be, and only there.
func TestUnchanged(t *testing.T) {
	t.Parallel()
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		l := newLab(t, v, 60)
		defer l.end()
		compared := func(want bool, after string) {
			t.Helper()
			before := len(l.reports)
			if got := l.backend.Unchanged(); got != (want && v == xtables.NFT) || got != (len(l.reports) > before) {
				t.Errorf("after %s: unchanged: %t; %d reports", after, got, len(l.reports)-before)
			}
		}
		compared(false, "a sync of everything")
		l.compare()
		compared(true, "a comparison")
		compared(true, "that")
		sp := plantest.LargeService(7, 1000, 2)
		l.plan.Set(sp)
		l.sync(plan.Only(plan.Keys{sp.Key: {}}))
		compared(false, "a change")
		l.compare()
		compared(true, "a comparison after a change")
		l.do("ip6tables-{} -w -t mangle -N OTHER")
		compared(false, "a change of something else")
		l.compare()
		l.do("iptables-{} -w -t nat -F KUBE-MARK-MASQ")
		compared(false, "a change of ours by others")
		l.compare()
		compared(false, "a repair")
		l.compare()
		e := l.backend.Engines[0]
		e.refused = map[plan.Key]*refusal{sp.Key: {}}
		compared(false, "a refusal that is due")
		e.refused, e.current = nil, nil
		compared(false, "a sync that failed")
	})
}

// TestRecognized: a comparison reads the rules of no chain that is as it was when it was found right, and of all that are not, whoever has
// written them.
func TestRecognized(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4)
	e.options.CompactAbove = 0
	var read []string
	others := func() {}
	e.Kernel = &noting{Kernel: k, note: func(list []string) {
		read = append(read, list...)
		others()
	}}
	p := plantest.Large(600, 2)
	program(t, e, p, plan.Everything())
	compare := func(after string, found int, want ...string) {
		t.Helper()
		read = nil
		f, again, err := e.CompareBeside(t.Context())
		if len(f) != found || again || err != nil {
			t.Errorf("after %s: found %v, %t, %v", after, f, again, err)
		}
		if slices.Sort(read); !slices.Equal(slices.Compact(read), want) {
			t.Errorf("after %s: read %q, want %q", after, read, want)
		}
	}
	nat, filter := slices.Collect(maps.Keys(k.Tables[names.NAT])), slices.Collect(maps.Keys(k.Tables[names.Filter]))
	all := slices.Compact(slices.Sorted(slices.Values(slices.Concat(nat, filter))))
	compare("a start", 0, all...)
	compare("a comparison", 0)

	before := maps.Clone(k.Tables[names.NAT])
	sp := plantest.LargeService(7, 2000, 2)
	p.Set(sp)
	program(t, e, p, plan.Only(plan.Keys{sp.Key: {}}))
	var written []string
	for name, rules := range k.Tables[names.NAT] {
		if was, there := before[name]; !there || !slices.Equal(was, rules) {
			written = append(written, name)
		}
	}
	slices.Sort(written)
	compare("a change", 0, written...)
	compare("its comparison", 0)

	k.Tables[names.NAT][written[0]] = k.Tables[names.NAT][written[0]][1:]
	compare("a foreign change", 1, written[0])
	compare("its repair", 0, written[0])
	compare("a comparison of that", 0)
	k.Tables[names.NAT] = maps.Clone(k.Tables[names.NAT])
	delete(k.Tables[names.NAT], written[0])
	compare("a foreign removal", 1, written[0])
	compare("its repair", 0, written[0])

	k.Tables[names.Filter]["OTHERS"] = []string{"-j ACCEPT"}
	var rest []string
	for name := range k.Tables[names.Filter] {
		if !names.IsOurs(names.Filter, name) {
			rest = append(rest, name)
		}
	}
	slices.Sort(rest)
	compare("a foreign chain", 0, rest...)
	compare("a comparison of that", 0)
	delete(k.Tables[names.Filter], "OTHERS")
	compare("its removal", 0, slices.DeleteFunc(rest, func(name string) bool { return name == "OTHERS" })...)

	e.right[tableChainName{names.NAT, written[0]}] = 0
	others = func() { k.Tables[names.Mangle]["OTHERS"] = append(k.Tables[names.Mangle]["OTHERS"], "-j ACCEPT") }
	compare("a part that is to be read", 0, written[0])
	others = func() {}
	compare("a foreign change while it was read", 0, written[0])
	compare("none", 0)
}

// TestRecognizedInKernel: of what others do to the kernel's tables, nothing is taken for what was found right before.
func TestRecognizedInKernel(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		e := realEngine(t, xtables.NFT, plan.IPv4)
		e.options.CompactAbove = 0
		p := plantest.Large(30, 3)
		program(t, e, p, plan.Everything())
		var endpoints []string // chains of two rules each
		for c := range e.current.chains(nil) {
			if strings.HasPrefix(c.Name, names.PrefixEndpoint) {
				endpoints = append(endpoints, c.Name)
			}
		}
		want := ours(t, e.Kernel)
		command := strings.NewReplacer("IPT", "iptables-nft -t nat", "FIRST", endpoints[0], "SECOND", endpoints[1],
			"FILE", filepath.Join(t.TempDir(), "saved"))
		for _, others := range []string{
			"IPT -Z",
			"IPT -F FIRST",
			"IPT -R FIRST 1 -j RETURN",
			"IPT -D FIRST 1",
			"IPT -D PREROUTING 1",
			"nft rename chain ip nat FIRST X; nft rename chain ip nat SECOND FIRST; nft rename chain ip nat X SECOND",
			"iptables-nft-save -t nat >FILE; nft delete table ip nat; iptables-nft-restore FILE",
			// The handles are the same again, and so is what each chain has.
			"nft delete table ip nat; sed -i 's/^-A FIRST /-A X /; s/^-A SECOND /-A FIRST /; s/^-A X /-A SECOND /' FILE; iptables-nft-restore FILE",
			"for c in PREROUTING INPUT OUTPUT POSTROUTING; do nft flush chain ip nat $c; nft delete chain ip nat $c; done",
		} {
			for range 2 {
				if found, again, err := e.CompareBeside(t.Context()); len(found) > 0 || again || err != nil {
					t.Errorf("before %s: found %v, %t, %v", others, found, again, err)
				}
			}
			sh(t, command.Replace(others))
			if _, again, err := e.CompareBeside(t.Context()); err != nil {
				t.Errorf("after %s: %v", others, err)
			} else if again {
				program(t, e, p, plan.Everything())
			}
			same(t, "after "+others, ours(t, e.Kernel), want)
		}
	})
}

// noting notes which chains are read.
type noting struct {
	xtables.Kernel
	note func(chains []string)
}

func (n *noting) Read(ctx context.Context, t names.Table) (*xtables.Reading, error) {
	r, err := n.Kernel.Read(ctx, t)
	chains := r.Chains
	r.Chains = func(ctx context.Context, list []string, known ...xtables.Content) (xtables.Content, error) {
		n.note(list)
		return chains(ctx, list, known...)
	}
	return r, err
}

// lockedKernel may be used concurrently.
type lockedKernel struct {
	*xtablestest.Kernel
	mu sync.Mutex
}

func (k *lockedKernel) Restore(input xtables.Input) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.Kernel.Restore(input)
}

func (k *lockedKernel) Read(ctx context.Context, t names.Table) (*xtables.Reading, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	r, err := k.Kernel.Read(ctx, t)
	digests := r.Digests
	r.Digests = func(chains []string) ([]uint64, error) {
		k.mu.Lock()
		defer k.mu.Unlock()
		return digests(chains)
	}
	return r, err
}

func (k *lockedKernel) Generation() uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.Kernel.Generation()
}

// TestCompareConcurrently is for the race detector.
func TestCompareConcurrently(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4)
	e.Kernel = &lockedKernel{Kernel: k}
	p := plantest.Large(100, 2)
	program(t, e, p, plan.Everything())
	var comparing sync.WaitGroup
	ended := make(chan struct{})
	comparing.Go(func() {
		for {
			if found, again, err := e.CompareBeside(t.Context()); len(found) > 0 || again || err != nil {
				t.Errorf("found %v, %t, %v", found, again, err)
			}
			select {
			case <-ended:
				return
			default:
			}
		}
	})
	for i := range 200 {
		sp := plantest.LargeService(i%110, 1000+2*i, 2)
		p.Set(sp)
		program(t, e, p, plan.Only(plan.Keys{sp.Key: {}}))
	}
	close(ended)
	comparing.Wait()
	same(t, "in the end", textOfKernel(k), wantText(p, plan.IPv4))
}

// BenchmarkChangeDuringComparison is how long a change of one of 10,000 Services takes, of which 20 come in a second: while nothing else
// happens, and while everything is compared all the time.
func BenchmarkChangeDuringComparison(b *testing.B) {
	for _, comparing := range []bool{false, true} {
		b.Run(fmt.Sprintf("comparing=%t", comparing), func(b *testing.B) {
			inVariants(b, func(b *testing.B, v xtables.Variant) { changeDuringComparison(b, v, comparing) })
		})
	}
}

func changeDuringComparison(b *testing.B, v xtables.Variant, comparing bool) {
	const services, rate = 10000, 20
	l := newLab(b, v, services)
	defer l.end()
	here, err := netns.Get()
	require.NoError(b, err)
	defer here.Close()
	ctx, cancel := context.WithCancel(b.Context())
	compared := 0
	var beside sync.WaitGroup
	beside.Go(func() {
		runtime.LockOSThread() // It ends with this goroutine.
		if err := netns.Set(here); err != nil {
			b.Error(err)
			return
		}
		for ; comparing && ctx.Err() == nil; compared++ {
			if l.backend.Compare(ctx) {
				b.Error("a sync of everything is asked for")
			}
		}
	})
	var took []time.Duration
	for next := time.Now(); b.Loop(); next = next.Add(time.Second / rate) {
		time.Sleep(time.Until(next)) // changes come at this rate
		sp := plantest.LargeService(len(took)*7%services, 2*(services+len(took)), 2)
		l.plan.Set(sp)
		start := time.Now()
		l.sync(plan.Only(plan.Keys{sp.Key: {}}))
		took = append(took, time.Since(start))
	}
	cancel()
	beside.Wait()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs/change-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs/change-p99")
	b.ReportMetric(float64(took[len(took)-1].Microseconds()), "µs/change-max")
	b.ReportMetric(float64(compared), "comparisons")
	for _, r := range l.reports {
		if len(r.Found) > 0 {
			b.Errorf("found %s", r.Found.Words(3))
		}
	}
}

// unreadableLater is a kernel of the legacy variant that can't be read any more once table nat has been.
type unreadableLater struct{ *xtables.Program }

func (u unreadableLater) Read(ctx context.Context, t names.Table) (*xtables.Reading, error) {
	r, err := u.Program.Read(ctx, t)
	if t == names.NAT {
		u.SavePath = "/none"
	}
	return r, err
}

// TestChangesAreNotReadAgain: what syncs have written before the tables of the legacy variant were listed is not as it was known when the
// comparison began. The tables are not read once more for that.
func TestChangesAreNotReadAgain(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		e := realEngine(t, xtables.Legacy, plan.IPv4)
		p := plantest.Large(30, 3)
		program(t, e, p, plan.Everything())
		c := e.snapshot()
		changed, gone, added := plantest.LargeService(7, 5000, 3), p.Sorted(plan.IPv4)[9].Key, plantest.LargeService(30, 100, 3)
		p.Set(changed)
		p.Set(added)
		p.Delete(gone)
		program(t, e, p, plan.Only(plan.Keys{changed.Key: {}, gone: {}, added.Key: {}}))
		e.Kernel, c.ctx = unreadableLater{e.Kernel.(*xtables.Program)}, t.Context()
		few, err := c.compare()
		if err != nil || !few || len(c.differs) > 0 {
			t.Errorf("%t, %v; %d things differ", few, err, len(c.differs))
		}
	})
}
