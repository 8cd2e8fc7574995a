package blocking

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// judgement collects what the parts of a rule say about a packet.
type judgement struct {
	packet *packet
	rule
	words []string
	// limited says that it asks for a rate, and unknowns are how many of its parts may hold or not.
	limited  bool
	unknowns int
}

func judging(p *packet) judgement { return judgement{packet: p, rule: rule{match: yes}} }

// holds adds what is known: whether a part of the rule holds, and its text, which may be empty.
func (j *judgement) holds(is bool, text string) {
	if !is {
		j.match = no
	}
	if text != "" {
		j.words = append(j.words, text)
	}
}

// unknown adds a part of which it is not known whether it holds, and its text, which may be empty.
func (j *judgement) unknown(text string) {
	j.match = min(j.match, maybe)
	j.unknowns++
	if text = cmp.Or(text, "…"); len(j.words) == 0 || j.words[len(j.words)-1] != text {
		j.words = append(j.words, text)
	}
}

// depends adds a part that holds, does not, or may.
func (j *judgement) depends(m match, invert bool, text string) {
	if m == maybe {
		j.unknown(text)
		return
	}
	j.holds((m == yes) != invert, text)
}

// result is the judgement of the whole rule.
func (j *judgement) result() rule {
	j.specific = j.specific || j.limited && j.unknowns == 1 // Else other traffic is meant.
	j.text = sentence(j.words)
	return j.rule
}

// portsText is a range of ports as nft prints it.
func portsText(r plan.PortRange) string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return r.String()
}

// ports adds that the port of one side, of which word is the name, is one of some.
func (j *judgement) ports(s side, word string, list []plan.PortRange, invert bool) {
	within := false
	var texts []string
	for _, r := range list {
		within = within || r.Contains(s.port)
		texts = append(texts, portsText(r))
	}
	text := strings.Join(texts, ",")
	if len(list) > 1 {
		text = "{ " + strings.Join(texts, ", ") + " }"
	}
	text = protocolName(j.packet.protocol) + " " + word + " " + not(invert) + text
	if !s.known {
		j.unknown(text)
		return
	}
	j.specific = true
	j.holds(within != invert, text)
}

func not(invert bool) string {
	if invert {
		return "!= "
	}
	return ""
}

// addresses adds that the address of the source, or of the destination, is within a range.
func (j *judgement) addresses(dst bool, within netip.Prefix, invert bool) {
	j.masked(j.packet.address(dst), maskOf(within), within.Addr().AsSlice(), invert)
}

// first adds that the connection's first packet went to a destination for which is holds.
func (j *judgement) first(is func(netip.AddrPort) match, invert bool, text string) {
	all, any := yes, no
	for _, a := range j.packet.first {
		m := is(a)
		all, any = min(all, m), max(any, m)
	}
	j.specific = true
	switch {
	case len(j.packet.first) == 0 || all != any:
		j.depends(maybe, invert, text)
	default:
		j.depends(all, invert, text)
	}
}

// firstTo adds that the connection's first packet went to addresses.
func (j *judgement) firstTo(within netip.Prefix, invert bool) {
	j.first(func(a netip.AddrPort) match {
		if !a.Addr().IsValid() {
			return maybe
		}
		return matches(within.Contains(a.Addr()))
	}, invert, fmt.Sprintf("ct original daddr %s%s", not(invert), within))
}

// firstToPort adds that the connection's first packet went to a port.
func (j *judgement) firstToPort(ports plan.PortRange, invert bool) {
	j.first(func(a netip.AddrPort) match { return matches(ports.Contains(a.Port())) }, invert,
		fmt.Sprintf("ct original proto-dst %s%s", not(invert), portsText(ports)))
}

func matches(is bool) match {
	if is {
		return yes
	}
	return no
}

// States of connections, as the bits by which xt_conntrack asks for them. The packets here begin connections, or answer on one.
const (
	stateInvalid     = 1 << 0
	stateEstablished = 1 << 1
	stateRelated     = 1 << 2
	stateNew         = 1 << 3
	stateSNAT        = 1 << 6
	stateDNAT        = 1 << 7
)

// state is the state of the packet's connection.
func (p *packet) state() uint16 {
	switch {
	case p.untracked:
		return stateInvalid
	case p.icmp:
		return stateRelated
	case p.answer:
		return stateEstablished
	}
	return stateNew
}

