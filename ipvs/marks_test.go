package ipvs

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/plan"
)

// TestMarks: whatever the masquerade bit, marks of different servers differ, have the signature, and only those that are to
// be masqueraded have the bit.
func TestMarks(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := newMarks(rapid.IntRange(0, 31).Draw(t, "bit"))
		type id struct {
			protocol plan.Protocol
			port     uint16
			kind     markKind
		}
		one := rapid.Custom(func(t *rapid.T) id {
			return id{
				rapid.SampledFrom([]plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}).Draw(t, "protocol"),
				rapid.Uint16().Draw(t, "port"), markKind(rapid.IntRange(0, 2).Draw(t, "kind")),
			}
		})
		a, b := one.Draw(t, "a"), one.Draw(t, "b")
		mark := func(x id) uint32 { return m.of(nodePortID(x.protocol, x.port), x.kind) }
		if (mark(a) == mark(b)) != (a == b) {
			t.Fatalf("%v and %v have marks %#x and %#x", a, b, mark(a), mark(b))
		}
		if !m.ours(mark(a)) || mark(a)&m.masquerade != 0 != (a.kind == masqueradedMark) {
			t.Fatalf("%v has mark %#x", a, mark(a))
		}
		if name := m.identity(mark(a)); name != nodePortID(a.protocol, a.port) || name.protocol() != a.protocol {
			t.Fatalf("the mark of %v leads back to %x", a, name)
		}
		hashed := m.of(markID(byHash|rapid.Uint32Range(0, 1<<25-1).Draw(t, "hash")), a.kind)
		if hashed == mark(a) || !m.ours(hashed) {
			t.Fatalf("a hash and %v have the mark %#x", a, hashed)
		}
	})
}

// TestIdentities do not depend on the order in which keys came, even if they share a hash; and add and remove return the keys whose identity changes.
func TestIdentities(t *testing.T) {
	t.Parallel()
	var keys []plan.Key
	byHash := map[uint32][]plan.Key{}
	for i := 0; len(keys) < 2; i++ { // Two that share a hash.
		k := plan.Key{Service: plan.Service{Namespace: "ns", Name: string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune(i))}, Protocol: plan.TCP}
		h := hashOf(k)
		if byHash[h] = append(byHash[h], k); len(byHash[h]) == 2 {
			keys = byHash[h]
		}
	}
	slices.SortFunc(keys, plan.Key.Compare)
	ids := identities{}
	if others := ids.add(keys[1]); len(others) > 0 {
		t.Errorf("the first changed %v", others)
	}
	alone, _ := ids.of(keys[1])
	if others := ids.add(keys[0]); !slices.Equal(others, keys[1:]) {
		t.Errorf("the lower one changed %v", others)
	}
	first, _ := ids.of(keys[0])
	second, _ := ids.of(keys[1])
	if first != alone || second == first {
		t.Errorf("identities %x, %x; alone %x", first, second, alone)
	}
	if others := ids.remove(keys[0]); !slices.Equal(others, keys[1:]) {
		t.Errorf("its end changed %v", others)
	}
	if again, ok := ids.of(keys[1]); again != alone || !ok {
		t.Errorf("alone again %x, before %x", again, alone)
	}
	if _, ok := ids.of(keys[0]); ok {
		t.Error("what is gone has an identity")
	}
}
