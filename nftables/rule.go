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

// nodePortKey loads protocol and port, from register 0 on.
func nodePortKey() (string, []expr.Any) {
	return "meta l4proto . th dport", []expr.Any{loadProtocol(0), loadPort(1)}
}

// name loads the name of the Service port, from register 0 on.
func (b *builder) name(k kind) (string, []expr.Any) {
	text, exprs := b.frontend()
	from := names.NFTFrontends
	switch {
	case k.treatment == internal:
		return text, exprs
	case k.nodePort:
		text, exprs = nodePortKey()
		from = names.NFTNodePortServices
	}
	return text + " map @" + from, append(exprs, lookup(from, 0, 0))
}

// lookup looks the key that begins at a register up in a map.
func lookup(set string, key, data int) expr.Any {
	return &expr.Lookup{SourceRegister: register(key), SetName: set, DestRegister: register(data), IsDestRegSet: true}
}

func contains(set string, key int) expr.Any {
	return &expr.Lookup{SourceRegister: register(key), SetName: set}
}

func containsNot(set string, key int) expr.Any {
	return &expr.Lookup{SourceRegister: register(key), SetName: set, Invert: true}
}

// toKind goes to the chain of the kind that a map has for the key that text and exprs have loaded from register 0 on.
func (b *builder) toKind(set, text string, exprs []expr.Any) *builder {
	return b.add(text+" map @"+set+" vmap @"+names.NFTKinds, append(exprs, lookup(set, 0, 0),
		&expr.Lookup{SourceRegister: register(0), SetName: names.NFTKinds, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true})...)
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
	case d.Mode == plan.DetectClusterCIDR || d.Mode == plan.DetectNodeCIDR:
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

// ipsDstNAT is the bit of a connection's status that is set once its destination has been translated; ctInvalid is the one of packets
// that conntrack can't place.
const (
	ipsDstNAT = 1 << 5
	ctInvalid = 1
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

// translate sends the packet to the endpoint that begins at a register.
func (b *builder) translate(text string, exprs []expr.Any, endpoint int) nft.Rule {
	return b.add("dnat to "+text, append(exprs, &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nft.Protocol(b.family)),
		RegAddrMin: register(endpoint), RegProtoMin: register(endpoint + addrRegisters(b.family))})...).out
}

// endpointSet is the map that has the endpoints to choose from, and stickySet the set of those that clients may keep.
func (k kind) endpointSet() string {
	if k.local {
		return names.NFTLocalEndpoints
	}
	return names.NFTEndpoints
}

func (k kind) stickySet() string {
	if k.local {
		return names.NFTLocalSticky
	}
	return names.NFTSticky
}

// pick loads an endpoint at random: the name of the Service port, a random number, and what the map has for both.
func (b *builder) pick(k kind, at int) (string, []expr.Any) {
	n := nameRegisters(b.family)
	text, exprs := b.name(k)
	text += fmt.Sprintf(" . numgen random mod %d map @%s", k.count, k.endpointSet())
	return text, append(exprs, &expr.Numgen{Register: register(n), Modulus: uint32(k.count), Type: unix.NFT_NG_RANDOM},
		lookup(k.endpointSet(), 0, at))
}

// endpoints are the rules that send a packet to an endpoint.
func (k kind) endpoints(f plan.Family) []nft.Rule {
	rule := func() *builder { return &builder{family: f} }
	b := rule()
	text, exprs := b.pick(k, 0)
	plain := b.translate(text, exprs, 0)
	if k.affinity == 0 {
		return []nft.Rule{plain}
	}
	return append(k.keep(f), plain)
}

// keep are the rules for Services with affinity: a client that is known goes to its endpoint, if that is still one; a client whose
// endpoint is gone is forgotten; and the endpoint that is chosen for a client is remembered. Where there is no room for one more, the
// last rule does nothing.
func (k kind) keep(f plan.Family) []nft.Rule {
	// The registers: the name of the Service port, behind it the client or the endpoint, and behind the client another endpoint.
	client := nameRegisters(f)
	kept := client + addrRegisters(f)
	timeout := time.Duration(k.affinity) * time.Second
	update := func(op uint32, timeout time.Duration) expr.Any {
		return &expr.Dynset{SrcRegKey: register(0), SrcRegData: register(kept), SetName: names.NFTAffinity, Operation: op, Timeout: timeout}
	}
	rule := func() (b *builder, name string, exprs []expr.Any) {
		b = &builder{family: f}
		name, exprs = b.name(k)
		return b, name, exprs
	}

	known, name, exprs := rule()
	source := known.ip() + " saddr"
	exprs = append(exprs, known.address(false, client), lookup(names.NFTAffinity, 0, client), contains(k.stickySet(), 0),
		known.address(false, client), lookup(names.NFTAffinity, 0, kept), update(unix.NFT_DYNSET_OP_UPDATE, timeout))
	known.add(fmt.Sprintf("%s . %s . %s map @%s @%s", name, name, source, names.NFTAffinity, k.stickySet()))
	known.add(fmt.Sprintf("update @%s { %s . %s timeout %ds : %s . %s map @%s }", names.NFTAffinity, name, source, k.affinity,
		name, source, names.NFTAffinity))
	toKnown := known.translate(name+" . "+source+" map @"+names.NFTAffinity, exprs, kept)

	gone, name, exprs := rule()
	exprs = append(exprs, gone.address(false, client), lookup(names.NFTAffinity, 0, kept), update(opDelete, 0))
	gone.add(fmt.Sprintf("delete @%s { %s . %s : %s . %s map @%s }", names.NFTAffinity, name, source, name, source, names.NFTAffinity), exprs...)

	chosen := &builder{family: f}
	text, exprs := chosen.pick(k, kept)
	exprs = append(exprs, chosen.address(false, client), update(unix.NFT_DYNSET_OP_UPDATE, timeout))
	chosen.add(fmt.Sprintf("update @%s { %s . %s timeout %ds : %s }", names.NFTAffinity, name, source, k.affinity, text))
	toChosen := chosen.translate("the same", exprs, kept)

	return []nft.Rule{toKnown, gone.out, toChosen}
}
