package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math/bits"
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

// Machine returns what a packet meets where the table is as Render returns it for p, and no clients are remembered. Only elements of the
// ServicePorts that it is for matter to a packet, so that p need have no others.
func Machine(p *plan.Plan, f plan.Family, o Options) *packetsim.Machine {
	return rulesetOf(p, f, o, nil).machine()
}

// Machine is like the function Machine, with the options that are in force on this node, and, unless a Sync is under way, with the numbers
// that endpoints have in the kernel. It waits for no Sync.
func (b *Backend) Machine(p *plan.Plan, f plan.Family) *packetsim.Machine {
	for _, e := range b.Engines {
		if e.family != f {
			continue
		}
		before := map[plan.Key]written{}
		if e.mu.TryLock() {
			for k := range p.Services {
				before[k] = e.current.of(k)
			}
			e.mu.Unlock()
		}
		return rulesetOf(p, f, e.options, before).machine()
	}
	return packetsim.New(f)
}

// MachineOf returns what a packet meets where the table has these chains, and these elements in sets by name, and no clients are remembered.
func MachineOf(f plan.Family, chains []nft.Chain, elements map[string][]nft.Element) *packetsim.Machine {
	r := &ruleset{family: f, chains: map[string]nft.Chain{}, elements: map[id]value{}, clients: map[string]value{}}
	for _, c := range chains {
		r.chains[c.Name] = c
	}
	for i, s := range simSets[f] {
		for _, el := range elements[s.Name] {
			r.elements[id{setID(i), el.Key}] = valueOf(el)
		}
	}
	return r.machine()
}

// ruleset is what a plan becomes, with the clients that are remembered.
type ruleset struct {
	family   plan.Family
	chains   map[string]nft.Chain
	elements map[id]value     // but those that rules add
	clients  map[string]value // that are remembered, by key: which map has them follows from it
	// next, if not nil, has the elements that a packet finds from its lookup number since on, while it goes on by the rules of this one, as in
	// the kernel where a transaction is carried out meanwhile. Only tests set it.
	next  *ruleset
	since int
}

// rulesetOf returns the ruleset of a plan, where the kernel has before.
func rulesetOf(p *plan.Plan, f plan.Family, o Options, before map[plan.Key]written) *ruleset {
	chains, elements, _ := layoutOf(p, f, o).desired(p, func(sp *plan.ServicePort) written { return before[sp.Key] })
	r := &ruleset{family: f, chains: map[string]nft.Chain{}, elements: elements, clients: map[string]value{}}
	for _, c := range chains {
		r.chains[c.Name] = c
	}
	return r
}

// machine returns what the rules are in the kernel, beside the clients that are remembered.
func (r *ruleset) machine() *packetsim.Machine {
	m := packetsim.New(r.family)
	m.Tables[names.NFTables] = map[string]*packetsim.Chain{}
	for _, spec := range r.chains {
		c := &packetsim.Chain{Name: spec.Name}
		for _, each := range spec.Rules {
			c.Rules = append(c.Rules, simRule{r, each})
		}
		m.Tables[names.NFTables][c.Name] = c
		if h := spec.Hook; h != nil {
			m.Attach(names.NFTables, c, packetsim.Hook(strings.ToUpper(h.Name)), int(h.Priority), h.Type == "nat")
		}
	}
	return m
}

// state is what the kernel keeps of a packet beside what rules of iptables see.
type state struct {
	priority uint32
	lookups  int              // how many there were
	clients  map[string]value // those that are remembered
}

func (r *ruleset) stateOf(p *packetsim.Packet) state {
	if s, ok := p.State.(state); ok {
		return s
	}
	return state{clients: r.clients}
}

// simRule is a rule for the simulator.
type simRule struct {
	*ruleset
	nft.Rule
}

func (r simRule) String() string {
	if r.Comment == "" {
		return r.Rule.Text
	}
	return fmt.Sprintf("%s comment %q", r.Rule.Text, r.Comment)
}

// vm carries out the expressions of a rule.
type vm struct {
	simRule
	packetsim.Effect
	state
	registers      [64]byte
	breaks, writes bool // It does not match; it has changed something all the same.
}

