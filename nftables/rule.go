package nftables

import (
	"encoding/binary"
	"fmt"
	"math"
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
// each. No rule reads a register that another rule has written.
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

// register returns the kernel's number of a register.
func register(i int) uint32 { return unix.NFT_REG32_00 + uint32(i) }

// addrRegisters returns how many registers an address takes.
func addrRegisters(f plan.Family) int { return f.Bits() / 32 }

// nameRegisters returns how many registers a frontend takes: its address, protocol and port.
func nameRegisters(f plan.Family) int { return addrRegisters(f) + 2 }

func (b *builder) ip() string { return nft.FamilyName(b.family) }

// address loads the source or destination address.
func (b *builder) address(destination bool, at int) expr.Any {
	length := uint32(b.family.Bits() / 8)
	return &expr.Payload{DestRegister: register(at), Base: expr.PayloadBaseNetworkHeader, Offset: b.addressOffset(destination), Len: length}
}

// addressOffset returns the offset of an address in the IP header.
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

// frontend loads the packet's destination address, protocol and port, from register 0 on.
func (b *builder) frontend() (string, []expr.Any) {
	a := addrRegisters(b.family)
	return b.ip() + " daddr . meta l4proto . th dport", []expr.Any{b.address(true, 0), loadProtocol(a), loadPort(a + 1)}
}

// frontendOf loads the packet's frontend as maps have it, from register 0 on. That of a node port has noAddress instead of an
// address: the address without any of its bits, since nft prints constants in keys as invalid, and takes none.
func (b *builder) frontendOf(nodePort bool) (string, []expr.Any) {
	if !nodePort {
		return b.frontend()
	}
	zeros, n := noAddress(b.family).AsSlice(), addrRegisters(b.family)
	return fmt.Sprintf("%s daddr & %s . meta l4proto . th dport", b.ip(), noAddress(b.family)),
		[]expr.Any{b.address(true, 0), bitwise(0, zeros, zeros), loadProtocol(n), loadPort(n + 1)}
}

// noAddress returns the address of node ports in maps. Packets that have it as their destination are for no Service.
func noAddress(f plan.Family) netip.Addr {
	if f == plan.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// lookup looks up the key that begins at register 0 in a map, and overwrites it with the data found.
func lookup(set string) expr.Any {
	return &expr.Lookup{SourceRegister: register(0), SetName: set, DestRegister: register(0), IsDestRegSet: true}
}

func contains(set string) expr.Any {
	return &expr.Lookup{SourceRegister: register(0), SetName: set}
}

// kindIn matches packets to a frontend that a map has, and makes the number of its kind the packet's priority on the way to the chain of
// the kind: versions of nft crash on a rule that uses the data of one map as the key of another. The priority matters only to the queue of
// the interface by which a packet leaves, and only the first packet of a connection comes here.
func (b *builder) kindIn(set string, nodePort bool) *builder {
	text, exprs := b.frontendOf(nodePort)
	return b.add("meta priority set "+text+" map @"+set, append(exprs, lookup(set), storePriority(0))...)
}

// byKind goes to the chain of the kind whose number is the packet's priority.
func (b *builder) byKind(set string) nft.Rule {
	return b.add("meta priority vmap @"+set, loadPriority(0),
		&expr.Lookup{SourceRegister: register(0), SetName: set, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true}).out
}

// hasBits matches packets whose priority, which is the number of a kind, has bits set.
func (b *builder) hasBits(bits uint32) *builder {
	text := classID(bits)
	return b.add(fmt.Sprintf("meta priority & %s == %s", text, text), loadPriority(0),
		bitwise(0, native(bits), native(0)), equals(native(bits)))
}

// classID is a priority in the language of nft.
func classID(n uint32) string {
	switch n {
	case 0:
		return "none"
	case math.MaxUint32:
		return "root"
	}
	return fmt.Sprintf("%x:%x", n>>16, n&0xffff)
}

func loadPriority(at int) expr.Any {
	return &expr.Meta{Key: expr.MetaKeyPRIORITY, Register: register(at)}
}

func storePriority(from int) expr.Any {
	return &expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: register(from)}
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

func equals(v []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: v} }

func differs(v []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: v} }

// bitwise replaces what a register holds by its bits in mask, of which those in xor are turned over.
func bitwise(at int, mask, xor []byte) expr.Any {
	return &expr.Bitwise{SourceRegister: register(at), DestRegister: register(at), Len: uint32(len(mask)), Mask: mask, Xor: xor}
}

