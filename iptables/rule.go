package iptables

import (
	"math"
	"net/netip"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// A chain is a chain's name and its rules in order. Rules are in the form in which iptables-save prints them, without
// the leading "-A CHAIN ": so what the kernel holds can be compared with what it should hold as text.
type chain struct {
	name  string
	rules []string
}

// rule builds the text of one rule. Its methods must be called in the order in which they stand here, which is that of
// iptables-save; what follows a comment is in the order of the calls.
type rule struct{ b strings.Builder }

func (r *rule) word(words ...string) *rule {
	for _, w := range words {
		if r.b.Len() > 0 {
			r.b.WriteByte(' ')
		}
		r.b.WriteString(w)
	}
	return r
}

func newRule() *rule { return &rule{} }

// src and dst match an address or range; iptables-save prints nothing for the range of all addresses. not inverts, and is not
// for that range: what would match nothing is no rule (nf_tables takes none).
func (r *rule) src(p netip.Prefix) *rule    { return r.within("-s", p) }
func (r *rule) dst(p netip.Prefix) *rule    { return r.within("-d", p) }
func (r *rule) notSrc(p netip.Prefix) *rule { return r.word("!", "-s", p.String()) }
func (r *rule) notDst(p netip.Prefix) *rule { return r.word("!", "-d", p.String()) }

func (r *rule) within(option string, p netip.Prefix) *rule {
	if p.Bits() == 0 {
		return r
	}
	return r.word(option, p.String())
}

// connectedTo matches connections whose first packet went to a range of addresses, and that DNAT has sent elsewhere.
func (r *rule) connectedTo(p netip.Prefix) *rule {
	to := p.String()
	if p.IsSingleIP() {
		to = p.Addr().String()
	}
	return r.word("-m", "conntrack", ctDNAT, "--ctorigdst", to)
}

func (r *rule) dstIP(a netip.Addr) { r.dst(single(a)) }

// proto matches the protocol. A match on its ports must follow (port).
func (r *rule) proto(p plan.Protocol) *rule { return r.word("-p", p.Lower()) }

// maxComment is how many bytes of a comment the kernel keeps.
const maxComment = 255

// comment adds a comment. The text is escaped as iptables-save escapes it: it is data, wherever it comes from.
func (r *rule) comment(text string) *rule {
	return r.word("-m", "comment", "--comment", quote(text[:min(len(text), maxComment)]))
}

// port matches the destination port.
func (r *rule) port(p plan.Protocol, port uint16) *rule {
	return r.word("-m", p.Lower(), "--dport", strconv.Itoa(int(port)))
}

func (r *rule) dstLocal() *rule { return r.word("-m", "addrtype", "--dst-type", "LOCAL") }
func (r *rule) srcLocal() *rule { return r.word("-m", "addrtype", "--src-type", "LOCAL") }

// oneIn matches one packet of n, at random. The kernel counts in 2^-31.
func (r *rule) oneIn(share float64) {
	units := math.Round(share * (1 << 31))
	r.word("-m", "statistic", "--mode", "random", "--probability", strconv.FormatFloat(units/(1<<31), 'f', 11, 64))
}

// jump ends the rule: where it matches, chain is walked, and the walk goes on behind this rule if nothing there decides.
func (r *rule) jump(target string) string { return r.word("-j", target).b.String() }

// goTo ends the rule like jump, but does not come back to this chain: what is not decided there goes on in the caller's.
func (r *rule) goTo(target string) string { return r.word("-g", target).b.String() }

// single is the range of one address.
func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// quote spells a string as iptables-save does: bare where it has only letters, digits, underscores and hyphens, else in
// double quotes, with quotes and backslashes escaped. Control characters would end the line; they become spaces.
func quote(s string) string {
	bare := s != ""
	for _, c := range []byte(s) {
		bare = bare && (c == '_' || c == '-' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z')
	}
	if bare {
		return s
	}
	var b strings.Builder
	b.WriteByte('"')
	for _, c := range []byte(s) {
		switch {
		case c < ' ' || c == 0x7f:
			c = ' '
		case c == '"' || c == '\'' || c == '\\':
			b.WriteByte('\\')
		}
		b.WriteByte(c)
	}
	b.WriteByte('"')
	return b.String()
}
