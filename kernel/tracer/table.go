package tracer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// The chains of the table. Those that mark come before what other programs have, and those that see the end of a packet's way behind it.
const (
	chainCount = "count"
	chainMark  = "mark"
	chainInput = "end-input"
	chainPost  = "end-postrouting"
	// An answer begins at one hook if another host sends it, and at another if this node does.
	chainAnswerIn  = "answer-prerouting"
	chainAnswerOut = "answer-output"

	priorityFirst = -500
	// priorityTracked is right behind connection tracking (NF_IP_PRI_CONNTRACK), which tells the first packet of a flow of UDP from others.
	priorityTracked = -199
	priorityLast    = math.MaxInt32 - 1
)

// Bits of the state of a flow, as expressions of type ct have them.
const (
	ctNew       = 1 << 3
	ctUntracked = 1 << 6
)

// chains returns the chains that mark the first packets of a flow's connections, and the answers to them.
func (f Flow) chains() []nft.Chain {
	hook := "prerouting"
	if f.Output {
		hook = "output"
	}
	at := func(name, hook string, priority int32, rules ...nft.Rule) nft.Chain {
		return nft.Chain{Name: name, Hook: &nft.Hook{Type: "filter", Name: hook, Priority: priority}, Rules: rules}
	}
	var count, mark []nft.Rule
	sources := f.Sources
	if len(sources) == 0 {
		sources = []netip.Prefix{{}}
	}
	for _, s := range sources {
		match := f.match(s)
		count = append(count, nft.Rule{Text: "counter", Exprs: append(match[:len(match):len(match)], &expr.Counter{})})
		match = append(match, f.begins()...)
		mark = append(mark, follows(match, 1, f.rate()))
	}
	answers := follows(f.answers(), moreAnswers, f.rate())
	priority := int32(priorityFirst + 1)
	if f.Protocol == plan.UDP {
		priority = priorityTracked
	}
	return []nft.Chain{
		at(chainCount, hook, priorityFirst, count...), at(chainMark, hook, priority, mark...),
		at(chainAnswerIn, "prerouting", priorityTracked, answers), at(chainAnswerOut, "output", priorityTracked, answers),
		at(chainInput, "input", priorityLast), at(chainPost, "postrouting", priorityLast),
	}
}

// moreAnswers is how many answers are followed for each first packet: they are also those to packets that are not.
const moreAnswers = 5

// follows returns a rule by which the kernel tells of what matches, at some times a rate.
func follows(match []expr.Any, times, rate uint64) nft.Rule {
	return nft.Rule{Text: "nftrace", Exprs: append(match,
		&expr.Limit{Type: expr.LimitTypePkts, Rate: times * rate, Unit: expr.LimitTimeSecond, Burst: uint32(times) * burst},
		&expr.Immediate{Register: 1, Data: []byte{1}}, &expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: 1})}
}

// load loads bytes of a packet, masked leaves the bits of a mask of them, and is requires that they are these, isNot that they are not.

func load(base expr.PayloadBase, at, n int) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: base, Offset: uint32(at), Len: uint32(n)}
}

func masked(mask ...byte) expr.Any {
	return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))}
}

func is(v ...byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: v} }

func isNot(v ...byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: v} }

// answers returns what matches the answers to first packets, behind connection tracking: of TCP, those that accept or refuse a connection.
func (f Flow) answers() []expr.Any {
	const reply, flagsAt, syn, rst = 1, 13, 0x02, 0x04
	out := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, is(netlink.Protocol(f.Protocol)),
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}, is(reply),
		&expr.Ct{Key: expr.CtKeyDST, Register: 1}, is(f.Dst.Addr().AsSlice()...),
		&expr.Ct{Key: expr.CtKeyPROTODST, Register: 1}, is(binary.BigEndian.AppendUint16(nil, f.Dst.Port())...),
	}
	if f.Protocol == plan.TCP {
		out = append(out, load(expr.PayloadBaseTransportHeader, flagsAt, 1), masked(syn|rst), isNot(0))
	}
	return out
}

// match returns what matches the flow's packets from a source; the zero prefix is any.
func (f Flow) match(source netip.Prefix) []expr.Any {
	dst := f.Dst.Addr().AsSlice()
	sourceAt, destinationAt := 12, 16
	if f.Family() == plan.IPv6 {
		sourceAt, destinationAt = 8, 24
	}
	out := []expr.Any{
		load(expr.PayloadBaseNetworkHeader, destinationAt, len(dst)), is(dst...),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, is(netlink.Protocol(f.Protocol)),
		load(expr.PayloadBaseTransportHeader, 2, 2), is(binary.BigEndian.AppendUint16(nil, f.Dst.Port())...),
	}
	if source.IsValid() && source.Bits() > 0 {
		mask := make([]byte, len(dst))
		for i := range source.Bits() {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		out = append(out, load(expr.PayloadBaseNetworkHeader, sourceAt, len(dst)), masked(mask...), is(source.Masked().Addr().AsSlice()...))
	}
	return out
}

// begins returns what matches the first packet of a connection. Before connection tracking, only the packet itself tells.
func (f Flow) begins() []expr.Any {
	switch f.Protocol {
	case plan.TCP:
		const flagsAt, syn, ack = 13, 0x02, 0x10
		return []expr.Any{load(expr.PayloadBaseTransportHeader, flagsAt, 1), masked(syn | ack), is(syn)}
	case plan.SCTP:
		const firstChunk, initChunk = 12, 1
		return []expr.Any{load(expr.PayloadBaseTransportHeader, firstChunk, 1), is(initChunk)}
	}
	states := binary.NativeEndian.AppendUint32(nil, ctNew|ctUntracked)
	return []expr.Any{&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, masked(states...), isNot(0, 0, 0, 0)}
}

// ErrBusy is the error while another process follows packets of the same address family.
var ErrBusy = errors.New("another \"nodeproxy trace --live\" follows packets of this address family on this node")

// addTable adds the table, which the kernel removes when c is closed, unless it is too old for that.
func (f Flow) addTable(c *nft.Conn) error {
	add := func(table func(*nft.Batch)) error {
		b := nft.NewBatch(f.Family(), names.Trace)
		table(b)
		if err := b.AddChains(f.chains()); err != nil {
			return err
		}
		return c.Commit(b)
	}
	err := add((*nft.Batch).AddOwnedTable)
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EPERM) { // Only one whose owner lives can't be removed.
		if nft.DeleteTable(f.Family(), names.Trace) != nil {
			return ErrBusy
		}
		err = add((*nft.Batch).AddOwnedTable)
	}
	if errors.Is(err, nft.ErrAbsent) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		err = add((*nft.Batch).AddTable)
	}
	if err != nil {
		return fmt.Errorf("following packets: %w", err)
	}
	return nil
}

// counted returns how many packets the flow has had, first ones and others.
func (f Flow) counted() (uint64, error) {
	list, err := nft.Rules(f.Family(), names.Trace, chainCount, countedBy)
	var sum uint64
	for _, n := range list {
		sum += n
	}
	return sum, err
}

// countedBy returns how many packets the counters of a rule have counted.
func countedBy(rule []byte) (n uint64) {
	for _, e := range netlink.Attributes(netlink.Attribute(rule, unix.NFTA_RULE_EXPRESSIONS)) {
		if netlink.Text(netlink.Attribute(e, unix.NFTA_EXPR_NAME)) == "counter" {
			n += netlink.BigEndian(netlink.Attribute(netlink.Attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_COUNTER_PACKETS))
		}
	}
	return n
}
