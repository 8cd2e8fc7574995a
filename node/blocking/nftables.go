package blocking

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// nftRules are the rules of nftables.
type nftRules struct {
	*nft.Ruleset
	sets        *sets
	*interfaces // Rulesets are compared, and maps can't be.
}

// interfaces are the names of this node's interfaces by their indexes, and those, as registers have them, by the names.
type interfaces struct {
	names   map[int]string
	indexes map[string][]byte
}

func readNFT(rules *nft.Ruleset, s *sets) nftRules {
	list, _ := net.Interfaces() // Without them, none is known.
	all := &interfaces{map[int]string{}, map[string][]byte{}}
	for _, l := range list {
		all.names[l.Index], all.indexes[l.Name] = l.Name, binary.NativeEndian.AppendUint32(nil, uint32(l.Index))
	}
	return nftRules{rules, s, all}
}

func (nftRules) variant() string { return "nft" }

func (n nftRules) judges(id nft.ChainID) ([]judge, error) {
	rules, err := n.Rules(id)
	out := make([]judge, len(rules))
	for i, exprs := range rules {
		out[i] = func(p *packet) rule {
			r := &reading{judgement: judging(p), rules: n.Ruleset, sets: n.sets, interfaces: n.interfaces, chain: id, regs: map[uint32]register{}}
			for _, e := range exprs {
				if r.read(e); r.match == no {
					break
				}
			}
			return r.result()
		}
	}
	return out, err
}

// reading is the reading of a rule for a packet, one expression after the other.
type reading struct {
	judgement
	rules *nft.Ruleset
	sets  *sets
	*interfaces
	chain nft.ChainID
	regs  map[uint32]register // by slot
}

// register is what a rule has loaded: bytes of the packet, or something unknown if they are nil.
type register struct {
	value []byte
	name  string
	// specific says that it is the destination's address or port, or the port of an answer's source, and mask what is left of it, unless that is nil.
	specific bool
	mask     []byte
	// only is the part of the value that is known; nil for all of it. about is that of a mark that depends on the Service.
	only  []byte
	about uint32
	// names are those of interfaces, where it has the index of one.
	names map[int]string
}

// slot is the number of the first 4 bytes of a register, which has 16 bytes by its old name and 4 by the new one.
func slot(reg uint32) uint32 {
	if reg < unix.NFT_REG32_00 {
		return 4 * (reg - unix.NFT_REG_1)
	}
	return reg - unix.NFT_REG32_00
}

// read judges an expression, or remembers what it loads.
func (r *reading) read(e expr.Any) {
	switch e := e.(type) {
	case *expr.Cmp:
		r.compare(r.regs[slot(e.Register)], e.Op, e.Data)
	case *expr.Range:
		reg := r.regs[slot(e.Register)]
		if last := reg.last(); last != nil && (bytes.Compare(reg.value, e.FromData) >= 0 && bytes.Compare(last, e.ToData) <= 0 || bytes.Compare(last, e.FromData) < 0 || bytes.Compare(reg.value, e.ToData) > 0) {
			reg.only = nil // All that it may be is within, or nothing.
		}
		within := reg.value != nil && bytes.Compare(reg.value, e.FromData) >= 0 && bytes.Compare(reg.value, e.ToData) <= 0
		r.ask(reg, within == (e.Op == expr.CmpOpEq), fmt.Sprintf("%s %s-%s", reg.name, reg.show(e.FromData), reg.show(e.ToData)))
	case *expr.Lookup:
		r.lookup(e)
	case *expr.Match:
		r.extension(e)
	case *expr.Verdict:
		r.ends = []end{endOf(*e)}
	case *expr.Notrack:
		r.ends = []end{{verdict: notrack}}
	case *expr.Target:
		r.target(nativeTarget(e))
	case *expr.Reject:
		r.ends = []end{{verdict: "reject"}}
	case *expr.NAT:
		to := end{verdict: translates, to: map[expr.NATType]string{expr.NATTypeSourceNAT: "snat", expr.NATTypeDestNAT: "dnat"}[e.Type]}
		if e.RegAddrMin != 0 && (e.RegAddrMax == 0 || e.RegAddrMax == e.RegAddrMin) {
			to.addr, _ = netip.AddrFromSlice(r.regs[slot(e.RegAddrMin)].value)
		}
		r.ends = []end{to}
	case *expr.Masq:
		r.ends = []end{{verdict: translates, to: "masquerade"}}
	case *expr.Redir:
		to := end{verdict: translates, to: "redirect"}
		if port := r.regs[slot(e.RegisterProtoMin)].value; e.RegisterProtoMin != 0 && len(port) >= 2 {
			to.port = binary.BigEndian.Uint16(port)
		}
		r.ends = []end{to}
	case *expr.Queue:
		r.ends = []end{{verdict: "accept"}}
	case *expr.Exthdr: // It writes an option of TCP, which is the greatest length of a segment, or asks for one.
		const maxseg = 2 // TCPOPT_MAXSEG
		r.clamps = r.clamps || e.SourceRegister != 0 && e.Op == expr.ExthdrOpTcpopt && e.Type == maxseg
		if e.SourceRegister == 0 {
			r.unknown("")
			r.regs[slot(e.DestRegister)] = register{}
		}
	case *expr.Counter, *expr.Log:
	case *expr.Limit, *expr.Connlimit, *expr.Dynset: // It may be what drops what is too much.
		r.limited = true
		r.unknown("limit rate")
	case *expr.Meta:
		if reg := r.regs[slot(e.Register)]; !e.SourceRegister {
			r.regs[slot(e.Register)] = r.meta(e)
		} else if e.Key == expr.MetaKeyMARK {
			r.setMark(reg.mark())
		}
	default:
		if into, value, loads := r.load(e); loads {
			r.regs[slot(into)] = value
		} else {
			r.unknown("")
		}
	}
}

