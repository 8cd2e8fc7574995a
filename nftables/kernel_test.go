package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// Cleanup removes the tables of the network namespace of the calling thread.
func Cleanup() error { return (*Sockets)(nil).Cleanup() }

// counted is a kernel that counts the transactions, and fails where it is told to.
type counted struct {
	kernel
	commits, most int // most is how many elements the largest transaction had
	fail          func(commit int) error
	after         bool // fail after the transaction was carried out
}

func (c *counted) Commit(b *nft.Batch) error {
	if !b.Empty() {
		c.commits++
		c.most = max(c.most, b.Elements())
	}
	if c.fail != nil {
		if err := c.fail(c.commits); err != nil {
			if c.after {
				_ = c.kernel.Commit(b)
			}
			return err
		}
	}
	return c.kernel.Commit(b)
}

// testEngine is an engine over the kernel of the namespace.
func testEngine(t testing.TB, f plan.Family) (*engine, *counted) {
	t.Helper()
	k := &counted{}
	e := newEngine(f, Options{MasqueradeBit: 14, Count: true}, slog.New(slog.DiscardHandler), func() (kernel, error) {
		nstest.Inside(t)
		c, err := nft.Dial()
		k.kernel = c
		return k, err
	})
	e.reader = func() (kernel, error) {
		nstest.Inside(t)
		return read()
	}
	t.Cleanup(func() {
		if e.kernel != nil {
			_ = e.kernel.Close()
		}
	})
	return e, k
}

// synced makes a sync, which must not fail.
func synced(t rapid.TB, e interface {
	Sync(context.Context, *plan.Plan, plan.Change) error
}, p *plan.Plan, change plan.Change) {
	t.Helper()
	require.NoError(t, e.Sync(context.Background(), p, change))
}

// syncFindsNothing makes a sync of everything that finds the kernel as it should be.
func syncFindsNothing(t rapid.TB, e *engine, p *plan.Plan) {
	t.Helper()
	if synced(t, e, p, plan.Everything()); len(e.Found) > 0 {
		t.Fatalf("a sync of everything found %v", e.Found)
	}
}

// comparisonFindsNothing is the same for a comparison beside syncs.
func comparisonFindsNothing(t rapid.TB, e *engine) {
	t.Helper()
	if found, again, err := e.CompareBeside(context.Background()); len(found) > 0 || again || err != nil {
		t.Fatalf("a comparison found %v, %t, %v", found, again, err)
	}
}

// syncWhole makes as many syncs as a change takes.
func syncWhole(e *engine, p *plan.Plan, change plan.Change) error {
	err := e.Sync(context.Background(), p, change)
	for err == nil && len(e.unfinished) > 0 {
		if e.Found != nil {
			return fmt.Errorf("a part of a change found %v", e.Found)
		}
		err = e.Sync(context.Background(), p, plan.Only(nil))
	}
	return err
}

// inSteps lets an engine change ServicePorts a few frontends at a time, or only those that are really large.
func inSteps(t *rapid.T, e *engine) {
	e.mostAtOnce = rapid.SampledFrom([]int{mostAtOnce, 20, 1}).Draw(t, "most elements at once")
}

// isRemembered makes sure that the kernel has what the engine remembers.
func isRemembered(t rapid.TB, e *engine) {
	t.Helper()
	want := e.remembered()
	if got, want := content(e.family, elementsOf(t, e)), content(e.family, want); got != want {
		t.Fatalf("the kernel has something else than the engine remembers:\n%s", difference(want, got))
	}
}

// readsByKey lets an engine read the elements of all sets but the smallest by their keys, or list them.
func readsByKey(t *rapid.T, e *engine) {
	e.mostListed = rapid.SampledFrom([]int{mostListed, 2}).Draw(t, "most elements of a set that are listed")
}