func (r simRule) Eval(p *packetsim.Packet, effects []packetsim.Effect) ([]packetsim.Effect, error) {
	ways := []vm{{simRule: r, Effect: packetsim.Effect{Probability: 1, Packet: *p}, state: r.stateOf(p)}}
	for i := range ways[0].registers {
		ways[0].registers[i] = 0xaa // No rule may use what another one has left.
	}
	for _, e := range r.Exprs {
		for i := range len(ways) {
			w := &ways[i]
			register, modulus := w.choice(e)
			switch {
			case w.breaks && !w.writes && len(ways) == 1:
				return effects, nil
			case w.breaks:
			case modulus > 0:
				w.Probability /= float64(modulus)
				w.set(register, native(0))
				for n := uint32(1); n < modulus; n++ {
					ways = append(ways, ways[i])
					ways[len(ways)-1].set(register, native(n))
				}
			default:
				if err := w.expr(e); err != nil {
					return nil, err
				}
			}
		}
	}
	for _, w := range ways {
		w.Packet.State = w.state
		if !w.breaks || w.writes {
			effects = append(effects, w.Effect)
		}
	}
	return effects, nil
}

// choice returns the register and the number of values that an expression draws from; 0 if it draws none. A hash of the client's port is
// as good as a random number, as nobody knows that port.
func (m *vm) choice(e expr.Any) (register, modulus uint32) {
	switch e := e.(type) {
	case *expr.Numgen:
		return e.Register, e.Modulus
	case *expr.Hash:
		if e.Seed == hashSeed && int(e.Length) > m.family.Bits()/8 {
			return e.DestRegister, e.Modulus
		}
	}
	return 0, 0
}

// at is where a register begins.
func at(register uint32) int { return int(register-unix.NFT_REG32_00) * 4 }

func (m *vm) set(register uint32, b []byte) {
	n := (len(b) + 3) &^ 3
	clear(m.registers[at(register) : at(register)+n])
	copy(m.registers[at(register):], b)
}

func (m *vm) get(register uint32, n int) []byte { return m.registers[at(register) : at(register)+n] }

func (m *vm) expr(e expr.Any) error {
	p := &m.Packet
	switch e := e.(type) {
	case *expr.Payload:
		m.set(e.DestRegister, m.header(e.Base)[e.Offset:e.Offset+e.Len])
	case *expr.Meta:
		if !e.SourceRegister {
			return m.meta(e)
		}
		to := &p.Mark
		if e.Key == expr.MetaKeyPRIORITY {
			to = &m.priority
		}
		*to, m.writes = binary.NativeEndian.Uint32(m.get(e.Register, 4)), true
	case *expr.Immediate:
		m.set(e.Register, e.Data)
	case *expr.Bitwise:
		b := bytes.Clone(m.get(e.SourceRegister, int(e.Len)))
		for i := range b {
			b[i] = b[i]&e.Mask[i] ^ e.Xor[i]
		}
		m.set(e.DestRegister, b)
	case *expr.Cmp:
		m.breaks = bytes.Equal(m.get(e.Register, len(e.Data)), e.Data) != (e.Op == expr.CmpOpEq)
	case *expr.Fib:
		a, n := p.Src, uint32(1)
		if e.FlagDADDR {
			a = p.Dst
		}
		if p.Local(a) {
			n = addrLocal
		}
		m.set(e.Register, native(n))
	case *expr.Ct:
		n := uint32(0)
		switch {
		case e.Key == expr.CtKeySTATE:
			n = ctNew
		case e.Key == expr.CtKeySTATUS && p.DNAT:
			n = ipsDstNAT
		}
		m.set(e.Register, native(n))
	case *expr.Hash:
		h := jhash(m.get(e.SourceRegister, int(e.Length)), e.Seed)
		m.set(e.DestRegister, native(uint32(uint64(h)*uint64(e.Modulus)>>32)))
	case *expr.Lookup:
		m.lookup(e)
	case *expr.Dynset:
		m.dynset(e)
	case *expr.Verdict:
		switch e.Kind {
		case expr.VerdictDrop:
			m.End = packetsim.Drop
		case expr.VerdictJump:
			m.Next, m.Chain = packetsim.Jump, e.Chain
		case expr.VerdictGoto:
			m.Next, m.Chain = packetsim.Goto, e.Chain
		case expr.VerdictReturn:
			m.Next = packetsim.Return
		default:
			return fmt.Errorf("verdict %d is not known", e.Kind)
		}
	case *expr.NAT:
		a, _ := netip.AddrFromSlice(m.get(e.RegAddrMin, m.family.Bits()/8))
		p.Translate(netip.AddrPortFrom(a, binary.BigEndian.Uint16(m.get(e.RegProtoMin, 2))))
		m.End, p.DNAT = packetsim.Accept, true
	case *expr.Masq:
		m.End, p.Masquerade = packetsim.Accept, true
	case *expr.Reject:
		m.End = packetsim.Reject
	default:
		return fmt.Errorf("expression %T is not known", e)
	}
	return nil
}

