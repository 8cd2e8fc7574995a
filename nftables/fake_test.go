package nftables

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/nft/nfttest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// both is the kernel, and nfttest.Kernel beside it, which must answer the same.
type both struct {
	t    rapid.TB
	real *nft.Conn
	fake *nft.Conn
	// before are the generations of both when something was last committed.
	before [2]uint32
}

func dialBoth(t rapid.TB, by *nfttest.Process) (*both, error) {
	c, err := nft.Dial()
	require.NoError(t, err)
	s, err := by.Open()
	return &both{t: t, real: c, fake: nft.NewConn(s)}, err
}

func (b *both) same(what string, real, fake any) {
	b.t.Helper()
	if !reflect.DeepEqual(real, fake) {
		b.t.Fatalf("%s: the kernel has %v, and the fake %v", what, real, fake)
	}
}

// refusalOf is an error of Commit as text.
func refusalOf(err error) string {
	if r := (*nft.RefusedError)(nil); errors.As(err, &r) {
		if errors.Is(err, unix.EMLINK) || errors.Is(err, unix.EOPNOTSUPP) { // Which of both it is depends on where the kernel begins.
			return "chains lead to where they may not"
		}
		return fmt.Sprintf("%s, removes %t, set %s, element %q: %v", r.What, r.Removes, r.Set, r.Element.Key, r.Err)
	}
	return fmt.Sprint(err)
}

func (b *both) Commit(batch *nft.Batch) error {
	err := b.real.Commit(batch)
	b.same("commit", refusalOf(err), refusalOf(b.fake.Commit(batch)))
	return err
}

func (b *both) Read(f plan.Family, table string, sets []nft.Set, chains []nft.Chain) (*nft.Content, error) {
	real, err := b.real.Read(f, table, sets, chains)
	fake, faked := b.fake.Read(f, table, sets, chains)
	b.same("error", fmt.Sprint(err), fmt.Sprint(faked))
	b.same("content", real, fake)
	return real, err
}

// Sample lists elements until the kernel, which leaves some out while it moves them, has listed as many as the fake.
func (b *both) Sample(f plan.Family, table string, s nft.Set, each func(nft.Element) error) error {
	fake, err := b.fake.Elements(f, table, s)
	require.NoError(b.t, err)
	slices.SortFunc(fake, func(a, b nft.Element) int { return strings.Compare(a.Key, b.Key) })
	listed, real := map[string]nft.Element{}, []nft.Element(nil)
	for range mostReads * mostReads {
		list, err := b.real.Elements(f, table, s)
		require.NoError(b.t, err)
		for _, e := range list {
			listed[e.Key] = e
		}
		if len(listed) == len(fake) {
			break
		}
	}
	for _, key := range slices.Sorted(maps.Keys(listed)) {
		real = append(real, listed[key])
	}
	b.same("elements of "+s.Name, real, fake)
	for _, e := range real {
		if err := each(e); err != nil {
			return err
		}
	}
	return nil
}

func (b *both) Element(f plan.Family, table string, s nft.Set, e nft.Element) (nft.Element, bool, error) {
	real, is, err := b.real.Element(f, table, s, e)
	fake, faked, failed := b.fake.Element(f, table, s, e)
	b.same("element", []any{real, is, fmt.Sprint(err)}, []any{fake, faked, fmt.Sprint(failed)})
	return real, is, err
}

func (b *both) Find(f plan.Family, table string, keys []nft.ElementKey, each func(int, nft.Element, bool) error) error {
	var found [2][]string
	note := func(n int) func(int, nft.Element, bool) error {
		return func(i int, e nft.Element, is bool) error {
			found[n] = append(found[n], fmt.Sprint(i, e, is))
			return nil
		}
	}
	b.same("find", fmt.Sprint(b.real.Find(f, table, keys, note(0))), fmt.Sprint(b.fake.Find(f, table, keys, note(1))))
	b.same("found", found[0], found[1])
	return b.real.Find(f, table, keys, each)
}

// Generation compares whether anything has been committed since the last call.
func (b *both) Generation() (uint32, error) {
	real, err := b.real.Generation()
	fake, _ := b.fake.Generation()
	b.same("another generation", real != b.before[0], fake != b.before[1])
	b.before = [2]uint32{real, fake}
	return real, err
}

func (b *both) Close() error { return b.real.Close() }

// elsewhere is the name of a table of others.
const elsewhere = "elsewhere"

