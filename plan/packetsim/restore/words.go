package restore

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// Option is an option of a rule of iptables.
type Option struct {
	Name   string
	Not    bool // It stands behind an exclamation mark.
	Values []string
}

// Options divides a rule, without its chain, into its options. The values of an option go up to the next word that begins with a dash or is an
// exclamation mark, but for the text of a comment. Those of -j and -g are the rest of the rule: the target and its options. The error is that a
// quotation does not end.
func Options(rule string) ([]Option, error) {
	words, err := splitWords(rule)
	return divide(words), err
}

func divide(words []string) (out []Option) {
	for len(words) > 0 {
		o := Option{Name: words[0]}
		if o.Not = o.Name == "!" && len(words) > 1; o.Not {
			words = words[1:]
			o.Name = words[0]
		}
		n := 1
		for n < len(words) && (o.Name == "-j" || o.Name == "-g" || o.Name == "--comment" && n == 1 || words[n] != "!" && !strings.HasPrefix(words[n], "-")) {
			n++
		}
		o.Values, words = words[1:n:n], words[n:]
		out = append(out, o)
	}
	return out
}

// splitWords divides a line into words as iptables-restore does: at white space, except within double quotes, in which a
// backslash takes the next character as it is. It returns an error if a quotation does not end.
func splitWords(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	inWord, quoted, escaped := false, false, false
	for _, c := range []byte(line + " ") {
		switch {
		case escaped:
			word.WriteByte(c)
			escaped = false
		case quoted && c == '\\':
			escaped = true
		case c == '"':
			quoted, inWord = !quoted, true
		case quoted || c != ' ' && c != '\t':
			word.WriteByte(c)
			inWord = true
		case inWord:
			words = append(words, word.String())
			word.Reset()
			inWord = false
		}
	}
	if quoted {
		return nil, errors.New("a quotation does not end")
	}
	return words, nil
}

// protocols are the names for protocol numbers that iptables-save may print.
var protocols = map[string]string{
	"0": "all", "1": "icmp", "6": "tcp", "17": "udp", "58": "ipv6-icmp", "icmpv6": "ipv6-icmp", "132": "sctp",
}

// parseProtocol reads a protocol's name or number.
func parseProtocol(text string) string {
	text = strings.ToLower(text)
	if name, ok := protocols[text]; ok {
		return name
	}
	return text
}

// ParsePrefix reads an address or a range. As in iptables, the bits behind the prefix do not matter.
func ParsePrefix(text string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(text)
	if !strings.Contains(text, "/") {
		var a netip.Addr
		a, err = netip.ParseAddr(text)
		prefix = netip.PrefixFrom(a, a.BitLen())
	}
	return prefix.Masked(), err
}

// ParsePorts reads "port" or "first:last".
func ParsePorts(text string) (plan.PortRange, error) {
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	lo, errLo := strconv.ParseUint(first, 10, 16)
	hi, errHi := strconv.ParseUint(last, 10, 16)
	if err := errors.Join(errLo, errHi); err != nil {
		return plan.PortRange{}, fmt.Errorf("%q is no port or range of ports", text)
	}
	return plan.PortRange{First: uint16(lo), Last: uint16(hi)}, nil
}

// ParseMark reads "value" or "value/mask", in any base that C knows; without a mask, it has all bits.
func ParseMark(text string) (value, mask uint32, err error) {
	left, right, hasMask := strings.Cut(text, "/")
	if !hasMask {
		right = "0xffffffff"
	}
	v, errV := strconv.ParseUint(left, 0, 32)
	m, errM := strconv.ParseUint(right, 0, 32)
	if err := errors.Join(errV, errM); err != nil {
		return 0, 0, fmt.Errorf("%q is no mark", text)
	}
	return uint32(v), uint32(m), nil
}

// tcpFlags are the names that flags of TCP have in rules.
var tcpFlags = map[string]byte{"FIN": 1, "SYN": 2, "RST": 4, "PSH": 8, "ACK": 16, "URG": 32, "ALL": 63, "NONE": 0}

// ParseTCPFlags reads the two lists of --tcp-flags: which flags are looked at, and which of them are to be set.
func ParseTCPFlags(lists []string) (mask, set byte, err error) {
	var bits [2]byte
	for i := range min(len(lists), len(bits)) {
		for name := range strings.SplitSeq(lists[i], ",") {
			bit, known := tcpFlags[name]
			if !known {
				return 0, 0, fmt.Errorf("there is no TCP flag %q", name)
			}
			bits[i] |= bit
		}
	}
	return bits[0], bits[1], nil
}
