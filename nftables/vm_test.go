package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// ruleset is what a plan becomes, with elements by set, and the clients that are remembered.
type ruleset struct {
	family   plan.Family
	chains   map[string]nft.ChainSpec
	elements map[string]map[string]value // by set and key
	ranges   []id                        // of source-ranges
	local    func(netip.Addr) bool
}

func rulesetOf(p *plan.Plan, f plan.Family, o Options, local func(netip.Addr) bool) *ruleset {
	l := &layout{family: f, options: o, settings: p.Settings, node: p.Node, partial: p.Partial}
	all, used := map[id]value{}, map[kind]bool{}
	for _, sp := range p.Sorted(f) {
		l.fill(place(written{}, sp), all, used)
	}
	maps.Copy(all, fixed(used))
	r := &ruleset{family: f, chains: map[string]nft.ChainSpec{}, elements: map[string]map[string]value{}, local: local}
	for _, s := range sets(f) {
		r.elements[s.Name] = map[string]value{}
	}
	for i, v := range all {
		if i.end != "" {
			r.ranges = append(r.ranges, i)
			continue
		}
		r.elements[sets(f)[i.set].Name][i.key] = v
	}
	for _, c := range append(l.kindChains(used), l.chains()...) {
		r.chains[c.Name] = c
	}
	return r
}

// machine carries out expressions for one packet, as the kernel does.
type machine struct {
	*ruleset
	pkt         plan.Packet
	dst         netip.AddrPort
	mark, prio  uint32
	dnat, masq  bool
	registers   [64]byte
	numbers     []int // results of numgen, in order
	used        int
	probability float64
	fork        int // the modulus of a numgen for which there is no result yet
	rules       []string
}

// at is where a register begins.
func at(register uint32) int { return int(register-unix.NFT_REG32_00) * 4 }

func (m *machine) set(register uint32, b []byte) {
	n := (len(b) + 3) &^ 3
	clear(m.registers[at(register) : at(register)+n])
	copy(m.registers[at(register):], b)
}

func (m *machine) get(register uint32, n int) []byte {
	return m.registers[at(register) : at(register)+n]
}

// verdicts that end the way of a packet. none is for the end of a chain.
const (
	none   = ""
	accept = "accept"
	drops  = "drop"
	reject = "reject"
	stuck  = "fork"
)

func (m *machine) chain(name string) string {
	c, ok := m.chains[name]
	if !ok {
		panic("no chain " + name)
	}
	for _, r := range c.Rules {
		v, target, gone := m.rule(c, r)
		switch {
		case v != none:
			return v
		case target != "" && gone:
			return m.chain(target)
		case target != "":
			if v := m.chain(target); v != none {
				return v
			}
		}
	}
	return none
}

// rule carries out one rule. It returns a verdict, or a chain to jump or go to.
func (m *machine) rule(c nft.ChainSpec, r nft.Rule) (verdict, target string, gone bool) {
	for i := range m.registers {
		m.registers[i] = 0xaa // No rule may use what another one has left.
	}
	for _, e := range r.Exprs {
		v, t, g, next := m.expr(e)
		if !next {
			if v != none || t != "" {
				m.rules = append(m.rules, c.Name+": "+r.Text)
			}
			return v, t, g
		}
	}
	return none, "", false
}

func (m *machine) expr(e expr.Any) (verdict, target string, gone, next bool) {
	yes := func() (string, string, bool, bool) { return none, "", false, true }
	when := func(is bool) (string, string, bool, bool) { return none, "", false, is }
	switch e := e.(type) {
	case *expr.Payload:
		m.set(e.DestRegister, m.header(e.Base)[e.Offset:e.Offset+e.Len])
	case *expr.Meta:
		if e.SourceRegister {
			n := binary.NativeEndian.Uint32(m.get(e.Register, 4))
			switch e.Key {
			case expr.MetaKeyMARK:
				m.mark = n
			case expr.MetaKeyPRIORITY:
				m.prio = n
			}
			return yes()
		}
		m.set(e.Register, m.meta(e.Key))
	case *expr.Immediate:
		m.set(e.Register, e.Data)
	case *expr.Bitwise:
		b := bytes.Clone(m.get(e.SourceRegister, int(e.Len)))
		for i := range b {
			b[i] = b[i]&e.Mask[i] ^ e.Xor[i]
		}
		m.set(e.DestRegister, b)
	case *expr.Cmp:
		return when(bytes.Equal(m.get(e.Register, len(e.Data)), e.Data) == (e.Op == expr.CmpOpEq))
	case *expr.Fib:
		a := m.pkt.Src
		if e.FlagDADDR {
			a = m.dst.Addr()
		}
		n := uint32(1)
		if m.local(a) {
			n = addrLocal
		}
		m.set(e.Register, native(n))
	case *expr.Ct:
		n := uint32(0)
		switch {
		case e.Key == expr.CtKeySTATE:
			n = ctNew
		case e.Key == expr.CtKeySTATUS && m.dnat:
			n = ipsDstNAT
		}
		m.set(e.Register, native(n))
	case *expr.Numgen:
		if m.used == len(m.numbers) {
			m.fork = int(e.Modulus)
			return stuck, "", false, false
		}
		m.set(e.Register, native(uint32(m.numbers[m.used])))
		m.used++
		m.probability /= float64(e.Modulus)
	case *expr.Lookup:
		return m.lookup(e)
	case *expr.Dynset:
		return m.dynset(e)
	case *expr.Verdict:
		switch e.Kind {
		case expr.VerdictDrop:
			return drops, "", false, false
		case expr.VerdictJump:
			return none, e.Chain, false, false
		case expr.VerdictGoto:
			return none, e.Chain, true, false
		}
		panic(fmt.Sprintf("verdict %d", e.Kind))
	case *expr.NAT:
		n := m.family.Bits() / 8
		a, _ := netip.AddrFromSlice(m.get(e.RegAddrMin, n))
		m.dst, m.dnat = netip.AddrPortFrom(a, binary.BigEndian.Uint16(m.get(e.RegProtoMin, 2))), true
		return accept, "", false, false
	case *expr.Masq:
		m.masq = true
		return accept, "", false, false
	case *expr.Reject:
		return reject, "", false, false
	default:
		panic(fmt.Sprintf("%T", e))
	}
	return yes()
}

