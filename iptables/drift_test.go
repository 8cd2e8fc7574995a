package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// suspicions are what a watch has told.
type suspicions struct {
	mu  sync.Mutex
	why []string
}

func (s *suspicions) add(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.why = append(s.why, why)
}

// take returns those so far, and forgets them.
func (s *suspicions) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.why
	s.why = nil
	return out
}

// within waits for a first one.
func (s *suspicions) within(limit time.Duration) []string {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if why := s.take(); len(why) > 0 {
			return why
		}
	}
	return nil
}

// lab is a Backend over a network namespace, with its watch.
type lab struct {
	t       testing.TB
	variant xtables.Variant
	backend *Backend
	plan    *plan.Plan
	seen    suspicions
	reports []drift.Report
	end     func()
}

// newLab programs n Services with two endpoints each. It must be called in a namespace of the test's own, and end there.
func newLab(t testing.TB, v xtables.Variant, n int) *lab {
	t.Helper()
	nstest.Inside(t)
	l := &lab{t: t, variant: v, plan: plantest.Large(n, 2)}
	var err error
	l.backend, err = New(Config{Variant: v, Families: plan.Families[:], MasqueradeBit: 14,
		Compared: func(r drift.Report) { l.reports = append(l.reports, r) }, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	follow, err := l.backend.watch.(*xtables.Watch).Open()
	require.NoError(t, err)
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	l.end = func() {
		cancel()
		running.Wait()
		require.NoError(t, l.backend.Close())
	}
	running.Go(func() { follow(ctx, l.seen.add) })
	l.sync(plan.Everything())
	return l
}

func (l *lab) sync(change plan.Change) {
	l.t.Helper()
	l.backend.Concurrent = false // Other threads are in another namespace.
	if err := l.backend.Sync(context.Background(), l.plan, change); err != nil {
		l.t.Error(err)
	}
}

// compare compares everything as the proxier does.
func (l *lab) compare() {
	l.t.Helper()
	if l.backend.Compare(context.Background()) {
		l.sync(plan.Everything())
	}
}

// do runs a command, {} in which stands for the variant.
func (l *lab) do(command string) {
	l.t.Helper()
	words := strings.Fields(strings.ReplaceAll(command, "{}", string(l.variant)))
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		l.t.Errorf("%s: %v: %s", command, err, out)
	}
}

// fault is something that another program does to rules of ours.
type fault struct {
	name string
	do   string // {} stands for the variant, SVC for a chain of a Service
	want string // in the words of what is found
	only int    // how many differences there are; 0 for any number
}

// justBefore names a fault upon which a change of a Service is written at once.
const justBefore = "a foreign rule just before a change"

var faults = []fault{
	{"a table emptied", "iptables-{} -w -t nat -F", "of table nat (IPv4): missing", 0},
	{"another table emptied", "iptables-{} -w -t filter -F", "KUBE-FORWARD\" in FORWARD of table filter (IPv4): missing", 0},
	{"a chain emptied", "iptables-{} -w -t nat -F KUBE-POSTROUTING", "in KUBE-POSTROUTING of table nat (IPv4): missing", 3},
	{"a rule in the middle", "iptables-{} -w -t nat -D SVC 2", "in SVC of table nat (IPv4): missing", 1},
	{"a foreign rule", "iptables-{} -w -t nat -I SVC 2 -s 192.0.2.1/32 -j RETURN",
		"rule \"-s 192.0.2.1/32 -j RETURN\" in SVC of table nat (IPv4): unexpected", 1},
	{"a jump", "iptables-{} -w -t nat -D PREROUTING -m comment --comment portals -j KUBE-SERVICES",
		"in PREROUTING of table nat (IPv4): missing", 1},
	{"a chain that is none of the plan's", "iptables-{} -w -t nat -N KUBE-SVC-OTHER", "chain KUBE-SVC-OTHER of table nat (IPv4): unexpected",
		1},
	{justBefore, "iptables-{} -w -t nat -I SVC 2 -s 192.0.2.1/32 -j RETURN",
		"rule \"-s 192.0.2.1/32 -j RETURN\" in SVC of table nat (IPv4): unexpected", 1},
	{"IPv6", "ip6tables-{} -w -t nat -F KUBE-MARK-MASQ", "in KUBE-MARK-MASQ of table nat (IPv6): missing", 1},
}

// nftFaults are for the nft variant alone.
var nftFaults = []fault{
	{"everything removed", "nft flush ruleset", "chain KUBE-SERVICES of table nat (IPv4): missing", 0},
	{"a table removed", "nft delete table ip6 filter", "of table filter (IPv6): missing", 0},
}

// TestDrift: what others change is noticed within seconds, named, counted once, and put right; what others have is left alone.
func TestDrift(t *testing.T) {
	t.Parallel()
	inVariants(t, testDrift)
}

func testDrift(t *testing.T, v xtables.Variant) {
	l := newLab(t, v, 20)
	defer l.end()
	svc := serviceChain(names.PrefixCluster, l.plan.Sorted(plan.IPv4)[3].Key)
	l.do("iptables-{} -w -t nat -N OTHERS")
	l.do("iptables-{} -w -t nat -A OTHERS -s 192.0.2.1/32 -j RETURN")
	l.do("ip6tables-{} -w -t filter -N OTHERS")
	want := l.rules()
	list := append(faults[:len(faults):len(faults)], fault{"all chains removed", "", "chain KUBE-SERVICES of table nat (IPv4): missing", 0})
	if v == xtables.NFT {
		list = append(list, nftFaults...)
	}
	for _, f := range list {
		f.do, f.want = strings.ReplaceAll(f.do, "SVC ", svc+" "), strings.ReplaceAll(f.want, "SVC ", svc+" ")
		time.Sleep(20 * time.Millisecond) // until the kernel has told of the last one
		l.seen.take()
		l.reports = nil
		switch {
		case f.do == "":
			l.do("iptables-{} -w -t nat -F")
			l.do("iptables-{} -w -t nat -X")
			l.do("iptables-{} -w -t nat -N OTHERS")
			l.do("iptables-{} -w -t nat -A OTHERS -s 192.0.2.1/32 -j RETURN")
		case f.name == "a jump":
			j := jumps(false)[len(jumps(false))-2]
			sh(t, fmt.Sprintf("iptables-%s -w -t nat -D %s %s", v, j.From, j.Rule))
		case f.name == justBefore:
			l.do(f.do)
			l.sync(plan.Only(plan.Keys{l.plan.Sorted(plan.IPv4)[3].Key: {}}))
		default:
			l.do(f.do)
		}
		l.check(f, want)
	}
}

// check is to be called when a fault has happened.
func (l *lab) check(f fault, want string) {
	t, begin := l.t, time.Now()
	why := l.seen.within(3 * time.Minute)
	took := time.Since(begin)
	if len(why) == 0 {
		t.Errorf("%s: it was not noticed", f.name)
	}
	l.compare()
	if len(l.reports) != 1 {
		t.Fatalf("%s: there are %d reports", f.name, len(l.reports))
	}
	found := l.reports[0]
	if n := len(found.Found); !strings.Contains(found.Found.Words(n), f.want) || f.only > 0 && n != f.only || n == 0 {
		t.Errorf("%s: want %d of %s, found %d: %s", f.name, f.only, f.want, n, found.Found.Words(20))
	}
	others := strings.NewReplacer("-A OTHERS -s 192.0.2.1/32 -j RETURN\n", "", ":OTHERS - [0:0]\n", "")
	if now := l.rules(); others.Replace(now) != others.Replace(want) {
		t.Errorf("%s: it is not as before:\n%s", f.name, diffLines(want, now))
	}
	l.compare()
	if again := l.reports[1].Found; len(again) > 0 {
		t.Errorf("%s: after the repair, %d things differ: %s", f.name, len(again), again.Words(3))
	}
	t.Logf("%-35s noticed after %v, repaired in %v: %s (%s)", f.name, took.Round(time.Millisecond),
		found.Took.Round(time.Millisecond), found.Found.Words(1), strings.Join(why[:min(1, len(why))], ""))
}

var policyCounters = regexp.MustCompile(`\[\d+:\d+\]`)

// rules are all rules of both families.
func (l *lab) rules() string {
	var out strings.Builder
	for _, f := range []string{"iptables", "ip6tables"} {
		for _, t := range []string{"nat", "filter"} {
			text, err := exec.Command(f+"-"+string(l.variant)+"-save", "-t", t).Output()
			if err != nil {
				l.t.Error(err)
			}
			lines := strings.Split(policyCounters.ReplaceAllString(string(text), "[0:0]"), "\n")
			slices.SortStableFunc(lines, func(a, b string) int { // Chains are in the order in which they were made.
				return strings.Compare(chainOfLine(a), chainOfLine(b))
			})
			for _, line := range lines {
				if !strings.HasPrefix(line, "#") && line != "" {
					out.WriteString(line + "\n")
				}
			}
		}
	}
	return out.String()
}

func chainOfLine(line string) string {
	words := strings.Fields(line + " . .")
	if words[0] == "-A" {
		return "-A " + words[1]
	}
	return words[0]
}

// TestUnrelatedRules: what others do to their own rules is their business: on the nft variant, no one of 300 changes by
// others raises a suspicion; nor do syncs on either.
func TestUnrelatedRules(t *testing.T) {
	t.Parallel()
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		l := newLab(t, v, 50)
		defer l.end()
		for i := range 10 {
			sp := plantest.LargeService(i, 40000+2*i, 2)
			l.plan.Set(sp)
			l.sync(plan.Only(plan.Keys{sp.Key: {}}))
		}
		l.sync(plan.Everything())
		time.Sleep(xtables.ReportInterval + xtables.PollInterval + 100*time.Millisecond) // It would report a suspicion within this time, and is to have none.
		if why := l.seen.take(); len(why) > 0 {
			t.Errorf("syncs of its own made it suspect that %q", why)
		}
		if v == xtables.Legacy {
			return
		}
		l.do("iptables-{} -t nat -N CNI-X")
		for i := range 100 {
			l.do(fmt.Sprintf("iptables-{} -t nat -A CNI-X -s 192.0.2.%d -j RETURN", i))
			l.do(fmt.Sprintf("iptables-{} -t nat -I POSTROUTING -s 192.0.2.%d -j CNI-X", i))
		}
		for i := range 100 {
			l.do(fmt.Sprintf("iptables-{} -t nat -D POSTROUTING -s 192.0.2.%d -j CNI-X", i))
		}
		if why := l.seen.within(500 * time.Millisecond); len(why) > 0 {
			t.Errorf("unrelated rules made it suspect that %q", why)
		}
		// It still sees: the next one is for it.
		l.do("iptables-{} -t nat -F KUBE-SERVICES")
		if why := l.seen.within(3 * time.Minute); len(why) == 0 || !strings.Contains(why[0], " by iptables-nft") {
			t.Errorf("a change of a chain of ours: %q", why)
		}
	})
}

