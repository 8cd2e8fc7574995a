// Package blocking finds rules of other programs that keep packets from a Service. It reads the rules of nftables, those of the nft
// variant of iptables among them, and judges what they do with packets whose destination is known and whose source is not.
//
// What a rule asks for besides the destination makes it uncertain whether it matches. A rule that drops is reported if all that it asks
// for holds, or if it asks for the Service's address or port and for something unknown. One that does not ask for anything of the Service, such as
// one that drops invalid packets, is not.
package blocking

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Rule is a rule of another program, or the policy of its chain, that drops or rejects packets for a Service.
type Rule struct {
	// Text is the rule, as far as it is understood; Chain is where it is.
	Text  string
	Chain nft.ChainID
	// What is the traffic that it concerns.
	What string
	// Certain is true if nothing else decides whether it applies.
	Certain bool
}

// mostEndpoints is how many endpoints of each ServicePort are looked at.
const mostEndpoints = 4

// priorityDNAT is the priority of the chains in which destinations are translated.
const priorityDNAT = -100

// Find returns the rules that may keep packets from ServicePorts, in order of chain. local reports whether an address is the node's.
func Find(ctx context.Context, ports []*plan.ServicePort, local func(netip.Addr) bool) ([]Rule, error) {
	rules, err := nft.ReadRuleset()
	if err != nil {
		return nil, err
	}
	defer rules.Close()
	bases := rules.Bases()
	slices.SortFunc(bases, func(a, b nft.BaseChain) int {
		return cmp.Or(cmp.Compare(a.Table, b.Table), cmp.Compare(a.Family, b.Family), cmp.Compare(a.Priority, b.Priority), cmp.Compare(a.Chain, b.Chain))
	})
	var out []Rule
	var unread error
	for _, b := range bases {
		if ours(b.ChainID) || b.Type == "nat" {
			continue
		}
		for _, p := range packets(ports, b, local) {
			w := &walk{ctx: ctx, rules: rules, packet: p, found: map[string]bool{}}
			ended, err := w.chain(b.ChainID, true, false, 0)
			if err != nil && ctx.Err() != nil {
				return nil, err
			}
			if err != nil { // The rest of this chain is not known; others may tell.
				unread = cmp.Or(unread, err)
				ended = true
			}
			if !ended && b.Drops && !w.accepted {
				w.report(b.ChainID, "policy drop", true)
			}
			for _, r := range w.out {
				if !slices.ContainsFunc(out, func(o Rule) bool { return o.Text == r.Text && o.Chain == r.Chain && o.Certain == r.Certain }) {
					out = append(out, r)
				}
			}
		}
	}
	if len(out) == 0 && unread != nil {
		return nil, unread
	}
	return out, nil
}

// ours reports whether a chain is one of this program or of kube-proxy.
func ours(c nft.ChainID) bool {
	return c.Table == names.NFTables || names.IsOurs(names.Table(c.Table), c.Chain) || strings.HasPrefix(c.Chain, "KUBE-")
}

// packet is a packet as it is in one chain.
type packet struct {
	what     string
	family   plan.Family
	dst      netip.Addr
	protocol byte
	port     uint16
}

// packets returns the packets of ServicePorts that pass a base chain: those to frontends before their destination is translated, and
// those to endpoints behind that.
func packets(ports []*plan.ServicePort, b nft.BaseChain, local func(netip.Addr) bool) []packet {
	var out []packet
	for _, sp := range ports {
		f := sp.Key.Family
		if b.Family == "ip" && f == plan.IPv6 || b.Family == "ip6" && f == plan.IPv4 {
			continue
		}
		if before := (b.Hook == "prerouting" || b.Hook == "output") && b.Priority < priorityDNAT; before {
			from := map[string]string{"prerouting": "pods and other hosts", "output": "this node"}[b.Hook]
			for _, fe := range sp.Frontends {
				if fe.Kind != plan.HealthCheckNodePort {
					out = append(out, packet{fmt.Sprintf("the %s from %s", fe, from), f, fe.Addr, netlink.Protocol(fe.Protocol), fe.Port})
				}
			}
			continue
		}
		for i, ep := range sp.All() {
			here := local(ep.Addr.Addr())
			if i < mostEndpoints && (b.Hook != "input" || here) && (b.Hook != "forward" || !here) {
				out = append(out, packet{"endpoint " + ep.Addr.String(), f, ep.Addr.Addr(), netlink.Protocol(sp.Key.Protocol), ep.Addr.Port()})
			}
		}
	}
	return out
}

