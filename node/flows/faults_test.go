package flows

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// TestFaults: whatever fails, it is reported, and the next pass does all that is left to do.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault func(*conntracktest.Kernel)
		want  error
	}{
		{"interrupted dump", func(k *conntracktest.Kernel) { k.Interrupted = 1 }, netlink.ErrInterrupted},
		{"dump overrun", func(k *conntracktest.Kernel) { k.DumpError = syscall.ENOBUFS }, syscall.ENOBUFS},
		{"answer overrun", func(k *conntracktest.Kernel) { k.LostAnswer = syscall.ENOBUFS }, syscall.ENOBUFS},
		{"no right to delete", func(k *conntracktest.Kernel) { k.DeleteError = syscall.EPERM }, syscall.EPERM},
		{"deletion refused", func(k *conntracktest.Kernel) { k.DeleteError = syscall.EINVAL }, syscall.EINVAL},
		{"no socket", func(k *conntracktest.Kernel) { k.OpenError = syscall.EMFILE }, syscall.EMFILE},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := &conntracktest.Kernel{Flows: staleFlows(3*128 + 7)}
			c.fault(k)
			r, _ := fakeReconciler(k, nil)
			if _, err := r.pass(t.Context()); !errors.Is(err, c.want) {
				t.Errorf("first pass: %v, want %v", err, c.want)
			}
			if r.started {
				t.Error("a pass that failed counts as one that did its work")
			}
			k.DeleteError = nil
			if _, err := r.pass(t.Context()); err != nil {
				t.Errorf("second pass: %v", err)
			}
			if len(k.Flows) != 0 {
				t.Errorf("%d flows are left", len(k.Flows))
			}
			if r.table.Unfiltered {
				t.Error("the kernel is no longer asked to filter, though it did not refuse")
			}
		})
	}
}

// TestNoKernelFilter: a kernel that refuses to filter is asked for everything, from then on.
func TestNoKernelFilter(t *testing.T) {
	k := &conntracktest.Kernel{Flows: staleFlows(3), NoFilter: true}
	r, _ := fakeReconciler(k, nil)
	mustPass(t, r)
	r.work.all = true
	mustPass(t, r)
	if want := []string{"17", "all", "all"}; !slices.Equal(k.Dumps, want) || len(k.Flows) != 0 {
		t.Errorf("dumps %q, want %q; %d flows left", k.Dumps, want, len(k.Flows))
	}
}

