package ipvs

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestDriftWithPendingChanges: where a comparison and a change of the plan come together, the change is no drift; what somebody
// has removed is.
func TestDriftWithPendingChanges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f, testOptions)
		plans := rapid.SliceOfN(plantest.Plans(), 2, 4).Draw(t, "plans")
		for i, p := range plans {
			require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
			if e.Compared != (i > 0) || len(e.Found) > 0 {
				t.Fatalf("step %d: compared %t, found %s", i, e.Compared, e.Found.Words(5))
			}
			if rapid.Bool().Draw(t, "drain") {
				require.NoError(t, e.drain(time.Now()))
			}
		}
		var gone netip.Addr
		for a := range k.Addresses {
			gone = a
		}
		if gone.IsValid() {
			delete(k.Addresses, gone)
		}
		require.NoError(t, e.Sync(context.Background(), plans[0], plan.Everything()))
		if !gone.IsValid() && len(e.Found) > 0 || gone.IsValid() && (len(e.Found) != 1 || e.Found[0].Kind != drift.Address ||
			!strings.Contains(e.Found.Words(1), gone.String())) {
			t.Fatalf("address %s was removed: found %s", gone, e.Found.Words(5))
		}
	})
}

// TestDifferenceValues: a difference has what was written and what is there, whatever of it is printed.
func TestDifferenceValues(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(1)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	id := ipvs.ServerID{}
	for id = range k.Virtual {
		break
	}
	server := k.Virtual[id]
	was := serverOptions(server.Server)
	server.Scheduler, server.Persistence = "sh", time.Hour
	endpoint := p.Sorted(plan.IPv4)[0].Endpoints.Cluster[0].Addr
	server.RealServers[endpoint] = ipvs.ActualRealServer{RealServer: ipvs.RealServer{Addr: endpoint, Weight: 7}}
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	want := drift.Found{
		{Kind: drift.VirtualServer, State: drift.Changed, Object: id.String(), Want: was, Have: "-s sh -p 3600"},
		{Kind: drift.RealServer, State: drift.Changed, Object: endpoint.String() + " of virtual server " + id.String(), Aspect: "weight",
			Want: "1", Have: "7"},
	}
	if !slices.Equal(e.Found, want) {
		t.Errorf("found %#v\nwant  %#v", e.Found, want)
	}
}

// TestNothingIsKnownAfterAnError: what a sync that failed has left is not compared with.
func TestNothingIsKnownAfterAnError(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(3)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	k.Addresses = set.Set[netip.Addr]{}
	k.Fail = "rules"
	if err := e.Sync(context.Background(), p, plan.Everything()); err == nil {
		t.Fatal("the kernel refused the rules, and there was no error")
	}
	k.Fail = ""
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	if e.Compared {
		t.Error("it compared with what it did not know")
	}
}

// TestComparisonKeepsGracePeriod: however often everything is compared, a real server that drains has no more time than it had.
func TestComparisonKeepsGracePeriod(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(1)
	key := p.Sorted(plan.IPv4)[0].Key
	old := p.Services[key].Endpoints.Cluster[1].Addr
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	k.Connections[old] = 3
	gone, changed := replaced(p, key, "10.250.0.1:8080")
	require.NoError(t, e.Sync(context.Background(), gone, plan.Only(changed)))
	var since time.Time
	for v := range e.actual.servers.All() {
		if d, is := v.realServer(old); is {
			d.draining.since = d.draining.since.Add(-time.Minute)
			since = d.draining.since
		}
	}
	require.NoError(t, e.Sync(context.Background(), gone, plan.Everything()))
	for v := range e.actual.servers.All() {
		if d, is := v.realServer(old); is && !d.draining.since.Equal(since) {
			t.Errorf("it drains since %v, want since %v", d.draining.since, since)
		}
	}
	if since.IsZero() {
		t.Fatal("nothing drains")
	}
	require.NoError(t, e.drain(time.Now().Add(testGrace-30*time.Second)))
	if strings.Contains(k.Text(), old.String()) {
		t.Error("it still drains after the grace period")
	}
}

// TestArtifacts: a difference that stays as it is after a comparison that finds none is not real; any other is reported each time.
func TestArtifacts(t *testing.T) {
	t.Parallel()
	p := &prober{}
	for i, step := range []struct {
		by    int
		alike int
		want  bool
	}{
		{0, 1, false},
		{7, 1, true},
		{7, 1, true}, // not compared yet, or the comparison has found it, and here it is again
		{7, 2, false},
		{7, 3, false},
		{8, 3, true}, // something else has changed
		{7, 4, false},
		{0, 5, false},
		{7, 5, true},
		{0, 5, false}, // repaired
		{0, 50, false},
		{7, 50, true}, // the same once more, much later
	} {
		if got := p.differs(ipvs.Fingerprint(step.by), step.alike); got != step.want {
			t.Errorf("step %d: reported: %t, want %t", i, got, step.want)
		}
	}
}
