package restore

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// origin is where something was found, and how it was written.
type origin struct {
	line int // from 1; 0 for none
	text string
}

func (o origin) String() string {
	if o.line == 0 {
		return o.text
	}
	return fmt.Sprintf("line %d: %s", o.line, o.text)
}

// Text is how it was written.
func (o origin) Text() string { return o.text }

// eachLine reads the lines of a text that are neither empty nor comments. Errors say what the text is of.
func eachLine(m *packetsim.Machine, what, text string, read func(origin) error) error {
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if err := read(origin{i + 1, line}); err != nil {
			return fmt.Errorf("%s %s, line %d: %w: %.300s", m.Family, what, i+1, err, line)
		}
	}
	return nil
}

// Words divides a line into words as iptables-restore does: at white space, except within double quotes, in which a
// backslash takes the next character as it is. It returns an error if a quotation does not end.
func Words(line string) ([]string, error) {
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

// portProtocols are the protocols whose own match has ports.
var portProtocols = []string{"tcp", "udp", "sctp"}

// parseProtocol reads a protocol's name or number.
func parseProtocol(text string) string {
	text = strings.ToLower(text)
	if name, ok := protocols[text]; ok {
		return name
	}
	return text
}

// parsePrefix reads an address or a range. As in iptables, the bits behind the prefix do not matter.
func parsePrefix(text string, f plan.Family) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(text)
	if !strings.Contains(text, "/") {
		var a netip.Addr
		a, err = netip.ParseAddr(text)
		prefix = netip.PrefixFrom(a, a.BitLen())
	}
	if err == nil && plan.FamilyOf(prefix.Addr()) != f {
		err = fmt.Errorf("%s is not an %s address", text, f)
	}
	return prefix.Masked(), err
}

// parsePorts reads "port", "first:last", ":last" or "first:".
func parsePorts(text string) (plan.PortRange, error) {
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	if isRange && first == "" {
		first = "0"
	}
	if isRange && last == "" {
		last = "65535"
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