// TestWhatIsRead: changes are read for as narrowly as one dump allows, and not at all where no flow can be stale.
func TestWhatIsRead(t *testing.T) {
	k := &conntracktest.Kernel{}
	var observed []Sweep
	r, p := fakeReconciler(k, func(c *Config) { c.Observe = func(s Sweep) { observed = append(observed, s) } })
	mustPass(t, r)
	if len(observed) != 1 || !observed[0].Full || observed[0].Protocol != plan.UDP || observed[0].Family != plan.IPv4 {
		t.Errorf("observed %+v", observed)
	}
	k.Dumps = nil
	one, two, other := "10.244.1.1:5353", "10.244.2.2:5353", "10.96.0.20:53"
	for _, step := range []struct {
		what string
		sync []*plan.ServicePort
		want []string
	}{
		{"a TCP port", []*plan.ServicePort{service("web", plan.TCP, "10.96.0.10:80", one)}, []string{"6 10.96.0.10 :80 early"}},
		{"its endpoints", []*plan.ServicePort{service("web", plan.TCP, "10.96.0.10:80", two)}, nil},
		{"no endpoints", []*plan.ServicePort{service("web", plan.TCP, "10.96.0.10:80")}, nil},
		{"the first endpoint", []*plan.ServicePort{service("web", plan.TCP, "10.96.0.10:80", two)}, []string{"6 10.96.0.10 :80 early"}},
		{"TCP ports without endpoints", []*plan.ServicePort{service("web2", plan.TCP, "10.96.0.11:80")}, nil},
		{"more TCP ports", []*plan.ServicePort{service("web2", plan.TCP, "10.96.0.11:80", one), service("web3", plan.TCP, other, one)},
			[]string{"6 early"}},
		{"one more endpoint", []*plan.ServicePort{service("dns", plan.UDP, "10.96.0.10:53", one, two)}, nil},
		{"one endpoint less", []*plan.ServicePort{service("dns", plan.UDP, "10.96.0.10:53", two)}, []string{"17 10.96.0.10 :53"}},
		{"no endpoint", []*plan.ServicePort{service("dns", plan.UDP, "10.96.0.10:53")}, []string{"17 10.96.0.10 :53"}},
		{"an endpoint again", []*plan.ServicePort{service("dns", plan.UDP, "10.96.0.10:53", one)}, []string{"17 10.96.0.10 :53"}},
		{"a new one of the same port", []*plan.ServicePort{service("dns2", plan.UDP, other, one),
			service("dns", plan.UDP, "10.96.0.10:53")}, []string{"17 :53"}},
		{"a new port", []*plan.ServicePort{service("dns2", plan.UDP, "10.96.0.20:54", one)}, []string{"17 10.96.0.20"}},
		{"a node port too", []*plan.ServicePort{withNodePort(service("dns2", plan.UDP, "10.96.0.20:54", one), 30054)},
			[]string{"17"}},
		{"SCTP", []*plan.ServicePort{service("tel", plan.SCTP, other, one)}, []string{"132 10.96.0.20 :53"}},
	} {
		k.Dumps = nil
		set(r, p, step.sync...)
		mustPass(t, r)
		if !slices.Equal(k.Dumps, step.want) {
			t.Errorf("%s: dumps %q, want %q", step.what, k.Dumps, step.want)
		}
	}
	k.Dumps, r.work.all = nil, true
	mustPass(t, r)
	if want := []string{"17", "132", "6 early"}; !slices.Equal(k.Dumps, want) {
		t.Errorf("full pass: dumps %q, want %q", k.Dumps, want)
	}
	k.Dumps, r.work.all = nil, true
	mustPass(t, r)
	if want := []string{"17", "132"}; !slices.Equal(k.Dumps, want) {
		t.Errorf("a full pass after which no TCP port is new: dumps %q, want %q", k.Dumps, want)
	}
	k.Dumps = nil
	var thousand []*plan.ServicePort
	for i := range mostNoted + 1 {
		thousand = append(thousand, service(fmt.Sprint("many", i), plan.TCP, fmt.Sprintf("10.97.%d.%d:80", i>>8, i&255), one))
	}
	set(r, p, thousand...)
	if mustPass(t, r); !slices.Equal(k.Dumps, []string{"6 early"}) {
		t.Errorf("many TCP ports: dumps %q", k.Dumps)
	}
	r.mu.Lock()
	var many work
	many.frontends = map[frontend]struct{}{}
	for i := range mostNoted + 1 {
		many.frontends[frontend{port: uint16(i)}] = struct{}{}
	}
	r.work.add(many)
	all := r.work.all
	r.mu.Unlock()
	if !all {
		t.Error("any number of frontends is noted one by one")
	}
}

// TestStrayAnswersRead: stray answers are read for when an endpoint is back that had left, of that endpoint only.
func TestStrayAnswersRead(t *testing.T) {
	k := &conntracktest.Kernel{}
	r, p := fakeReconciler(k, func(c *Config) { c.StrayAnswers = true })
	mustPass(t, r)
	one, two, three := "10.244.1.1:5353", "10.244.2.2:5353", "10.244.3.3:5354"
	frontend := "17 10.96.0.10 :53"
	for _, step := range []struct {
		what      string
		endpoints []string
		want      []string
	}{
		{"one more", []string{one, two}, nil},
		{"one leaves", []string{two}, []string{frontend}},
		{"it is back", []string{one, two}, []string{"17 from 10.244.1.1 from :5353"}},
		{"all leave", nil, []string{frontend}},
		{"both are back", []string{one, two}, []string{frontend, "17 from :5353"}},
		{"a new one takes their place", []string{three}, []string{frontend}},
		{"all are back", []string{one, two, three}, []string{"17 from :5353"}},
	} {
		k.Dumps = nil
		set(r, p, service("dns", plan.UDP, "10.96.0.10:53", step.endpoints...))
		mustPass(t, r)
		if !slices.Equal(k.Dumps, step.want) {
			t.Errorf("%s: dumps %q, want %q", step.what, k.Dumps, step.want)
		}
	}
}

