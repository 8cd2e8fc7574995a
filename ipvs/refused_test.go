package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// picky are virtual servers of a kernel that does not take some changes.
type picky struct {
	ipvstest.Servers
	refuses func(ipvs.Op) error
	changes int
}

func (k *picky) Apply(ops []ipvs.Op) []error {
	var errs []error
	for _, op := range ops {
		k.changes++
		err := k.refuses(op)
		if err == nil {
			err = k.Do(op)
		}
		if err != nil && k.Virtual[op.Server.ID] == nil && op.Kind == ipvs.AddRealServer {
			err = unix.ESRCH
		}
		errs = append(errs, err)
	}
	return errs
}

// TestNoneAdded: real servers stay as long as none of those that are to take their place could be added.
func TestNoneAdded(t *testing.T) {
	p := plantest.Large(20, 3)
	sp := p.Sorted(plan.IPv4)[7]
	e, k := fakeEngine(plan.IPv4, Options{})
	fails, servers := true, &picky{Servers: ipvstest.Servers{Kernel: k}}
	servers.refuses = func(op ipvs.Op) error {
		if fails && op.Kind == ipvs.AddRealServer && op.Server.ID.Addr == sp.Frontends[0].Addr {
			return unix.ENOMEM
		}
		return nil
	}
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	e.machine.servers = servers
	inUse := func() (out []netip.AddrPort) {
		for id, v := range k.Virtual {
			for a, d := range v.RealServers {
				if id.Addr == sp.Frontends[0].Addr && d.Weight > 0 {
					out = append(out, a)
				}
			}
		}
		slices.SortFunc(out, netip.AddrPort.Compare)
		return out
	}
	was := inUse()
	changed := *plantest.LargeService(7, 5000, 3)
	changed.Key, changed.Frontends = sp.Key, sp.Frontends
	p.Set(&changed)
	if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}})); err == nil || len(was) == 0 || !slices.Equal(inUse(), was) {
		t.Errorf("%v: %v are in use, and were %v", err, inUse(), was)
	}
	fails = false
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	if now := inUse(); len(now) != len(changed.All()) || slices.ContainsFunc(now, func(a netip.AddrPort) bool { return slices.Contains(was, a) }) {
		t.Errorf("later, %v are in use, and were %v", now, was)
	}
}

// TestServersGone: virtual servers that others have removed are made again, with all of their real servers, by the sync that changes them: where
// real servers are added, or only drain from then on, or another scheduler is asked for, and where there are more than are changed at a time.
func TestServersGone(t *testing.T) {
	endpoints := func(n int) func(*plan.ServicePort, int) {
		return func(sp *plan.ServicePort, i int) { sp.Cluster = plantest.LargeService(i, 3*i, n).Cluster }
	}
	for _, c := range []struct {
		name     string
		services int
		change   func(*plan.ServicePort, int)
	}{
		{"real servers are added", 20, endpoints(5)},
		{"real servers are removed, and drain", 20, endpoints(1)},
		{"another scheduler", 20, func(sp *plan.ServicePort, _ int) { sp.Scheduler = plan.Scheduler{Name: "sh"} }},
		{"many", 700, endpoints(4)},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := plantest.Large(c.services, 3)
			e, k := fakeEngine(plan.IPv4, Options{})
			k.Exact = false
			require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
			clear(k.Virtual)
			keys := plan.Keys{}
			for i, sp := range p.Sorted(plan.IPv4) {
				changed := *sp
				c.change(&changed, i)
				p.Set(&changed)
				keys.Add(sp.Key)
			}
			require.NoError(t, e.Sync(t.Context(), p, plan.Only(keys)))
			require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
			require.Empty(t, e.Found.Words(5))
		})
	}
}

