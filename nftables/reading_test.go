package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// asking is a kernel that notes how elements are read.
type asking struct {
	kernel
	*reads
}

type reads struct {
	listed map[string]int // how often each set
	asked  int            // how many elements
	during func()         // unless nil, called at each of both
}

func (a asking) Sample(f plan.Family, table string, s nft.Set, each func(nft.Element) error) error {
	a.listed[s.Name]++
	if a.during != nil {
		a.during()
	}
	return a.kernel.Sample(f, table, s, each)
}

func (a asking) Find(f plan.Family, table string, keys []nft.ElementKey, each func(int, nft.Element, bool) error) error {
	a.asked += len(keys)
	if a.during != nil {
		a.during()
	}
	return a.kernel.Find(f, table, keys, each)
}

// askingEngine is an engine over the kernel of the namespace, and how it reads elements with the socket that it writes with.
func askingEngine(t testing.TB, f plan.Family) (*engine, *reads) {
	e, k := testEngine(t, f)
	r := &reads{listed: map[string]int{}}
	e.dial = func() (kernel, error) {
		c, err := nft.Dial()
		k.kernel = asking{c, r}
		return k, err
	}
	return e, r
}

// put adds elements to the table beside the engine.
func put(t rapid.TB, e *engine, all map[id]value) {
	t.Helper()
	c, err := nft.Dial()
	if err != nil {
		t.Fatalf("%v", err)
	}
	defer c.Close()
	b := nft.NewBatch(e.family, names.NFTables)
	for i, v := range all {
		b.AddElements(e.sets[i.set], []nft.Element{i.element(v)})
	}
	if err := c.Commit(b); err != nil {
		t.Fatalf("%v", err)
	}
}

// TestClientsTakeNoMemory: a comparison takes no memory for the clients that affinity remembers, which it does not list.
func TestClientsTakeNoMemory(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	synced(t, e, plantest.Large(10, 2), plan.Everything())
	content := &nft.Content{Counts: map[string]int{}}
	var all []setID
	for set := range setCount {
		if all = append(all, set); set.remembers() {
			content.Counts[e.sets[set].Name] = mostClients
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := e.reading(e.kernel, content).digest(t.Context(), false, all)
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; err != nil || took > 1<<20 {
		t.Errorf("%d bytes, %v", took, err)
	}
}

// TestLargeSetsAreAskedFor: a start over a table with large sets reads them by their keys, is in force all the same whatever has changed
// meanwhile and whatever an interrupted sync has left, and a comparison removes what nothing leads to.
func TestLargeSetsAreAskedFor(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	large := 0
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(rt, "family")
		plans := rapid.SliceOfN(plantest.Plans(), 2, 2).Draw(rt, "plans")
		before, after := plans[0], plans[1]
		after.Node, after.Settings = before.Node, before.Settings
		_ = Cleanup()
		first, _ := testEngine(t, f)
		synced(rt, first, before, plan.Everything())
		defer first.forget()
		have := elementsOf(rt, first)
		left := map[id]value{}
		_, want, _ := desired(after, f, first.options)
		for i, v := range want { // Additions before what leads to them, and others from longer ago.
			_, there := have[i]
			switch {
			case there || !slices.Contains([]setID{endpoints, localEndpoints, choices, localChoices}, i.set):
			case rapid.IntRange(0, 9).Draw(rt, "left") == 0:
				left[i] = v
			case rapid.IntRange(0, 9).Draw(rt, "left, and different") == 0:
				left[i] = value{data: string(make([]byte, len(v.data)))}
			}
		}
		for n := range rapid.IntRange(0, 400).Draw(rt, "left, and not wanted") {
			fe := plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: 1}
			left[id{set: endpoints, key: indexed(nameOf(f, fe), uint32(n))}] = value{data: endpointValue(plantest.LargeService(0, n, 1).Endpoints.Cluster[0].Addr)}
			if f == plan.IPv6 {
				clear(left)
			}
		}
		put(rt, first, left)
		maps.Copy(have, left)
		sizes := map[setID]int{}
		for i := range have {
			sizes[i.set]++
		}
		e, r := askingEngine(t, f)
		defer e.forget()
		e.mostListed = 2
		synced(rt, e, after, plan.Everything())
		for _, set := range []setID{endpoints, localEndpoints, choices, localChoices, stickyEndpoints, localStickyEndpoints} {
			if sizes[set] > e.mostListed {
				if large++; r.listed[e.sets[set].Name] > 0 {
					rt.Fatalf("set %s, of %d elements, is listed", e.sets[set].Name, sizes[set])
				}
			}
		}
		found, again, err := e.CompareBeside(ctx)
		if again || err != nil {
			rt.Fatalf("a comparison: %t, %v", again, err)
		}
		for _, d := range found {
			if d.State != drift.Unexpected {
				rt.Fatalf("a comparison after the start found %v", d)
			}
		}
		holds(rt, e, after)
		comparisonFindsNothing(rt, e)
		syncFindsNothing(rt, e, after)
	})
	if large == 0 {
		t.Error("no set was large")
	}
}