func (m *vm) header(base expr.PayloadBase) []byte {
	h := m.Packet.Header()
	if base == expr.PayloadBaseTransportHeader {
		return h[len(h)-4:]
	}
	return h
}

func (m *vm) meta(e *expr.Meta) error {
	switch e.Key {
	case expr.MetaKeyMARK:
		m.set(e.Register, native(m.Packet.Mark))
	case expr.MetaKeyPRIORITY:
		m.set(e.Register, native(m.priority))
	case expr.MetaKeyL4PROTO:
		m.set(e.Register, []byte{netlink.Protocol(plan.Protocol(strings.ToUpper(m.Packet.Protocol)))})
	case expr.MetaKeyIIFNAME:
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, m.Packet.In)
		m.set(e.Register, name)
	default:
		return fmt.Errorf("meta %d is not known", e.Key)
	}
	return nil
}

// simSets are the sets of each family by setID.
var simSets = map[plan.Family][]nft.Set{plan.IPv4: sets(plan.IPv4), plan.IPv6: sets(plan.IPv6)}

func (m *vm) setNamed(name string) setID {
	i := slices.IndexFunc(simSets[m.family], func(s nft.Set) bool { return s.Name == name })
	if i < 0 {
		panic("no set " + name)
	}
	return setID(i)
}

func (m *vm) keyOf(set string, register uint32) string {
	return string(m.get(register, simSets[m.family][m.setNamed(set)].Key.Length()))
}

func (m *vm) lookup(e *expr.Lookup) {
	r := m.ruleset
	if m.lookups++; r.next != nil && m.lookups >= r.since {
		r = r.next
	}
	i := id{m.setNamed(e.SetName), m.keyOf(e.SetName, e.SourceRegister)}
	v, is := r.elements[i]
	if i.set.remembers() {
		v, is = m.clients[i.key]
	}
	if is && i.set != sameByte {
		m.note(i, v)
	}
	switch {
	case is == e.Invert:
		m.breaks = true
	case v.chain != "":
		m.Next, m.Chain = packetsim.Goto, v.chain
	case e.IsDestRegSet:
		m.set(e.DestRegister, []byte(v.data))
	}
}

// note adds an element to those by which the rule does what it does.
func (m *vm) note(i id, v value) {
	set := simSets[m.family][i.set]
	text := fmt.Sprintf("@%s { %s%s }", set.Name, i.text(m.family), v.text(set))
	m.Elements = append(m.Elements[:len(m.Elements):len(m.Elements)], text)
}

func (m *vm) dynset(e *expr.Dynset) {
	key := m.keyOf(e.SetName, e.SrcRegKey)
	known := maps.Clone(m.clients) // What one way remembers is not the other's.
	if _, is := known[key]; e.Operation == opDelete {
		delete(known, key)
	} else if !is {
		known[key] = value{data: string(m.get(e.SrcRegData, 4))}
	}
	m.clients, m.writes = known, true
}

// jhash is Bob Jenkins's hash lookup3 as the kernel has it (linux/jhash.h).
func jhash(key []byte, seed uint32) uint32 {
	n := 0xdeadbeef + uint32(len(key)) + seed
	a, b, c := n, n, n
	rol := bits.RotateLeft32
	word := func(i int) uint32 {
		var w [4]byte
		if i < len(key) {
			copy(w[:], key[i:])
		}
		return binary.NativeEndian.Uint32(w[:])
	}
	for ; len(key) > 12; key = key[12:] {
		a, b, c = a+word(0), b+word(4), c+word(8)
		a = (a - c) ^ rol(c, 4)
		c += b
		b = (b - a) ^ rol(a, 6)
		a += c
		c = (c - b) ^ rol(b, 8)
		b += a
		a = (a - c) ^ rol(c, 16)
		c += b
		b = (b - a) ^ rol(a, 19)
		a += c
		c = (c - b) ^ rol(b, 4)
		b += a
	}
	if len(key) == 0 {
		return c
	}
	a, b, c = a+word(0), b+word(4), c+word(8)
	c = (c ^ b) - rol(b, 14)
	a = (a ^ c) - rol(c, 11)
	b = (b ^ a) - rol(a, 25)
	c = (c ^ b) - rol(b, 16)
	a = (a ^ c) - rol(c, 4)
	b = (b ^ a) - rol(a, 14)
	return (c ^ b) - rol(b, 24)
}