// content is what the kernel has, or should have, as text. The numbers of endpoints are told from the endpoints: which has which does
// not matter.
func content(f plan.Family, all map[id]value) string {
	var out []string
	for i, v := range all {
		line := fmt.Sprintf("%s %s : %x %s %q", sets(f)[i.set].Name, i.text(f), v.data, v.chain, v.comment)
		switch i.set {
		case kinds, kindsWithin:
			continue
		case endpoints, localEndpoints, choices, localChoices:
			n := len(i.key) - 4
			out = append(out, fmt.Sprintf("%s %x has number %d", sets(f)[i.set].Name, i.key[:n], nativeNumber(i.key[n:])))
			line = fmt.Sprintf("%s %x : %x", sets(f)[i.set].Name, i.key[:n], v.data)
		}
		out = append(out, line)
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

func desired(p *plan.Plan, f plan.Family, o Options) (l *layout, all map[id]value, used map[kind]bool) {
	l = layoutOf(p, f, o)
	_, all, used = l.desired(p, func(*plan.ServicePort) written { return written{} })
	return l, all, used
}

// listing lists all elements in the kernel.
func listing(e *engine, k kernel) (*fullSync, error) {
	s := (&engine{family: e.family, kernel: k, sets: e.sets}).fullSync(plan.New(plan.Node{}, plan.Settings{}))
	s.content = &nft.Content{} // It lists until nothing new appears.
	all := make([]setID, setCount)
	for i := range all {
		all[i] = setID(i)
	}
	return s, s.list(context.Background(), true, all)
}

// holds makes sure that the kernel has what a plan asks for, and nothing else but kinds that were in use.
func holds(t rapid.TB, e *engine, p *plan.Plan) {
	t.Helper()
	l, want, used := desired(p, e.family, e.options)
	c, err := nft.Dial()
	if err != nil {
		t.Fatalf("%v", err)
	}
	defer c.Close()
	s, err := listing(e, c)
	if err != nil {
		t.Fatalf("%v", err)
	}
	if len(s.foreign) > 0 {
		t.Fatalf("the kernel has elements that this program does not write: %v", s.foreign)
	}
	have := s.have
	if got, want := content(e.family, have), content(e.family, want); got != want {
		t.Fatalf("the kernel has something else than a full sync writes:\n%s", difference(want, got))
	}
	for i, v := range fixed(used) {
		if have[i] != v {
			t.Fatalf("%s of set %s leads to %q, want %q", i.text(e.family), e.sets[i.set].Name, have[i].chain, v.chain)
		}
	}
	for _, sp := range p.Sorted(e.family) {
		if mine := (map[id]value{}); scheduleOf(sp) != random { // The numbers of a hash matter.
			l.fill(place(written{}, sp), mine, used)
			for i, v := range mine {
				if have[i] != v {
					t.Fatalf("%s of set %s is %x, want %x", i.text(e.family), e.sets[i.set].Name, have[i].data, v.data)
				}
			}
		}
	}
	chains := append(l.chains(), l.kindChains(used)...)
	got, err := c.Read(e.family, names.NFTables, e.sets, chains)
	if err != nil || got == nil {
		t.Fatalf("reading the table: %v, %v", got, err)
	}
	if got.Dormant {
		t.Fatalf("the table is dormant")
	}
	for _, ch := range chains {
		if is, there := got.Chains[ch.Name]; !there || !is.Holds(ch) {
			t.Fatalf("chain %s is there: %t, and is %q", ch.Name, there, is.Labels)
		}
	}
	for _, s := range e.sets {
		if !got.Sets[s.Name] {
			t.Fatalf("set %s is not as it should be", s.Name)
		}
	}
	if in := intrudersIn(got, e.sets, nil); len(in.sets)+len(in.objects) > 0 {
		t.Fatalf("the table has something that nodeproxy has not put there: %v", in)
	}
	for name, ch := range got.Chains {
		if ch.Base && !slices.ContainsFunc(chains, func(c nft.Chain) bool { return c.Name == name }) {
			t.Fatalf("the kernel calls chain %s, which nodeproxy has not put there", name)
		}
	}
}

func difference(want, got string) string {
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	var out []string
	for _, l := range a {
		if !slices.Contains(b, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range b {
		if !slices.Contains(a, l) {
			out = append(out, "+ "+l)
		}
	}
	return strings.Join(out, "\n")
}

// TestIncrementalEqualsFull: whatever way led to a plan, the kernel holds what a full sync of it would write. A restart over that
// writes nothing.
func TestIncrementalEqualsFull(t *testing.T) {
	nstest.Enter(t)
	for _, f := range plan.Families {
		rapid.Check(t, func(rt *rapid.T) {
			plans := rapid.SliceOfN(plantest.Plans(), 2, 5).Draw(rt, "plans")
			_ = Cleanup()
			e, _ := testEngine(t, f)
			e.most = rapid.SampledFrom([]int{mostInTransaction, 50, 1}).Draw(rt, "most in a transaction")
			readsByKey(rt, e)
			inSteps(rt, e)
			for i, p := range plans {
				giveWeights(p, uint32(i%2))
				if p.Node = plans[0].Node; rapid.IntRange(0, 3).Draw(rt, "settings change") > 0 {
					p.Settings = plans[max(i-1, 0)].Settings
				}
				changed := plan.Everything()
				if i > 0 {
					changed = plan.Only(plantest.Differing(plans[i-1], p))
				}
				err := e.Sync(context.Background(), p, changed)
				if i < len(plans)-1 && rapid.Bool().Draw(rt, "the next change comes before the end of this one") {
					for n := rapid.IntRange(0, 3).Draw(rt, "further syncs"); err == nil && n > 0; n-- {
						err = e.Sync(context.Background(), p, plan.Only(nil))
					}
					if err == nil {
						isRemembered(rt, e)
						continue
					}
				} else if err == nil && len(e.unfinished) > 0 {
					err = syncWhole(e, p, plan.Only(nil))
				}
				require.NoError(rt, err, "step %d", i)
				holds(rt, e, p)
			}
			last := plans[len(plans)-1]
			syncFindsNothing(rt, e, last)
			again, k := testEngine(t, f)
			defer func() { _ = again.kernel.Close() }()
			readsByKey(rt, again)
			synced(rt, again, last, plan.Everything())
			if k.commits > 0 {
				rt.Fatalf("a start over what was there made %d transactions", k.commits)
			}
			holds(rt, again, last)
			_ = e.kernel.Close()
			e.kernel = nil
		})
	}
}

// TestOneChange: an endpoint that is replaced costs two elements, removed and added, in one transaction, whatever else there is.
func TestOneChange(t *testing.T) {
	nstest.Enter(t)
	e, k := testEngine(t, plan.IPv4)
	p := plantest.Large(400, 50)
	sync := func(changed plan.Change) {
		t.Helper()
		k.commits, k.most = 0, 0
		synced(t, e, p, changed)
	}
	sync(plan.Everything())
	sp := *plantest.LargeService(17, 17*50, 50)
	list := slices.Clone(sp.Endpoints.Cluster)
	list[20].Addr = netip.MustParseAddrPort("10.243.0.1:8080")
	slices.SortFunc(list, func(a, b plan.Endpoint) int { return a.Addr.Compare(b.Addr) })
	sp.Endpoints.Cluster = list
	p.Set(&sp)
	sync(plan.Only(plan.Keys{sp.Key: {}}))
	if k.commits != 1 || k.most != 2 {
		t.Errorf("one endpoint in place of another made %d transactions, the largest with %d elements", k.commits, k.most)
	}
	holds(t, e, p)
	fewer := sp
	fewer.Endpoints.Cluster = slices.Delete(slices.Clone(list), 0, 1)
	p.Set(&fewer)
	sync(plan.Only(plan.Keys{sp.Key: {}}))
	// The last one takes the place of the one that went, and the frontend has another kind, which is new.
	if k.commits != 1 || k.most > 6 {
		t.Errorf("one endpoint fewer made %d transactions, the largest with %d elements", k.commits, k.most)
	}
	holds(t, e, p)
}

// TestStartFindsNumbers: a start leaves endpoints the numbers that they have, also of a Service whose first frontend drops, as its traffic policy
// is Local and no endpoint is on this node.
func TestStartFindsNumbers(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(1, 3)
	sp := *plantest.LargeService(0, 0, 3)
	sp.InternalPolicy = plan.Local
	sp.Frontends = append(slices.Clone(sp.Frontends), plan.Frontend{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("192.0.2.1"), Port: 80, Protocol: sp.Key.Protocol})
	p.Set(&sp)
	synced(t, e, p, plan.Everything())
	fewer := sp
	fewer.Endpoints.Cluster = slices.Delete(slices.Clone(sp.Endpoints.Cluster), 0, 1)
	p.Set(&fewer)
	require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys{sp.Key: {}}))) // The last takes the place of the first.
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))                // It removes what is of no use any more.
	holds(t, e, p)

	again, k := testEngine(t, plan.IPv4)
	synced(t, again, p, plan.Everything())
	if k.commits > 0 {
		t.Errorf("a start over what was there made %d transactions", k.commits)
	}
}

