package kernel

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// GuardTable is the name of the nftables tables, one for each family, that a MarkGuard keeps.
const GuardTable = "nodeproxy-ipvs-marks"

// MarkGuard keeps the marks that lead packets to virtual servers and the marks of other programs apart.
//
// A packet is given a mark of ours in table mangle at INPUT or OUTPUT, and IPVS looks at all of its bits soon after. In
// between comes table filter at INPUT, where network policies set and clear bits of their own, and behind it table filter at
// OUTPUT, where they look at them again. So a mark of ours is in force only right before IPVS looks at the packet and while it
// does. At all other times it is kept in the packet's priority, and in exchange the mark that the packet had is kept there
// while ours is in force. A priority matters to nothing but the queue of the interface by which a packet leaves.
//
// A mark of somebody else's that looks like one of ours gives way in the same manner: IPVS does not see it.
type MarkGuard struct {
	// A mark is one of ours if it has Signature in the bits of SignatureMask.
	Signature, SignatureMask uint32
	// Masquerade is the bit that is carried over from our mark, or from what others have put in its place, to the mark that a
	// packet goes on with.
	Masquerade uint32
}

// ErrNoGuard is the error for a kernel without nftables.
var ErrNoGuard = errors.New("this kernel has no nftables (module nf_tables)")

// guardRule is one rule: its statements, and what it looks like in the language of nft.
type guardRule struct {
	text  string
	exprs []expr.Any
}

// guardChain is a chain at a hook, which ends with acceptance.
type guardChain struct {
	name, hook string
	priority   int32
	rules      []guardRule
}

// The two places that a mark can be in.
const (
	inMark     = expr.MetaKeyMARK
	inPriority = expr.MetaKeyPRIORITY
)

var guardNames = map[expr.MetaKey]string{inMark: "mark", inPriority: "priority"}

// guardChains are in the order in which a packet meets them. Priorities are those of netfilter: mangle has -150, filter 0,
// security 50, conntrack at OUTPUT -200; IPVS looks at 98 and 99 at INPUT, and at -99 and -98 at OUTPUT.
func (g MarkGuard) chains() []guardChain {
	return []guardChain{
		{"input-keep", "input", -151, []guardRule{g.rule().copy(inPriority, inMark).done()}},
		{"input-hide", "input", -149, []guardRule{
			g.rule().ours(inMark).swap().accept(),
			g.rule().ours(inPriority).bare().copy(inMark, inPriority).clear(inPriority).accept(), // It looked like ours, and was cleared.
			g.rule().clear(inPriority).done(),
		}},
		{"input-show", "input", 97, []guardRule{
			g.rule().ours(inPriority).swap().accept(),
			g.rule().ours(inMark).copy(inPriority, inMark).clear(inMark).accept(),
		}},
		{"input-restore", "input", 101, g.restore(false)}, // what stays on this node
		{"output-sent-on", "output", -301, g.restore(true)},
		{"output-keep", "output", -151, []guardRule{
			g.rule().ours(inMark).copy(inPriority, inMark).accept(),
			g.rule().toSelf().copy(inPriority, inMark).done(),
		}},
		{"output-restore", "output", -97, g.restore(false)},
	}
}

// restore are rules that put the mark of a packet back in place. With sentOn, they are for packets alone that IPVS sends on:
// no other has been tracked already when it comes to chain raw of OUTPUT.
func (g MarkGuard) restore(sentOn bool) []guardRule {
	rule := func() *guardBuilder {
		if sentOn {
			return g.rule().tracked()
		}
		return g.rule()
	}
	return []guardRule{
		rule().ours(inMark).masqueraded().takeBack(true).accept(),
		rule().ours(inMark).takeBack(false).accept(),
		rule().ours(inPriority).bare().masqueraded().takeBack(true).accept(),
		rule().ours(inPriority).bare().takeBack(false).accept(),
	}
}

// guardBuilder builds a rule. Registers 1 and 2 are used.
type guardBuilder struct {
	guard MarkGuard
	out   guardRule
}

