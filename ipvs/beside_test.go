package ipvs

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/set"
	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// beside has an engine read beside syncs by lists in two parts, and calls during before each part. It returns how many are open.
func beside(e *engine, k *ipvstest.Kernel, during func()) (open func() int) {
	n := 0
	e.machine.reader = func(func(ipvs.ServerID) int) (Reader, error) {
		n++
		p := parts{during}
		return Reader{serversInParts{ipvstest.Servers{Kernel: k}, p}, setsInParts{ipvstest.Sets{Kernel: k}, p},
			deviceInParts{ipvstest.Device{Kernel: k}, p}, func() { n-- }}, nil
	}
	return func() int { return n }
}

type parts struct{ during func() }

type serversInParts struct {
	ipvstest.Servers
	parts
}

func (s serversInParts) Each(_ plan.Family, each func(*ipvs.ActualServer)) error {
	list, err := inParts(s.parts, s.List)
	for _, v := range list {
		each(v)
	}
	return err
}

// asKnown has a reading read as the program does beside syncs.
func asKnown(e *engine, r *reading) func(*ipvs.ActualServer) *actualServer {
	return func(v *ipvs.ActualServer) *actualServer { return e.knownAs(v, r) }
}

type setsInParts struct {
	ipvstest.Sets
	parts
}

func (s setsInParts) Entries(of ipset.Set, begin func(), each func(ipset.Entry)) error {
	list, err := inParts(s.parts, func() (map[ipset.Entry]struct{}, error) {
		return set.Of(slices.Collect(maps.Values(s.Set[of.Name]))...), nil
	})
	begin()
	for e := range list {
		each(e)
	}
	return err
}

type deviceInParts struct {
	ipvstest.Device
	parts
}

func (d deviceInParts) Addresses(f plan.Family) (set.Set[netip.Addr], error) {
	return inParts(d.parts, func() (set.Set[netip.Addr], error) { return d.Device.Addresses(f) })
}

// inParts lists one half of what there is, and then the other half of what there is then.
func inParts[K comparable, V any, M ~map[K]V](p parts, list func() (M, error)) (M, error) {
	p.during()
	first, err := list()
	if err != nil {
		return nil, err
	}
	n := 0
	maps.DeleteFunc(first, func(K, V) bool { n++; return n%2 == 0 })
	p.during()
	out, err := list()
	maps.Copy(out, first)
	return out, err
}

// faults are what another program does to a kernel that large(3) is programmed in, and in what words each is found.
var faults = []struct {
	name string
	do   func(k *ipvstest.Kernel, id ipvs.ServerID)
	want string
}{
	{"a virtual server removed", func(k *ipvstest.Kernel, id ipvs.ServerID) { delete(k.Virtual, id) }, "virtual server TCP 10.96.0.10:80: missing"},
	{"its scheduler", func(k *ipvstest.Kernel, id ipvs.ServerID) { k.Virtual[id].Scheduler = "sh" }, "virtual server TCP 10.96.0.10:80: changed"},
	{"another forwarding method", func(k *ipvstest.Kernel, id ipvs.ServerID) { k.Virtual[id].Foreign = true },
		"virtual server TCP 10.96.0.10:80: missing"},
	{"a virtual server added", func(k *ipvstest.Kernel, id ipvs.ServerID) {
		v := *k.Virtual[id]
		v.ID.Port, v.RealServers = 81, map[netip.AddrPort]ipvs.ActualRealServer{}
		k.Virtual[v.ID] = &v
	}, "virtual server TCP 10.96.0.10:81: unexpected"},
	{"a real server removed", func(k *ipvstest.Kernel, id ipvs.ServerID) { delete(k.Virtual[id].RealServers, firstOf(k, id).Addr) },
		"real server 10.244.0.0:8080 of virtual server TCP 10.96.0.10:80: missing"},
	{"its weight", func(k *ipvstest.Kernel, id ipvs.ServerID) {
		d := firstOf(k, id)
		d.Weight = 0
		k.Virtual[id].RealServers[d.Addr] = d
	}, "weight 0 in place of 1: changed"},
	{"an entry removed", func(k *ipvstest.Kernel, id ipvs.ServerID) {
		delete(k.Set["KUBE-CLUSTER-IP"], ipset.Entry{Addr: id.Addr, Protocol: id.Protocol, Port: id.Port})
	}, "set element 10.96.0.10,tcp:80 of set KUBE-CLUSTER-IP: missing"},
	{"an entry added", func(k *ipvstest.Kernel, id ipvs.ServerID) {
		e := ipset.Entry{Addr: id.Addr, Protocol: plan.UDP, Port: id.Port}
		k.Set["KUBE-NO-ENDPOINTS"][e] = e
	}, "set element 10.96.0.10,udp:80 of set KUBE-NO-ENDPOINTS: unexpected"},
	{"an address removed", func(k *ipvstest.Kernel, id ipvs.ServerID) { delete(k.Addresses, id.Addr) },
		"address 10.96.0.10 of interface kube-ipvs0: missing"},
	{"an address added", func(k *ipvstest.Kernel, _ ipvs.ServerID) { k.Addresses.Insert(netip.MustParseAddr("192.0.2.77")) },
		"address 192.0.2.77 of interface kube-ipvs0: unexpected"},
	{"its entry removed", func(k *ipvstest.Kernel, id ipvs.ServerID) { delete(k.Set["KUBE-IPVS-IPS"], ipset.Entry{Addr: id.Addr}) },
		"set element 10.96.0.10 of set KUBE-IPVS-IPS: missing"},
}