func (b *builder) op(not bool) (string, func([]byte) expr.Any) {
	if not {
		return "!= ", differs
	}
	return "", equals
}

// within matches packets whose source or destination is in a range, or if not is set, outside it.
func (b *builder) within(destination bool, r netip.Prefix, not bool) *builder {
	which := " saddr "
	if destination {
		which = " daddr "
	}
	sign, compare := b.op(not)
	exprs := []expr.Any{b.address(destination, 0)}
	if r.Bits() < r.Addr().BitLen() {
		mask := maskOf(b.family, r.Bits())
		exprs = append(exprs, bitwise(0, mask, make([]byte, len(mask))))
	}
	text := r.String()
	if r.IsSingleIP() {
		text = r.Addr().String()
	}
	return b.add(b.ip()+which+sign+text, append(exprs, compare(r.Addr().AsSlice()))...)
}

// fromRange matches packets to a frontend from a source range of this length that it has. The length is part of the key. It comes from the port,
// all of whose bits are replaced, as nft takes no constants there.
func (b *builder) fromRange(bits int) *builder {
	text, exprs := b.frontend()
	at := nameRegisters(b.family)
	text, exprs = text+" . "+b.ip()+" saddr", append(exprs, b.address(false, at))
	if bits < b.family.Bits() {
		mask := maskOf(b.family, bits)
		a, _ := netip.AddrFromSlice(mask)
		text += " & " + a.String()
		exprs = append(exprs, bitwise(at, mask, make([]byte, len(mask))))
	}
	at += addrRegisters(b.family)
	return b.add(fmt.Sprintf("%s . th dport & %d | %d @%s", text, bits, bits, names.NFTSourceRanges), append(exprs, loadPort(at),
		bitwise(at, []byte{0, 0}, binary.BigEndian.AppendUint16(nil, uint16(bits))), contains(names.NFTSourceRanges))...)
}

func maskOf(f plan.Family, bits int) []byte {
	mask := make([]byte, f.Bits()/8)
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// addrLocal is RTN_LOCAL, the type of routes to addresses of the node itself.
const addrLocal = 2

// local matches packets whose source or destination is an address of the node, or if not is set, is none.
func (b *builder) local(destination, not bool) *builder {
	which := "saddr"
	if destination {
		which = "daddr"
	}
	sign, compare := b.op(not)
	return b.add("fib "+which+" type "+sign+"local",
		&expr.Fib{Register: register(0), ResultADDRTYPE: true, FlagDADDR: destination, FlagSADDR: !destination}, compare(native(addrLocal)))
}

// fromPods matches traffic from pods, or if not is set, all other traffic. It returns nil if that never matches.
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
		bitwise(0, native(^bit), xor),
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: register(0)})
}

// marked matches packets with a bit of the mark set.
func (b *builder) marked(bit uint32) *builder {
	return b.add(fmt.Sprintf("meta mark & %#08x == %#08x", bit, bit), &expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)},
		bitwise(0, native(bit), native(0)), equals(native(bit)))
}

// tracked matches packets whose conntrack state or status has a bit set.
func (b *builder) tracked(text string, key expr.CtKey, bit uint32) *builder {
	return b.add(text, &expr.Ct{Key: key, Register: register(0)},
		bitwise(0, native(bit), native(0)), differs(native(0)))
}

// opDelete is NFT_DYNSET_OP_DELETE, which golang.org/x/sys lacks.
const opDelete = 2

// ipsDstNAT is the bit of a connection's status that is set once its destination has been translated, and ipsConfirmed the one that is set once
// its first packet has passed. ctInvalid and ctNew are
// the states of packets that conntrack can't assign to a connection, and of packets that begin one.
const (
	ipsConfirmed = 1 << 3
	ipsDstNAT    = 1 << 5
	ctInvalid    = 1
	ctNew        = 8
)

