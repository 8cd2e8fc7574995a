package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// builder builds a rule: its text in the language of nft, and its expressions. Registers are numbered from 0 to 15 and have four bytes
// each. No rule uses what another one has left in them.
type builder struct {
	family plan.Family
	out    nft.Rule
}

func (b *builder) add(text string, e ...expr.Any) *builder {
	if text != "" && b.out.Text != "" {
		b.out.Text += " "
	}
	b.out.Text += text
	b.out.Exprs = append(b.out.Exprs, e...)
	return b
}

func (b *builder) comment(text string) *builder {
	b.out.Comment = text
	return b
}

// register is the kernel's number of a register.
func register(i int) uint32 { return unix.NFT_REG32_00 + uint32(i) }

// addrRegisters is how many registers an address takes.
func addrRegisters(f plan.Family) int { return f.Bits() / 32 }

// nameRegisters is how many the name of a Service port takes: an address, a protocol and a port.
func nameRegisters(f plan.Family) int { return addrRegisters(f) + 2 }

func (b *builder) ip() string { return nft.FamilyName(b.family) }

// address loads the source or destination address.
func (b *builder) address(destination bool, at int) expr.Any {
	length := uint32(b.family.Bits() / 8)
	return &expr.Payload{DestRegister: register(at), Base: expr.PayloadBaseNetworkHeader, Offset: b.addressOffset(destination), Len: length}
}

// addressOffset is where in the header of its family an address begins.
func (b *builder) addressOffset(destination bool) uint32 {
	first := map[plan.Family]uint32{plan.IPv4: 12, plan.IPv6: 8}[b.family]
	if destination {
		return first + uint32(b.family.Bits()/8)
	}
	return first
}

func loadProtocol(at int) expr.Any {
	return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register(at)}
}

func loadPort(at int) expr.Any {
	return &expr.Payload{DestRegister: register(at), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

// frontend loads the frontend that the packet is for, from register 0 on.
func (b *builder) frontend() (string, []expr.Any) {
	a := addrRegisters(b.family)
	return b.ip() + " daddr . meta l4proto . th dport", []expr.Any{b.address(true, 0), loadProtocol(a), loadPort(a + 1)}
}

// frontendOf loads the frontend of a kind, from register 0 on: a node port is known by protocol and port alone.
func (b *builder) frontendOf(nodePort bool) (string, []expr.Any) {
	if !nodePort {
		return b.frontend()
	}
	a := noAddress(b.family)
	n := addrRegisters(b.family)
	return a.String() + " . meta l4proto . th dport",
		[]expr.Any{&expr.Immediate{Register: register(0), Data: a.AsSlice()}, loadProtocol(n), loadPort(n + 1)}
}

// noAddress is the address of node ports in maps. No packet has it as its destination.
func noAddress(f plan.Family) netip.Addr {
	if f == plan.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// lookup looks the key that begins at register 0 up in a map, and puts what it finds in its place.
func lookup(set string) expr.Any {
	return &expr.Lookup{SourceRegister: register(0), SetName: set, DestRegister: register(0), IsDestRegSet: true}
}

func contains(set string, key int) expr.Any {
	return &expr.Lookup{SourceRegister: register(key), SetName: set}
}

func containsNot(set string, key int) expr.Any {
	return &expr.Lookup{SourceRegister: register(key), SetName: set, Invert: true}
}

// toKind goes to the chain of the kind that a map has for a frontend. The number of the kind is the packet's priority on the way there:
// versions of nft crash on a rule that looks up in one map what another one has. A priority matters to nothing but the queue of the
// interface by which a packet leaves, and only the first packet of a connection comes here.
func (b *builder) toKind(set, chain string, nodePort bool) nft.Rule {
	text, exprs := b.frontendOf(nodePort)
	return b.add("meta priority set "+text+" map @"+set, append(exprs, lookup(set), storePriority(0))...).
		goTo(chain)
}

// byKind goes to the chain of the kind whose number is the packet's priority.
func (b *builder) byKind(set string) nft.Rule {
	return b.add("meta priority vmap @"+set, load(expr.MetaKeyPRIORITY, 0),
		&expr.Lookup{SourceRegister: register(0), SetName: set, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true}).out
}

func load(k expr.MetaKey, at int) expr.Any { return &expr.Meta{Key: k, Register: register(at)} }

func storePriority(from int) expr.Any {
	return &expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: register(from)}
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

func equals(v []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: v} }

func differs(v []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: v} }

func (b *builder) op(not bool) (string, func([]byte) expr.Any) {
	if not {
		return "!= ", differs
	}
	return "", equals
}

// within matches packets whose source or destination is in a range, or with not, is not.
func (b *builder) within(destination bool, r netip.Prefix, not bool) *builder {
	which := " saddr "
	if destination {
		which = " daddr "
	}
	sign, compare := b.op(not)
	exprs := []expr.Any{b.address(destination, 0)}
	if r.Bits() < r.Addr().BitLen() {
		mask := make([]byte, r.Addr().BitLen()/8)
		for i := range r.Bits() {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		exprs = append(exprs, &expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: uint32(len(mask)),
			Mask: mask, Xor: make([]byte, len(mask))})
	}
	text := r.String()
	if r.IsSingleIP() {
		text = r.Addr().String()
	}
	return b.add(b.ip()+which+sign+text, append(exprs, compare(r.Addr().AsSlice()))...)
}

// addrLocal is RTN_LOCAL, the type of routes to addresses of the node itself.
const addrLocal = 2

// local matches packets whose source or destination is an address of the node, or with not, is none.
func (b *builder) local(destination, not bool) *builder {
	which := "saddr"
	if destination {
		which = "daddr"
	}
	sign, compare := b.op(not)
	return b.add("fib "+which+" type "+sign+"local",
		&expr.Fib{Register: register(0), ResultADDRTYPE: true, FlagDADDR: destination, FlagSADDR: !destination}, compare(native(addrLocal)))
}

// fromPods matches traffic from pods, or with not, all other. It returns nil where nothing matches.
func (b *builder) fromPods(d plan.DetectLocal, not bool) *builder {
	switch {
	case !d.Implemented(b.family):
		return nil
	case d.ByCIDR():
		r := d.CIDR(b.family)
		if r.Bits() > 0 {
			return b.within(false, r, not)
		}
		if not {
			return nil
		}
		return b
	}
	sign, compare := b.op(not)
	text, value := d.Interface, make([]byte, unix.IFNAMSIZ)
	copy(value, d.Interface)
	if d.Mode == plan.DetectInterfaceNamePrefix {
		text, value = text+"*", []byte(d.Interface)
	}
	return b.add(fmt.Sprintf("iifname %s%q", sign, text), &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register(0)}, compare(value))
}