func firstOf(k *ipvstest.Kernel, id ipvs.ServerID) ipvs.ActualRealServer {
	return k.Virtual[id].RealServers[slices.MinFunc(slices.Collect(maps.Keys(k.Virtual[id].RealServers)), netip.AddrPort.Compare)]
}

// TestCompareBeside: what another program changes is found, named and repaired without a sync of everything. If it is much, or of what only
// such a sync repairs, one is asked for.
func TestCompareBeside(t *testing.T) {
	t.Parallel()
	var last drift.Report
	e, k := fakeEngine(plan.IPv4, testOptions)
	b := &Backend{}
	b.Engines, b.Compared = []*engine{e}, func(r drift.Report) { last = r }
	p := large(3)
	require.True(t, b.Compare(t.Context()), "nothing is known, and no sync has to find out")
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	id, want := slices.SortedFunc(maps.Keys(k.Virtual), compareServers)[0], k.Text()
	for _, f := range faults {
		f.do(k, id)
		if again := b.Compare(t.Context()); again || len(last.Found) != 1 || last.Err != nil || !strings.Contains(last.Found.Words(1), f.want) {
			t.Errorf("%s: again %t, found %s, %v; want %s", f.name, again, last.Found.Words(5), last.Err, f.want)
		}
		if k.Text() != want {
			t.Errorf("%s: it is not as before:\n%s\nwant\n%s", f.name, k.Text(), want)
		}
		if again := b.Compare(t.Context()); again || len(last.Found) > 0 {
			t.Errorf("%s: after the repair: again %t, found %s", f.name, again, last.Found.Words(5))
		}
	}
	delete(k.Set, "KUBE-CLUSTER-IP")
	k.Local[netip.MustParsePrefix("192.0.2.0/24")] = netip.Addr{}
	for _, what := range []string{"a set is gone", "there is another route"} {
		if !b.Compare(t.Context()) {
			t.Errorf("%s, and no sync has to follow", what)
		}
	}
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	if k.Text() != want {
		t.Errorf("it is not as before:\n%s\nwant\n%s", k.Text(), want)
	}
	p = large(mostBeside + 1)
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	clear(k.Virtual)
	if !b.Compare(t.Context()) || e.Sync(t.Context(), p, plan.Everything()) != nil || len(e.Found) != len(p.Services) {
		t.Errorf("where much is gone, a sync finds %s", e.Found.Words(3))
	}
}