// TestAllElementsArrive: no element of a large plan is lost on the way, and no transaction has too many.
func TestAllElementsArrive(t *testing.T) {
	nstest.Enter(t)
	e, k := testEngine(t, plan.IPv4)
	p := plantest.Large(6000, 5)
	synced(t, e, p, plan.Everything())
	if k.most > mostInTransaction+300 {
		t.Errorf("a transaction had %d elements", k.most)
	}
	s, err := listing(e, k)
	require.NoError(t, err)
	counts := map[setID]int{}
	for i := range s.have {
		counts[i.set]++
	}
	for set, want := range map[setID]int{services: 6000, clusterIPs: 6000, endpoints: 30000} {
		if counts[set] != want {
			t.Errorf("set %s has %d elements, want %d", e.sets[set].Name, counts[set], want)
		}
	}
}

// TestFaults: an error in the middle, whether the transaction was carried out or not, leaves what the next sync, or the next start,
// converges from.
func TestFaults(t *testing.T) {
	nstest.Enter(t)
	for _, after := range []bool{false, true} {
		for _, err := range []error{unix.ENOBUFS, unix.EIO, context.Canceled} {
			for at := 1; at <= 4; at++ {
				_ = Cleanup()
				e, k := testEngine(t, plan.IPv4)
				e.most = 100
				k.after = after
				k.fail = func(commit int) error {
					if commit == at {
						return err
					}
					return nil
				}
				before, p := plantest.Large(60, 3), plantest.Large(90, 2)
				failed := 0
				for i, step := range []struct {
					p       *plan.Plan
					changed plan.Change
				}{{before, plan.Everything()}, {p, plan.Only(plantest.Differing(before, p))}} {
					for errors.Is(e.Sync(context.Background(), step.p, step.changed), err) {
						step.changed = plan.Everything()
						if failed++; failed == 1 && i == 0 {
							e, _ = testEngine(t, plan.IPv4) // as a new start
						}
					}
					holds(t, e, step.p)
				}
				if failed != 1 {
					t.Errorf("%v at transaction %d made %d syncs fail", err, at, failed)
				}
			}
		}
	}
}