// TestLooksAgain: stray answers of an endpoint that is back are looked for a few times more, since they may be slow.
func TestLooksAgain(t *testing.T) {
	k := &conntracktest.Kernel{}
	r, p := fakeReconciler(k, func(c *Config) { c.StrayAnswers, c.Period = true, time.Hour })
	r.again = []time.Duration{20 * time.Millisecond, 30 * time.Millisecond, 40 * time.Millisecond}
	running(t, r)
	use := func(endpoints ...string) {
		set(r, p, service("dns", plan.UDP, "10.96.0.10:53", endpoints...))
	}
	looks := func() (n int) {
		for _, d := range k.Dumps {
			if d == "17 from 10.244.1.1 from :5353" {
				n++
			}
		}
		return n
	}
	k.Wait(t, "the first pass", func() bool { return len(k.Dumps) == 1 })
	for _, want := range []int{4, 8} {
		k.Lock()
		before := len(k.Dumps)
		k.Unlock()
		use("10.244.2.2:5353")
		k.Wait(t, "a look for what has left", func() bool { return len(k.Dumps) > before })
		use("10.244.1.1:5353", "10.244.2.2:5353")
		k.Wait(t, fmt.Sprintf("%d looks", want), func() bool { return looks() == want })
		time.Sleep(100 * time.Millisecond) // Another look, which is not to come, would come soon.
		k.Wait(t, "and no more", func() bool { return looks() == want })
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.back.endpoints) > 0 {
		t.Errorf("%v is still looked for", r.back.endpoints)
	}
}

// TestNothingUDP: without anything to look for, nothing is read.
func TestNothingUDP(t *testing.T) {
	k := &conntracktest.Kernel{}
	r, _ := reconciling(func(c *Config) { c.Families, c.Dial = []plan.Family{plan.IPv4}, k.Dial }, service("web", plan.TCP, "10.96.0.10:80"))
	mustPass(t, r)
	if len(k.Dumps) != 0 || !r.started {
		t.Errorf("dumps %q", k.Dumps)
	}
}

// syncFunc is a Backend.
type syncFunc func() error

func (f syncFunc) Sync(context.Context, *plan.Plan, plan.Change) error { return f() }

// TestWhileRulesChange: while the backend writes, flows that the new plan wants stay, since the new rules may have made
// them; flows that it does not want are removed, then again once it has succeeded, as the old rules may have made more.
func TestWhileRulesChange(t *testing.T) {
	k := &conntracktest.Kernel{Flows: staleFlows(2)} // to what is to be the endpoint
	r, p := fakeReconciler(k, nil)
	sp := service("dns", plan.UDP, "10.96.0.10:53", "10.244.2.2:5353")
	p.Set(sp)
	old := fromPort(protoUDP, "10.244.1.9", []entry{{Dst: "10.96.0.10:53", From: "10.244.1.1:5353"}}, 100)
	err := r.After(syncFunc(func() error {
		mustPass(t, r)
		k.Flows = append(k.Flows, old...)
		mustPass(t, r)
		k.Flows = append(k.Flows, old...)
		return nil
	}), nil).Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}}))
	if err != nil || k.Deleted != 1 || r.started {
		t.Fatalf("error %v, %d flows deleted, want 1; started %v", err, k.Deleted, r.started)
	}
	mustPass(t, r)
	if k.Deleted != 2 || len(k.Flows) != 2 || !r.started || !r.work.empty() {
		t.Errorf("%d flows deleted, want 2; %d left, want 2; started %v, work %+v", k.Deleted, len(k.Flows), r.started, r.work)
	}
}

// TestRulesInParts: where a backend makes a part of a change only, what that makes stale may come back until the rest is made, and is removed
// again then.
func TestRulesInParts(t *testing.T) {
	k := &conntracktest.Kernel{}
	r, p := fakeReconciler(k, nil)
	mustPass(t, r)
	gone := service("dns", plan.UDP, "10.96.0.10:53").Key
	p.Delete(gone)
	parts := 3
	b := r.After(syncFunc(func() error { parts--; return nil }), func() bool { return parts > 0 })
	change := plan.Keys{gone: {}}
	for parts > 0 {
		require.NoError(t, b.Sync(t.Context(), p, plan.Only(change)))
		change = nil
		k.Flows = staleFlows(1)
		mustPass(t, r)
		if len(k.Flows) != 0 || r.settled != (parts == 0) || r.work.empty() != (parts == 0) {
			t.Errorf("with %d parts to come: %d flows left, settled %t, work %+v", parts, len(k.Flows), r.settled, r.work)
		}
	}
}