// TestCompareDuringChanges: changes made during a comparison are no drift and do not get lost, and what another program does meanwhile is
// repaired by this or the next one, and nothing else is found.
func TestCompareDuringChanges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f, testOptions)
		inSteps(t, e)
		few := func(p *plan.Plan) bool { return len(p.Services) <= 40 } // A comparison has many parts, and each change is made in one.
		next := rapid.SliceOfN(plantest.Plans().Filter(few), 2, 6).Draw(t, "plans")
		for _, p := range next {
			p.Node, p.Settings = next[0].Node, next[0].Settings
		}
		p := next[0]
		next = next[1:]
		require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
		meddle, meddled := rapid.Bool().Draw(t, "another program meddles"), 0
		if rapid.Bool().Draw(t, "connections are open") { // So what is no longer used drains, which is no difference.
			for _, p := range append(next, p) {
				for _, sp := range p.Services {
					for _, ep := range sp.All() {
						k.Connections[ep.Addr] = 1
					}
				}
			}
		}
		b := &Backend{}
		b.Engines, b.Compared = []*engine{e}, func(r drift.Report) { t.Fatalf("counting found %s", r.Found.Words(5)) }
		sync := func(change plan.Change) {
			err := e.Sync(t.Context(), p, change)
			if err != nil && meddled > 0 { // What it should have changed is gone, to which the kernel would not object.
				err = e.Sync(t.Context(), p, plan.Everything())
			}
			require.NoError(t, err)
		}
		open := beside(e, k, func() {
			switch action := rapid.IntRange(0, 9).Draw(t, "meanwhile"); {
			case action < 4 && len(next) > 0:
				change := plan.Only(plantest.Differing(p, next[0]))
				if p, next = next[0], next[1:]; action == 0 {
					change = plan.Everything()
				}
				sync(change)
			case action == 4 && meddled == 0:
				require.NoError(t, e.drain(time.Now()))
			case action == 5 && meddle:
				meddled += meddling(t, k)
			case action == 6 && meddled == 0:
				require.Empty(t, b.countAll(fakeCounts{k, nil}, true))
			}
		})
		for range 2 {
			found, again, err := e.CompareBeside(t.Context())
			require.NoError(t, err)
			if len(found) > meddled || again && e.desired != nil && meddled == 0 || open() != 0 {
				t.Fatalf("after %d changes of others: found %s, again %t; %d sockets are open", meddled, found.Words(5), again, open())
			}
			if again {
				sync(plan.Everything())
			}
			beside(e, k, func() {}) // The second comparison finds what came after the first one had read it.
		}
		for n := 0; e.rest != nil; n++ {
			if sync(plan.Only(nil)); n > 10_000 {
				t.Fatalf("after %d further syncs", n)
			}
		}
		found, again, err := e.CompareBeside(t.Context()) // What was left to change was not compared before.
		if err != nil || again || len(found) > meddled || len(e.readings) > 0 {
			t.Fatalf("found %s, again %t, %v; %d readings are under way", found.Words(5), again, err, len(e.readings))
		}
		clear(k.Connections)
		require.NoError(t, e.drain(time.Now()))
		fresh, want := fakeEngine(f, testOptions)
		require.NoError(t, fresh.Sync(t.Context(), p, plan.Everything()))
		if k.Text() != want.Text() {
			t.Fatalf("after %d changes of others, the kernel holds\n%s\ninstead of\n%s", meddled, k.Text(), want.Text())
		}
	})
}

// TestCompareWhatStays: what others have changed of a Service is found, also where a sync looks at all of it during the comparison and leaves
// that part as it was.
func TestCompareWhatStays(t *testing.T) {
	t.Parallel()
	p := plantest.Large(20, 3)
	e, k := fakeEngine(plan.IPv4, Options{})
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	sp := p.Sorted(plan.IPv4)[7]
	k.Addresses.Delete(sp.Frontends[0].Addr)
	changed := *plantest.LargeService(7, 5, 3)
	changed.Key, changed.Frontends = sp.Key, sp.Frontends
	p.Set(&changed)
	var once sync.Once
	beside(e, k, func() {
		once.Do(func() { require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}}))) })
	})
	found, again, err := e.CompareBeside(t.Context())
	require.NoError(t, err)
	require.False(t, again)
	require.Len(t, found, 1, found.Words(5))
	require.True(t, k.Addresses.Has(sp.Frontends[0].Addr))
}

// meddling removes something at random, and returns how many things.
func meddling(t *rapid.T, k *ipvstest.Kernel) int {
	draw := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "which") }
	switch rapid.IntRange(0, 2).Draw(t, "kind") {
	case 0:
		if ids := slices.SortedFunc(maps.Keys(k.Virtual), compareServers); len(ids) > 0 {
			delete(k.Virtual, ids[draw(len(ids))])
			return 1
		}
	case 1:
		if list := slices.SortedFunc(maps.Keys(k.Addresses), netip.Addr.Compare); len(list) > 0 {
			a := list[draw(len(list))]
			k.Addresses.Delete(a)
			k.Unrouted.Delete(a)
			return 2 // It may be unrouted too.
		}
	case 2:
		if entries := k.Set["KUBE-CLUSTER-IP"]; len(entries) > 0 {
			for e := range entries {
				delete(entries, e)
				return 1
			}
		}
	}
	return 0
}

// waiting is a table of rules whose lock another program holds until it is released.
type waiting struct {
	ipvstest.Tables
	began, release chan struct{}
}

func (w waiting) Sync(ctx context.Context, x xtables.Desired) (int, error) {
	close(w.began)
	<-w.release
	return w.Tables.Sync(ctx, x)
}