// ask adds a question for the content of a register.
func (j *judgement) ask(reg register, is bool, text string) {
	j.specific = j.specific || reg.specific
	if reg.value == nil || reg.only != nil {
		if reg.name == "" {
			text = ""
		}
		j.unknown(text)
		return
	}
	j.holds(is, text)
}

// compare adds a comparison of a register with data.
func (j *judgement) compare(reg register, op expr.CmpOp, data []byte) {
	n := min(len(data), len(reg.value))
	for i := range reg.only { // What is known of it may be enough.
		if i < n && (reg.value[i]^data[i])&reg.only[i] != 0 && (op == expr.CmpOpEq || op == expr.CmpOpNeq) {
			reg.only = nil
			break
		}
	}
	is := compared(op, bytes.Compare(reg.value[:n], data[:n]))
	if last := reg.last(); last != nil && op != expr.CmpOpEq && op != expr.CmpOpNeq && compared(op, bytes.Compare(last[:n], data[:n])) == is {
		reg.only = nil // It holds for the least and for the greatest value, or for neither.
	}
	j.ask(reg, is, reg.text(op, data))
}

// masked adds that some bits of a register have a value, as rules of iptables ask; a mask of all bits is not shown.
func (j *judgement) masked(reg register, mask, value []byte, invert bool) {
	if !isWhole(mask) {
		reg = reg.masked(mask, make([]byte, len(mask)))
	}
	op := expr.CmpOpEq
	if invert {
		op = expr.CmpOpNeq
	}
	j.compare(reg, op, value)
}

// lookup judges a question for a set, or follows a map.
func (r *reading) lookup(e *expr.Lookup) {
	key := r.key(e)
	verdicts := e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT
	switch {
	case verdicts && key.value != nil && key.only == nil:
		if v, known := r.rules.Verdict(r.chain, e.SetName, key.value); known {
			r.ask(key, v != nil, key.name+" vmap @"+e.SetName)
			if v != nil {
				r.ends = []end{endOf(*v)}
			}
			return
		}
		fallthrough
	case verdicts:
		r.specific = r.specific || key.specific
		r.unknown("")
		list, known := r.rules.Verdicts(r.chain, e.SetName)
		if !known {
			list = []expr.Verdict{{Kind: expr.VerdictAccept}} // One may.
		}
		for _, v := range list {
			r.ends = append(r.ends, endOf(v))
		}
	case e.IsDestRegSet: // It matches if the map has the key.
		r.regs[slot(e.DestRegister)] = register{}
		r.specific = r.specific || key.specific
		r.unknown("")
	default:
		is, known := false, false
		if key.value != nil {
			is, known = r.rules.Contains(r.chain, e.SetName, key.value)
		}
		if !known {
			key.value = nil
		}
		r.ask(key, is != e.Invert, key.name+" "+not(e.Invert)+"@"+e.SetName)
	}
}