func (g MarkGuard) rule() *guardBuilder { return &guardBuilder{guard: g} }

func (b *guardBuilder) add(text string, e ...expr.Any) *guardBuilder {
	if text != "" && b.out.text != "" {
		b.out.text += " "
	}
	b.out.text += text
	b.out.exprs = append(b.out.exprs, e...)
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

// has matches bits of what is in a place.
func (b *guardBuilder) has(k expr.MetaKey, mask, value uint32) *guardBuilder {
	return b.add(fmt.Sprintf("meta %s & %#08x == %#08x", guardNames[k], mask, value), load(k, 1), bits(mask, 0), equals(native(value)))
}

func (b *guardBuilder) ours(k expr.MetaKey) *guardBuilder {
	return b.has(k, b.guard.SignatureMask, b.guard.Signature)
}

// bare matches a mark that is cleared, but for the bit for masquerading.
func (b *guardBuilder) bare() *guardBuilder { return b.has(inMark, ^b.guard.Masquerade, 0) }

func (b *guardBuilder) masqueraded() *guardBuilder {
	return b.has(inMark, b.guard.Masquerade, b.guard.Masquerade)
}

// tracked matches packets that belong to a connection already, and are from its client.
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

// takeBack puts back the mark that is kept in the priority, with the bit for masquerading where that is wanted.
func (b *guardBuilder) takeBack(masquerade bool) *guardBuilder {
	if !masquerade {
		return b.copy(inMark, inPriority).clear(inPriority)
	}
	m := b.guard.Masquerade
	b.add(fmt.Sprintf("meta mark set meta priority | %#08x", m), load(inPriority, 1), bits(^m, m), store(inMark, 1))
	return b.clear(inPriority)
}

func (b *guardBuilder) accept() guardRule {
	return b.add("accept", &expr.Verdict{Kind: expr.VerdictAccept}).out
}

func (b *guardBuilder) done() guardRule { return b.out }

// Text is the table in the language of nft, but for the exchange of mark and priority, which that has no words for.
func (g MarkGuard) Text(f plan.Family) string {
	out := fmt.Sprintf("table %s %s\n", nftFamilies[f].name, GuardTable)
	for _, c := range g.chains() {
		out += fmt.Sprintf("chain %s type filter hook %s priority %d\n", c.name, c.hook, c.priority)
		for _, r := range c.rules {
			out += "rule " + c.name + " " + r.text + "\n"
		}
	}
	return out
}

var nftFamilies = map[plan.Family]struct {
	family nftables.TableFamily
	name   string
}{plan.IPv4: {nftables.TableFamilyIPv4, "ip"}, plan.IPv6: {nftables.TableFamilyIPv6, "ip6"}}

// label is what each rule carries, so that it is told from others by it.
func (g MarkGuard) label(c guardChain, i int) []byte {
	sum := sha256.Sum256([]byte(fmt.Sprintf("%s %s %d %s", c.name, c.hook, c.priority, c.rules[i].text)))
	return fmt.Appendf(nil, "nodeproxy %x", sum[:8])
}

// Guards keeps the guard of marks of one family in the network namespace of the thread that opened it.
type Guards struct {
	conn  *nftables.Conn
	guard MarkGuard
	table *nftables.Table
}

// OpenGuards returns ErrNoGuard where the kernel has no nftables.
func OpenGuards(f plan.Family, g MarkGuard) (*Guards, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("nftables: netlink socket: %w", err)
	}
	x := &Guards{conn, g, &nftables.Table{Family: nftFamilies[f].family, Name: GuardTable}}
	if _, err := conn.ListTablesOfFamily(x.table.Family); err != nil {
		_ = x.Close()
		return nil, noNFTables(err)
	}
	return x, nil
}

// noNFTables is ErrNoGuard for what a kernel without nftables answers.
func noNFTables(err error) error {
	for _, absent := range []error{unix.EINVAL, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} {
		if errors.Is(err, absent) {
			return ErrNoGuard
		}
	}
	return fmt.Errorf("nftables: %w", err)
}

// Close closes the socket. The table stays.
func (x *Guards) Close() error { return x.conn.CloseLasting() }

