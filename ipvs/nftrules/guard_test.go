package nftrules

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// flushChain removes the rules of a chain, as another program might.
func flushChain(t *testing.T, x *table, name string) {
	t.Helper()
	b := nft.NewBatch(x.family, x.name)
	b.FlushChain(name)
	require.NoError(t, x.Commit(b))
}

// TestMarkGuard: a second comparison writes nothing, whatever was changed is mended, and nothing stays.
func TestMarkGuard(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	guard := MarkGuard{Signature: 0x28000000, SignatureMask: 0x78000000, Masquerade: 1 << 14}
	for _, f := range plan.Families {
		open := func(g MarkGuard) *Guards {
			t.Helper()
			x, err := OpenGuards(f, g)
			require.NoError(t, err)
			t.Cleanup(func() { _ = x.Close() })
			return x
		}
		ensure := func(when string, x *Guards, wantWas, wantWritten bool) {
			t.Helper()
			if was, written, err := x.Ensure(); was != wantWas || written != wantWritten || err != nil {
				t.Errorf("%s, %s: was there %t, written %t, %v; want %t, %t", f, when, was, written, err, wantWas, wantWritten)
			}
		}
		x := open(guard)
		ensure("at first", x, false, true)
		ensure("again", x, true, false)
		ensure("by another process", open(guard), true, false)
		chains, err := nft.Chains(f, names.IPVSMarks)
		if err != nil || len(chains) != len(guard.chains()) {
			t.Fatalf("%s: %d chains, %v", f, len(chains), err)
		}
		flushChain(t, x.table, chains[2])
		ensure("without the rules of a chain", x, true, true)
		ensure("after that", x, true, false)
		other := guard
		other.Masquerade = 1 << 20
		ensure("with another masquerade bit", open(other), true, true)
	}
	if families, err := GuardTables(); len(families) != len(plan.Families) || err != nil {
		t.Errorf("tables of %v, %v", families, err)
	}
	for range 2 {
		assert.NoError(t, RemoveGuards())
	}
	if families, err := GuardTables(); len(families) != 0 || err != nil {
		t.Errorf("after their removal: tables of %v, %v", families, err)
	}
}
