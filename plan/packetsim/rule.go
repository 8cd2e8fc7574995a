package packetsim

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
)

// parser reads one rule.
type parser struct {
	family   plan.Family
	sets     map[string]*set
	table    string
	words    []string
	rule     *rule
	protocol string // as given with -p, unless inverted; "" for any
	modules  []loaded
}

// loaded is a match extension that the rule asked for with -m.
type loaded struct {
	name string
	module
}

// module reads the options of a match extension.
type module interface {
	// option reads one option, whose arguments it takes off the parser. It returns false for one that it does not know.
	option(p *parser, name string, not bool) (bool, error)
	// finish returns what the options add up to; nil if that is always true.
	finish(p *parser) (matcher, error)
}

// parseRule reads a rule's words behind "-A CHAIN".
func (rs *Ruleset) parseRule(table string, words []string) (*rule, error) {
	p := &parser{family: rs.family, sets: rs.sets, table: table, words: words, rule: &rule{}}
	for len(p.words) > 0 {
		name := p.next()
		not := name == "!"
		if not {
			name = p.next()
		}
		if err := p.option(name, not); err != nil {
			return nil, err
		}
	}
	for _, l := range p.modules {
		m, err := l.finish(p)
		if err != nil {
			return nil, fmt.Errorf("match %s: %w", l.name, err)
		}
		if m != nil {
			p.rule.matches = append(p.rule.matches, m)
		}
	}
	return p.rule, nil
}

// next takes a word; empty at the end of the rule.
func (p *parser) next() string {
	if len(p.words) == 0 {
		return ""
	}
	w := p.words[0]
	p.words = p.words[1:]
	return w
}

// argument takes the word behind an option.
func (p *parser) argument(option string) (string, error) {
	if len(p.words) == 0 {
		return "", fmt.Errorf("option %s has no value", option)
	}
	return p.next(), nil
}

// rest takes the words up to the next option.
func (p *parser) rest() []string {
	end := slices.IndexFunc(p.words, func(w string) bool { return w == "!" || strings.HasPrefix(w, "-") })
	if end < 0 {
		end = len(p.words)
	}
	taken := p.words[:end]
	p.words = p.words[end:]
	return taken
}

func (p *parser) match(m matcher) { p.rule.matches = append(p.rule.matches, m) }

func (p *parser) option(name string, not bool) error {
	switch name {
	case "-s", "--source", "--src", "-d", "--destination", "--dst":
		return p.address(name, not)
	case "-p", "--protocol", "--proto":
		return p.proto(name, not)
	case "-i", "--in-interface", "-o", "--out-interface":
		value, err := p.argument(name)
		p.match(interfaceMatch{out: strings.TrimLeft(name, "-")[0] == 'o', name: value, not: not})
		return err
	case "-m", "--match":
		value, err := p.argument(name)
		p.load(value)
		return err
	case "-c", "--set-counters":
		p.next()
		p.next()
		return nil
	case "-j", "--jump", "-g", "--goto":
		return p.target(name)
	}
	return p.moduleOption(name, not)
}

// moduleOption looks for a loaded extension that knows the option. The one loaded last comes first.
func (p *parser) moduleOption(name string, not bool) error {
	if !strings.HasPrefix(name, "-") {
		return fmt.Errorf("%q is no option", name)
	}
	isPort := strings.HasSuffix(name, "port")
	hasPorts := slices.ContainsFunc(p.modules, func(l loaded) bool { return l.name == p.protocol })
	if isPort && portProtocols[p.protocol] && !hasPorts {
		p.load(p.protocol) // -p loads the protocol's own match as soon as an option asks for it
	}
	for _, l := range slices.Backward(p.modules) {
		if known, err := l.option(p, name, not); known || err != nil {
			return err
		}
	}
	p.match(unknownMatch{strings.Join(append([]string{"option", name}, p.rest()...), " ")})
	return nil
}

// load begins a match extension. One that is not known makes the rule one that can't be traced.
func (p *parser) load(name string) {
	if create, ok := modules[name]; ok {
		p.modules = append(p.modules, loaded{name, create(name)})
		return
	}
	p.match(unknownMatch{"match " + name})
}

func (p *parser) address(option string, not bool) error {
	value, err := p.argument(option)
	if err != nil {
		return err
	}
	prefix, err := parsePrefix(value)
	if err != nil {
		return fmt.Errorf("option %s: %w", option, err)
	}
	if plan.FamilyOf(prefix.Addr()) != p.family {
		return fmt.Errorf("option %s: %s is not an %s address", option, value, p.family)
	}
	p.match(addressMatch{dst: strings.TrimLeft(option, "-")[0] == 'd', prefix: prefix, not: not})
	return nil
}

// parsePrefix reads an address or a range; as in iptables, the bits behind the prefix do not matter.
func parsePrefix(text string) (netip.Prefix, error) {
	if !strings.Contains(text, "/") {
		a, err := netip.ParseAddr(text)
		return netip.PrefixFrom(a, a.BitLen()), err
	}
	prefix, err := netip.ParsePrefix(text)
	return prefix.Masked(), err
}

// protocols are the names for protocol numbers that iptables-save may print.
var protocols = map[string]string{
	"0": "all", "1": "icmp", "6": "tcp", "17": "udp", "58": "ipv6-icmp", "icmpv6": "ipv6-icmp", "132": "sctp",
}

func (p *parser) proto(option string, not bool) error {
	value, err := p.argument(option)
	if err != nil {
		return err
	}
	value = strings.ToLower(value)
	if name, ok := protocols[value]; ok {
		value = name
	}
	if value == "all" {
		if not {
			return errors.New("no packet has a protocol that is not all")
		}
		return nil
	}
	if !not {
		p.protocol = value
	}
	p.match(protocolMatch{name: value, not: not})
	return nil
}