// TestDrift: what another program changes is found, named and repaired.
func TestDrift(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(20, 3)
	synced(t, e, p, plan.Everything())
	for _, tc := range []struct {
		nft   string
		kind  drift.Kind
		state drift.State
		what  string
	}{
		{"delete element ip nodeproxy services { 10.96.0.12 . tcp . 80 }", drift.SetElement, drift.Missing, "10.96.0.12 . tcp . 80 of set services"},
		{"delete element ip nodeproxy endpoints { 10.96.0.12 . tcp . 80 . 1 }", drift.SetElement, drift.Missing,
			"10.96.0.12 . tcp . 80 . 0:1 of set endpoints"},
		{"delete element ip nodeproxy endpoints { 10.96.0.12 . tcp . 80 . 1 }; " +
			"add element ip nodeproxy endpoints { 10.96.0.12 . tcp . 80 . 1 : 192.0.2.1 . 80 }", drift.SetElement, drift.Changed,
			"10.96.0.12 . tcp . 80 . 0:1 of set endpoints"},
		{"add element ip nodeproxy cluster-ips { 192.0.2.1 }", drift.SetElement, drift.Unexpected, "192.0.2.1 of set cluster-ips"},
		{"flush chain ip nodeproxy prerouting", drift.Chain, drift.Changed, "prerouting of nftables table ip nodeproxy"},
		{"add rule ip nodeproxy to-services drop", drift.Chain, drift.Changed, "to-services of nftables table ip nodeproxy"},
		{"delete chain ip nodeproxy output", drift.Chain, drift.Missing, "output of nftables table ip nodeproxy"},
		{"flush set ip nodeproxy same-byte", drift.SetElement, drift.Missing, "tcp . tcp of set same-byte"},
		{"add table ip nodeproxy { flags dormant; }", drift.Table, drift.Changed, "ip nodeproxy of nftables"},
		{"delete table ip nodeproxy", drift.Table, drift.Missing, "ip nodeproxy of nftables"},
	} {
		if out, err := exec.Command("nft", tc.nft).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v: %s", tc.nft, err, out)
		}
		synced(t, e, p, plan.Everything())
		if !slices.ContainsFunc(e.Found, func(d drift.Difference) bool {
			return d.Kind == tc.kind && d.State == tc.state && strings.HasPrefix(d.Object, tc.what)
		}) && !strings.Contains(tc.nft, "same-byte") || len(e.Found) == 0 {
			t.Errorf("after %q, found %v", tc.nft, e.Found)
		}
		holds(t, e, p)
		syncFindsNothing(t, e, p)
	}
}