// match says whether a rule matches.
type match int

const (
	no match = iota
	maybe
	yes
)

// The packets begin connections: the bit of that state, and the one by which xt_conntrack is asked for states.
const (
	stateNew   = 8
	matchState = 1
)

// walk follows a packet through chains.
type walk struct {
	ctx    context.Context
	rules  *nft.Ruleset
	packet packet
	out    []Rule
	found  map[string]bool
	// accepted is set once a rule may have accepted the packet.
	accepted bool
}

func (w *walk) report(c nft.ChainID, text string, certain bool) {
	if !w.found[c.String()+text] {
		w.found[c.String()+text] = true
		w.out = append(w.out, Rule{text, c, w.packet.what, certain})
	}
}

// deepest bounds how deep chains are followed, as the kernel does.
const deepest = 16

// chain follows the packet through a chain. sure is false if it may not come there, and specific says that the rules that lead there ask
// for the Service's address or port. It returns true if the packet goes no further in any case.
func (w *walk) chain(id nft.ChainID, sure, specific bool, depth int) (ended bool, err error) {
	rules, err := w.rules.Rules(id)
	if err != nil || depth > deepest {
		return false, err
	}
	for _, exprs := range rules {
		if err := w.ctx.Err(); err != nil { // Where chains lead to each other, there may be very many ways.
			return false, err
		}
		r := w.read(id, exprs)
		if r.match == no {
			continue
		}
		certain, about := sure && r.match == yes, specific || r.specific
		switch r.verdict {
		case "drop", "reject":
			if certain && !w.accepted || about {
				w.report(id, strings.TrimSpace(r.text+" "+r.verdict), certain && !w.accepted)
			}
			if certain {
				return true, nil
			}
		case "accept":
			if certain {
				return true, nil
			}
			w.accepted = true
		case "perhaps": // A map of verdicts, of which some may accept.
			w.accepted = true
		case "return":
			if certain {
				return false, nil
			}
			sure = false
		case "jump", "goto":
			to := nft.ChainID{Family: id.Family, Table: id.Table, Chain: r.to}
			if ours(to) {
				w.accepted = true // It may accept what it masquerades, and refuses only what the plan says.
				continue
			}
			ended, err := w.chain(to, certain, about, depth+1)
			if err != nil || ended {
				return ended, err
			}
			if r.verdict == "goto" {
				if certain {
					return false, nil
				}
				sure = false
			}
		}
	}
	return false, nil
}

// rule is what is understood of a rule.
type rule struct {
	match    match
	specific bool
	verdict  string // empty if it decides nothing
	to       string
	text     string
}

// register is what a rule has loaded: bytes of the packet, or something unknown if they are nil.
type register struct {
	value []byte
	name  string
	// specific says that it is the destination's address or port, and mask what is left of it, unless that is nil.
	specific bool
	mask     []byte
}