// TestDriftWithPendingChanges: where a comparison and a change of the plan come together, the change is no drift.
func TestDriftWithPendingChanges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e, k := fakeEngine(plan.IPv4)
		plans := rapid.SliceOfN(plantest.Plans(), 2, 4).Draw(t, "plans")
		for i, p := range plans {
			p.Settings, p.Node = plans[0].Settings, plans[0].Node
			program(t, e, p, plan.Everything())
			switch {
			case i == 0 && e.Compared:
				t.Fatal("the first sync knew what there was before")
			case i > 0 && len(e.Found) != 0:
				t.Fatalf("from plan to plan, it found %s", e.Found.Words(5))
			}
		}
		// Some rule goes, and a change of the plan comes.
		name := rapid.SampledFrom([]string{names.Forward, names.Postrouting}).Draw(t, "chain")
		tbl := map[string]names.Table{names.Forward: names.Filter, names.Postrouting: names.NAT}[name]
		k.Tables[tbl][name] = k.Tables[tbl][name][1:]
		program(t, e, plans[0], plan.Everything())
		if len(e.Found) != 1 || e.Found[0].Kind != drift.Rule || !strings.Contains(e.Found.Words(1), name) {
			t.Fatalf("a rule of %s was removed: found %s", name, e.Found.Words(5))
		}
		// After an error nothing is known.
		k.Refuse = "COMMIT"
		k.Tables[tbl][name] = k.Tables[tbl][name][1:]
		if err := e.Sync(context.Background(), plans[0], plan.Everything()); err == nil {
			t.Fatal("the kernel refused everything, and there was no error")
		}
		k.Refuse = ""
		if err := e.Sync(context.Background(), plans[0], plan.Everything()); err != nil || e.Compared {
			t.Fatalf("after an error: %v, found %v", err, e.Found)
		}
	})
}