// TestSettingsReadNothing: after a change of a setting, elements are compared with what was written; they are read where something else in
// the table is not as it was.
func TestSettingsReadNothing(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, r := askingEngine(t, plan.IPv4)
	p := plantest.Large(300, 3)
	synced(t, e, p, plan.Everything())
	change := func() {
		p.Settings.MasqueradeAll = !p.Settings.MasqueradeAll
		sp := plantest.LargeService(7, 5000, 4)
		p.Set(sp)
		p.Delete(plantest.LargeService(9, 27, 3).Key)
		clear(r.listed)
		r.asked = 0
	}
	change()
	if err := e.Sync(ctx, p, plan.EveryService()); err != nil || e.Compared || len(r.listed)+r.asked > 0 {
		t.Errorf("elements are read: %v, %d; %v", r.listed, r.asked, err)
	}
	holds(t, e, p)
	change()
	nstest.Exec(t, "nft", "flush chain ip nodeproxy prerouting; delete element ip nodeproxy services { 10.96.0.12 . tcp . 80 }")
	if err := e.Sync(ctx, p, plan.EveryService()); err != nil || !e.Compared || len(e.Found) != 2 || len(r.listed) == 0 {
		t.Errorf("where a chain is not as it was: compared %t, found %v; %v", e.Compared, e.Found, err)
	}
	holds(t, e, p)
}

// noSpareChains makes sure that the table has the chains that are wanted, and no other.
func noSpareChains(t *testing.T, e *engine) {
	t.Helper()
	chains, err := nft.Chains(e.family, names.NFTables)
	if want := len(e.layout.chains()) + len(e.layout.kindChains(e.kinds)); err != nil || len(chains) != want {
		t.Errorf("there are %d chains, want %d: %v", len(chains), want, err)
	}
}

// TestSpareKinds: a comparison removes the kinds that no ServicePort uses any more, without a sync of everything, and later ones may have
// them again.
func TestSpareKinds(t *testing.T) {
	nstest.Enter(t)
	e, r := askingEngine(t, plan.IPv4)
	p := plantest.Large(0, 0)
	for i := range spareKindsMost {
		p.Set(ownTimeout(i))
	}
	synced(t, e, p, plan.Everything())
	gone := plan.Keys{}
	for _, sp := range p.Sorted(plan.IPv4)[1:] {
		p.Delete(sp.Key)
		gone.Add(sp.Key)
	}
	synced(t, e, p, plan.Only(gone))
	clear(r.listed)
	for range 2 {
		comparisonFindsNothing(t, e)
		if len(e.kinds) > 5 || len(r.listed) > 0 {
			t.Errorf("%d kinds are left, and syncs have listed %v", len(e.kinds), r.listed)
		}
	}
	noSpareChains(t, e)
	p.Set(ownTimeout(8))
	synced(t, e, p, plan.Only(plan.Keys{ownTimeout(8).Key: {}}))
	holds(t, e, p)
	syncFindsNothing(t, e, p)
}