// key returns what a set is asked for, which may be in several registers. Of several, its value is nil unless all of it is known.
func (r *reading) key(e *expr.Lookup) register {
	at := slot(e.SourceRegister)
	key := r.regs[at]
	length := uint32(r.rules.KeyLen(r.chain, e.SetName))
	for i := uint32(1); i < (length+3)/4; i++ {
		key.specific = key.specific || r.regs[at+i].specific
	}
	for uint32(len(key.value)) < length && key.value != nil {
		value := padded(key.value)
		next := r.regs[at+uint32(len(value)/4)]
		key.name += " . " + next.name
		if key.value = nil; next.value != nil && next.only == nil {
			key.value = padded(append(value, next.value...))
		}
	}
	return key
}

// padded returns a copy that fills registers of 4 bytes.
func padded(value []byte) []byte {
	return append(slices.Clone(value), make([]byte, (4-len(value)%4)%4)...)
}

// nativeTarget reads a target of iptables. Those that lead to other chains, or drop, are verdicts in this variant.
func nativeTarget(e *expr.Target) target {
	const flagNotrack = 1 // of struct xt_ct_target_info, which begins with its flags
	t := target{name: e.Name, other: end{verdict: "accept"}, forgets: e.Name == "MARK"}
	info, _ := e.Info.(*xt.Unknown)
	switch {
	case e.Name == "REDIRECT":
		t.port, _ = natRange(e.Info)
	case e.Name == "SNAT", e.Name == "DNAT":
		_, t.addr = natRange(e.Info)
	case info == nil:
	case e.Name == "CT":
		t.notrack = len(*info) >= 2 && binary.NativeEndian.Uint16(*info)&flagNotrack != 0
	case e.Name == "MARK" && len(*info) == 8: // struct xt_mark_tginfo2: the mark, and the mask
		t.inverts, t.clears, t.forgets = binary.NativeEndian.Uint32(*info), binary.NativeEndian.Uint32((*info)[4:]), false
	case e.Name == "CONNMARK":
		t.restores = restored(e.Rev, *info)
	}
	return t
}

// restored returns the bits of the packet's mark that the target CONNMARK takes from that of the connection, by struct xt_connmark_tginfo1 or 2.
func restored(revision uint32, info []byte) uint32 {
	const restore, maskAt, byRevision1, byRevision2 = 2, 8, 12, 14
	at := byRevision1
	if revision == 2 {
		at = byRevision2
	}
	switch {
	case at >= len(info):
		return unmarked.known
	case info[at] != restore:
		return 0
	}
	return binary.NativeEndian.Uint32(info[maskAt:])
}

// natRange returns the first port to which a target of iptables translates, and the address if that is a single one.
func natRange(info any) (port uint16, addr netip.Addr) {
	single := func(from, to net.IP) (out netip.Addr) {
		if from.Equal(to) || len(to) == 0 {
			out, _ = netip.AddrFromSlice(from)
		}
		return out.Unmap()
	}
	switch info := info.(type) {
	case *xt.NatRange:
		return info.MinPort, single(info.MinIP, info.MaxIP)
	case *xt.NatRange2:
		return info.MinPort, single(info.MinIP, info.MaxIP)
	case *xt.NatIPv4MultiRangeCompat:
		if len(*info) == 1 {
			return (*info)[0].MinPort, single((*info)[0].MinIP, (*info)[0].MaxIP)
		}
	}
	return 0, netip.Addr{}
}

func endOf(v expr.Verdict) end { return end{verdict: verdicts[v.Kind], to: v.Chain} }

// load returns what an expression loads, and into which register.
func (r *reading) load(e expr.Any) (into uint32, value register, loads bool) {
	switch e := e.(type) {
	case *expr.Payload:
		return e.DestRegister, r.payload(e), true
	case *expr.Bitwise:
		return e.DestRegister, r.regs[slot(e.SourceRegister)].masked(e.Mask, e.Xor), true
	case *expr.Ct:
		return e.Register, r.ct(e), true
	case *expr.Fib:
		return e.Register, r.fib(e), true
	case *expr.Immediate:
		return e.Register, register{value: e.Data}, true
	case *expr.Rt:
		return e.Register, register{}, true
	case *expr.Socket:
		return e.Register, register{}, true
	case *expr.Hash:
		return e.DestRegister, register{}, true
	case *expr.Numgen:
		return e.Register, register{}, true
	}
	return 0, register{}, false
}