// TestOtherLayout: a table that another version of this program has left, with sets of another kind, gives way at once.
func TestOtherLayout(t *testing.T) {
	nstest.Enter(t)
	e, k := testEngine(t, plan.IPv4)
	script := "add table ip nodeproxy; add set ip nodeproxy services { type ipv4_addr; }; add chain ip nodeproxy old; " +
		"add rule ip nodeproxy old ip daddr @services drop"
	if out, err := exec.Command("nft", script).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p := plantest.Large(40, 3)
	e.most = 10
	p.Partial = true
	if err := e.Sync(context.Background(), p, plan.Everything()); !errors.Is(err, plan.ErrPartial) || k.commits > 0 {
		t.Errorf("while not all Services are known: %v, %d transactions", err, k.commits)
	}
	p.Partial = false
	synced(t, e, p, plan.Everything())
	if k.commits != 1 {
		t.Errorf("it took %d transactions, want 1", k.commits)
	}
	holds(t, e, p)
}

// TestPartial: while not all Services are known, what the kernel has for others stays, and nothing is refused for want of one.
func TestPartial(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(30, 2)
	p.Settings.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
	synced(t, e, p, plan.Everything())
	again, _ := testEngine(t, plan.IPv4)
	some := plantest.Large(3, 1)
	some.Settings, some.Partial = p.Settings, true
	// The Node is not known either: node ports are not limited to its addresses then.
	some.Settings.NodePortAddresses, some.Node.IPs = plan.NodePortAddresses{Primary: true, CIDRs: []netip.Prefix{plan.IPv4.All()}}, nil
	sync := func(changed plan.Change) {
		t.Helper()
		synced(t, again, some, changed)
	}
	sync(plan.Everything())
	elements := func(set setID) (n int) {
		err := again.kernel.Sample(plan.IPv4, names.NFTables, again.sets[set], func(nft.Element) error { n++; return nil })
		require.NoError(t, err)
		return n
	}
	if n, m := elements(services), elements(endpoints); n != 30 || m != 27*2+3 {
		t.Errorf("there are %d services and %d endpoints", n, m)
	}
	c, err := again.kernel.Read(plan.IPv4, names.NFTables, again.sets, nil)
	if err != nil || len(c.Chains[names.NFTUnknown].Labels) != 0 {
		t.Errorf("chain %s has %d rules; %v", names.NFTUnknown, len(c.Chains[names.NFTUnknown].Labels), err)
	}
	if n := len(c.Chains[names.NFTToServices].Labels); n != 4 {
		t.Errorf("chain %s has %d rules: node ports must go on to answer", names.NFTToServices, n)
	}
	sp := plantest.LargeService(7, 500, 3)
	some.Set(sp)
	sync(plan.Only(plan.Keys{sp.Key: {}}))
	if n, m := elements(services), elements(endpoints); n != 30 || m != 26*2+3+3 {
		t.Errorf("with one more, there are %d services and %d endpoints", n, m)
	}
	some.Partial = false
	sync(plan.Everything())
	holds(t, again, some)
}

// TestListed: nft prints the tables, with whatever is in them, and leaves nothing out of the names that people look for. NODEPROXY_TEST_NFT
// names other programs than nft, with a colon between them; hack/nft-versions sets it.
func TestListed(t *testing.T) {
	nstest.Enter(t)
	programs := []string{"nft"}
	if list := os.Getenv("NODEPROXY_TEST_NFT"); list != "" {
		programs = strings.Split(list, ":")
	}
	check := func(p *plan.Plan) {
		t.Helper()
		for _, f := range plan.Families {
			e, _ := testEngine(t, f)
			synced(t, e, p, plan.Everything())
		}
		for _, nftProgram := range programs {
			out, err := exec.Command(nftProgram, "list", "ruleset").CombinedOutput()
			if err != nil {
				t.Fatalf("%s: %v: %.1000s", nftProgram, err, out)
			}
			named := map[string]bool{}
			for line := range strings.Lines(string(out)) {
				for _, part := range strings.Split(line, "comment \"")[1:] {
					name, _, _ := strings.Cut(part, "\"")
					named[name] = true
				}
			}
			for _, sp := range p.Services {
				if _, has := firstFrontend(sp); has && !named[nft.Comment(sp.Key.PortName())] {
					t.Errorf("%s does not name %s", nftProgram, sp.Key)
				}
			}
		}
	}
	for i := range 40 {
		check(plantest.Clusters().Example(i).Plan)
	}
	if testing.Short() {
		return
	}
	many := plantest.Large(45000, 1)
	for i, scheduler := range []plan.Scheduler{{Name: "wrr"}, {Name: "sh"}, {Name: "mh", Ports: true}} {
		for n := range 20 { // with tables of 251 numbers, and of 1,021
			sp := plantest.LargeService(20*i+n, 100*n, n+1)
			for ep := range sp.Endpoints.Cluster {
				sp.Endpoints.Cluster[ep].Weight = uint16(ep + 1)
			}
			sp.Scheduler = scheduler
			many.Set(sp)
		}
	}
	check(many)
}

