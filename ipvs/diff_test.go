package ipvs

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// diffOf is what differs between a fake kernel, whose interface is up and whose settings are right, and a plan.
func diffOf(t rapid.TB, e *engine, p *plan.Plan) []drift.Hunk {
	t.Helper()
	have, err := e.machine.objects(e.family, e.options, e.exclude)
	require.NoError(t, err)
	o := e.options
	o.Host, err = e.machine.host(e.family)
	require.NoError(t, err)
	want, err := Planned(p, e.family, Config{Options: o})
	require.NoError(t, err)
	have.device()
	for l := range want.lines {
		if l.kind == drift.Sysctl {
			have.lines[l] = nil
		}
	}
	return Diff(e.family, have, want)
}

// TestDiff: after each sync the kernel does not differ from the plan, however it came there, even while real servers drain; before it,
// there is something to show where the sync writes something.
func TestDiff(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f, testOptions)
		plans := rapid.SliceOfN(plantest.Plans(), 2, 4).Draw(t, "plans")
		for i, p := range plans {
			p.Node, p.Settings = plans[0].Node, plans[0].Settings
			predicted := diffOf(t, e, p)
			before := k.Text()
			require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
			if len(predicted) == 0 && k.Text() != before {
				t.Fatalf("step %d: nothing was to change, and the sync made of\n%s\nthis:\n%s", i, before, k.Text())
			}
			if left := diffOf(t, e, p); len(left) > 0 {
				t.Fatalf("step %d: after the sync, this differs: %q", i, left)
			}
			if rapid.Bool().Draw(t, "drained") {
				require.NoError(t, e.drain(time.Now()))
			}
			if left := diffOf(t, e, p); len(left) > 0 {
				t.Fatalf("step %d: once all has drained, this differs: %q", i, left)
			}
		}
	})
}

// TestDiffOfDamage: what other programs change is shown by the lines that are missing or too many, with the Service that they are for.
func TestDiffOfDamage(t *testing.T) {
	t.Parallel()
	p := webPlan(plan.Cluster, plan.TCP)
	e, k := fakeEngine(plan.IPv4, testOptions)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	var id ipvs.ServerID
	for i, v := range k.Virtual {
		if i.Mark == 0 && len(v.RealServers) > 0 {
			id = i
		}
	}
	var addr netip.AddrPort
	for a := range k.Virtual[id].RealServers {
		addr = a
	}
	real := k.Virtual[id].RealServers[addr]
	delete(k.Virtual[id].RealServers, addr)
	check := func(object string, have, want []string) {
		t.Helper()
		hunks := diffOf(t, e, p)
		if len(hunks) != 1 || hunks[0].Object != object || len(hunks[0].Services) != 1 && want != nil {
			t.Fatalf("%q", hunks)
		}
		var removed, added []string
		hunks[0].Differing(func(line string) {
			if slices.Contains(hunks[0].Want, line) {
				added = append(added, line)
			} else {
				removed = append(removed, line)
			}
		})
		if !slices.Equal(removed, have) || !slices.Equal(added, want) {
			t.Errorf("removed %q, added %q", removed, added)
		}
	}
	line := "-a " + serverArgs(id) + " -r " + addr.String() + " -m -w "
	check(serverArgs(id), nil, []string{line + "1"})
	other := real
	other.Weight = 7
	k.Virtual[id].RealServers[addr] = other
	check(serverArgs(id), []string{line + "7"}, []string{line + "1"})
	k.Virtual[id].RealServers[addr] = real

	set := setOf(setClusterIP, plan.IPv4)
	entry := ipset.Entry{Addr: id.Addr, Protocol: plan.TCP, Port: 4711}
	require.NoError(t, ipvstest.Sets{Kernel: k}.Add(set, []ipset.Entry{entry}))
	check(set.Name, []string{"add " + set.Name + " " + entry.Text(set)}, nil)
	require.NoError(t, ipvstest.Sets{Kernel: k}.Remove(set, []ipset.Entry{entry}))
	if hunks := diffOf(t, e, p); len(hunks) > 0 {
		t.Errorf("everything is repaired: %q", hunks)
	}
	if hunks := Diff(plan.IPv4, nil, nil); len(hunks) > 0 {
		t.Errorf("nothing from nothing: %q", hunks)
	}
}