func (r *reading) meta(e *expr.Meta) register {
	switch {
	case e.Key == expr.MetaKeyMARK:
		return ofMark(r.packet.mark)
	case e.Key == expr.MetaKeyL4PROTO:
		return register{value: []byte{r.packet.protocol}, name: "meta l4proto"}
	case e.Key == expr.MetaKeyPROTOCOL:
		return register{value: r.packet.etherType()}
	case e.Key == expr.MetaKeyNFPROTO:
		return register{value: []byte{nft.Protocol(r.packet.family)}}
	case e.Key == expr.MetaKeyIIF:
		return register{value: r.indexes[r.packet.in], name: "iif", names: r.names}
	case e.Key == expr.MetaKeyOIF:
		return register{value: r.indexes[r.packet.out], name: "oif", names: r.names}
	case e.Key == expr.MetaKeyIIFNAME:
		return register{value: interfaceName(r.packet.in), name: "iifname"}
	case e.Key == expr.MetaKeyOIFNAME:
		return register{value: interfaceName(r.packet.out), name: "oifname"}
	}
	return register{}
}

// etherType is the packet's family as a frame names it.
func (p *packet) etherType() []byte {
	return binary.BigEndian.AppendUint16(nil, map[plan.Family]uint16{plan.IPv4: unix.ETH_P_IP, plan.IPv6: unix.ETH_P_IPV6}[p.family])
}

// interfaceName is the name of an interface as a register has it; nil for none.
func interfaceName(name string) []byte {
	if name == "" {
		return nil
	}
	out := make([]byte, unix.IFNAMSIZ)
	copy(out, name)
	return out
}

// statusDNAT is the bit of connections whose destination is translated, IPS_DST_NAT.
const statusDNAT = 1 << 5

func (r *reading) ct(e *expr.Ct) register {
	switch {
	case e.SourceRegister:
	case e.Key == expr.CtKeySTATE:
		bit := map[uint16]uint32{
			stateInvalid: expr.CtStateBitINVALID, stateEstablished: expr.CtStateBitESTABLISHED, stateRelated: expr.CtStateBitRELATED, stateNew: expr.CtStateBitNEW,
		}[r.packet.state()]
		return register{value: binary.NativeEndian.AppendUint32(nil, bit)}
	case r.packet.untracked: // The rest is not known of it.
	case e.Key == expr.CtKeySTATUS && r.packet.dnat != maybe:
		bit := binary.NativeEndian.AppendUint32(nil, statusDNAT)
		if r.packet.dnat == no {
			return register{value: make([]byte, 4), only: bit}
		}
		return register{value: bit, only: bit}
	}
	return register{}
}

func (r *reading) fib(e *expr.Fib) register {
	if !e.ResultADDRTYPE || !e.FlagDADDR || e.FlagIIF || e.FlagOIF || r.packet.here == maybe {
		return register{}
	}
	kind := uint32(typeUnicast)
	if r.packet.here == yes {
		kind = typeLocal
	}
	return register{value: binary.NativeEndian.AppendUint32(nil, kind), name: "fib daddr type"}
}

// payload returns the bytes of the packet that an expression loads.
func (r *reading) payload(e *expr.Payload) register {
	protocolAt, srcAt, dstAt, size := uint32(9), uint32(12), uint32(16), uint32(4)
	if r.packet.family == plan.IPv6 {
		protocolAt, srcAt, dstAt, size = 6, 8, 24, 16
	}
	const typeAt, flagsAt = 12, 13 // in the header of Ethernet, and of TCP
	switch {
	case e.Base == expr.PayloadBaseNetworkHeader && e.Offset >= srcAt && e.Offset < dstAt:
		return r.packet.address(false).part(e, srcAt)
	case e.Base == expr.PayloadBaseNetworkHeader && e.Offset >= dstAt && e.Offset < dstAt+size:
		return r.packet.address(true).part(e, dstAt)
	case e.Base == expr.PayloadBaseLLHeader && e.Offset == typeAt && e.Len == 2:
		return register{value: r.packet.etherType()}
	case e.Base == expr.PayloadBaseNetworkHeader && e.Offset == protocolAt && e.Len == 1:
		return register{value: []byte{r.packet.protocol}, name: r.packet.header() + " protocol"}
	case e.Base == expr.PayloadBaseTransportHeader && r.packet.icmp && e.Offset < 2 && e.Offset+e.Len <= 2:
		return register{value: []byte{icmpUnreachable, icmpTooLong}[e.Offset : e.Offset+e.Len], name: "icmp " + []string{"type", "code"}[e.Offset]}
	case e.Base == expr.PayloadBaseTransportHeader && r.packet.icmp:
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset == flagsAt && e.Len == 1:
		return r.packet.tcpFlags()
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset <= 2 && e.Offset%2 == 0 && e.Len == 2:
		s, word := r.packet.src, " sport"
		if e.Offset == 2 {
			s, word = r.packet.dst, " dport"
		}
		reg := register{name: protocolName(r.packet.protocol) + word}
		if s.known {
			reg.value, reg.specific = binary.BigEndian.AppendUint16(nil, s.port), true
		}
		return reg
	}
	return register{}
}