// inState adds that the connection is in one of some states.
func (j *judgement) inState(mask uint16, invert bool) {
	m := no
	switch {
	case mask&j.packet.state() != 0:
		m = yes
	case mask&stateDNAT != 0 && j.packet.dnat != no:
		m = j.packet.dnat
	case mask&stateSNAT != 0:
		m = maybe
	}
	j.depends(m, invert, "")
}

// tcpFlags is the register with the flags of a packet of TCP: the first one of a connection has SYN alone. Those of answers are not known, as they
// are several.
func (p *packet) tcpFlags() register {
	reg := register{name: "tcp flags"}
	if p.protocol == unix.IPPROTO_TCP && !p.answer {
		const flagSYN = 1 << 1
		reg.value = []byte{flagSYN}
	}
	return reg
}

// The type and code of ICMP that say a packet was too long (RFC 1191), and the type that stands for any in rules of iptables.
const (
	icmpUnreachable = 3
	icmpTooLong     = 4
	icmpAny         = 0xff
)

// icmp adds that the packet is of a type of ICMP and has a code in a range.
func (j *judgement) icmp(kind byte, codes [2]byte, invert bool) {
	text := fmt.Sprintf("icmp type %s%d", not(invert), kind)
	if kind == icmpAny {
		text = ""
	} else if codes[0] == codes[1] {
		text += fmt.Sprintf(" code %d", codes[0])
	}
	m := maybe
	if j.packet.icmp {
		m = matches(kind == icmpAny || kind == icmpUnreachable && codes[0] <= icmpTooLong && icmpTooLong <= codes[1])
	}
	j.specific = j.specific || j.packet.icmp
	j.depends(m, invert, text)
}

// Types of addresses, as in rtnetlink.
const (
	typeUnicast = 1
	typeLocal   = 2
)

// toType adds that the destination is of one of some types, of which mask has the bits.
func (j *judgement) toType(mask uint16, invert bool) {
	m := maybe
	text := "fib daddr type " + not(invert) + "local"
	switch {
	case j.packet.here == yes:
		m = matches(mask&(1<<typeLocal) != 0)
	case j.packet.here == no && mask == 1<<typeLocal:
		m = no
	}
	if mask != 1<<typeLocal {
		text = ""
	}
	j.depends(m, invert, text)
}

// target is a target of iptables with those of its options that matter.
type target struct {
	name    string
	other   end        // what it does if it is none that is known
	notrack bool       // of CT
	port    uint16     // to which REDIRECT leads
	addr    netip.Addr // to which SNAT or DNAT translates, if that is a single one
	// MARK clears some bits of the mark, and then inverts others, or it is not known which.
	clears, inverts uint32
	forgets         bool
	restores        uint32 // the bits of the mark that CONNMARK takes from the connection's
}

// translating are targets of iptables that translate an address.
var translating = []string{"SNAT", "DNAT", "MASQUERADE", "REDIRECT", "NETMAP"}

// nonTerminal are other targets of iptables behind which a packet goes on, and no known bits of its mark change.
var nonTerminal = strings.Fields("LOG NFLOG ULOG CONNMARK CT TCPMSS TRACE DSCP TOS TTL HL CLASSIFY SET AUDIT CHECKSUM")

// target adds what a target of iptables does.
func (j *judgement) target(t target) {
	j.restores = t.restores
	j.clamps = j.clamps || t.name == "TCPMSS"
	switch {
	case t.name == "NOTRACK", t.notrack:
		j.ends = []end{{verdict: notrack}}
	case slices.Contains([]string{"DROP", "REJECT", "ACCEPT", "RETURN"}, t.name):
		j.ends = []end{{verdict: strings.ToLower(t.name)}}
	case slices.Contains([]string{"NFQUEUE", "TPROXY", "SYNPROXY"}, t.name):
		j.ends = []end{{verdict: "accept"}}
	case slices.Contains(translating, t.name):
		j.ends = []end{{verdict: translates, to: t.name, port: t.port, addr: t.addr}}
	case t.forgets || t.restores != 0:
		j.setMark(j.packet.mark.forget(cmp.Or(t.restores, unmarked.known)))
	case t.name == "MARK":
		j.setMark(ofMark(j.packet.mark).masked(inRegister(^t.clears), inRegister(t.inverts)).mark())
	case !slices.Contains(nonTerminal, t.name):
		j.ends = []end{t.other}
	}
}
