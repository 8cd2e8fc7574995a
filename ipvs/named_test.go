package ipvs

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// fakeCounts counts what there is of a fakeKernel, and calls during before that.
type fakeCounts struct {
	*ipvstest.Kernel
	during func()
}

func (c fakeCounts) Servers() (int, error) { return len(c.Virtual), c.Call("number") }

func (c fakeCounts) Read(each func(id ipvs.ServerID, realServers int)) error {
	if c.during != nil {
		c.during()
	}
	for id, v := range c.Virtual {
		each(id, len(v.RealServers))
	}
	return c.Call("count")
}

// counting is a backend over a kernel with large(3), the virtual servers of which are there in order, and its last report.
func counting(t *testing.T) (b *Backend, e *engine, k *ipvstest.Kernel, p *plan.Plan, ids []ipvs.ServerID, last *drift.Report) {
	e, k = fakeEngine(plan.IPv4, testOptions)
	e.exclude = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	b, p, last = &Backend{}, large(3), &drift.Report{}
	b.Engines, b.Compared = []*engine{e}, func(r drift.Report) { *last = r }
	require.Empty(t, b.countAll(fakeCounts{k, nil}, true), "nothing is known, and the next sync compares everything")
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	return b, e, k, p, slices.SortedFunc(maps.Keys(k.Virtual), compareServers), last
}

// TestCount: what another program adds or removes is found by counting and is repaired, and nothing else is looked at. A virtual server
// that belongs to another program is not touched. Whatever only everything shows leads to a comparison of everything.
func TestCount(t *testing.T) {
	t.Parallel()
	b, e, k, p, ids, last := counting(t)
	c, want := fakeCounts{k, nil}, k.Text()
	for _, f := range faults {
		if !strings.HasSuffix(f.name, "removed") && !strings.HasSuffix(f.name, "added") || strings.Contains(f.name, "address") {
			continue // Numbers do not show it, or others notice it.
		}
		f.do(k, ids[0])
		*last = drift.Report{}
		why := b.countAll(c, true)
		if strings.Contains(f.want, "KUBE-IPVS-IPS") {
			require.NotEmpty(t, why)
			require.False(t, b.Compare(t.Context()))
		} else if why != "" || len(last.Found) != 1 || !strings.Contains(last.Found.Words(1), f.want) {
			t.Errorf("%s: %q, found %s; want %s", f.name, why, last.Found.Words(5), f.want)
		}
		if k.Text() != want {
			t.Errorf("%s: it is not as before:\n%s\nwant\n%s", f.name, k.Text(), want)
		}
	}
	foreign := *k.Virtual[ids[0]]
	foreign.ID.Addr = netip.MustParseAddr("192.0.2.1")
	k.Virtual[foreign.ID] = &foreign
	k.Calls, *last = nil, drift.Report{}
	if why := b.countAll(c, true); why != "" || len(last.Found) > 0 || !slices.Equal(k.Calls, []string{"number", "count"}) {
		t.Errorf("another's virtual server: %q, found %s, calls %q", why, last.Found.Words(5), k.Calls)
	}
	delete(k.Virtual, ids[0]) // As many as before.
	if why := b.countAll(c, true); why != "" || len(last.Found) != 1 {
		t.Errorf("another's virtual server in the place of ours: %q, found %s", why, last.Found.Words(5))
	}
	delete(k.Set, "KUBE-CLUSTER-IP")
	if b.countAll(c, true) == "" {
		t.Error("a set is gone, and not everything is compared")
	}
	p.Partial = true
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	delete(k.Virtual, ids[0])
	if b.countAll(c, true) == "" {
		t.Error("the plan is partial, and not everything is compared")
	}
}

