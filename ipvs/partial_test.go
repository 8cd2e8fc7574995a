package ipvs

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestPartialPlan: a start that does not know all Services whose objects are in the kernel changes nothing; what is learnt takes
// effect, also where a Service is another one by then; and once all are known the kernel holds what it would have held.
func TestPartialPlan(t *testing.T) {
	t.Parallel()
	unknown := 0
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		all := plantest.Plans().Draw(t, "plan")
		first, k := fakeEngine(f, testOptions)
		require.NoError(t, first.Sync(context.Background(), all, plan.Everything()))
		before := k.Text()
		some := plan.New(all.Node, all.Settings)
		some.Partial = true
		known := map[plan.Service]bool{}
		missing := plan.Keys{}
		for _, sp := range all.Sorted(f) {
			if _, drawn := known[sp.Key.Service]; !drawn {
				known[sp.Key.Service] = rapid.Bool().Draw(t, fmt.Sprint("known ", sp.Key.Service))
			}
			if known[sp.Key.Service] {
				some.Set(sp)
			} else {
				missing.Add(sp.Key)
			}
		}
		unknown += len(missing)
		e := engineOver(k, testOptions)
		for range 2 {
			require.NoError(t, e.Sync(context.Background(), some, plan.Everything()))
			require.NoError(t, e.drain(time.Now()))
			if k.Text() != before {
				t.Fatalf("the kernel holds\n%s\ninstead of\n%s", k.Text(), before)
			}
		}
		if len(e.Found) > 0 {
			t.Fatalf("found to repair: %+v", e.Found)
		}
		for key := range missing {
			some.Set(all.Services[key])
		}
		require.NoError(t, e.Sync(context.Background(), some, plan.Only(missing)))
		require.NoError(t, e.drain(time.Now()))
		if k.Text() != before {
			t.Fatalf("when all is known again, the kernel holds\n%s\ninstead of\n%s", k.Text(), before)
		}
		after := plantest.Plans().Draw(t, "another plan")
		after.Node, after.Settings = all.Node, all.Settings
		require.NoError(t, e.Sync(context.Background(), after, plan.Everything()))
		require.NoError(t, e.drain(time.Now()))
		fresh, want := fakeEngine(f, testOptions)
		require.NoError(t, fresh.Sync(context.Background(), after, plan.Everything()))
		if k.Text() != want.Text() {
			t.Fatalf("when all is known, the kernel holds\n%s\ninstead of\n%s", k.Text(), want.Text())
		}
	})
	if unknown == 0 {
		t.Error("no Service was unknown")
	}
}

// TestPartialOtherMode: while not everything is known, another mode's rules are not replaced.
func TestPartialOtherMode(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	k.OtherMode = true
	p := large(3)
	p.Partial = true
	before := k.Text()
	if err := e.Sync(context.Background(), p, plan.Everything()); err == nil {
		t.Error("no error")
	}
	if k.Text() != before {
		t.Errorf("the kernel holds\n%s\ninstead of\n%s", k.Text(), before)
	}
	p.Partial = false
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
}

// TestDrainOfUnknown: a real server that drained before the start is removed in the end, also of a virtual server that is left as it is.
func TestDrainOfUnknown(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	require.NoError(t, e.Sync(t.Context(), large(1), plan.Everything()))
	id := slices.Collect(maps.Keys(k.Virtual))[0]
	d := firstOf(k, id)
	d.Weight = 0
	k.Virtual[id].RealServers[d.Addr] = d
	k.Connections[d.Addr] = 1
	next, unknown := engineOver(k, testOptions), plan.New(plan.Node{Name: "me"}, plan.Settings{})
	unknown.Partial = true
	require.NoError(t, next.Sync(t.Context(), unknown, plan.Everything()))
	for _, n := range []int{2, 1} {
		require.NoError(t, next.drain(time.Now()))
		require.Len(t, k.Virtual[id].RealServers, n)
		clear(k.Connections)
		require.NoError(t, next.drain(time.Now()))
	}
}