// read judges a rule.
func (w *walk) read(id nft.ChainID, exprs []expr.Any) rule {
	out := rule{match: yes}
	regs := map[uint32]register{}
	var words []string
	unknown := func() {
		out.match = min(out.match, maybe)
		if len(words) == 0 || words[len(words)-1] != "…" {
			words = append(words, "…")
		}
	}
	judge := func(holds bool, r register, text string) {
		if !holds {
			out.match = no
		}
		out.specific = out.specific || r.specific
		if text != "" {
			words = append(words, text)
		}
	}
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Meta:
			regs[e.Register] = w.meta(e)
		case *expr.Payload:
			regs[e.DestRegister] = w.payload(e)
		case *expr.Bitwise:
			regs[e.DestRegister] = regs[e.SourceRegister].masked(e)
		case *expr.Cmp:
			r := regs[e.Register]
			if r.value == nil {
				unknown()
				continue
			}
			n := min(len(e.Data), len(r.value))
			judge(compared(e.Op, bytes.Compare(r.value[:n], e.Data[:n])), r, r.text(e.Op, e.Data))
		case *expr.Range:
			r := regs[e.Register]
			if r.value == nil {
				unknown()
				continue
			}
			within := bytes.Compare(r.value, e.FromData) >= 0 && bytes.Compare(r.value, e.ToData) <= 0
			judge(within == (e.Op == expr.CmpOpEq), r, fmt.Sprintf("%s %s-%s", r.name, r.show(e.FromData), r.show(e.ToData)))
		case *expr.Lookup:
			r := regs[e.SourceRegister]
			is, known := false, false
			if r.value != nil && !e.IsDestRegSet {
				is, known = w.rules.Contains(id, e.SetName, r.value)
			}
			if e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT {
				out.verdict = "perhaps"
			} else if e.IsDestRegSet {
				regs[e.DestRegister] = register{}
			}
			if !known {
				out.specific = out.specific || r.specific
				unknown()
				continue
			}
			judge(is != e.Invert, r, r.name+" @"+e.SetName)
		case *expr.Ct:
			if regs[e.Register] = (register{}); e.Key == expr.CtKeySTATE && !e.SourceRegister {
				regs[e.Register] = register{value: binary.NativeEndian.AppendUint32(nil, stateNew)}
			}
		case *expr.Match:
			w.extension(e, judge, unknown)
		case *expr.Verdict:
			out.verdict, out.to = verdicts[e.Kind], e.Chain
		case *expr.Reject:
			out.verdict = "reject"
		case *expr.Target:
			if out.verdict = "accept"; e.Name == "REJECT" {
				out.verdict = "reject"
			} else if nonTerminal[e.Name] {
				out.verdict = ""
			}
		case *expr.NAT, *expr.Masq, *expr.Redir, *expr.Queue:
			out.verdict = "accept"
		case *expr.Counter, *expr.Log, *expr.Immediate:
		default:
			if r, loads := loaded(e); loads {
				regs[r] = register{}
			} else {
				unknown()
			}
		}
		if out.match == no {
			return out
		}
	}
	out.text = sentence(words)
	return out
}

// masked is what a bitwise operation makes of a register.
func (r register) masked(e *expr.Bitwise) register {
	if r.value == nil || len(r.value) != len(e.Mask) {
		r.value = nil
		return r
	}
	out := make([]byte, len(r.value))
	for i := range out {
		out[i] = r.value[i]&e.Mask[i] ^ e.Xor[i]
	}
	r.value = out
	if r.specific {
		r.mask = e.Mask
	}
	return r
}

// sentence joins the words of a rule.
func sentence(words []string) string {
	for _, word := range words { // A port says the protocol.
		if protocol, _, is := strings.Cut(word, " dport "); is {
			words = slices.DeleteFunc(words, func(w string) bool { return w == "meta l4proto "+protocol || w == "ip protocol "+protocol })
			break
		}
	}
	return strings.Join(words, " ")
}

var verdicts = map[expr.VerdictKind]string{
	expr.VerdictDrop: "drop", expr.VerdictAccept: "accept", expr.VerdictReturn: "return", expr.VerdictJump: "jump", expr.VerdictGoto: "goto",
	expr.VerdictQueue: "accept", expr.VerdictStolen: "accept", expr.VerdictStop: "accept",
}

// nonTerminal are targets of iptables behind which a packet goes on.
var nonTerminal = map[string]bool{
	"LOG": true, "NFLOG": true, "ULOG": true, "MARK": true, "CONNMARK": true, "CT": true, "TCPMSS": true, "TRACE": true, "DSCP": true,
	"TOS": true, "TTL": true, "HL": true, "CLASSIFY": true, "SET": true, "AUDIT": true, "CHECKSUM": true, "NOTRACK": true,
}

