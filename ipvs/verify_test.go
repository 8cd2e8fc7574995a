package ipvs

import (
	"context"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/kernel/drift"
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
		must(t, e.Sync(context.Background(), p, plan.Everything()))
		for _, sp := range p.Services {
			if _, found, err := e.Verify(context.Background(), sp.Key.Service); err != nil || len(found) > 0 {
				t.Fatalf("%s: %s, %v", sp.Key, found.Words(5), err)
			}
		}
		for id := range k.virtual {
			delete(k.virtual, id)
		}
		for key, o := range e.desired.objects {
			written := slices.ContainsFunc(o.servers, func(s server) bool { return e.actual.servers[s.ID] != nil })
			_, found, err := e.Verify(context.Background(), key.Service)
			missing := slices.ContainsFunc(found, func(d drift.Difference) bool { return d.Kind == drift.VirtualServer && d.State == drift.Missing })
			if err != nil || written && !missing {
				t.Fatalf("%s, after ipvsadm -C: %s, %v", key, found.Words(5), err)
			}
		}
	})
}
