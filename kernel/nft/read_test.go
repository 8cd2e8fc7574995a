package nft

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// TestFind: of many keys in two sets, each that is there is found, in order, whatever others are missing; and it ends with the caller's error.
func TestFind(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	nstest.Exec(t, "nft", "add table ip t; add set ip t a { type mark; }; add set ip t b { type mark; }")
	c, err := Dial()
	require.NoError(t, err)
	defer c.Close()
	random := rand.New(rand.NewPCG(1, 2))
	var keys []ElementKey
	var there []bool
	b := NewBatch(plan.IPv4, "t")
	for i := range 3000 {
		name, is := "a", true
		if i%1000 > 700 {
			name = "b"
		}
		switch { // Runs of those that are there, of those that are not, and both at random.
		case i > 2000:
			is = random.IntN(20) > 0
		case i > 1800:
			is = false
		}
		key := string(binary.NativeEndian.AppendUint32(nil, uint32(i)))
		if keys, there = append(keys, ElementKey{name, key}), append(there, is); is {
			b.AddElements(Set{Name: name}, []Element{{Key: key}})
		}
	}
	keys, there = append(keys, ElementKey{"none", keys[0].Key}), append(there, false)
	require.NoError(t, c.Commit(b))
	next := 0
	if err := c.Find(plan.IPv4, "t", keys, func(i int, e Element, is bool) error {
		if i != next || is != there[i] || is && e.Key != keys[i].Key {
			t.Errorf("key %d of set %s: %d %q %v, want %v", next, keys[next].Set, i, e.Key, is, there[next])
		}
		next++
		return nil
	}); err != nil || next != len(keys) {
		t.Errorf("%d of %d keys were looked for: %v", next, len(keys), err)
	}
	enough := errors.New("enough")
	for last := range 130 {
		if err := c.Find(plan.IPv4, "t", keys[1900:], func(i int, _ Element, _ bool) error {
			if i == last {
				return enough
			}
			return nil
		}); err != enough {
			t.Fatalf("after %d keys: %v", last+1, err)
		}
	}
}

// TestGeneration: it changes with anything, and with nothing else.
func TestGeneration(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	c, err := Dial()
	require.NoError(t, err)
	defer c.Close()
	generation := func() uint32 {
		n, err := c.Generation()
		require.NoError(t, err)
		return n
	}
	first := generation()
	require.Equal(t, first, generation())
	b := NewBatch(plan.IPv6, "t")
	b.AddTable()
	require.NoError(t, c.Commit(b))
	require.NotEqual(t, first, generation())
}