func (m *machine) header(base expr.PayloadBase) []byte {
	if base == expr.PayloadBaseTransportHeader {
		return binary.BigEndian.AppendUint16([]byte{0, 0}, m.dst.Port())
	}
	first := map[plan.Family]int{plan.IPv4: 12, plan.IPv6: 8}[m.family]
	return slices.Concat(make([]byte, first), m.pkt.Src.AsSlice(), m.dst.Addr().AsSlice())
}

func (m *machine) meta(k expr.MetaKey) []byte {
	switch k {
	case expr.MetaKeyMARK:
		return native(m.mark)
	case expr.MetaKeyPRIORITY:
		return native(m.prio)
	case expr.MetaKeyL4PROTO:
		return []byte{netlink.Protocol(m.pkt.Protocol)}
	case expr.MetaKeyIIFNAME:
		name := make([]byte, unix.IFNAMSIZ)
		if !m.pkt.Output {
			copy(name, m.pkt.InInterface)
		}
		return name
	}
	panic(fmt.Sprintf("meta %d", k))
}

func (m *machine) keyOf(set string, register uint32) string {
	for _, s := range sets(m.family) {
		if s.Name == set {
			return string(m.get(register, s.Key.Length()))
		}
	}
	panic("no set " + set)
}

func (m *machine) lookup(e *expr.Lookup) (verdict, target string, gone, next bool) {
	key := m.keyOf(e.SetName, e.SourceRegister)
	v, is := m.elements[e.SetName][key]
	if e.SetName == names.NFTSourceRanges {
		is = slices.ContainsFunc(m.ranges, func(i id) bool { return i.key <= key && key <= i.end })
	}
	if is == e.Invert {
		return none, "", false, false
	}
	if v.chain != "" {
		return none, v.chain, true, false
	}
	if e.IsDestRegSet {
		m.set(e.DestRegister, []byte(v.data))
	}
	return none, "", false, true
}

func (m *machine) dynset(e *expr.Dynset) (verdict, target string, gone, next bool) {
	key := m.keyOf(e.SetName, e.SrcRegKey)
	set := m.elements[e.SetName]
	_, is := set[key]
	switch {
	case e.Operation == opDelete:
		delete(set, key)
	case !is:
		set[key] = value{data: string(m.get(e.SrcRegData, 4))}
	}
	return none, "", false, true
}

// trace follows the first packet of a connection.
func (r *ruleset) trace(pkt plan.Packet) []packetsim.Outcome {
	index, rules := map[outcome]float64{}, map[outcome][]string{}
	todo := [][]int{nil}
	for len(todo) > 0 {
		numbers := todo[0]
		todo = todo[1:]
		m := &machine{ruleset: r, pkt: pkt, dst: netip.AddrPortFrom(pkt.Dst, pkt.DstPort), numbers: numbers, probability: 1}
		known := maps.Clone(r.elements[names.NFTAffinity])
		v := m.way()
		r.elements[names.NFTAffinity] = known // What one way remembers is not the other's.
		if v == stuck {
			for i := range m.fork {
				todo = append(todo, append(slices.Clone(numbers), i))
			}
			continue
		}
		o := outcome{v, m.dst, m.dnat, m.masq, m.local(m.dst.Addr())}
		index[o] += m.probability
		rules[o] = m.rules
	}
	var out []packetsim.Outcome
	for o, p := range index {
		out = append(out, packetsim.Outcome{Action: packetsim.Action(o.action), Dst: o.dst, DNAT: o.dnat, Masquerade: o.masquerade,
			Delivered: o.delivered, Probability: p, Rules: rules[o]})
	}
	slices.SortFunc(out, func(a, b packetsim.Outcome) int { return strings.Compare(a.String(), b.String()) })
	return out
}

type outcome struct {
	action                      string
	dst                         netip.AddrPort
	dnat, masquerade, delivered bool
}

// way takes the packet through the hooks that the first packet of a connection passes. What stays on the machine though it was sent
// passes postrouting, but is not translated again when it comes in by lo.
func (m *machine) way() string {
	first := names.NFTPrerouting
	if m.pkt.Output {
		first = names.NFTOutput
	}
	if v := m.chain(first); v == drops || v == reject || v == stuck {
		return v
	}
	filter := names.NFTFilterOutput
	if !m.pkt.Output {
		filter = names.NFTForward
	}
	if m.pkt.Output || !m.local(m.dst.Addr()) {
		if v := m.chain(filter); v == drops || v == reject {
			return v
		}
		m.chain(names.NFTPostrouting)
	}
	return accept
}