// mark sets or clears bits of the mark.
func (b *builder) mark(bit uint32, set bool) *builder {
	text, xor := fmt.Sprintf("meta mark set meta mark & %#08x", ^bit), native(0)
	if set {
		text, xor = fmt.Sprintf("meta mark set meta mark | %#08x", bit), native(bit)
	}
	return b.add(text, &expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)},
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: native(^bit), Xor: xor},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: register(0)})
}

// marked matches packets with a bit of the mark set.
func (b *builder) marked(bit uint32) *builder {
	return b.add(fmt.Sprintf("meta mark & %#08x == %#08x", bit, bit), &expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)},
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: native(bit), Xor: native(0)}, equals(native(bit)))
}

// tracked matches a bit of a state that connection tracking has.
func (b *builder) tracked(text string, key expr.CtKey, bit uint32) *builder {
	return b.add(text, &expr.Ct{Key: key, Register: register(0)},
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: native(bit), Xor: native(0)}, differs(native(0)))
}

// opDelete is NFT_DYNSET_OP_DELETE, which golang.org/x/sys lacks.
const opDelete = 2

// ipsDstNAT is the bit of a connection's status that is set once its destination has been translated; ctInvalid and ctNew are
// the states of packets that conntrack can't place, and of those that begin a connection.
const (
	ipsDstNAT = 1 << 5
	ctInvalid = 1
	ctNew     = 8
)

// backToItself matches packets whose source and destination address are the same. No expression compares registers. But a set of all
// pairs of equal bytes does, the last byte first, in which addresses most likely differ.
func (b *builder) backToItself() *builder {
	var text []string
	var exprs []expr.Any
	src, dst := b.addressOffset(false), b.addressOffset(true)
	for i := b.family.Bits()/8 - 1; i >= 0; i-- {
		text = append(text, fmt.Sprintf("@nh,%d,8 . @nh,%d,8 @%s", 8*(int(src)+i), 8*(int(dst)+i), names.NFTSame))
		exprs = append(exprs,
			&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseNetworkHeader, Offset: src + uint32(i), Len: 1},
			&expr.Payload{DestRegister: register(1), Base: expr.PayloadBaseNetworkHeader, Offset: dst + uint32(i), Len: 1},
			contains(names.NFTSame, 0))
	}
	return b.add(strings.Join(text, " "), exprs...)
}

func (b *builder) masquerade() nft.Rule {
	return b.add("masquerade fully-random", &expr.Masq{FullyRandom: true}).out
}