// TestRefusedServer: a virtual server, or a real server, that the kernel refuses is reported, and is not a failure: all others are
// there, no difference is found, and it is there once the kernel takes it.
func TestRefusedServer(t *testing.T) {
	for _, kind := range []ipvs.OpKind{ipvs.AddServer, ipvs.AddRealServer} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			p := plantest.Large(20, 3)
			bad := p.Sorted(plan.IPv4)[7]
			want, _ := fakeEngine(plan.IPv4, Options{})
			require.NoError(t, want.Sync(t.Context(), p, plan.Everything()))
			e, k := fakeEngine(plan.IPv4, Options{})
			refuse := error(unix.ENOENT)
			servers := &picky{Servers: ipvstest.Servers{Kernel: k}}
			servers.refuses = func(op ipvs.Op) error {
				if refuse != nil && op.Kind == kind && op.Server.ID.Addr == bad.Frontends[0].Addr &&
					(kind == ipvs.AddServer || op.RealServer.Addr == bad.All()[1].Addr) {
					return refuse
				}
				return nil
			}
			e.machine.servers = servers
			var reported [][]plan.Refusal
			e.onRefused = func(_ plan.Family, list []plan.Refusal) { reported = append(reported, list) }
			for range 3 {
				if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || e.desired == nil || len(e.Found) > 0 {
					t.Errorf("%v, found %v", err, e.Found)
				}
			}
			kept := kind == ipvs.AddRealServer
			if len(reported) != 1 || len(reported[0]) != 1 || reported[0][0].Key != bad.Key || reported[0][0].Kept != kept {
				t.Errorf("reported %v, want %s", reported, bad.Key)
			}
			missing := want.actual.servers.Len() - e.actual.servers.Len()
			if missing != map[bool]int{true: 0, false: 1}[kept] {
				t.Errorf("%d virtual servers are missing", missing)
			}
			// Changes of others try nothing of it again.
			other := plantest.LargeService(3, 5000, 3)
			p.Set(other)
			require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{other.Key: {}})))
			refuse = nil
			if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || len(e.Found) > 0 || len(e.refused) > 0 {
				t.Errorf("%v, found %v, refused %v", err, e.Found, e.refused)
			}
			fresh, whole := fakeEngine(plan.IPv4, Options{})
			require.NoError(t, fresh.Sync(t.Context(), p, plan.Everything()))
			for v := range fresh.actual.servers.All() {
				if have := e.actual.servers.Get(v.ID); have == nil || len(have.realServers) < len(v.realServers) {
					t.Errorf("%s is not whole at the end", v.ID)
				}
			}
			if len(whole.Virtual) != len(k.Virtual) || len(reported) != 2 || len(reported[1]) != 0 {
				t.Errorf("%d virtual servers, reported %v", len(k.Virtual), reported)
			}
			// What concerns more than one Service is a failure, as before.
			refuse = unix.ENOMEM
			again := bad.Key
			p.Delete(again)
			require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{again: {}})))
			p.Set(bad)
			if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{again: {}})); err == nil {
				t.Error("no memory is taken for a refusal")
			}
		})
	}
}