// TestChangesDoNotWait: a change is made while a comparison waits for the lock of iptables, and while it reads.
func TestChangesDoNotWait(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(3)
	key := p.Sorted(plan.IPv4)[0].Key
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	w := waiting{ipvstest.Tables{Kernel: k}, make(chan struct{}), make(chan struct{})}
	reads, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	beside(e, k, func() {
		once.Do(func() {
			close(reads)
			<-goOn
		})
	})
	e.machine.tables = w
	ended := make(chan error)
	go func() {
		found, again, err := e.CompareBeside(t.Context())
		if len(found) > 0 || again {
			err = errors.Join(err, errors.New("it found "+found.Words(5)))
		}
		ended <- err
	}()
	change := func(endpoint string) {
		next, changed := replaced(p, key, endpoint)
		require.NoError(t, e.Sync(t.Context(), next, plan.Only(changed)))
		p = next
	}
	<-w.began
	change("10.250.0.1:8080")
	close(w.release)
	<-reads
	change("10.250.0.2:8080")
	close(goOn)
	require.NoError(t, <-ended)
	require.NoError(t, e.drain(time.Now()))
	fresh, want := fakeEngine(plan.IPv4, testOptions)
	require.NoError(t, fresh.Sync(t.Context(), p, plan.Everything()))
	if k.Text() != want.Text() {
		t.Errorf("the kernel holds\n%s\ninstead of\n%s", k.Text(), want.Text())
	}
}

// TestCompareLetsChangesBetween: while what was read is compared, changes go on, and are neither found nor lost.
func TestCompareLetsChangesBetween(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(2 * comparedAtOnce)
	list := p.Sorted(plan.IPv4)
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	r := e.beginReading()
	now, err := e.machine.read(plan.IPv4, r.marks, nil, asKnown(e, r))
	require.NoError(t, err)
	gone := list[0].Frontends[0]
	delete(k.Virtual, ipvs.ServerID{Family: plan.IPv4, Protocol: gone.Protocol, Addr: gone.Addr, Port: gone.Port})
	now.servers.Delete(ipvs.ServerID{Family: plan.IPv4, Protocol: gone.Protocol, Addr: gone.Addr, Port: gone.Port})
	var running sync.WaitGroup
	running.Go(func() {
		for _, sp := range list[1:500] {
			p.Delete(sp.Key)
			if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}})); err != nil {
				t.Error(err)
				return
			}
		}
	})
	found, again, err := e.settle(r, now)
	e.endReading(r)
	running.Wait()
	if err != nil || again || len(found) != 1 || len(k.Virtual) != len(list)-499 {
		t.Errorf("found %s, again %t, %v; there are %d virtual servers", found.Words(5), again, err, len(k.Virtual))
	}
}

// listed are virtual servers as they once were.
type listed struct {
	servers
	list map[ipvs.ServerID]*ipvs.ActualServer
}

func (l listed) Each(_ plan.Family, each func(*ipvs.ActualServer)) error {
	for _, v := range l.list {
		each(v)
	}
	return nil
}

// TestReadWhatChanges: a sync changes virtual servers that a comparison is reading as known ones. The race detector decides.
func TestReadWhatChanges(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(300)
	list := p.Sorted(plan.IPv4)
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	was, err := ipvstest.Servers{Kernel: k}.List()
	require.NoError(t, err)
	r := e.beginReading()
	defer e.endReading(r)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := range 2 * len(list) {
			sp := *list[n%len(list)]
			sp.Affinity = time.Duration(1-n/len(list)) * time.Hour
			p.Set(&sp)
			if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}})); err != nil {
				t.Error(err)
			}
		}
	}()
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		default:
		}
		now, err := machine{servers: listed{list: was}}.read(plan.IPv4, r.marks, nil, asKnown(e, r))
		if err != nil || now.servers.Len() != len(was) {
			t.Fatalf("read %d virtual servers, want %d: %v", now.servers.Len(), len(was), err)
		}
	}
}

