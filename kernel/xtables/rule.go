package xtables

import (
	"math"
	"net/netip"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// Rule builds the text of one rule. Its methods must be called in the order in which they stand here, which is that of
// iptables-save; what follows a comment is in the order of the calls.
type Rule struct{ b []byte }

// Word adds words as they are.
func (r *Rule) Word(words ...string) *Rule {
	for _, w := range words {
		r.b = append(r.next(), w...)
	}
	return r
}

// next returns the rule as far as it is built, for another word to be appended.
func (r *Rule) next() []byte {
	if len(r.b) > 0 {
		return append(r.b, ' ')
	}
	return r.b
}

// NewRule returns a rule without any words.
func NewRule() *Rule { return new(Rule).Begin() }

// Begin makes r a rule without any words. Texts of what it was before stay as they are.
func (r *Rule) Begin() *Rule {
	if r.b == nil {
		r.b = make([]byte, 0, 256)
	}
	r.b = r.b[:0]
	return r
}

// Text returns the rule as far as it is built.
func (r *Rule) Text() string { return string(r.b) }

// Src matches packets from a range of addresses. For the range of all addresses, iptables-save prints nothing, and nor does Src.
func (r *Rule) Src(p netip.Prefix) *Rule { return r.within("-s", p) }

// Dst matches packets to a range of addresses.
func (r *Rule) Dst(p netip.Prefix) *Rule { return r.within("-d", p) }

// NotSrc matches packets from outside of a range, which must not be that of all addresses: nf_tables refuses a rule that matches nothing.
func (r *Rule) NotSrc(p netip.Prefix) *Rule { return r.Word("!", "-s").prefix(p) }

// NotDst matches packets to outside of a range, as NotSrc does.
func (r *Rule) NotDst(p netip.Prefix) *Rule { return r.Word("!", "-d").prefix(p) }

func (r *Rule) within(option string, p netip.Prefix) *Rule {
	if p.Bits() == 0 {
		return r
	}
	return r.Word(option).prefix(p)
}

func (r *Rule) prefix(p netip.Prefix) *Rule {
	r.b = p.AppendTo(r.next())
	return r
}

// CTStateDNAT is the option by which a rule matches connections that DNAT has sent elsewhere than their first packet went to.
const CTStateDNAT = "--ctstate DNAT"

// ConnectedTo matches connections whose first packet went to a range of addresses, and that DNAT has sent elsewhere.
func (r *Rule) ConnectedTo(p netip.Prefix) *Rule {
	to := p.String()
	if p.IsSingleIP() {
		to = p.Addr().String()
	}
	return r.Word("-m", "conntrack", CTStateDNAT, "--ctorigdst", to)
}

// DstIP matches packets to an address.
func (r *Rule) DstIP(a netip.Addr) { r.Dst(Single(a)) }

// Proto matches the protocol. A match on its ports must follow (Port).
func (r *Rule) Proto(p plan.Protocol) *Rule { return r.Word("-p", p.Lower()) }

// maxComment is how many bytes of a comment the kernel keeps.
const maxComment = 255

// Comment adds a comment. The text is escaped as iptables-save escapes it: it is data, wherever it comes from.
func (r *Rule) Comment(text string) *Rule {
	r.Word("-m", "comment", "--comment")
	r.b = appendQuoted(r.next(), text[:min(len(text), maxComment)])
	return r
}

// Port matches the destination port.
func (r *Rule) Port(p plan.Protocol, port uint16) *Rule {
	r.Word("-m", p.Lower(), "--dport")
	r.b = strconv.AppendUint(r.next(), uint64(port), 10)
	return r
}

// DstLocal matches packets to addresses of the node.
func (r *Rule) DstLocal() *Rule { return r.Word("-m", "addrtype", "--dst-type", "LOCAL") }

// SrcLocal matches packets from addresses of the node.
func (r *Rule) SrcLocal() *Rule { return r.Word("-m", "addrtype", "--src-type", "LOCAL") }

// OneIn matches a share of all packets, at random. The kernel counts in 2^-31.
func (r *Rule) OneIn(share float64) {
	units := math.Round(share * (1 << 31))
	r.Word("-m", "statistic", "--mode", "random", "--probability")
	r.b = strconv.AppendFloat(r.next(), units/(1<<31), 'f', 11, 64)
}

// Jump ends the rule: where it matches, a chain is walked, and the walk goes on behind this rule if nothing there decides.
func (r *Rule) Jump(target string) string { return r.Word("-j", target).Text() }

// GoTo ends the rule like Jump, but does not come back to this chain: what is not decided there goes on in the caller's.
func (r *Rule) GoTo(target string) string { return r.Word("-g", target).Text() }

// DNAT ends the rule: what it matches goes to an endpoint.
func (r *Rule) DNAT(to netip.AddrPort) string {
	r.Word("-j", "DNAT", "--to-destination")
	r.b = to.AppendTo(r.next())
	return r.Text()
}

// Single is the range of one address.
func Single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// appendQuoted appends a string as iptables-save spells it: bare where it has only letters, digits, underscores and hyphens, else in
// double quotes, with quotes and backslashes escaped. Control characters would end the line; they become spaces.
func appendQuoted(b []byte, s string) []byte {
	bare := s != ""
	for _, c := range []byte(s) {
		bare = bare && (c == '_' || c == '-' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z')
	}
	if bare {
		return append(b, s...)
	}
	b = append(b, '"')
	for _, c := range []byte(s) {
		switch {
		case c < ' ' || c == 0x7f:
			c = ' '
		case c == '"' || c == '\'' || c == '\\':
			b = append(b, '\\')
		}
		b = append(b, c)
	}
	return append(b, '"')
}

// Target is where a rule leads; empty if to nowhere.
func Target(rule string) string {
	for end := len(rule); ; {
		i := strings.LastIndexByte(rule[:end], '-')
		if i < 0 {
			return ""
		}
		if word := rule[i:]; (i == 0 || rule[i-1] == ' ') && (strings.HasPrefix(word, "-j ") || strings.HasPrefix(word, "-g ")) {
			target, _, _ := strings.Cut(word[len("-j "):], " ")
			return target
		}
		end = i
	}
}