// TestSpareKindsInUse: chains that the kernel considers in use when a comparison wants to remove them, as kernels before 6.2 do for a while, are
// removed with those that are spare next.
func TestSpareKindsInUse(t *testing.T) {
	nstest.Enter(t)
	e, k := testEngine(t, plan.IPv4)
	p := plantest.Large(1, 1)
	synced(t, e, p, plan.Everything())
	for round := range 3 {
		changed := plan.Keys{}
		for i := range spareKindsMost {
			sp := ownTimeout(1 + i + round*spareKindsMost/2) // Half of them are as in the round before.
			p.Set(sp)
			changed.Add(sp.Key)
		}
		synced(t, e, p, plan.Only(changed))
		for key := range changed {
			p.Delete(key)
		}
		synced(t, e, p, plan.Only(changed))
		if before := k.commits; round < 2 {
			k.fail = func(commit int) error {
				if commit > before+1 { // The elements go first.
					return unix.EBUSY
				}
				return nil
			}
		}
		comparisonFindsNothing(t, e)
		k.fail = nil
	}
	noSpareChains(t, e)
	if len(e.leftover) > 0 {
		t.Errorf("left over are %v, which %v lead to", e.leftover, e.spareKinds)
	}
	holds(t, e, p)
}

// TestSpareKindsOfRefused: the kinds that a refused ServicePort has kept go too, once it is not refused any more.
func TestSpareKindsOfRefused(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, s, _ := faultyEngine(t, plan.IPv4)
	p := plantest.Large(1, 1)
	sp := ownTimeout(200)
	p.Set(sp)
	synced(t, e, p, plan.Everything())
	wish := ownTimeout(201)
	wish.Key, wish.Frontends = sp.Key, sp.Frontends
	p.Set(wish)
	s.refuse(unix.EINVAL, func(set, _ string) bool { return set == e.sets[stickyEndpoints].Name })
	if err := e.Sync(ctx, p, plan.Everything()); err != nil || len(e.refused) != 1 || len(e.spareKinds) == 0 {
		t.Fatalf("%d refused, with %d kinds: %v", len(e.refused), len(e.spareKinds), err)
	}
	s.refuses = nil
	gone := plan.Keys{}
	for i := range spareKindsMost {
		more := ownTimeout(i)
		p.Set(more)
		gone.Add(more.Key)
	}
	p.Delete(sp.Key)
	gone.Add(sp.Key)
	if err := e.Sync(ctx, p, plan.Only(gone)); err != nil || len(e.refused) > 0 {
		t.Fatalf("%d refused: %v", len(e.refused), err)
	}
	for key := range gone {
		p.Delete(key)
	}
	synced(t, e, p, plan.Only(gone))
	for range 2 {
		comparisonFindsNothing(t, e)
	}
	noSpareChains(t, e)
	if len(e.leftover)+len(e.spareKinds) > 0 {
		t.Errorf("left over are %v, which %v lead to", e.leftover, e.spareKinds)
	}
	holds(t, e, p)
}

// TestManyUnexpected: any number of elements that should not be there is removed beside syncs.
func TestManyUnexpected(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(300, 3)
	ctx := context.Background()
	synced(t, e, p, plan.Everything())
	more := map[id]value{}
	for n := range 3 * mostBeside {
		more[id{set: endpoints, key: indexed(nameOf(plan.IPv4, plantest.LargeService(3, 9, 3).Frontends[0]), uint32(1000+n))}] = value{data: "\x0a\xf4\x01\x02\x00\x50\x00\x00"}
	}
	for _, listed := range []int{mostListed, 2} {
		e.mostListed = listed
		put(t, e, more)
		if found, again, err := e.CompareBeside(ctx); len(found) != len(more) || again || err != nil {
			t.Errorf("found %d of %d, %t, %v", len(found), len(more), again, err)
		}
		holds(t, e, p)
	}
}

// TestOneSocketWillDo: where no second socket can be opened, everything is read over the one that there is.
func TestOneSocketWillDo(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	e.mostListed = 2
	p := plantest.Large(1000, 4)
	tried := 0
	e.reader = func() (kernel, error) {
		tried++
		return nil, unix.EMFILE
	}
	for range 2 {
		syncFindsNothing(t, e, p)
	}
	if tried == 0 {
		t.Error("no second socket was asked for")
	}
	holds(t, e, p)
}