func (b *builder) to(v expr.VerdictKind, word, chain string) nft.Rule {
	if chain != "" {
		word += " " + chain
	}
	return b.add(word, &expr.Verdict{Kind: v, Chain: chain}).out
}

func (b *builder) jump(chain string) nft.Rule { return b.to(expr.VerdictJump, "jump", chain) }
func (b *builder) goTo(chain string) nft.Rule { return b.to(expr.VerdictGoto, "goto", chain) }
func (b *builder) drop() nft.Rule             { return b.to(expr.VerdictDrop, "drop", "") }

// translate sends the packet to the endpoint that begins at register 0, and takes the number of the kind off it.
func (b *builder) translate(text string, exprs []expr.Any) nft.Rule {
	const spare = 15
	b.add("meta priority set 0 dnat to "+text, exprs...)
	return b.add("", &expr.Immediate{Register: register(spare), Data: native(0)}, storePriority(spare),
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nft.Protocol(b.family)), RegAddrMin: register(0),
			RegProtoMin: register(addrRegisters(b.family))}).out
}

// endpointSets are the maps of a kind's endpoints by number, of their identifiers by number, and of them by identifier.
func (k kind) endpointSets() (byNumber, choices, sticky string) {
	if k.local {
		return names.NFTLocalEndpoints, names.NFTLocalChoices, names.NFTLocalStickyEndpoints
	}
	return names.NFTEndpoints, names.NFTChoices, names.NFTStickyEndpoints
}

// pick looks a random one of a kind's endpoints up in a map.
func (b *builder) pick(k kind, set string) (string, []expr.Any) {
	text, exprs := b.frontendOf(k.nodePort)
	return fmt.Sprintf("%s . numgen random mod %d map @%s", text, k.count, set),
		append(exprs, &expr.Numgen{Register: register(nameRegisters(b.family)), Modulus: uint32(k.count), Type: unix.NFT_NG_RANDOM},
			lookup(set))
}

// endpoints are the rules that send a packet to an endpoint.
func (k kind) endpoints(f plan.Family) []nft.Rule {
	if k.affinity > 0 {
		return k.keep(f)
	}
	b := &builder{family: f}
	set, _, _ := k.endpointSets()
	return []nft.Rule{b.translate(b.pick(k, set))}
}

// keep are the rules for Services with affinity. A client that is known goes to its endpoint, if that still is one; else it is
// forgotten, gets another one, and that is remembered. Where there is no room for one more client, the last rule sends it on all the
// same. The identifier of the endpoint is the packet's priority on the way from one map to the next, as with kinds.
func (k kind) keep(f plan.Family) []nft.Rule {
	client := nameRegisters(f)
	data := client + addrRegisters(f)
	_, choices, sticky := k.endpointSets()
	// clients loads the key of the map of clients.
	clients := func(b *builder) (string, []expr.Any) {
		text, exprs := b.frontendOf(k.nodePort)
		return text + " . " + b.ip() + " saddr", append(exprs, b.address(false, client))
	}
	change := func(b *builder, word string, op uint32, timeout time.Duration) {
		text, exprs := clients(b)
		within := ""
		if timeout > 0 {
			within = fmt.Sprintf(" timeout %ds", k.affinity)
		}
		b.add(fmt.Sprintf("%s @%s { %s%s : meta priority }", word, names.NFTAffinity, text, within), append(exprs,
			load(expr.MetaKeyPRIORITY, data), &expr.Dynset{SrcRegKey: register(0), SrcRegData: register(data),
				SetName: names.NFTAffinity, Operation: op, Timeout: timeout})...)
	}
	remember := func(b *builder) {
		change(b, "update", unix.NFT_DYNSET_OP_UPDATE, time.Duration(k.affinity)*time.Second)
	}
	send := func(b *builder) nft.Rule {
		text, exprs := b.frontendOf(k.nodePort)
		return b.translate(text+" . meta priority map @"+sticky,
			append(exprs, load(expr.MetaKeyPRIORITY, client), lookup(sticky)))
	}

	known := &builder{family: f}
	text, exprs := clients(known)
	known.add("meta priority set "+text+" map @"+names.NFTAffinity,
		append(exprs, lookup(names.NFTAffinity), storePriority(0))...)
	remember(known)

	gone := &builder{family: f}
	change(gone, "delete", opDelete, 0)

	chosen := &builder{family: f}
	text, exprs = chosen.pick(k, choices)
	chosen.add("meta priority set "+text, append(exprs, storePriority(0))...)

	remembered := &builder{family: f}
	remember(remembered)
	return []nft.Rule{send(known), gone.out, chosen.out, remembered.out, send(&builder{family: f})}
}
