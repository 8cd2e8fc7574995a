// Package nftrules has the nftables tables of mode ipvs: one keeps marks of this program and of others apart, and one makes single ports of
// an address the node's.
package nftrules

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// MarkGuard keeps the marks that select virtual servers apart from the marks of other programs.
//
// A packet gets one of our marks in table mangle at INPUT or OUTPUT, and IPVS looks at all of its bits soon after. In between comes
// table filter at INPUT, where network policies set and clear bits of their own, and after it table filter at OUTPUT, where they
// look at them again. So our mark is in force only right before IPVS looks at the packet and while it does. At all other times it
// is kept in the packet's priority, and in exchange the packet's former mark is kept there while ours is in force. A priority
// matters only to the queue of the interface by which a packet leaves.
//
// Another program's mark that looks like one of ours is hidden in the same way: IPVS does not see it.
type MarkGuard struct {
	// A mark is one of ours if it has Signature in the bits of SignatureMask.
	Signature, SignatureMask uint32
	// Masquerade is the bit that is carried over from our mark, or from what other programs have put in its place, to the mark with
	// which a packet goes on.
	Masquerade uint32
}

// The two places where a mark can be.
const (
	inMark     = expr.MetaKeyMARK
	inPriority = expr.MetaKeyPRIORITY
)

var guardNames = map[expr.MetaKey]string{inMark: "mark", inPriority: "priority"}

// chains are in the order in which a packet meets them. Priorities are those of netfilter: mangle has -150, filter 0,
// security 50, conntrack at OUTPUT -200; IPVS looks at 98 and 99 at INPUT, and at -99 and -98 at OUTPUT.
func (g MarkGuard) chains() []nft.Chain {
	return []nft.Chain{
		{Name: "input-keep", Hook: filter("input", -151), Rules: []nft.Rule{g.rule().copy(inPriority, inMark).done()}},
		{Name: "input-hide", Hook: filter("input", -149), Rules: []nft.Rule{
			g.rule().ours(inMark).swap().accept(),
			g.rule().ours(inPriority).bare().copy(inMark, inPriority).clear(inPriority).accept(), // It looked like ours, and was cleared.
			g.rule().clear(inPriority).done(),
		}},
		{Name: "input-show", Hook: filter("input", 97), Rules: []nft.Rule{
			g.rule().ours(inPriority).swap().accept(),
			g.rule().ours(inMark).copy(inPriority, inMark).clear(inMark).accept(),
		}},
		{Name: "input-restore", Hook: filter("input", 101), Rules: g.restore(false)}, // what stays on this node
		{Name: "output-sent-on", Hook: filter("output", -301), Rules: g.restore(true)},
		{Name: "output-keep", Hook: filter("output", -151), Rules: []nft.Rule{
			g.rule().ours(inMark).copy(inPriority, inMark).accept(),
			g.rule().toSelf().copy(inPriority, inMark).done(),
		}},
		{Name: "output-restore", Hook: filter("output", -97), Rules: g.restore(false)},
	}
}

// restore returns rules that restore the mark of a packet. With sentOn, they are only for packets that IPVS sends on: no other
// packet is already tracked when it reaches chain raw of OUTPUT.
func (g MarkGuard) restore(sentOn bool) []nft.Rule {
	rule := func() *guardBuilder {
		if sentOn {
			return g.rule().tracked()
		}
		return g.rule()
	}
	return []nft.Rule{
		rule().ours(inMark).masqueraded().takeBack(true).accept(),
		rule().ours(inMark).takeBack(false).accept(),
		rule().ours(inPriority).bare().masqueraded().takeBack(true).accept(),
		rule().ours(inPriority).bare().takeBack(false).accept(),
	}
}

// guardBuilder builds a rule. Registers 1 and 2 are used.
type guardBuilder struct {
	guard MarkGuard
	out   nft.Rule
}

func (g MarkGuard) rule() *guardBuilder { return &guardBuilder{guard: g} }

func (b *guardBuilder) add(text string, e ...expr.Any) *guardBuilder {
	if text != "" && b.out.Text != "" {
		b.out.Text += " "
	}
	b.out.Text += text
	b.out.Exprs = append(b.out.Exprs, e...)
	return b
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func load(k expr.MetaKey, register uint32) expr.Any { return &expr.Meta{Key: k, Register: register} }

func store(k expr.MetaKey, register uint32) expr.Any {
	return &expr.Meta{Key: k, SourceRegister: true, Register: register}
}

func bits(mask, flip uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(mask), Xor: native(flip)}
}

func equals(v []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: v} }

// has matches bits of the value in a place.
func (b *guardBuilder) has(k expr.MetaKey, mask, value uint32) *guardBuilder {
	return b.add(fmt.Sprintf("meta %s & %#08x == %#08x", guardNames[k], mask, value), load(k, 1), bits(mask, 0), equals(native(value)))
}

func (b *guardBuilder) ours(k expr.MetaKey) *guardBuilder {
	return b.has(k, b.guard.SignatureMask, b.guard.Signature)
}

// bare matches a mark of zero, apart from the masquerade bit.
func (b *guardBuilder) bare() *guardBuilder { return b.has(inMark, ^b.guard.Masquerade, 0) }

func (b *guardBuilder) masqueraded() *guardBuilder {
	return b.has(inMark, b.guard.Masquerade, b.guard.Masquerade)
}

// tracked matches packets of a known connection that are from its client.
func (b *guardBuilder) tracked() *guardBuilder {
	return b.add("ct direction original", &expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}, equals([]byte{0}))
}