// TestRulesNotTaken: where a backend reports failure, as it does as long as the kernel refuses the rules of any Service,
// flows are still removed; and what is gone is looked for until it has succeeded, and then as long as ever.
func TestRulesNotTaken(t *testing.T) {
	k := &conntracktest.Kernel{}
	r, p := fakeReconciler(k, nil)
	mustPass(t, r)
	gone := service("dns", plan.UDP, "10.96.0.10:53").Key
	p.Delete(gone)
	refused := errors.New("refused")
	b := r.After(syncFunc(func() error { return refused }), nil)
	for range 2 * passesAfterEnd {
		if err := b.Sync(t.Context(), p, plan.Everything()); !errors.Is(err, refused) {
			t.Fatal(err)
		}
		k.Flows = staleFlows(1)
		mustPass(t, r)
		if len(k.Flows) != 0 {
			t.Fatal("the flow to a Service that is gone was not removed")
		}
	}
	refused = nil
	require.NoError(t, b.Sync(t.Context(), p, plan.Everything()))
	for i := range passesAfterEnd + 1 {
		k.Flows, r.work.all = staleFlows(1), true
		mustPass(t, r)
		if left := len(k.Flows); left != 0 != (i == passesAfterEnd) {
			t.Errorf("pass %d after the end: %d flows left", i+1, left)
		}
	}
}

// TestTCPSync: a sync of endpoints of TCP ports alone does not concern it.
func TestTCPSync(t *testing.T) {
	k := &conntracktest.Kernel{}
	r, p := fakeReconciler(k, nil)
	set(r, p, service("web", plan.TCP, "10.96.0.10:80", "10.244.1.1:80"))
	mustPass(t, r)
	k.Dumps = nil
	web := service("web", plan.TCP, "10.96.0.10:80", "10.244.1.2:80")
	p.Set(web)
	err := r.After(syncFunc(func() error {
		if !r.settled {
			t.Error("it counts as unsettled")
		}
		return errors.New("refused")
	}), nil).Sync(t.Context(), p, plan.Only(plan.Keys{web.Key: {}}))
	mustPass(t, r)
	if err == nil || len(k.Dumps) != 0 || !r.settled {
		t.Errorf("error %v, dumps %q, settled %v", err, k.Dumps, r.settled)
	}
}

// running runs r until the test ends.
func running(t *testing.T, r *Reconciler) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

// TestRun: a change is acted on at once, a failure is retried, and a stale flow without an event is found by the periodic pass.
func TestRun(t *testing.T) {
	t.Parallel()
	k := &conntracktest.Kernel{Flows: staleFlows(300), Interrupted: 3}
	var log logLines
	r, _ := fakeReconciler(k, func(c *Config) { c.Period, c.Log = 50*time.Millisecond, log.logger() })
	running(t, r)
	k.Wait(t, "first pass, tried again", func() bool { return len(k.Flows) == 0 && k.Interrupted == 0 })
	k.Wait(t, "a pass that succeeds", func() bool { return len(k.Dumps) >= 3 })
	k.Lock()
	k.Flows = staleFlows(1)
	k.Unlock()
	k.Wait(t, "periodic pass", func() bool { return len(k.Flows) == 0 })
	if got := strings.Count(log.String(), "level=WARN"); got != 1 {
		t.Errorf("%d warnings for one reason, want 1:\n%s", got, log.String())
	}
}

// TestRunAtOnce: what a plan no longer wants is removed when its rules are in force, and not only by the periodic pass.
func TestRunAtOnce(t *testing.T) {
	t.Parallel()
	k := &conntracktest.Kernel{}
	r, p := fakeReconciler(k, func(c *Config) { c.Period = time.Hour })
	running(t, r)
	k.Wait(t, "first pass", func() bool { return len(k.Dumps) == 1 })
	k.Lock()
	k.Flows = fromPort(protoUDP, "10.244.1.9", []entry{{Dst: "10.96.0.10:53", From: "10.244.1.1:5353"}}, 1)
	k.Unlock()
	sp := service("dns", plan.UDP, "10.96.0.10:53", "10.244.2.2:5353")
	p.Set(sp)
	b := r.After(syncFunc(func() error { return nil }), nil)
	require.NoError(t, b.Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}})))
	k.Wait(t, "the pass after a change", func() bool { return len(k.Flows) == 0 })
}

// TestUnreadableAddresses: without the machine's addresses nothing is removed, and the error says what failed.
func TestUnreadableAddresses(t *testing.T) {
	k := &conntracktest.Kernel{Flows: staleFlows(1)}
	r, _ := fakeReconciler(k, func(c *Config) { c.Local = func(plan.Family) (*host.Local, error) { return nil, syscall.ENOBUFS } })
	if _, err := r.pass(t.Context()); !errors.Is(err, syscall.ENOBUFS) || k.Deleted != 0 {
		t.Errorf("error %v, %d flows deleted", err, k.Deleted)
	}
}
