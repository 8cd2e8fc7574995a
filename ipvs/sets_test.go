package ipvs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestSetsAreRemovable: cleanup knows every set that this mode makes.
func TestSetsAreRemovable(t *testing.T) {
	for id := range setCount {
		for _, f := range plan.Families {
			if name := setName(id, f); !names.IsOurSet(name) {
				t.Errorf("set %s is not known to package names", name)
			}
		}
	}
}

// TestSetsOfKubeProxy: sets that only a kube-proxy uses go with its rules, but not before all Services are known.
func TestSetsOfKubeProxy(t *testing.T) {
	t.Parallel()
	for _, f := range plan.Families {
		e, k := fakeEngine(f, Options{})
		p := plantest.Large(1, 1)
		for _, s := range names.KubeProxySets {
			k.set[s.Of(f)] = map[ipset.Entry]ipset.Entry{}
		}
		for _, partial := range []bool{true, false} {
			p.Partial = partial
			require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
			for _, s := range names.KubeProxySets {
				if _, is := k.set[s.Of(f)]; is != partial {
					t.Errorf("%s, of some Services only: %t, set %s exists: %t", f, partial, s, is)
				}
			}
		}
	}
}
