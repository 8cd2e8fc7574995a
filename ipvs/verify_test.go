package ipvs

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestVerify: what was written of each Service is found as it was, and a virtual server that somebody has removed is missing.
func TestVerify(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f, testOptions)
		p := plantest.Plans().Draw(t, "plan")
		require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
		for _, sp := range p.Services {
			if _, found, err := e.Verify(context.Background(), sp.Key.Service); err != nil || len(found) > 0 {
				t.Fatalf("%s: %s, %v", sp.Key, found.Words(5), err)
			}
		}
		for id := range k.Virtual {
			delete(k.Virtual, id)
		}
		for sp := range e.desired.services.All() {
			written := slices.ContainsFunc(e.desired.build(sp).servers, func(s serverClaim) bool { return e.actual.servers.Get(s.id) != nil })
			_, found, err := e.Verify(context.Background(), sp.Key.Service)
			missing := slices.ContainsFunc(found, func(d drift.Difference) bool { return d.Kind == drift.VirtualServer && d.State == drift.Missing })
			if err != nil || written && !missing {
				t.Fatalf("%s, after ipvsadm -C: %s, %v", sp.Key, found.Words(5), err)
			}
		}
	})
}

// TestVerifyTells: a change is told as a comparison of everything tells it, and a real server that drains is none.
func TestVerifyTells(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	p := large(1)
	sp := p.Sorted(plan.IPv4)[0]
	k.Connections[sp.All()[1].Addr] = 1
	require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
	next, changed := replaced(p, sp.Key, "10.250.0.1:8080")
	require.NoError(t, e.Sync(t.Context(), next, plan.Only(changed)))
	endpoint := sp.All()[0].Addr
	k.Virtual[serverAt(sp)].RealServers[endpoint] = ipvs.ActualRealServer{RealServer: ipvs.RealServer{Addr: endpoint, Weight: 7}}
	_, found, err := e.Verify(t.Context(), sp.Key.Service)
	want := fmt.Sprintf("real server %s of virtual server %s: weight 7 in place of 1: changed", endpoint, serverAt(sp))
	if err != nil || found.Words(5) != want {
		t.Errorf("%v, %v; want %s", found.Words(5), err, want)
	}
}