// TestReadingEnds: whoever reads elements stops soon after the end of the context.
func TestReadingEnds(t *testing.T) {
	nstest.Enter(t)
	first, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(3000, 4)
	synced(t, first, p, plan.Everything())
	for _, listed := range []int{mostListed, 2} {
		ctx, cancel := context.WithCancel(context.Background())
		e, r := askingEngine(t, plan.IPv4)
		e.mostListed = listed
		n := 0
		r.during = func() { n++; cancel() }
		if err := e.Sync(ctx, p, plan.Everything()); !errors.Is(err, context.Canceled) || n > 3 {
			t.Errorf("listed up to %d: %v after reading %d times", listed, err, n)
		}
		read := 0
		if err := e.counters(ctx, []string{"", "", ""}, func(nft.Element) { read++ }); !errors.Is(err, context.Canceled) || read > 1 {
			t.Errorf("counters: %d read, %v", read, err)
		}
	}
}

// TestCountersByKey: the counters of many frontends are those that a listing has.
func TestCountersByKey(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(2000, 1)
	ctx := context.Background()
	synced(t, e, p, plan.Everything())
	var keys []string
	for _, sp := range p.Sorted(plan.IPv4) {
		keys = append(keys, nameOf(plan.IPv4, sp.Frontends[0]))
	}
	asked := append(keys, nameOf(plan.IPv4, plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: 1}))
	read := func() string {
		t.Helper()
		// While the kernel moves the elements of a map that has grown to a larger table, a listing may have some twice, and lack others.
		for end := time.Now().Add(3 * time.Minute); ; {
			var list []nft.Element
			err := e.counters(ctx, asked, func(el nft.Element) { list = append(list, el) })
			byKey := func(a, b nft.Element) int { return compareIDs(id{key: a.Key}, id{key: b.Key}) }
			slices.SortFunc(list, byKey)
			list = slices.CompactFunc(list, func(a, b nft.Element) bool { return byKey(a, b) == 0 })
			switch {
			case err == nil && len(list) == len(keys):
				return fmt.Sprint(list)
			case err != nil || time.Now().After(end):
				t.Fatalf("%d of %d: %v", len(list), len(keys), err)
			}
		}
	}
	all := read()
	e.mostListed = 2
	if got := read(); got != all {
		t.Errorf("by key: %s, listed: %s", got, all)
	}
}

// TestUnreadIsMet: what an interrupted sync has left, and no start has read, is in the way of no change, until a comparison has removed it.
func TestUnreadIsMet(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	sticky := plantest.LargeService(3, 9, 5)
	sticky.Affinity = time.Hour
	for _, grown := range []*plan.ServicePort{plantest.LargeService(3, 9, 5), sticky} {
		p := plantest.Large(300, 3)
		before := plantest.LargeService(3, 9, 3)
		before.Affinity = grown.Affinity
		other := plantest.LargeService(4, 12, 3)
		other.Affinity = grown.Affinity
		p.Set(before)
		p.Set(other)
		plain := setsOf(kind{}).plain
		if grown.Affinity > 0 {
			plain = setsOf(kind{}).choice
		}
		name := nameOf(plan.IPv4, grown.Frontends[0])
		change := plan.Only(plan.Keys{grown.Key: {}})
		for _, c := range []plan.Change{change, plan.EveryService()} {
			_ = Cleanup()
			p.Set(before)
			first, _ := testEngine(t, plan.IPv4)
			synced(t, first, p, plan.Everything())
			left := map[id]value{}
			for n := range uint32(10) {
				left[id{set: plain, key: indexed(name, 3+n)}] = value{data: string(make([]byte, formsOf(first.sets)[plain].data))}
			}
			put(t, first, left)
			e, r := askingEngine(t, plan.IPv4)
			e.mostListed = 2
			synced(t, e, p, plan.Everything())
			p.Set(grown)
			if err := e.Sync(ctx, p, c); err != nil {
				t.Errorf("affinity %v, every Service %t: %v", grown.Affinity, c.All(), err)
				continue
			}
			if found, again, err := e.CompareBeside(ctx); len(found) != len(left)-2 || again || err != nil {
				t.Errorf("affinity %v: a comparison found %v, %t, %v", grown.Affinity, found, again, err)
			}
			holds(t, e, p)
			p.Set(before)
			if r.asked = 0; e.Sync(ctx, p, change) != nil || r.asked > 0 {
				t.Errorf("affinity %v: after a comparison, a change asks for %d elements", grown.Affinity, r.asked)
			}
			holds(t, e, p)
		}
	}
}