// Intact reports whether the table is what it should be.
func (x *Guards) Intact() (bool, error) {
	_, intact, err := x.compare()
	return intact, err
}

// compare reports whether the table is there, and whether it is what it should be.
func (x *Guards) compare() (is, intact bool, err error) {
	chains, err := x.held()
	if err != nil {
		return false, false, fmt.Errorf("reading nftables table %s: %w", GuardTable, err)
	}
	want := x.guard.chains()
	intact = len(chains) == len(want)
	for _, c := range want {
		intact = intact && chains[c.name] != nil && slices.EqualFunc(chains[c.name], x.labels(c), slices.Equal[[]byte])
	}
	return len(chains) > 0, intact, nil
}

// Ensure makes the table what it should be, in one step. It reports whether it was there, and whether it had to be written.
func (x *Guards) Ensure() (was, written bool, err error) {
	was, intact, err := x.compare()
	if err != nil || intact {
		return was, false, err
	}
	x.conn.AddTable(x.table)
	x.conn.DelTable(x.table)
	x.conn.AddTable(x.table)
	for _, c := range x.guard.chains() {
		x.add(c)
	}
	if err := x.conn.Flush(); err != nil {
		return was, false, fmt.Errorf("writing nftables table %s: %w", GuardTable, err)
	}
	return was, true, nil
}

func (x *Guards) labels(c guardChain) [][]byte {
	var out [][]byte
	for i := range c.rules {
		out = append(out, x.guard.label(c, i))
	}
	return out
}

// held are the labels of the rules that there are, by chain.
func (x *Guards) held() (map[string][][]byte, error) {
	all, err := x.conn.ListChainsOfTableFamily(x.table.Family)
	if err != nil {
		return nil, err
	}
	out := map[string][][]byte{}
	for _, c := range all {
		if c.Table.Name != GuardTable {
			continue
		}
		rules, err := x.conn.GetRules(x.table, c)
		if err != nil {
			return nil, err
		}
		out[c.Name] = [][]byte{}
		for _, r := range rules {
			out[c.Name] = append(out[c.Name], r.UserData)
		}
	}
	return out, nil
}

func (x *Guards) add(c guardChain) {
	hooks := map[string]*nftables.ChainHook{"input": nftables.ChainHookInput, "output": nftables.ChainHookOutput}
	accept := nftables.ChainPolicyAccept
	chain := x.conn.AddChain(&nftables.Chain{
		Name: c.name, Table: x.table, Type: nftables.ChainTypeFilter, Hooknum: hooks[c.hook],
		Priority: nftables.ChainPriorityRef(nftables.ChainPriority(c.priority)), Policy: &accept,
	})
	for i, r := range c.rules {
		x.conn.AddRule(&nftables.Rule{Table: x.table, Chain: chain, Exprs: r.exprs, UserData: x.guard.label(c, i)})
	}
}

// GuardTables lists the families that have a guard of marks in the network namespace of the calling thread.
func GuardTables() ([]plan.Family, error) {
	var out []plan.Family
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("nftables: netlink socket: %w", err)
	}
	for _, f := range plan.Families {
		list, err := conn.ListTablesOfFamily(nftFamilies[f].family)
		if err = noNFTablesOrNil(err); errors.Is(err, ErrNoGuard) {
			continue
		} else if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(list, func(t *nftables.Table) bool { return t.Name == GuardTable }) {
			out = append(out, f)
		}
	}
	return out, nil
}

func noNFTablesOrNil(err error) error {
	if err == nil {
		return nil
	}
	return noNFTables(err)
}

// RemoveGuards removes the guards of both families, if there are any.
func RemoveGuards() error {
	families, err := GuardTables()
	if err != nil || len(families) == 0 {
		return err
	}
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: netlink socket: %w", err)
	}
	for _, f := range families {
		conn.DelTable(&nftables.Table{Family: nftFamilies[f].family, Name: GuardTable})
	}
	if err := conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("removing nftables table %s: %w", GuardTable, err)
	}
	return nil
}