// TestRefusedUpdate: a change of a virtual server, or of a real server's weight, that the kernel refuses is reported, and leaves the
// ServicePort what it had; others change, no comparison finds a difference, and the change is made once the kernel takes it.
func TestRefusedUpdate(t *testing.T) {
	for _, kind := range []ipvs.OpKind{ipvs.UpdateServer, ipvs.UpdateRealServer} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			p := plantest.Large(20, 3)
			e, k := fakeEngine(plan.IPv4, Options{})
			require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
			before := k.Text()
			was := p.Sorted(plan.IPv4)[7]
			bad := *was
			bad.Scheduler = plan.Scheduler{Name: "wrr"}
			if kind == ipvs.UpdateRealServer {
				bad.Scheduler = was.Scheduler
				bad.Cluster = slices.Clone(was.Cluster)
				bad.Cluster[1].Weight = 5
			}
			refuse := true
			servers := &picky{Servers: ipvstest.Servers{Kernel: k}}
			servers.refuses = func(op ipvs.Op) error {
				if refuse && op.Kind == kind && op.Server.ID.Addr == was.Frontends[0].Addr {
					return unix.ENOENT
				}
				return nil
			}
			e.machine.servers = servers
			var reported [][]plan.Refusal
			e.onRefused = func(_ plan.Family, list []plan.Refusal) { reported = append(reported, list) }
			p.Set(&bad)
			for _, change := range []plan.Change{plan.Only(plan.Keys{bad.Key: {}}), plan.Everything(), plan.Everything()} {
				if err := e.Sync(t.Context(), p, change); err != nil || e.desired == nil || len(e.Found) > 0 {
					t.Errorf("changed %v: %v, found %v", change, err, e.Found)
				}
				if now := k.Text(); now != before {
					t.Errorf("the kernel holds\n%s\nwant\n%s", now, before)
				}
			}
			if len(reported) != 1 || len(reported[0]) != 1 || reported[0][0].Key != bad.Key || !reported[0][0].Kept {
				t.Errorf("reported %v, want %s", reported, bad.Key)
			}
			servers.changes = 0
			other := plantest.LargeService(3, 5000, 3)
			p.Set(other)
			if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{other.Key: {}})); err != nil || servers.changes != 6 || len(e.refused) != 1 {
				t.Errorf("another ServicePort: %v, %d changes, refused %v", err, servers.changes, e.refused)
			}
			refuse = false
			if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || len(e.Found) > 0 || len(e.refused) > 0 {
				t.Errorf("no longer refused: %v, found %v, refused %v", err, e.Found, e.refused)
			}
			fresh, want := fakeEngine(plan.IPv4, Options{})
			require.NoError(t, fresh.Sync(t.Context(), p, plan.Everything()))
			if fresh.actual.servers.Get(serverAt(was)).Server != e.actual.servers.Get(serverAt(was)).Server ||
				want.Virtual[serverAt(was)].RealServers[was.All()[1].Addr] != k.Virtual[serverAt(was)].RealServers[was.All()[1].Addr] {
				t.Errorf("at the end the kernel holds %+v, want %+v", k.Virtual[serverAt(was)], want.Virtual[serverAt(was)])
			}
			if len(reported) != 2 || len(reported[1]) != 0 {
				t.Errorf("reported %v", reported)
			}
		})
	}
}

// serverAt is the virtual server for the first frontend of a ServicePort.
func serverAt(sp *plan.ServicePort) ipvs.ServerID {
	f := sp.Frontends[0]
	return ipvs.ServerID{Family: sp.Key.Family, Protocol: f.Protocol, Addr: f.Addr, Port: f.Port}
}

// pickySets are sets of a kernel that refuses some entries.
type pickySets struct {
	ipvstest.Sets
	refuses func(ipset.Entry) bool
	all     error // is returned for all entries
}

func (k *pickySets) Add(s ipset.Set, list []ipset.Entry) error {
	if k.all != nil {
		return k.all
	}
	var errs []error
	var taken []ipset.Entry
	for _, entry := range list {
		if k.refuses(entry) {
			errs = append(errs, &ipset.EntryError{Set: s, Entry: entry, Err: unix.EINVAL})
		} else {
			taken = append(taken, entry)
		}
	}
	return errors.Join(append(errs, k.Sets.Add(s, taken))...)
}