// header is the name of the packet's family in the language of nft.
func (p *packet) header() string { return nft.FamilyName(p.family) }

// address is the register with the address of the source, or of the destination.
func (p *packet) address(dst bool) register {
	s, reg := p.src, register{name: p.header() + " saddr"}
	if dst {
		s, reg.name = p.dst, p.header()+" daddr"
	}
	switch {
	case s.addr.IsValid():
		reg.value, reg.specific = s.addr.AsSlice(), dst && !p.answer // Very many rules ask where a packet comes from.
	case !dst && p.pods.IsValid():
		reg.value, reg.only = p.pods.Addr().AsSlice(), maskOf(p.pods)
	}
	return reg.whole()
}

// part is what an expression loads of a register, whose value begins at an offset.
func (r register) part(e *expr.Payload, at uint32) register {
	cut := func(of []byte) []byte {
		if e.Offset+e.Len > at+uint32(len(of)) {
			return nil
		}
		return of[e.Offset-at : e.Offset-at+e.Len]
	}
	r.value, r.only = cut(r.value), cut(r.only)
	return r.whole()
}

// whole is the register without a mask of what is known, if that is all of it.
func (r register) whole() register {
	if isWhole(r.only) {
		r.only = nil
	}
	return r
}

func isWhole(mask []byte) bool {
	return !slices.ContainsFunc(mask, func(b byte) bool { return b != 0xff })
}

// last is the greatest value that a register of which some bits are known may have; nil for others. The least is its value.
func (r register) last() []byte {
	if r.only == nil || r.value == nil {
		return nil
	}
	out := make([]byte, len(r.value))
	for i := range out {
		out[i] = r.value[i] | ^r.only[i]
	}
	return out
}

// maskOf is the mask of a range.
func maskOf(p netip.Prefix) []byte { return net.CIDRMask(p.Bits(), p.Addr().BitLen()) }

// extension judges a match of iptables.
func (r *reading) extension(e *expr.Match) {
	protocolPorts := func(src, dst [2]uint16, plain bool) {
		if !plain {
			r.unknown("")
			return
		}
		all := [2]uint16{0, 0xffff}
		if src != all {
			r.ports(r.packet.src, "sport", []plan.PortRange{{First: src[0], Last: src[1]}}, false)
		}
		if dst != all {
			r.ports(r.packet.dst, "dport", []plan.PortRange{{First: dst[0], Last: dst[1]}}, false)
		}
	}
	switch info := e.Info.(type) {
	case *xt.Comment:
	case *xt.Tcp:
		const invertFlags = 1 << 2
		protocolPorts(info.SrcPorts, info.DstPorts, info.InvFlags&^invertFlags == 0 && info.Option == 0)
		if info.FlagsMask != 0 {
			r.masked(r.packet.tcpFlags(), []byte{info.FlagsMask}, []byte{info.FlagsCmp}, info.InvFlags&invertFlags != 0)
		}
	case *xt.Udp:
		protocolPorts(info.SrcPorts, info.DstPorts, info.InvFlags == 0)
	case *xt.ConntrackMtinfo3:
		r.conntrack(info)
	case *xt.AddrTypeV1:
		r.addrtype(info)
	case *xt.Unknown:
		switch {
		case e.Name == "multiport":
			r.multiport(*info)
		case e.Name == "set":
			r.set(*info)
		case e.Name == "mark" && len(*info) == 12: // struct xt_mark_mtinfo1: the mark, the mask, and whether it is inverted
			r.inMark(binary.NativeEndian.Uint32(*info), binary.NativeEndian.Uint32((*info)[4:]), (*info)[8] != 0)
		case e.Name == "icmp" && len(*info) >= 4: // struct ipt_icmp: the type, the first and the last code, and whether it is inverted
			r.icmp((*info)[0], [2]byte((*info)[1:]), (*info)[3] != 0)
		case e.Name == "limit", e.Name == "hashlimit", e.Name == "connlimit": // It may be what drops what is too much.
			r.limited = true
			r.unknown(e.Name)
		case e.Name != "comment":
			r.unknown("")
		}
	default:
		r.unknown("")
	}
}