// TestFoundByKey: where frontends and choices are missing, a sync of everything that reads by key does not call missing what they led to.
func TestFoundByKey(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, _ := testEngine(t, plan.IPv4)
	e.mostListed = 2
	p := plantest.Large(30, 3)
	for i := range 2 {
		sticky := plantest.LargeService(i, 100, 4)
		sticky.Affinity = time.Hour
		p.Set(sticky)
	}
	synced(t, e, p, plan.Everything())
	nstest.Exec(t, "nft", "delete element ip nodeproxy services { 10.96.0.11 . tcp . 80, 10.96.0.12 . tcp . 80 }; "+
		"delete element ip nodeproxy choices { 10.96.0.10 . tcp . 80 . 0:1 }; delete element ip nodeproxy endpoints { 10.96.0.12 . tcp . 80 . 0:2 }")
	if err := e.Sync(ctx, p, plan.Everything()); err != nil || len(e.Found) != 4 {
		t.Errorf("found %d: %v; %v", len(e.Found), e.Found, err)
	}
	holds(t, e, p)
}

// TestSmallSetsAreListed: frontends that another program has written, of kinds with a million endpoints, do not make a start ask for them.
func TestSmallSetsAreListed(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	first, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(30, 3)
	synced(t, first, p, plan.Everything())
	fe := plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: 1}
	put(t, first, map[id]value{{set: services, key: nameOf(plan.IPv4, fe)}: {data: string(native(kind{treatment: internal, count: maxCount}.number()))}})
	e, r := askingEngine(t, plan.IPv4)
	if err := e.Sync(ctx, p, plan.Everything()); err != nil || r.asked > 0 {
		t.Errorf("asked for %d elements: %v", r.asked, err)
	}
	holds(t, e, p)
}

// TestSettingsDuringComparison: where a setting changes, and nothing is read for that, a comparison that is under way finds what another program
// has done, and asks for no sync of everything.
func TestSettingsDuringComparison(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	for _, late := range []bool{false, true} {
		_ = Cleanup()
		e, _ := testEngine(t, plan.IPv4)
		p := plantest.Large(300, 3)
		synced(t, e, p, plan.Everything())
		changes := 0
		change := func() {
			if changes++; changes > 1 {
				return
			}
			p.Settings.MasqueradeAll = true
			if late {
				p.Set(plantest.LargeService(7, 5000, 4))
			}
			if err := e.Sync(ctx, p, plan.EveryService()); err != nil || e.Compared {
				t.Errorf("compared: %t, %v", e.Compared, err)
			}
		}
		if beside(e, change); !late {
			e.reader = func() (kernel, error) {
				k, err := read()
				return beginning{k, change}, err
			}
		}
		nstest.Exec(t, "nft", "delete element ip nodeproxy services { 10.96.0.12 . tcp . 80 }")
		if found, again, err := e.CompareBeside(ctx); len(found) != 1 || again || err != nil {
			t.Errorf("late %t: found %v, %t, %v", late, found, again, err)
		}
		holds(t, e, p)
	}
}

// beginning is a kernel beside which something happens before a table is read.
type beginning struct {
	kernel
	before func()
}

func (k beginning) Read(f plan.Family, table string, sets []nft.Set, chains []nft.Chain) (*nft.Content, error) {
	k.before()
	return k.kernel.Read(f, table, sets, chains)
}