// TestCompareFails: after an error nothing is known, and a sync has to find out. At the end of the program, nothing is reported.
func TestCompareFails(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	var reports []drift.Report
	b := &Backend{}
	b.Engines, b.Compared = []*engine{e}, func(r drift.Report) { reports = append(reports, r) }
	p := large(3)
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	ended, end := context.WithCancel(t.Context())
	beside(e, k, end)
	if b.Compare(ended) || len(reports) > 0 {
		t.Errorf("the program ended, and there are %d reports", len(reports))
	}
	beside(e, k, func() {})
	clear(k.Virtual)
	k.Fail = "add server"
	if !b.Compare(t.Context()) || e.desired != nil || len(reports) != 1 || reports[0].Err == nil || len(reports[0].Found) != 3 {
		t.Errorf("the repair failed: %+v", reports)
	}
	for _, fail := range []string{"list servers", "rules"} {
		k.Fail = ""
		require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
		k.Fail = fail
		if !b.Compare(t.Context()) {
			t.Errorf("after an error of %q, no sync has to follow", fail)
		}
	}
	beside(e, k, func() { panic("a wrong number") })
	k.Fail = ""
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	if !b.Compare(t.Context()) || len(e.readings) > 0 {
		t.Error("it panicked, and no sync has to follow")
	}
}

// TestUnfinishedBesideComparison: whether something is left may be asked while a comparison fails.
func TestUnfinishedBesideComparison(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	b := &Backend{}
	b.Engines = []*engine{e}
	require.NoError(t, e.Sync(t.Context(), large(3), plan.Everything()))
	clear(k.Virtual)
	k.Fail = "add server"
	var running sync.WaitGroup
	running.Go(func() {
		if !b.Compare(t.Context()) {
			t.Error("the repair failed, and no sync has to follow")
		}
	})
	if b.Unfinished() {
		t.Error("something is left")
	}
	running.Wait()
}

// TestRefusedDuringComparison: an address that came while everything was read is there, though the kernel refuses its entry.
func TestRefusedDuringComparison(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, Options{VIPs: Addresses})
	p := large(3)
	sp := p.Sorted(plan.IPv4)[0]
	refused := ipset.Entry{Addr: sp.Frontends[0].Addr}
	e.machine.sets = &pickySets{Sets: ipvstest.Sets{Kernel: k}, refuses: func(e ipset.Entry) bool { return e == refused }}
	p.Delete(sp.Key)
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	r := e.beginReading()
	now, err := e.machine.read(plan.IPv4, r.marks, nil, asKnown(e, r))
	require.NoError(t, err)
	p.Set(sp)
	require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}})))
	require.Len(t, e.refusedMembers, 1)
	if found, again, err := e.settle(r, now); err != nil || again || len(found) > 0 {
		t.Errorf("found %s, again %t, %v", found.Words(5), again, err)
	}
	e.endReading(r)
}

// TestFailedRepair: what a repair that fails would have changed is not changed later, when it may be as it should be.
func TestFailedRepair(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(2)
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	want := k.Text()
	e.machine.servers = &forgetful{Servers: ipvstest.Servers{Kernel: k}}
	foreign := func(is bool) {
		for _, v := range k.Virtual {
			v.Foreign = is
		}
	}
	foreign(true)
	if _, again, err := e.CompareBeside(t.Context()); !errors.Is(err, ipvstest.ErrRefused) || !again {
		t.Errorf("again %t, %v", again, err)
	}
	foreign(false)
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	if k.Text() != want {
		t.Errorf("the kernel holds\n%s\ninstead of\n%s", k.Text(), want)
	}
}

// forgetful are virtual servers of which the second can't be read.
type forgetful struct {
	ipvstest.Servers
	gets int
}

func (s *forgetful) Get(id ipvs.ServerID) (*ipvs.ActualServer, error) {
	if s.gets++; s.gets == 2 {
		return nil, ipvstest.ErrRefused
	}
	return s.Servers.Get(id)
}

// TestReplacedOfGoneService: a comparison removes a virtual server that was left to its connections, when its Service is gone. As long as
// the Service is there, the virtual server stays as it is.
func TestReplacedOfGoneService(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	local, cluster := webPlan(plan.Local, plan.TCP), webPlan(plan.Cluster, plan.TCP)
	none := plan.New(local.Node, local.Settings)
	require.NoError(t, e.Sync(t.Context(), local, plan.Everything()))
	k.Connections[netip.MustParseAddrPort("10.244.1.5:8080")] = 1
	for _, next := range []*plan.Plan{cluster, none} {
		require.NoError(t, e.Sync(t.Context(), next, plan.Only(plantest.Differing(local, cluster))))
		before := k.Text()
		if found, again, err := e.CompareBeside(t.Context()); err != nil || again || len(found) > 0 {
			t.Errorf("found %s, again %t, %v", found.Words(5), again, err)
		}
		if next == cluster && k.Text() != before {
			t.Errorf("the kernel holds\n%s\ninstead of\n%s", k.Text(), before)
		}
	}
	if len(k.Virtual) > 0 {
		t.Errorf("the Service is gone, and there is\n%s", k.Text())
	}
}