// What xt_conntrack can be asked for, and inverted.
const (
	askState     = 1 << 0
	askFirstDst  = 1 << 3
	askFirstPort = 1 << 9
	askPlain     = askState | askFirstDst | askFirstPort | 1<<13 // the last says that --state was written, which means the same
)

func (r *reading) conntrack(info *xt.ConntrackMtinfo3) {
	inverted := func(bit uint16) bool { return info.InvertFlags&bit != 0 }
	if info.MatchFlags&^askPlain != 0 {
		r.unknown("")
	}
	if info.MatchFlags&askState != 0 {
		r.inState(info.StateMask, inverted(askState))
	}
	if info.MatchFlags&askFirstDst != 0 {
		ones, size := info.OrigDstMask.Size()
		addr, ok := addrOf(info.OrigDstAddr, r.packet.family)
		if !ok || size == 0 {
			r.unknown("")
		} else {
			r.firstTo(netip.PrefixFrom(addr, ones), inverted(askFirstDst))
		}
	}
	if info.MatchFlags&askFirstPort != 0 {
		r.firstToPort(plan.PortRange{First: info.OrigDstPort, Last: max(info.OrigDstPort, info.OrigDstPortHigh)}, inverted(askFirstPort))
	}
}

func addrOf(ip net.IP, f plan.Family) (netip.Addr, bool) {
	if f == plan.IPv4 {
		ip = ip.To4()
	}
	return netip.AddrFromSlice(ip)
}

// What xt_addrtype inverts, and limits.
const (
	invertDst    = 1 << 1
	limitDevices = 1<<2 | 1<<3
)

func (r *reading) addrtype(info *xt.AddrTypeV1) {
	if info.Source != 0 || info.Flags&limitDevices != 0 {
		r.unknown("")
	}
	if info.Dest != 0 && info.Flags&limitDevices == 0 {
		r.toType(info.Dest, info.Flags&invertDst != 0)
	}
}

// multiport judges struct xt_multiport_v1: which ports are meant, how many there are, 15 ports, which of them begin ranges, and whether
// all that is inverted.
func (r *reading) multiport(info []byte) {
	const (
		most        = 15
		source      = 0
		destination = 1
	)
	if len(info) < 2+2*most+most+1 || info[0] > destination || info[1] > most {
		r.unknown("") // It asks for either port.
		return
	}
	s, word := r.packet.dst, "dport"
	if info[0] == source {
		s, word = r.packet.src, "sport"
	}
	var list []plan.PortRange
	for i := 0; i < int(info[1]); i++ {
		port := func(i int) uint16 { return binary.NativeEndian.Uint16(info[2+2*i:]) }
		from := port(i)
		if begins := info[2+2*most+i] != 0; begins && i+1 < int(info[1]) {
			i++
		}
		list = append(list, plan.PortRange{First: from, Last: port(i)})
	}
	r.ports(s, word, list, info[2+3*most] != 0)
}

func protocolName(number byte) string {
	if p := netlink.ProtocolOf(number); p != "" {
		return p.Lower()
	}
	if number == unix.IPPROTO_ICMP {
		return "icmp"
	}
	return strconv.Itoa(int(number))
}

// masked is what a bitwise operation makes of a register.
func (r register) masked(mask, xor []byte) register {
	if r.specific || strings.HasSuffix(r.name, "addr") || strings.HasSuffix(r.name, "flags") || r.name == nameOfMark {
		r.mask = mask
	}
	if len(mask) == 4 && r.about != 0 {
		r.about &= binary.NativeEndian.Uint32(mask)
		r.specific = r.about != 0
	}
	if r.value == nil || len(r.value) != len(mask) || len(r.value) != len(xor) {
		r.value = nil
		return r
	}
	value, only := make([]byte, len(r.value)), make([]byte, len(r.value))
	for i := range value {
		if only[i] = 0xff; r.only != nil {
			only[i] = r.only[i] | ^mask[i] // What is cleared is known.
		}
		value[i] = (r.value[i]&mask[i] ^ xor[i]) & only[i]
	}
	r.value, r.only = value, only
	return r.whole()
}