func firstFrontend(sp *plan.ServicePort) (plan.Frontend, bool) {
	for _, fe := range sp.Frontends {
		if fe.Kind != plan.HealthCheckNodePort {
			return fe, true
		}
	}
	return plan.Frontend{}, false
}

// TestNew: what the mode needs is tried, and nothing stays of that.
func TestNew(t *testing.T) {
	nstest.Enter(t)
	b, err := New(Config{Families: plan.Families[:], MasqueradeBit: 14, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	if got := b.Families(); !slices.Equal(got, plan.Families[:]) {
		t.Errorf("it works for %v", got)
	}
	if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("the kernel has %q, %v", out, err)
	}
	synced(t, b, plantest.Large(3, 1), plan.Everything())
	if left, err := (*Sockets)(nil).Leftovers(); len(left) != 2 || err != nil {
		t.Errorf("there are tables of %v, %v", left, err)
	}
	assert.NoError(t, errors.Join(Cleanup(), Cleanup(), b.Close()))
	if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("after the cleanup, the kernel has %q, %v", out, err)
	}
	nstest.DropNetAdmin(t)
	if _, err := New(Config{Families: plan.Families[:], Log: slog.New(slog.DiscardHandler)}); !errors.Is(err, unix.EPERM) {
		t.Errorf("without the right to change anything: %v", err)
	}
}

// TestKindLeadsElsewhere: where another program has a kind lead elsewhere and has removed its chain, both are mended.
func TestKindLeadsElsewhere(t *testing.T) {
	nstest.Enter(t)
	for _, known := range []bool{true, false} {
		_ = Cleanup()
		e, k := testEngine(t, plan.IPv4)
		p := plantest.Large(3, 2)
		synced(t, e, p, plan.Everything())
		of, _ := e.current.of(plantest.LargeService(0, 0, 2).Key).kindsOf(p.Services[plantest.LargeService(0, 0, 2).Key].Frontends[0])
		number := id{set: kinds, key: string(native(of.number()))}
		lead, remove := nft.NewBatch(plan.IPv4, names.NFTables), nft.NewBatch(plan.IPv4, names.NFTables)
		lead.AddChain(nft.Chain{Name: "elsewhere"})
		lead.DeleteElements(e.sets[kinds], []nft.Element{number.element(value{})})
		lead.AddElements(e.sets[kinds], []nft.Element{number.element(value{chain: "elsewhere"})})
		lead.FlushChain(of.chain())
		remove.DeleteChain(of.chain())
		require.NoError(t, errors.Join(k.Commit(lead), k.Commit(remove)))
		if !known {
			e.forget()
		}
		synced(t, e, p, plan.Everything())
		holds(t, e, p)
	}
}

// TestClientsAreCollected: the kernel looks for clients that were away for too long at intervals that cost little, also where an earlier
// version has left the table.
func TestClientsAreCollected(t *testing.T) {
	nstest.Enter(t)
	earlier, _ := testEngine(t, plan.IPv4)
	for share := range affinityShares {
		earlier.sets[int(affinity)+share].Collect = 0
	}
	now, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(3, 1)
	for _, e := range []*engine{earlier, now} {
		synced(t, e, p, plan.Everything())
		holds(t, e, p)
	}
	if out := listShares(t); strings.Count(out, "gc-interval 30s") != affinityShares {
		t.Errorf("nft lists\n%s", out)
	}
}