// toSelf matches packets that the node sends to itself.
func (b *guardBuilder) toSelf() *guardBuilder {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, "lo")
	return b.add(`oifname "lo"`, &expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, equals(name))
}

func (b *guardBuilder) copy(to, from expr.MetaKey) *guardBuilder {
	return b.add(fmt.Sprintf("meta %s set meta %s", guardNames[to], guardNames[from]), load(from, 1), store(to, 1))
}

func (b *guardBuilder) clear(k expr.MetaKey) *guardBuilder {
	return b.add(fmt.Sprintf("meta %s set 0", guardNames[k]), &expr.Immediate{Register: 1, Data: native(0)}, store(k, 1))
}

// swap exchanges mark and priority.
func (b *guardBuilder) swap() *guardBuilder {
	return b.add("swap mark and priority", load(inMark, 1), load(inPriority, 2), store(inPriority, 1), store(inMark, 2))
}

// takeBack restores the mark that is kept in the priority, with the masquerade bit if wanted.
func (b *guardBuilder) takeBack(masquerade bool) *guardBuilder {
	if !masquerade {
		return b.copy(inMark, inPriority).clear(inPriority)
	}
	m := b.guard.Masquerade
	b.add(fmt.Sprintf("meta mark set meta priority | %#08x", m), load(inPriority, 1), bits(^m, m), store(inMark, 1))
	return b.clear(inPriority)
}

func (b *guardBuilder) accept() nft.Rule {
	return b.add("accept", &expr.Verdict{Kind: expr.VerdictAccept}).out
}

func (b *guardBuilder) done() nft.Rule { return b.out }

// filter returns a hook of type filter.
func filter(hook string, priority int32) *nft.Hook {
	return &nft.Hook{Type: "filter", Name: hook, Priority: priority}
}

// tableText returns a table in the language of nft.
func tableText(f plan.Family, name string, chains []nft.Chain) string {
	out := fmt.Sprintf("table %s %s\n", nft.FamilyName(f), name)
	for _, c := range chains {
		out += fmt.Sprintf("chain %s type %s hook %s priority %d\n", c.Name, c.Hook.Type, c.Hook.Name, c.Hook.Priority)
		for _, r := range c.Rules {
			out += "rule " + c.Name + " " + r.Text + "\n"
		}
	}
	return out
}

// table is a table that belongs to this program alone, in the network namespace of the thread that opened it.
type table struct {
	*nft.Conn
	family plan.Family
	name   string
	sets   []nft.Set
	chains []nft.Chain
}

// open opens the table, which need not exist. It returns nft.ErrAbsent if the kernel has no nftables.
func (x table) open() (*table, error) {
	_, err := nft.Tables(x.family)
	if err == nil {
		x.Conn, err = nft.Dial()
	}
	return &x, err
}

// state reports whether the table exists, and whether it has the sets and chains that it should have.
func (x *table) state() (exists, intact bool, err error) {
	content, err := x.Read(x.family, x.name, x.sets, x.chains)
	return content != nil, content.Intact(x.sets, x.chains), err
}

// write replaces the table in one step, with elements in its set if it has one.
func (x *table) write(elements []nft.Element) error {
	b := nft.NewBatch(x.family, x.name)
	b.AddTable()
	b.DeleteTable()
	b.AddTable()
	for _, s := range x.sets {
		b.AddSet(s)
		b.AddElements(s, elements)
	}
	if err := b.AddChains(x.chains); err != nil {
		return err
	}
	return x.Commit(b)
}

// Text returns the table in the language of nft, except for the exchange of mark and priority, which nft can't express.
func (g MarkGuard) Text(f plan.Family) string { return tableText(f, names.IPVSMarks, g.chains()) }

// Guards keeps the guard of marks of one family in the network namespace of the thread that opened it.
type Guards struct{ *table }

// OpenGuards returns nft.ErrAbsent if the kernel has no nftables.
func OpenGuards(f plan.Family, g MarkGuard) (*Guards, error) {
	t, err := table{family: f, name: names.IPVSMarks, chains: g.chains()}.open()
	if err != nil {
		return nil, err
	}
	return &Guards{t}, nil
}

// Intact reports whether the kernel has the table as it should be.
func (x *Guards) Intact() (bool, error) {
	_, intact, err := x.state()
	return intact, err
}

// Ensure writes the table in one step, unless it is intact. It reports whether the table existed and whether it was written.
func (x *Guards) Ensure() (was, written bool, err error) {
	was, intact, err := x.state()
	if err != nil || intact {
		return was, false, err
	}
	return was, true, x.write(nil)
}

// GuardTables returns the families that have a guard of marks in the network namespace of the calling thread.
func GuardTables() ([]plan.Family, error) { return nft.FamiliesWith(names.IPVSMarks) }

// RemoveGuards removes the guards of both families, if they exist.
func RemoveGuards() error { return nft.RemoveTables(names.IPVSMarks) }

// Watch opens a socket in the network namespace of the calling thread. It returns a function that until ctx ends calls changed after each
// change of rules in the table of a guard or of a Ports, and after notifications were lost.
func Watch() (func(ctx context.Context, changed func(plan.Family)), error) {
	watch, err := nft.Watch(nft.Subscribe, names.IPVSMarks, names.IPVSPorts)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, changed func(plan.Family)) {
		watch(ctx, func(c nft.Change) {
			if !c.ElementsOnly {
				changed(c.Family)
			}
		}, func(error) {
			for _, f := range plan.Families {
				changed(f)
			}
		})
	}, nil
}