// sentence joins the words of a rule.
func sentence(words []string) string {
	for _, word := range words { // A port says the protocol.
		if f := strings.Fields(word); len(f) > 2 && (f[1] == "dport" || f[1] == "sport") {
			words = slices.DeleteFunc(words, func(w string) bool { return w == "meta l4proto "+f[0] || w == "ip protocol "+f[0] })
			break
		}
	}
	return strings.Join(words, " ")
}

var verdicts = map[expr.VerdictKind]string{
	expr.VerdictDrop: "drop", expr.VerdictAccept: "accept", expr.VerdictReturn: "return", expr.VerdictJump: "jump", expr.VerdictGoto: "goto",
	expr.VerdictQueue: "accept", expr.VerdictStolen: "accept", expr.VerdictStop: "accept",
}

func compared(op expr.CmpOp, order int) bool {
	switch op {
	case expr.CmpOpEq:
		return order == 0
	case expr.CmpOpNeq:
		return order != 0
	case expr.CmpOpLt:
		return order < 0
	case expr.CmpOpLte:
		return order <= 0
	case expr.CmpOpGt:
		return order > 0
	}
	return order >= 0
}

var operators = map[expr.CmpOp]string{
	expr.CmpOpEq: "", expr.CmpOpNeq: "!= ", expr.CmpOpLt: "< ", expr.CmpOpLte: "<= ", expr.CmpOpGt: "> ", expr.CmpOpGte: ">= ",
}

// text is such as "tcp dport 80".
func (r register) text(op expr.CmpOp, data []byte) string {
	if r.name == "" {
		return ""
	}
	text := r.name + " " + operators[op] + r.show(data)
	if r.mask != nil && (r.name == nameOfMark || strings.HasSuffix(r.name, "flags")) {
		op := operators[op]
		if op == "" {
			op = "== "
		}
		return fmt.Sprintf("%s & %s %s%s", r.name, r.show(r.mask), op, r.show(data))
	}
	if r.mask != nil {
		ones := 0
		for _, b := range r.mask {
			ones += bits.OnesCount8(b)
		}
		text += fmt.Sprintf("/%d", ones)
	}
	return text
}

// show returns a value as nft prints it.
func (r register) show(data []byte) string {
	switch {
	case strings.HasSuffix(r.name, "port") && len(data) == 2:
		return strconv.Itoa(int(data[0])<<8 | int(data[1]))
	case strings.HasSuffix(r.name, "addr"):
		if a, ok := netip.AddrFromSlice(data); ok {
			return a.String()
		}
		if len(data) < 4 { // The beginning of an address of IPv4.
			full := append(slices.Clone(data), make([]byte, 4-len(data))...)
			a, _ := netip.AddrFromSlice(full)
			return fmt.Sprintf("%s/%d", a, 8*len(data))
		}
	case strings.HasSuffix(r.name, "ifname"):
		name, _, whole := strings.Cut(string(data), "\x00")
		if !whole && len(data) < unix.IFNAMSIZ {
			name += "*"
		}
		return name
	case (r.name == "iif" || r.name == "oif") && len(data) == 4:
		index := int(binary.NativeEndian.Uint32(data))
		return cmp.Or(r.names[index], strconv.Itoa(index))
	case r.name == nameOfMark && len(data) == 4:
		return fmt.Sprintf("0x%x", binary.NativeEndian.Uint32(data))
	case r.name == "fib daddr type" && len(data) == 4:
		return map[uint32]string{typeUnicast: "unicast", typeLocal: "local"}[binary.NativeEndian.Uint32(data)]
	case len(data) == 1 && strings.HasSuffix(r.name, "flags"):
		return fmt.Sprintf("%#x", data[0])
	case len(data) == 1:
		if strings.HasPrefix(r.name, "icmp") {
			return strconv.Itoa(int(data[0]))
		}
		return protocolName(data[0])
	}
	return fmt.Sprintf("0x%x", data)
}