// TestCountFew: numbers that the kernel has at hand show missing virtual servers and entries. Real servers are counted only where those
// do not agree, and a virtual server of another program has them counted once. Sets that should be empty are not looked at.
func TestCountFew(t *testing.T) {
	t.Parallel()
	b, _, k, _, ids, last := counting(t)
	c, want := fakeCounts{k, nil}, k.Text()
	few := func(what string, found int, calls ...string) {
		t.Helper()
		k.Calls, *last = nil, drift.Report{}
		why := b.countAll(c, false)
		if why != "" || len(last.Found) != found || !slices.Equal(k.Calls[:min(len(calls), len(k.Calls))], calls) {
			t.Errorf("%s: %q, found %s, calls %q, want %q first", what, why, last.Found.Words(5), k.Calls, calls)
		}
	}
	few("nothing", 0, "number")
	require.Len(t, k.Calls, 1)
	delete(k.Virtual, ids[0])
	few("a virtual server removed", 1, "number", "count", "count")
	clear(k.Set["KUBE-CLUSTER-IP"])
	few("a set emptied", 3, "number")
	foreign := *k.Virtual[ids[0]]
	foreign.ID.Addr = netip.MustParseAddr("192.0.2.1")
	k.Virtual[foreign.ID] = &foreign
	few("another's virtual server", 0, "number", "count")
	few("another's virtual server again", 0, "number")
	require.Len(t, k.Calls, 1)
	delete(k.Virtual, ids[0])
	few("a virtual server removed beside another's", 1, "number", "count", "count")
	delete(k.Virtual, foreign.ID)
	few("another's virtual server removed", 0, "number", "count")
	require.Equal(t, want, k.Text())
	delete(k.Virtual[ids[0]].RealServers, firstOf(k, ids[0]).Addr)
	few("a real server removed", 0, "number")
	none := ipset.Entry{Addr: ids[0].Addr, Protocol: plan.UDP, Port: ids[0].Port}
	k.Set["KUBE-NO-ENDPOINTS"][none] = none
	few("an entry added to a set that should have none", 0, "number")
	require.Empty(t, b.countAll(c, true))
	require.Equal(t, want, k.Text())
}

// TestLooks: what takes long is looked at less often, and to count all puts off to count few.
func TestLooks(t *testing.T) {
	t.Parallel()
	b, _, k, _, _, _ := counting(t)
	looks := b.looks(fakeCounts{k, nil})
	all, few := looks[0], looks[1]
	all.cost, all.average = 100*time.Second, 2
	begin := time.Now()
	if why := all.once(cpuTime); why != "" || all.next.Before(begin.Add(49*all.share*time.Second)) || few.next.Before(begin.Add(countInterval)) {
		t.Errorf("%q; again in %v, or few in %v", why, all.next.Sub(begin), few.next.Sub(begin))
	}
	if why := few.once(cpuTime); why != "" || few.next.Before(begin.Add(countInterval)) {
		t.Errorf("%q; few again in %v", why, few.next.Sub(begin))
	}
}

// TestCountFails: after an error nothing is known, and everything is compared.
func TestCountFails(t *testing.T) {
	t.Parallel()
	b, e, k, p, ids, last := counting(t)
	c := fakeCounts{k, nil}
	k.Fail = "count"
	if b.countAll(c, true) == "" {
		t.Error("counting failed, and not everything is compared")
	}
	delete(k.Virtual, ids[0])
	k.Fail = "add server"
	if b.countAll(c, true) == "" || e.desired != nil || !errors.Is(last.Err, ipvstest.ErrRefused) {
		t.Errorf("the repair failed: %+v", *last)
	}
	k.Fail = ""
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	clear(k.Set["KUBE-CLUSTER-IP"])
	beside(e, k, func() { panic("a wrong number") })
	if b.countAll(c, true) == "" || e.desired != nil || len(e.readings) > 0 {
		t.Error("it panicked, and not everything is compared")
	}
}

// inIPv6 is a backend over a kernel with a number of virtual servers of IPv6, and its last report.
func inIPv6(t *testing.T, n int) (b *Backend, e *engine, k *ipvstest.Kernel, p *plan.Plan, last *drift.Report) {
	e, k = fakeEngine(plan.IPv6, testOptions)
	b, p, last = &Backend{}, plan.New(plan.Node{Name: "me"}, plan.Settings{}), &drift.Report{}
	b.Engines, b.Compared = []*engine{e}, func(r drift.Report) { *last = r }
	for i, like := range large(n).Sorted(plan.IPv4) {
		sp := *like
		sp.Key.Family = plan.IPv6
		sp.Frontends = []plan.Frontend{sp.Frontends[0]}
		sp.Frontends[0].Addr = netip.AddrFrom16([16]byte{0xfd, 15: byte(i + 1)})
		sp.Endpoints.Cluster = []plan.Endpoint{{Addr: netip.MustParseAddrPort("[fd00::2]:80")}}
		p.Set(&sp)
	}
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	return b, e, k, p, last
}

// TestCountOfOneFamily: virtual servers of IPv6 are not counted; entries are.
func TestCountOfOneFamily(t *testing.T) {
	t.Parallel()
	b, _, k, _, last := inIPv6(t, 1)
	want := k.Text()
	require.Len(t, k.Set["KUBE-6-CLUSTER-IP"], 1)
	clear(k.Set["KUBE-6-CLUSTER-IP"])
	k.Calls = nil
	why := b.countAll(fakeCounts{k, nil}, true)
	if why != "" || len(last.Found) != 1 || k.Text() != want || slices.Contains(k.Calls, "count") {
		t.Errorf("%q, found %s, calls %q; the kernel holds\n%s", why, last.Found.Words(5), k.Calls, k.Text())
	}
}