// loaded returns the register to which an expression writes something that is not known.
func loaded(e expr.Any) (uint32, bool) {
	switch e := e.(type) {
	case *expr.Fib:
		return e.Register, true
	case *expr.Rt:
		return e.Register, true
	case *expr.Socket:
		return e.Register, true
	case *expr.Hash:
		return e.DestRegister, true
	case *expr.Numgen:
		return e.Register, true
	}
	return 0, false
}

func (w *walk) meta(e *expr.Meta) register {
	switch e.Key {
	case expr.MetaKeyL4PROTO:
		return register{value: []byte{w.packet.protocol}, name: "meta l4proto"}
	case expr.MetaKeyNFPROTO:
		return register{value: []byte{nft.Protocol(w.packet.family)}}
	}
	return register{}
}

// payload returns the bytes of the packet that an expression loads.
func (w *walk) payload(e *expr.Payload) register {
	protocolAt, dstAt, name := uint32(9), uint32(16), "ip"
	if w.packet.family == plan.IPv6 {
		protocolAt, dstAt, name = 6, 24, "ip6"
	}
	part := func(of []byte, at uint32) []byte {
		if e.Offset < at || e.Offset+e.Len > at+uint32(len(of)) {
			return nil
		}
		return of[e.Offset-at : e.Offset-at+e.Len]
	}
	switch {
	case e.Base == expr.PayloadBaseNetworkHeader && e.Offset == protocolAt && e.Len == 1:
		return register{value: []byte{w.packet.protocol}, name: name + " protocol"}
	case e.Base == expr.PayloadBaseNetworkHeader && w.packet.dst.IsValid():
		if v := part(w.packet.dst.AsSlice(), dstAt); v != nil {
			return register{value: v, name: name + " daddr", specific: true}
		}
	case e.Base == expr.PayloadBaseTransportHeader:
		if v := part([]byte{byte(w.packet.port >> 8), byte(w.packet.port)}, 2); len(v) == 2 {
			return register{value: v, name: map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[w.packet.protocol] + " dport", specific: true}
		}
	}
	return register{}
}

// extension judges a match of iptables.
func (w *walk) extension(e *expr.Match, judge func(bool, register, string), unknown func()) {
	var src, dst [2]uint16
	plain := false
	switch info := e.Info.(type) {
	case *xt.Comment:
		return
	case *xt.Tcp:
		src, dst, plain = info.SrcPorts, info.DstPorts, info.InvFlags == 0 && info.Option == 0 && info.FlagsMask == 0
	case *xt.Udp:
		src, dst, plain = info.SrcPorts, info.DstPorts, info.InvFlags == 0
	case *xt.ConntrackMtinfo3:
		if info.MatchFlags != matchState {
			unknown()
			return
		}
		judge((info.StateMask&stateNew != 0) == (info.InvertFlags&matchState == 0), register{}, "")
		return
	default:
		if e.Name != "comment" {
			unknown()
		}
		return
	}
	if !plain || src != [2]uint16{0, 0xffff} {
		unknown()
		return
	}
	if dst == [2]uint16{0, 0xffff} {
		return
	}
	text := fmt.Sprintf("%s dport %d", e.Name, dst[0])
	if dst[0] != dst[1] {
		text += fmt.Sprintf("-%d", dst[1])
	}
	judge(dst[0] <= w.packet.port && w.packet.port <= dst[1], register{specific: true}, text)
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
	case strings.HasSuffix(r.name, "dport") && len(data) == 2:
		return strconv.Itoa(int(data[0])<<8 | int(data[1]))
	case strings.HasSuffix(r.name, "daddr"):
		if a, ok := netip.AddrFromSlice(data); ok {
			return a.String()
		}
		if len(data) < 4 { // The beginning of an address of IPv4.
			full := append(slices.Clone(data), make([]byte, 4-len(data))...)
			a, _ := netip.AddrFromSlice(full)
			return fmt.Sprintf("%s/%d", a, 8*len(data))
		}
	case len(data) == 1:
		if p := netlink.ProtocolOf(data[0]); p != "" {
			return p.Lower()
		}
	}
	return fmt.Sprintf("0x%x", data)
}