// drawBatch draws a transaction of which the kernel may refuse any part.
func drawBatch(t *rapid.T, e *engine) *nft.Batch {
	b := nft.NewBatch(e.family, rapid.SampledFrom([]string{names.NFTables, names.NFTables, names.NFTables, elsewhere}).Draw(t, "table"))
	chains := []string{"others-1", "others-2", "others-3", "absent", names.NFTOutput, names.NFTToServices, names.NFTReject}
	aChain := func(what string) string { return rapid.SampledFrom(chains).Draw(t, what) }
	own := []nft.Set{{Name: "others", Key: nft.Concat{nft.TypeClassID}, Data: nft.Concat{nft.TypeVerdict}, Size: 3},
		{Name: "more", Key: nft.Concat{nft.TypeClassID}, Data: nft.Concat{nft.TypeClassID}}, e.sets[kinds], e.sets[services], e.sets[sameByte]}
	aSet := func() nft.Set { return rapid.SampledFrom(own).Draw(t, "set") }
	rule := func() nft.Chain {
		list := []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: aChain("to")}}
		if rapid.IntRange(0, 2).Draw(t, "looks up") == 0 {
			s := rapid.SampledFrom(own[:3]).Draw(t, "looked up") // with keys that fit into the register
			look := &expr.Lookup{SourceRegister: register(0), SetName: s.Name, IsDestRegSet: s.Data != nil, DestRegister: register(0)}
			if len(s.Data) > 0 && s.Data[0] == nft.TypeVerdict {
				look.DestRegister = 0
			}
			list = []expr.Any{loadPriority(0), look}
		}
		return nft.Chain{Name: aChain("chain"), Rules: []nft.Rule{{Text: "theirs", Exprs: list}}}
	}
	element := func(s nft.Set) nft.Element {
		el := nft.Element{Key: strings.Repeat(rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "key"), s.Key.Length())}
		switch rapid.IntRange(0, 9).Draw(t, "form") {
		case 0:
			el.Key = ""
		case 1:
			el.Key += "long"
		}
		if el.Data = strings.Repeat(rapid.SampledFrom([]string{"x", "y"}).Draw(t, "data"), s.Data.Length()); len(s.Data) > 0 && el.Data == "" {
			el.Chain = aChain("leads to")
		}
		return el
	}
	for range rapid.IntRange(1, 5).Draw(t, "parts") {
		switch rapid.IntRange(0, 11).Draw(t, "part") {
		case 0:
			b.AddSet(aSet())
		case 1:
			b.DeleteSet(aSet().Name)
		case 2, 3:
			b.AddChain(nft.Chain{Name: aChain("chain")})
		case 4:
			b.DeleteChain(aChain("chain"))
		case 5:
			b.FlushChain(aChain("chain"))
		case 6, 7:
			require.NoError(t, b.AddRules(rule()))
		case 8, 9:
			s := aSet()
			b.AddElements(s, []nft.Element{element(s), element(s)})
		case 10:
			s := aSet()
			b.DeleteElements(s, []nft.Element{element(s)})
		case 11:
			if b.AddTable(); rapid.IntRange(0, 9).Draw(t, "whole") == 0 {
				b.DeleteTable()
			}
		}
	}
	return b
}

// TestFakeIsLikeTheKernel: nfttest.Kernel refuses what the kernel refuses, for the same reason, and holds and answers the same, whatever
// engines and others write.
func TestFakeIsLikeTheKernel(t *testing.T) {
	nstest.Enter(t)
	refusals := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		require.NoError(t, errors.Join(Cleanup(), nft.RemoveTables(elsewhere)))
		by := new(nfttest.Kernel).Start()
		e := newEngine(rapid.SampledFrom(plan.Families[:]).Draw(t, "family"), Options{MasqueradeBit: 14}, slog.New(slog.DiscardHandler), nil)
		e.dial = func() (kernel, error) { return dialBoth(t, by) }
		e.reader = e.dial
		others, err := dialBoth(t, by)
		require.NoError(t, err)
		defer others.Close()
		defer e.forget()
		for range rapid.IntRange(1, 2).Draw(t, "plans") {
			if err := e.Sync(t.Context(), plantest.Plans().Draw(t, "plan"), plan.Everything()); err != nil {
				t.Logf("a sync fails: %v", err)
			}
			for range rapid.IntRange(0, 6).Draw(t, "batches") {
				if r := (*nft.RefusedError)(nil); errors.As(others.Commit(drawBatch(t, e)), &r) {
					refusals[r.Err.Error()]++
				}
				_, _ = others.Generation()
			}
			_, _, _ = e.CompareBeside(t.Context())
			content, err := others.Read(e.family, names.NFTables, e.sets, (&layout{family: e.family, options: e.options}).chains())
			if err == nil && content != nil {
				for _, s := range e.sets {
					_ = others.Sample(e.family, names.NFTables, s, func(nft.Element) error { return nil })
				}
			}
		}
	})
	t.Logf("refused: %v", refusals)
}