// backToItself matches packets whose source and destination address are the same. No expression compares two registers, so it looks up
// each pair of bytes in a set of all pairs of equal bytes. The last byte comes first: addresses most likely differ there.
func (b *builder) backToItself() *builder {
	var text []string
	var exprs []expr.Any
	src, dst := b.addressOffset(false), b.addressOffset(true)
	for i := b.family.Bits()/8 - 1; i >= 0; i-- {
		text = append(text, fmt.Sprintf("@nh,%d,8 . @nh,%d,8 @%s", 8*(int(src)+i), 8*(int(dst)+i), names.NFTSame))
		exprs = append(exprs,
			&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseNetworkHeader, Offset: src + uint32(i), Len: 1},
			&expr.Payload{DestRegister: register(1), Base: expr.PayloadBaseNetworkHeader, Offset: dst + uint32(i), Len: 1},
			contains(names.NFTSame))
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
func (b *builder) ret() nft.Rule              { return b.to(expr.VerdictReturn, "return", "") }

// clearing is how the text of a rule begins that clears the priority just before it translates the destination. As input, nft would have
// that done before the priority is used for the lookup.
const clearing = "meta priority set none "

// translate sends the packet to the endpoint that begins at register 0, and clears the priority, which has the number of the kind.
func (b *builder) translate(text string, exprs []expr.Any) nft.Rule {
	const spare = 15
	b.add(clearing+"dnat to "+text, exprs...)
	return b.add("", &expr.Immediate{Register: register(spare), Data: native(0)}, storePriority(spare),
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(nft.Protocol(b.family)), RegAddrMin: register(0),
			RegProtoMin: register(addrRegisters(b.family))}).out
}

// way is how the endpoints of a frontend are looked up: by which of the frontend's names, and among which endpoints.
type way struct{ nodePort, local bool }

func (k kind) way() way { return way{k.nodePort, k.local} }

var ways = []way{{}, {local: true}, {nodePort: true}, {nodePort: true, local: true}}

// chain is the name of a chain of which each way has one.
func (w way) chain(name string) string {
	if w.nodePort {
		name += "-node-port"
	}
	if w.local {
		name += "-local"
	}
	return name
}

// byPriority looks up in a map what a frontend has under the packet's priority.
func (w way) byPriority(b *builder, set string) (string, []expr.Any) {
	text, exprs := b.frontendOf(w.nodePort)
	return text + " . meta priority map @" + set, append(exprs, loadPriority(nameRegisters(b.family)), lookup(set))
}

// endpoints are the rules of a kind that send a packet to an endpoint. They only choose a number, and chains that all kinds share look
// it up, because each rule that looks something up makes the kernel take longer with the map: at each rule more, for all that the map
// has; and at each element more, for all rules.
func (k kind) endpoints(f plan.Family) []nft.Rule {
	b := (&builder{family: f}).number(k.schedule, k.count)
	if k.affinity == 0 {
		return []nft.Rule{b.goTo(k.way().chain(names.NFTToEndpoint))}
	}
	t := k.term()
	return []nft.Rule{(&builder{family: f}).jump(t.keep()), b.goTo(t.choose())}
}

// hashSeed is the same on all nodes, so that they send a client to the same endpoint.
const hashSeed = 0x6e6f6465

// number makes the packet's priority a number below count.
func (b *builder) number(s schedule, count int) *builder {
	if s == random {
		return b.add(fmt.Sprintf("meta priority set numgen random mod %d", count),
			&expr.Numgen{Register: register(0), Modulus: uint32(count), Type: unix.NFT_NG_RANDOM}, storePriority(0))
	}
	text, exprs, n := b.ip()+" saddr", []expr.Any{b.address(false, 0)}, addrRegisters(b.family)
	if s == bySourcePort {
		text, exprs = text+" . th sport",
			append(exprs, &expr.Payload{DestRegister: register(n), Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2})
		n++
	}
	return b.add(fmt.Sprintf("meta priority set jhash %s mod %d seed %#x", text, count, hashSeed), append(exprs,
		&expr.Hash{SourceRegister: register(0), DestRegister: register(0), Length: uint32(4 * n), Modulus: uint32(count), Seed: hashSeed,
			Type: expr.HashTypeJenkins}, storePriority(0))...)
}