// changingServers are changed while one is read.
type changingServers struct {
	ipvstest.Servers
	during func()
}

func (c changingServers) Get(id ipvs.ServerID) (*ipvs.ActualServer, error) {
	is, err := c.Servers.Get(id)
	c.during()
	return is, err
}

// TestSample: if all virtual servers of IPv6 are changed, one look at some of them shows that, and if one is changed, some look does.
// What a sync changes meanwhile is no drift, and nothing is known after one that has failed.
func TestSample(t *testing.T) {
	t.Parallel()
	b, e, k, p, _ := inIPv6(t, 20)
	c, want := fakeCounts{k, nil}, k.Text()
	for _, f := range faults[:6] {
		if strings.HasSuffix(f.name, "added") {
			continue
		}
		ids := slices.Collect(maps.Keys(k.Virtual))
		for _, id := range ids {
			f.do(k, id)
		}
		if b.countAll(c, false) == "" {
			t.Errorf("%s, all: nothing is suspected", f.name)
		}
		require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
		require.Empty(t, b.countAll(c, false))
		f.do(k, ids[0])
		for n := 0; b.countAll(c, false) == ""; n++ {
			require.Less(t, n, 1000, f.name) // one of five looks shows it
		}
		require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
		require.Equal(t, want, k.Text())
	}
	e.machine.servers = changingServers{ipvstest.Servers{Kernel: k}, func() {
		keys := plan.Keys{}
		for _, sp := range p.Sorted(plan.IPv6) {
			next := *sp
			next.Endpoints.Cluster = []plan.Endpoint{{Addr: netip.MustParseAddrPort("[fd00::3]:80")}}
			p.Set(&next)
			keys[sp.Key] = struct{}{}
		}
		require.NoError(t, e.Sync(t.Context(), p, plan.Only(keys)))
	}}
	require.Empty(t, b.countAll(c, false))
	require.NotEqual(t, want, k.Text())
	e.desired = nil
	clear(k.Virtual)
	require.Empty(t, b.countAll(c, false))
}

// TestCountDuringChanges: what a sync changes while numbers, or a set, are read is no drift.
func TestCountDuringChanges(t *testing.T) {
	t.Parallel()
	b, e, k, p, ids, last := counting(t)
	gone := p.Sorted(plan.IPv4)
	remove := func() {
		key := gone[0].Key
		gone = gone[1:]
		p.Delete(key)
		require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{key: {}})))
	}
	if why := b.countAll(fakeCounts{k, remove}, true); why != "" || len(gone) != 2 || len(last.Found) > 0 { // It reads no second time.
		t.Errorf("%q, found %s; %d are left", why, last.Found.Words(5), len(gone))
	}
	for addr := range k.Virtual[ids[2]].RealServers { // Another program removes one.
		delete(k.Virtual[ids[2]].RealServers, addr)
		break
	}
	reads := 0
	second := func() {
		if reads++; reads == 2 {
			remove()
		}
	}
	if why := b.countAll(fakeCounts{k, second}, true); why != "" || len(gone) != 1 || len(last.Found) > 0 {
		t.Errorf("%q, found %s; %d are left", why, last.Found.Words(5), len(gone))
	}
	if why := b.countAll(fakeCounts{k, nil}, true); why != "" || len(last.Found) != 1 {
		t.Errorf("%q, found %s; want what another program has removed", why, last.Found.Words(5))
	}
	other := ipset.Entry{Addr: netip.MustParseAddr("192.0.2.5"), Protocol: plan.TCP, Port: 80}
	k.Set["KUBE-CLUSTER-IP"][other] = other
	n := 0
	beside(e, k, func() {
		if n++; n == 2 { // The first part has been read.
			remove()
		}
	})
	why := b.countAll(fakeCounts{k, nil}, true)
	if why != "" || len(last.Found) != 1 || len(k.Set["KUBE-CLUSTER-IP"]) != 0 || len(e.readings) > 0 {
		t.Errorf("%q, found %s, entries %v", why, last.Found.Words(5), k.Set["KUBE-CLUSTER-IP"])
	}
	if k.Virtual[ids[2]] != nil {
		t.Error("what a sync has removed is there again")
	}
}