// TestRefusedSetEntry: entries of sets that the kernel refuses are reported of the ServicePort that asks for them; all others are
// there, no comparison finds a difference, and the entries are there once the kernel takes them.
func TestRefusedSetEntry(t *testing.T) {
	for _, vips := range []VIPs{Addresses, Routes} { // Addresses are entries of a set too.
		p := plantest.Large(20, 3)
		bad := plantest.LargeService(7, 21, 3)
		e, k := fakeEngine(plan.IPv4, Options{VIPs: vips})
		refuse := true
		sets := &pickySets{Sets: ipvstest.Sets{Kernel: k}}
		sets.refuses = func(entry ipset.Entry) bool { return refuse && entry.Addr == bad.Frontends[0].Addr }
		e.machine.sets = sets
		var reported [][]plan.Refusal
		e.onRefused = func(_ plan.Family, list []plan.Refusal) { reported = append(reported, list) }
		for range 3 {
			if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || e.desired == nil || len(e.Found) > 0 {
				t.Errorf("%v, found %v", err, e.Found)
			}
		}
		if len(reported) != 1 || len(reported[0]) != 1 || reported[0][0].Key != bad.Key || reported[0][0].Err == nil {
			t.Errorf("reported %v, want %s", reported, bad.Key)
		}
		if n := len(k.Set["KUBE-CLUSTER-IP"]); n != 19 || len(k.Virtual) != 20 {
			t.Errorf("%d entries, %d virtual servers", n, len(k.Virtual))
		}
		// A change of the ServicePort itself is made as far as it can be, and one of another one leaves the report as it is.
		changed := plantest.LargeService(7, 5000, 2)
		other := plantest.LargeService(3, 6000, 3)
		for _, sp := range []*plan.ServicePort{changed, other} {
			p.Set(sp)
			if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{sp.Key: {}})); err != nil || len(reported) != 1 {
				t.Errorf("%s: %v, reported %v", sp.Key, err, reported)
			}
			if n := len(k.Virtual[serverAt(sp)].RealServers); n < len(sp.All()) {
				t.Errorf("%s has %d endpoints, want %d", sp.Key, n, len(sp.All()))
			}
		}
		refuse = false
		if err := e.Sync(t.Context(), p, plan.Everything()); err != nil || len(e.Found) > 0 || len(reported) != 2 || len(reported[1]) != 0 {
			t.Errorf("no longer refused: %v, found %v, reported %v", err, e.Found, reported)
		}
		if n := len(k.Set["KUBE-CLUSTER-IP"]); n != 20 || len(e.refusedMembers) > 0 {
			t.Errorf("%d entries, refused %v", n, e.refusedMembers)
		}
		// A refusal ends with the ServicePort.
		refuse = true
		p.Delete(bad.Key)
		require.NoError(t, e.Sync(t.Context(), p, plan.Only(plan.Keys{bad.Key: {}})))
		p.Set(bad)
		if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{bad.Key: {}})); err != nil || len(reported) != 3 || len(reported[2]) != 1 {
			t.Errorf("%v, reported %v", err, reported)
		}
		p.Delete(bad.Key)
		if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{bad.Key: {}})); err != nil || len(reported) != 4 || len(reported[3]) != 0 {
			t.Errorf("%v, reported %v", err, reported)
		}
		// An error that is not of entries is one of the sync.
		sets.all = errors.Join(&ipset.EntryError{Err: unix.EINVAL}, unix.ENOMEM)
		p.Set(bad)
		if err := e.Sync(t.Context(), p, plan.Only(plan.Keys{bad.Key: {}})); err == nil {
			t.Error("no memory is taken for a refusal")
		}
		// So is one of all of many entries.
		sets.all, sets.refuses = nil, func(ipset.Entry) bool { return true }
		fresh, _ := fakeEngine(plan.IPv4, Options{VIPs: vips})
		fresh.machine.sets = sets
		if err := fresh.Sync(t.Context(), plantest.Large(30, 3), plan.Everything()); err == nil {
			t.Error("a kernel that takes no entry at all is in order")
		}
	}
}

// TestManyRefusedServers: however many virtual servers the kernel refuses before it takes one, the fault is theirs; if it takes none, it is not.
func TestManyRefusedServers(t *testing.T) {
	t.Parallel()
	p := plantest.Large(changesAtOnce, 2)
	list := p.Sorted(plan.IPv4)
	slices.SortFunc(list, func(a, b *plan.ServicePort) int { return a.Frontends[0].Compare(b.Frontends[0]) })
	for _, test := range []struct{ refused, want int }{{changesAtOnce / 2, changesAtOnce / 2}, {changesAtOnce, 0}} {
		e, k := fakeEngine(plan.IPv4, Options{})
		var reported []plan.Refusal
		e.onRefused = func(_ plan.Family, list []plan.Refusal) { reported = list }
		last := list[test.refused-1].Frontends[0].Addr
		e.machine.servers = &picky{Servers: ipvstest.Servers{Kernel: k}, refuses: func(op ipvs.Op) error {
			if op.Kind == ipvs.AddServer && op.Server.ID.Addr.Compare(last) <= 0 {
				return unix.ENOENT
			}
			return nil
		}}
		err := e.Sync(t.Context(), p, plan.Everything())
		if taken := test.refused < len(list); taken != (err == nil) || len(reported) != test.want {
			t.Errorf("%d of %d refused: %v, %d are reported, want %d", test.refused, len(list), err, len(reported), test.want)
		}
		if left := e.changes.ops; len(left) > 0 || e.tried.refused != nil {
			t.Errorf("%d of %d refused: %d changes and %d refusals are left", test.refused, len(list), len(left), len(e.tried.refused))
		}
	}
}
