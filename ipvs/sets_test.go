package ipvs

import (
	"net/netip"
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
			k.Set[s.Of(f)] = map[ipset.Entry]ipset.Entry{}
		}
		for _, partial := range []bool{true, false} {
			p.Partial = partial
			require.NoError(t, e.Sync(t.Context(), p, plan.Everything()))
			for _, s := range names.KubeProxySets {
				if _, is := k.Set[s.Of(f)]; is != partial {
					t.Errorf("%s, of some Services only: %t, set %s exists: %t", f, partial, s, is)
				}
			}
		}
	}
}

// TestMemberKey: what a key keeps of an entry is all but the mark, and what differs has different keys.
func TestMemberKey(t *testing.T) {
	t.Parallel()
	a4, a6 := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")
	entries := []ipset.Entry{
		{}, {Addr: a4}, {Addr: a6}, {Addr: netip.MustParseAddr("::ffff:10.96.0.1")}, {Addr2: a4}, {Port: 80},
		{Addr: a4, Protocol: plan.TCP, Port: 80}, {Addr: a4, Protocol: plan.UDP, Port: 80}, {Addr: a4, Protocol: plan.SCTP, Port: 80, Addr2: a4},
		{Addr: a4, Protocol: plan.TCP, Port: 80, Addr2: netip.MustParseAddr("0.0.0.0")},
		{Addr: a4, Protocol: plan.TCP, Port: 80, Net: netip.MustParsePrefix("0.0.0.0/0")},
		{Addr: a4, Protocol: plan.TCP, Port: 80, Net: netip.MustParsePrefix("0.0.0.0/1")},
		{Addr: a6, Protocol: plan.TCP, Port: 80, Net: netip.MustParsePrefix("fd00::1/128")},
		{Net: netip.MustParsePrefix("8000::/1"), Protocol: plan.TCP, Port: 65535},
	}
	keys := map[memberKey]bool{}
	for _, set := range []setID{setClusterIP, setCount - 1} {
		for _, e := range entries {
			e.Mark, e.Mask = 5, 7
			m := member{set, e}
			if got := m.key().entry(m.marked()); got != e || m.key().set != set {
				t.Errorf("%+v has become %+v", e, got)
			}
			keys[m.key()] = true
		}
	}
	if len(keys) != 2*len(entries) {
		t.Errorf("%d entries have %d keys", 2*len(entries), len(keys))
	}
}