// endpointChains are those that look up an endpoint. With affinity, a number leads to the identifier of an endpoint first.
func (w way) endpointChains(f plan.Family) []nft.Chain {
	all, of := sets(f), setsOf(kind{local: w.local})
	send := func(set string) nft.Rule {
		b := &builder{family: f}
		return b.translate(w.byPriority(b, set))
	}
	// What the client was remembered for is none of the endpoints any more.
	var gone []nft.Rule
	for share := range affinityShares {
		gone = append(gone, (&builder{family: f}).inShare(w, share).client(w, share, "delete", opDelete, 0).out)
	}
	choice := &builder{family: f}
	text, exprs := w.byPriority(choice, all[of.choice].Name)
	choice.add("meta priority set "+text, append(exprs, storePriority(0))...)
	return []nft.Chain{
		{Name: w.chain(names.NFTToEndpoint), Rules: []nft.Rule{send(all[of.plain].Name)}},
		{Name: w.chain(names.NFTToSticky), Rules: []nft.Rule{send(all[of.sticky].Name)}},
		{Name: w.chain(names.NFTChoice), Rules: append(gone, choice.out)},
	}
}

// shareSeed makes the share of a frontend independent of what hashes choose among endpoints.
const shareSeed = 0x73686172

// inShare matches packets to frontends whose clients are in this share. The address of a node port has no bits in maps, and adds nothing to the hash.
func (b *builder) inShare(w way, share int) *builder {
	text, exprs, n := "meta l4proto . th dport", []expr.Any{loadProtocol(0), loadPort(1)}, 2
	if !w.nodePort {
		text, exprs = b.frontend()
		n = nameRegisters(b.family)
	}
	return b.add(fmt.Sprintf("jhash %s mod %d seed %#x == %d", text, affinityShares, shareSeed, share), append(exprs,
		&expr.Hash{SourceRegister: register(0), DestRegister: register(0), Length: uint32(4 * n), Modulus: affinityShares, Seed: shareSeed,
			Type: expr.HashTypeJenkins}, equals(native(uint32(share))))...)
}

// client loads the key by which the map of clients has the client of a frontend, and changes that element: its identifier becomes the
// packet's priority, which is the number of the kind before, as long as it is on the way from one map to the next.
func (b *builder) client(w way, share int, word string, op uint32, timeout time.Duration) *builder {
	text, exprs := b.clientOf(w)
	within := ""
	if timeout > 0 {
		within = fmt.Sprintf(" timeout %ds", int(timeout.Seconds()))
	}
	data := nameRegisters(b.family) + addrRegisters(b.family)
	return b.add(fmt.Sprintf("%s @%s { %s%s : meta priority }", word, shareName(share), text, within), append(exprs,
		loadPriority(data), &expr.Dynset{SrcRegKey: register(0), SrcRegData: register(data),
			SetName: shareName(share), Operation: op, Timeout: timeout})...)
}

func (b *builder) clientOf(w way) (string, []expr.Any) {
	text, exprs := b.frontendOf(w.nodePort)
	return text + " . " + b.ip() + " saddr", append(exprs, b.address(false, nameRegisters(b.family)))
}

// term is for how long clients keep their endpoints; each has chains that all kinds with it share.
type term struct {
	way
	seconds uint32
}

func (k kind) term() term { return term{k.way(), k.affinity} }

func (t term) keep() string   { return fmt.Sprintf("%s-%ds", t.chain(names.NFTKeep), t.seconds) }
func (t term) choose() string { return fmt.Sprintf("%s-%ds", t.chain(names.NFTChoose), t.seconds) }

// chains send a client that is known to its endpoint, and return if it has none; and send it to the endpoint of a number and remember
// it for that. Where there is no room for one more client, it is sent all the same.
func (t term) chains(f plan.Family) []nft.Chain {
	send := t.chain(names.NFTToSticky)
	var keep []nft.Rule
	choose := []nft.Rule{(&builder{family: f}).jump(t.chain(names.NFTChoice))}
	for share := range affinityShares {
		rule := func() *builder { return (&builder{family: f}).inShare(t.way, share) }
		remember := func(b *builder) *builder {
			return b.client(t.way, share, "update", unix.NFT_DYNSET_OP_UPDATE, time.Duration(t.seconds)*time.Second)
		}
		known, set := rule(), shareName(share)
		text, exprs := known.clientOf(t.way)
		known.add("meta priority set "+text+" map @"+set, append(exprs, lookup(set), storePriority(0))...)
		keep = append(keep, remember(known).goTo(send))
		choose = append(choose, remember(rule()).out)
	}
	return []nft.Chain{
		{Name: t.keep(), Rules: keep},
		{Name: t.choose(), Rules: append(choose, (&builder{family: f}).goTo(send))},
	}
}
